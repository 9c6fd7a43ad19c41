"""Leases: who may measure on which part of this machine, shared by every process of this user.

A lease is a lock file in one folder of the user, held with flock(2). The lock belongs to the open file,
not to a name or a pid, so the death of its last holder frees it: there is nothing to clean. The file's text
(who, since when) is for people; the lock alone decides.

A GPU that runs someone else's process is never leased, nor one in quarantine.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import random
import socket
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.config import expanded
from tuner.errors import TunerError
from tuner.executors.base import Lease
from tuner.machine import Gpus, MachineError, look_at_gpus
from tuner.quarantine import still_shut
from tuner.records import FailureKind, LeaseRequest

SHARED, FOLDER = Path("/tmp"), "dflash-tuner"  # noqa: S108  # the same in every session; checked to be ours alone
CPU_SLOTS = 1  # trials that measure at once without a GPU: they share the cores, so one
IDLE_MIB = 1024  # a GPU without processes uses less than this: the driver's own share
START_GAP = 5.0  # between two starts on GPUs: servers that load weights at once slow each other down
FOREIGN_SECONDS = 20.0  # what ends takes a while to leave the driver's list
POLL_SECONDS = 0.2
PORTS = range(20_000, 32_000)  # below the range from which the kernel takes ports for outgoing connections


class LeaseError(TunerError):
    """There is no folder for leases that only this user can write."""


class NotLeased(TunerError):
    """The machine cannot give what a trial asks; `kind` is the failure it becomes."""

    def __init__(self, kind: FailureKind, message: str, evidence: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.evidence = tuple(evidence)


def runtime_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of lock files: one a user and machine, whatever the session, or leases would exclude nobody.

    `$TUNER_LEASES` names another, which then every tuner of this user and machine must be given.

    Raises:
        LeaseError: it cannot be made, or somebody else can look into it.
    """
    named = environ.get("TUNER_LEASES")
    folder = expanded(named) if named else SHARED / f"{FOLDER}-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
    except OSError as error:
        raise LeaseError(f"cannot make {folder}: {error.strerror}; set TUNER_LEASES to a folder of yours") from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise LeaseError(f"{folder} is not a folder of yours alone; remove it, chmod 700 it or set TUNER_LEASES")
    return folder


def try_lock(name: str, holder: str) -> int | None:
    """Take the lock `name` and return its open file, or None when another process holds it."""
    path = runtime_folder() / f"{name}.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    if not _still_named(path, fd):  # its last holder removed the file between our open and our lock
        os.close(fd)
        return None
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps({"holder": holder, "pid": os.getpid(), "since": time.time()}).encode(), 0)
    return fd


