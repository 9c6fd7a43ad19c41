"""When requests are sent. Closed loop: a fixed number is always in flight, each slot sending as soon as it may.

How one level is measured, and why its numbers are those of the steady state:

- *Warm-up at the measured concurrency.* All c slots start at once, slot i of c with a request of (i + 1)/(c + 1)
  of the output length, which is discarded. The server sees the measured batch from the start, and the slots finish
  one after another: without this, slots with equal lengths stay in step for ever and every prompt of a round is
  computed at once, which no real load does.
- *The window* opens when the first slot is done with its warm-up: from then on slots are at evenly spread points
  of their requests. It stays open for the given time, and until `enough` requests are counted. A request is
  counted when it was due in the window.
- *No ramp-down.* Every counted request is followed to its end, however long it takes, and until the last of them
  is done the slots go on sending requests that are not counted. Fast requests are thus not preferred, and none is
  measured at less than the full concurrency.
- *No coordinated omission.* A request is due when its slot becomes free; latency counts from then, not from when
  the client got around to sending it. The difference is the client's own lag, and is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from tuner.load.client import Client, Endpoint, Reply
from tuner.load.workload import Request, Requests

MIN_NEEDED = 6  # the fewest whose median has a 95 % interval
MAX_NEEDED = 10  # the fewest that have a 90th percentile
BACKOFF_SECONDS = 0.05  # after an error, so that a server that refuses is not flooded


@dataclass(frozen=True)
class Exchange:
    """One counted request. `due`, in seconds of the client's clock: when its slot was free to send it."""

    index: int
    slot: int
    due: float
    request: Request
    reply: Reply


@dataclass(frozen=True)
class Run:
    """One closed-loop level. `opened` and `closed`: the window, in seconds of the client's clock."""

    concurrency: int
    opened: float
    closed: float
    exchanges: tuple[Exchange, ...]
    uncounted: int


def stagger(concurrency: int, output_tokens: int) -> tuple[int, ...]:
    """Return the output length of each slot's warm-up request: evenly spread between none and the full length."""
    return tuple(max(1, output_tokens * (slot + 1) // (concurrency + 1)) for slot in range(concurrency))


def enough(concurrency: int) -> int:
    """Return the fewest requests a level counts: 6 for the median's interval, up to 10 for a 90th percentile.

    One at a time, ten would take as long as the whole window of a short level.
    """
    return min(MAX_NEEDED, max(MIN_NEEDED, 2 * concurrency))


@dataclass
class _Level:
    """What the slots of a running level share."""

    next_index: int
    window: float
    enough: int
    opened: float | None = None
    closed: float | None = None
    counted: int = 0
    pending: int = 0  # counted requests without an answer yet
    uncounted: int = 0

    def claim(self, due: float) -> tuple[int, bool]:
        """Take the next request; return (index, whether it counts)."""
        index = self.next_index
        self.next_index += 1
        if self.opened is not None and self.closed is None:
            if due - self.opened >= self.window and self.counted >= self.enough:
                self.closed = due
            else:
                self.counted += 1
                self.pending += 1
                return index, True
        self.uncounted += 1
        return index, False

    @property
    def over(self) -> bool:
        return self.closed is not None and self.pending == 0


async def closed_loop(
    endpoint: Endpoint,
    requests: Requests,
    *,
    concurrency: int,
    window: float,
    stall: float,
    first: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Keep `concurrency` requests in flight and return those that were due in the window.

    Args:
        window: seconds the window stays open.
        stall: seconds without a byte after which a request is given up.
        first: index of the first request, so that levels of one server do not repeat each other's prompts.
    """
    level = _Level(next_index=first, window=window, enough=enough(concurrency))
    lengths = stagger(concurrency, requests.workload.output_tokens)
    found: list[Exchange] = []
    over = asyncio.Event()

    async def slot(number: int) -> None:
        async with Client(endpoint, clock) as client:
            index, _ = level.claim(clock())  # the window is not open yet: not counted
            request = requests.make(index, lengths[number])
            reply = await client.request("POST", request.path, request.body, stall)
            if level.opened is None:
                level.opened = reply.done
            while not level.over:
                due = reply.done
                if reply.error is not None or reply.status != 200:
                    await asyncio.sleep(BACKOFF_SECONDS)
                    due = clock()
                index, counts = level.claim(due)
                request = requests.make(index)
                reply = await client.request("POST", request.path, request.body, stall)
                if counts:
                    level.pending -= 1
                    found.append(Exchange(index, number, due, request, reply))
            over.set()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(slot(number)) for number in range(concurrency)]
        await over.wait()
        for task in tasks:
            task.cancel()
    opened = level.opened or 0.0
    closed = level.closed if level.closed is not None else opened
    return Run(
        concurrency,
        opened,
        closed,
        tuple(sorted(found, key=lambda e: e.index)),
        level.uncounted,
    )
