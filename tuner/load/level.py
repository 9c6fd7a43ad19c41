"""Measuring one level: the load is run, in as many processes as it needs, and what came of it is read."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tuner.load.arrivals import Exchange, Target, batch, closed_loop, open_loop
from tuner.load.gate import Door, Gate, Quota, Rule, Steering, Window, enough
from tuner.load.laws import Closed
from tuner.load.timer import metronome
from tuner.load.traces import Statistics, Trace, read_trace, unsaid
from tuner.measure import Batch, ClosedLoop, Joined, OpenLoop, Rate, client_error, measure, repeated
from tuner.records import Level, Workload

PREPARED = 256  # requests whose prompts are encoded before the load begins; the others' when they are sent
STREAMS_PER_PROCESS = 512  # users of a level for whom one process is tried first


@dataclass(frozen=True)
class Plan:
    """What load a level puts on a server. `requests`: exactly so many, ramp and tail included; None: a window."""

    users: int
    workload: Workload
    seed: int = 0
    first: int = 0  # index of the first request, so that levels of one server do not repeat each other's prompts
    requests: int | None = None

    @property
    def rate(self) -> Rate:
        """How its requests become rates."""
        if self.requests is not None:
            return Batch(self.users)
        return ClosedLoop(self.users) if isinstance(self.workload.arrivals, Closed) else OpenLoop()

    @property
    def rule(self) -> Rule:
        """When its window closes."""
        work = self.workload
        closed = isinstance(work.arrivals, Closed)
        return Rule(work.window, work.bound, work.width, enough(self.users), self.users - 1 if closed else 0)


@dataclass(frozen=True)
class Part:
    """One process's share of a level, from 0."""

    number: int = 0
    of: int = 1


@dataclass(frozen=True)
class Run:
    """What one level brought: times in seconds of the client's clock.

    `lags`: how late the loop read what had arrived, by regular ticks. `busy`: CPU share of the busiest process.
    """

    plan: Plan
    opened: float
    closed: float
    traces: tuple[Trace, ...]
    lags: tuple[float, ...] = ()
    busy: float = 0.0
    processes: int = 1
    steady: bool = True
    uncounted: int = 0


@dataclass(frozen=True)
class Share:
    """What one process's part of a level brought."""

    traces: tuple[Trace, ...]
    lags: tuple[float, ...]
    busy: float
    uncounted: int


Progress = Callable[[int], None]  # requests over that count


def quota(plan: Plan, part: Part) -> int | None:
    """Return how many requests of the plan a process sends."""
    if plan.requests is None:
        return None
    return plan.requests // part.of + (part.number < plan.requests % part.of)


def make_gate(plan: Plan, part: Part) -> Gate:
    """Return the gate of one process."""
    return Gate(first=plan.first + part.number, step=part.of, quota=quota(plan, part))


def make_steering(plan: Plan, doors: Sequence[Door]) -> Window | Quota:
    """Return what opens and closes the gates of a level."""
    return Window(plan.rule, doors) if plan.requests is None else Quota(plan.users, doors)


async def drive(target: Target, plan: Plan, gate: Gate, part: Part) -> list[Exchange]:
    """Send one process's part of a level."""
    law = plan.workload.arrivals
    if plan.requests is None and not isinstance(law, Closed):
        return await open_loop(target, gate, law=law, users=plan.users, seed=plan.seed, part=part.number, parts=part.of)
    loop = closed_loop if plan.requests is None else batch
    return await loop(target, gate, slots=range(part.number, plan.users, part.of), concurrency=plan.users)


async def share(target: Target, plan: Plan, gate: Gate, part: Part = Part(), statistics: Statistics = unsaid) -> Share:
    """Send one process's part of a level, and read the answers when it is over."""
    target.requests.prepare(plan.first, PREPARED + 2 * plan.users)
    began, spent = time.perf_counter(), time.process_time()
    with _uncollected():
        with metronome() as lags:
            exchanges = await drive(target, plan, gate, part)
            busy = (time.process_time() - spent) / max(1e-9, time.perf_counter() - began)
        traces = tuple(read_trace(each, statistics) for each in sorted(exchanges, key=lambda each: each.index))
    return Share(traces, tuple(lags), busy, gate.uncounted)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the cycle collector from stopping the process while it stamps and reads: nothing here has cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


