"""Everything the page shows, as one JSON document; and, for a page that has it, only what changed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.budget import Ledger, confirmations, launched, seconds_left, trial_seconds
from tuner.dashboard import hypervolume
from tuner.dashboard.policy import fitted, policy_of
from tuner.dashboard.state import state_of
from tuner.dashboard.study import Change, StudyReader
from tuner.dashboard.tail import open_plain
from tuner.dashboard.timeline import Timeline, busy_seconds, from_record, lanes
from tuner.dashboard.trials import digits, domain_json, open_trial, short, trial_json
from tuner.errors import StudyError
from tuner.explain import winner_lines
from tuner.export.launch_file import serve_command
from tuner.importance import shares
from tuner.labels import flatten
from tuner.pick import Recommendation
from tuner.points import Point, objectives_of, violations
from tuner.records import FAILURES, METRIC_NAMES, TrialRecord, metric_of
from tuner.space import Space
from tuner.study import Outcome, outcome_of
from tuner.tables import policy_lines, recommendation_lines, summary
from tuner.verdicts import caveats

SCHEMA = 1
MOST_TIES = 12
PLACEHOLDER = "LAUNCH_FILE"


class Payload:
    """Turns a study into the page's document; what is unchanged since the last call is not made again.

    `ended`: the study's own search asks, at its end and with its lock still held.
    """

    def __init__(self, reader: StudyReader, name: str, *, ended: bool = False) -> None:
        self._reader = reader
        self._name = name
        self._ended = ended
        self._trials: dict[int, dict[str, Any]] = {}
        self._paths: list[str] = []
        self._seen: dict[str, set[str]] = {}
        self._outcome: Outcome | None = None

    def whole(self) -> dict[str, Any]:
        """Return the whole document.

        Raises:
            SpaceError: the study's space.yaml is invalid in this version.
            OSError: a file cannot be read.
        """
        self._trials = {}
        changed = self._update(set(self._reader.records))
        return changed | {"metrics": _metrics(), "failures": dict(FAILURES)}

    def changes(self, change: Change) -> dict[str, Any]:
        """Return the document with only those trials that a change touched."""
        touched = set(change.trials)
        touched |= {
            of for trial in change.trials if (r := self._reader.records.get(trial)) and (of := r.of) is not None
        }
        return self._update(touched)

    def live(self) -> dict[str, Any]:
        """Return what changes while a trial runs: state, open trials, time spent and left."""
        outcome = self._outcome or outcome_of(list(self._reader.records.values()), self._reader.space)
        return self._live(outcome)

    def _update(self, touched: set[int]) -> dict[str, Any]:
        reader, space = self._reader, self._reader.space
        records = [reader.records[trial] for trial in sorted(reader.records)]
        outcome = outcome_of(records, space)
        paths = self._varying(touched)
        if paths != self._paths:
            touched, self._paths = set(reader.records), paths
        points: dict[int, list[Point]] = {}
        for point in outcome.points:
            points.setdefault(point.trial, []).append(point)
        baselines = {point.concurrency: point for point in outcome.points if point.baseline}
        if any(point.trial in touched for point in baselines.values()):
            touched = set(reader.records)  # every ratio to the baseline is another now
        plain = next((record for record in records if record.role == "baseline" and record.levels), None)
        for trial in touched & set(reader.records):
            self._trials[trial] = trial_json(
                reader.records[trial],
                points.get(trial, ()),
                baselines,
                reader.timelines.get(trial),
                space,
                paths,
                plain,
            )
        live = self._live(outcome)
        return {
            "schema": SCHEMA,
            "name": self._name,
            "study": study_json(reader, space, outcome, paths),
            "trials": [self._trials[trial] for trial in sorted(touched & set(reader.records))],
            "derived": derived_json(space, outcome, {n: trial["params"] for n, trial in self._trials.items()}),
            "live": live,
        }

    def _varying(self, touched: Iterable[int]) -> list[str]:
        """Return the searched paths whose values differ between trials, as `tables.paths_of` does for all of them."""
        for trial in touched:
            if (record := self._reader.records.get(trial)) is None:
                continue
            flat = flatten(record.config)
            for domain in self._reader.space.domains:
                path = domain.path
                inner = [(p, v) for p, v in flat.items() if p == path or p.startswith(f"{path}.")]
                self._seen.setdefault(path, set()).add(str(inner))
        return [domain.path for domain in self._reader.space.domains if len(self._seen.get(domain.path, ())) > 1]

    def _live(self, outcome: Outcome) -> dict[str, Any]:
        reader, space = self._reader, self._reader.space
        timelines = _timelines(reader)
        state = state_of(reader.folder, timelines.values(), len(reader.records), outcome.front, ended=self._ended)
        self._outcome = outcome
        is_running = state.kind == "running"
        cut = [t for t in timelines.values() if t.end is None and t.trial not in reader.records]
        spent = busy_seconds(timelines.values(), time.time() if is_running else None)
        ledger = Ledger(
            launched=launched(outcome.records),
            seconds=spent,
            gpu_seconds=sum(trial_seconds(record) * record.gpus for record in outcome.records),
            durations=tuple(trial_seconds(r) for r in outcome.records if r.state != "infeasible"),
        )
        again = sum(record.role == "confirm" for record in outcome.records)
        to_come = max(0, confirmations(ledger.launched) - again) if again else None
        left = seconds_left(space.file.study.budget, ledger, to_come)
        return {
            "state": state.kind,
            "text": state.text,
            "now": round(time.time(), 3),
            "open": [open_trial(timeline, reader.asked(timeline.trial), self._paths) for timeline in cut],
            "lanes": {str(trial): lane for trial, lane in lanes(timelines.values()).items()},
            "launched": ledger.launched,
            "gpu_hours": digits(ledger.gpu_seconds / 3600),
            "seconds": digits(spent),
            "left": digits(left) if is_running and left is not None else None,
            "unreadable": reader.unreadable,
            "too_long": reader.too_long,
        }


def _timelines(reader: StudyReader) -> dict[int, Timeline]:
    """Return every trial's timeline: from its events, else from what its record says."""
    found = dict(reader.timelines)
    for trial, record in reader.records.items():
        if trial not in found and (timeline := from_record(record)) is not None:
            found[trial] = timeline
        elif trial in found and found[trial].end is None:
            found[trial].end = found[trial].last  # recorded, though its last event was lost
    return found


