"""From trial records to points and the front: what was measured, what is feasible, what cannot be told apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tuner.pareto import costs, non_dominated, overlap
from tuner.records import Level, TrialRecord
from tuner.space import Space
from tuner.space.model import Constraint, Objective


@dataclass(frozen=True)
class Point:
    """One configuration at one concurrency."""

    trial: int
    concurrency: int
    config: dict[str, Any]
    metrics: dict[str, float | None]
    intervals: dict[str, tuple[float, float]]
    n: int
    feasible: bool
    baseline: bool
    confirmed: bool
    synthetic: bool
    search: dict[str, float | None] = field(default_factory=dict)  # as measured during the search
    confirm: dict[str, float | None] = field(default_factory=dict)  # and again, beside the others confirmed
    tied_with: tuple[tuple[int, int], ...] = ()  # (trial, concurrency)

    @property
    def key(self) -> tuple[int, int]:
        """(trial, concurrency)."""
        return self.trial, self.concurrency

    def to_json(self) -> dict[str, Any]:
        """Return the entry of front.json."""
        return {
            "trial": self.trial,
            "concurrency": self.concurrency,
            "config": self.config,
            "metrics": self.metrics,
            "intervals": {name: list(interval) for name, interval in self.intervals.items()},
            "n": self.n,
            "feasible": self.feasible,
            "tied_with": [{"trial": trial, "concurrency": level} for trial, level in self.tied_with],
            "baseline": self.baseline,
            "confirmed": self.confirmed,
            "synthetic": self.synthetic,
        }


def violations(levels: Sequence[Level], constraints: Iterable[Constraint]) -> tuple[float, ...]:
    """Return one number per constraint: at most 0 when it holds, else by which share it is missed.

    A constraint without `at` must hold at every level. A value that was not measured misses by 1.
    """
    found = []
    for constraint in constraints:
        judged = [level for level in levels if constraint.at in (None, level.concurrency)]
        found.append(max((_violation(level, constraint) for level in judged), default=1.0))
    return tuple(found)


def _violation(level: Level, constraint: Constraint) -> float:
    value = level.metrics.get(constraint.metric)
    if value is None:
        return 1.0
    if constraint.max is not None:
        return (value - constraint.max) / max(abs(constraint.max), 1e-9)
    limit = constraint.min if constraint.min is not None else value
    return (limit - value) / max(abs(limit), 1e-9)


def objectives_of(record: TrialRecord, space: Space) -> list[float | None]:
    """Return the objectives as the optimiser is told them, each at its concurrency; None is not measured."""
    levels = [record.level(objective.level(space.levels)) for objective in space.file.objectives]
    named = zip(space.file.objectives, levels, strict=True)
    return [level.metrics.get(objective.metric) if level is not None else None for objective, level in named]


def points_of(records: Iterable[TrialRecord], constraints: Sequence[Constraint]) -> list[Point]:
    """Return every measured point, one per configuration and concurrency, in the order of trials.

    A configuration launched more than once has the mean of its launches, and intervals that cover them all. One
    that failed in any of its launches has no points: a crash is on no front. Launches that say nothing of it are left
    out: those disturbed on purpose or stopped by the machine, and later ones in which the client was the limit.
    """
    launches: dict[int, list[TrialRecord]] = {}
    for record in records:
        again_bound = record.of is not None and record.failure is not None and record.failure.kind == "client_bound"
        if record.role == "calibration" or record.blameless or again_bound:
            continue
        launches.setdefault(record.trial if record.of is None else record.of, []).append(record)
    points = []
    for trial, group in launches.items():
        if any(record.state != "measured" for record in group):
            continue
        baseline = any(record.role == "baseline" for record in group)
        again = [record for record in group if record.role == "confirm"]
        once = {level.concurrency: level.metrics for level in _combined([r for r in group if r.role != "confirm"])}
        confirmed = {level.concurrency: level.metrics for level in _combined(again)}
        levels = _combined(group)
        feasible = all(v <= 0 for v in violations(levels, constraints))
        for level in levels:
            points.append(
                Point(
                    trial=trial,
                    concurrency=level.concurrency,
                    config=group[0].config,
                    metrics=dict(level.metrics),
                    intervals=dict(level.intervals),
                    n=level.n,
                    feasible=feasible,
                    baseline=baseline,
                    confirmed=level.concurrency in confirmed,
                    synthetic=any(record.synthetic for record in group),
                    search=once.get(level.concurrency, {}),
                    confirm=confirmed.get(level.concurrency, {}),
                )
            )
    return sorted(points, key=lambda point: point.key)


def _combined(group: Sequence[TrialRecord]) -> list[Level]:
    """Return one level per concurrency from launches of one configuration."""
    levels: dict[int, list[Level]] = {}
    for record in group:
        for level in record.levels:
            levels.setdefault(level.concurrency, []).append(level)
    return [_mean(same) for _, same in sorted(levels.items())]


def _mean(levels: Sequence[Level]) -> Level:
    """Return the mean of launches, weighted by requests; intervals widen to cover every launch's."""
    if len(levels) == 1:
        return levels[0]
    metrics: dict[str, float | None] = {}
    intervals: dict[str, tuple[float, float]] = {}
    for name in dict.fromkeys(name for level in levels for name in level.metrics):
        known = [(value, max(1, level.n)) for level in levels if (value := level.metrics.get(name)) is not None]
        weight = sum(n for _, n in known)
        metrics[name] = sum(value * n for value, n in known) / weight if known else None
        bounds = [level.intervals[name] for level in levels if name in level.intervals]
        if bounds:
            intervals[name] = (min(low for low, _ in bounds), max(high for _, high in bounds))
    return Level(
        concurrency=levels[0].concurrency,
        metrics=metrics,
        intervals=intervals,
        n=sum(level.n for level in levels),
    )


