"""A tiny process between the tuner and what it starts, so that nothing outlives the tuner.

Run as a script of its own, with nothing but the standard library, so that it starts in milliseconds:

    python -I -S watchdog.py PARENT LOG CAP STDIN STDOUT -- ARGV...

It becomes the reaper of every descendant (double forks and new sessions included), starts ARGV in a session
of its own, copies its output to LOG (at most CAP bytes of it, and always the last of it), and reports on its
own standard output, one JSON line each:

    {"started": PID, "subreaper": true}   {"exited": [CODE, SIGNAL]}   {"gone": true, "forced": false, …}

Its standard input is its leash. `stop SECONDS` asks ARGV to end (SIGTERM) and ends every descendant after
that time; end of file, or a parent that is no longer PARENT, ends them at once. It leaves when none is left.

STDIN and STDOUT are inherited file descriptors for ARGV, or −1: no input, and output to LOG.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TAIL_BYTES = 256 * 1024
FLUSH_SECONDS = 1.0  # what is left of a server that ended by itself may write its last words for this long
GIVE_UP_SECONDS = 30.0  # a process that SIGKILL does not end in this time hangs in the kernel: it is reported
PARENT_POLL_SECONDS = 0.5
# A process may end while we look, and one that we may not look at (/proc mounted with hidepid) is not ours.
ABSENT = (FileNotFoundError, ProcessLookupError, PermissionError)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _prctl(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0)


class Entry:
    """One process of /proc: its parent, its group, and whether it lives (a zombie does not)."""

    def __init__(self, stat: bytes) -> None:
        state, parent, group = stat.rpartition(b")")[2].split()[:3]
        self.lives = state not in (b"Z", b"X")
        self.parent = int(parent)
        self.group = int(group)


def processes() -> dict[int, Entry]:
    """Return every process of this machine that we may see, by pid; empty where there is no /proc."""
    found: dict[int, Entry] = {}
    try:
        names = os.listdir("/proc")
    except FileNotFoundError:
        return found
    for name in filter(str.isdigit, names):
        with contextlib.suppress(*ABSENT), open(f"/proc/{name}/stat", "rb") as file:
            found[int(name)] = Entry(file.read())
    return found


def descendants(root: int) -> list[int]:
    """Return the living processes below `root`; empty where there is no /proc."""
    everyone = processes()
    children: dict[int, list[int]] = {}
    for pid, entry in everyone.items():
        children.setdefault(entry.parent, []).append(pid)
    found: list[int] = []
    frontier = [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found.extend(pid for pid in below if everyone[pid].lives)
        frontier.extend(below)
    return found


def group_members(group: int) -> list[int]:
    """Return the living processes of a process group; empty where there is no /proc."""
    return [pid for pid, entry in processes().items() if entry.group == group and entry.lives]


def send(pids: Sequence[int], number: int) -> None:
    """Send a signal to each process that still exists and is ours."""
    for pid in pids:
        with contextlib.suppress(*ABSENT):
            os.kill(pid, number)


class Log:
    """A file that takes a bounded number of bytes, and the last ones in memory."""

    def __init__(self, path: str, cap: int) -> None:
        self._fd = os.open(
            path,
            os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC,
            0o644,
        )
        self._room = cap
        self._tail = bytearray()
        self._dropped = 0
        self.error = ""

    def write(self, data: bytes) -> None:
        """Append while there is room, else remember the end."""
        head, rest = data[: self._room], data[self._room :]
        self._append(head)
        self._room -= len(head)
        if rest:
            self._tail += rest
            excess = len(self._tail) - TAIL_BYTES
            if excess > 0:
                del self._tail[:excess]
                self._dropped += excess

    def flush(self) -> None:
        """Append the remembered end, saying how much is missing before it."""
        if self._tail:
            self._append(b"\n[%d bytes left out]\n%b" % (self._dropped, bytes(self._tail)))
            self._tail.clear()
            self._dropped = 0

    def _append(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except OSError as error:  # a full disk must not stop the supervision; it is reported with the end
                self.error = str(error)
                return


class Watchdog:
    """One child, everything below it, and the leash."""

    def __init__(self, parent: int, log: Log, stdin: int, stdout: int, argv: list[str]) -> None:
        self._parent = parent
        self._log = log
        self._exit: tuple[int | None, int | None] | None = None
        self._wake, wake_write = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        self._ended = False  # somebody sent us a signal: the same as a cut leash
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        subreaper = _prctl(PR_SET_CHILD_SUBREAPER, 1)
        read_end, output = os.pipe()
        os.set_blocking(read_end, False)
        self._output: int | None = read_end  # None: nobody below can write to it any more
        self._child = self._spawn(argv, stdin, stdout, output)
        for fd in {output, stdin, stdout} - {-1}:
            os.close(fd)
        self._report(f'{{"started": {self._child}, "subreaper": {str(subreaper).lower()}}}')

    def run(self) -> None:
        """Watch until the child ends or the leash says so, then leave nothing."""
        grace = self._watch(None, until_empty=False)
        if grace is None:  # it ended by itself: what it left behind may still write its last words
            self._end(FLUSH_SECONDS)
        elif grace > 0:
            self._end(grace)
        forced = bool(self._below())
        self._kill_all()
        self._drain()
        self._log.flush()
        survivors = self._below()
        error = self._log.error.replace("\\", "/").replace('"', "'")
        self._report(
            f'{{"gone": {str(not survivors).lower()}, "forced": {str(forced).lower()}, '
            f'"survivors": {survivors}, "log_error": "{error}"}}'
        )

    def _end(self, grace: float) -> None:
        """Ask for an end and wait for it: the child first, so that it can end its own, then what it left."""
        deadline = time.monotonic() + grace
        if self._exit is None:
            send([self._child], signal.SIGTERM)
            if self._watch(deadline, until_empty=False) is not None:
                return  # the leash was cut meanwhile: no more patience
        if self._exit is not None:
            send(self._below(), signal.SIGTERM)
            self._watch(deadline, until_empty=True)

    def _watch(self, deadline: float | None, until_empty: bool) -> float | None:
        """Copy output until an order, the deadline, or the end of the child (`until_empty`: of all below us).

        Returns the seconds of grace ordered (0: end at once), or None.
        """
        pending = b""
        while True:
            self._reap()
            if self._exit is not None and not (until_empty and self._below()):
                return None
            if self._ended or os.getppid() != self._parent:
                return 0.0
            timeout = PARENT_POLL_SECONDS if deadline is None else min(0.1, deadline - time.monotonic())
            if timeout <= 0:
                return None
            readers = [fd for fd in (0, self._output, self._wake) if fd is not None]
            ready, _, _ = select.select(readers, [], [], timeout)
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            if self._output in ready:
                self._drain()
            if 0 in ready:
                data = os.read(0, 4096)
                if not data:
                    return 0.0
                pending += data
                if b"\n" in pending:
                    return float(pending.split(b"\n")[0].removeprefix(b"stop "))

    def _spawn(self, argv: list[str], stdin: int, stdout: int, output: int) -> int:
        me = os.getpid()
        # A signal meant for the child must not meet our own handler between fork and exec.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            return pid
        try:
            os.setsid()
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != me:
                os._exit(127)
            os.dup2(os.open(os.devnull, os.O_RDONLY) if stdin < 0 else stdin, 0)
            os.dup2(output if stdout < 0 else stdout, 1)
            os.dup2(output, 2)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, *_SIGNALS):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.execvp(argv[0], argv)  # noqa: S606  # an argument list, never a shell
        except OSError as error:
            os.write(2, f"cannot start {argv[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(127)

    def _below(self) -> list[int]:
        """What is still alive below us; without /proc only the child itself is known."""
        if os.path.isdir("/proc"):
            return descendants(os.getpid())
        return [self._child] if self._exit is None else []

    def _kill_all(self) -> None:
        """SIGKILL, again and again, until no descendant is left."""
        deadline = time.monotonic() + GIVE_UP_SECONDS
        if not os.path.isdir("/proc"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child, signal.SIGKILL)
        while (left := self._below()) and time.monotonic() < deadline:
            send(left, signal.SIGKILL)
            self._reap()
            self._drain()
            time.sleep(0.005)
        self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._child:
                number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
                code = os.WEXITSTATUS(status) if number is None else None
                self._exit = (code, number)
                self._drain()
                self._log.flush()
                words = ["null" if value is None else str(value) for value in (code, number)]
                self._report(f'{{"exited": [{words[0]}, {words[1]}]}}')

    def _drain(self) -> None:
        """Copy what is in the pipe now, at most a few megabytes so that a flood cannot hold us."""
        for _ in range(64):
            if self._output is None:
                return
            try:
                data = os.read(self._output, 65536)
            except BlockingIOError:
                return
            if not data:  # at its end a pipe stays readable for ever
                os.close(self._output)
                self._output = None
            self._log.write(data)

    def _report(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody reads any more: the leash tells us the same
            os.write(1, line.encode() + b"\n")

    def _on_signal(self, *_: object) -> None:
        self._ended = True


def main(argv: list[str]) -> None:
    """Parse the fixed arguments and watch."""
    parent, path, cap, stdin, stdout, dashes, *command = argv
    if dashes != "--" or not command:
        raise SystemExit(__doc__)
    Watchdog(int(parent), Log(path, int(cap)), int(stdin), int(stdout), command).run()


if __name__ == "__main__":
    main(sys.argv[1:])
