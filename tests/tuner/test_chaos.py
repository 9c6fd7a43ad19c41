"""Whoever is killed, at whatever stage: nothing of a trial is left, its lease is free, and the study is told."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fake_server.plan import Plan
from tests.tuner.running import FAKE_WORKER, alive, make_spec, wait_until
from tuner.executors.local import LocalExecutor
from tuner.leases import held_locks
from tuner.records import Event, TrialRecord

CONTROLLER = Path(__file__).parent / "controller.py"
LONG = {"window": 600.0, "limits": {"stop_s": 2.0}}


class Scene:
    """A controller with a trial under load, and everybody in it."""

    def __init__(self, controller: subprocess.Popen[str], output: Path) -> None:
        self.controller = controller
        self._output = output

    def events(self) -> list[Event]:
        lines = self._output.read_text(encoding="utf-8").splitlines(keepends=True)
        return [Event.model_validate_json(line) for line in lines if line.endswith("\n")]

    def people(self) -> dict[str, int]:
        """Return pids by what they are: dog and inner dog are the watchdogs of worker and server."""
        found: dict[str, int] = {"controller": self.controller.pid}
        for process in psutil.Process(self.controller.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                words = " ".join(process.cmdline())
                script = next((word for word in process.cmdline()[1:] if word.endswith(".py")), None)
                if script is None:
                    continue  # a child of the fake server
                name = {"watchdog.py": "dog", "worker.py": "worker", "server.py": "server"}[Path(script).name]
                found["inner " + name if name == "dog" and "server.py" in words else name] = process.pid
        return found

    def wait_for(self, stage: str) -> dict[str, int]:
        wait_until(lambda: any(e.stage == stage for e in self.events()), f"stage {stage}")
        if stage == "load":
            wait_until(lambda: len(self.people()) == 5, "five processes")
        return self.people()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    spec = make_spec(tmp_path, Plan(children=True, start_s=0.3), **LONG)
    (tmp_path / "spec.json").write_text(spec.model_dump_json(), encoding="utf-8")
    with (tmp_path / "out").open("w") as out:
        command = [sys.executable, str(CONTROLLER), str(tmp_path / "spec.json")]
        with subprocess.Popen(command, stdout=out, text=True, start_new_session=True) as controller:
            yield Scene(controller, tmp_path / "out")
            controller.kill()


def everyone_below(pid: int) -> list[int]:
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def nothing_is_left(pids: list[int]) -> None:
    wait_until(lambda: not [pid for pid in pids if alive(pid)], "every process is gone", deadline=10)
    wait_until(lambda: held_locks() == (), "every lease is free", deadline=10)


@pytest.mark.parametrize("stage", ["launch", "load"])
def test_kill_9_of_the_controller_leaves_nothing(scene: Scene, stage: str) -> None:
    scene.wait_for(stage)
    pids = everyone_below(scene.controller.pid)
    os.kill(scene.controller.pid, signal.SIGKILL)
    scene.controller.wait()
    nothing_is_left(pids)


@pytest.mark.parametrize("victim", ["dog", "worker", "inner dog", "server"])
def test_kill_9_of_anybody_else_fails_the_trial_and_leaves_nothing(scene: Scene, victim: str) -> None:
    people = scene.wait_for("load")
    pids = everyone_below(scene.controller.pid)
    os.kill(people[victim], signal.SIGKILL)
    assert scene.controller.wait(timeout=60) == 0
    nothing_is_left(pids)
    record = scene.events()[-1].record
    assert record is not None
    assert record.failure is not None
    assert (record.failure.kind, record.failure.stage) == ("crashed", "load")
    assert any("SIGKILL" in line for line in record.failure.evidence)


@pytest.mark.parametrize(
    ("stage", "number"), [("launch", signal.SIGINT), ("load", signal.SIGINT), ("load", signal.SIGTERM)]
)
def test_ctrl_c_ends_cleanly(scene: Scene, stage: str, number: int) -> None:
    """SIGTERM ends the controller without any goodbye; Ctrl-C lets it leave its blocks."""
    scene.wait_for(stage)
    pids = everyone_below(scene.controller.pid)
    os.killpg(scene.controller.pid, number)
    status = scene.controller.wait(timeout=60)
    assert status == (130 if number == signal.SIGINT else -signal.SIGTERM)
    nothing_is_left(pids)


# --- the executor in this process ---


def run(folder: Path, plan: Plan, worker: tuple[str, ...] = FAKE_WORKER) -> tuple[list[Event], TrialRecord]:
    with LocalExecutor(worker) as executor, executor.run(make_spec(folder, plan)) as events:
        told = list(events)
    assert told[-1].record is not None
    return told, told[-1].record


def test_a_worker_measures(tmp_path: Path) -> None:
    told, record = run(tmp_path, Plan())
    assert record.state == "measured"
    assert [event.kind for event in told].count("record") == 1
    assert (tmp_path / "study" / "logs" / "trial-0001.log").exists()
    assert held_locks() == ()


def test_leaving_early_ends_the_trial(tmp_path: Path) -> None:
    with LocalExecutor(FAKE_WORKER) as executor:
        with executor.run(make_spec(tmp_path, Plan(), **LONG)) as events:
            for event in events:
                if event.level is not None:
                    break
            pids = everyone_below(os.getpid())[1:]
            assert len(pids) >= 4
        assert [pid for pid in pids if alive(pid)] == []
    assert held_locks() == ()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.exit('no such luck')", "no such luck"),
        ("print('not an event')", "what is no event: not an event"),
        ("import os; os.kill(os.getpid(), 9)", "the worker ended without a record (signal 9 (SIGKILL))"),
    ],
)
def test_a_worker_without_a_record_is_a_crash(tmp_path: Path, code: str, words: str) -> None:
    _, record = run(tmp_path, Plan(), (sys.executable, "-c", code))
    assert record.state == "failed"
    assert record.failure is not None
    assert record.failure.kind == "crashed"
    assert any(words in line for line in record.failure.evidence)


def test_a_worker_refuses_what_is_no_trial() -> None:
    done = subprocess.run(FAKE_WORKER, input=b'{"schema": 1}', capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert b"not a trial" in done.stderr
    assert done.stdout == b""
