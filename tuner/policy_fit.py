"""The best policy table from measured curves: which draft serves how many running requests. Pure.

Speculation pays while the machine has compute to spare, and costs once it has none; where it turns is read off the
curves of the launches themselves (one launch measures them all). A table is then launched as any other configuration
is, and accepted only if it is not slower than no speculation at any load that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from engine.config import EngineConfig, PolicyDraft
from tuner.records import Level, TrialRecord, canonical

METRIC = "output_tok_s"
LEAST_GAIN = 0.02  # a switch costs rounds; ranges that gain less are not worth one


@dataclass(frozen=True)
class Curve:
    """One draft's throughput by concurrency: value and 95 % interval."""

    trial: int
    draft: dict[str, Any]
    speed: Mapping[int, tuple[float, float, float]]  # concurrency: (low, value, high)


@dataclass(frozen=True)
class Range:
    """One entry of the table; `last` is None for the last."""

    first: int
    last: int | None
    curve: Curve


@dataclass(frozen=True)
class Policy:
    """A table, with what it is expected to give at each concurrency measured, and without speculation."""

    ranges: tuple[Range, ...]
    expected: Mapping[int, float]
    baseline: Mapping[int, float]

    @property
    def draft(self) -> PolicyDraft:
        """The draft section of an EngineConfig."""
        rows = [[each.first, each.last, each.curve.draft] for each in self.ranges]
        return PolicyDraft.model_validate({"kind": "policy", "by_running": rows})

    def at(self, load: int) -> Curve:
        """Return who serves so many running requests."""
        return next(each.curve for each in self.ranges if each.last is None or load <= each.last)

    @property
    def gain(self) -> float:
        """Geometric mean over concurrencies of the expected speed over no speculation."""
        ratios = [math.log(self.expected[level] / self.baseline[level]) for level in self.expected]
        return math.exp(sum(ratios) / len(ratios))


@dataclass(frozen=True)
class Verdict:
    """What the launch of a table showed. `slower`: the loads at which no speculation is faster."""

    trial: int
    accepted: bool
    why: str
    slower: tuple[int, ...] = ()


def verdict_of(records: Sequence[TrialRecord]) -> Verdict | None:
    """Return what the last launch of a fitted table showed; None when none was launched.

    It is compared with the launches of no speculation that confirm it, as they ran next to it, else with all.
    """
    launch = next((record for record in reversed(records) if record.role == "policy" and not record.blameless), None)
    if launch is None:
        return None
    if launch.state != "measured":
        kind = launch.failure.kind if launch.failure is not None else launch.state
        return Verdict(launch.trial, False, f"its launch came to {kind}")
    first = next((record.trial for record in records if record.role == "baseline" and record.state == "measured"), None)
    plain = [r for r in records if first is not None and first in (r.trial, r.of) and r.state == "measured"]
    beside = [record for record in plain if record.role == "confirm"] or [r for r in plain if r.role != "calibration"]
    judged = never_slower(_by_level([launch]), _by_level(beside))
    if not judged:
        return Verdict(launch.trial, False, "no speculation was not measured at the same loads")
    slower = tuple(sorted(level for level, holds in judged.items() if not holds))
    if slower:
        where = ", ".join(map(str, slower))
        return Verdict(launch.trial, False, f"it is slower than no speculation at {where} requests in flight", slower)
    where = ", ".join(map(str, sorted(judged)))
    return Verdict(launch.trial, True, f"it is not slower than no speculation at {where} requests in flight")


def _by_level(records: Sequence[TrialRecord]) -> dict[int, Level]:
    """Return the metric of these tables by concurrency, averaged over launches."""
    return {
        concurrency: Level(concurrency=concurrency, metrics={METRIC: value}, intervals={METRIC: (low, high)}, n=1)
        for concurrency, (low, value, high) in _mean_speeds(records).items()
    }


def fit_for(records: Sequence[TrialRecord], like: EngineConfig) -> Policy | None:
    """Return the best table of a server like this one, from the trials that differ from it in their draft alone."""
    searched = [record for record in records if record.role not in ("policy", "calibration") and not record.blameless]
    return fit_policy(curves_of(searched, like))


def curves_of(records: Sequence[TrialRecord], like: EngineConfig) -> list[Curve]:
    """Return the curves of launches that differ from `like` in their draft alone, repeats averaged.

    A policy is one server: everything but the draft must be the same in all of its ranges. Drafts that failed in
    any launch, and policies, have no curve.
    """
    wanted = _without_draft(like.model_dump(mode="json"))
    groups: dict[str, list[TrialRecord]] = {}
    for record in records:
        draft = record.config.get("draft")
        if isinstance(draft, dict) and draft.get("kind") != "policy" and _without_draft(record.config) == wanted:
            groups.setdefault(canonical(record.config["draft"]), []).append(record)
    return [
        Curve(group[0].trial, group[0].config["draft"], _mean_speeds(group))
        for group in groups.values()
        if all(record.state == "measured" for record in group)
    ]


