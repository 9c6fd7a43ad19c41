"""Sending the requests of one level, in one process: closed loop, a number of requests, or open loop.

- *Closed loop.* All c slots start at once, slot i of c with a request of (i + 1)/(c + 1) of the output length, which
  is discarded. The server sees the measured batch from the start, and the slots finish one after another: without
  this, slots with equal lengths stay in step for ever and every prompt of a round is computed at once, which no real
  load does.
- *Open loop.* Requests are due at times fixed beforehand, whether or not answers come. The window opens when as many
  requests are over as were in flight when the first was: from then on the server is as loaded as it will be.
- *No coordinated omission.* A request is due when its slot becomes free, or when the schedule says; latency counts
  from then, not from when the client got around to sending it. The difference is the client's own lag, and is kept.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tuner.load.client import Client, Endpoint, Reply, RequestError
from tuner.load.gate import Gate
from tuner.load.laws import Open, times
from tuner.load.timer import timer
from tuner.load.workload import Request, Requests

BACKOFF_SECONDS = 0.05  # after an error, so that a server that refuses is not flooded
MOST_PATIENCE = 5.0  # of a Retry-After, so that a level ends
MOST_IN_FLIGHT = 4096  # open loop: beyond, a request is counted as not sent
_now = time.perf_counter


@dataclass(frozen=True)
class Exchange:
    """One counted request. `due`, in seconds of the client's clock: when it was to be sent."""

    index: int
    slot: int
    due: float
    request: Request
    reply: Reply

    @property
    def lag(self) -> float:
        """How late it was sent, in seconds: the client's fault alone."""
        return self.reply.sent - self.due


@dataclass(frozen=True)
class Target:
    """Where requests go: the server, what it is asked, and how long one is waited for (seconds).

    `stall`: without a byte; `total`: in any case.
    """

    endpoint: Endpoint
    requests: Requests
    stall: float = 120.0
    total: float = math.inf

    async def ask(self, client: Client, request: Request) -> Reply:
        """Send a request and return its answer."""
        return await client.request("POST", request.path, request.body, self.stall, self.total)


def stagger(concurrency: int, output_tokens: int) -> tuple[int, ...]:
    """Return the output length of each slot's warm-up request: evenly spread between none and the full length."""
    return tuple(max(1, output_tokens * (slot + 1) // (concurrency + 1)) for slot in range(concurrency))


def patience(reply: Reply) -> float:
    """Return how many seconds a slot waits after an answer: none after a good one, as told after a refusal."""
    if reply.error is None and reply.status == 200:
        return 0.0
    said = reply.headers.get("retry-after", "")
    return min(float(said), MOST_PATIENCE) if said.isdigit() and len(said) < 10 and int(said) else BACKOFF_SECONDS


async def closed_loop(target: Target, gate: Gate, *, slots: range, concurrency: int) -> list[Exchange]:
    """Keep one request of each slot in flight until the gate says that it is over; return those that counted.

    Args:
        slots: those of this process, of the `concurrency` of the level.
    """
    lengths = stagger(concurrency, target.requests.workload.output_tokens)
    found: list[Exchange] = []

    async def slot(number: int) -> None:
        async with Client(target.endpoint) as client:
            index, _ = gate.claim(-math.inf)  # the warm-up never counts
            reply = await target.ask(client, target.requests.make(index, lengths[number]))
            gate.steering.warm(reply.done)
            while not gate.over.is_set():
                due = reply.done
                if (wait := patience(reply)) > 0:
                    await asyncio.sleep(wait)
                    due = _now()
                index, counts = gate.claim(due)
                request = target.requests.make(index)
                reply = await target.ask(client, request)
                if counts:
                    found.append(Exchange(index, number, due, request, reply))
                gate.finish(due, reply.done, counts)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(slot(number)) for number in slots]
        await gate.over.wait()
        for task in tasks:
            task.cancel()
    return found


async def batch(target: Target, gate: Gate, *, slots: range, concurrency: int) -> list[Exchange]:
    """Send the gate's quota, each slot one after another, ramp and tail included; return all that counted.

    Every slot sends one warm-up request before, and waits for those of all others.
    """
    lengths = stagger(concurrency, target.requests.workload.output_tokens)
    found: list[Exchange] = []
    opened = asyncio.Event()
    gate.on_open = opened.set

    async def slot(number: int) -> None:
        async with Client(target.endpoint) as client:
            index, _ = gate.claim(-math.inf)
            reply = await target.ask(client, target.requests.make(index, lengths[number]))
            gate.steering.warm(_now())
            await opened.wait()
            due = gate.opened
            while not gate.used_up:
                index, counts = gate.claim(due)
                request = target.requests.make(index)
                reply = await target.ask(client, request)
                found.append(Exchange(index, number, due, request, reply))
                gate.finish(due, reply.done, counts)
                due = reply.done
                if (wait := patience(reply)) > 0:
                    await asyncio.sleep(wait)
                    due = _now()

    async with asyncio.TaskGroup() as group:
        for number in slots:
            group.create_task(slot(number))
        await gate.over.wait()
    return found


@dataclass
class _Pool:
    """Connections of an open loop: as many as requests are in flight."""

    endpoint: Endpoint
    idle: list[Client] = field(default_factory=list)
    busy: int = 0

    def take(self) -> Client | None:
        if self.busy >= MOST_IN_FLIGHT:
            return None
        self.busy += 1
        return self.idle.pop() if self.idle else Client(self.endpoint)

    def give(self, client: Client) -> None:
        self.busy -= 1
        self.idle.append(client)


async def open_loop(
    target: Target, gate: Gate, *, law: Open, users: int, seed: int, part: int = 0, parts: int = 1
) -> list[Exchange]:
    """Send requests when they are due until the gate says that it is over; return those that counted.

    Args:
        part, parts: this process sends every `parts`-th request of the schedule, from `part` on.
    """
    found: list[Exchange] = []
    pool = _Pool(target.endpoint)
    start = _now() + 0.01
    schedule = _share(times(law, users, seed), start, part, parts)
    due = next(schedule)
    flying: int | None = None  # in flight when the first answer was over; then still to wait for

    async def one(due: float) -> None:
        nonlocal flying
        index, counts = gate.claim(due)
        request = target.requests.make(index)
        client = pool.take()
        if client is None:
            error = RequestError("not_sent", f"{MOST_IN_FLIGHT} requests are in flight")
            reply = Reply(due, _now(), 0, {}, (), error)
        else:
            reply = await target.ask(client, request)
            pool.give(client)
        if counts:
            found.append(Exchange(index, 0, due, request, reply))
        flying = pool.busy + 1 if flying is None else flying - 1
        if flying == 0:
            gate.steering.warm(_now())
        gate.finish(due, reply.done, counts)

    def send() -> None:
        nonlocal due
        while due <= _now():
            tasks.add(task := group.create_task(one(due)))
            task.add_done_callback(tasks.discard)
            due = next(schedule)
        clock.at(due)

    tasks: set[asyncio.Task[None]] = set()
    async with asyncio.TaskGroup() as group:
        clock = timer(send)
        clock.at(due)
        try:
            await gate.over.wait()
        finally:
            clock.close()
            for task in tuple(tasks):
                task.cancel()
    for client in pool.idle:
        client.close()
    return found


def _share(offsets: Iterator[float], start: float, part: int, parts: int) -> Iterator[float]:
    """Yield the times of one process's share of a schedule."""
    for number, offset in enumerate(offsets):
        if number % parts == part:
            yield start + offset
