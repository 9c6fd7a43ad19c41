"""Does a server that is not ready get on? Its log grows, its memory grows, or at least it computes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import psutil

from tuner.errors import TunerError
from tuner.supervise import Supervised

LEAST_GROWTH = 2**20  # bytes of memory; less is the noise of an allocator
GPU_LOOK_SECONDS = 5.0  # asking the driver costs a process


class Life:
    """Two clocks: `grew`, when log or memory last grew; `moved`, when they did or CPU time was spent.

    Growth is progress. Work alone is none: a server may compile for minutes, and it may as well spin for ever.
    """

    def __init__(self, server: Supervised, gpu_memory: Callable[[], int] | None = None) -> None:
        """`gpu_memory`: bytes in use on the server's GPUs, None without GPUs; called in a thread."""
        self._server = server
        self._gpu_memory = gpu_memory
        self._asked: asyncio.Task[int] | None = None
        self._asked_at = 0.0
        self._gpu = 0
        self._memory = 0
        self._log = 0
        self._work = 0
        self.grew = self.moved = time.monotonic()
        self._log, self._memory, self._work = self._measure()

    def look(self) -> None:
        """Compare with the last look; call it within a running event loop."""
        now = time.monotonic()
        log, memory, work = self._measure()
        self._ask_gpu(now)
        if log != self._log or memory + self._gpu >= self._memory + LEAST_GROWTH:
            self.grew = self.moved = now
        elif work != self._work:
            self.moved = now
        self._log, self._work = log, work
        self._memory = max(self._memory, memory + self._gpu)

    def _measure(self) -> tuple[int, int, int]:
        """Return the log's size, the resident bytes of all processes, and tenths of a second of CPU time."""
        resident, spent = 0, 0.0
        for pid in self._server.tree():
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                process = psutil.Process(pid)
                with process.oneshot():
                    resident += process.memory_info().rss
                    times = process.cpu_times()
                    spent += times.user + times.system
        return self._server.log_size(), resident, int(spent * 10)

    def _ask_gpu(self, now: float) -> None:
        if self._gpu_memory is None:
            return
        if self._asked is not None and self._asked.done():
            with contextlib.suppress(TunerError):  # a driver that does not answer tells nothing
                self._gpu = self._asked.result()
            self._asked = None
        if self._asked is None and now - self._asked_at >= GPU_LOOK_SECONDS:
            self._asked_at = now
            self._asked = asyncio.ensure_future(asyncio.to_thread(self._gpu_memory))
