"""One trial as the page takes it: short, rounded, bounded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tuner.dashboard.timeline import Timeline, from_record
from tuner.explain import trial_lines
from tuner.labels import draft_kind, flatten, label
from tuner.labels import plain as plain_text
from tuner.pick import THROUGHPUT, speedup
from tuner.points import Point
from tuner.records import METRIC_NAMES, Level, TrialRecord
from tuner.space import Objective, Space
from tuner.space.domains import Choices

LONGEST = 1000  # characters of one value or line
MOST_LINES = 100  # of evidence

FEASIBLE, CONFIRMED = 1, 2


def trial_json(
    record: TrialRecord,
    points: Sequence[Point],
    baselines: Mapping[int, Point],
    timeline: Timeline | None,
    space: Space,
    paths: Sequence[str],
    plain: TrialRecord | None = None,
) -> dict[str, Any]:
    """Return a recorded trial. `points`: those of its configuration, empty for a repeat; `baselines` by concurrency;
    `plain`: the launch of no speculation that it is explained by.

    A row of `points` is [concurrency, n, flags, times baseline, values, lows, highs], its lists in the order of
    METRIC_NAMES; a row of `levels`, present where the trial's own measurement is not the point, has no flags.
    """
    course = timeline if timeline is not None else from_record(record)
    rows = [_point_row(point, baselines.get(point.concurrency), space.file.objectives) for point in points]
    measured = [(level.metrics, level.intervals) for level in record.levels]
    same = measured == [(point.metrics, point.intervals) for point in points]
    return {
        "trial": record.trial,
        "role": record.role,
        "state": record.state,
        "of": record.of,
        "kind": short(draft_kind(record.config)),
        "label": short(label(record.config, paths)),
        "params": params(record.config, space),
        "config": leaves(record.config),
        "resolved": _resolved(record),
        "failure": _failure(record),
        "seconds": {stage: digits(seconds) for stage, seconds in record.seconds.items()},
        "headroom": short(record.headroom),
        "explained": trial_lines(record, plain),
        "parity": None
        if record.parity is None
        else short(record.parity.model_dump(mode="json", exclude={"own", "scored"})),
        "raced": None if record.raced is None else record.raced.model_dump(mode="json"),
        "synthetic": record.synthetic,
        "gpus": record.gpus,
        "points": rows,
        "levels": None if same else [_level_row(level) for level in record.levels],
        "server": {str(level.concurrency): short(level.server) for level in record.levels if level.server},
        **course_json(course),
    }


def course_json(timeline: Timeline | None) -> dict[str, Any]:
    """Return begin, end, segments [[stage, level, begin, end]] in seconds from the begin, and the last lines."""
    if timeline is None:
        return {"begin": None, "end": None, "segments": [], "lines": []}
    start = timeline.begin
    return {
        "begin": round(start, 3),
        "end": None if timeline.end is None else round(timeline.end, 3),
        "segments": [
            [s.stage, s.level, round(s.begin - start, 3), None if s.end is None else round(s.end - start, 3)]
            for s in timeline.segments
        ],
        "lines": [[round(at - start, 3), stage, short(text)] for at, stage, text in timeline.lines],
    }


def open_trial(timeline: Timeline, asked: Mapping[str, Any] | None, paths: Sequence[str]) -> dict[str, Any]:
    """Return a trial that runs: where it is, and what it has measured so far."""
    now = timeline.now
    said = timeline.lines[-1][2] if timeline.lines else ""
    return {
        "trial": timeline.trial,
        "kind": short(draft_kind(asked)) if asked is not None else None,
        "label": short(label(asked, paths)) if asked is not None else None,
        "config": leaves(asked) if asked is not None else None,
        "stage": now.stage if now is not None else None,
        "level": now.level if now is not None else None,
        "text": short(said),
        "levels": [_level_row(level) for level in timeline.levels],
        **course_json(timeline),
    }


def params(config: Mapping[str, Any], space: Space) -> dict[str, Any]:
    """Return the searched paths that this configuration has: numbers as they are, everything else as text."""
    flat = flatten(config)
    found: dict[str, Any] = {}
    for domain in space.domains:
        path = domain.path
        if path in flat:
            value = flat[path]
            number = isinstance(value, int | float) and not isinstance(value, bool)
            found[path] = value if number else short(plain_text(value))
        elif any(key.startswith(f"{path}.") for key in flat):
            inner = {key.removeprefix(f"{path}."): v for key, v in flat.items() if key.startswith(f"{path}.")}
            kind = inner.pop("kind", None)
            words = [plain_text(v) for v in inner.values() if v is not None]
            found[path] = short(" ".join([str(kind), *words]) if kind is not None else ", ".join(words))
    return found


def domain_json(space: Space) -> list[dict[str, Any]]:
    """Return what is searched: [{path, kind, low, high, log, values}]."""
    found: list[dict[str, Any]] = []
    for domain in space.domains:
        if isinstance(domain, Choices):
            found.append(
                {"path": domain.path, "kind": "choice", "values": [short(plain_text(v)) for v in domain.values]}
            )
        else:
            kind = type(domain).__name__.removesuffix("Range").lower()
            found.append({"path": domain.path, "kind": kind, "low": domain.low, "high": domain.high, "log": domain.log})
    return found


def leaves(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return {dotted path: value} with values bounded."""
    return {short(path): short(value) for path, value in flatten(config).items()}


def short(value: Any) -> Any:
    """Return a value whose texts are at most LONGEST characters."""
    if isinstance(value, str):
        return value if len(value) <= LONGEST else value[:LONGEST] + f"… ({len(value)} characters)"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    if isinstance(value, list | tuple):
        return [short(item) for item in value[:MOST_LINES]]
    if isinstance(value, Mapping):
        return {short(key): short(item) for key, item in list(value.items())[:MOST_LINES]}
    return value


def digits(value: float | None) -> float | None:
    """Return a number with the digits that a measurement has."""
    return None if value is None else float(f"{value:.5g}")


def _values(metrics: Mapping[str, float | None], intervals: Mapping[str, tuple[float, float]]) -> list[list[Any]]:
    none = (None, None)
    bounds = [intervals.get(name, none) for name in METRIC_NAMES]
    return [
        [digits(metrics.get(name)) for name in METRIC_NAMES],
        [digits(low) for low, _ in bounds],
        [digits(high) for _, high in bounds],
    ]


def _level_row(level: Level) -> list[Any]:
    return [level.concurrency, level.n, 0, None, *_values(level.metrics, level.intervals)]


def _point_row(point: Point, baseline: Point | None, objectives: Sequence[Objective]) -> list[Any]:
    flags = FEASIBLE * point.feasible + CONFIRMED * point.confirmed
    objective = Objective(metric=THROUGHPUT, goal="max")
    if point.metrics.get(THROUGHPUT) is None:
        objective = objectives[0]
    times = digits(speedup(point, baseline, objective))
    return [point.concurrency, point.n, flags, times, *_values(point.metrics, point.intervals)]


def _resolved(record: TrialRecord) -> dict[str, Any] | None:
    """Return what the server says it runs where that is not what was asked for; None where it says nothing."""
    if record.resolved is None:
        return None
    asked = flatten(record.config)
    ran = flatten(record.resolved)
    return {short(p): short(v) for p, v in ran.items() if p not in asked or asked[p] != v}


def _failure(record: TrialRecord) -> dict[str, Any] | None:
    failure = record.failure
    if failure is None:
        return None
    return {
        "kind": failure.kind,
        "stage": failure.stage,
        "evidence": [short(line) for line in failure.evidence[:MOST_LINES]],
        "advice": short(failure.advice),
    }
