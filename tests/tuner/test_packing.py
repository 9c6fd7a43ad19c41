"""Placement: no GPU twice, windows apart where they must be, close to the lower bound."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.errors import UsageError
from tuner.packing import Calibration, Job, conflicts, lower_bound, makespan, place

JOBS = st.lists(
    st.tuples(st.sampled_from([1, 2, 4, 8]), st.floats(1, 100), st.floats(1, 100)), min_size=1, max_size=14
).map(lambda rows: [Job(str(i), gpus, load, measure) for i, (gpus, load, measure) in enumerate(rows)])


@settings(max_examples=60, deadline=None)
@given(JOBS, st.integers(1, 3), st.booleans())
def test_every_job_has_its_gpus_alone_and_its_window_when_asked(jobs: list[Job], boxes: int, exclusive: bool) -> None:
    plan = place(jobs, boxes, exclusive=exclusive)
    assert conflicts(plan, jobs, exclusive=exclusive) == []
    assert makespan(plan) >= lower_bound(jobs, boxes, exclusive=exclusive) * (1 - 1e-9)
    for slot in plan:
        assert slot.gpus[0] % slot.job.gpus == 0
        assert slot.window >= slot.start + slot.job.load - 1e-9
        assert slot.end == slot.window + slot.job.measure


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_mixed_jobs_come_within_a_tenth_of_the_bound(seed: int, exclusive: bool) -> None:
    rng = random.Random(seed)
    widths = (1, 1, 1, 2, 2, 4, 8)
    jobs = [Job(str(i), rng.choice(widths), rng.uniform(60, 180), rng.uniform(40, 120)) for i in range(24)]
    plan = place(jobs, exclusive=exclusive)
    assert makespan(plan) <= 1.10 * lower_bound(jobs, exclusive=exclusive)
    assert makespan(plan) < 0.6 * sum(job.seconds for job in jobs)


def test_beside_a_job_of_the_whole_box_nothing_loads() -> None:
    jobs = [Job("wide", 8, 50.0, 10.0), Job("a", 1, 40.0, 10.0), Job("b", 1, 40.0, 10.0)]
    assert lower_bound(jobs, exclusive=True) == 120.0
    assert makespan(place(jobs, exclusive=True)) == 120.0


def test_loads_overlap_where_windows_may_not() -> None:
    jobs = [Job(str(i), 1, 100.0, 10.0) for i in range(8)]
    assert makespan(place(jobs)) == 110.0
    assert makespan(place(jobs, exclusive=True)) == 180.0  # all load at once, then measure one by one


def test_a_conflict_is_seen() -> None:
    jobs = [Job("a", 1, 1.0, 5.0), Job("b", 1, 1.0, 5.0)]
    plan = place(jobs)
    both = [plan[0], plan[0].__class__(jobs[1], 0, plan[0].gpus, 0.0, 1.0, 6.0)]
    assert {kind for kind, _ in conflicts(both, jobs, exclusive=True)} == {"gpu", "window"}
    assert conflicts(plan[:1], jobs, exclusive=False) == [("job", "not every job has one slot")]


def test_what_fits_no_box_is_refused() -> None:
    with pytest.raises(UsageError, match="powers of two"):
        place([Job("wide", 16, 1.0, 1.0)])


def test_a_calibration_says_whether_windows_must_be_exclusive() -> None:
    assert Calibration(100.0, 90.0).exclusive
    assert not Calibration(100.0, 99.5).exclusive
    assert Calibration(100.0, 90.0).to_json()["loss"] == pytest.approx(0.1)
