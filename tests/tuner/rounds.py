"""Rounds of kill -9 at random moments: on a trial and everybody in it, and on a search that is resumed each time."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.fake_server.plan import Plan
from tests.tuner.running import family, make_spec
from tests.tuner.spaces import SMOKE, write
from tests.waiting import alive, wait_until
from tuner.leases import held_locks
from tuner.records import Event, TrialRecord, canonical
from tuner.supervise import listens

FOLDER = Path(__file__).parent
CONTROLLER = FOLDER / "controller.py"
TUNER = FOLDER / "tiny_tuner.py"
VICTIMS = ("tuner", "dog", "worker", "inner dog", "server", "grandchild")
STARTED = 60.0  # seconds by which everybody is there, on any machine
ENDED = 120.0  # seconds by which a trial whose server was killed has come to its record


class Scene:
    """A controller with a trial, and everybody in it."""

    def __init__(self, controller: subprocess.Popen[str], output: Path) -> None:
        self.controller = controller
        self._output = output

    def events(self) -> list[Event]:
        lines = self._output.read_text(encoding="utf-8").splitlines(keepends=True)
        return [Event.model_validate_json(line) for line in lines if line.endswith("\n")]

    def people(self) -> dict[str, int]:
        """Return pids by what they are: dog and inner dog are the watchdogs of worker and server."""
        found: dict[str, int] = {"tuner": self.controller.pid}
        for process in everyone_below(self.controller.pid):
            with contextlib.suppress(psutil.Error):
                line = psutil.Process(process).cmdline()
                words = " ".join(line)
                script = next((word for word in line[1:] if word.endswith(".py")), None)
                if script is None:
                    found.setdefault("grandchild", process)
                    continue
                name = {"watchdog.py": "dog", "worker.py": "worker", "server.py": "server"}.get(Path(script).name)
                if name is not None:
                    found["inner " + name if name == "dog" and "server.py" in words else name] = process
        return found


@contextlib.contextmanager
def playing(folder: Path, plan: Plan, **changes: object) -> Iterator[Scene]:
    """Run a trial below a controller of its own; whatever is left of it goes with the block."""
    spec = make_spec(folder, plan, **changes)  # type: ignore[arg-type]
    (folder / "spec.json").write_text(spec.model_dump_json(), encoding="utf-8")
    with (folder / "out").open("w") as out:
        command = [sys.executable, str(CONTROLLER), str(folder / "spec.json")]
        with subprocess.Popen(command, stdout=out, text=True, start_new_session=True) as controller:
            try:
                yield Scene(controller, folder / "out")
            finally:
                controller.kill()


def everyone_below(pid: int) -> list[int]:
    """Return the living processes below a pid; none when it is gone itself."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@dataclass(frozen=True)
class Round:
    """What one kill came to. `gone_s`: from the kill (of the tuner; else from its end) to the last process."""

    victim: str
    stage: str
    state: str
    gone_s: float
    orphans: int
    port_leaked: bool
    stuck_leases: int

    @property
    def clean(self) -> bool:
        """Whether nothing was left, and the failure, if any, was told as what it was."""
        told = self.state in ("killed", "measured", "crashed")
        return told and not (self.orphans or self.port_leaked or self.stuck_leases)


def kill_round(folder: Path, chance: random.Random, victim: str, patience: float = 5.0) -> Round | None:
    """Play a trial and kill one of it at a random moment; None when it had ended before that.

    `patience`: seconds after the tuner's end in which everything must be gone.
    """
    plan = Plan(children=True, start_s=0.2, ready_s=0.4)
    seen: set[int] = set()
    with playing(folder, plan, window=0.5, limits={"stop_s": 2.0}) as scene:
        ended = scene.controller.poll
        wait_until(lambda: victim in scene.people() or ended() is not None, f"{victim} is there", STARTED)
        moment = time.monotonic() + chance.uniform(0.0, 3.5 if victim == "tuner" else 1.6)
        wait_until(lambda: time.monotonic() >= moment, "the moment", 60.0)
        people = scene.people()
        port = _port(people)
        seen |= set(everyone_below(scene.controller.pid))
        if ended() is not None or victim not in people:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(people[victim], signal.SIGKILL)
        killed_at = time.monotonic()
        told = scene.events()
        stage = told[-1].stage if told else "start"
        seen |= set(everyone_below(scene.controller.pid))
        scene.controller.wait(timeout=ENDED)
        over = killed_at if victim == "tuner" else time.monotonic()
        state = "killed" if victim == "tuner" else _state(scene)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not _left(folder, seen) and not held_locks(), "", over + patience - time.monotonic())
        gone = time.monotonic() - over
        left = _left(folder, seen)
        round_ = Round(
            victim,
            stage,
            state,
            gone,
            len(left),
            port is not None and listens([], port) is not None,
            len(held_locks()),
        )
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return round_


def _port(people: dict[str, int]) -> int | None:
    """Return the port that the server was told, if it is there."""
    with contextlib.suppress(psutil.Error, ValueError, KeyError):
        line = psutil.Process(people["inner dog"]).cmdline()
        return int(line[line.index("--port") + 1])
    return None


