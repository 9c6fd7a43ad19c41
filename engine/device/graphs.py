"""Work that is launched operation by operation, or captured once and replayed: the same functions, the same buffers.

`add` takes a function without arguments that reads and writes fixed device tensors, and returns a function that does
the same work: itself, or the replay of its CUDA graph, whose result are the tensors that the capture made. What the
work leaves in the buffers must not matter: it is run, and more than once, before `add` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol, TypeVar

import torch

from engine.errors import GraphCaptureError, OutOfMemory, OutOfMemoryInCapture, is_full

T = TypeVar("T")


class Graphs(Protocol):
    """How work runs."""

    captured: bool

    def add(self, name: str, work: Callable[[], T]) -> Callable[[], T]:
        """Return what does `work`; `name` says in errors what it is."""
        ...

    def room_for(self, name: str) -> AbstractContextManager[None]:
        """Turn what is raised for want of memory into an `OutOfMemory` that names what does not fit."""
        ...


class EagerGraphs:
    """Every operation is launched by the host."""

    captured = False

    def add(self, name: str, work: Callable[[], T]) -> Callable[[], T]:
        """Run the work once, which compiles its kernels, and return it.

        Raises:
            OutOfMemory: its tensors do not fit beside weights and cache.
        """
        with self.room_for(name):
            work()
        return work

    def room_for(self, name: str) -> AbstractContextManager[None]:
        """See `Graphs`."""
        return _room(OutOfMemory, f"{name} does not fit", "lower memory.max_running")


class CapturedGraphs:
    """One CUDA graph a piece of work, all in one memory pool: add the largest first, the others fit into its memory."""

    captured = True

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def add(self, name: str, work: Callable[[], T]) -> Callable[[], T]:
        """Run the work once, which compiles its kernels, then capture it.

        Raises:
            GraphCaptureError: it cannot be captured.
            OutOfMemoryInCapture: its tensors do not fit beside weights and cache.
        """
        with self.room_for(name):
            return self._add(name, work)

    def room_for(self, name: str) -> AbstractContextManager[None]:
        """See `Graphs`."""
        advice = "lower the largest of graphs.batch_sizes with memory.max_running"
        return _room(OutOfMemoryInCapture, f"{name} does not fit", advice)

    def _add(self, name: str, work: Callable[[], T]) -> Callable[[], T]:
        graph = torch.cuda.CUDAGraph()
        try:
            work()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what this run took is free for the pool, which a capture cannot ask for
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                made = work()
            except BaseException:
                with suppress(RuntimeError):  # the first error is the cause
                    graph.capture_end()
                raise
            graph.capture_end()
        except RuntimeError as error:
            if is_full(error):
                raise
            cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise GraphCaptureError(f"{name} could not be captured: {cause}; use graphs.kind eager") from error

        def replay() -> T:
            graph.replay()
            return made

        return replay


@contextmanager
def _room(kind: type[OutOfMemory], what: str, advice: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_full(error):
            raise
        free, total = torch.cuda.mem_get_info()
        raise kind(
            f"{what}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free beside weights and cache; "
            f"lower memory.kv_tokens or kv_fraction, or {advice}"
        ) from error
