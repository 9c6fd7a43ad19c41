"""Measuring a started server over concurrency: every level, or as far as a race lets it come.

A race (`tuner.racing`) makes two decisions here. A candidate that is beaten after its first level is measured no
further; and where windows are long enough to be split, each is short at first and goes on only for a candidate that
may be on the front, at the levels that decide it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.backends import Backend
from tuner.counters import between, read_counters, read_rounds, with_accept_length
from tuner.failures import Remains, kind_of_errors
from tuner.journal import Journal
from tuner.load.arrivals import Target
from tuner.load.client import Endpoint
from tuner.load.level import Plan, Run, level_of, run_level
from tuner.load.workload import Requests
from tuner.racing import LEAST, LONG, SHORT, curves_of, is_out, touches_front
from tuner.ready import ServerDied, unless_dead
from tuner.records import Level, Race, Raced, TrialSpec, Workload
from tuner.supervise import Exit, Supervised

DEATH_SECONDS = 1.0  # a server whose connections broke is given this long to be seen dead


@dataclass(frozen=True)
class Bench:
    """A server that is ready, and what it is measured with. `gpus`: of its lease."""

    spec: TrialSpec
    process: Supervised
    endpoint: Endpoint
    backend: Backend
    requests: Requests
    gpus: int


@dataclass(frozen=True)
class Curve:
    """What was measured, why there is no more, if something failed, and what a race left out."""

    levels: tuple[Level, ...]
    remains: Remains | None = None
    raced: Raced | None = None


@dataclass
class Stretch:
    """The windows of one concurrency so far, and the index of the request that comes next."""

    concurrency: int
    first: int
    runs: list[Run] = field(default_factory=list)


async def measure_curve(bench: Bench, journal: Journal) -> Curve:
    """Measure every concurrency in turn, until something fails or the race is lost."""
    spec, race = bench.spec, bench.spec.race
    split = race is not None and spec.workload.window >= LEAST
    windows = [_short(spec.workload)] if split else [spec.workload] * spec.workload.repeats
    share = len(bench.requests.order) // len(spec.levels)  # levels of one server do not repeat each other's prompts
    stretches = {c: Stretch(c, index * share) for index, c in enumerate(spec.levels)}
    levels: dict[int, Level] = {}
    for concurrency, stretch in stretches.items():
        level = await _level(bench, journal, stretch, windows)
        if isinstance(level, Remains):
            return Curve(tuple(levels.values()), level)
        levels[concurrency] = level
        if race is not None and len(levels) == 1 and is_out(level, race):
            return Curve((level,), raced=_saved(spec, levels, () if split else (concurrency,)))
    if race is None or not split:
        return Curve(tuple(levels.values()))
    longer = _worth_more(levels, race)
    for concurrency in longer:
        rest = _rest(spec.workload, levels[concurrency].seconds or 0.0)
        level = await _level(bench, journal, stretches[concurrency], rest)
        if isinstance(level, Remains):
            return Curve(tuple(levels.values()), level)
        levels[concurrency] = level
    return Curve(tuple(levels.values()), raced=_saved(spec, levels, longer))


def _short(workload: Workload) -> Workload:
    """Return the workload with the window that all begin with; it goes on to the full one until its rate is known."""
    return workload.model_copy(update={"window": SHORT * workload.window, "longest": workload.window})


def _rest(workload: Workload, spent: float) -> list[Workload]:
    """Return what is left of a long measurement after a short window of `spent` seconds."""
    windows = LONG * workload.repeats
    first = min(1.0, windows) * workload.window
    left = max(SHORT * workload.window, first - spent)
    rest = workload.model_copy(update={"window": left, "longest": max(left, workload.bound - spent)})
    return [rest, *[workload] * (math.ceil(windows) - 1)]


def _worth_more(levels: dict[int, Level], race: Race) -> list[int]:
    """Return the concurrencies to measure longer: those of the axes, if the candidate may be on the front."""
    if not touches_front(levels, curves_of(race), race.axes):
        return []
    return sorted({axis.level for axis in race.axes} & levels.keys())


def _saved(spec: TrialSpec, levels: dict[int, Level], longer: Sequence[int]) -> Raced | None:
    """Return what the race left out, None where that is nothing. `longer`: the levels measured on."""
    window = spec.workload.window * spec.workload.repeats
    spent = {c: levels[c].seconds or 0.0 if c in levels else 0.0 for c in spec.levels}
    short = tuple(c for c in spec.levels if c in levels and c not in longer and spent[c] < window)
    saved = sum(max(0.0, window - seconds) for seconds in spent.values())
    out = len(levels) < len(spec.levels)
    return Raced(out=out, short=short, saved_s=round(saved, 3)) if out or saved > 0 else None


async def _level(bench: Bench, journal: Journal, stretch: Stretch, windows: Sequence[Workload]) -> Level | Remains:
    """Measure one concurrency in these windows, after those that it had, and say so.

    What the server counts is of these windows alone.
    """
    with journal.level(stretch.concurrency) as done:
        before = await read_counters(bench.endpoint, bench.backend.probes.server_info)
        rounds = await read_rounds(bench.endpoint, bench.backend)
        level = await _windows(bench, stretch, windows)
        if isinstance(level, Remains):
            return level
        after = await read_counters(bench.endpoint, bench.backend.probes.server_info)
        level = level.model_copy(update={"server": between(before, after)})
        level = with_accept_length(level, rounds, await read_rounds(bench.endpoint, bench.backend))
        done(level)
    return level


async def _windows(bench: Bench, stretch: Stretch, windows: Sequence[Workload]) -> Level | Remains:
    """Return the level of a stretch with these windows added; Remains when the server died, hung, or answered no
    request, or the client was slow.

    A client that was too slow may have been disturbed: it gets a second try.
    """
    spec, limits = bench.spec, bench.spec.limits
    target = Target(bench.endpoint, bench.requests, limits.request_s, limits.level_s / 2)
    late = ""
    for _ in range(2):
        runs = list(stretch.runs)
        for window in windows:
            plan = Plan(stretch.concurrency, window, spec.seed, stretch.first)
            run = await run_window(spec, bench.process, target, plan, bench.backend)
            if isinstance(run, Remains):
                return run
            runs.append(run)
            stretch.first += run.uncounted + len(run.traces)
        level = level_of(runs, gpus=bench.gpus, slo=spec.slo)
        if (client := level.client) is None or not client.bound:
            stretch.runs = runs
            return level
        late = f"its p99 lag was {client.lag_ms_p99:.2f} ms, {client.limit_ms or 0:.2f} ms are allowed"
    where = f"at {stretch.concurrency} requests"
    return Remains("load", f"the load generator was too slow {where}: {late}", "client_bound", None)


async def run_window(
    spec: TrialSpec, process: Supervised, target: Target, plan: Plan, backend: Backend
) -> Run | Remains:
    """Put one window's load on the server; Remains when there is nothing to measure."""
    where = f"at {plan.users} requests"
    limit = spec.limits.level_s
    try:
        async with asyncio.timeout(limit):
            run = await unless_dead(process, run_level(target, plan, statistics=backend.request_stats))
    except ServerDied:
        return Remains("load", f"the server ended under load, {where}", None, process.poll())
    except TimeoutError:
        return Remains("load", f"the level did not end within {limit:.0f} s, {where}", "no_progress", None)
    kinds = {trace.error for trace in run.traces if trace.error is not None}
    if any(trace.error is None for trace in run.traces):
        return run
    exit_ = await _death(process) if kinds <= {"reset", "connect"} else None
    said = f"{run.traces[0].error}: {run.traces[0].detail}" if run.traces else "none was sent"
    reason = f"all {len(run.traces)} requests failed, {where}; the first: {said}"
    return Remains("load", reason, None if exit_ is not None else kind_of_errors(kinds), exit_)


async def _death(process: Supervised) -> Exit | None:
    """Return how a server ended whose connections broke, or None when it lives on."""
    try:
        async with asyncio.timeout(DEATH_SECONDS):
            return await process.wait()
    except TimeoutError:
        return None
