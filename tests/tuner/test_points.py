"""Points, the front, ties, and the recommendation."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tuner.make import level, record
from tuner.errors import NothingFeasible, UsageError
from tuner.pick import recommend, speedup
from tuner.points import baseline_at, front_of, points_of, violations
from tuner.records import TrialRecord
from tuner.slo import parse_slo
from tuner.space.model import Constraint, Objective, Pick

OBJECTIVES = (Objective(metric="tpot_ms_p50", goal="min", at=1), Objective(metric="output_tok_s", goal="max", at=8))
LIMIT = (Constraint(metric="ttft_ms_p90", max=100, at=8),)

SPEEDS = st.just(0.0) | st.floats(0.1, 1e3)

BASE = record(0, [level(1, 8.0, 120), level(8, 16.0, 480)])
FAST = record(1, [level(1, 4.0, 240), level(8, 15.0, 510)])
SLOW = record(2, [level(1, 9.0, 110), level(8, 30.0, 250)])


def front_keys(*records: TrialRecord, limits: tuple[Constraint, ...] = LIMIT) -> list[tuple[int, int]]:
    return [point.key for point in front_of(points_of(records, limits), OBJECTIVES)]


def test_front_holds_points_of_every_concurrency_best_latency_first() -> None:
    assert front_keys(BASE, FAST, SLOW) == [(1, 1), (1, 8)]
    assert front_keys(BASE, SLOW) == [(0, 1), (0, 8)]
    assert front_keys() == []


def test_a_crash_is_never_on_the_front_even_where_it_was_measured_before() -> None:
    crash = record(3, [level(1, 1.0, 900)], state="failed", failure={"kind": "oom_load", "stage": "load"})
    assert front_keys(BASE, crash) == [(0, 1), (0, 8)]
    assert points_of([record(1)], ()) == []


def test_a_configuration_that_fails_when_measured_again_loses_its_points() -> None:
    again = record(4, None, role="confirm", of=1, config=FAST.config)
    assert front_keys(BASE, FAST, again) == [(0, 1), (0, 8)]


def test_a_confirmation_that_the_client_spoilt_takes_nothing_away() -> None:
    spoilt = {"kind": "client_bound", "stage": "load"}
    again = record(4, None, role="confirm", of=0, config=BASE.config, state="failed", failure=spoilt)
    assert front_keys(BASE, SLOW, again) == [(0, 1), (0, 8)]
    assert recommend(points_of([BASE, SLOW, again], LIMIT), OBJECTIVES, Pick(load=8)).speedup == 1.0
    first = record(5, None, state="failed", failure=spoilt)
    assert front_keys(BASE, first) == [(0, 1), (0, 8)]


def test_a_confirmation_is_averaged_with_what_made_a_configuration_look_good() -> None:
    again = record(4, [level(1, 7.0, 140), level(8, 15.5, 490)], role="confirm", of=1, config=FAST.config)
    points = {point.key: point for point in points_of([BASE, FAST, again], LIMIT)}
    assert points[1, 1].metrics["tpot_ms_p50"] == 5.5
    assert points[1, 1].intervals["tpot_ms_p50"] == pytest.approx((3.8, 7.35))
    assert points[1, 1].confirmed
    assert not points[0, 1].confirmed
    assert (4, 1) not in points


def test_launches_are_averaged_by_requests_and_their_intervals_joined() -> None:
    first = record(0, [level(1, 7.0, 150)])
    one = record(4, [level(1, 6.0, 100)], role="confirm", of=0, config=BASE.config)
    two = record(5, [level(1, 8.0, 200)], role="confirm", of=0, config=BASE.config)
    (point,) = points_of([first, one, two], ())
    assert point.metrics["tpot_ms_p50"] == 7.0
    assert point.intervals["tpot_ms_p50"] == pytest.approx((5.7, 8.4))
    assert point.n == 60


def test_speed_compares_what_was_measured_next_to_each_other() -> None:
    """The machine is half as fast when the confirmation runs: no ratio may mix the two."""
    late_base = record(4, [level(1, 16.0, 60), level(8, 32.0, 240)], role="confirm", of=0, config=BASE.config)
    late_fast = record(5, [level(1, 10.0, 96), level(8, 29.0, 264)], role="confirm", of=1, config=FAST.config)
    points = points_of([BASE, FAST, SLOW, late_base, late_fast], LIMIT)
    alone = {
        point.trial: speedup(point, baseline_at(points, 1), OBJECTIVES[1]) for point in points if point.key[1] == 1
    }
    assert alone == pytest.approx({0: 1.0, 1: 96 / 60, 2: 110 / 120})


def test_points_that_miss_a_constraint_are_off_the_front_unless_all_do() -> None:
    late = record(1, [level(1, 4.0, 240), level(8, 15.0, 510, ttft=300.0)])
    assert front_keys(BASE, late) == [(0, 1), (0, 8)]
    everyone = (Constraint(metric="ttft_ms_p90", max=1, at=8),)
    front = front_of(points_of([BASE, late], everyone), OBJECTIVES)
    assert [point.feasible for point in front] == [False, False]


def test_violations_are_shares_and_what_was_not_measured_is_one() -> None:
    levels = [level(1, 8.0, 120, ttft=50), level(8, 16.0, 480, ttft=150)]
    at_all = Constraint(metric="ttft_ms_p90", max=100)
    at_one = Constraint(metric="ttft_ms_p90", max=100, at=1)
    at_least = Constraint(metric="output_tok_s", min=240, at=1)
    other = Constraint(metric="goodput_rps", min=1)
    unmeasured = Constraint(metric="ttft_ms_p90", max=100, at=64)
    found = violations(levels, (at_all, at_one, at_least, other, unmeasured))
    assert found == pytest.approx((0.5, -0.5, 0.5, 1.0, 1.0))


def test_ties_are_points_of_the_same_load_whose_intervals_overlap_on_both_axes() -> None:
    near = record(2, [level(1, 4.1, 235), level(8, 22.0, 400)])
    front = front_of(points_of([BASE, FAST, near], LIMIT), OBJECTIVES)
    tied = {point.key: point.tied_with for point in front}
    assert tied == {(1, 1): ((2, 1),), (1, 8): ((0, 8),)}


def test_front_entries_have_the_fields_of_front_json() -> None:
    (entry, *_) = [point.to_json() for point in front_of(points_of([BASE, FAST], LIMIT), OBJECTIVES)]
    entry = json.loads(json.dumps(entry, allow_nan=False))
    assert {"trial", "concurrency", "config", "metrics", "intervals", "n", "feasible", "tied_with"} <= set(entry)
    assert entry["intervals"]["tpot_ms_p50"] == pytest.approx([3.8, 4.2])


def test_recommendation_is_the_best_at_the_load_and_says_what_it_gains() -> None:
    points = points_of([BASE, FAST, SLOW], LIMIT)
    best = recommend(points, OBJECTIVES, Pick(load=8))
    assert best.point.key == (1, 8)
    assert best.speedup == pytest.approx(510 / 480)
    assert best.tied_with == ((0, 8),)
    assert recommend(points, OBJECTIVES, Pick()).point.concurrency == 8
    alone = recommend(points, OBJECTIVES, Pick(load=1))
    assert alone.point.key == (1, 1)
    assert alone.tied_with == ()


def test_a_share_of_the_best_may_be_given_up_for_more_over_all_loads() -> None:
    level_best, all_round = (
        record(1, [level(1, 8, 120), level(8, 15, 500)]),
        record(2, [level(1, 4, 240), level(8, 16, 485)]),
    )
    partly = record(3, [level(8, 16, 495)])
    points = points_of([level_best, all_round, partly], ())
    for give, trial in ((0.0, 1), (0.029, 1), (0.031, 2)):
        found = recommend(points, OBJECTIVES, Pick(load=8, give=give))
        assert found.point.trial == trial
        assert found.gives == pytest.approx({1: 0.0, 2: 0.03}[trial])
    assert recommend(points, OBJECTIVES, Pick(load=1, give=0.9)).point.trial == 2


@given(st.lists(st.tuples(SPEEDS, SPEEDS), min_size=1, max_size=6), st.floats(0, 0.9))
def test_never_more_is_given_up_than_allowed(speeds: list[tuple[float, float]], give: float) -> None:
    records = [record(i, [level(1, 5.0, one), level(8, 9.0, eight)]) for i, (one, eight) in enumerate(speeds)]
    found = recommend(points_of(records, ()), OBJECTIVES, Pick(load=8, give=give))
    best = max(eight for _, eight in speeds)
    assert (found.point.metrics["output_tok_s"] or 0.0) >= best * (1 - give) - 1e-6
    assert 0 <= found.gives <= give + 1e-9
    mine = speeds[found.point.trial]
    near = [one * eight for one, eight in speeds if eight >= best * (1 - give) > 0]
    assert not near or mine[0] * mine[1] == pytest.approx(max(near)) or 0 in mine


def test_limits_come_before_speed_and_unmet_ones_are_said() -> None:
    quick = record(1, [level(8, 10.0, 300)])
    much = record(2, [level(8, 20.0, 900)])
    points = points_of([quick, much], ())
    assert recommend(points, OBJECTIVES, Pick(slo="tpot_ms_p50<15")).point.trial == 1
    assert recommend(points, OBJECTIVES, Pick(slo="tpot_ms_p50<25")).point.trial == 2
    unmet = recommend(points, OBJECTIVES, Pick(slo="tpot_ms_p50<5"))
    assert not unmet.meets_slo
    assert unmet.misses == ("tpot_ms_p50 is 20, not < 5",)
    assert unmet.speedup is None


def test_what_cannot_be_recommended_is_said() -> None:
    with pytest.raises(NothingFeasible, match="no trial was measured"):
        recommend([], OBJECTIVES, Pick())
    points = points_of([BASE], (Constraint(metric="ttft_ms_p90", max=1),))
    with pytest.raises(NothingFeasible, match="meets the constraints"):
        recommend(points, OBJECTIVES, Pick())
    with pytest.raises(UsageError, match="load 3 was not measured; measured are 1, 8"):
        recommend(points, OBJECTIVES, Pick(load=3))
    with pytest.raises(UsageError, match="is no limit"):
        recommend(points, OBJECTIVES, Pick.model_construct(slo="import os"))


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("ttft_ms_p90<500, tpot_ms_p50<20", ["ttft_ms_p90<500", "tpot_ms_p50<20"]),
        (" ttft_ms_p90 <= 1e3 ,", ["ttft_ms_p90<=1000"]),
        ("output_tok_s>100", ["output_tok_s>100"]),
        ("output_tok_s>=100.5", ["output_tok_s>=100.5"]),
        ("", []),
    ],
)
def test_slo_expressions(text: str, limits: list[str]) -> None:
    slo = parse_slo(text)
    assert [str(limit) for limit in slo.limits] == limits
    assert parse_slo(str(slo)) == slo


@pytest.mark.parametrize(
    "text",
    ["ttft<5", "ttft_ms<5", "ttft_ms_p90", "ttft_ms_p90<", "ttft_ms_p90<5ms", "ttft_ms_p90<nan", "ttft_ms_p90==5",
     "5<ttft_ms_p90", "ttft_ms_p90<1<2", "ttft_ms_p90<1;drop", "x" * 2000],
)  # fmt: skip
def test_slo_mistakes_are_one_line(text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the message differs by mistake
        parse_slo(text)
    assert str(caught.value)
    assert "\n" not in str(caught.value)


def test_slo_judges() -> None:
    slo = parse_slo("ttft_ms_p90<500, output_tok_s>=100")
    assert slo.misses({"ttft_ms_p90": 499.0, "output_tok_s": 100.0}) == ()
    assert slo.misses({"ttft_ms_p90": 500.0}) == ("ttft_ms_p90 is 500, not < 500", "output_tok_s was not measured")
    assert slo.uppers() == {"ttft_ms_p90": 500.0}
