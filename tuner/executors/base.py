"""The seam between the controller and wherever a trial runs.

The controller asks, an executor runs: `with executor.run(spec) as events` starts one worker for one trial
and yields what it says; leaving the block ends the worker and everything below it, and proves it gone. An
executor decides nothing about the study and keeps nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from tuner.records import Event, TrialSpec


@dataclass(frozen=True)
class Gpu:
    """One GPU of the machine, as `nvidia-smi` reports it. Memory in MiB."""

    index: int
    uuid: str
    name: str
    memory_total: int
    memory_used: int


@dataclass(frozen=True)
class Lease:
    """The right to measure on a part of this machine.

    Either CPU slots (candidates that share cores destroy each other's measurements) or whole GPUs. `fds` are
    the open lock files: whoever holds one of them holds the lease, so they are handed down to the process
    that outlives all others of a trial, and the lease ends exactly when that process does.
    """

    cpu_slots: tuple[int, ...]
    gpus: tuple[Gpu, ...]
    fds: tuple[int, ...]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that confine a server to the lease."""
        if not self.gpus:
            return {"CUDA_VISIBLE_DEVICES": ""}
        visible = ",".join(str(gpu.index) for gpu in self.gpus)
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible}


class Executor(Protocol):
    """A place that runs trials. Use as a context: leaving it ends whatever it still runs."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that trials may share out, neighbours next to each other; empty: one trial at a time."""
        ...

    def run_all(self, specs: Sequence[TrialSpec]) -> AbstractContextManager[Iterator[Event]]:
        """Run several trials and yield the events of all as they come, each trial's as `run` does.

        Trials that share none of their `lease.devices` run side by side; those that do, in the order given, unless
        other devices are free that no trial waits for.
        """
        ...

    def run(self, spec: TrialSpec) -> AbstractContextManager[Iterator[Event]]:
        """Start one trial and yield its events as they come.

        The last event always carries the TrialRecord, also when the worker died before it could send one
        (then a failed record with the worker's own last words). The iterator ends after it. Leaving the
        block, for whatever reason (the end, an exception, Ctrl-C), ends the worker and everything below it.
        """
        ...
