"""Whole studies over real worker processes that compute instead of measuring."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.config import load_launch
from tests.tuner.spaces import SMOKE, write
from tests.tuner.test_report import data_of
from tuner import session
from tuner.errors import NothingFeasible, StudyError, UsageError
from tuner.executors.local import LocalExecutor
from tuner.failures import Remains, classify
from tuner.records import Event, TrialRecord, TrialSpec, canonical
from tuner.space import load_space
from tuner.store import read_events
from tuner.study import Outcome, Progress, describe

WORKER = (sys.executable, str(Path(__file__).parent / "tiny_worker.py"))


class Notes:
    """Keeps what an observer is told; raises Ctrl-C when trial `stop_at` begins."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.begun: list[int] = []
        self.left: list[float | None] = []
        self.said: list[str] = []

    def trial_begins(self, spec: TrialSpec, progress: Progress) -> None:
        self.begun.append(spec.trial)
        self.left.append(progress.left)

    def event(self, event: Event) -> None:
        if event.trial == self.stop_at:
            raise KeyboardInterrupt

    def trial_ends(self, record: TrialRecord, progress: Progress) -> None: ...

    def note(self, text: str) -> None:
        self.said.append(text)


def begin(tmp_path: Path, text: str = SMOKE, **more: Any) -> session.Session:
    space = load_space(write(tmp_path, text))
    options: dict[str, Any] = {"trials": None, "fresh": False}
    return session.begin(space, tmp_path / "results", ["tuner"], **(options | more))


def run(opened: session.Session, notes: Notes | None = None) -> Outcome:
    return session.search(opened, LocalExecutor(WORKER), notes or Notes())


def misbehave(opened: session.Session, how: dict[int, str]) -> None:
    (opened.folder.path / "misbehave.json").write_text(json.dumps(how))


def sequence(records: tuple[TrialRecord, ...]) -> list[tuple[str, str]]:
    return [(record.role, canonical(record.config)) for record in records]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[session.Session, Outcome, Notes]:
    """One study run to its end, whatever a launch may still bring, for several tests to look at."""
    folder = tmp_path_factory.mktemp("finished")
    opened, notes = begin(folder, SMOKE + "strategy: {least_gain: null}\n"), Notes()
    return opened, run(opened, notes), notes


Finished = tuple[session.Session, Outcome, Notes]


def test_the_baseline_is_trial_0_and_every_point_that_can_run_is_tried_once(finished: Finished) -> None:
    _, outcome, _ = finished
    first, *rest = outcome.records
    assert (first.trial, first.role, first.config["draft"]["kind"]) == (0, "baseline", "none")
    searched = [record for record in rest if record.role == "search"]
    assert len(searched) == 12
    assert len({canonical(record.config) for record in (first, *searched)}) == 13
    assert all(record.config["draft"]["layers"] <= 2 for record in searched)


def test_the_front_is_confirmed_beside_the_baseline_and_not_counted(finished: Finished) -> None:
    _, outcome, notes = finished
    again = [record for record in outcome.records if record.role == "confirm"]
    assert 2 <= len(again) <= 3
    assert 0 in {record.of for record in again}
    best = outcome.recommendation
    assert best is not None
    assert best.point.trial in {record.of for record in again}
    assert best.point.confirmed
    assert any("every point that can run here has been tried" in text for text in notes.said)


def test_the_known_best_is_found(finished: Finished) -> None:
    _, outcome, _ = finished
    fastest = outcome.front[0]
    assert fastest.concurrency == 1
    assert (fastest.config["draft"]["block_size"], fastest.config["draft"]["layers"]) == (8, 2)
    best = outcome.recommendation
    assert best is not None
    assert best.point.concurrency == 8
    assert best.point.baseline  # under load, this worker's speculation does not pay
    assert len({point.trial for point in outcome.front}) >= 2


def test_derived_files_say_the_same(finished: Finished) -> None:
    opened, outcome, _ = finished
    front = json.loads(opened.folder.front.read_text())
    assert [(entry["trial"], entry["concurrency"]) for entry in front] == [point.key for point in outcome.front]
    launch = load_launch(opened.folder.launch)
    assert outcome.recommendation is not None
    assert launch.entries[0].config.model_dump(mode="json") == outcome.recommendation.point.config
    assert set(launch.expected) == {1, 4, 8}
    assert launch.study is not None
    assert (launch.study.trial, launch.study.digest) == (0, opened.space.digest)
    live = data_of(opened.folder.report.read_text())["live"]
    assert (live["state"], live["left"]) == ("finished", None)


