"""Drafts on a GPU, in one command: the text is the target's own, and what each draft makes a second.

    python -m benchmarks.decode_gpu

Three parts: the tests that need a GPU (a CUDA graph holds the tree builder, its mask and the walk; the step runs
there); greedy float32 texts of the bundled pair under every draft, alone and at once, against plain decoding; and
`python -m engine bench --decode`. The record is benchmarks/results/decode_cuda.json. About a minute.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks.common import RESULTS, bundled_prompts, passing_tests, write
from benchmarks.decoding import decode, differences, in_batches, loop_of
from engine.bench import DECODE_CONCURRENCY, DECODE_DRAFTS, bench, decode_configs
from engine.config import BUNDLED

PROMPTS, TOKENS = 6, 48
BENCH_TOKENS, REPEATS = 64, 3


def tests() -> dict[str, Any]:
    """Run what is marked for CUDA in the decoding tests."""
    return passing_tests("-q", "-m", "cuda", "tests/engine/test_tree.py", "tests/engine/test_speculate.py")


def greedy() -> dict[str, Any]:
    """Compare texts in float32 under every draft of the bench, a wide tree beside them, with plain decoding."""
    prompts = bundled_prompts()[:PROMPTS]
    expected = decode(loop_of(BUNDLED, {"kind": "none"}), prompts, [TOKENS] * PROMPTS)
    drafts = DECODE_DRAFTS | {"ddtree 16, 31 nodes": {"kind": "ddtree", "block_size": 16, "nodes": 31}}
    found = {}
    for name, draft in drafts.items():
        loop = loop_of(BUNDLED, draft)
        together = decode(loop, prompts, [TOKENS] * PROMPTS)
        alone = list(in_batches(loop, prompts[:2], TOKENS, 1))
        rounds = sum(each.rounds for each in together)
        found[name] = {
            "differences": differences(together, expected) + differences(alone, expected[:2]),
            "tokens_per_round": round(PROMPTS * (TOKENS - 1) / rounds, 2) if rounds else None,
        }
    return found


def main() -> int:
    """Do all parts; exit status 1 when a text differs or a test fails."""
    if not torch.cuda.is_available():
        print("no CUDA device: run it on a machine with an NVIDIA GPU", file=sys.stderr)
        return 2
    texts = greedy()
    timed = bench(decode_configs(), bundled_prompts(), DECODE_CONCURRENCY, BENCH_TOKENS, REPEATS)
    ran = tests()
    write(RESULTS / "decode_cuda.json", {"tests": ran, "greedy_float32": texts} | timed)
    for name, report in timed["configs"].items():
        levels = {level["concurrency"]: round(level["tok_s_p50"]) for level in report["levels"]}
        print(f"{name:8} tok/s by requests: {levels}")
    wrong = {name: each["differences"] for name, each in texts.items() if each["differences"]}
    print(f"texts that differ from plain decoding: {wrong or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
