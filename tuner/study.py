"""The search: ask, run, record, tell; then confirm what came out ahead.

    baseline ─▶ ask ─▶ run ─▶ record ─▶ tell ─┐
                 ▲                            │
                 └────── while the budget ────┘ ─▶ confirm the best, interleaved ─▶ front, launch.yaml, report

trials.jsonl is the truth. Everything this module holds is read from it at the start, so a search that was killed
goes on where it stopped: no trial twice, at most the one that ran is lost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.config import EngineConfig
from tuner.acceptance import peer_of
from tuner.brain import Brain
from tuner.budget import CONFIRMED, Ledger, launched, reserve, seconds_left, trial_seconds, why_stop
from tuner.errors import NothingFeasible, StudyError, UsageError
from tuner.executors.base import Executor
from tuner.export.launch_file import recorded_config
from tuner.pick import Recommendation, recommend, slo_of
from tuner.points import Point, front_of, points_of
from tuner.records import (
    Event,
    Failure,
    FailureKind,
    LeaseRequest,
    Limits,
    Role,
    TrialRecord,
    TrialSpec,
    config_dict,
)
from tuner.space import Infeasible, Refusals, Space
from tuner.store import Journal, StudyFolder
from tuner.suggest import Suggestion

HOPELESS: frozenset[FailureKind] = frozenset(
    {"missing_file", "gated_model", "unsupported_model", "disk_full", "foreign_gpu_process"}
)
"""Failures of the baseline that every other trial would share."""

FRUITLESS = 5  # failed launches in a row, with nothing measured, before the search gives up
WANDERING = 20  # impossible suggestions in a row before points are drawn from the possible ones


@dataclass(frozen=True)
class Progress:
    """Where a search stands. Seconds are wall time; `left` is None while nothing is known."""

    role: Role
    number: int
    launched: int
    trials: int | None
    seconds: float
    left: float | None


class Observer(Protocol):
    """Somebody who watches."""

    def trial_begins(self, spec: TrialSpec, progress: Progress) -> None:
        """A trial is about to start."""

    def event(self, event: Event) -> None:
        """A worker said something."""

    def trial_ends(self, record: TrialRecord, progress: Progress) -> None:
        """A trial is recorded."""

    def note(self, text: str) -> None:
        """Something else worth a line."""


@dataclass(frozen=True)
class Outcome:
    """What a search has found so far; `recommendation` is None when nothing can be recommended, `why` says why."""

    records: tuple[TrialRecord, ...]
    points: tuple[Point, ...]
    front: tuple[Point, ...]
    recommendation: Recommendation | None
    why: str


def outcome_of(records: Sequence[TrialRecord], space: Space) -> Outcome:
    """Return points, front and recommendation of records."""
    points = points_of(records, space.file.constraints)
    front = front_of(points, space.file.objectives)
    try:
        best, why = recommend(points, space.file.objectives, space.file.pick), ""
    except (NothingFeasible, UsageError) as error:
        best, why = None, str(error)
    return Outcome(tuple(records), tuple(points), tuple(front), best, why)


class Search:
    """One search in one folder. The caller holds the folder's lock and has entered the executor."""

    def __init__(
        self,
        folder: StudyFolder,
        space: Space,
        refusals: Refusals,
        executor: Executor,
        observer: Observer,
        *,
        gpu: bool,
    ) -> None:
        """`gpu`: whether servers run on GPUs here."""
        self._folder = folder
        self._space = space
        self._refusals = refusals
        self._executor = executor
        self._observer = observer
        self._gpu = gpu
        self._budget = space.file.study.budget
        self._records = folder.read_trials()
        self._reference = folder.read_reference()
        self._began = time.monotonic()
        self._earlier = sum(trial_seconds(record) for record in self._records)
        self._durations = [trial_seconds(r) for r in self._records if r.state != "infeasible"]
        measured = self._budget.trials or 32
        self._confirmations: int | None = None  # still to come, once the search is over
        self._brain = Brain(space, refusals, startup=max(4, min(10, measured // 3)))
        for record in self._records:
            self._brain.tell(record)

    @property
    def records(self) -> tuple[TrialRecord, ...]:
        """Every record so far."""
        return tuple(self._records)

    def run(self) -> str:
        """Search until the budget is spent, confirm, and return why the search ended.

        Raises:
            StudyError: the folder cannot be written.
            NothingFeasible: the baseline cannot run here, or nothing runs at all.
        """
        with Journal(self._folder) as journal:
            self._baseline(journal)
            why = self._search(journal)
            self._observer.note(f"Search ends: {why}.")
            self._confirm(journal)
        return why

    # -------------------------------------------------------------------------------------------- phases

    def _baseline(self, journal: Journal) -> None:
        if any(record.role == "baseline" for record in self._records):
            return
        found = self._space.baseline(self._refusals)
        if isinstance(found, Infeasible):
            raise NothingFeasible(f"the baseline cannot run here: {'; '.join(found.reasons)}")
        record = self._launch(journal, "baseline", found[0])
        if record.failure is not None and record.failure.kind in HOPELESS:
            raise NothingFeasible(f"the baseline fails, and every trial would: {describe(record.failure)}")

    def _search(self, journal: Journal) -> str:
        wandering = 0
        while True:
            ledger = self._ledger()
            gpus = self._gpus_of_next()
            stop = why_stop(self._budget, ledger, gpus, reserve(self._budget, ledger))
            if stop is not None:
                return stop
            self._give_up_if_nothing_runs()
            suggestion = self._brain.ask(len(self._records), careful=wandering >= WANDERING)
            if suggestion is None:
                return "every point that can run here has been tried"
            if isinstance(suggestion.judged, Infeasible):
                wandering += 1
                self._refuse(journal, suggestion, suggestion.judged)
                continue
            wandering = 0
            role: Role = "search" if suggestion.repeat is None else "repeat"
            self._launch(journal, role, suggestion.judged, of=suggestion.repeat)

    def _confirm(self, journal: Journal) -> None:
        """Measure the best configurations again, one after another, next to the baseline.

        What is recommended may change with every confirmation, so the next one is chosen only then.
        """
        while (trial := self._next_to_confirm()) is not None:
            stop = why_stop(self._budget, self._ledger(), self._gpus_of_next(), count=False)
            if stop is not None:
                self._observer.note(f"Confirmation ends: {stop}.")
                return
            config = next(record.config for record in self._records if record.trial == trial)
            self._launch(journal, "confirm", recorded_config(trial, config), of=trial)

    def _next_to_confirm(self) -> int | None:
        """Return the trial to measure again: the recommended one, then the baseline, then again the recommended
        one if it has become another, else one of the front."""
        outcome = outcome_of(self._records, self._space)
        done = [record.of for record in self._records if record.role == "confirm"]
        self._confirmations = max(0, CONFIRMED - len(done))
        if not self._confirmations or len({point.trial for point in outcome.points}) < 2:
            return None  # enough, or nothing to tell apart
        best = [outcome.recommendation.point.trial] if outcome.recommendation is not None else []
        baseline = [point.trial for point in outcome.points if point.baseline]
        wanted = [*(baseline + best if done else best + baseline), *(point.trial for point in outcome.front)]
        return next((trial for trial in wanted if trial not in done), None)

    # ---------------------------------------------------------------------------------------- one trial

    def _launch(self, journal: Journal, role: Role, config: EngineConfig, of: int | None = None) -> TrialRecord:
        spec = self._spec(role, config)
        self._observer.trial_begins(spec, self._progress(role))
        began = time.monotonic()
        said: TrialRecord | None = None
        with self._executor.run(spec) as events:
            for event in events:
                if event.reference is not None:
                    self._reference = event.reference
                    self._folder.write_reference(event.reference)
                    event = event.model_copy(update={"reference": None})
                journal.event(event)
                self._observer.event(event)
                said = event.record or said
        if said is None:
            raise StudyError(f"trial {spec.trial}: the executor ended without a record")
        identity = {
            "trial": spec.trial,
            "role": role,
            "config": config_dict(config),
            "of": of,
            "gpus": spec.lease.gpus,
            "synthetic": said.synthetic or config.synthetic,
        }
        record = said.model_copy(update=identity)
        self._durations.append(time.monotonic() - began)
        self._keep(journal, record)
        return record

    def _refuse(self, journal: Journal, suggestion: Suggestion, infeasible: Infeasible) -> None:
        """Record a point that can never launch: it teaches, and costs no trial."""
        advice = "left out without a launch"
        failure = Failure(kind="config", stage="lease", evidence=infeasible.reasons, advice=advice)
        record = TrialRecord(
            trial=len(self._records),
            role="search",
            state="infeasible",
            config=self._space.raw_config(suggestion.assignment),
            failure=failure,
        )
        self._keep(journal, record)

    def _keep(self, journal: Journal, record: TrialRecord) -> None:
        journal.record(record)
        self._records.append(record)
        self._brain.tell(record)
        self._observer.trial_ends(record, self._progress(record.role))

    def _spec(self, role: Role, config: EngineConfig) -> TrialSpec:
        file = self._space.file
        return TrialSpec(
            study=str(self._folder.path.absolute()),
            trial=len(self._records),
            role=role,
            config=config,
            workload=file.workload,
            levels=self._space.levels,
            seed=file.study.seed,
            served_name=config.model.target,
            slo=slo_of(file.pick).uppers(),
            limits=Limits(ready_s=file.executor.ready, level_s=3 * file.workload.window + 300),
            lease=LeaseRequest(gpus=config.parallel.gpus if self._gpu else 0),
            reference=None if role == "baseline" else self._reference,
            peer=peer_of(self._records, config),
        )

    # ------------------------------------------------------------------------------------------ accounts

    def _ledger(self) -> Ledger:
        return Ledger(
            launched=launched(self._records),
            seconds=self._earlier + time.monotonic() - self._began,
            gpu_seconds=sum(trial_seconds(record) * record.gpus for record in self._records),
            durations=tuple(self._durations),
        )

    def _progress(self, role: Role) -> Progress:
        ledger = self._ledger()
        return Progress(
            role=role,
            number=len(self._records),
            launched=ledger.launched,
            trials=self._budget.trials,
            seconds=ledger.seconds,
            left=seconds_left(self._budget, ledger, self._confirmations),
        )

    def _gpus_of_next(self) -> int:
        return max((record.gpus for record in self._records), default=0)

    def _give_up_if_nothing_runs(self) -> None:
        launches = [record for record in self._records if record.state != "infeasible"]
        if len(launches) >= FRUITLESS and all(record.failure is not None for record in launches):
            failure = launches[-1].failure
            last = describe(failure) if failure is not None else ""
            raise NothingFeasible(f"{len(launches)} launches failed and none was measured; the last: {last}")


def describe(failure: Failure) -> str:
    """Return a failure on one line."""
    evidence = f": {failure.evidence[-1]}" if failure.evidence else ""
    advice = f"; {failure.advice}" if failure.advice else ""
    return f"{failure.kind} at {failure.stage}{evidence}{advice}"
