"""Which requests of a level count: when its window opens, when it closes, and when all is over.

- *Warm-up at the measured concurrency.* The window opens when the first warm-up request is done; from then on slots
  are at evenly spread points of their requests.
- *Steady state from the completion rate.* While the first quarter of the window's requests took other time than its
  last half (Geweke 1992), that quarter is taken for warm-up too and the window moves on.
- *Length by precision.* It closes once it has lasted for `window` seconds, `enough` requests are counted, and half
  the 95 % interval of the mean time of a request is at most `width` of it; or after `longest` seconds.
- *No ramp-down.* Every counted request is followed to its end, and until the last of them is done others are sent
  that do not count. Fast requests are thus not preferred, and none is measured at less than the full load.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tuner.load.intervals import LEAST_FOR_DRIFT, relative_width, unsettled

MIN_NEEDED = 6  # the fewest whose median has a 95 % interval
MAX_NEEDED = 10  # the fewest that have a 90th percentile
LOOKS = 10  # a window is judged so many times before it may have doubled


def enough(users: int) -> int:
    """Return the fewest requests a level counts: 6 for the median's interval, up to 10 for a 90th percentile.

    One at a time, ten would take as long as the whole window of a short level.
    """
    return min(MAX_NEEDED, max(MIN_NEEDED, 2 * users))


class Door(Protocol):
    """What a steering acts on: a gate of this process, or that of another."""

    def open(self, when: float) -> None:
        """Count requests that are due from `when` on."""
        ...

    def close(self, when: float) -> None:
        """Count none that is due at `when` or later."""
        ...

    def end(self) -> None:
        """Send no more."""
        ...


class Steering(Protocol):
    """What a gate tells of."""

    def warm(self, now: float) -> None:
        """A slot is done with its warm-up."""
        ...

    def finished(self, due: float, ended: float, counted: bool) -> None:
        """A request is over; called before its slot claims the next."""
        ...

    def drained(self) -> None:
        """The gate is closed and every request that counts is over."""
        ...


class Gate:
    """Numbers the requests of one process and says which count.

    `first` and `step`: its requests are first, first + step, …; `quota`: it closes after so many that count.
    """

    def __init__(self, *, first: int = 0, step: int = 1, quota: int | None = None) -> None:
        self.steering: Steering = Silent()
        self.opened = math.inf
        self.closed = math.inf
        self.over = asyncio.Event()
        self.on_open: Callable[[], None] = lambda: None
        self.counted = 0
        self.uncounted = 0
        self._next, self._step = first, step
        self._left = quota
        self._pending = 0
        self._told = False

    def claim(self, due: float) -> tuple[int, bool]:
        """Take the next request; return (its index, whether it counts)."""
        index = self._next
        self._next += self._step
        counts = self.opened <= due < self.closed and self._left != 0
        if counts:
            self.counted += 1
            self._pending += 1
            self._left = None if self._left is None else self._left - 1
        else:
            self.uncounted += 1
        return index, counts

    @property
    def used_up(self) -> bool:
        """Whether the quota is claimed."""
        return self._left == 0

    def finish(self, due: float, ended: float, counted: bool) -> None:
        """A request is over."""
        self._pending -= counted
        self.steering.finished(due, ended, counted)
        self._tell_drained()

    def open(self, when: float) -> None:
        """See `Door`."""
        self.opened = when
        self.on_open()
        self._tell_drained()

    def close(self, when: float) -> None:
        """See `Door`."""
        self.closed = when
        self._tell_drained()

    def end(self) -> None:
        """See `Door`."""
        self.over.set()

    def _tell_drained(self) -> None:
        if self._pending == 0 and not self._told and (self.closed < math.inf or self.used_up):
            self._told = True
            self.steering.drained()


class Silent:
    """A steering that does nothing."""

    def warm(self, now: float) -> None:
        """See `Steering`."""

    def finished(self, due: float, ended: float, counted: bool) -> None:
        """See `Steering`."""

    def drained(self) -> None:
        """See `Steering`."""


@dataclass(frozen=True)
class Rule:
    """How long a window lasts, in seconds; `flying`: requests that count and are in flight when one is over."""

    window: float
    longest: float
    width: float
    enough: int
    flying: int = 0


@dataclass
class Window:
    """Opens and closes the doors of a level by a `Rule`."""

    rule: Rule
    doors: Sequence[Door]
    steady: bool = True
    opened: float = math.inf
    closed: float = math.inf
    _first: float = math.inf  # when it opened at first
    _look: float = 0.0
    _cycles: list[tuple[float, float]] = field(default_factory=list)  # (due, seconds) of those over that count
    _drained: int = 0

    def warm(self, now: float) -> None:
        """See `Steering`."""
        if self.opened == math.inf:
            self.opened = self._first = now
            self._look = now + self.rule.window
            for door in self.doors:
                door.open(now)

    def finished(self, due: float, ended: float, counted: bool) -> None:
        """See `Steering`."""
        if counted and self.closed == math.inf:
            self._cycles.append((due, ended - due))
        if self.closed == math.inf and ended >= self._look and self.opened < math.inf:
            self._judge(ended)

    def _judge(self, now: float) -> None:
        self._look = now + self.rule.window / LOOKS
        if len(self._cycles) + self.rule.flying < self.rule.enough:
            return
        cycles = sorted(self._cycles)
        lengths = [seconds for _, seconds in cycles]
        early = unsettled(lengths)
        last = now - self._first >= self.rule.longest
        if early and not last:
            self._cycles = cycles[early:]
            self.opened = cycles[early][0] if early < len(cycles) else now
            self._look = min(self.opened + self.rule.window, self._first + self.rule.longest)
            for door in self.doors:
                door.open(self.opened)
            return
        settled = early == 0 and (self.opened == self._first or len(cycles) >= LEAST_FOR_DRIFT)
        if last or (settled and relative_width(lengths) <= self.rule.width):
            self.steady = settled
            self.closed = now
            for door in self.doors:
                door.close(now)

    def drained(self) -> None:
        """See `Steering`."""
        self._drained += 1
        if self._drained == len(self.doors):
            for door in self.doors:
                door.end()


@dataclass
class Quota:
    """Opens the doors when every slot is warm; they close themselves when their quota is used up."""

    slots: int
    doors: Sequence[Door]
    opened: float = math.inf
    closed: float = math.inf
    steady: bool = True
    done: int = 0
    _warm: int = 0
    _drained: int = 0

    def warm(self, now: float) -> None:
        """See `Steering`."""
        self._warm += 1
        if self._warm == self.slots:
            self.opened = now
            for door in self.doors:
                door.open(now)

    def finished(self, due: float, ended: float, counted: bool) -> None:
        """See `Steering`."""
        self.done += counted
        self.closed = ended

    def drained(self) -> None:
        """See `Steering`."""
        self._drained += 1
        if self._drained == len(self.doors):
            for door in self.doors:
                door.end()
