"""Which trial runs on which GPUs, and when: pure placement of 1/2/4/8-GPU jobs on the boxes of a machine.

A job is placed on an aligned block of GPUs (0–1, 2–3, …; 0–3, 4–7; 0–7), so that its ranks share the nearest links and
free GPUs never fragment. Jobs load at the same time; where a calibration found that neighbours disturb each other,
only one job of a box measures at any time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from tuner.errors import UsageError

EXHAUSTIVE = 6  # jobs of which every order is tried
TRIES = 400  # changed orders of more jobs
NEAR = 1.02  # times the lower bound: good enough to stop
DISTURBED = 0.02  # a neighbour that loads costs at least this share of speed: windows must be exclusive


@dataclass(frozen=True)
class Job:
    """What one trial needs: GPUs (a power of two), seconds to load and to stop, seconds to measure."""

    name: str
    gpus: int
    load: float
    measure: float

    @property
    def seconds(self) -> float:
        """How long it holds its GPUs when nothing makes it wait."""
        return self.load + self.measure


@dataclass(frozen=True)
class Slot:
    """A placed job. It loads from `start`, measures from `window` to `end`, and holds `gpus` until `end`."""

    job: Job
    box: int
    gpus: tuple[int, ...]
    start: float
    window: float
    end: float


@dataclass(frozen=True)
class Calibration:
    """What a run beside a loading neighbour showed: speed alone and beside it, same configuration and load."""

    alone: float
    beside: float

    @property
    def loss(self) -> float:
        """Share of speed that the neighbour costs."""
        return max(0.0, 1 - self.beside / self.alone)

    @property
    def exclusive(self) -> bool:
        """Whether measurement windows of one box must not overlap."""
        return self.loss >= DISTURBED

    def to_json(self) -> dict[str, float | bool]:
        """Return what is recorded."""
        return {"alone": self.alone, "beside": self.beside, "loss": self.loss, "exclusive": self.exclusive}


def place(jobs: Sequence[Job], boxes: int = 1, size: int = 8, *, exclusive: bool = False) -> list[Slot]:
    """Return a slot for every job, short in makespan.

    Greedy list scheduling: jobs in an order, each at the aligned block that lets it end first. The orders tried are
    widest first, longest first, largest area first, and then random changes of the best; every order of up to six
    jobs.

    Raises:
        UsageError: a job that fits no box, or a size that is no power of two.
    """
    for job in jobs:
        if job.gpus < 1 or job.gpus & (job.gpus - 1) or job.gpus > size:
            raise UsageError(f"{job.name}: {job.gpus} GPUs; a box has {size} and blocks are powers of two")
    if not jobs:
        return []
    orders = _orders(jobs)
    plans = [_greedy(order, boxes, size, exclusive) for order in orders]
    best = min(range(len(plans)), key=lambda index: makespan(plans[index]))
    return _improved(orders[best], plans[best], boxes, size, exclusive)


def _orders(jobs: Sequence[Job]) -> list[tuple[Job, ...]]:
    if len(jobs) <= EXHAUSTIVE:
        return list(permutations(jobs))
    return [
        tuple(sorted(jobs, key=lambda job: (-job.gpus, -job.seconds))),
        tuple(sorted(jobs, key=lambda job: (-job.seconds, -job.gpus))),
        tuple(sorted(jobs, key=lambda job: -job.seconds * job.gpus)),
        tuple(sorted(jobs, key=lambda job: (-job.measure, -job.gpus))),
    ]


def _improved(order: Sequence[Job], plan: list[Slot], boxes: int, size: int, exclusive: bool) -> list[Slot]:
    """Swap or move random jobs of the order as long as that does not lengthen the schedule (seeded, bounded)."""
    enough = lower_bound(order, boxes, size, exclusive=exclusive) * NEAR
    rng = random.Random(len(order))
    current, span = list(order), makespan(plan)
    for _ in range(TRIES if len(order) > EXHAUSTIVE else 0):
        if span <= enough:
            break
        tried = list(current)
        one, other = rng.randrange(len(tried)), rng.randrange(len(tried))
        if rng.random() < 0.5:
            tried[one], tried[other] = tried[other], tried[one]
        else:
            tried.insert(other, tried.pop(one))
        made = _greedy(tried, boxes, size, exclusive)
        if makespan(made) <= span:
            current, plan, span = tried, made, makespan(made)
    return plan


def _greedy(order: Sequence[Job], boxes: int, size: int, exclusive: bool) -> list[Slot]:
    """Place jobs in this order, each where it ends first; of equal ends, where the fewest GPU-seconds idle."""
    free = [[0.0] * size for _ in range(boxes)]
    windows: list[list[tuple[float, float]]] = [[] for _ in range(boxes)]
    made: list[Slot] = []
    for job in order:
        best = (float("inf"), float("inf"), 0, 0, 0.0, 0.0)
        for box in range(boxes):
            for first in range(0, size, job.gpus):
                block = free[box][first : first + job.gpus]
                start = max(block)
                window = start + job.load
                if exclusive:
                    window = _gap(windows[box], window, job.measure)
                end = window + job.measure
                if end <= best[0]:
                    best = min(best, (end, start * job.gpus - sum(block), box, first, start, window))
        end, _, box, first, start, window = best
        made.append(Slot(job, box, tuple(range(first, first + job.gpus)), start, window, end))
        windows[box].append((window, end))
        windows[box].sort()
        free[box][first : first + job.gpus] = [end] * job.gpus
    return made


def _gap(taken: list[tuple[float, float]], earliest: float, length: float) -> float:
    """Return the first time from `earliest` on when nothing is measured for so long; `taken` ascends."""
    at = earliest
    for start, end in taken:
        if at + length <= start + 1e-9:
            break
        at = max(at, end)
    return at


def makespan(plan: Sequence[Slot]) -> float:
    """Return when the last job ends."""
    return max((slot.end for slot in plan), default=0.0)


def lower_bound(jobs: Sequence[Job], boxes: int = 1, size: int = 8, *, exclusive: bool = False) -> float:
    """Return a time that no schedule beats: the longest job, the whole area over all GPUs, the jobs wider than half
    a box one after another in it, and exclusive windows one after another (`_serial`)."""
    if not jobs:
        return 0.0
    area = sum(job.seconds * job.gpus for job in jobs) / (boxes * size)
    wide = sum(job.seconds for job in jobs if job.gpus * 2 > size) / boxes
    bound = max(area, wide, max(job.seconds for job in jobs))
    return max(bound, _serial(jobs, boxes, size)) if exclusive else bound


def _serial(jobs: Sequence[Job], boxes: int, size: int) -> float:
    """Return the least time when windows of a box exclude each other. Beside a job that takes a whole box not even
    a load has room, so all its seconds stand in line with the windows of the others."""
    whole = [job for job in jobs if job.gpus == size]
    others = [job for job in jobs if job.gpus < size]
    line = (sum(job.seconds for job in whole) + sum(job.measure for job in others)) / boxes
    if others and (boxes == 1 or not whole):  # the fullest box has one of them, whose load comes before any window
        line += min(job.load for job in others)
    return max(line, sum(job.measure for job in jobs) / boxes + min(job.load for job in jobs))


Problem = Literal["gpu", "window", "job"]


def conflicts(plan: Sequence[Slot], jobs: Sequence[Job], *, exclusive: bool) -> list[tuple[Problem, str]]:
    """Return what is wrong with a plan: two jobs on a GPU, two windows at once, a job that is missing."""
    found: list[tuple[Problem, str]] = []
    if sorted(slot.job.name for slot in plan) != sorted(job.name for job in jobs):
        found.append(("job", "not every job has one slot"))
    ordered = sorted(plan, key=lambda slot: slot.start)
    for index, one in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if one.box != other.box:
                continue
            if other.start < one.end - 1e-9 and set(one.gpus) & set(other.gpus):
                found.append(("gpu", f"{one.job.name} and {other.job.name}"))
            if exclusive and one.window < other.end - 1e-9 and other.window < one.end - 1e-9:
                found.append(("window", f"{one.job.name} and {other.job.name}"))
    return found
