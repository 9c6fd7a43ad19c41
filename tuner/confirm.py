"""The end of a search: which points to measure again, which one to recommend, and how sure that is. Pure.

The best of many noisy measurements looks better than it is. So contenders are judged by a model of all launches, in
which neighbours support each other, and the launches that are left go where they can still change the answer:
alternately to the leader and to the challenger that may yet overtake it (top-two, Russo 2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.records import TrialRecord
from tuner.sampling.encode import Encoder
from tuner.sampling.gp import ALIKE, fit
from tuner.space import Assignment, Objective, Space

CONFIDENCE_Z = 1.96
BESIDE = 3  # launches between two of the baseline
OPTIMISM = 1.5  # standard deviations that a challenger may be better than it looks
FEWEST = 4  # launches that a model can be fitted to
# Launches that it is fitted to, those that look best: a dashboard asks with every trial of a thousand. In a part of a
# study the lucky ones are too many, so this is more than studies usually have.
MOST = 256
DIGITS = 9  # of a logarithm; costs that differ by less are the same
UNKNOWN = 0.1  # the standard deviation of a measurement that says nothing of it


@dataclass(frozen=True)
class Contender:
    """A measured point. `cost` and `sd` are of the logarithm of the metric, lower being better; `assignment` is None
    where the point is not of the space and nothing but its own launches tells of it."""

    trial: int
    assignment: Assignment | None
    launches: int
    cost: float
    sd: float

    def estimate(self, objective: Objective) -> Estimate:
        """Return the expected value of the metric and its 95 % interval."""
        sign = 1.0 if objective.goal == "min" else -1.0
        ends = sorted(math.exp(sign * (self.cost + side * CONFIDENCE_Z * self.sd)) for side in (-1, 1))
        return Estimate(math.exp(sign * self.cost), (ends[0], ends[1]), self.launches)


@dataclass(frozen=True)
class Estimate:
    """What a study says of one point: its metric, a 95 % interval; and how many launches were its own."""

    value: float
    interval: tuple[float, float]
    launches: int


@dataclass(frozen=True)
class _Launch:
    """A measurement at the load in question."""

    trial: int
    config: dict[str, Any]
    cost: float
    scatter: float


def contenders(
    space: Space, records: Sequence[TrialRecord], objective: Objective, load: int, among: Collection[int]
) -> list[Contender]:
    """Return the points of these trials that have a positive value of the metric at a load, the best first.

    Points of the space are judged by a Gaussian process over all launches of the study, so that neighbours support
    each other. One that is not of the space is judged by its own launches: by how much they differ from those of the
    best that is. With too few launches to fit a process, all are judged by their own.
    """
    launches = list(_launches(records, objective, load))
    modelled = _modelled(space, launches)
    expected = _expected(space, modelled, among) if len(modelled) >= FEWEST else {}
    assignments = {launch.trial: assignment for launch, assignment in modelled}
    own: dict[int, list[_Launch]] = {}
    for launch in launches:
        if launch.trial in among:
            own.setdefault(launch.trial, []).append(launch)
    leader = min(expected, key=lambda trial: expected[trial][0], default=None)
    shift = 0.0 if leader is None else expected[leader][0] - _as_measured(own[leader])[0]
    found = []
    for trial, each in own.items():
        cost, sd = _as_measured(each)
        cost, sd = expected.get(trial, (cost + shift, sd))
        found.append(Contender(trial, assignments[trial] if trial in expected else None, len(each), cost, sd))
    return sorted(found, key=lambda contender: (round(contender.cost, DIGITS), contender.trial))


def _launches(records: Sequence[TrialRecord], objective: Objective, load: int) -> Iterator[_Launch]:
    sign = 1.0 if objective.goal == "min" else -1.0
    for record in records:
        level = record.level(load)
        value = level.metrics.get(objective.metric) if level is not None else None
        if record.state != "measured" or record.role == "calibration" or level is None or value is None or value <= 0:
            continue
        trial = record.trial if record.of is None else record.of
        scatter = level.deviation(objective.metric) / value
        yield _Launch(trial, record.config, sign * math.log(value), scatter)


def _modelled(space: Space, launches: list[_Launch]) -> list[tuple[_Launch, Assignment]]:
    """Return the launches that a model is fitted to: all of the space's points, or those that look best."""
    few = len(launches) <= MOST
    found = []
    for launch in launches if few else sorted(launches, key=lambda launch: launch.cost):
        if (assignment := space.assignment_of(launch.config)) is not None:
            found.append((launch, assignment))
            if len(found) == MOST:
                break
    return found


def _expected(
    space: Space, modelled: list[tuple[_Launch, Assignment]], among: Collection[int]
) -> dict[int, tuple[float, float]]:
    """Return mean and standard deviation of the points of trials, as a model of all launches has them."""
    encoder = Encoder(space.domains)
    x = encoder.matrix([assignment for _, assignment in modelled])
    costs, scatter = (np.array([getattr(launch, name) for launch, _ in modelled]) for name in ("cost", "scatter"))
    rows = {launch.trial: row for row, (launch, _) in enumerate(modelled) if launch.trial in among}
    if not rows:
        return {}
    model = fit(x, costs, encoder.groups, prior=ALIKE, scatter=scatter, knobs=encoder.knobs)
    means, sds = model.predict(x[list(rows.values())])
    return {trial: (float(mean), float(sd)) for trial, mean, sd in zip(rows, means, sds, strict=True)}


def _as_measured(launches: Sequence[_Launch]) -> tuple[float, float]:
    """Return mean and standard deviation of a point's own launches."""
    cost = sum(launch.cost for launch in launches) / len(launches)
    variance = sum((launch.scatter or UNKNOWN) ** 2 for launch in launches) / len(launches)
    return cost, math.sqrt(variance / len(launches))


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


def in_doubt(ranked: Sequence[Contender]) -> int | None:
    """Return the trial whose next launch tells most about who is best; None where nobody is in doubt."""
    known = [contender for contender in ranked if contender.assignment is not None]
    if len(known) < 2 or settled(known):
        return None
    chosen = next_to_measure(known)
    return None if chosen is None else chosen.trial


def settled(ranked: Sequence[Contender]) -> bool:
    """Whether the 95 % interval of the leader lies clear of every other's."""
    leader, *others = ranked
    edge = leader.cost + CONFIDENCE_Z * leader.sd
    return all(edge < other.cost - CONFIDENCE_Z * other.sd for other in others)
