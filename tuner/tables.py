"""Tables for the terminal: the front, one trial, the end of a search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tuner.durations import format_duration
from tuner.explain import importance, importance_line, ranking_of, trial_lines, winner_lines
from tuner.export.launch_file import recorded_config, serve_command, shorten
from tuner.labels import clean, draft_kind, flatten, label, plain, varying, with_interval
from tuner.pick import EXACT, THROUGHPUT, Recommendation, speedup
from tuner.points import Point, baseline_at
from tuner.policy_fit import fit_for, verdict_of
from tuner.records import TrialRecord
from tuner.space import Objective, Space
from tuner.store import StudyFolder
from tuner.study import Outcome
from tuner.verdicts import caveats

EXTRA = ("ttft_ms_p90", "accept_length")
WIDE = 110  # columns
ONE_DRAFT = ("sglang",)  # servers that cannot switch drafts while they run
SHOWN = 6  # tied trials that are named


def paths_of(outcome: Outcome, space: Space) -> list[str]:
    """Return the searched paths that differ between the trials of a study."""
    return varying([domain.path for domain in space.domains], [record.config for record in outcome.records])


def columns(space: Space) -> list[str]:
    """Return the metrics that tables show: the objectives, then what explains them."""
    names = [objective.metric for objective in space.file.objectives]
    names += [constraint.metric for constraint in space.file.constraints]
    return list(dict.fromkeys([*names, *EXTRA]))


def speed(point: Point, points: Iterable[Point], objectives: Sequence[Objective]) -> float | None:
    """Return how many times the baseline's throughput at the same concurrency a point has."""
    objective = Objective(metric=THROUGHPUT, goal="max")
    if point.metrics.get(THROUGHPUT) is None:
        objective = objectives[0]
    return speedup(point, baseline_at(points, point.concurrency), objective)


