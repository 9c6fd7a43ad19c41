"""Races: what is beaten stops, what only looks beaten does not."""

from __future__ import annotations

from statistics import pstdev

import pytest

from tests.tuner.make import level
from tuner.racing import Axis, dominated, doubt, expected, touches_front
from tuner.records import Level
from tuner.space import Objective

AXES = Axis.of((Objective(metric="tpot_ms_p50", goal="min"), Objective(metric="output_tok_s", goal="max")), (1, 8))


def curve(tpot: float, alone: float, loaded: float, spread: float = 0.03) -> dict[int, Level]:
    return {1: level(1, tpot, alone, spread=spread), 8: level(8, tpot * 3, loaded, spread=spread)}


KNOWN = [curve(5, 200, 1400), curve(6, 166, 1200), curve(8, 125, 1000), curve(4, 250, 900)]


def test_a_candidate_slow_alone_stops_when_no_curve_rises_enough() -> None:
    assert dominated(level(1, 20, 50, spread=0.03), KNOWN, AXES)


def test_one_that_may_still_win_under_load_goes_on() -> None:
    assert not dominated(level(1, 5.5, 190, spread=0.03), KNOWN, AXES)


def test_a_curve_that_once_rose_steeply_keeps_others_in_the_race() -> None:
    steep = [*KNOWN, curve(19, 50, 1450)]
    assert not dominated(level(1, 20, 50, spread=0.03), steep, AXES)


def test_nothing_stops_before_there_is_something_to_compare_with() -> None:
    assert not dominated(level(1, 20, 50), KNOWN[:3], AXES)


def test_longer_windows_go_to_what_may_be_on_the_front() -> None:
    assert touches_front(curve(5.05, 200, 1390), KNOWN, AXES)
    assert not touches_front(curve(9, 110, 800), KNOWN, AXES)
    assert touches_front(curve(5.2, 190, 1350, spread=0.1), KNOWN, AXES)


def test_what_was_not_measured_is_expected_to_rise_like_the_others() -> None:
    assert expected(AXES[1], level(1, 20, 50), KNOWN) == 50 * (7.0 + 1200 / 166) / 2
    assert expected(AXES[0], level(1, 20, 50), KNOWN) == 20
    assert expected(AXES[1], level(1, 20, 50), []) is None


def test_what_was_not_measured_is_doubted_as_far_as_curves_differ() -> None:
    own = level(1, 20, 50, spread=0.03)
    assert doubt(AXES[0], own, KNOWN) == own.deviation(AXES[0].metric) > 0
    rises = [7.0, 1200 / 166, 8.0, 3.6]
    assert doubt(AXES[1], level(1, 20, 50, spread=0), KNOWN) == pytest.approx(50 * pstdev(rises))
    assert doubt(AXES[1], own, KNOWN) > doubt(AXES[1], level(1, 20, 50, spread=0), KNOWN)
    assert doubt(AXES[1], own, []) == 0.0


def test_hopes_are_taken_from_curves_of_the_same_kind_once_there_are_two() -> None:
    steep = [*KNOWN, curve(19, 50, 1450)]
    assert dominated(level(1, 20, 50, spread=0.03), steep, AXES, like=KNOWN[:2])
    assert not dominated(level(1, 20, 50, spread=0.03), steep, AXES, like=KNOWN[:1])
