"""The engine process, seen from the front: start it, follow what it prints, know how it ended."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self, cast

from engine import wire
from engine.config import EngineConfig
from engine.errors import Exit

WORKER = (sys.executable, "-m", "engine.worker")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
TAIL_LINES = 20
TAIL_SHOWN = 5
TAIL_WIDTH = 400
EXIT_GRACE = 5.0  # seconds from the end of the socket to the end of the process


@dataclass(frozen=True)
class End:
    """How the server ended: the exit status to use, its kind, and one line that says why."""

    code: int
    kind: str
    message: str


class EngineProcess:
    """The engine process and its socket; leaving the block leaves no process behind.

    The child starts with SIGINT and SIGTERM blocked, so that a signal to the whole group drains instead of killing
    it: the front decides, and the end of the socket is the child's order to stop.
    """

    def __init__(self, config: EngineConfig, worker: Sequence[str] = WORKER) -> None:
        self._config = config
        self._worker = worker
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def __enter__(self) -> Self:
        self.socket, theirs = socket.socketpair()
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._child = subprocess.Popen(
                [*self._worker, "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except BaseException:
            self.socket.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
            theirs.close()
        self._reader = threading.Thread(target=self._forward, name="engine-log", daemon=True)
        self._reader.start()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # died at once: the socket's end says so
            self.socket.sendall(self._config.model_dump_json().encode() + b"\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()
        self._child.kill()
        self._child.wait()
        self._reader.join(timeout=1)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    def _forward(self) -> None:
        """Copy the child's output to our stderr and keep its last lines."""
        output = cast(IO[bytes], self._child.stdout)  # Popen was given PIPE
        readable = True
        for raw in output:
            line = raw.decode(errors="replace").rstrip()
            self._tail.append(line[:TAIL_WIDTH])
            if readable:
                try:
                    sys.stderr.write(line + "\n")
                    sys.stderr.flush()
                except (OSError, ValueError):
                    readable = False  # our stderr is gone; the child must still not block on a full pipe
        output.close()

    def kill(self) -> None:
        """End the child at once."""
        self._child.kill()

    def wait(self) -> int:
        """Wait for the child's end, and bring it about when it does not end by itself; return its status."""
        try:
            return self._child.wait(timeout=EXIT_GRACE)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait()

    def end(self, fatal: wire.Fatal | None) -> End:
        """Wait for the child's end and return its cause (blocks for at most `EXIT_GRACE`)."""
        status = self.wait()
        self._reader.join(timeout=1)
        if fatal is not None:
            return End(fatal.code, fatal.kind, fatal.message)
        if status == Exit.OK:
            return End(Exit.INTERNAL, "crashed", "the engine process ended without saying why (status 0)")
        if status < 0:
            name = signal.Signals(-status).name
            hint = " (the kernel does this when memory runs out: see dmesg)" if name == "SIGKILL" else ""
            cause = f"was killed by {name}{hint}"
        else:
            cause = f"exited with status {status}"
        last = " | ".join(line for line in list(self._tail)[-TAIL_SHOWN:] if line)
        return End(Exit.INTERNAL, "crashed", f"the engine process {cause}; its last lines: {last or 'none'}")

    def clean(self) -> bool:
        """Whether the child has ended with status 0."""
        return self.wait() == Exit.OK
