"""What the record of a study over a host's GPUs says of them: who held which, and how well time was used."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.host_search import clashes, leases, used
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
    held = [{"trial": trial, "gpus": [str(trial % 2)], "begin": 0.0, "end": 30.0} for trial in range(1, 5)]
    found = used(held, [{"first": 1, "trials": 4, "makespan": 66.0, "bound": 60.0, "ratio": 1.1}])
    assert (found["one_by_one"], found["times_faster"], found["over_bound"]) == (120.0, 1.82, 1.1)
    assert used(held, []) == {"batches": []}
