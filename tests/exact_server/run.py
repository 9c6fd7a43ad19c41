"""An exact server for the length of a `with` block, and its log."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Schedule:
    """What the server does; times in microseconds."""

    lo: int = 1
    hi: int = 1
    interval_us: int = 10_000
    jitter_us: int = 0
    first_us: int = 10_000
    seed: int = 1

    def words(self) -> list[str]:
        """Return it as the programs' arguments."""
        return [str(v) for v in (self.lo, self.hi, self.interval_us, self.jitter_us, self.first_us, self.seed)]


@dataclass(frozen=True)
class Served:
    """One request as the server saw it: seconds of the monotonic clock."""

    number: int
    received: float
    writes: tuple[tuple[float, int], ...]

    @property
    def tokens(self) -> int:
        """All tokens written."""
        return sum(tokens for _, tokens in self.writes)

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first chunk."""
        rest = self.tokens - self.writes[0][1] if self.writes else 0
        return (self.writes[-1][0] - self.writes[0][0]) / rest if rest else None


@dataclass(frozen=True)
class Exact:
    """A running server."""

    port: int
    pid: int

    def log(self) -> list[Served]:
        """Return what was served since the last call."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/log", timeout=30) as answer:
            return [_served(line) for line in answer.read().decode().splitlines()]


def _served(line: str) -> Served:
    number, received, *writes = line.split()
    pairs = (write.split(":") for write in writes)
    return Served(int(number), int(received) / 1e9, tuple((int(t) / 1e9, int(n)) for t, n in pairs))


def compiler() -> str | None:
    """Return a C compiler that can build `exact.c`, None where there is none or no epoll."""
    return shutil.which(os.environ.get("CC", "cc")) if sys.platform == "linux" else None


def built() -> Path | None:
    """Return the C program, built once per source and user; None without a compiler."""
    cc = compiler()
    if cc is None:
        return None
    source = HERE / "exact.c"
    name = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"exact-server-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    program = folder / name
    if not program.exists():
        partial = folder / f"{name}.{os.getpid()}"
        subprocess.run([cc, "-O2", "-o", str(partial), str(source)], check=True)
        partial.replace(program)
    return program


def command(schedule: Schedule, variant: str = "any") -> list[str]:
    """Return how to start a server; `variant` is `c`, `python`, or `any`: C where it can be built."""
    program = None if variant == "python" else built()
    if program is None and variant == "c":
        raise RuntimeError("no C compiler: set CC, or use the Python variant")
    start = [sys.executable, "-I", "-S", str(HERE / "exact.py")] if program is None else [str(program)]
    return start + schedule.words()


@contextmanager
def exact(schedule: Schedule, variant: str = "any") -> Iterator[Exact]:
    """Run an exact server."""
    process = subprocess.Popen(command(schedule, variant), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("port "):
            raise RuntimeError(f"the exact server did not start: {line!r}")
        yield Exact(int(line.split()[1]), process.pid)
    finally:
        process.communicate()  # closes its standard input, which ends it