def test_events_and_eta(finished: Finished) -> None:
    opened, outcome, notes = finished
    events, _ = read_events(opened.folder)
    assert {event.trial for event in events} == {record.trial for record in outcome.records}
    assert notes.begun == [record.trial for record in outcome.records]
    left = [value for value in notes.left if value is not None]
    assert left
    assert left[-1] < left[0]


def test_resuming_a_finished_study_launches_nothing(finished: Finished) -> None:
    opened, outcome, _ = finished
    notes = Notes()
    reopened = session.reopen(opened.folder.path, ["tuner"], trials=None, accept_change=False)
    again = run(reopened, notes)
    assert notes.begun == []
    assert again.records == outcome.records


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """An uninterrupted study of five trials."""
    return run(begin(tmp_path_factory.mktemp("short"), trials=5))


@pytest.mark.parametrize("stop_at", [0, 3, 5])
def test_an_interrupted_study_goes_on_as_the_uninterrupted_one(tmp_path: Path, short: Outcome, stop_at: int) -> None:
    opened = begin(tmp_path, trials=5)
    with pytest.raises(KeyboardInterrupt):
        run(opened, Notes(stop_at))
    assert len(opened.folder.read_trials()) == stop_at
    assert opened.folder.report.exists()
    reopened = session.reopen(opened.folder.path, ["tuner"], trials=None, accept_change=False)
    assert sequence(run(reopened).records) == sequence(short.records)


def test_failures_are_recorded_taught_and_left_off_the_front(tmp_path: Path) -> None:
    opened = begin(tmp_path, trials=6)
    misbehave(opened, {1: "oom_start", 2: "die", 3: "babble", 4: "graph_capture"})
    outcome = run(opened)
    failures = {r.trial: r.failure.kind for r in outcome.records if r.failure is not None}
    assert failures == {1: "oom_start", 2: "crashed", 3: "crashed", 4: "graph_capture"}
    assert not {point.trial for point in outcome.points} & set(failures)
    assert len({canonical(r.config) for r in outcome.records if r.role in ("baseline", "search")}) == 6
    report = opened.folder.report.read_text()
    assert "<b>boom" not in report
    assert "<b>boom</b> & more" in json.dumps(data_of(report))


def test_a_baseline_that_nothing_can_run_without_ends_the_study(tmp_path: Path) -> None:
    opened = begin(tmp_path)
    misbehave(opened, {0: "missing_file"})
    with pytest.raises(NothingFeasible, match=r"every trial would: missing_file at ready: .*do otherwise"):
        run(opened)
    assert len(opened.folder.read_trials()) == 1


def test_a_study_in_which_nothing_runs_gives_up(tmp_path: Path) -> None:
    opened = begin(tmp_path)
    misbehave(opened, dict.fromkeys(range(20), "crashed"))
    with pytest.raises(NothingFeasible, match="5 launches failed and none was measured"):
        run(opened)
    assert opened.folder.report.exists()


def test_the_trial_budget_counts_the_baseline_and_not_the_confirmation(short: Outcome) -> None:
    assert [record.role for record in short.records].count("search") == 4
    assert [record.role for record in short.records].count("confirm") >= 2


def test_more_trials_can_be_asked_for_later(tmp_path: Path) -> None:
    opened = begin(tmp_path, trials=2)
    first = run(opened)
    reopened = session.reopen(opened.folder.path, ["tuner"], trials=4, accept_change=False)
    outcome = run(reopened)
    assert outcome.records[: len(first.records)] == first.records
    assert sum(r.role == "search" for r in outcome.records) == 3
    kept = session.reopen(opened.folder.path, ["tuner"], trials=None, accept_change=False)
    assert kept.space.file.study.budget.trials == 4


def test_a_wall_budget_that_a_trial_would_exceed_starts_none(tmp_path: Path) -> None:
    outcome = run(begin(tmp_path, SMOKE.replace("wall: 150s", "wall: 50ms")))
    assert [record.role for record in outcome.records] == ["baseline"]