def _left(folder: Path, seen: set[int]) -> set[int]:
    return {pid for pid in seen if alive(pid)} | set(family(f"{folder}/"))


def _state(scene: Scene) -> str:
    record = next((event.record for event in reversed(scene.events()) if event.record is not None), None)
    if record is None:
        return "no record"
    return record.state if record.failure is None else record.failure.kind


# ------------------------------------------------------------------------------------------------------ studies


@dataclass(frozen=True)
class Resumed:
    """What a search came to that was killed and resumed. Lists of deviations are empty when all is well."""

    kills: int
    trials: int
    launches: int
    same_sequence: bool
    same_front: bool
    repeated: int
    lost: int
    orphans: int

    @property
    def clean(self) -> bool:
        """Nothing repeated, at most the trial in flight lost at each kill, and the outcome the same."""
        intact = self.same_sequence and self.same_front and not self.repeated and not self.orphans
        return intact and self.lost <= self.kills


def search(folder: Path) -> subprocess.Popen[bytes]:
    """Start the search over a table, or go on with it."""
    study = folder / "results" / "small"
    begun = all((study / name).is_file() for name in ("space.yaml", "provenance.json", "events.jsonl", "trials.jsonl"))
    asked = ["resume", str(study)] if begun else ["search", str(folder / "space.yaml"), "--results", str(study.parent)]
    command = [sys.executable, str(TUNER), *asked, *([] if begun else ["--yes"])]
    with (folder / "out").open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, stdin=subprocess.DEVNULL)


def finished(folder: Path) -> tuple[list[tuple[str, str]], list[object]]:
    """Run the search to its end undisturbed; return its sequence of configs and its front."""
    write(folder, SMOKE)
    process = search(folder)
    assert process.wait(timeout=600) == 0, (folder / "out").read_text()
    return outcome(folder)


def outcome(folder: Path) -> tuple[list[tuple[str, str]], list[object]]:
    """Return (role, config) of every record, and the front."""
    study = folder / "results" / "small"
    front = [
        (entry["trial"], entry["concurrency"], entry["metrics"])
        for entry in json.loads((study / "front.json").read_text())
    ]
    return [(record.role, canonical(record.config)) for record in records(folder)], list(front)


def records(folder: Path) -> list[TrialRecord]:
    """Return the whole lines of trials.jsonl."""
    path = folder / "results" / "small" / "trials.jsonl"
    data = path.read_bytes() if path.is_file() else b""
    return [TrialRecord.model_validate_json(line) for line in data.split(b"\n")[:-1] if line.strip()]


def kill_and_resume(
    folder: Path, chance: random.Random, expected: tuple[list[tuple[str, str]], list[object]], most: int
) -> Resumed:
    """Run the search, kill it at random moments, at most `most` times, and resume it until it is finished."""
    write(folder, SMOKE)
    orphans: list[int] = []
    while len(orphans) < most and (left := _killed(folder, chance)) is not None:
        orphans.append(left)
    if not _is_over(folder, expected):
        assert search(folder).wait(timeout=600) == 0, (folder / "out").read_text()
    sequence, front = outcome(folder)
    kept = records(folder)
    searched = [canonical(record.config) for record in kept if record.role in ("baseline", "search")]
    launches = _launches(folder)
    return Resumed(
        kills=len(orphans),
        trials=len(kept),
        launches=launches,
        same_sequence=sequence == expected[0],
        same_front=front == expected[1],
        repeated=len(searched) - len(set(searched)) + len(kept) - len({record.trial for record in kept}),
        lost=launches - sum(record.state != "infeasible" for record in kept),
        orphans=sum(orphans),
    )


def _is_over(folder: Path, expected: tuple[list[tuple[str, str]], list[object]]) -> bool:
    return len(records(folder)) == len(expected[0]) and (folder / "results" / "small" / "launch.yaml").is_file()


def _killed(folder: Path, chance: random.Random) -> int | None:
    """Start or resume the search and kill it; return how many of its processes outlived it by 5 s.

    None when it finished first. The moment lies in starting up, or a little after some more records.
    """
    process = search(folder)
    trials = folder / "results" / "small" / "trials.jsonl"

    def count() -> int:
        return trials.read_bytes().count(b"\n") if trials.is_file() else 0

    wanted = chance.randint(0, 4)
    enough = count() + wanted
    wait_until(lambda: process.poll() is not None or count() >= enough, "more records", 600.0)
    moment = time.monotonic() + chance.uniform(0.0, 0.4 if wanted else 2.5)
    wait_until(lambda: process.poll() is not None or time.monotonic() >= moment, "the moment", 60.0)
    if process.poll() is not None:
        assert process.returncode == 0, (folder / "out").read_text()
        return None
    below = everyone_below(process.pid)
    process.kill()
    process.wait()
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not any(map(alive, below)), "", 5.0)
    return sum(map(alive, below))


def _launches(folder: Path) -> int:
    """Return how often a worker began a trial."""
    lines = (folder / "results" / "small" / "events.jsonl").read_bytes().split(b"\n")
    events = [json.loads(line) for line in lines if line.strip()]
    return sum(event["kind"] == "begin" and event["stage"] == "lease" for event in events)
