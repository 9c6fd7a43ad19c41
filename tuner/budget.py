"""What a search may still spend: pure arithmetic on what it has spent."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tuner.durations import format_duration
from tuner.records import TrialRecord
from tuner.space.model import Budget

CONFIRMED = 3  # launches at the end of a short study
SHARE = 0.15  # of the launches of a longer one
LATEST = 8  # trials that tell how long the next one takes
RESERVE = 0.2  # at most this share of the wall time is kept back for that


@dataclass(frozen=True)
class Ledger:
    """What was spent. `seconds` is wall time, `durations` that of each finished trial, its share of a batch."""

    launched: int
    seconds: float
    gpu_seconds: float
    durations: tuple[float, ...]

    @property
    def trial_seconds(self) -> float | None:
        """How long the next trial will probably take: the median of the latest."""
        return statistics.median(self.durations[-LATEST:]) if self.durations else None


def launched(records: Sequence[TrialRecord]) -> int:
    """Return how many trials count against the budget: launches of baseline and search that could begin."""
    searched = (r for r in records if r.role in ("baseline", "search", "repeat"))
    return sum(record.state != "infeasible" and not record.blameless for record in searched)


def confirmations(launches: int) -> int:
    """Return how many launches confirm what so many have found."""
    return max(CONFIRMED, round(SHARE * launches))


def trial_seconds(record: TrialRecord) -> float:
    """Return the time a recorded trial took, all stages together."""
    return sum(record.seconds.values())


def split_seconds(record: TrialRecord) -> tuple[float, float]:
    """Return the seconds of a trial outside and inside of its windows; waiting for its turn is neither."""
    measure = record.seconds.get("load", 0.0)
    waited = record.seconds.get("lease", 0.0)
    return trial_seconds(record) - measure - waited, measure


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return how much time is in at least one of the spans, each from a begin to an end."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def busy_seconds(records: Sequence[TrialRecord]) -> float:
    """Return the wall time in which at least one of the recorded trials ran: some ran side by side. One that does not
    say when it began counts as alone."""
    alone = sum(trial_seconds(r) for r in records if r.started is None)
    return alone + covered((r.started, r.started + trial_seconds(r)) for r in records if r.started is not None)


def reserve(budget: Budget, launches: int, each: float) -> float:
    """Return the seconds that the search leaves for the confirmation of so many launches; `each`: what one takes."""
    if budget.wall is None:
        return 0.0
    return min(confirmations(launches) * each, RESERVE * budget.wall)


def why_stop(
    budget: Budget,
    ledger: Ledger,
    gpus: int,
    kept_back: float = 0.0,
    *,
    count: bool = True,
    expected: float | None = None,
) -> str | None:
    """Return why no further trial may start, None if one may.

    `gpus`: GPUs of the next trial; `kept_back`: seconds of wall time it must leave; `count`: whether it counts
    against `budget.trials`; `expected`: seconds it will probably take, default as the last ones did.
    """
    if count and budget.trials is not None and ledger.launched >= budget.trials:
        return f"{ledger.launched} of {budget.trials} trials are done"
    expected = ledger.trial_seconds or 0.0 if expected is None else expected
    if budget.wall is not None and ledger.seconds + expected + kept_back > budget.wall:
        left = format_duration(max(0.0, budget.wall - ledger.seconds))
        kept = f", {format_duration(kept_back)} kept for the confirmation" if kept_back else ""
        takes = format_duration(expected)
        return f"of {format_duration(budget.wall)} wall time {left} is left{kept}; a trial takes {takes}"
    if budget.gpu_hours is not None and ledger.gpu_seconds + gpus * expected > budget.gpu_hours * 3600:
        return f"{ledger.gpu_seconds / 3600:.2f} of {budget.gpu_hours:g} GPU-hours are spent"
    return None


def seconds_left(budget: Budget, ledger: Ledger, to_confirm: int | None = None) -> float | None:
    """Return how long search and confirmation will go on, None while nothing is known.

    `to_confirm`: how many launches are still to come once the search is over; None while it goes on.
    """
    ends = []
    if budget.wall is not None:
        ends.append(max(0.0, budget.wall - ledger.seconds))
    if ledger.trial_seconds is not None:
        if to_confirm is not None:
            ends.append(to_confirm * ledger.trial_seconds)
        elif budget.trials is not None:
            still = max(0, budget.trials - ledger.launched) + confirmations(budget.trials)
            ends.append(still * ledger.trial_seconds)
    return min(ends, default=None)
