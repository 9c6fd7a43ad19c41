"""The suite in two halves at once: `python -m tests [arguments of pytest]`, which is what `make test` runs.

The tuner's tests wait for processes half of the time, the engine's compute: side by side they keep two cores busy. A
half is a pytest process of its own. While they run, their progress is shown line by line; what else a half says
(failures, summary) comes in one piece when it has ended. Ctrl-C is passed on once, and a second one kills.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRESS = re.compile(r"\[ *\d+%\]$")
INTERRUPTED = 130
NOTHING_FOUND = 5  # pytest's status where no test was selected


@dataclass(frozen=True)
class Half:
    """Tests that run in one process: its name, and what pytest is given."""

    name: str
    arguments: tuple[str, ...]


HALVES = (Half("tuner", ("tests/tuner",)), Half("others", ("tests", "--ignore=tests/tuner")))


class Running:
    """A half that runs, and a thread that reads what it says."""

    def __init__(self, half: Half, arguments: Sequence[str], root: Path) -> None:
        command = [sys.executable, "-m", "pytest", "-o", f"cache_dir=.pytest_cache/{half.name}"]
        threads = max(1, (os.cpu_count() or 1) // len(HALVES))
        self._name = half.name
        self._said: list[str] = []
        self._process = subprocess.Popen(
            [*command, *half.arguments, *arguments],
            cwd=root,
            env={"OMP_NUM_THREADS": str(threads)} | os.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            process_group=0,  # a terminal's Ctrl-C reaches it through us alone, so once
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                if PROGRESS.search(line):
                    print(f"{self._name:>7} {line}", end="", flush=True)
                else:
                    self._said.append(line)
        print(f"\n{f' {self._name} ':=^100}\n{''.join(self._said)}", flush=True)

    def wait(self) -> int:
        """Return its exit status, once all it said is printed."""
        self._reader.join()
        return self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        self._process.send_signal(number)


def run(halves: Sequence[Half], arguments: Sequence[str], root: Path = ROOT) -> int:
    """Run halves at once; return 0 when all passed, 130 after Ctrl-C, else the status of the first that did not."""
    running = [Running(half, arguments, root) for half in halves]
    interrupts = 0
    while True:
        try:
            found = [each.wait() for each in running]
            break
        except KeyboardInterrupt:
            interrupts += 1
            for each in running:
                each.send(signal.SIGINT if interrupts == 1 else signal.SIGKILL)
    if interrupts:
        return INTERRUPTED
    if all(status == NOTHING_FOUND for status in found):
        return NOTHING_FOUND
    return next((status for status in found if status not in (0, NOTHING_FOUND)), 0)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # a background job begins with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    sys.exit(run(HALVES, sys.argv[1:]))
