"""A process tree that cannot outlive us, and the proof that it is gone.

`with supervise(argv, …) as process` puts `watchdog.py` between this process and the one it starts. Leaving
the block stops the tree: SIGTERM, patience, SIGKILL for whatever is left, and then a look that nothing is.
However this process ends, SIGKILL included, the watchdog ends the tree.

On Linux this holds for double forks, new sessions and cleaned environments. Elsewhere there is no reaper of
orphans and no /proc, and only the process group of the started process is ended; `tuner doctor` says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tuner import watchdog
from tuner.errors import TunerError

LOG_CAP = 62 * 2**20  # with its kept end and the worker's own log, a trial's logs stay below 64 MiB
MARK = "DFLASH_TUNER_TREE"  # in the environment of everything below a watchdog: how a stray is known for ours
TAIL_BYTES = 64 * 1024
GRACE_SECONDS = 10.0
START_SECONDS = 30.0
PORT_SECONDS = 5.0
STOP_SECONDS = watchdog.FLUSH_SECONDS + watchdog.GIVE_UP_SECONDS + 5.0  # beyond its grace, until a watchdog is given up


class SuperviseError(TunerError):
    """The watchdog did not start: this machine cannot run processes for us."""


@dataclass(frozen=True)
class Exit:
    """How a process ended: with a code, or by a signal."""

    code: int | None
    signal: int | None

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.code}"
        try:
            return f"signal {self.signal} ({signal.Signals(self.signal).name})"
        except ValueError:
            return f"signal {self.signal}"


@dataclass(frozen=True)
class Stopped:
    """What stopping a process tree came to.

    `gone`: no process of it is left. `forced`: some ended by SIGKILL only. `survivors`: pids that not even
    SIGKILL ended (they hang in the kernel). `log_error`: why the log is incomplete, if it is. `port_free`:
    whether nobody listens on its port any more, None when it had none.
    """

    exit: Exit | None
    gone: bool
    forced: bool
    survivors: tuple[int, ...]
    seconds: float
    log_error: str = ""
    port_free: bool | None = None


class Supervised:
    """A process that runs below a watchdog. Made by `supervise`."""

    def __init__(self, dog: subprocess.Popen[bytes], log: Path, adopt: bool, port: int | None, mark: str) -> None:
        if dog.stdin is None or dog.stdout is None:
            raise SuperviseError("the watchdog was started without its pipes")
        self._dog = dog
        self._adopt = adopt
        self._port = port
        self._mark = mark
        self._leash = dog.stdin
        self._status = dog.stdout
        self._rest = b""
        self._open = True
        self._gone: dict[str, object] | None = None
        self.exit: Exit | None = None
        self.stopped: Stopped | None = None
        self.subreaper = False
        self.pid = -1
        self.log = log
        os.set_blocking(self._status.fileno(), False)
        if not self._read_until(lambda: self.pid > 0, START_SECONDS):
            dog.kill()
            dog.wait()
            _sweep(dog.pid, adopt, mark)
            raise SuperviseError(f"the watchdog did not start, or was killed at once (see {log})")

    def poll(self) -> Exit | None:
        """Return how the process ended, or None while it runs."""
        self._read()
        return self.exit

    async def wait(self) -> Exit:
        """Wait for the end of the process; it is noticed at once. One waiter at a time."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def look() -> None:
            if self.poll() is not None and not ended.done():
                ended.set_result(None)

        if self.poll() is None:
            loop.add_reader(self._status.fileno(), look)
            try:
                await ended
            finally:
                loop.remove_reader(self._status.fileno())
        if self.exit is None:
            raise SuperviseError("the watchdog ended without a word")
        return self.exit

    def tail(self, limit: int = TAIL_BYTES) -> str:
        """Return the end of the log, at most `limit` bytes, undecodable bytes replaced."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - limit))
                return file.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def log_size(self) -> int:
        """Return the log's size in bytes: it grows while the process makes progress."""
        try:
            return self.log.stat().st_size
        except FileNotFoundError:
            return 0

    def tree(self) -> list[int]:
        """Return the pids of the process and everything below it."""
        below = watchdog.descendants(self._dog.pid)
        if below:
            return below
        try:
            process = psutil.Process(self.pid)
            return [
                self.pid,
                *(child.pid for child in process.children(recursive=True)),
            ]
        except psutil.NoSuchProcess:
            return []

    def stop(self, grace: float = GRACE_SECONDS) -> Stopped:
        """End the tree and prove it gone; a second call returns the first one's result."""
        if self.stopped is not None:
            return self.stopped
        began = time.monotonic()
        with contextlib.suppress(BrokenPipeError):
            self._leash.write(f"stop {grace}\n".encode())
            self._leash.flush()
        self._read_until(lambda: self._gone is not None, grace + STOP_SECONDS)
        told = self._gone or {}
        if not told:  # the watchdog was killed, or hangs: its orphans fall to us
            self._dog.kill()
            self._dog.wait()
            told = _sweep(self.pid, self._adopt, self._mark)
        with contextlib.suppress(BrokenPipeError):
            self._leash.close()
        self._dog.wait()
        self._status.close()
        self._open = False
        survivors = told.get("survivors")
        self.stopped = Stopped(
            exit=self.exit,
            gone=bool(told.get("gone")),
            forced=bool(told.get("forced")),
            survivors=tuple(survivors) if isinstance(survivors, list) else (),
            seconds=time.monotonic() - began,
            log_error=str(told.get("log_error", "")),
            port_free=None if self._port is None else _becomes_free(self._port),
        )
        return self.stopped

    def _read_until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Read reports until `done()` or the time is over."""
        deadline = time.monotonic() + seconds
        while not done():
            left = deadline - time.monotonic()
            if left <= 0 or not self._open:
                return False
            select.select([self._status], [], [], left)
            self._read()
        return True

    def _read(self) -> None:
        while self._open:
            try:
                data = os.read(self._status.fileno(), 65536)
            except BlockingIOError:
                return
            if not data:
                self._open = False
                if self._gone is None and self.exit is None:
                    # The watchdog was killed; the kernel kills its child with it.
                    self.exit = Exit(None, int(signal.SIGKILL))
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, report: dict[str, object]) -> None:
        if isinstance(pid := report.get("started"), int):
            self.pid = pid
            self.subreaper = bool(report.get("subreaper"))
        elif isinstance(ended := report.get("exited"), list):
            self.exit = Exit(*ended)
        elif "gone" in report:
            self._gone = report


@contextlib.contextmanager
def supervise(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Path,
    keep: Sequence[int] = (),
    stdin: int | None = None,
    stdout: int | None = None,
    grace: float = GRACE_SECONDS,
    adopt: bool = False,
    port: int | None = None,
    log_cap: int = LOG_CAP,
) -> Iterator[Supervised]:
    """Run `argv` so that nothing of it outlives this block or this process.

    Args:
        env: the whole environment of the process.
        log: file that its standard error takes, and its standard output unless `stdout` is given.
        keep: file descriptors that the watchdog holds until the last process is gone (leases); `argv` does
            not get them.
        stdin: file descriptor it reads from; None is no input.
        stdout: file descriptor it writes to; None is the log.
        grace: seconds between SIGTERM and SIGKILL when the block is left.
        adopt: become the parent of orphans, so that `stop` reaches them even when the watchdog was killed.
            For a process that starts nothing but this tree: all its other descendants are taken for orphans.
        port: the TCP port it was told to listen on, which must be free when it has stopped.
        log_cap: most bytes that the log takes, its kept end (a few hundred KiB) not counted.

    Raises:
        SuperviseError: the watchdog could not be started.
    """
    if adopt:
        _adopt_orphans()
    passed = [fd for fd in (stdin, stdout) if fd is not None]
    ends = ["-1" if fd is None else str(fd) for fd in (stdin, stdout)]
    script = [sys.executable, "-I", "-S", str(Path(watchdog.__file__))]
    command = [*script, str(os.getpid()), str(log), str(log_cap), *ends, "--", *argv]
    mark = f"{os.environ.get(MARK, '')}/{os.getpid()}-{secrets.token_hex(8)}"
    try:
        dog = subprocess.Popen(
            command,
            env={**env, MARK: mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[*passed, *keep],
            start_new_session=True,
        )
    except OSError as error:
        raise SuperviseError(f"cannot start {command[0]}: {error}") from error
    process = Supervised(dog, log, adopt, port, mark)
    try:
        yield process
    finally:
        process.stop(grace)


def _adopt_orphans() -> None:
    """Become the parent of orphans below this process (Linux; elsewhere nothing is adopted)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(watchdog.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def marked(mark: str = "") -> dict[int, str]:
    """Return this user's living processes below a watchdog, now or before it died: {pid: mark}.

    `mark`: only the tree of this one. A process that emptied its environment is not found.
    """
    found: dict[int, str] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            own = process.environ().get(MARK, "")
            if own.startswith(mark or "/") and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = own
    return found


def _sweep(leader: int, adopted: bool, mark: str) -> dict[str, object]:
    """End what a killed watchdog left: the group of its child, the orphans that fell to us, and the strays.

    A watchdog further down may still be at work; it holds leases until its own tree is gone, so it goes last.
    """
    deadline = time.monotonic() + watchdog.GIVE_UP_SECONDS
    while True:
        left = watchdog.group_members(leader) + (watchdog.descendants(os.getpid()) if adopted else [])
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
            if not os.path.isdir("/proc"):
                left = [leader]  # the group still has members: all that can be seen here
        strays = set(marked(mark)) - set(left)
        watchdogs = {pid for pid in strays if is_watchdog(pid)}
        watchdog.send([*left, *(strays - watchdogs)], signal.SIGKILL)
        if not left and strays == watchdogs:
            watchdog.send(sorted(watchdogs), signal.SIGTERM)
        with contextlib.suppress(ChildProcessError):
            while adopted and os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left += strays
        if not left or time.monotonic() > deadline:
            return {"gone": not left, "forced": True, "survivors": left}
        time.sleep(0.01)


def is_watchdog(pid: int) -> bool:
    """Whether a process is one of our watchdogs."""
    try:
        return any(Path(word).parts[-2:] == ("tuner", "watchdog.py") for word in psutil.Process(pid).cmdline()[:5])
    except psutil.Error:
        return False


def listens(pids: Sequence[int], port: int) -> bool | None:
    """Tell whether one of these processes listens on a TCP port; None when nobody does.

    False means a stranger listens there.
    """
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            for connection in psutil.Process(pid).net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return True
    return None if port_free(port) else False


def _becomes_free(port: int) -> bool:
    """Wait until nobody listens on a port, for a few seconds: the kernel is a little behind the processes."""
    deadline = time.monotonic() + PORT_SECONDS
    while not port_free(port):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def port_free(port: int) -> bool:
    """Whether a loopback port can be bound."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
