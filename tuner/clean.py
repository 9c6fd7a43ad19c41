"""What dead studies left on this machine, and how to be rid of it.

Nothing is left by a tuner that ends, crashes or is killed: the watchdogs see to that. What can stay is what they
could not see: processes whose watchdogs were killed too, files of locks that died with their holders, GPUs in
quarantine, and half-written files. What a living watchdog holds is never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from tuner.leases import runtime_folder
from tuner.machine import Gpus, look_at_gpus
from tuner.quarantine import Shut, not_back, release, shut_gpus
from tuner.supervise import is_watchdog, marked

GRACE_SECONDS = 5.0
KILL_SECONDS = 5.0


class Leftover(Protocol):
    """One thing that a dead study left."""

    def __str__(self) -> str:
        """Return one line for people."""
        ...

    def end(self) -> str:
        """End or remove it; return "" or why it could not be."""
        ...


@dataclass(frozen=True)
class Stray:
    """A process that no watchdog holds any more. `started` tells it from a later one with its pid."""

    pid: int
    started: float
    command: str

    def __str__(self) -> str:
        since = time.strftime("%F %H:%M", time.localtime(self.started))
        return f"process {self.pid}, running since {since}: {self.command}"

    def end(self) -> str:
        """SIGTERM, patience, SIGKILL."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            if process.create_time() != self.started:
                return ""  # it has ended, and its pid is another's now
            process.terminate()
            if psutil.wait_procs([process], timeout=GRACE_SECONDS)[1]:
                process.kill()
                if psutil.wait_procs([process], timeout=KILL_SECONDS)[1]:
                    return "it survives SIGKILL: it hangs in the kernel; reset the GPU or reboot"
        return ""


@dataclass(frozen=True)
class DeadLock:
    """The file of a port's lock whose holder is gone."""

    path: Path

    def __str__(self) -> str:
        return f"lock file of nobody: {self.path}"

    def end(self) -> str:
        """Remove it, unless somebody has taken it meanwhile."""
        with _locked(self.path) as free:
            if free:
                self.path.unlink(missing_ok=True)
        return ""


@dataclass(frozen=True)
class Quarantine:
    """A GPU that is not leased because its memory did not come back."""

    note: Shut
    folder: Path
    now: str

    def __str__(self) -> str:
        since = time.strftime("%F %H:%M", time.localtime(self.note.since))
        return f"GPU {self.note.index} in quarantine since {since}: {self.now or 'its memory is back'}"

    def end(self) -> str:
        """Open it if its memory is back."""
        if self.now:
            return "its memory is still in use: end what holds it, or reset the GPU (nvidia-smi --gpu-reset)"
        release(self.folder, self.note.uuid)
        return ""


@dataclass(frozen=True)
class HalfWritten:
    """A file that its writer did not live to put in its place."""

    path: Path

    def __str__(self) -> str:
        return f"half-written file: {self.path}"

    def end(self) -> str:
        """Remove it."""
        self.path.unlink(missing_ok=True)
        return ""


def leftovers(results: Path) -> tuple[Leftover, ...]:
    """Return what dead studies left: processes first, then what they may hold.

    Args:
        results: the folder of studies; it need not exist.

    Raises:
        LeaseError, MachineError: the lock folder or `nvidia-smi` is unusable.
    """
    folder = runtime_folder()
    return (*_strays(), *_dead_locks(folder), *_quarantines(folder), *_half_written(results))


def _strays() -> Iterator[Stray]:
    for pid in sorted(marked()):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            line = [process, *process.parents()]
            if any(is_watchdog(member.pid) for member in line):
                continue
            yield Stray(pid, process.create_time(), " ".join(process.cmdline())[:160])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold a lock file if nobody else does; yield whether we do."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _dead_locks(folder: Path) -> Iterator[DeadLock]:
    for path in sorted(folder.glob("port-*.lock")):
        with _locked(path) as free:
            if free:
                yield DeadLock(path)


def _quarantines(folder: Path) -> Iterator[Quarantine]:
    notes = shut_gpus(folder)
    if not notes:
        return
    look = look_at_gpus()
    shown = {gpu.uuid: gpu for gpu in look.gpus}
    for note in notes:
        if (gpu := shown.get(note.uuid)) is None:
            continue  # hidden by CUDA_VISIBLE_DEVICES, or gone: nothing proves that its memory is back
        held = not_back([note.gpu(gpu)], Gpus((gpu,), look.processes)).get(note.uuid)
        yield Quarantine(note, folder, "" if held is None else held.line)


def _half_written(results: Path) -> Iterator[HalfWritten]:
    for path in sorted(results.glob("*/.*.tmp")):
        writer = path.name.split(".")[-2]
        if writer.isdigit() and not psutil.pid_exists(int(writer)):
            yield HalfWritten(path)
