"""Trials of real server processes that misbehave as planned: none is called good that is not, and none bad that is."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

import tuner.curve
import tuner.trial
from engine.backends.native import PROBES
from tests.fake_server.faults import BAD, GOOD, ONLY_IN_PROOF, backend_for
from tests.fake_server.plan import FakeBackend, Plan
from tests.tuner.running import family, make_spec, run_fake
from tests.tuner.smi import FakeSmi
from tests.waiting import wait_until
from tuner.load.sources import JsonlPrompts
from tuner.records import LeaseRequest

ONE_CHUNK = ("a whole answer in one chunk", "compiles in its first completion")


@pytest.mark.parametrize("name", [name for name in GOOD if name not in ONLY_IN_PROOF])
def test_a_good_server_is_measured(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.ready.STALL_SHARE", 3.0)  # a busy machine may starve it for a while
    monkeypatch.setattr("tuner.ready.FAILURE_PAUSE", 0.1)
    case = GOOD[name]
    record, events = run_fake(tmp_path, case.plan, levels=(1, 3), limits=case.limits)
    assert record.failure is None
    assert record.state == "measured"
    assert [level.concurrency for level in record.levels] == [1, 3]
    for level in record.levels:
        assert level.n >= 1
        assert level.metrics["error_rate"] == 0
        assert level.metrics["accept_length"] == case.plan.accept_length
        assert (level.metrics["tpot_ms_p50"] is None) == (name in ONE_CHUNK)
        low, high = level.intervals["ttft_ms_p50"]
        assert 0 < low <= (level.metrics["ttft_ms_p50"] or 0) <= high
    assert set(record.seconds) == {"lease", "launch", "ready", "load", "stop"}
    assert events[-1].record == record
    assert family(str(tmp_path)) == []


def test_a_chat_workload_is_measured(tmp_path: Path) -> None:
    record, _ = run_fake(tmp_path, Plan(), chat=True)
    assert record.state == "measured"


def test_events_tell_the_course(tmp_path: Path) -> None:
    record, events = run_fake(tmp_path, Plan(), levels=(1, 2))
    told = [(e.kind, e.stage, e.level) for e in events if e.kind in ("begin", "end", "record")]
    assert told == [
        ("begin", "lease", None),
        ("end", "lease", None),
        ("begin", "launch", None),
        ("end", "launch", None),
        ("begin", "ready", None),
        ("end", "ready", None),
        ("begin", "load", None),
        ("begin", "load", 1),
        ("end", "load", 1),
        ("begin", "load", 2),
        ("end", "load", 2),
        ("end", "load", None),
        ("begin", "stop", None),
        ("end", "stop", None),
        ("record", "stop", None),
    ]
    levels = [e.data for e in events if e.kind == "end" and e.level]
    assert levels == [level.model_dump(mode="json") for level in record.levels]
    assert record.resolved == {"model": {"target": "fake"}}


@pytest.mark.parametrize("name", [name for name in BAD if name not in ONLY_IN_PROOF])
def test_a_bad_server_fails_with_kind_and_stage(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.supervise.PORT_SECONDS", 0.2)  # a stranger keeps its port
    monkeypatch.setattr("tuner.ready.FAILURE_PAUSE", 0.1)
    case = BAD[name]
    with backend_for(case) as backend:
        record, events = run_fake(tmp_path, case.plan, backend, limits=case.limits)
    assert record.failure is not None
    assert record.failure.kind == case.kind, record.failure.evidence
    assert record.failure.stage == case.stage or not case.stage, record.failure.evidence
    assert record.state == "failed"
    assert record.failure.evidence
    assert record.failure.advice
    assert events[-1].record == record
    assert family(str(tmp_path)) == []
    for line in (*case.plan.last_words, case.evidence):
        assert any(line in evidence for evidence in record.failure.evidence)


def test_only_a_backend_that_need_not_inform_may_say_nothing(tmp_path: Path) -> None:
    plan = Plan(statuses={"/server_info": 404})
    record, _ = run_fake(tmp_path, plan, FakeBackend(probes=dataclasses.replace(PROBES, always_informs=False)))
    assert (record.state, record.resolved) == ("measured", None)


def test_a_server_info_without_a_config_is_refused(tmp_path: Path) -> None:
    record, _ = run_fake(tmp_path, Plan(statuses={"/server_info": 200}))
    assert record.failure is not None
    assert (record.failure.kind, record.failure.stage) == ("config", "ready")
    assert "holds no config" in record.failure.evidence[0]


def test_levels_before_a_crash_are_kept(tmp_path: Path) -> None:
    record, _ = run_fake(tmp_path, Plan(die_at="crowd", most_at_once=2), levels=(1, 2, 4), window=0.4)
    assert record.state == "failed"
    assert record.failure is not None
    assert (record.failure.kind, record.failure.stage) == ("crashed", "load")
    assert [level.concurrency for level in record.levels] == [1, 2]


def test_a_server_that_dies_is_noticed_at_once(tmp_path: Path) -> None:
    """The window alone is a minute; the test's own limit would end it."""
    record, _ = run_fake(tmp_path, Plan(good_completions=4, die_at="completion"), window=60.0)
    assert record.failure is not None
    assert record.failure.stage == "load"
    assert record.seconds["load"] < 30


