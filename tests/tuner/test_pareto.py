"""The front against its definition, and what is derived from it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.pareto import costs, non_dominated, overlap

VALUES = st.integers(0, 6).map(float) | st.just(math.nan) | st.floats(-1e6, 1e6)


def by_definition(points: np.ndarray) -> list[bool]:
    def dominates(a: np.ndarray, b: np.ndarray) -> bool:
        return bool((a <= b).all() and (a < b).any())

    valid = ~np.isnan(points).any(axis=1)
    return [
        bool(valid[i]) and not any(valid[j] and dominates(points[j], points[i]) for j in range(len(points)))
        for i in range(len(points))
    ]


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4).flatmap(lambda m: st.lists(st.lists(VALUES, min_size=m, max_size=m), max_size=25)))
def test_front_is_the_set_that_nothing_dominates(rows: list[list[float]]) -> None:
    points = np.array(rows, dtype=float).reshape(len(rows), len(rows[0]) if rows else 2)
    assert non_dominated(points).tolist() == by_definition(points)


def test_two_dimensional_front_of_many_points_against_brute_force() -> None:
    rng = np.random.default_rng(7)
    for size in (1, 2, 50, 400):
        points = rng.integers(0, 40, (size, 2)).astype(float)
        assert non_dominated(points).tolist() == by_definition(points)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30), st.randoms())
def test_front_does_not_depend_on_the_order(rows: list[tuple[int, int]], rng: object) -> None:
    points = np.array(rows, dtype=float)
    kept = {tuple(p) for p in points[non_dominated(points)]}
    order = list(range(len(rows)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    again = points[order]
    assert {tuple(p) for p in again[non_dominated(again)]} == kept


def test_costs_turn_maxima_and_keep_what_is_missing() -> None:
    array = costs([(1.0, 10.0), (None, 5.0)], ["min", "max"])
    assert array[0].tolist() == [1.0, -10.0]
    assert math.isnan(array[1, 0])
    assert costs([], ["min", "max"]).shape == (0, 2)


@pytest.mark.parametrize(
    ("a", "b", "together"),
    [((0, 1), (1, 2), True), ((0, 1), (1.1, 2), False), ((0, 9), (3, 4), True), ((3, 4), (0, 1), False)],
)
def test_overlap(a: tuple[float, float], b: tuple[float, float], together: bool) -> None:
    assert overlap(a, b) is together
