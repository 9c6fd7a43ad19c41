"""Offline timing: the same requests through one or several configs, round-robin, in one process.

Rounds of the configs alternate, so a machine whose speed drifts slows all of them alike and the ratios hold.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import BUNDLED, EngineConfig
from engine.loop import Stats
from engine.protocol import Acceptance, Rounds
from engine.request import Request
from engine.runtime import resolve
from engine.start import AnyLoop, build_any, loop_of

Prompt = tuple[int, ...]
DECODE_CONCURRENCY = (1, 4, 16)
_CHAIN = {"kind": "dflash", "block_size": 8}
_TREE = {"kind": "ddtree", "block_size": 8, "nodes": "auto"}
DECODE_DRAFTS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "dflash": _CHAIN,
    "ddtree": _TREE,
    "policy": {
        "kind": "policy",
        "by_running": [[1, 2, _TREE], [3, 7, _TREE | {"nodes": 7}], [8, None, {"kind": "none"}]],
    },
}
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


def run_requests(loop: AnyLoop, prompts: Sequence[Prompt], output_tokens: int) -> Run:
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


def decode_configs() -> dict[str, EngineConfig]:
    """Return what `bench --decode` compares: the bundled pair without speculation, as a chain, a tree, a policy."""
    return {
        name: EngineConfig.model_validate({"model": {"target": BUNDLED}, "draft": draft})
        for name, draft in DECODE_DRAFTS.items()
    }


def bench(
    configs: dict[str, EngineConfig],
    prompts: Sequence[Prompt],
    concurrencies: Sequence[int],
    output_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """Time every config at every concurrency, `repeats` times, interleaved.

    Returns:
        JSON: per config its resolved form and versions, and per concurrency tok_s (each repeat, median), accept
        length, rows a request verified in a round, and ms of a round by phase.
    """
    runtimes = {name: build_any(resolve(config)) for name, config in configs.items()}
    loops = {name: loop_of(runtime) for name, runtime in runtimes.items()}
    levels: dict[str, list[dict[str, Any]]] = {name: [] for name in configs}
    for concurrency in concurrencies:
        runs: dict[str, list[float]] = {name: [] for name in configs}
        before: dict[str, Stats] = {}
        for repeat in range(-1, repeats):  # the first is a warm-up
            if repeat == 0:
                before = {name: loop.stats() for name, loop in loops.items()}
            chosen = [prompts[(max(repeat, 0) * concurrency + i) % len(prompts)] for i in range(concurrency)]
            for name, loop in loops.items():
                run = run_requests(loop, chosen, output_tokens)
                if repeat >= 0:
                    runs[name].append(run.tok_s)
        for name, loop in loops.items():
            measured = {"concurrency": concurrency, "tok_s": runs[name], "tok_s_p50": statistics.median(runs[name])}
            levels[name].append(measured | _between(before[name], loop.stats()))
    return {
        "schema": 1,
        "output_tokens": output_tokens,
        "repeats": repeats,
        "configs": {name: runtimes[name].describe() | {"levels": levels[name]} for name in configs},
    }


def _between(before: Stats, after: Stats) -> dict[str, Any]:
    """Return accept length and per-round figures of the rounds between two looks at the counters."""
    rounds = Rounds.model_validate({name: value - before.rounds[name] for name, value in after.rounds.items()})
    earlier, later = (Acceptance.model_validate(each.acceptance) for each in (before, after))
    count, kept = later.verify_count - earlier.verify_count, later.accepted - earlier.accepted
    drafted = later.drafted > earlier.drafted
    table = per_round(rounds)
    phases = {name.removeprefix("ms_"): value for name, value in table.items() if name.startswith("ms_")}
    return {
        "accept_length": 1 + kept / count if drafted else None,
        "rows_per_request": rounds.target_rows / rounds.requests,
        "ms_per_round": sum(phases.values()),
        "ms_by_phase": phases,
        "rounds": rounds.rounds,
        "per_round": {name: value for name, value in table.items() if not name.startswith("ms_")},
    }


def per_round(rounds: Rounds) -> dict[str, float]:
    """Return each counter of decode rounds divided by their number, times in ms."""
    if rounds.rounds == 0:
        return {}
    table = {name: getattr(rounds, name) / rounds.rounds for name in ROUND_COUNTS}
    for name in ("propose", "forward", "accept", "commit"):
        table[f"ms_{name}"] = getattr(rounds, f"seconds_{name}") * 1000 / rounds.rounds
    return table
