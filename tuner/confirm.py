"""The end of a search: which points to measure again, which one to recommend, and how sure that is. Pure.

The best of many noisy measurements looks better than it is. So contenders are judged by a model of all launches, in
which neighbours support each other, and the launches that are left go where they can still change the answer:
alternately to the leader and to the challenger that may yet overtake it (top-two, Russo 2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tuner.points import violations
from tuner.records import TrialRecord
from tuner.sampling.base import key_of
from tuner.sampling.encode import Array, Encoder
from tuner.sampling.gp import fit
from tuner.space import Assignment, Objective, Space

CONFIDENCE_Z = 1.96
BESIDE = 3  # launches between two of the baseline
OPTIMISM = 1.5  # standard deviations that a challenger may be better than it looks


@dataclass(frozen=True)
class Contender:
    """A measured point. `cost` and `sd` are of the logarithm of the metric, lower being better."""

    key: str
    assignment: Assignment
    launches: int
    cost: float
    sd: float


@dataclass(frozen=True)
class Answer:
    """The point to recommend, the expected value of its metric, and a 95 % interval."""

    assignment: Assignment
    value: float
    interval: tuple[float, float]
    launches: int


def contenders(space: Space, records: Sequence[TrialRecord], objective: Objective, load: int) -> list[Contender]:
    """Return the points that never failed and meet the constraints, the best first.

    Judged by a Gaussian process over all launches of the study at `load`; too few launches to fit one (under four)
    are taken as they are.
    """
    assignments: list[Assignment] = []
    costs: list[float] = []
    scatter: list[float] = []
    broken: dict[str, list[tuple[float, ...]]] = {}
    failed: set[str] = set()
    for record in records:
        assignment = space.assignment_of(record.config)
        if assignment is None or record.state == "infeasible":
            continue
        key = key_of(assignment)
        level = record.level(load)
        value = level.metrics.get(objective.metric) if level is not None else None
        if record.state != "measured" or level is None or value is None or value <= 0:
            failed.add(key)
            continue
        assignments.append(assignment)
        costs.append(math.log(value) if objective.goal == "min" else -math.log(value))
        scatter.append(level.deviation(objective.metric) / value)
        broken.setdefault(key, []).append(violations(record.levels, space.file.constraints))
    kept = {key for key, rows in broken.items() if key not in failed and _holds(rows)}
    return _judged(space, assignments, np.array(costs), np.array(scatter), kept or set(broken) - failed)


def _holds(rows: Sequence[tuple[float, ...]]) -> bool:
    """Whether every constraint holds on average over the launches of a point."""
    return all(sum(column) <= 0 for column in zip(*rows, strict=True))


def _judged(
    space: Space, assignments: list[Assignment], costs: Array, scatter: Array, kept: set[str]
) -> list[Contender]:
    keys = [key_of(assignment) for assignment in assignments]
    unique = {key: index for index, key in enumerate(keys) if key in kept}
    if not unique:
        return []
    rows = list(unique.values())
    if len(costs) < 4:
        means, sds = costs[rows], np.full(len(rows), 0.1)
    else:
        encoder = Encoder(space.domains)
        x = encoder.matrix(assignments)
        means, sds = fit(x, costs, encoder.groups, scatter=scatter).predict(x[rows])
    found = [
        Contender(key, assignments[row], keys.count(key), float(mean), float(sd))
        for key, row, mean, sd in zip(unique, rows, means, sds, strict=True)
    ]
    return sorted(found, key=lambda contender: contender.cost)


def next_to_measure(ranked: Sequence[Contender]) -> Contender | None:
    """Return the leader or its strongest challenger, whichever is known less well; None when there is no doubt."""
    if len(ranked) < 2:
        return ranked[0] if ranked else None
    leader, *others = ranked
    challenger = min(others, key=lambda other: other.cost - OPTIMISM * other.sd)
    return leader if leader.sd >= challenger.sd else challenger


@dataclass(frozen=True)
class Standing:
    """What a search has come to, by trial: the one to recommend, those on the front best first, the baseline; and, in
    the order of their launches, the trials that were measured again."""

    recommended: int | None
    front: tuple[int, ...]
    baseline: int | None
    again: tuple[int, ...] = ()


def next_to_confirm(now: Standing, most: int, doubtful: Callable[[], int | None]) -> int | None:
    """Return the trial to measure again, None when that is enough.

    The recommended one goes first and the baseline after it, and again after every third launch: what is compared is
    measured close together. Then what is on the front, once each. What is left of `most` launches goes to whom
    `doubtful` names: the trial that is known too little to decide between the best two.
    """
    wanted = [trial for trial in (now.recommended, *now.front) if trial is not None]
    if len(now.again) >= most or not {*wanted} - {now.baseline}:
        return None
    if not now.again:
        return wanted[0]
    if now.baseline is not None and now.baseline not in now.again[-BESIDE:]:
        return now.baseline
    fresh = next((trial for trial in wanted if trial not in now.again), None)
    return doubtful() if fresh is None else fresh


def in_doubt(space: Space, records: Sequence[TrialRecord], objective: Objective, load: int) -> int | None:
    """Return the trial whose next launch tells most about who is best at a load; None where nobody is in doubt."""
    ranked = contenders(space, records, objective, load)
    if len(ranked) < 2 or settled(ranked):
        return None
    chosen = next_to_measure(ranked)
    for record in records:
        assignment = space.assignment_of(record.config)
        if chosen is not None and assignment is not None and key_of(assignment) == chosen.key:
            return record.trial if record.of is None else record.of
    return None


def settled(ranked: Sequence[Contender]) -> bool:
    """Whether the 95 % interval of the leader lies clear of every other's."""
    leader, *others = ranked
    edge = leader.cost + CONFIDENCE_Z * leader.sd
    return all(edge < other.cost - CONFIDENCE_Z * other.sd for other in others)


def answer(ranked: Sequence[Contender], objective: Objective) -> Answer | None:
    """Return the recommendation; None when nothing was measured."""
    if not ranked:
        return None
    best = ranked[0]
    sign = 1.0 if objective.goal == "min" else -1.0
    ends = sorted(math.exp(sign * (best.cost + side * CONFIDENCE_Z * best.sd)) for side in (-1, 1))
    return Answer(best.assignment, math.exp(sign * best.cost), (ends[0], ends[1]), best.launches)
