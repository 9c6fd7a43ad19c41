"""Whoever is killed, at whatever stage: nothing of a trial is left, its lease is free, and the study is told."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_server.plan import Plan
from tests.tuner.rounds import (
    VICTIMS,
    Scene,
    everyone_below,
    finished,
    kill_and_resume,
    kill_round,
    playing,
)
from tests.tuner.running import FAKE_WORKER, make_spec
from tests.waiting import alive, wait_until
from tuner import watchdog
from tuner.executors.local import LocalExecutor
from tuner.leases import held_locks
from tuner.quarantine import BACK_SECONDS
from tuner.records import Event, TrialRecord
from tuner.supervise import PORT_SECONDS, SuperviseError

LONG: dict[str, Any] = {"window": 600.0, "limits": {"stop_s": 2.0}}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with playing(tmp_path, Plan(children=True, start_s=0.3), **LONG) as scene:
        yield scene


def wait_for(scene: Scene, stage: str) -> dict[str, int]:
    wait_until(lambda: any(event.stage == stage for event in scene.events()), f"stage {stage}", 60)
    if stage == "load":
        wait_until(lambda: set(scene.people()) == set(VICTIMS), "everybody is there", 60)
    return scene.people()


def everyone(scene: Scene) -> list[int]:
    return [scene.controller.pid, *everyone_below(scene.controller.pid)]


def nothing_is_left(pids: list[int]) -> None:
    wait_until(lambda: not [pid for pid in pids if alive(pid)], "every process is gone", deadline=30)
    wait_until(lambda: held_locks() == (), "every lease is free", deadline=30)


@pytest.mark.parametrize("stage", ["launch", "load"])
def test_kill_9_of_the_controller_leaves_nothing(scene: Scene, stage: str) -> None:
    wait_for(scene, stage)
    pids = everyone(scene)
    os.kill(scene.controller.pid, signal.SIGKILL)
    scene.controller.wait()
    nothing_is_left(pids)


@pytest.mark.parametrize("victim", ["dog", "worker", "inner dog", "server"])
def test_kill_9_of_anybody_else_fails_the_trial_and_leaves_nothing(scene: Scene, victim: str) -> None:
    people = wait_for(scene, "load")
    pids = everyone(scene)
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
    wait_for(scene, stage)
    pids = everyone(scene)
    os.killpg(scene.controller.pid, number)
    status = scene.controller.wait(timeout=60)
    assert status == (130 if number == signal.SIGINT else -signal.SIGTERM)
    nothing_is_left(pids)


@pytest.mark.parametrize("victim", ["tuner", "worker", "grandchild"])
def test_a_kill_at_a_random_moment_leaves_nothing(tmp_path: Path, victim: str) -> None:
    chance = random.Random(victim)
    for number in range(20):
        (folder := tmp_path / str(number)).mkdir()
        if (played := kill_round(folder, chance, victim, patience=30.0)) is not None:
            assert played.clean, played
            return
    raise AssertionError("twenty trials ended before their moment came")


def test_a_search_that_is_killed_and_resumed_comes_to_the_same(tmp_path: Path) -> None:
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
    result = kill_and_resume(tmp_path / "killed", random.Random(3), finished(tmp_path / "undisturbed"), most=2)
    assert result.clean, result
    assert result.kills >= 1


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
    others = set(everyone_below(os.getpid()))  # servers and browsers of other tests
    with LocalExecutor(FAKE_WORKER) as executor:
        with executor.run(make_spec(tmp_path, Plan(), **LONG)) as events:
            for event in events:
                if event.level is not None:
                    break
            pids = set(everyone_below(os.getpid())) - others
            assert len(pids) >= 4
        assert [pid for pid in pids if alive(pid)] == []
    assert held_locks() == ()


def test_a_worker_has_the_time_to_prove_its_gpus_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def refuse(*_: object, grace: float, **__: object) -> None:
        given.append(grace)
        raise SuperviseError("planned")

    monkeypatch.setattr("tuner.executors.local.supervise", refuse)
    spec = make_spec(tmp_path, Plan())
    with LocalExecutor(FAKE_WORKER) as executor, executor.run(spec) as events:
        assert len(list(events)) == 1
    assert given[0] >= spec.limits.stop_s + watchdog.GIVE_UP_SECONDS + PORT_SECONDS + BACK_SECONDS + 10


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


def test_a_watchdog_that_is_killed_at_once_fails_its_trial_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = tmp_path / "watchdog.py"
    dying.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", encoding="utf-8")
    monkeypatch.setattr("tuner.watchdog.__file__", str(dying))
    told, record = run(tmp_path, Plan())
    assert record.failure is not None
    assert (record.failure.kind, record.failure.stage, len(told)) == ("crashed", "lease", 1)


def test_a_worker_refuses_what_is_no_trial() -> None:
    done = subprocess.run(FAKE_WORKER, input=b'{"schema": 1}', capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert b"not a trial" in done.stderr
    assert done.stdout == b""
