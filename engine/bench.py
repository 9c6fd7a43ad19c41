"""Offline timing: the same requests through one or several configs, round-robin, in one process.

Rounds of the configs alternate, so a machine whose speed drifts slows all of them alike and the ratios hold.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import EngineConfig
from engine.loop import Loop
from engine.protocol import Rounds
from engine.request import Request
from engine.runtime import Runtime, build, resolve

Prompt = tuple[int, ...]
ROUND_COUNTS = (
    "requests",
    "target_rows",
    "draft_rows",
    "context_rows",
    "target_kv_rows_written",
    "draft_kv_rows_written",
    "target_kv_bytes_read",
    "draft_kv_bytes_read",
)


@dataclass(frozen=True)
class Run:
    """One config, one concurrency, one repeat: tokens made, seconds from first submit to last token."""

    tokens: int
    seconds: float
    outputs: tuple[tuple[int, ...], ...]

    @property
    def tok_s(self) -> float:
        """Generated tokens a second, prompts included in the time."""
        return self.tokens / self.seconds


def run_requests(loop: Loop, prompts: Sequence[Prompt], output_tokens: int) -> Run:
    """Submit all prompts at once and run until the last one ends; eos is ignored."""
    began = time.perf_counter()
    outputs: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        outputs[number] = []
        reason = loop.submit(Request(number, prompt, output_tokens))
        if reason is not None:
            raise ValueError(reason)
    while not loop.idle:
        for progress in loop.advance():
            outputs[progress.id] += progress.tokens
    seconds = time.perf_counter() - began
    made = tuple(tuple(tokens) for tokens in outputs.values())
    return Run(sum(map(len, made)), seconds, made)


def bench(
    configs: dict[str, EngineConfig],
    prompts: Sequence[Prompt],
    concurrencies: Sequence[int],
    output_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """Time every config at every concurrency, `repeats` times, interleaved.

    Returns:
        JSON: per config its resolved form, versions, counters, and per concurrency tok_s (each repeat, median).
    """
    runtimes = {name: build(resolve(config)) for name, config in configs.items()}
    loops = {name: Loop(runtime) for name, runtime in runtimes.items()}
    results: dict[str, dict[int, list[float]]] = {name: {c: [] for c in concurrencies} for name in configs}
    for concurrency in concurrencies:
        for repeat in range(-1, repeats):  # the first is a warm-up
            chosen = [prompts[(max(repeat, 0) * concurrency + i) % len(prompts)] for i in range(concurrency)]
            for name, loop in loops.items():
                run = run_requests(loop, chosen, output_tokens)
                if repeat >= 0:
                    results[name][concurrency].append(run.tok_s)
    return {
        "schema": 1,
        "output_tokens": output_tokens,
        "repeats": repeats,
        "configs": {name: _report(runtimes[name], loops[name], results[name]) for name in configs},
    }


def _report(runtime: Runtime, loop: Loop, results: dict[int, list[float]]) -> dict[str, Any]:
    stats = loop.stats()
    return runtime.describe() | {
        "levels": [
            {"concurrency": concurrency, "tok_s": runs, "tok_s_p50": statistics.median(runs)}
            for concurrency, runs in results.items()
        ],
        "rounds": stats.rounds,
        "per_round": per_round(Rounds.model_validate(stats.rounds)),
        "acceptance": stats.acceptance,
    }


def per_round(rounds: Rounds) -> dict[str, float]:
    """Return each counter of decode rounds divided by their number, times in ms."""
    if rounds.rounds == 0:
        return {}
    table = {name: getattr(rounds, name) / rounds.rounds for name in ROUND_COUNTS}
    for name in ("propose", "forward", "accept", "commit"):
        table[f"ms_{name}"] = getattr(rounds, f"seconds_{name}") * 1000 / rounds.rounds
    return table
