"""One request on a CPU, offline: this engine against Transformers' `generate`, in one interleaved run.

Every repeat takes one prompt and decodes it with each arm in turn, same tokens in, same number out, so a machine
that drifts slows all arms alike; the ratios are medians over the repeats' pairs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, bundled_prompts, greedy_by_transformers, write
from engine.bench import run_requests
from engine.config import EngineConfig, target_folder
from engine.loop import Loop
from engine.runtime import build, resolve

Arm = Callable[[tuple[int, ...], int], float]  # prompt, output tokens -> seconds


def engine_arm(target: str, draft: dict[str, Any]) -> tuple[Arm, Loop]:
    """Return an arm that decodes with this engine."""
    loop = Loop(build(resolve(EngineConfig.model_validate({"model": {"target": target}, "draft": draft}))))
    return lambda prompt, tokens: run_requests(loop, [prompt], tokens).seconds, loop


def transformers_arm(target: str, threads: int) -> Arm:
    """Return an arm that decodes with Transformers, in the checkpoint's precision, with its default cache."""
    from transformers import AutoModelForCausalLM

    folder = target_folder(EngineConfig.model_validate({"model": {"target": target}}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()

    def run(prompt: tuple[int, ...], tokens: int) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            began = time.perf_counter()
            greedy_by_transformers(model, prompt, tokens)
            return time.perf_counter() - began
        finally:
            torch.set_num_threads(before)

    return run


def measure(
    arms: dict[str, Arm], prompts: Sequence[tuple[int, ...]], tokens: int, repeats: int
) -> dict[str, list[float]]:
    """Return tok/s of each arm by repeat; repeat 0 warms up and is not counted."""
    results: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        prompt = prompts[repeat % len(prompts)]
        for name, arm in arms.items():
            seconds = arm(prompt, tokens)
            if repeat:
                results[name].append(tokens / seconds)
    return results


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--drafter", default=None, help="folder; default: the target's own")
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 6, 8, 12, 16])
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_decode.json")
    arguments = parser.parse_args()
    none, _ = engine_arm(arguments.target, {"kind": "none"})
    threads = torch.get_num_threads()
    arms: dict[str, Arm] = {
        f"transformers, {threads} thread": transformers_arm(arguments.target, threads),
        f"transformers, {threads + 1} threads": transformers_arm(arguments.target, threads + 1),
        "none": none,
    }
    loops = {}
    for block in arguments.blocks:
        draft = {"kind": "dflash", "block_size": block, "model": arguments.drafter}
        arms[f"dflash {block}"], loops[f"dflash {block}"] = engine_arm(arguments.target, draft)
    results = measure(arms, bundled_prompts(), arguments.output_tokens, arguments.repeats)
    medians = {name: statistics.median(runs) for name, runs in results.items()}
    reference = max((name for name in results if name.startswith("transformers")), key=medians.__getitem__)
    fastest = max(loops, key=medians.__getitem__)
    ratios = {
        "none / transformers": ratio(results["none"], results[reference]),
        "dflash / none": ratio(results[fastest], results["none"]),
    }
    for name, runs in results.items():
        length = loops[name].stats().acceptance["accept_length"] if name in loops else None
        print(
            f"{name:26} {medians[name]:7.0f} tok/s"
            + (f"  accept length {length:.2f}" if length else "")
            + f"  min {min(runs):.0f} max {max(runs):.0f}"
        )
    for name, value in ratios.items():
        against = reference if "transformers" in name else fastest
        print(f"{name:26} {value['median']:.2f}× (quartiles {value['q1']:.2f}–{value['q3']:.2f}), {against}")
    write(
        arguments.out,
        {
            "output_tokens": arguments.output_tokens,
            "engine_threads": threads,
            "tok_s": results,
            "medians": medians,
            "ratios": ratios,
            "reference": reference,
            "fastest": fastest,
            "acceptance": {name: loop.stats().acceptance for name, loop in loops.items()},
        },
    )


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Return median and quartiles of the repeats' paired ratios."""
    pairs = [a / b for a, b in zip(above, below, strict=True)]
    q1, median, q3 = statistics.quantiles(pairs, n=4)
    return {"median": median, "q1": q1, "q3": q3}


if __name__ == "__main__":
    main()
