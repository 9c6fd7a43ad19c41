"""How long a candidate is measured: a short window for all, longer where it matters, none for what is beaten. Pure.

Optuna refuses to prune with several objectives, and an expensive part of a launch is loading the weights, not
measuring; what can be saved is windows. Two decisions are made while a server runs:

- after its first concurrency: can this candidate still reach the front? If not, the other levels are not measured;
- after a short window: does its interval touch the front? If so, it is measured longer.

Full windows are left to the confirmation: a search has to find the candidates, and launches of one configuration differ
by what no window shortens, so the second half of a window tells a search less than the launch that it delays.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tuner.labels import draft_kind
from tuner.records import THROUGHPUT, Level, Race, TrialRecord
from tuner.records import Axis as Axis

if TYPE_CHECKING:  # workers race, and load no search space
    from tuner.space import Space

SHORT = 0.25  # of the full window
LONG = 0.5  # of it, for what may be on the front
LEAST = 4.0  # seconds; a shorter window has few requests as it is, and is not split
ALIKE = 2  # curves of one kind of draft that tell how such curves rise with concurrency
MOST = 400  # curves that a candidate races against, the latest
SLACK = 0.05  # a candidate may be this much better at other levels than any curve seen so far suggests

Interval = tuple[float, float]
Curve = Mapping[int, Level]


def interval_of(level: Level, metric: str) -> Interval | None:
    """Return a metric's interval, its value alone where it has none, None where it was not measured."""
    value = level.metrics.get(metric)
    if value is None:
        return None
    return level.intervals.get(metric, (value, value))


def optimistic(axis: Axis, first: Level, curves: Sequence[Curve]) -> float | None:
    """Return the lowest cost on an axis that a candidate may still reach, given its first level.

    At the axis' own level that is the better end of its interval. At another level it is that, times the best ratio
    between the two levels on any curve measured so far, and a little more. None where no curve tells.
    """
    bounds = interval_of(first, axis.metric)
    if bounds is None:
        return None
    best = bounds[0] if axis.goal == "min" else bounds[1]
    if axis.level == first.concurrency:
        return axis.cost(best)
    ratios = _ratios(axis, first, curves)
    if not ratios:
        return None
    ratio = min(ratios) * (1 - SLACK) if axis.goal == "min" else max(ratios) * (1 + SLACK)
    return axis.cost(best * ratio)


def _ratios(axis: Axis, first: Level, curves: Sequence[Curve]) -> list[float]:
    ratios = []
    for curve in curves:
        here, there = curve.get(first.concurrency), curve.get(axis.level)
        one = here.metrics.get(axis.metric) if here else None
        other = there.metrics.get(axis.metric) if there else None
        if one and other:
            ratios.append(other / one)
    return ratios


def expected(axis: Axis, first: Level, curves: Sequence[Curve]) -> float | None:
    """Return what a candidate that was stopped after its first level would probably have had on an axis: its value
    there, times the median ratio of the curves measured so far. None where no curve tells."""
    value = first.metrics.get(axis.metric)
    if value is None or axis.level == first.concurrency:
        return value
    ratio = _ratios(axis, first, curves)
    return value * statistics.median(ratio) if ratio else None


def doubt(axis: Axis, first: Level, curves: Sequence[Curve]) -> float:
    """Return the standard deviation of what is `expected`: the first level's own, and how much the curves differ in
    their rise. 0 where nothing is known."""
    value, own = first.metrics.get(axis.metric), first.deviation(axis.metric)
    if value is None or axis.level == first.concurrency:
        return own
    ratios = _ratios(axis, first, curves)
    return math.hypot(own * statistics.median(ratios), value * statistics.pstdev(ratios)) if ratios else 0.0


def dominated(
    first: Level, curves: Sequence[Curve], axes: Sequence[Axis], *, least: int = 4, like: Sequence[Curve] = ()
) -> bool:
    """Tell whether a candidate is beaten whatever its other levels bring.

    It is when some measured curve is better on every axis, at the worse ends of its intervals, than the candidate
    can still become. Nothing is stopped before `least` curves were measured. `like`: those that rise as the
    candidate does, from which its hopes are taken once there are enough.
    """
    if len(curves) < least:
        return False
    rising = like if len(like) >= ALIKE else curves
    hopes = [optimistic(axis, first, rising) for axis in axes]
    if any(hope is None for hope in hopes):
        return False
    return any(_beats(curve, axes, [hope for hope in hopes if hope is not None]) for curve in curves)


def _beats(curve: Curve, axes: Sequence[Axis], hopes: Sequence[float]) -> bool:
    for axis, hope in zip(axes, hopes, strict=True):
        level = curve.get(axis.level)
        bounds = interval_of(level, axis.metric) if level is not None else None
        if bounds is None or max(axis.cost(end) for end in bounds) >= hope:
            return False
    return True


def touches_front(curve: Curve, front: Sequence[Curve], axes: Sequence[Axis]) -> bool:
    """Tell whether a candidate may be on the front: no point of it is better on every axis by the intervals.

    Better here means that the better end of the candidate's interval is still worse than the point's own value.
    """
    hopes: list[float] = []
    for axis in axes:
        level = curve.get(axis.level)
        bounds = interval_of(level, axis.metric) if level is not None else None
        if bounds is None:
            return False
        hopes.append(min(axis.cost(end) for end in bounds))
    return not any(_is_better(other, axes, hopes) for other in front)


def _is_better(other: Curve, axes: Sequence[Axis], hopes: Sequence[float]) -> bool:
    for axis, hope in zip(axes, hopes, strict=True):
        level = other.get(axis.level)
        value = level.metrics.get(axis.metric) if level is not None else None
        if value is None or axis.cost(value) >= hope:
            return False
    return True


def race_of(records: Sequence[TrialRecord], space: Space, kind: str = "") -> Race:
    """Return what a candidate with this kind of draft races against: every curve measured, on the axes of the front
    and on what is recommended by, throughput at the load of `pick`."""
    file = space.file
    axes = Axis.of(file.objectives, space.levels)
    load = max(space.levels) if file.pick.load is None else file.pick.load
    if load in space.levels and not any((a.metric, a.level) == (THROUGHPUT, load) for a in axes):
        axes = (*axes, Axis(metric=THROUGHPUT, goal="max", level=load))
    names = {axis.metric for axis in axes}
    measured = [record for record in records if record.state == "measured" and record.role != "calibration"][-MOST:]
    like = tuple(index for index, record in enumerate(measured) if draft_kind(record.config) == kind)
    return Race(axes=axes, curves=tuple(_thin(record, names) for record in measured), like=like)


def _thin(record: TrialRecord, names: set[str]) -> tuple[Level, ...]:
    return tuple(
        Level(
            concurrency=level.concurrency,
            metrics={name: value for name, value in level.metrics.items() if name in names},
            intervals={name: bounds for name, bounds in level.intervals.items() if name in names},
            n=level.n,
        )
        for level in record.levels
    )


def is_out(first: Level, race: Race) -> bool:
    """Tell whether a candidate is beaten by its first level (`dominated`); one without intervals never is."""
    known = all(axis.metric in first.intervals for axis in race.axes)
    curves = curves_of(race)
    return known and dominated(first, curves, race.axes, like=[curves[index] for index in race.like])


def curves_of(race: Race) -> list[Curve]:
    """Return the curves of a race by concurrency."""
    return [{level.concurrency: level for level in curve} for curve in race.curves]
