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
        """Run trials as their GPUs become free, or others that nobody waits for; see `base.Executor.run_all`."""
        said: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        board = Board(self._gpus, [spec.lease.devices for spec in specs])

        def one(index: int) -> None:
            try:
                devices = board.take(index)
                if devices is not None:
                    lease = specs[index].lease.model_copy(update={"devices": devices})
                    with self.run(specs[index].model_copy(update={"lease": lease})) as events:
                        for event in events:
                            said.put(event)
            finally:
                board.give_back(index)
                said.put(None)

        with ThreadPoolExecutor(max_workers=max(1, len(specs))) as pool:
            futures = [pool.submit(one, index) for index in range(len(specs))]
            try:
                yield _merged(said, futures)
            finally:
                board.close()
                self._end(futures)

    def _end(self, futures: Sequence[Future[None]]) -> None:
        """Tell workers that still run to end, until none does. Their threads prove them gone."""
        while wait(futures, timeout=0).not_done:
            for process in list(self._running):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
            wait(futures, timeout=RETRY_SECONDS)


class Board:
    """Who holds which GPUs, and who waits for them, in the order of the plan; for threads.

    How long a launch takes is known only afterwards. So a trial whose own GPUs are still held takes others that are
    free and that no waiting trial is planned on.
    """

    def __init__(self, gpus: Sequence[str], planned: Sequence[tuple[str, ...]]) -> None:
        """`planned`: the GPUs of each trial; of trials that share one, the earlier goes first."""
        self._gpus = tuple(gpus)
        self._planned = tuple(planned)
        self._waiting = set(range(len(planned)))
        self._held: dict[int, tuple[str, ...]] = {}
        self._changed = threading.Condition()
        self._closed = False

    def take(self, index: int) -> tuple[str, ...] | None:
        """Wait for a trial's turn and return its GPUs; None when nothing more is to start."""
        with self._changed:
            while not self._closed:
                if (found := self._found(index)) is not None:
                    self._waiting.discard(index)
                    self._held[index] = found
                    self._changed.notify_all()  # its own GPUs may be nobody's now
                    return found
                self._changed.wait()
        return None

    def give_back(self, index: int) -> None:
        """A trial is over."""
        with self._changed:
            self._waiting.discard(index)
            self._held.pop(index, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Start nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _found(self, index: int) -> tuple[str, ...] | None:
        """Return what a trial may take now."""
        own, earlier = self._planned[index], {each for each in self._waiting if each < index}
        if not own:  # it may take any: it runs alone, after all before it
            return own if not earlier and not self._held else None
        if any(not held for held in self._held.values()) or any(not self._planned[each] for each in earlier):
            return None
        busy = {gpu for held in self._held.values() for gpu in held}
        if not busy & set(own) and not any(set(own) & set(self._planned[each]) for each in earlier):
            return own
        wanted = busy | {gpu for each in self._waiting - {index} for gpu in self._planned[each]}
        blocks = (self._gpus[first : first + len(own)] for first in range(0, len(self._gpus), len(own)))
        return next((block for block in blocks if len(block) == len(own) and not wanted & set(block)), None)


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
