"""GPUs whose memory did not come back when their server was gone: nothing is measured there until it has.

A note in the user's runtime folder names the GPU, what was in use before and why it is shut. Whoever wants to lease
it looks again, and the note goes when the memory is back: what is proven needs no amnesty.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tuner.errors import TunerError
from tuner.executors.base import Gpu
from tuner.machine import QUERY_SECONDS, Gpus, look_at_gpus
from tuner.store import write_atomic

SLACK_MIB = 256  # the driver's own share comes and goes by this much
BACK_SECONDS = 30.0  # the driver takes a while to free what a dead process held
PROOF_SECONDS = BACK_SECONDS + 2 * QUERY_SECONDS  # with a last look by a driver that hardly answers
POLL_SECONDS = 0.5
SUFFIX = ".quarantine"


@dataclass(frozen=True)
class Shut:
    """One GPU in quarantine. `baseline` in MiB; `since` in Unix time."""

    uuid: str
    index: int
    baseline: int
    reason: str
    since: float

    def gpu(self, shown: Gpu) -> Gpu:
        """Return the GPU as it was leased."""
        return replace(shown, memory_used=self.baseline)


@dataclass(frozen=True)
class HeldBack:
    """A GPU that did not come back: a line about it, and whether the driver names processes that use it."""

    line: str
    used: bool = False


def not_back(gpus: Sequence[Gpu], look: Gpus) -> dict[str, HeldBack]:
    """Return, by uuid, what is still in use on GPUs that were leased as `gpus` (with their baseline)."""
    now = {gpu.uuid: gpu for gpu in look.gpus}
    found: dict[str, HeldBack] = {}
    for gpu in gpus:
        users = [process for process in look.processes if process.gpu == gpu.uuid]
        if gpu.uuid not in now:
            found[gpu.uuid] = HeldBack(f"GPU {gpu.index}: the driver does not show it any more")
        elif users or now[gpu.uuid].memory_used > gpu.memory_used + SLACK_MIB:
            who = ", ".join(f"pid {process.pid or 'unknown'} {process.name}" for process in users)
            line = f"GPU {gpu.index}: {now[gpu.uuid].memory_used} MiB in use, {gpu.memory_used} before the launch"
            found[gpu.uuid] = HeldBack(line + (f" ({who})" if who else ""), used=bool(users))
    return found


def prove_back(gpus: Sequence[Gpu], folder: Path, seconds: float = BACK_SECONDS) -> tuple[HeldBack, ...]:
    """Wait until the memory of leased GPUs is back at its baseline; shut those where it is not.

    Returns the GPUs that are in quarantine now. Call it with the lease still held.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            left = not_back(gpus, look_at_gpus()) if gpus else {}
        except TunerError as error:
            left = {gpu.uuid: HeldBack(f"GPU {gpu.index}: {error}") for gpu in gpus}
        if not left or time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    for gpu in gpus:
        if gpu.uuid in left:
            note = Shut(gpu.uuid, gpu.index, gpu.memory_used, left[gpu.uuid].line, time.time())
            write_atomic(folder / f"gpu-{gpu.uuid}{SUFFIX}", json.dumps(asdict(note)))
    return tuple(replace(held, line=f"{held.line}; quarantined") for held in left.values())


def shut_gpus(folder: Path) -> tuple[Shut, ...]:
    """Return the GPUs in quarantine; one whose note cannot be read is shut until next to nothing is in use there."""
    found = []
    for path in sorted(folder.glob(f"gpu-*{SUFFIX}")):
        try:
            found.append(Shut(**json.loads(path.read_text(encoding="utf-8"))))
        except FileNotFoundError:
            continue  # opened meanwhile
        except (OSError, ValueError, TypeError) as error:
            uuid = path.name.removeprefix("gpu-").removesuffix(SUFFIX)
            found.append(Shut(uuid, -1, 0, f"its note cannot be read ({error})", path.lstat().st_mtime))
    return tuple(found)


def still_shut(folder: Path, look: Gpus) -> dict[str, list[str]]:
    """Return, by uuid, why a GPU is still shut; open those whose memory is back."""
    shown = {gpu.uuid: gpu for gpu in look.gpus}
    lines: dict[str, list[str]] = {}
    for note in shut_gpus(folder):
        if note.uuid not in shown:
            continue
        if (held := not_back([note.gpu(shown[note.uuid])], look).get(note.uuid)) is None:
            release(folder, note.uuid)
        else:
            since = time.strftime("%H:%M", time.localtime(note.since))
            lines[note.uuid] = [f"{held.line}; in quarantine since {since}"]
    return lines


def release(folder: Path, uuid: str) -> None:
    """Open a GPU again."""
    (folder / f"gpu-{uuid}{SUFFIX}").unlink(missing_ok=True)