def _metrics() -> list[dict[str, str]]:
    return [
        {"name": name, "unit": metric.unit, "goal": metric.goal, "description": metric.description}
        for name in METRIC_NAMES
        for metric in [metric_of(name)]
    ]


def study_json(reader: StudyReader, space: Space, outcome: Outcome, paths: list[str]) -> dict[str, Any]:
    """Return what the study is: its space, budget, objectives, machine and files."""
    file, folder = space.file, reader.folder
    budget = file.study.budget
    provenance = _provenance(reader)
    trials = provenance.get("trials")
    return {
        "name": file.study.name,
        "seed": file.study.seed,
        "budget": budget.model_dump(mode="json") | ({"trials": trials} if isinstance(trials, int) else {}),
        "levels": list(space.levels),
        "objectives": [o.model_dump(mode="json") | {"at": o.level(space.levels)} for o in file.objectives],
        "constraints": [constraint.model_dump(mode="json") for constraint in file.constraints],
        "pick": file.pick.model_dump(mode="json"),
        "workload": file.workload.model_dump(mode="json"),
        "domains": domain_json(space),
        "labels": paths,
        "began": provenance.get("time") if isinstance(provenance.get("time"), int | float) else None,
        "machine": machine_words(provenance),
        "provenance": {key: short(value) for key, value in list(flatten(provenance).items())[:200]},
        "space": _text(folder.space),
        "launch": _text(folder.launch) if folder.launch.is_file() else None,
        "command": serve_command(folder.launch),
        "serve": serve_command(Path.cwd() / PLACEHOLDER),
        "digest": space.digest,
        "summary": summary(outcome.records),
        "policy": policy_of(folder) or fitted(outcome),
        "search": short(folder.read_search()),
    }


def _provenance(reader: StudyReader) -> Mapping[str, Any]:
    try:
        return reader.folder.read_provenance()
    except StudyError as error:
        return {"unreadable": str(error)}


def _text(path: Path) -> str:
    with open_plain(path) as file:
        return file.read(2**18).decode("utf-8", "replace")


