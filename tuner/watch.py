"""`tuner watch`: the essentials of a study in a terminal, beside whoever searches it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tuner.dashboard.payload import Payload
from tuner.dashboard.study import StudyReader
from tuner.durations import format_duration
from tuner.labels import clean, number
from tuner.records import METRIC_NAMES
from tuner.store import StudyFolder

EVERY = 1.0  # seconds
FRONT_ROWS = 8
LAST = 5
STYLES = {
    "running": "bold blue",
    "finished": "bold green",
    "stopped": "bold yellow",
    "died": "bold red",
    "empty": "dim",
}


def watch(folder: StudyFolder, console: Console, *, once: bool = False) -> None:
    """Show a study until it ends; on what is no terminal, or with `once`, print where it stands.

    Raises:
        StudyError: its provenance cannot be read.
        SpaceError: its space.yaml is invalid in this version.
    """
    reader = StudyReader(folder)
    reader.refresh()
    document = Payload(reader, folder.path.name).whole()
    if once or not console.is_terminal:
        console.print(view(document))
        return
    with Live(view(document), console=console, auto_refresh=False, screen=False) as live:
        while document["live"]["state"] == "running":
            time.sleep(EVERY)
            reader.refresh()
            document = Payload(reader, folder.path.name).whole()
            live.update(view(document), refresh=True)


def view(document: Mapping[str, Any]) -> RenderableType:
    """Return the study's state, progress, running trials, last trials, front and recommendation."""
    study, live = document["study"], document["live"]
    trials = {trial["trial"]: trial for trial in document["trials"]}
    head = Text.assemble(
        (study["name"], "bold"), "  ", (live["state"], STYLES[live["state"]]), f"  {clean(study['machine'])}"
    )
    parts: list[RenderableType] = [head, *_progress(study, live)]
    for trial in live["open"]:
        at = f" c={trial['level']}" if trial["level"] else ""
        said = f": {trial['text']}" if trial["text"] else ""
        words = f"#{trial['trial']} {trial['label'] or ''} · {trial['stage'] or 'starts'}{at}{said}"
        parts.append(Text(clean(words), style="blue", no_wrap=True, overflow="ellipsis"))
    if trials:
        parts += [Text(), _last(study, list(trials.values())[-LAST:])]
    if document["derived"]["front"]:
        parts += [Text(), _front(document, trials)]
    best = document["derived"]["recommendation"]
    if best is not None:
        at = f"at {best['concurrency']} in flight"
        speedup = "" if best["speedup"] is None else f", {best['speedup']:.2f} × no speculation"
        parts += [
            Text(),
            Text(clean(f"Best {at}: #{best['trial']} {trials[best['trial']]['label']}{speedup}"), style="bold"),
        ]
    elif document["derived"]["why"]:
        parts += [Text(), Text(clean(f"Nothing to recommend: {document['derived']['why']}"))]
    return Group(*parts)


def _progress(study: Mapping[str, Any], live: Mapping[str, Any]) -> list[RenderableType]:
    budget = study["budget"]
    done = f"{live['launched']} of {budget['trials']}" if budget["trials"] else str(live["launched"])
    left = f", about {format_duration(live['left'])} left" if live["left"] is not None else ""
    words = Text(f"{done} launches, {format_duration(live['seconds'] or 0.0)}{left}. {study['summary']}")
    total = budget["trials"] or budget["wall"]
    spent = live["launched"] if budget["trials"] else live["seconds"]
    return [words] if not total else [words, ProgressBar(total=total, completed=min(total, spent or 0), width=60)]


def _last(study: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title="Last trials", title_justify="left")
    for name in ("trial", "state", "configuration", *(f"{o['metric']} at {o['at']}" for o in study["objectives"])):
        table.add_column(name, overflow="fold")
    for trial in trials:
        state = trial["failure"]["kind"] if trial["failure"] else trial["state"]
        rows = {row[0]: row for row in trial["levels"] or trial["points"]}
        values = [_value(rows.get(o["at"]), o["metric"]) for o in study["objectives"]]
        label = Text(clean(trial["label"]))
        table.add_row(f"#{trial['trial']}", state, label, *values, style="red" if trial["failure"] else None)
    return table


def _front(document: Mapping[str, Any], trials: Mapping[int, Mapping[str, Any]]) -> Table:
    objectives = [objective["metric"] for objective in document["study"]["objectives"]]
    entries = document["derived"]["front"]
    more = f", {len(entries) - FRONT_ROWS} more" if len(entries) > FRONT_ROWS else ""
    table = Table(box=None, pad_edge=False, header_style="bold", title=f"Front{more}", title_justify="left")
    for name in ("trial", "c", "configuration", *objectives, "× base"):
        table.add_column(name, overflow="fold")
    for trial, concurrency, *_ in entries[:FRONT_ROWS]:
        row = next(row for row in trials[trial]["points"] if row[0] == concurrency)
        times = "–" if row[3] is None else f"{row[3]:.2f}"
        label = Text(clean(trials[trial]["label"]))
        table.add_row(f"#{trial}", str(concurrency), label, *(_value(row, name) for name in objectives), times)
    return table


def _value(row: Sequence[Any] | None, name: str) -> str:
    return number(None if row is None else row[4][METRIC_NAMES.index(name)])
