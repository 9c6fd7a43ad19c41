"""Whether a study is being searched, is over, was stopped, or died: read from outside, without touching its lock.

Trying the lock would make a search that starts just then refuse to; so the kernel's list of locks is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tuner.dashboard.timeline import Timeline
from tuner.points import Point
from tuner.store import StudyFolder

Kind = Literal["running", "finished", "stopped", "died", "empty"]
LOCKS = Path("/proc/locks")


@dataclass(frozen=True)
class State:
    """What a study is doing, and that in a sentence."""

    kind: Kind
    text: str


def state_of(
    folder: StudyFolder,
    timelines: Iterable[Timeline],
    recorded: int,
    front: Sequence[Point],
    locks: Path = LOCKS,
    *,
    ended: bool = False,
) -> State:
    """Return the state of a study. `recorded`: how many trials are; `front`: what its records come to now.

    `ended`: whoever holds the lock is at its end, which it asks itself for its report.

    A search writes front.json whenever it ends in order. So without a running search, a front.json that is not
    what the records come to, or a trial that was begun and not recorded with no front.json after it, means that
    the search died.
    """
    if not ended and (pid := running(folder, locks)) is not None:
        return State("running", f"the search runs as process {pid}")
    cut = [timeline for timeline in timelines if timeline.end is None]
    written = _written(folder)
    if written is None:
        if not recorded and not cut:
            return State("empty", "nothing was measured yet, and no search runs")
        return State("died", f"the search died{_during(cut)}; go on with `tuner resume`")
    if written != [point.key for point in front]:
        return State("died", f"the search died{_during(cut)}; go on with `tuner resume`")
    if not cut:
        return State("finished", "the search ended and wrote its results")
    if folder.front.stat().st_mtime < max(timeline.last for timeline in cut) - 1.0:
        return State("died", f"the search died{_during(cut)}; go on with `tuner resume`")
    return State("stopped", f"the search was stopped{_during(cut)}; go on with `tuner resume`")


def _during(cut: Sequence[Timeline]) -> str:
    return f" during trial {cut[-1].trial}" if cut else ""


def _written(folder: StudyFolder) -> list[tuple[int, int]] | None:
    """Return the points of front.json, None where there is no readable one."""
    try:
        entries = json.loads(folder.front.read_bytes())
        return [(int(entry["trial"]), int(entry["concurrency"])) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def running(folder: StudyFolder, locks: Path = LOCKS) -> int | None:
    """Return the process that searches a study, None when nobody does."""
    lock = folder.path / ".lock"
    try:
        holder = int(lock.read_bytes()[:32].decode("ascii", "replace").strip() or 0)
        inode = lock.stat().st_ino
    except (OSError, ValueError):
        return None
    if not holder:
        return None
    try:
        listed = locks.read_text(encoding="ascii", errors="replace")
    except OSError:
        return holder if _alive(holder) else None  # no Linux: a number that was given to another process may deceive
    for line in listed.splitlines():
        words = line.split()
        # 1: FLOCK  ADVISORY  WRITE 4242 fe:00:1234 0 EOF; blocked waiters carry an arrow and hold nothing.
        if (
            len(words) >= 6
            and words[1] == "FLOCK"
            and words[3] == "WRITE"
            and words[5].rpartition(":")[2] == str(inode)
        ):
            return holder
    return None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
