"""Which parameters matter: the share of a metric's variance that one parameter explains on its own.

ω² of a one-way analysis of variance (Hays 1963): η² less what groups of random members would explain, so that a
parameter without effect is at 0 whatever its number of values. The logarithm of the metric is analysed, since
effects on speed multiply. A parameter is judged among the trials in which it is active.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

MOST_GROUPS = 6
LEAST = 5  # trials


@dataclass(frozen=True)
class Importance:
    """`share` of the variance, 0 … 1; None when too few trials or values say anything. `n` trials were judged."""

    share: float | None
    n: int


def importance(values: Sequence[Hashable], metric: Sequence[float]) -> Importance:
    """Return how much of the metric's variance the parameter's values explain; both of one length."""
    logs = [math.log(m) if m > 0 else math.nan for m in metric]
    pairs = [(value, number) for value, number in zip(values, logs, strict=True) if math.isfinite(number)]
    groups: dict[Hashable, list[float]] = {}
    for group, (_, number) in zip(_grouped([value for value, _ in pairs]), pairs, strict=True):
        groups.setdefault(group, []).append(number)
    n, k = len(pairs), len(groups)
    if n < LEAST or k < 2 or n <= k:
        return Importance(None, n)
    mean = sum(number for _, number in pairs) / n
    total = sum((number - mean) ** 2 for _, number in pairs)
    between = sum(len(g) * (sum(g) / len(g) - mean) ** 2 for g in groups.values())
    within = max(0.0, total - between) / (n - k)
    if total <= 1e-18:
        return Importance(None, n)
    return Importance(min(1.0, max(0.0, (between - (k - 1) * within) / (total + within))), n)


def shares(measured: Sequence[tuple[Mapping[str, Hashable], float]], paths: Sequence[str]) -> dict[str, Importance]:
    """Return the importance of each path. `measured`: the values that a trial has, and its metric."""
    found = {}
    for path in paths:
        having = [(values[path], metric) for values, metric in measured if path in values]
        found[path] = importance([value for value, _ in having], [metric for _, metric in having])
    return found


def _grouped(values: Sequence[Hashable]) -> list[Hashable]:
    """Return a group for each value: itself, or a sixth of the ordered ones where numbers are many."""
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values) or len(set(numbers)) <= MOST_GROUPS:
        return list(values)
    ordered = sorted(set(numbers))
    return [ordered.index(v) * MOST_GROUPS // len(ordered) for v in numbers]