def front_of(points: Sequence[Point], objectives: Sequence[Objective]) -> list[Point]:
    """Return the non-dominated points, best first on the first objective, with their ties.

    Points that miss a constraint are left out, unless every point does: then the best of them are shown, marked
    infeasible. Two points of the same concurrency are tied when their intervals overlap on every objective.
    """
    candidates = [point for point in points if point.feasible] or list(points)
    values = [[point.metrics.get(o.metric) for o in objectives] for point in candidates]
    array = costs(values, [o.goal for o in objectives])
    kept = [point for point, on in zip(candidates, non_dominated(array), strict=True) if on]
    sign = 1.0 if objectives[0].goal == "min" else -1.0
    kept.sort(key=lambda p: (sign * (p.metrics.get(objectives[0].metric) or 0.0), p.key))
    return [replace(point, tied_with=ties(point, candidates, objectives)) for point in kept]


def ties(point: Point, points: Iterable[Point], objectives: Sequence[Objective]) -> tuple[tuple[int, int], ...]:
    """Return the points of the same concurrency that cannot be told from `point` on any objective."""
    return tuple(
        other.key
        for other in points
        if other.concurrency == point.concurrency
        and other.trial != point.trial
        and all(_alike(point, other, objective.metric) for objective in objectives)
    )


def _alike(a: Point, b: Point, metric: str) -> bool:
    one, two = a.intervals.get(metric), b.intervals.get(metric)
    if one is None or two is None:
        return False  # without an interval nothing is known about the difference
    return overlap(one, two)


def at(points: Iterable[Point], trial: int, concurrency: int) -> Point | None:
    """Return the point of a trial at a concurrency."""
    return next((point for point in points if point.key == (trial, concurrency)), None)


def baseline_at(points: Iterable[Point], concurrency: int) -> Point | None:
    """Return the baseline at a concurrency."""
    return next((p for p in points if p.baseline and p.concurrency == concurrency), None)