def _still_named(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class Held:
    """A lock that some process holds: its name, and what that process wrote into it."""

    name: str
    holder: str
    pid: int | None


def held_locks() -> tuple[Held, ...]:
    """Return the locks of this user that are held now. Takes and frees each lock that is not."""
    held = []
    for path in sorted(runtime_folder().glob("*.lock")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # its holder has just left
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            held.append(_read_holder(path))
        finally:
            os.close(fd)
    return tuple(held)


def _read_holder(path: Path) -> Held:
    try:
        note = json.loads(path.read_text(encoding="utf-8") or "{}")
    except (OSError, ValueError):
        note = {}
    return Held(path.stem, str(note.get("holder", "unknown")), note.get("pid"))


@contextlib.asynccontextmanager
async def lease(
    request: LeaseRequest, holder: str, timeout: float, tell: Callable[[str], None] = lambda _: None
) -> AsyncIterator[Lease]:
    """Hold what `request` asks, waiting up to `timeout` seconds for other holders of this user.

    Args:
        holder: who asks, for people.
        tell: called with one line when there is something to wait for.

    Raises:
        NotLeased: the machine does not have it (`config`), others hold it or `nvidia-smi` fails for too long
            (`no_progress`), or a GPU runs someone else's process (`foreign_gpu_process`).
        LeaseError: the lock folder is unusable.
    """
    began = time.monotonic()
    told = ""
    while isinstance(held := _attempt(request, holder), _Wait):
        waited = time.monotonic() - began
        if held.foreign and waited > min(FOREIGN_SECONDS, timeout):
            raise NotLeased("foreign_gpu_process", held.reason, held.foreign)
        if waited > timeout:
            raise NotLeased("no_progress", f"no lease within {timeout:.0f} s: {held.reason}")
        if held.reason != told:
            tell(f"waiting: {held.reason}")
            told = held.reason
        await asyncio.sleep(POLL_SECONDS * random.uniform(0.5, 1.5))
    try:
        yield held
    finally:
        for fd in held.fds:
            os.close(fd)


@dataclass(frozen=True)
class _Wait:
    """Why there is no lease yet: one line, and lines about strangers when they are the reason."""

    reason: str
    foreign: tuple[str, ...] = ()


def _attempt(request: LeaseRequest, holder: str) -> Lease | _Wait:
    """Try once; a driver that does not answer now may answer later, and is no configuration's fault."""
    try:
        _check_size(request)
        return _take(request, holder)
    except MachineError as error:
        return _Wait(str(error))


def _take(request: LeaseRequest, holder: str) -> Lease | _Wait:
    if not request.gpus:
        fds = _lock_all([f"cpu-{slot}" for slot in range(CPU_SLOTS)], holder)
        if (kept := _keep(fds, list(fds)[: request.cpus], request.cpus)) is None:
            return _Wait("other trials hold the CPU")
        return Lease(tuple(int(name.removeprefix("cpu-")) for name in kept), (), tuple(kept.values()))
    fds = _lock_all([f"gpu-{gpu.uuid}" for gpu in look_at_gpus().gpus], holder)
    try:
        look = look_at_gpus()  # after locking: nobody of ours starts anything on these GPUs now
    except TunerError:
        _keep(fds, [], 1)
        raise
    ours = {gpu.uuid: gpu for gpu in look.gpus if f"gpu-{gpu.uuid}" in fds}
    shut = still_shut(runtime_folder(), Gpus(tuple(ours.values()), look.processes, look.driver))
    foreign = {uuid: lines for uuid, lines in (foreign_use(look) | shut).items() if uuid in ours}
    clean = [f"gpu-{uuid}" for uuid in ours if uuid not in foreign][: request.gpus]
    if (kept := _keep(fds, clean, request.gpus)) is None:
        if not foreign:
            return _Wait("other trials hold the GPUs")
        lines = tuple(line for lines in foreign.values() for line in lines)
        blame = "a GPU is in quarantine" if foreign.keys() <= shut.keys() else "someone else's process is on a GPU"
        return _Wait(blame, lines)
    return Lease((), tuple(ours[name.removeprefix("gpu-")] for name in kept), tuple(kept.values()))


def _check_size(request: LeaseRequest) -> None:
    """Raise NotLeased when the machine can never give what is asked."""
    if not request.gpus:
        if request.cpus > CPU_SLOTS:
            raise NotLeased("config", f"the trial asks for {request.cpus} CPU slots, this machine has {CPU_SLOTS}")
    elif request.gpus > (count := len(look_at_gpus().gpus)):
        raise NotLeased("config", f"the config needs {request.gpus} GPUs, this machine shows {count}")


def _lock_all(names: Sequence[str], holder: str) -> dict[str, int]:
    """Lock those of `names` that are free: {name: open file}."""
    taken = {name: try_lock(name, holder) for name in names}
    return {name: fd for name, fd in taken.items() if fd is not None}


def _keep(fds: dict[str, int], names: Sequence[str], count: int) -> dict[str, int] | None:
    """Keep the locks `names` if they are `count`, else none; free the others."""
    kept = {name: fds[name] for name in names} if len(names) == count else {}
    for name, fd in fds.items():
        if name not in kept:
            os.close(fd)
    return kept or None


def foreign_use(look: Gpus) -> dict[str, list[str]]:
    """Return, by GPU uuid, one line per sign that somebody uses it.

    Our own servers are no exception: a lease is taken before its server starts and given back after it is
    gone, so whatever runs on a GPU that nobody leases is a stranger's, or a remnant that must end first.
    """
    signs: dict[str, list[str]] = {}
    names = {gpu.uuid: gpu for gpu in look.gpus}
    for process in look.processes:
        gpu = names[process.gpu]
        memory = "" if process.memory_used is None else f", {process.memory_used} MiB"
        signs.setdefault(gpu.uuid, []).append(f"GPU {gpu.index}: pid {process.pid or 'unknown'} {process.name}{memory}")
    for gpu in look.gpus:
        if gpu.uuid not in signs and gpu.memory_used > IDLE_MIB:
            signs[gpu.uuid] = [f"GPU {gpu.index}: {gpu.memory_used} MiB in use by processes not shown to us"]
    return signs


async def await_turn(gap: float = START_GAP, tell: Callable[[str], None] = lambda _: None) -> None:
    """Wait until the last start of a server of this user is `gap` seconds ago, and note this one."""
    fd = os.open(runtime_folder() / "start.turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    told = False
    try:
        while not _take_turn(fd, gap):
            if not told:
                tell("waiting: another server has just been started")
                told = True
            await asyncio.sleep(POLL_SECONDS)
    finally:
        os.close(fd)


def _take_turn(fd: int, gap: float) -> bool:
    """Note a start in the file of turns, unless the last one is too recent or somebody looks at it now."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    try:
        now = time.monotonic()  # one clock for all processes of this machine, from its start
        text = os.pread(fd, 64, 0)
        if text and 0 <= now - float(text) < gap:
            return False
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(now).encode(), 0)
        return True
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


@contextlib.contextmanager
def fresh_port(holder: str, host: str = "127.0.0.1") -> Iterator[int]:
    """Hold a TCP port that is free now and that no other trial of this user takes meanwhile.

    The server binds it itself, a little later, so a stranger can still be faster: whoever uses the port
    checks that the process that listens there is the one it started.

    Raises:
        NotLeased: no port is free.
    """
    for port in random.sample(PORTS, 200):
        fd = try_lock(f"port-{port}", holder)
        if fd is None:
            continue
        if _bindable(host, port):
            try:
                yield port
            finally:
                # Thousands of ports would leave as many files; the few CPU slots and GPUs keep theirs.
                (runtime_folder() / f"port-{port}.lock").unlink(missing_ok=True)
                os.close(fd)
            return
        os.close(fd)
    raise NotLeased("port", f"no free port on {host} between {PORTS.start} and {PORTS.stop}")


def _bindable(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