def _without_draft(config: Mapping[str, Any]) -> str:
    return canonical({key: value for key, value in config.items() if key != "draft"})


def _mean_speeds(group: Sequence[TrialRecord]) -> dict[int, tuple[float, float, float]]:
    found: dict[int, list[tuple[float, float, float]]] = {}
    for record in group:
        for level in record.levels:
            bounds = _bounds(level)
            if bounds is not None:
                found.setdefault(level.concurrency, []).append(bounds)
    return {c: tuple(sum(column) / len(rows) for column in zip(*rows, strict=True)) for c, rows in found.items()}


def _bounds(level: Level) -> tuple[float, float, float] | None:
    value = level.metrics.get(METRIC)
    if value is None or value <= 0:
        return None
    low, high = level.intervals.get(METRIC, (value, value))
    return low, value, high


def fit_policy(curves: Sequence[Curve], *, least_gain: float = LEAST_GAIN) -> Policy | None:
    """Return the fastest table; None without a measured baseline (no speculation).

    At every concurrency the fastest draft serves, but a draft only displaces no speculation where the low end of its
    interval is above the baseline's high end: a table must never be slower than none. A range that gains less than
    `least_gain` over letting its neighbour go on is merged into it. Between two measured concurrencies the table
    switches at their geometric mean.
    """
    baseline = next((curve for curve in curves if curve.draft.get("kind") == "none"), None)
    if baseline is None:
        return None
    levels = sorted(set(baseline.speed).intersection(*(curve.speed for curve in curves)))
    if not levels:
        return None
    chosen = [_fastest(curves, baseline, level) for level in levels]
    chosen = _merged(chosen, baseline, levels, least_gain)
    expected = {level: curve.speed[level][1] for level, curve in zip(levels, chosen, strict=True)}
    return Policy(_ranges(levels, chosen), expected, {level: baseline.speed[level][1] for level in levels})


def _safe(curve: Curve, baseline: Curve, level: int) -> bool:
    return curve is baseline or curve.speed[level][0] > baseline.speed[level][2]


def _fastest(curves: Sequence[Curve], baseline: Curve, level: int) -> Curve:
    safe = [curve for curve in curves if _safe(curve, baseline, level)]
    return max(safe, key=lambda curve: curve.speed[level][1])


def _merged(chosen: list[Curve], baseline: Curve, levels: list[int], least_gain: float) -> list[Curve]:
    """Let a neighbour serve where that loses next to nothing and stays above the baseline; fewest switches first."""
    made = list(chosen)
    changed = True
    while changed:
        changed = False
        for index in range(len(made) - 1):
            for here, there in ((index, index + 1), (index + 1, index)):
                one, other, level = made[here], made[there], levels[here]
                if one is other or not _safe(other, baseline, level):
                    continue
                if one.speed[level][1] < other.speed[level][1] * (1 + least_gain) and _switches(made, here, other):
                    made[here], changed = other, True
    return made


def _switches(made: list[Curve], index: int, other: Curve) -> bool:
    """Tell whether the table has fewer switches with `other` at an index."""
    tried = [*made[:index], other, *made[index + 1 :]]
    return _count(tried) < _count(made)


def _count(made: Sequence[Curve]) -> int:
    return sum(one is not other for one, other in pairwise(made))


def _ranges(levels: Sequence[int], chosen: Sequence[Curve]) -> tuple[Range, ...]:
    ranges: list[Range] = []
    first = 1
    for index, curve in enumerate(chosen):
        if index + 1 < len(chosen) and chosen[index + 1] is curve:
            continue
        last = None
        if index + 1 < len(chosen):
            last = max(levels[index], int(math.sqrt(levels[index] * levels[index + 1])))
        ranges.append(Range(first, last, curve))
        first = (last or 0) + 1
    return tuple(ranges)


def never_slower(policy: Mapping[int, Level], baseline: Mapping[int, Level]) -> dict[int, bool]:
    """Return, by concurrency, whether a validated policy's launch is not slower than no speculation's: its interval
    does not lie below the baseline's."""
    verdict: dict[int, bool] = {}
    for concurrency, level in policy.items():
        other = baseline.get(concurrency)
        ours, theirs = _bounds(level), _bounds(other) if other is not None else None
        if ours is not None and theirs is not None:
            verdict[concurrency] = ours[2] >= theirs[0]
    return verdict


def policy_config(like: EngineConfig, policy: Policy) -> EngineConfig:
    """Return the configuration to validate by a launch; with a single range, that range's draft alone."""
    if len(policy.ranges) == 1:
        document = like.model_dump(mode="json") | {"draft": policy.ranges[0].curve.draft}
        return EngineConfig.model_validate(document)
    return like.model_copy(update={"draft": policy.draft})