@dataclass(frozen=True)
class FrontTable:
    """The front, as wide as what it is printed on; where that is narrow, the objectives alone."""

    outcome: Outcome
    space: Space

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table."""
        yield front_table(self.outcome, self.space, explained=options.max_width >= WIDE)


def front_table(outcome: Outcome, space: Space, *, explained: bool = True) -> Table:
    """Return the front as a table, one row per point; `explained`: with what explains the objectives."""
    names = columns(space) if explained else list(dict.fromkeys(o.metric for o in space.file.objectives))
    measured = {objective.metric for objective in space.file.objectives}
    table = Table(
        title="Front", title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="bold"
    )
    table.add_column("trial", justify="right", no_wrap=True)
    table.add_column("c", justify="right", no_wrap=True)
    table.add_column("configuration", overflow="fold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)  # half a number is another number
    table.add_column("× base", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    paths = paths_of(outcome, space)
    for point in outcome.front:
        cells = [with_interval(point.metrics.get(n), point.intervals.get(n) if n in measured else None) for n in names]
        faster = speed(point, outcome.points, space.file.objectives)
        times = "–" if faster is None else f"{faster:.2f}"
        row = (
            str(point.trial),
            str(point.concurrency),
            escape(label(point.config, paths)),
            *cells,
            times,
            remarks(point),
        )
        table.add_row(*row, style=None if point.feasible else "dim")
    return table


def remarks(point: Point) -> str:
    """Return what else must be said of a point, in a few words."""
    words = []
    if point.baseline:
        words.append("baseline")
    if not point.feasible:
        words.append("misses a constraint")
    if point.synthetic:
        words.append("synthetic")
    if point.tied_with:
        words.append(f"tied with {_trials(point.tied_with)}")
    return "; ".join(words)


def _trials(keys: Sequence[tuple[int, int]]) -> str:
    """Return trial numbers, the first few by name."""
    named = ", ".join(f"#{trial}" for trial, _ in keys[:SHOWN])
    return named if len(keys) <= SHOWN else f"{named} and {len(keys) - SHOWN} more"


def recommendation_lines(best: Recommendation, outcome: Outcome, space: Space) -> list[str]:
    """Return the recommendation in sentences."""
    point = best.point
    paths = paths_of(outcome, space)
    value = with_interval(point.metrics.get(best.metric), point.intervals.get(best.metric))
    lines = [
        f"Recommended at {point.concurrency} requests in flight: trial {point.trial}, {label(point.config, paths)}: "
        f"{best.metric} {value}"
    ]
    others = any(p.concurrency == point.concurrency and draft_kind(p.config) != "none" for p in outcome.points)
    if point.baseline and others and best.gives <= EXACT:
        lines.append("No configuration with speculation is faster there, judged by all launches: serve without.")
    elif point.baseline and not others:
        lines.append("It is the baseline; no configuration with speculation was measured at that load.")
    elif best.speedup is not None:
        lines.append(f"That is {best.speedup:.2f} × no speculation at the same load.")
    if best.gives > EXACT:
        lines.append(
            f"It gives up {best.gives:.1%} of the best at this load, as `pick.give` allows, for more over all loads."
        )
    if best.estimate is not None:
        lines.append(
            f"All launches of the study together expect {with_interval(best.estimate.value, best.estimate.interval)}."
        )
    if best.tied_with:
        lines.append(f"Not to be told apart from {_trials(best.tied_with)}: the intervals overlap.")
    if best.misses:
        lines.append(f"It does not meet the limits asked for, and nothing measured does: {'; '.join(best.misses)}.")
    return [*lines, *caveats(outcome.records, point.trial)]


def reason_lines(outcome: Outcome, space: Space) -> list[str]:
    """Return why the recommended point is the best, which knobs decide, and what became of a policy by load."""
    best = outcome.recommendation
    if best is None:
        return []
    shares = importance(space, outcome.records, ranking_of(best, space), best.point.concurrency)
    decides = importance_line(shares)
    lines = winner_lines(best, outcome.points, outcome.records, space)
    return [*lines, *([] if decides is None else [decides]), *policy_lines(outcome)]


def policy_lines(outcome: Outcome) -> list[str]:
    """Return the table of drafts by load that was launched, and whether it was accepted; or the one that takes a server
    a range, where a server cannot switch. Nothing without either."""
    verdict = verdict_of(outcome.records)
    if verdict is not None:
        record = next(record for record in outcome.records if record.trial == verdict.trial)
        judged = "accepted" if verdict.accepted else "not accepted"
        table = _table(record.config["draft"]["by_running"])
        return [f"Policy by requests in flight (trial {verdict.trial}): {table}; {judged}: {verdict.why}."]
    best = outcome.recommendation
    if best is None or best.point.config["backend"]["kind"] not in ONE_DRAFT:
        return []
    policy = fit_for(outcome.records, recorded_config(best.point.trial, best.point.config))
    if policy is None or len(policy.ranges) == 1:
        return []
    table = _table([each.first, each.last, each.curve.draft] for each in policy.ranges)
    return [
        f"Fastest by requests in flight: {table}. One server cannot switch; `tuner export STUDY --format by-load` "
        "writes one a range."
    ]


def _table(rows: Iterable[Sequence[Any]]) -> str:
    return ", ".join(f"{first}–{'' if last is None else last} {draft_label(draft)}" for first, last, draft in rows)


def draft_label(draft: Mapping[str, object]) -> str:
    """Return a draft in a few words, such as `dflash 8`."""
    words = [draft.get("kind"), draft.get("block_size"), draft.get("nodes")]
    return " ".join(str(word) for word in words if word is not None)


def ending(outcome: Outcome, space: Space, folder: StudyFolder) -> RenderableType:
    """Return what a search prints last: front, recommendation, where the report is, how to serve the winner."""
    parts: list[RenderableType] = []
    if outcome.front:
        parts += [FrontTable(outcome, space), Text()]
    if outcome.recommendation is None:
        parts += [Text(line) for line in (f"Nothing to recommend: {outcome.why}.", *caveats(outcome.records))]
    else:
        parts += [Text(line) for line in recommendation_lines(outcome.recommendation, outcome, space)]
        parts += [Text(line) for line in reason_lines(outcome, space)]
    parts += [Text(), Text(summary(outcome.records)), Text(f"Report:  {shorten(folder.report)}")]
    if outcome.recommendation is not None:
        parts.append(Text(f"Serve:   {serve_command(folder.launch)}"))
    return Group(*parts)


def summary(records: Sequence[TrialRecord]) -> str:
    """Return how many trials came to what."""
    launches = [record for record in records if record.state != "infeasible"]
    measured = sum(r.state == "measured" and r.role in ("baseline", "search") for r in launches)
    raced = [record.raced for record in launches if record.raced is not None]
    failed = [record for record in launches if record.failure is not None]
    again = sum(record.role in ("confirm", "repeat") for record in launches)
    words = [f"{measured} configuration{'' if measured == 1 else 's'} measured"]
    if again:
        words.append(f"{again} of them again")
    if any(record.role == "policy" for record in launches):
        words.append("a policy launched")
    if out := sum(each.out for each in raced):
        words.append(f"{out} raced out after one load")
    if raced:
        words.append(f"racing saved {format_duration(sum(each.saved_s for each in raced))} of measuring")
    if failed:
        kinds = ", ".join(sorted({record.failure.kind for record in failed if record.failure is not None}))
        words.append(f"{len(failed)} failed ({kinds})")
    refused = len(records) - len(launches)
    if refused:
        words.append(f"{refused} refused without a launch")
    return "; ".join(words) + "."


def trial_view(record: TrialRecord, space: Space, baseline: TrialRecord | None = None) -> RenderableType:
    """Return everything known of one trial; `baseline` is what it is compared with."""
    paths = [domain.path for domain in space.domains]
    again = f" of trial {record.of}" if record.of is not None else ""
    parts: list[RenderableType] = [
        Text(f"Trial {record.trial}: {record.role}{again}, {record.state}: {label(record.config, paths)}", style="bold")
    ]
    if record.failure is not None:
        parts.append(Text(f"Failure: {record.failure.kind} at {record.failure.stage}"))
        parts += [Text(f"  | {clean(line)}") for line in record.failure.evidence]
        if record.failure.advice:
            parts.append(Text(f"Advice: {record.failure.advice}"))
    if record.raced is not None and record.raced.out:
        parts.append(Text("Raced out: its first load shows it beaten, the others were not measured"))
    if record.levels:
        parts.append(_levels(record))
        parts += [Text(line) for line in trial_lines(record, baseline)]
    if record.seconds:
        spent = ", ".join(f"{stage} {format_duration(seconds)}" for stage, seconds in record.seconds.items())
        parts.append(Text(f"Time: {spent}"))
    parts.append(_configs(record))
    if record.headroom:
        parts.append(Text("Headroom: " + ", ".join(f"{k} {plain(v)}" for k, v in flatten(record.headroom).items())))
    return Group(*parts)


def _levels(record: TrialRecord) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("metric")
    for level in record.levels:
        table.add_column(f"c={level.concurrency} (n={level.n})", justify="right")
    names = dict.fromkeys(name for level in record.levels for name in level.metrics)
    for name in names:
        cells = (with_interval(level.metrics.get(name), level.intervals.get(name)) for level in record.levels)
        table.add_row(name, *cells)
    return table


def _configs(record: TrialRecord) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("field")
    table.add_column("asked")
    table.add_column("ran")
    asked, ran = flatten(record.config), flatten(record.resolved or {})
    for path in dict.fromkeys([*asked, *ran]):
        ran_text = plain(ran[path]) if path in ran else ""
        table.add_row(path, escape(plain(asked[path])) if path in asked else "", escape(ran_text))
    return table
