"""Why a configuration is as fast as it is, in plain words. Pure.

Speed is tokens a round over time a round: a loss is either the drafter's (fewer tokens accepted) or the round's (more
milliseconds). Importance is the share of what was measured that one knob explains; what the next best loses is how
far the runner-up is behind, and in which of the two.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from engine.config import EngineConfig, NoDraft
from engine.estimate import draft_at
from tuner.confirm import Contender
from tuner.importance import shares
from tuner.labels import label
from tuner.pick import THROUGHPUT, Recommendation
from tuner.points import Point
from tuner.records import Level, TrialRecord, canonical
from tuner.space import Objective, Space

BOUNDS = {
    "memory": "reading weights and cache from memory",
    "compute": "matrix products",
    "host": "what is not in the roofline: launches, Python, waiting",
    "acceptance": "the drafter: few drafted tokens are accepted",
}
HOST_SHARE = 0.3  # of the roofline: below it, the roofline is not what bounds
POOR_ACCEPTANCE = 1.5  # tokens a round with a drafter


@dataclass(frozen=True)
class Round:
    """One decode round of one request: `tokens` come out of `ms`."""

    concurrency: int
    ms: float
    tokens: float

    @property
    def tpot_ms(self) -> float:
        """Milliseconds per token."""
        return self.ms / self.tokens


@dataclass(frozen=True)
class Split:
    """A configuration against another at the same load: factors of tokens a round and of time a round.

    Their quotient is the speed-up: speed = tokens / ms.
    """

    tokens: float
    ms: float

    @property
    def speedup(self) -> float:
        """How many times as fast."""
        return self.tokens / self.ms


def round_of(level: Level) -> Round | None:
    """Return a level's round, None where TPOT was not measured; without an accept length a round is one token."""
    each = level.metrics.get("tpot_ms_p50")
    if each is None or each <= 0:
        return None
    tokens = level.metrics.get("accept_length") or 1.0
    return Round(level.concurrency, each * tokens, tokens)


def compare(one: Round, other: Round) -> Split:
    """Return `one` over `other`."""
    return Split(one.tokens / other.tokens, one.ms / other.ms)


def bound_of(record: TrialRecord, concurrency: int) -> str | None:
    """Return what bounds a trial at a load: memory, compute, host or acceptance; None where nothing is known."""
    level = record.level(concurrency)
    accept = level.metrics.get("accept_length") if level is not None else None
    if accept is not None and accept < POOR_ACCEPTANCE and _speculates(record.config, concurrency):
        return "acceptance"
    found = (record.headroom or {}).get(str(concurrency))
    if not isinstance(found, Mapping) or "share" not in found:
        return None
    return "host" if found["share"] < HOST_SHARE else str(found["bound"])


def _speculates(config: Mapping[str, Any], running: int) -> bool:
    """Whether a recorded configuration drafts at so many running requests; one of another version counts as not."""
    try:
        return not isinstance(draft_at(EngineConfig.model_validate(config), running), NoDraft)
    except ValidationError:
        return False


def importance(space: Space, records: Sequence[TrialRecord], objective: Objective, load: int) -> dict[str, float]:
    """Return, by path, the share of the variation between trials that a knob alone explains (`tuner.importance`), the
    largest first; knobs of which nothing can be said are left out."""
    measured: list[tuple[dict[str, Hashable], float]] = []
    for record in records:
        assignment = space.assignment_of(record.config)
        level = record.level(load) if record.role in ("baseline", "search") else None
        value = level.metrics.get(objective.metric) if level is not None else None
        if assignment is not None and value is not None:
            measured.append(({path: _comparable(each) for path, each in assignment.items()}, value))
    found = shares(measured, [domain.path for domain in space.domains])
    known = {path: each.share for path, each in found.items() if each.share is not None}
    return dict(sorted(known.items(), key=lambda item: -item[1]))


def _comparable(value: Any) -> Hashable:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else canonical(value)


