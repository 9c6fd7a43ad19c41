"""The bundled pair's proof: every threshold on the shipped weights at full counts, text against Transformers, tests."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.common import passing_tests
from engine.pair.checkpoint import load_drafter, load_target
from engine.pair.evaluate import BLOCKS, NEW_TOKENS, TEMPERATURES, Plan, as_json, measure, read_training
from engine.pair.paths import DRAFT, TARGET
from engine.pair.proof import Check, acceptance_checks, file_checks, own_greedy, transformers_greedy
from engine.pair.workload import load_workload

TEXT_PROMPTS = 20


def holding(checks: list[Check]) -> list[dict[str, Any]]:
    """Return the checks as figures, if all hold."""
    missed = [f"{check.name} {check.measured:.4g}, wanted {check.bound}" for check in checks if not check.holds]
    assert not missed, "; ".join(missed)
    return [{"check": check.name, "measured": check.measured, "bound": check.bound} for check in checks]


def acceptance(temperature: float, block: int) -> dict[str, Any]:
    """Accept length on all 200 prompts at every depth and tree, in bfloat16; loop share; the bounds on them."""
    target, drafter = load_target(TARGET, torch.bfloat16), load_drafter(DRAFT, torch.bfloat16)
    result = measure(target, drafter, load_workload(), Plan(blocks=(block,), temperatures=(temperature,)))
    return {"checks": holding(acceptance_checks(result, block, temperature)), **as_json(result)}


def files() -> dict[str, Any]:
    """Size of the weights; held-out loss as it was measured when they were made."""
    size = sum(file.stat().st_size for folder in (TARGET, DRAFT) for file in folder.glob("*.safetensors"))
    return {"checks": holding(file_checks(read_training(TARGET), size))}


def equals_transformers() -> dict[str, Any]:
    """Greedy text in float32 on 20 of the prompts, stop tokens included."""
    prompts = load_workload()
    chosen = prompts[:: len(prompts) // TEXT_PROMPTS][:TEXT_PROMPTS]
    pairs = zip(transformers_greedy(TARGET, chosen, NEW_TOKENS), own_greedy(TARGET, chosen, NEW_TOKENS), strict=True)
    equal = sum(theirs == ours for theirs, ours in pairs)
    assert equal == len(chosen), f"{equal} of {len(chosen)} texts equal Transformers'"
    return {"prompts": len(chosen), "tokens": NEW_TOKENS, "equal": equal}


def unit_tests() -> dict[str, Any]:
    """The pair's test files: float64 reference, shifted taps, masks, loops, corpus, checkpoints."""
    return passing_tests("tests/engine/pair")


STEPS = {
    **{
        f"temperature {temperature:g}, block {block}": partial(acceptance, temperature, block)
        for temperature, block in product(TEMPERATURES, BLOCKS)
    },
    "files": files,
    "equals transformers": equals_transformers,
    "unit tests": unit_tests,
}
