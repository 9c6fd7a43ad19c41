"""The engine's proof: equality with Transformers and with no speculation, counters, speed, start, robustness."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import torch

from benchmarks.common import ROOT, bundled_prompts, greedy_by_transformers, passing_tests
from benchmarks.decoding import loop_of
from engine.bench import run_requests
from engine.config import BUNDLED, bundled, target_folder

BLOCKS = (2, 4, 6, 8, 12, 16)
DEPTHS = (1, 2, 3, 4)
TOKENS = 64


def mixed(count: int) -> list[tuple[int, ...]]:
    """Return bundled prompts cut to mixed lengths, 6 to 96 tokens."""
    return [prompt[: 6 + (i * 13) % 91] for i, prompt in enumerate(bundled_prompts()[:count])]


def equals_transformers() -> dict[str, Any]:
    """Greedy text in float32 on 20 bundled prompts."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target_folder(bundled()), dtype=torch.float32).eval()
    prompts = bundled_prompts()[:20]
    loop = loop_of(BUNDLED, {"kind": "none"})
    made = run_requests(loop, prompts[:16], TOKENS).outputs + run_requests(loop, prompts[16:], TOKENS).outputs
    for prompt, text in zip(prompts, made, strict=True):
        expected = greedy_by_transformers(model, prompt, TOKENS)
        assert list(text) == expected, f"prompt {prompt[:8]}… differs from Transformers"
    return {"prompts": len(prompts), "tokens": TOKENS}


def dflash_equals_none() -> dict[str, Any]:
    """Every block × depth in float32: 16 mixed lengths in one batch, and alone."""
    prompts = mixed(16)
    expected = run_requests(loop_of(BUNDLED, {"kind": "none"}), prompts, TOKENS).outputs
    lengths = {}
    for block, depth in itertools.product(BLOCKS, DEPTHS):
        loop = loop_of(BUNDLED, {"kind": "dflash", "block_size": block, "layers": depth})
        assert run_requests(loop, prompts, TOKENS).outputs == expected, f"block {block} depth {depth}: batch differs"
        for prompt, text in zip(prompts, expected, strict=True):
            alone = run_requests(loop, [prompt], TOKENS).outputs[0]
            assert alone == text, f"block {block} depth {depth}: a request alone differs"
        lengths[f"{block}x{depth}"] = loop.stats().acceptance["accept_length"]
    return {"combinations": len(lengths), "requests": 16, "tokens": TOKENS, "accept_length": lengths}


def unit_tests() -> dict[str, Any]:
    """The engine's test files, which hold the family, counter, failure, HTTP and client claims."""
    return passing_tests("tests/engine")


def fuzz() -> dict[str, Any]:
    """10,000 malformed requests: no crash, no 5xx without a cause, memory flat."""
    from benchmarks.fuzz import malformed

    return malformed(requests=10_000)


def cpu_speed() -> dict[str, Any]:
    """Offline ratios on this CPU, interleaved: none against Transformers, DFlash against none."""
    import json

    out = ROOT / "benchmarks" / "results" / "cpu_decode.json"
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(
        [sys.executable, "-m", "benchmarks.cpu_decode", "--out", str(out)], cwd=ROOT, check=True, env=environment
    )
    document = json.loads(out.read_text())
    ratios = {name: round(value["median"], 2) for name, value in document["ratios"].items()}
    assert ratios["none / transformers"] >= 2.0, f"none is {ratios['none / transformers']}× Transformers, 2.0 wanted"
    assert ratios["dflash / none"] >= 1.6, f"DFlash is {ratios['dflash / none']}× none, 1.6 wanted"
    return ratios | {"medians_tok_s": {k: round(v) for k, v in document["medians"].items()}}


def start() -> dict[str, Any]:
    """Start to ready within 4 s (median of 5), the whole server under 1 GB after serving 16 requests at once."""
    from benchmarks.start import measure

    figures = measure(starts=5)
    assert figures["seconds_to_ready_median"] <= 4.0, f"ready after {figures['seconds_to_ready_median']:.1f} s"
    assert figures["rss_bytes"] < 1e9, f"{figures['rss_bytes'] / 1e6:.0f} MB resident"
    return figures


STEPS = {
    "equals transformers": equals_transformers,
    "dflash equals none": dflash_equals_none,
    "unit tests": unit_tests,
    "fuzz": fuzz,
    "start": start,
    "cpu speed": cpu_speed,
}
