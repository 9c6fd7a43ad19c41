"""Waiting in tests: for a condition, within a deadline, never for a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

DEADLINE = 30.0  # seconds, far beyond what any wait takes, even on a busy machine
_PAUSE = threading.Event()  # never set: the pause between two looks


def wait_until(condition: Callable[[], Any], what: str = "", deadline: float = DEADLINE) -> Any:
    """Look at a condition until it holds, and return its value; fail the test when it does not in time."""
    end = time.monotonic() + deadline
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline:g} s: {what}")
        _PAUSE.wait(0.01)
    return value


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
