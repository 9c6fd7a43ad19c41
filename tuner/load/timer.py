"""Being called on time, and knowing how late one was.

asyncio's own timers count whole milliseconds where epoll does; a timerfd of the kernel is exact, and is read by the
loop as a socket is. How late the loop reads it is therefore how late it stamps what has arrived: the client's own
error, measured while it works.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

TICK_SECONDS = 0.0093  # no divisor of the intervals that servers keep, so that bursts are met as others are
_MONOTONIC = 1


class Timer(Protocol):
    """Calls back once per `at`; a later `at` replaces an earlier one."""

    def at(self, when: float) -> None:
        """Call back when `time.perf_counter` says `when`, at once if it already does."""
        ...

    def close(self) -> None:
        """Never call back again."""
        ...


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class KernelTimer:
    """A timerfd (Linux), whose clock is also that of `time.perf_counter`.

    Raises:
        OSError: no file descriptor is left.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "no timer")
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._due)

    def at(self, when: float) -> None:
        """See `Timer`."""
        nanoseconds = max(1, round(when * 1e9))
        value = _Timespec(nanoseconds // 1_000_000_000, nanoseconds % 1_000_000_000)
        setting = _Setting(_Timespec(0, 0), value)
        self._libc.timerfd_settime(self._fd, 1, ctypes.byref(setting), None)

    def close(self) -> None:
        """See `Timer`."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _due(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # it was set anew since
        self._call()


class LoopTimer:
    """The event loop's own timer, where there is no timerfd."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._call = call
        self._handle: asyncio.TimerHandle | None = None

    def at(self, when: float) -> None:
        """See `Timer`."""
        self.close()
        self._handle = self._loop.call_later(max(0.0, when - time.perf_counter()), self._call)

    def close(self) -> None:
        """See `Timer`."""
        if self._handle is not None:
            self._handle.cancel()


def timer(call: Callable[[], None]) -> Timer:
    """Return the most exact timer of this system."""
    return KernelTimer(call) if sys.platform == "linux" else LoopTimer(call)


@contextmanager
def metronome() -> Iterator[list[float]]:
    """Yield a list that grows by how late this loop reads, in seconds, as long as the block lasts.

    One number for every tick that was due: a loop that misses ten has ten of them.
    """
    late: list[float] = []
    due = time.perf_counter() + TICK_SECONDS

    def tick() -> None:
        nonlocal due
        now = time.perf_counter()
        while due <= now:
            late.append(now - due)
            due += TICK_SECONDS
        clock.at(due)

    clock = timer(tick)
    clock.at(due)
    try:
        yield late
    finally:
        clock.close()
