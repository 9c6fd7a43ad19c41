"""Which point to serve: the best one that meets the limits at the load given."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tuner.confirm import Contender, Estimate
from tuner.errors import NothingFeasible, UsageError
from tuner.points import Point, baseline_at, ties
from tuner.records import THROUGHPUT as THROUGHPUT
from tuner.slo import Slo, parse_slo
from tuner.space.model import Objective, Pick

EXACT = 1e-9  # what is better by less is not better


@dataclass(frozen=True)
class Recommendation:
    """The point to serve; `misses` says which limits even it does not meet."""

    point: Point
    metric: str  # what it is best at
    misses: tuple[str, ...]
    tied_with: tuple[tuple[int, int], ...]
    speedup: float | None  # against no speculation at the same load, in `metric`; above 1 is better
    ranked: tuple[Contender, ...] = ()  # all that were in question, the best first
    estimate: Estimate | None = None  # what all launches of the study say of the point, where they were asked
    gives: float = 0.0  # share of the best at this load that is given up for more over all loads

    @property
    def meets_slo(self) -> bool:
        """Whether every limit is met."""
        return not self.misses


Judge = Callable[[Objective, int, Collection[int]], Sequence[Contender]]
"""Ranks the points of some trials in a metric at a load, the best first."""


def recommend(
    points: Sequence[Point], objectives: Sequence[Objective], pick: Pick, judge: Judge | None = None
) -> Recommendation:
    """Return the point to serve at `pick.load` (default: the highest load measured).

    Of those that miss at most the share `pick.give` of the best there, the one that is best over all loads is taken.
    Best is the highest throughput, or the first objective where throughput was not measured. The best of many noisy
    measurements looks better than it is, so a `judge` who knows all launches ranks the points (`tuner.outcome`);
    without one, or where a value is not positive, the means of their own launches do. If no feasible point meets the
    limits, the best one of those that come closest in number is returned with `misses` set, so that the caller can
    say so.

    Raises:
        NothingFeasible: nothing was measured at that load, or nothing meets the constraints.
        UsageError: the limits cannot be parsed, or the load was not measured.
    """
    try:
        slo = parse_slo(pick.slo or "")
    except ValueError as error:
        raise UsageError(f"slo: {error}") from error
    if not points:
        raise NothingFeasible("no trial was measured")
    measured = sorted({point.concurrency for point in points})
    load = measured[-1] if pick.load is None else pick.load
    if load not in measured:
        raise UsageError(f"load {load} was not measured; measured are {', '.join(map(str, measured))}")
    there = [point for point in points if point.concurrency == load and point.feasible]
    if not there:
        raise NothingFeasible(f"no measured configuration meets the constraints at concurrency {load}")
    objective = _ranking(there, objectives)
    ranked = [point for point in there if point.metrics.get(objective.metric) is not None]
    if not ranked:
        raise NothingFeasible(f"{objective.metric} was not measured at concurrency {load}")
    fewest = min(len(slo.misses(point.metrics)) for point in ranked)
    ranked = [point for point in ranked if len(slo.misses(point.metrics)) == fewest]
    judged: Sequence[Contender] = ()
    if judge is not None and all(_value(point, objective) > 0 for point in ranked):
        judged = judge(objective, load, {point.trial for point in ranked})
    if not judged:
        ranked.sort(key=lambda point: (_cost(point, objective), point.trial))
    behind = {c.trial: 1 - math.exp(judged[0].cost - c.cost) for c in judged} or _behind(ranked, objective)
    chosen = _all_round([t for t, lost in behind.items() if lost <= pick.give + EXACT], points, objective)
    best = next(point for point in ranked if point.trial == chosen)
    return Recommendation(
        point=best,
        metric=objective.metric,
        misses=slo.misses(best.metrics),
        tied_with=ties(best, there, [objective]),
        speedup=speedup(best, baseline_at(points, load), objective),
        ranked=tuple(judged),
        estimate=next((c.estimate(objective) for c in judged if c.trial == chosen), None),
        gives=behind[chosen],
    )


def _behind(ranked: Sequence[Point], objective: Objective) -> dict[int, float]:
    """Return by which share the points of each trial, the best first, miss the best."""
    values = {point.trial: _value(point, objective) for point in ranked}
    best = values[ranked[0].trial]
    return {trial: abs(best - value) / max(best, value, EXACT) for trial, value in values.items()}


def _all_round(trials: Sequence[int], points: Sequence[Point], objective: Objective) -> int:
    """Return which of some trials, the best first, has the best geometric mean over the loads that the first was
    measured at; one that lacks any of them is not compared."""
    curves: dict[int, dict[int, float]] = {trial: {} for trial in trials}
    for point in points:
        if point.trial in curves and _value(point, objective) > 0:
            curves[point.trial][point.concurrency] = math.log(_value(point, objective))
    sign, loads = 1.0 if objective.goal == "min" else -1.0, curves[trials[0]]
    whole = [trial for trial in trials if loads and curves[trial].keys() >= loads.keys()]
    return min(whole, key=lambda trial: sign * sum(curves[trial][load] for load in loads), default=trials[0])


def _ranking(points: Sequence[Point], objectives: Sequence[Objective]) -> Objective:
    if any(point.metrics.get(THROUGHPUT) is not None for point in points):
        return Objective(metric=THROUGHPUT, goal="max")
    return objectives[0]


def _cost(point: Point, objective: Objective) -> float:
    value = _value(point, objective)
    return value if objective.goal == "min" else -value


def _value(point: Point, objective: Objective) -> float:
    return point.metrics.get(objective.metric) or 0.0


def speedup(point: Point, baseline: Point | None, objective: Objective) -> float | None:
    """Return how many times better than the baseline a point is in one metric; None where unknown.

    Like is compared with like: confirmation with confirmation where both have one, since those were measured
    next to each other, else search with search.
    """
    if baseline is None:
        return None
    ours, theirs = point.confirm.get(objective.metric), baseline.confirm.get(objective.metric)
    if ours is None or theirs is None:
        ours, theirs = point.search.get(objective.metric), baseline.search.get(objective.metric)
    if ours is None or theirs is None or ours <= 0 or theirs <= 0:
        return None
    return theirs / ours if objective.goal == "min" else ours / theirs


def slo_of(pick: Pick) -> Slo:
    """Return the limits of a pick."""
    return parse_slo(pick.slo or "")
