"""A server of this engine for the length of a `with` block."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

READY_SECONDS = 120.0


@dataclass(frozen=True)
class Running:
    """A ready server."""

    port: int
    process: subprocess.Popen[str]
    seconds_to_ready: float
    said: deque[str]  # its newest lines

    def rss_bytes(self) -> int:
        """Resident bytes of the server and everything below it."""
        root = psutil.Process(self.process.pid)
        return sum(each.memory_info().rss for each in [root, *root.children(recursive=True)])


@contextmanager
def serving(config: dict[str, Any], program: Sequence[str] = ("engine",)) -> Iterator[Running]:
    """Serve `config` on a free loopback port; on leaving, SIGTERM and wait. `program`: the module, and its arguments.

    Raises:
        RuntimeError: it did not become ready; the message holds its last words.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", *program, "serve", str(path), "--port", "0"]
        began = time.monotonic()
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        try:
            port, ready, lines = None, False, deque[str](maxlen=50)
            for line in process.stderr or ():
                lines.append(line)
                event = json.loads(line) if line.startswith("{") else {}
                port = event.get("port", port)
                ready = event.get("event") == "ready" and port is not None
                if ready or time.monotonic() - began > READY_SECONDS:
                    break
            if port is None or not ready:
                raise RuntimeError("the server did not become ready: " + "".join([*lines][-5:]))
            seconds = time.monotonic() - began
            threading.Thread(target=_drain, args=(process, lines), daemon=True).start()
            yield Running(port, process, seconds, lines)
        finally:
            process.terminate()
            process.wait(timeout=30)


def _drain(process: subprocess.Popen[str], lines: deque[str]) -> None:
    """Keep reading stderr, so that the server never blocks on a full pipe."""
    lines.extend(process.stderr or ())