def test_a_server_that_does_nothing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither output nor work: the deadline of an hour does not matter."""
    monkeypatch.setattr("tuner.ready.LEAST_STALL", 0.2)
    monkeypatch.setattr("tuner.ready.STALL_SHARE", 0.0)
    monkeypatch.setattr("tuner.ready.LOOK_SECONDS", 0.1)
    record, _ = run_fake(tmp_path, Plan(listen="never"), limits={"ready_s": 3600.0})
    assert record.failure is not None
    assert (record.failure.kind, record.failure.stage) == ("no_progress", "launch")
    assert record.failure.evidence[0].startswith("no output and no work for ")


def test_some_failed_requests_are_counted_apart(tmp_path: Path) -> None:
    """From the second completion on every other answer breaks: both kinds fall into the window."""
    record, _ = run_fake(tmp_path, Plan(good_completions=1, bad_every=2, answer="not_json"), levels=(2,))
    [level] = record.levels
    assert record.state == "measured"
    assert 0 < (level.metrics["error_rate"] or 0) < 1
    assert level.n > 0


@pytest.mark.parametrize(
    ("changes", "kind", "stage", "words"),
    [
        ({"lease": LeaseRequest(gpus=64)}, "config", "lease", "64 GPUs"),
        ({"lease": LeaseRequest(cpus=9)}, "config", "lease", "9 CPU slots"),
    ],
)
def test_what_the_machine_has_not_is_a_failure(
    tmp_path: Path, changes: dict[str, Any], kind: str, stage: str, words: str
) -> None:
    record, _ = run_fake(tmp_path, Plan(), **changes)
    assert record.failure is not None
    assert (record.failure.kind, record.failure.stage) == (kind, stage)
    assert words in record.failure.evidence[0]


def test_a_driver_that_fails_is_no_fault_of_the_config(tmp_path: Path, smi: FakeSmi) -> None:
    smi.set([(0, 4)], [], status=9)
    record, _ = run_fake(tmp_path, Plan(), lease=LeaseRequest(gpus=1), limits={"lease_s": 0.2})
    assert record.failure is not None
    assert (record.failure.kind, record.failure.stage) == ("no_progress", "lease")
    assert "nvidia-smi failed" in record.failure.evidence[0]
    assert record.blameless


def test_missing_prompts_are_a_failure(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, Plan())
    spec = spec.model_copy(
        update={"workload": spec.workload.model_copy(update={"prompts": JsonlPrompts(path="/nowhere.jsonl")})}
    )
    record = asyncio.run(tuner.trial.run_trial(spec, lambda _: None, FakeBackend()))
    assert record.failure is not None
    assert record.failure.kind == "config"
    assert "/nowhere.jsonl" in record.failure.evidence[0]


def test_a_fault_of_our_own_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(tuner.curve, "level_of", broken)
    record, _ = run_fake(tmp_path, Plan())
    assert record.failure is not None
    assert (record.failure.kind, record.failure.stage) == ("crashed", "load")
    assert any("ZeroDivisionError: planted" in line for line in record.failure.evidence)
    assert any("_level" in line for line in record.failure.evidence)
    wait_until(lambda: family(str(tmp_path)) == [], "the server is gone")


def test_too_little_disk_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner.trial, "free_bytes", lambda _: 1)
    record, _ = run_fake(tmp_path, Plan())
    assert record.failure is not None
    assert (record.failure.kind, record.failure.stage) == ("disk_full", "launch")


def test_a_watchdog_that_is_killed_at_once_is_no_fault_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the moment between its start and its first word."""
    dying = tmp_path / "watchdog.py"
    dying.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", encoding="utf-8")
    monkeypatch.setattr("tuner.watchdog.__file__", str(dying))
    record, _ = run_fake(tmp_path, Plan())
    assert record.failure is not None
    assert (record.failure.kind, record.failure.stage) == ("crashed", "launch")
    assert "killed at once" in record.failure.evidence[0]
