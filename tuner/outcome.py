"""What a study has come to: its points, its front, which one to serve, and what to measure again to be sure. Pure.

`tuner pick`, the confirmation of a search, and the studies that `tuner simulate` plays all ask here, so that what is
shown of the one is true of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tuner.confirm import Standing, contenders, in_doubt, next_to_confirm
from tuner.errors import NothingFeasible, UsageError
from tuner.pick import Recommendation, recommend
from tuner.points import Point, front_of, points_of
from tuner.policy_fit import verdict_of
from tuner.records import TrialRecord
from tuner.space import Space
from tuner.space.model import Pick


@dataclass(frozen=True)
class Outcome:
    """What a search has found so far; `recommendation` is None when nothing can be recommended, `why` says why."""

    records: tuple[TrialRecord, ...]
    points: tuple[Point, ...]
    front: tuple[Point, ...]
    recommendation: Recommendation | None
    why: str


def outcome_of(records: Sequence[TrialRecord], space: Space) -> Outcome:
    """Return points, front and recommendation of records. A table of drafts that was not accepted has no points."""
    verdict = verdict_of(records)
    refused = None if verdict is None or verdict.accepted else verdict.trial
    points = tuple(point for point in points_of(records, space.file.constraints) if point.trial != refused)
    front = tuple(front_of(points, space.file.objectives))
    try:
        best, why = best_of(points, records, space, space.file.pick), ""
    except (NothingFeasible, UsageError) as error:
        best, why = None, str(error)
    return Outcome(tuple(records), points, front, best, why)


def best_of(points: Sequence[Point], records: Sequence[TrialRecord], space: Space, pick: Pick) -> Recommendation:
    """Return which of the points to serve, judged by all launches of the study.

    Raises:
        NothingFeasible, UsageError: as `tuner.pick.recommend`.
    """
    return recommend(points, space.file.objectives, pick, partial(contenders, space, records))


def next_confirmation(outcome: Outcome, most: int) -> int | None:
    """Return the trial to measure again, None when `most` launches are spent or nothing is left to tell apart."""
    best = outcome.recommendation
    if best is None or len({point.trial for point in outcome.points}) < 2:
        return None
    front = tuple(dict.fromkeys(point.trial for point in outcome.front))
    standing = Standing(best.point.trial, front, baseline_of(outcome), confirmed(outcome.records))
    return next_to_confirm(standing, most, lambda: in_doubt(best.ranked))


def baseline_of(outcome: Outcome) -> int | None:
    """Return the trial of the baseline, None where it has no points."""
    return next((point.trial for point in outcome.points if point.baseline), None)


def confirmed(records: Sequence[TrialRecord]) -> tuple[int, ...]:
    """Return the trials that were measured again at the end, in the order of their launches."""
    return tuple(r.of for r in records if r.role == "confirm" and r.of is not None and not r.blameless)