async def run_level(
    target: Target,
    plan: Plan,
    *,
    statistics: Statistics = unsaid,
    progress: Progress | None = None,
    processes: int | None = None,
) -> Run:
    """Put one level's load on a server and return what came of it.

    A client that turns out to be the limit is given twice the processes, as long as half the cores suffice, and the
    level is measured again. `processes`: exactly so many instead.

    Raises:
        LoadError: a process of the load generator ended early.
    """
    if processes is not None:
        return await _run(target, plan, min(processes, plan.users), statistics, progress)
    most = min(plan.users, max(1, (os.cpu_count() or 1) // 2))
    processes = min(most, 1 + (plan.users - 1) // STREAMS_PER_PROCESS)
    while True:
        run = await _run(target, plan, processes, statistics, progress)
        error = client_error(run.traces, run.lags, share=plan.workload.client_lag)
        if processes == most or not error.bound:
            return run
        processes = min(most, 2 * processes)


def level_of(runs: Sequence[Run], *, gpus: int = 0, slo: Mapping[str, float] | None = None) -> Level:
    """Return the metrics of one level, measured in one window or several."""
    plan = runs[0].plan
    traces = [trace for run in runs for trace in run.traces]
    levels = [measure(run.traces, concurrency=plan.users, gpus=gpus, slo=slo, rate=plan.rate) for run in runs]
    if len(runs) == 1:
        level = levels[0]
    else:
        lengths = tuple(max(run.closed - run.opened, 1e-9) for run in runs)
        rate = Joined(tuple(len(run.traces) for run in runs), plan.rate, lengths)
        pooled = measure(traces, concurrency=plan.users, gpus=gpus, slo=slo, rate=rate)
        level = repeated(levels, pooled)
    lags = [lag for run in runs for lag in run.lags]
    busy, processes = max(run.busy for run in runs), max(run.processes for run in runs)
    return level.model_copy(
        update={
            "client": client_error(traces, lags, share=plan.workload.client_lag, busy=busy, processes=processes),
            "seconds": sum(run.closed - run.opened for run in runs),
            "steady": all(run.steady for run in runs),
        }
    )


async def _run(target: Target, plan: Plan, processes: int, statistics: Statistics, progress: Progress | None) -> Run:
    if processes > 1:
        from tuner.load.processes import run_in_processes

        return await run_in_processes(target, plan, processes, statistics, progress)
    gate = make_gate(plan, Part())
    steering = make_steering(plan, [gate])
    gate.steering = steering if progress is None else Telling(steering, progress)
    found = await share(target, plan, gate, Part(), statistics)
    return gather(plan, steering, [found])


def gather(plan: Plan, steering: Window | Quota, shares: Sequence[Share]) -> Run:
    """Join what the processes of a level brought."""
    traces = sorted((trace for each in shares for trace in each.traces), key=lambda trace: trace.index)
    counted = tuple(trace for trace in traces if trace.due >= steering.opened)  # the window may have moved on
    return Run(
        plan,
        steering.opened,
        steering.closed,
        counted,
        tuple(lag for each in shares for lag in each.lags),
        max(each.busy for each in shares),
        len(shares),
        steering.steady,
        sum(each.uncounted for each in shares) + len(traces) - len(counted),
    )


@dataclass
class Telling:
    """Passes on what a gate says, and tells how far the level is."""

    inner: Steering
    tell: Progress
    _over: int = 0

    def warm(self, now: float) -> None:
        """See `Steering`."""
        self.inner.warm(now)

    def finished(self, due: float, ended: float, counted: bool) -> None:
        """See `Steering`."""
        self._over += counted
        self.inner.finished(due, ended, counted)
        self.tell(self._over)

    def drained(self) -> None:
        """See `Steering`."""
        self.inner.drained()