def test_an_existing_study_is_not_overwritten(tmp_path: Path) -> None:
    opened = begin(tmp_path, trials=1)
    run(opened)
    with pytest.raises(StudyError, match="tuner resume"):
        begin(tmp_path)
    fresh = begin(tmp_path, trials=1, fresh=True)
    assert fresh.folder.read_trials() == []
    assert (tmp_path / "results" / "small.1" / "trials.jsonl").stat().st_size > 0


def test_a_folder_that_is_no_study_is_left_alone(tmp_path: Path) -> None:
    taken = tmp_path / "results" / "small"
    taken.mkdir(parents=True)
    (taken / "thesis.txt").write_text("mine")
    with pytest.raises(StudyError, match="is no study"):
        begin(tmp_path)
    assert [path.name for path in taken.iterdir()] == ["thesis.txt"]


def test_resume_refuses_another_machine_or_space_unless_told(tmp_path: Path) -> None:
    opened = begin(tmp_path, trials=1)
    run(opened)
    path = opened.folder.path
    provenance = opened.folder.read_provenance()
    other = provenance | {"identity": provenance["identity"] | {"driver": "999.1", "gpus": ["Other GPU"]}}
    opened.folder.provenance.write_text(json.dumps(other))
    with pytest.raises(StudyError, match=r"driver was 999\.1 .*--accept-change"):
        session.reopen(path, [], trials=None, accept_change=False)
    session.reopen(path, [], trials=None, accept_change=True)
    assert opened.folder.read_provenance()["earlier"][0]["identity"]["driver"] == "999.1"
    opened.folder.space.write_text(SMOKE.replace("[2, 4, 6,", "[2, 4, 5, 6,"))
    with pytest.raises(StudyError, match=r"space\.yaml was changed"):
        session.reopen(path, [], trials=None, accept_change=False)
    opened.folder.space.write_text(SMOKE.replace("wall: 150s", "wall: 200s"))
    session.reopen(path, [], trials=None, accept_change=False)


def test_what_holds_no_study_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="holds no study"):
        session.reopen(tmp_path, [], trials=None, accept_change=False)
    (tmp_path / "space.yaml").write_text(SMOKE)
    with pytest.raises(StudyError, match="never begun completely"):
        session.reopen(tmp_path, [], trials=None, accept_change=False)


def test_a_baseline_that_cannot_run_here_makes_no_folder(tmp_path: Path) -> None:
    text = SMOKE.replace("smoke_pair/target", "no_such_pair/target")
    with pytest.raises(UsageError, match=r"the baseline cannot run here: model\.target"):
        begin(tmp_path, text)
    assert not (tmp_path / "results").exists()


def test_impossible_points_of_a_large_space_cost_no_launch(tmp_path: Path) -> None:
    """A continuous range cannot be judged point by point, so impossible points turn up when suggested."""
    text = SMOKE.replace("  graphs:", "  memory.kv_fraction: {float: [0.1, 0.5]}\n  graphs:")
    opened = begin(tmp_path, text, trials=4)
    assert opened.pruning.feasible is None
    outcome = run(opened)
    launched = [r for r in outcome.records if r.role in ("baseline", "search") and r.state != "infeasible"]
    refused = [r for r in outcome.records if r.state == "infeasible"]
    assert len(launched) == 4
    assert all(record.state == "measured" for record in launched)
    assert refused
    assert all(r.failure is not None and r.failure.evidence for r in refused)


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.30 GiB."
LOG = f"INFO heartbeat\n{OOM}\nINFO heartbeat"


@pytest.mark.parametrize(
    ("remains", "told"),
    [
        (
            Remains("load", "the load generator was too slow", "client_bound", tail=LOG),
            "the load generator was too slow",
        ),
        (Remains("ready", "the server runs another config", "config", tail=LOG), "the server runs another config"),
        (Remains("ready", "the server ended before it was ready", tail=LOG), OOM),
    ],
)
def test_a_failure_is_told_by_what_decided(remains: Remains, told: str) -> None:
    failure = classify(remains)
    assert told in failure.evidence
    assert describe(failure).startswith(f"{failure.kind} at {failure.stage}: {told}; ")
