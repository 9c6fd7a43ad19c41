"""What the record of a study over a host's GPUs says of them: who held which, and how well time was used."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.host_search import back, clashes, leases, used
from tests.fake_server.plan import Plan
from tests.tuner.running import run_fake
from tests.tuner.smi import FakeSmi
from tuner.records import LeaseRequest


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSmi:
    (tmp_path / "smi").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'smi'}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return FakeSmi(tmp_path / "smi")


def test_a_trial_tells_which_gpus_it_holds(tmp_path: Path, smi: FakeSmi) -> None:
    smi.set([(0, 4), (1, 4)], [])
    record, events = run_fake(tmp_path, Plan(), lease=LeaseRequest(gpus=2))
    assert record.state == "measured", record.failure
    [held] = leases([event.model_dump(mode="json") for event in events])
    assert held["gpus"] == ["0 (GPU-0)", "1 (GPU-1)"]
    assert held["trial"] == record.trial
    assert held["end"] == events[-1].time > held["begin"] >= (record.started or 0)


def test_two_that_hold_a_gpu_at_once_are_found() -> None:
    one = {"trial": 1, "gpus": ["0 (a)"], "begin": 0.0, "end": 10.0}
    beside = {"trial": 2, "gpus": ["1 (b)"], "begin": 0.0, "end": 10.0}
    after = {"trial": 3, "gpus": ["0 (a)", "1 (b)"], "begin": 10.0, "end": 20.0}
    early = after | {"trial": 4, "begin": 9.0}
    assert clashes([one, beside, after]) == []
    assert clashes([one, beside, early]) == [(1, 4), (2, 4)]


def test_packing_is_set_against_one_after_the_other() -> None:
    spent = {"lease": 7.0, "launch": 20.0, "load": 10.0}  # another's window is waited for in the lease
    records = [{"trial": trial, "seconds": spent} for trial in range(1, 5)]
    found = used(records, [{"first": 1, "trials": 4, "makespan": 66.0, "bound": 60.0, "ratio": 1.1}])
    assert (found["one_by_one"], found["times_faster"], found["over_bound"]) == (120.0, 1.82, 1.1)
    assert used(records, []) == {"batches": []}


def test_memory_is_back_only_where_that_was_seen() -> None:
    held = [{"trial": 0, "gpus": ["1 (GPU-b)"], "begin": 1.0, "end": 5.0}]
    of = {0: {"0": {"most_mib": 9}, "1": {"most_mib": 70}}}
    before = {"time": 0.0, "used": {"0": 4, "1": 4}, "pids": {"0": [], "1": []}}
    after = before | {"time": 6.0}
    found = back(held, of, [before, after])
    assert found["back"] is True
    assert found["by_trial"] == {"0": {"1": {"most_mib": 70}}}
    assert back(held, of, [before, after | {"used": {"0": 4, "1": 900}}])["back"] is False
    assert back(held, of, [before, before | {"time": 4.0}])["back"] is None  # sampling ended while it ran
    assert back(held, of, [])["back"] is None
