"""One level's load from several processes, for when one core cannot send and stamp it all.

The parent starts `python -m tuner.load.processes`, one per part, and writes its `Order` as a JSON line to its
standard input. Then they talk in lines: the child says `warm T`, `finished DUE ENDED COUNTED`, `drained`, the parent
`open T`, `close T`, `end`; times are of the system's monotonic clock, which all processes share. The child's last
line is its `Result`. A child whose standard input ends sends nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from tuner.errors import TunerError
from tuner.load.arrivals import Target
from tuner.load.client import Endpoint
from tuner.load.gate import Gate, Steering
from tuner.load.level import Part, Plan, Progress, Run, Share, Telling, gather, make_gate, make_steering, share
from tuner.load.loop import run
from tuner.load.traces import Statistics, Stats, Trace, Unsaid
from tuner.load.workload import make_requests

LONGEST_LINE = 2**30  # bytes of a result


class LoadError(TunerError):
    """A process of the load generator ended before its work was done."""


@dataclass(frozen=True)
class Order:
    """What one process is told."""

    endpoint: Endpoint
    served_name: str
    prompt_seed: int
    stall: float
    total: float | None
    plan: Plan
    part: Part


@dataclass(frozen=True)
class Result:
    """What one process found; `lasts`: the event with the final usage of every trace that is no error."""

    traces: tuple[Trace, ...]
    lags: tuple[float, ...]
    busy: float
    uncounted: int
    lasts: tuple[dict[str, Any], ...]


ORDER: TypeAdapter[Order] = TypeAdapter(Order)
RESULT: TypeAdapter[Result] = TypeAdapter(Result)


# --------------------------------------------------------------------------------------------------------- parent


@dataclass(frozen=True)
class Remote:
    """The gate of another process (see `gate.Door`)."""

    process: asyncio.subprocess.Process

    def open(self, when: float) -> None:
        """See `Door`."""
        self._say(f"open {when!r}")

    def close(self, when: float) -> None:
        """See `Door`."""
        self._say(f"close {when!r}")

    def end(self) -> None:
        """See `Door`."""
        self._say("end")

    def _say(self, words: str) -> None:
        if self.process.stdin is not None:
            self.process.stdin.write(words.encode() + b"\n")


async def run_in_processes(
    target: Target, plan: Plan, processes: int, statistics: Statistics, progress: Progress | None
) -> Run:
    """Put one level's load on a server from `processes` processes; see `level.run_level`.

    Raises:
        LoadError: one of them ended early.
    """
    async with contextlib.AsyncExitStack() as stack:
        children = [await stack.enter_async_context(_child()) for _ in range(processes)]
        steering = make_steering(plan, [Remote(child) for child in children])
        ear: Steering = steering if progress is None else Telling(steering, progress)
        for number, child in enumerate(children):
            total = None if target.total == float("inf") else target.total
            requests = target.requests
            part = Part(number, processes)
            order = Order(target.endpoint, requests.served_name, requests.seed, target.stall, total, plan, part)
            if child.stdin is not None:
                child.stdin.write(ORDER.dump_json(order) + b"\n")
        try:
            async with asyncio.TaskGroup() as group:
                heard = [group.create_task(_listen(child, ear)) for child in children]
        except ExceptionGroup as broken:
            raise broken.exceptions[0] from None  # the first to break down; those that follow are its victims
    return gather(plan, steering, [_with_stats(task.result(), statistics) for task in heard])


@contextlib.asynccontextmanager
async def _child() -> AsyncIterator[asyncio.subprocess.Process]:
    """Run one process; it is gone when the block is left."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tuner.load.processes",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LONGEST_LINE,
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def _listen(child: asyncio.subprocess.Process, ear: Steering) -> Result:
    """Pass on what a child says until it has a result."""
    if child.stdout is None:
        raise LoadError("a load process has no output")
    async for line in child.stdout:
        match line.split():
            case [b"warm", when]:
                ear.warm(float(when))
            case [b"finished", due, ended, counted]:
                ear.finished(float(due), float(ended), counted == b"1")
            case [b"drained"]:
                ear.drained()
            case _:
                return RESULT.validate_json(line)
    raise LoadError(f"a load process ended with status {await child.wait()}; see its words above")


def _with_stats(result: Result, statistics: Statistics) -> Share:
    """Read how speculation went, which the child's process does not know how to."""
    lasts = iter(result.lasts)
    traces = []
    for trace in result.traces:
        if trace.error is None:
            stats = statistics(next(lasts))
            trace = replace(trace, accept_length=stats.accept_length, verify_count=stats.verify_count)
        traces.append(trace)
    return Share(tuple(traces), result.lags, result.busy, result.uncounted)


# ---------------------------------------------------------------------------------------------------------- child


class Relay:
    """Tells the parent what a gate says."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def say(self, words: bytes) -> None:
        """Write a line."""
        line = words + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]

    def warm(self, now: float) -> None:
        """See `Steering`."""
        self.say(b"warm %a" % now)

    def finished(self, due: float, ended: float, counted: bool) -> None:
        """See `Steering`."""
        self.say(b"finished %a %a %d" % (due, ended, counted))

    def drained(self) -> None:
        """See `Steering`."""
        self.say(b"drained")


async def _obey(reader: asyncio.StreamReader, gate: Gate) -> None:
    """Do to a gate what the parent says; end it when there is no parent any more."""
    async for line in reader:
        match line.split():
            case [b"open", when]:
                gate.open(float(when))
            case [b"close", when]:
                gate.close(float(when))
            case _:
                break
    gate.end()


async def _work(relay: Relay) -> None:
    reader = asyncio.StreamReader(limit=LONGEST_LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    order = ORDER.validate_json(await reader.readline())
    requests = make_requests(order.plan.workload, order.served_name, order.prompt_seed)
    target = Target(order.endpoint, requests, order.stall, float("inf") if order.total is None else order.total)
    gate = make_gate(order.plan, order.part)
    gate.steering = relay
    lasts: list[dict[str, Any]] = []

    def keep(last: Mapping[str, Any]) -> Stats:
        lasts.append(dict(last))
        return Unsaid()

    obeying = asyncio.ensure_future(_obey(reader, gate))
    try:
        found = await share(target, order.plan, gate, order.part, keep)
    finally:
        obeying.cancel()
    relay.say(RESULT.dump_json(Result(found.traces, found.lags, found.busy, found.uncounted, tuple(lasts))))


if __name__ == "__main__":
    run(_work(Relay(sys.stdout.fileno())))