def trial_lines(record: TrialRecord, baseline: TrialRecord | None) -> list[str]:
    """Return what one trial did at each load, a line each."""
    lines = []
    for level in record.levels:
        own = round_of(level)
        if own is None:
            continue
        text = (
            f"c={level.concurrency}: {own.ms:.2f} ms a round × {own.tokens:.2f} tokens = {own.tpot_ms:.2f} ms a token"
        )
        other = baseline.level(level.concurrency) if baseline is not None else None
        plain = round_of(other) if other is not None else None
        if plain is not None and baseline is not None and baseline.trial != record.trial:
            split = compare(own, plain)
            text += f"; {split.speedup:.2f}× no speculation ({split.tokens:.2f}× tokens, {split.ms:.2f}× time a round)"
        bound = bound_of(record, level.concurrency)
        if bound is not None:
            text += f"; bound by {BOUNDS.get(bound, bound)}"
        lines.append(text)
    return lines


def runner_up_line(
    best: Point,
    points: Sequence[Point],
    objective: Objective,
    searched: Sequence[str],
    ranked: Sequence[Contender] = (),
) -> str | None:
    """Return what the next best configuration at the same load loses and where; None without one.

    `ranked`: how all launches of the study rank the configurations, where they were asked; else the means are compared.
    """
    others = [
        point
        for point in points
        if point.concurrency == best.concurrency
        and point.trial != best.trial
        and point.feasible
        and point.metrics.get(objective.metric) is not None
    ]
    values = {point.trial: point.metrics.get(objective.metric) or 0.0 for point in (best, *others)}
    judged = {contender.trial: contender.estimate(objective).value for contender in ranked}
    if best.trial in judged:
        values, others = judged, [point for point in others if point.trial in judged]
    if not others or best.metrics.get(objective.metric) is None:
        return None
    sign = 1.0 if objective.goal == "min" else -1.0
    following = min(others, key=lambda point: sign * values[point.trial])
    own = values[best.trial]
    loss = sign * (values[following.trial] - own) / abs(own) if own else 0.0
    name = f"trial {following.trial} ({label(following.config, searched)})"
    if loss < 0:
        return f"Best at this load alone: {name}, {-loss:.1%} ahead in {objective.metric}{_where(following, best)}."
    if (following.trial, following.concurrency) in best.tied_with:
        return f"Next best: {name}, {loss:.1%} behind in {objective.metric}: a tie by its interval."
    return f"Next best: {name} loses {loss:.1%} of {objective.metric}{_where(following, best)}."


def _where(point: Point, best: Point) -> str:
    one, other = _point_round(point), _point_round(best)
    if one is None or other is None:
        return ""
    split = compare(one, other)
    return f": {split.tokens:.2f}× the tokens a round in {split.ms:.2f}× the time"


def _point_round(point: Point) -> Round | None:
    return round_of(Level(concurrency=point.concurrency, metrics=point.metrics, n=point.n))


def importance_line(shares: Mapping[str, float], least: float = 0.02) -> str | None:
    """Return which knobs mattered, in words; None where nothing is known."""
    kept = [(path, share) for path, share in shares.items() if share >= least]
    if not kept:
        return None
    words = ", ".join(f"{path} {share:.0%}" for path, share in kept[:5])
    rest = [path for path, share in shares.items() if share < least]
    tail = f"; next to nothing: {', '.join(rest[:5])}" if rest else ""
    return f"What decides: {words}{tail}."


def winner_lines(
    best: Recommendation, points: Sequence[Point], records: Sequence[TrialRecord], space: Space
) -> list[str]:
    """Return why a recommended point is the best one: its round, what bounds it, and who comes next."""
    point, objective = best.point, ranking_of(best, space)
    record = next((record for record in records if record.trial == point.trial), None)
    baseline = next((record for record in records if record.role == "baseline" and record.levels), None)
    lines = []
    if record is not None:
        levels = tuple(level for level in record.levels if level.concurrency == point.concurrency)
        lines += [f"Why: {line}." for line in trial_lines(record.model_copy(update={"levels": levels}), baseline)]
    searched = [domain.path for domain in space.domains]
    tied = replace(point, tied_with=best.tied_with)
    following = runner_up_line(tied, points, objective, searched, best.ranked)
    return lines if following is None else [*lines, following]


def ranking_of(best: Recommendation, space: Space) -> Objective:
    """Return what a recommendation is best at."""
    named = next((o for o in space.file.objectives if o.metric == best.metric), None)
    return Objective(metric=THROUGHPUT, goal="max") if named is None or named.metric == THROUGHPUT else named
