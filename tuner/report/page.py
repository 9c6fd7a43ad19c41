"""report.html: one self-contained file without scripts, that anyone may open anywhere."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from tuner.durations import format_duration
from tuner.export.launch_file import serve_command
from tuner.labels import axis, draft_kind, flatten, label, number, plain
from tuner.points import Point
from tuner.records import FAILURES, TrialRecord, metric_of
from tuner.report.chart import Axis, Mark, scatter, shape
from tuner.report.html import Html, join, tag
from tuner.space import Space
from tuner.store import StudyFolder, write_atomic
from tuner.study import Outcome
from tuner.tables import columns, paths_of, recommendation_lines, remarks, speed, summary

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
MAX_TEXT = 4000  # of one provenance value or log line


def write_report(folder: StudyFolder, space: Space, outcome: Outcome, path: Path | None = None) -> None:
    """Write report.html, in the study's folder or to `path`.

    Raises:
        OSError: it cannot be written.
        StudyError: provenance.json cannot be read.
    """
    launch = folder.launch.read_text(encoding="utf-8") if folder.launch.is_file() else None
    write_atomic(
        path or folder.report, page(space, outcome, folder.read_provenance(), launch, serve_command(folder.launch))
    )


def page(space: Space, outcome: Outcome, provenance: Mapping[str, Any], launch: str | None, command: str) -> str:
    """Return the whole page."""
    name = space.file.study.name
    style = resources.files("tuner.report").joinpath("style.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{name} – tuning report"),
        tag("style", Html(style)),
    )
    body = tag(
        "body",
        tag("h1", name),
        tag("p", _subtitle(outcome, provenance), class_="dim"),
        _recommendation(space, outcome, launch, command),
        _front(space, outcome),
        _trials(space, outcome),
        _failures(space, outcome),
        _measured_with(space),
        _provenance(provenance),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _subtitle(outcome: Outcome, provenance: Mapping[str, Any]) -> str:
    words = []
    machine = provenance.get("machine")
    if isinstance(machine, dict):
        listed = machine.get("gpus")
        gpus = listed if isinstance(listed, list) else []
        names = [str(gpu.get("name")) for gpu in gpus if isinstance(gpu, dict)]
        words.append(f"{len(names)} × {names[0]}" if names else f"{machine.get('cpu')}, {machine.get('cores')} cores")
    words += _began(provenance)
    return " · ".join([*words, summary(outcome.records)])


def _began(provenance: Mapping[str, Any]) -> Iterator[str]:
    """Yield when the study began, if its provenance says so."""
    began = provenance.get("time")
    if isinstance(began, int | float) and 0 <= began < 2**36:
        yield time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(began))


def _recommendation(space: Space, outcome: Outcome, launch: str | None, command: str) -> Html:
    if outcome.recommendation is None:
        why = outcome.why or "nothing was measured yet"
        return tag("div", tag("p", f"Nothing to recommend: {why}."), class_="panel")
    first, *rest = recommendation_lines(outcome.recommendation, outcome, space)
    parts = [tag("p", first, class_="value"), *(tag("p", line) for line in rest)]
    if outcome.recommendation.point.synthetic:
        parts.append(
            tag("p", "Synthetic: dummy weights or forced acceptance. Only timing means anything.", class_="warn")
        )
    parts.append(tag("pre", command))
    if launch is not None:
        parts.append(tag("details", tag("summary", "launch.yaml"), tag("pre", launch)))
    return tag("div", parts, class_="panel best")


# ------------------------------------------------------------------------------------------------------ front


def _front(space: Space, outcome: Outcome) -> Html:
    parts: list[Html] = [tag("h2", "Front")]
    if not outcome.points:
        parts.append(tag("p", "No point was measured.", class_="dim"))
        return join(parts)
    parts += [_chart(space, outcome), _front_table(space, outcome)]
    return join(parts)


def _chart(space: Space, outcome: Outcome) -> Html:
    objectives = space.file.objectives
    first = objectives[0]
    second = objectives[1] if len(objectives) > 1 else None
    levels = sorted({point.concurrency for point in outcome.points})
    on_front = {point.key for point in outcome.front}
    paths = paths_of(outcome, space)
    marks = []
    for point in outcome.points:
        y = point.metrics.get(first.metric)
        x = y if second is not None else float(point.concurrency)
        y = point.metrics.get(second.metric) if second is not None else y
        if x is None or y is None:
            continue
        marks.append(
            Mark(
                x=x,
                y=y,
                x_interval=point.intervals.get(first.metric) if second is not None else None,
                y_interval=point.intervals.get((second or first).metric),
                kind=draft_kind(point.config),
                series=levels.index(point.concurrency),
                front=point.key in on_front,
                feasible=point.feasible,
                baseline=point.baseline,
                title=_tooltip(point, space, paths),
            )
        )
    x_axis = Axis(axis(first.metric), first.goal == "min")
    y_axis = Axis(axis(second.metric), second.goal == "min") if second is not None else x_axis
    if second is None:
        x_axis = Axis("requests in flight", None)
    return tag("div", scatter(marks, x_axis, y_axis), _legend(levels, marks), class_="panel")


def _tooltip(point: Point, space: Space, paths: Sequence[str]) -> str:
    lines = [
        f"trial {point.trial}: {label(point.config, paths)}",
        f"{point.concurrency} requests in flight, n={point.n}",
    ]
    lines += [f"{name} {number(point.metrics.get(name))} {metric_of(name).unit}" for name in columns(space)]
    return "\n".join(lines)


def _legend(levels: Sequence[int], marks: Sequence[Mark]) -> Html:
    def symbol(*parts: Html, class_: str = "") -> Html:
        return tag("svg", *parts, viewBox="0 0 18 18", class_=class_)

    items = [
        tag("span", symbol(shape("none", 9, 9, 5), class_=f"s{i % 6}"), f"{level} in flight")
        for i, level in enumerate(levels)
    ]
    names = {"none": "no speculation", "dflash": "DFlash", "ddtree": "DDTree", "policy": "policy"}
    for kind in [kind for kind in names if any(mark.kind == kind for mark in marks)]:
        items.append(tag("span", symbol(shape(kind, 9, 9, 5)), names[kind]))
    ring = tag("circle", class_="ring", cx=9.0, cy=9.0, r=8.0)
    items.append(tag("span", symbol(ring, shape("none", 9, 9, 4)), "baseline"))
    items.append(tag("span", "pale: dominated"))
    if any(not mark.feasible for mark in marks):
        hollow = tag("g", shape("none", 9, 9, 5), class_="infeasible")
        items.append(tag("span", symbol(hollow), "hollow: misses a constraint"))
    return tag("div", items, class_="legend")


def _front_table(space: Space, outcome: Outcome) -> Html:
    names = columns(space)
    paths = paths_of(outcome, space)
    chosen = outcome.recommendation.point.key if outcome.recommendation else None
    head = _head(
        ["trial", "in flight", "configuration"], [*(axis(name) for name in names), "× baseline", "requests", ""]
    )
    rows = []
    for point in outcome.front:
        faster = speed(point, outcome.points, space.file.objectives)
        cells = [
            tag("td", str(point.trial)),
            tag("td", str(point.concurrency)),
            tag("td", label(point.config, paths), class_="left"),
            *(_measured(point, name) for name in names),
            tag("td", "–" if faster is None else f"{faster:.2f}"),
            tag("td", str(point.n)),
            tag("td", remarks(point), class_="left wrap"),
        ]
        rows.append(tag("tr", cells, class_="chosen" if point.key == chosen else None))
    note = "Brackets are 95 % intervals. × baseline compares throughput with no speculation at the same load. "
    note += "Tied: the intervals of every objective overlap."
    return join([tag("div", tag("table", head, tag("tbody", rows)), class_="scroll"), tag("p", note, class_="dim")])


def _measured(point: Point, name: str) -> Html:
    interval = point.intervals.get(name)
    bounds = f"[{number(interval[0])}–{number(interval[1])}]" if interval else None
    return tag("td", number(point.metrics.get(name)), tag("span", bounds, class_="interval") if bounds else None)


def _head(left: Sequence[str], right: Sequence[str]) -> Html:
    cells = [tag("th", text, class_="left" if text == "configuration" else None) for text in (*left, *right)]
    return tag("thead", tag("tr", cells))


# ----------------------------------------------------------------------------------------------------- trials


def _trials(space: Space, outcome: Outcome) -> Html | None:
    if not outcome.records:
        return None
    names = [objective.metric for objective in space.file.objectives]
    paths = paths_of(outcome, space)
    heads = [f"{axis(name)} at {level}" for level in space.levels for name in names]
    head = _head(["trial", "role", "state", "configuration"], [*heads, "time"])
    rows = []
    for record in outcome.records:
        cells = []
        for concurrency in space.levels:
            level = record.level(concurrency)
            cells += [tag("td", number(level.metrics.get(name)) if level else "–") for name in names]
        role = record.role if record.of is None else f"{record.role} of {record.of}"
        spent = sum(record.seconds.values())
        state = record.state if record.failure is None else f"{record.state}: {record.failure.kind}"
        rows.append(
            tag(
                "tr",
                tag("td", str(record.trial)),
                tag("td", role),
                tag("td", state, class_=None if record.failure is None else "warn"),
                tag("td", label(record.config, paths), class_="left"),
                cells,
                tag("td", format_duration(spent) if spent else "–"),
            )
        )
    return join([tag("h2", "Trials"), tag("div", tag("table", head, tag("tbody", rows)), class_="scroll")])


def _failures(space: Space, outcome: Outcome) -> Html | None:
    failed = [record for record in outcome.records if record.failure is not None]
    if not failed:
        return None
    paths = paths_of(outcome, space)
    return join([tag("h2", "Failures"), [_failure(record, paths) for record in failed]])


def _failure(record: TrialRecord, paths: Sequence[str]) -> Html:
    failure = record.failure
    if failure is None:
        return Html()
    title = f"Trial {record.trial}, {label(record.config, paths)}: {failure.kind} at {failure.stage}"
    evidence = "\n".join(line[:MAX_TEXT] for line in failure.evidence)
    return tag(
        "details",
        tag("summary", title),
        tag("p", FAILURES[failure.kind], class_="dim"),
        tag("pre", evidence) if evidence else None,
        tag("p", f"What to do: {failure.advice}") if failure.advice else None,
    )


# ------------------------------------------------------------------------------------------------- background


def _measured_with(space: Space) -> Html:
    file = space.file
    work = file.workload
    rows = [
        ("prompts", str(work.prompts)),
        ("output tokens", f"at most {work.output_tokens}" + (", past the end of text" if work.ignore_eos else "")),
        ("requests in flight", ", ".join(map(str, work.concurrency))),
        ("measured time per load", format_duration(work.window)),
        *((f"objective {i}", f"{o.goal} {o.metric}") for i, o in enumerate(file.objectives, 1)),
        *(("constraint", _limit(c.metric, c.min, c.max, c.at)) for c in file.constraints),
    ]
    if file.pick.slo:
        rows.append(("limits of the recommendation", file.pick.slo))
    parts = [tag("h2", "Measured with"), _pairs(rows)]
    parts.append(tag("details", tag("summary", "space.yaml"), tag("pre", space.text)))
    return join(parts)


def _limit(metric: str, low: float | None, high: float | None, at: int | None) -> str:
    limit = f"{metric} ≤ {high:g}" if high is not None else f"{metric} ≥ {low:g}"
    return limit + (f" at {at} in flight" if at is not None else " at every load")


def _provenance(provenance: Mapping[str, Any]) -> Html:
    rows = ((path, _short(value)) for path, value in _leaves(provenance))
    return join([tag("h2", "Provenance"), _pairs(rows)])


def _leaves(provenance: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    hidden = {"schema", "earlier", "time"}
    yield from (("began", began) for began in _began(provenance))
    yield from itertools.islice(flatten({k: v for k, v in provenance.items() if k not in hidden}).items(), 200)


def _short(value: Any) -> str:
    if value is None or value in ([], {}):
        return "–"
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return " ".join(value)[:MAX_TEXT]
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)[:MAX_TEXT]
    return plain(value)[:MAX_TEXT]


def _pairs(rows: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> Html:
    body = [tag("tr", tag("td", name, class_="left dim"), tag("td", value, class_="left wrap")) for name, value in rows]
    return tag("div", tag("table", tag("tbody", body)), class_="scroll")