def machine_words(provenance: Mapping[str, Any]) -> str:
    """Return the machine in a few words: `8 × NVIDIA H200`, or its processor."""
    machine = provenance.get("machine")
    if not isinstance(machine, Mapping):
        return ""
    listed = machine.get("gpus")
    names = [str(gpu.get("name")) for gpu in listed if isinstance(gpu, Mapping)] if isinstance(listed, list) else []
    if names:
        return str(short(f"{len(names)} × {names[0]}"))
    return str(short(f"{machine.get('cpu')}, {machine.get('cores')} cores"))


def derived_json(space: Space, outcome: Outcome, values: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Return front, recommendation, hypervolume and importance. `values`: the searched parameters of each trial."""
    best = outcome.recommendation
    recommendation = None
    if best is not None:
        recommendation = {
            "trial": best.point.trial,
            "concurrency": best.point.concurrency,
            "metric": best.metric,
            "speedup": digits(best.speedup),
            "misses": list(best.misses),
            "tied_with": [trial for trial, _ in best.tied_with],
            "lines": [short(line) for line in _recommended(best, outcome, space)],
            "reasons": [short(line) for line in _reasons(outcome, space)],
        }
    return {
        "front": [
            [*point.key, [trial for trial, _ in point.tied_with[:MOST_TIES]], len(point.tied_with)]
            for point in outcome.front
        ],
        "recommendation": recommendation,
        "why": short(outcome.why),
        "hypervolume": _hypervolume(space, outcome),
        "importance": _importance(space, outcome, values),
    }


def _recommended(best: Recommendation, outcome: Outcome, space: Space) -> list[str]:
    """Return what is said of the recommended point, but for its name, for which all records would be compared."""
    lines = recommendation_lines(best, replace(outcome, records=()), space)[1:]
    return [*lines, *caveats(outcome.records, best.point.trial)]


def _reasons(outcome: Outcome, space: Space) -> list[str]:
    """Return why the recommended point is the best; which knobs decide has a panel of its own."""
    best = outcome.recommendation
    if best is None:
        return []
    return [*winner_lines(best, outcome.points, outcome.records, space), *policy_lines(outcome)]


def _searched(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    return [r for r in records if r.role in ("baseline", "search") and r.state != "infeasible"]


def _vector(record: TrialRecord, space: Space) -> list[float | None] | None:
    """Return the objectives as the optimiser is told them; None for what failed or misses a constraint."""
    if record.state != "measured" or any(v > 0 for v in violations(record.levels, space.file.constraints)):
        return None
    return objectives_of(record, space)


def _hypervolume(space: Space, outcome: Outcome) -> dict[str, Any]:
    launches = _searched(outcome.records)
    goals = [objective.goal for objective in space.file.objectives]
    values = [_vector(record, space) for record in launches]
    found = hypervolume.progress(hypervolume.costs_in_order(values, goals))
    note = f"not computed beyond {hypervolume.MOST} trials" if len(launches) > hypervolume.MOST else ""
    return {
        "trials": [record.trial for record in launches] if found.ours else [],
        "ours": [round(v, 4) for v in found.ours],
        "random": [round(v, 4) for v in found.random],
        "note": note,
    }


def _importance(space: Space, outcome: Outcome, values: Mapping[int, dict[str, Any]]) -> list[dict[str, Any]]:
    launches = [(record, values.get(record.trial, {})) for record in _searched(outcome.records)]
    found = []
    for index, objective in enumerate(space.file.objectives):
        at = objective.level(space.levels)
        measured: list[tuple[dict[str, Any], float]] = []
        for record, assigned in launches:
            level = record.level(at) if record.state in ("measured", "pruned") else None
            value = level.metrics.get(objective.metric) if level is not None else None
            if value is not None:
                measured.append((assigned, value))
        for path, judged in shares(measured, [domain.path for domain in space.domains]).items():
            share = None if judged.share is None else round(judged.share, 4)
            found.append({"path": path, "objective": index, "share": share, "n": judged.n})
    return found


def whole_of(reader: StudyReader, name: str, *, ended: bool = False) -> dict[str, Any]:
    """Return the document of a study as it lies on disk now; `ended`: see `Payload`."""
    reader.refresh()
    return Payload(reader, name, ended=ended).whole()
