"""Trials side by side on this machine, each on GPUs of its own."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from tuner.executors.local import WORKER, LocalExecutor
from tuner.records import Event, TrialSpec

RETRY_SECONDS = 0.5  # between two signals to workers that are to end


class PackedExecutor(LocalExecutor):
    """Runs trials at the same time on disjoint GPUs (see `base.Executor`).

    Each trial sees only the GPUs it was given and leases them where it measures, as always: what is planned here keeps
    trials of one study apart, the leases keep them apart from all others. A thread reads each worker; events come out
    in one sequence, so there is still one writer.
    """

    def __init__(self, gpus: Sequence[str], worker: Sequence[str] = WORKER) -> None:
        """`gpus`: UUIDs of those to share out, neighbours next to each other."""
        super().__init__(worker)
        self._gpus = tuple(gpus)

    @property
    def gpus(self) -> tuple[str, ...]:
        """See `base.Executor.gpus`."""
        return self._gpus

    @contextlib.contextmanager
    def run_all(self, specs: Sequence[TrialSpec]) -> Iterator[Iterator[Event]]:
        """Run trials as their GPUs become free; see `base.Executor.run_all`."""
        said: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        done = [threading.Event() for _ in specs]
        stopping = threading.Event()

        def one(index: int) -> None:
            try:
                for earlier in _before(specs, index):
                    done[earlier].wait()
                if not stopping.is_set():
                    with self.run(specs[index]) as events:
                        for event in events:
                            said.put(event)
            finally:
                done[index].set()
                said.put(None)

        with ThreadPoolExecutor(max_workers=max(1, len(specs))) as pool:
            futures = [pool.submit(one, index) for index in range(len(specs))]
            try:
                yield _merged(said, futures)
            finally:
                stopping.set()
                self._end(futures)

    def _end(self, futures: Sequence[Future[None]]) -> None:
        """Tell workers that still run to end, until none does. Their threads prove them gone."""
        while wait(futures, timeout=0).not_done:
            for process in list(self._running):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
            wait(futures, timeout=RETRY_SECONDS)


def _before(specs: Sequence[TrialSpec], index: int) -> list[int]:
    """Return the earlier trials that share a GPU with one; a trial without GPUs waits for all."""
    mine = set(specs[index].lease.devices)
    return [i for i in range(index) if not mine or not specs[i].lease.devices or mine & set(specs[i].lease.devices)]


def _merged(said: queue.SimpleQueue[Event | None], futures: Sequence[Future[None]]) -> Iterator[Event]:
    """Yield events until every trial is over."""
    open_ = len(futures)
    while open_:
        event = said.get()
        if event is None:
            open_ -= 1
        else:
            yield event
    for future in futures:
        future.result()  # what broke in a thread breaks here
