"""Which points nobody beats: pure functions on arrays of costs, where lower is better on every axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.records import Goal

Costs = NDArray[np.float64]


def costs(values: Sequence[Sequence[float | None]], goals: Sequence[Goal]) -> Costs:
    """Return values as costs, shape (points, goals): maxima negated, what was not measured as NaN."""
    array = np.array([[np.nan if v is None else v for v in row] for row in values], dtype=np.float64)
    signs = np.array([1.0 if goal == "min" else -1.0 for goal in goals], dtype=np.float64)
    return np.multiply(array.reshape(len(values), len(goals)), signs)


def non_dominated(points: Costs) -> NDArray[np.bool_]:
    """Return which rows of (n, m) no other row dominates.

    A row dominates another if it is no worse on every axis and better on one; so equal rows stay together. A
    row with NaN is never on the front and dominates nothing.
    """
    kept = np.zeros(len(points), dtype=np.bool_)
    valid = ~np.isnan(points).any(axis=1)
    if valid.any():
        inner = points[valid]
        kept[valid] = _front_2d(inner) if inner.shape[1] == 2 else _front(inner)
    return kept


def _front_2d(points: Costs) -> NDArray[np.bool_]:
    """Two axes, O(n log n): in the order of the first axis, a front point lowers the second."""
    order = np.lexsort((points[:, 1], points[:, 0]))
    first, second = points[order, 0], points[order, 1]
    lowest_before = np.concatenate(([np.inf], np.minimum.accumulate(second)[:-1]))
    on_front = second < lowest_before
    # An equal row follows its equal in this order: it is on the front if its equal is.
    same = np.concatenate(([False], (first[1:] == first[:-1]) & (second[1:] == second[:-1])))
    group = np.cumsum(~same) - 1
    on_front = on_front[np.flatnonzero(~same)][group]
    kept = np.empty(len(points), dtype=np.bool_)
    kept[order] = on_front
    return kept


def _front(points: Costs) -> NDArray[np.bool_]:
    """Any number of axes, O(n² m), row by row to keep memory at O(n m)."""
    kept = np.ones(len(points), dtype=np.bool_)
    for index, point in enumerate(points):
        no_worse = (points <= point).all(axis=1)
        better = (points < point).any(axis=1)
        kept[index] = not (no_worse & better).any()
    return kept


def overlap(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Whether two closed intervals share a value."""
    return a[0] <= b[1] and b[0] <= a[1]
