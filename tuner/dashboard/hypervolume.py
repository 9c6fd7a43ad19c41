"""How fast a study came to its front: its hypervolume after each trial, beside that of a random order.

Each trial counts with one vector, the objectives at the concurrency the optimiser is told of. A cell of the plane
counts once a trial dominates it. If m of n trials dominate a cell, k of them drawn at random without replacement
cover it with probability 1 − C(n−m, k) / C(n, k); so the expectation over all orders is the area of the cells by
their m, times that: exact, nothing is sampled. Trials that failed or miss a constraint are draws that cover nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.pareto import Costs

MOST = 2000  # trials: the plane has n² cells


@dataclass(frozen=True)
class Progress:
    """Shares of the final hypervolume after 1 … n trials, shape (n,) each; empty when nothing can be said."""

    ours: tuple[float, ...] = ()
    random: tuple[float, ...] = ()


def progress(points: Costs) -> Progress:
    """Return the course of the hypervolume of (n, 1 or 2) costs in the order measured; NaN rows cover nothing.

    The reference point is the worst value on each axis among those that count: it is the same for both curves.
    """
    n = len(points)
    valid = np.asarray(np.isfinite(points).all(axis=1), dtype=np.bool_)
    if n > MOST or valid.sum() < 2:
        return Progress()
    # One axis is a plane whose second side has length one.
    plane = points if points.shape[1] == 2 else np.column_stack([points[:, 0], np.zeros(n)])
    inner = plane[valid]
    reference = inner.max(axis=0)
    if points.shape[1] == 1:
        reference[1] = 1.0
    xs, x = np.unique(inner[:, 0], return_inverse=True)
    ys, y = np.unique(inner[:, 1], return_inverse=True)
    area = np.outer(np.diff([*xs, reference[0]]), np.diff([*ys, reference[1]]))
    dominators = np.zeros((len(xs), len(ys)), dtype=np.int64)
    np.add.at(dominators, (x, y), 1)
    dominators = dominators.cumsum(axis=0).cumsum(axis=1)
    by_count: NDArray[np.float64] = np.bincount(dominators.ravel(), weights=area.ravel(), minlength=n + 1).astype(
        np.float64
    )
    total = float(by_count[1:].sum())
    if total <= 0:
        return Progress()
    return Progress(_order(x, y, area, valid, total), _expectation(by_count, n, total))


def _order(
    x: NDArray[np.int64], y: NDArray[np.int64], area: NDArray[np.float64], valid: NDArray[np.bool_], total: float
) -> tuple[float, ...]:
    """Return the covered share after each trial, in the order measured."""
    # corner[i]: cells of column i at or above this row are covered.
    corner = np.full(len(area), area.shape[1], dtype=np.int64)
    above = np.concatenate([area[:, ::-1].cumsum(axis=1)[:, ::-1], np.zeros((len(area), 1))], axis=1)
    columns = np.arange(len(area))
    shares, covered, index = [], 0.0, 0
    for counts in valid:
        if counts:
            column, row = x[index], y[index]
            index += 1
            lower = np.minimum(corner[column:], row)
            covered += float((above[columns[column:], lower] - above[columns[column:], corner[column:]]).sum())
            corner[column:] = lower
        shares.append(min(1.0, covered / total))
    return tuple(shares)


def _expectation(by_count: NDArray[np.float64], n: int, total: float) -> tuple[float, ...]:
    """Return the expected covered share of k random draws, k = 1 … n; `by_count[m]`: area that m trials dominate."""
    m = np.flatnonzero(by_count[1:]) + 1
    weights = by_count[m] / total
    missed = np.ones(len(m))
    shares = []
    for drawn in range(n):
        missed = missed * np.maximum(0, n - m - drawn) / (n - drawn)
        shares.append(float((weights * (1 - missed)).sum()))
    return tuple(shares)


def costs_in_order(values: Sequence[Sequence[float | None] | None], goals: Sequence[str]) -> Costs:
    """Return (n, goals) costs; None for a trial that does not count."""
    rows = [
        [
            np.nan if value is None else value if goal == "min" else -value
            for value, goal in zip(row, goals, strict=True)
        ]
        if row is not None
        else [np.nan] * len(goals)
        for row in values
    ]
    return np.array(rows, dtype=np.float64).reshape(len(values), len(goals))
