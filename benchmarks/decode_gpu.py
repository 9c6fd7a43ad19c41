"""Drafts on a GPU, in one command: the text is the target's own, and what each draft makes a second.

    python -m benchmarks.decode_gpu [--out FILE] [--parts tests,greedy_float32,growing,speed]

Four parts, each written to the record before the next begins: the tests that need a GPU (a CUDA graph holds the tree
builder, its mask and the walk; the step runs there); greedy float32 texts of the bundled pair under every draft, alone
and at once, against plain decoding; `nodes: auto` against fixed budgets (`decoding_growing`); and
`python -m engine bench --decode`, chains and plain decoding also as captured graphs. A part that fails stands in the
record with its error, the next one runs, and the status is 1. The record is benchmarks/results/decode_cuda.json.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, bundled_prompts, passing_tests, write
from benchmarks.decoding import decode, differences, in_batches
from benchmarks.decoding_growing import compared
from engine.bench import DECODE_CONCURRENCY, DECODE_DRAFTS, bench, decode_configs
from engine.config import BUNDLED, EngineConfig
from engine.runtime import resolve
from engine.start import AnyLoop, build_any, loop_of

PROMPTS, TOKENS = 6, 48
BENCH_TOKENS, REPEATS = 64, 5
CHAIN = DECODE_DRAFTS["dflash"]
TEXTS = DECODE_DRAFTS | {"ddtree 16, 31 nodes": {"kind": "ddtree", "block_size": 16, "nodes": 31}}
CHAINS = {
    "none": DECODE_DRAFTS["none"],
    "dflash": CHAIN,
    "policy of chains": {"kind": "policy", "by_running": [[1, 7, CHAIN], [8, None, {"kind": "none"}]]},
}
GRAPHS = {"kind": "captured", "batch_sizes": [1, 4, 16]}


def tests() -> dict[str, Any]:
    """Run what is marked for CUDA in the decoding tests."""
    return passing_tests("-m", "cuda", "tests/engine/test_tree.py", "tests/engine/test_speculate.py")


def greedy() -> dict[str, Any]:
    """Compare texts in float32 under every draft of the bench, a wide tree beside them, with plain decoding."""
    prompts = bundled_prompts()[:PROMPTS]
    expected = decode(_loop({"kind": "none"}), prompts, [TOKENS] * PROMPTS)
    found, wrong = {}, []
    for name, draft in TEXTS.items():
        loop = _loop(draft)
        together = decode(loop, prompts, [TOKENS] * PROMPTS)
        alone = list(in_batches(loop, prompts[:2], TOKENS, 1))
        unequal = differences(together, expected) + differences(alone, expected[:2])
        wrong += [f"{name}: {each}" for each in unequal]
        rounds = sum(each.rounds for each in together)
        found[name] = {"differences": unequal, "tokens_per_round": round(PROMPTS * (TOKENS - 1) / rounds, 2)}
    assert not wrong, f"texts that are not plain decoding's: {wrong}"
    return found


def growing() -> dict[str, Any]:
    """Compare trees that grow by measured costs with fixed budgets, by requests."""
    found = {}
    for count in DECODE_CONCURRENCY:
        found[str(count)] = compared(count)
        print(count, found[str(count)], flush=True)
    slow = [count for count, figures in found.items() if not figures["holds"]]
    return found | ({"failed": f"slower than the best fixed budget at {', '.join(slow)} requests"} if slow else {})


def speed() -> dict[str, Any]:
    """Time every draft of `bench --decode`, eager as there; and captured those that can be."""
    captured = {
        f"{name}, captured": EngineConfig.model_validate(
            {"model": {"target": BUNDLED}, "draft": draft, "graphs": GRAPHS}
        )
        for name, draft in CHAINS.items()
    }
    return bench(decode_configs() | captured, bundled_prompts(), DECODE_CONCURRENCY, BENCH_TOKENS, REPEATS)


def _loop(draft: dict[str, Any]) -> AnyLoop:
    document = {"model": {"target": BUNDLED, "dtype": "float32"}, "draft": draft}
    return loop_of(build_any(resolve(EngineConfig.model_validate(document))))


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "tests": tests,
    "greedy_float32": greedy,
    "growing": growing,
    "speed": speed,
}


def main() -> int:
    """Do all parts; exit status 1 when one of them fails or a text differs, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "decode_cuda.json")
    parser.add_argument("--parts", default=",".join(PARTS))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: run it on a machine with an NVIDIA GPU", file=sys.stderr)
        return 2
    record: dict[str, Any] = {}
    for name in arguments.parts.split(","):
        began = time.monotonic()
        try:
            record[name] = PARTS[name]()
        except Exception as error:
            traceback.print_exc()
            record[name] = {"failed": f"{type(error).__name__}: {error}"}
        print(f"{name}: {time.monotonic() - began:.0f} s {record[name].get('failed', '')}", flush=True)
        write(arguments.out, record)
    for name, report in record.get("speed", {}).get("configs", {}).items():
        levels = {level["concurrency"]: round(level["tok_s_p50"]) for level in report["levels"]}
        print(f"{name:26} tok/s by requests: {levels}")
    return 1 if any("failed" in part for part in record.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
