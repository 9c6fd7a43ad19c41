"""A process that is hard to end. `python zoo.py PIDS MODE...`: writes the pid of everything it starts to PIDS."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def note(path: str, pid: int) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{pid}\n")


def main(path: str, modes: list[str]) -> None:
    note(path, os.getpid())
    if "session" in modes:
        note(path, subprocess.Popen(SLEEP, start_new_session=True).pid)
    if "cleaned" in modes:
        note(path, subprocess.Popen(SLEEP, env={}, start_new_session=True, close_fds=True).pid)
    if "orphan" in modes:
        if os.fork() == 0:
            note(path, subprocess.Popen([sys.executable, "-I", "-S", "-c", STUBBORN], start_new_session=True).pid)
            os._exit(0)
        os.wait()
    if "deaf" in modes:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "polite" in modes:
        signal.signal(signal.SIGTERM, lambda *_: (print("bye", flush=True), os._exit(0)))
    if "crowd" in modes:
        for _ in range(20):
            note(path, subprocess.Popen(SLEEP, start_new_session=True).pid)
    print("started", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
