"""`nodes: auto` against fixed budgets: never more than 3 % slower than the best of them.

The best of several noisy arms looks better than it is. So the best budget is chosen on one half of the repeats and
compared with `auto` on the other half, both ways.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from benchmarks.common import bundled_prompts
from engine.bench import run_requests
from engine.config import BUNDLED, EngineConfig
from engine.loop import Loop
from engine.runtime import build, resolve

CONTENDERS = 3  # budgets that are judged: the fastest of a first look at all
TOKENS = 64
SLOWEST = 0.97
AUTO = "auto"

Times = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Effort:
    """Budgets to compare; repeats of the first look at all of them, as many before it warm up, and of the judged
    ones, by requests."""

    budgets: tuple[int, ...]
    looks: dict[int, int]
    repeats: dict[int, int]


CPU = Effort((3, 5, 7, 9, 11, 15, 19, 23, 31), {1: 10, 4: 6, 16: 3}, {1: 100, 4: 60, 16: 32})
CUDA = Effort((7, 15, 23, 31, 47, 63), {1: 4, 4: 3, 16: 2}, {1: 120, 4: 120, 16: 60})  # by the wall's noisier clock


def growing(concurrency: int) -> dict[str, Any]:
    """Compare `auto` with the best of fixed budgets and judge it: a proof's step."""
    figures = compared(concurrency)
    assert figures["holds"], f"auto is {figures['ratio']} of the best fixed budget: {figures}"
    return figures


def compared(concurrency: int) -> dict[str, Any]:
    """Decode by every budget and by `auto`, interleaved.

    Timed by the process's own CPU time where the engine has one thread: on a quiet machine that is the time, and on
    a shared one it is the time without the neighbours. Every arm decodes once untimed before: the first product with
    a number of rows prepares a kernel, which costs as much as a round, and trees that grow meet more numbers.
    """
    effort = CUDA if torch.cuda.is_available() else CPU
    loops = {f"{nodes} nodes": _served(nodes) for nodes in effort.budgets} | {AUTO: _served(AUTO)}
    _timed(loops, concurrency, effort.looks[concurrency])
    first = _timed(loops, concurrency, effort.looks[concurrency])
    contenders = sorted(first.keys() - {AUTO}, key=lambda name: sum(first[name]))[:CONTENDERS]
    judged = _timed({name: loops[name] for name in (*contenders, AUTO)}, concurrency, effort.repeats[concurrency])
    ratio, error = best_against(judged, AUTO)
    return {
        "holds": ratio >= SLOWEST,
        "ratio": round(ratio, 3),
        "standard_error": round(error, 3),
        "repeats": effort.repeats[concurrency],
        "clock": "process CPU time" if _own_time() else "wall",
        "tok_s": _rates(judged, concurrency),
        "tok_s_first_look": _rates(first, concurrency),
    }


def best_against(times: Times, other: str) -> tuple[float, float]:
    """Return the best arm's time divided by `other`'s, and the ratio's standard error.

    The best is chosen on the even repeats and compared on the odd ones, and the reverse; every repeat counts once.
    """
    chosen: list[float] = []
    against: list[float] = []
    for half in (0, 1):
        best = min((name for name in times if name != other), key=lambda name: sum(times[name][1 - half :: 2]))
        chosen += times[best][half::2]
        against += times[other][half::2]
    ratio = sum(chosen) / sum(against)
    errors = [mine - ratio * its for mine, its in zip(chosen, against, strict=True)]
    return ratio, statistics.stdev(errors) * math.sqrt(len(errors)) / sum(against)


def _timed(loops: Mapping[str, Loop], concurrency: int, repeats: int) -> dict[str, list[float]]:
    """Return seconds of every repeat by arm. The arms take turns in beginning, each repeat has its own prompts."""
    prompts, spent = bundled_prompts(), {name: list[float]() for name in loops}
    own = _own_time()
    for repeat in range(repeats):
        chosen = [prompts[(repeat * concurrency + i) % len(prompts)] for i in range(concurrency)]
        for name in _turned(list(loops), repeat):
            began = time.process_time()
            run = run_requests(loops[name], chosen, TOKENS)
            spent[name].append(time.process_time() - began if own else run.seconds)
    return spent


def _turned(names: Sequence[str], by: int) -> Collection[str]:
    turn = by % len(names)
    return [*names[turn:], *names[:turn]]


def _rates(times: Times, concurrency: int) -> dict[str, int]:
    return {name: round(TOKENS * concurrency * len(each) / sum(each)) for name, each in times.items()}


def _own_time() -> bool:
    return torch.get_num_threads() == 1 and not torch.cuda.is_available()


@cache  # of all concurrencies
def _served(nodes: int | str) -> Loop:
    draft = {"kind": "ddtree", "block_size": 8, "nodes": nodes}
    return Loop(build(resolve(EngineConfig.model_validate({"model": {"target": BUNDLED}, "draft": draft}))))
