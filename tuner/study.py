"""The search: ask, run, record, tell; then confirm what came out ahead.

    baseline ─▶ ask ─▶ run ─▶ record ─▶ tell ─┐
                 ▲                            │
                 └────── while it pays ───────┘ ─▶ confirm the best, interleaved ─▶ front, launch.yaml, report

trials.jsonl is the truth. Everything this module holds is read from it at the start, so a search that was killed
goes on where it stopped: no trial twice, at most those that ran are lost.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.config import Captured, Eager, EngineConfig, PolicyDraft
from tuner.budget import (
    LATEST,
    Ledger,
    busy_seconds,
    confirmations,
    launched,
    reserve,
    seconds_left,
    split_seconds,
    trial_seconds,
    why_stop,
)
from tuner.durations import format_duration
from tuner.errors import NothingFeasible, StudyError
from tuner.executors.base import Executor
from tuner.export.launch_file import recorded_config
from tuner.launches import Launcher
from tuner.outcome import Outcome as Outcome
from tuner.outcome import baseline_of, confirmed, next_confirmation
from tuner.outcome import outcome_of as outcome_of
from tuner.packing import Calibration
from tuner.points import Point
from tuner.policy_fit import fit_for, policy_config
from tuner.records import THROUGHPUT, Event, Failure, FailureKind, Planned, Role, TrialRecord, TrialSpec
from tuner.sampling.process import PriorState
from tuner.space import Infeasible, Refusals, Space
from tuner.stop_rule import PATIENCE, should_stop
from tuner.store import Journal, StudyFolder, write_atomic
from tuner.suggest import Suggestion
from tuner.verdicts import caveats, taken_back, to_score, unseen

HOPELESS: frozenset[FailureKind] = frozenset({"missing_file", "gated_model", "unsupported_model"})
"""Failures of the baseline that every other trial would share."""

UNCAPTURED: frozenset[FailureKind] = frozenset({"graph_capture", "oom_capture"})
"""Failures of the baseline that it has not without graphs."""

FRUITLESS = 5  # failed launches in a row, with nothing measured, before the search gives up
WANDERING = 20  # impossible suggestions in a row before points are drawn from the possible ones
TRIES = 3  # launches in a row that the machine did not let begin, before the study stops
ROUNDS = 2  # a batch asks for so many times the GPUs there are: room to pack them well


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


class Advisor(Protocol):
    """Who says what to launch next: a Brain, here or in a process of its own."""

    @property
    def prior(self) -> PriorState:
        """What has become of the prior's guesses."""

    def tell(self, record: TrialRecord) -> None:
        """Learn from a record."""

    def ask(self, number: int, *, careful: bool = False) -> Suggestion | None:
        """Return the point for a trial number; None when every point that can run has been tried."""


def startup_of(space: Space) -> int:
    """Return how many launches a search makes before its sampler models anything."""
    return max(4, min(10, (space.file.study.budget.trials or 32) // 3))


class Search:
    """One search in one folder. The caller holds the folder's lock and has entered executor and advisor."""

    def __init__(
        self,
        folder: StudyFolder,
        space: Space,
        refusals: Refusals,
        executor: Executor,
        observer: Observer,
        advisor: Advisor,
        *,
        gpu: bool,
    ) -> None:
        """`gpu`: whether servers run on GPUs here."""
        self._folder = folder
        self._space = space
        self._refusals = refusals
        self._observer = observer
        self._advisor = advisor
        self._launcher = Launcher(folder, space, executor, gpu=gpu)
        self._budget = space.file.study.budget
        self._strategy = space.file.strategy
        self._records = folder.read_trials()
        self._said = folder.read_search()
        self._began = time.monotonic()
        self._earlier = busy_seconds(self._records)
        shared = self._earlier / (sum(map(trial_seconds, self._records)) or 1.0)
        self._durations = [shared * trial_seconds(r) for r in self._records if r.state != "infeasible"]
        self._to_confirm: int | None = None  # still to come, once the search is over
        self._prior: PriorState = "none"
        self._wandering = 0
        self._late: list[tuple[Suggestion, EngineConfig]] = []  # asked for, too late for its batch
        for record in self._records:
            advisor.tell(record)

    def run(self) -> str:
        """Search until the budget is spent or nothing more is to be gained, confirm, and return why the search ended.

        Raises:
            StudyError: the folder cannot be written, or the machine lets nothing begin.
            NothingFeasible: the baseline cannot run here, or nothing runs at all.
        """
        with Journal(self._folder) as journal:
            self._finish_batch(journal)
            self._baseline(journal)
            self._calibrate(journal)
            why = self._search(journal)
            self._observer.note(f"Search ends: {why}.")
            self._say(ended=why)
            self._confirm(journal)
        return why

    # -------------------------------------------------------------------------------------------- phases

    def _finish_batch(self, journal: Journal) -> None:
        """Run what is left of a batch that a death cut."""
        recorded = {record.trial for record in self._records}
        self._run(journal, [planned for planned in self._folder.read_batch() if planned.trial not in recorded])

    def _baseline(self, journal: Journal) -> None:
        """Launch no speculation, which the others are judged by and compared with; say so where it does not serve."""
        while (config := self._next_baseline()) is not None:
            self._run(journal, [self._planned("baseline", config)])
            failure = self._records[-1].failure
            if failure is not None and failure.kind in HOPELESS:
                raise NothingFeasible(f"the baseline fails, and every trial would: {describe(failure)}")
        for line in caveats(self._records):
            self._observer.note(line)

    def _next_baseline(self) -> EngineConfig | None:
        """Return the baseline to launch; where its graphs could not be captured, once more without. None: it ran."""
        launches = [record for record in self._records if record.role == "baseline" and not record.blameless]
        if not launches:
            found = self._space.baseline(self._refusals)
            if isinstance(found, Infeasible):
                raise NothingFeasible(f"the baseline cannot run here: {'; '.join(found.reasons)}")
            return found[0]
        eager = without_graphs(launches[-1])
        return None if eager is None or self._refusals(eager) else eager

    def _calibrate(self, journal: Journal) -> None:
        """Find out whether trials that measure side by side disturb each other: the baseline, twice at once."""
        if (made := self._exclusive()) is not None:
            self._launcher.exclusive = made
            return
        baseline = next(r for r in self._records if r.role == "baseline" and r.state == "measured")
        config = recorded_config(baseline.trial, baseline.config)
        first = self._next_number()
        self._run(journal, [self._planned("calibration", config, baseline.trial, first + each) for each in (0, 1)])
        beside = [r for r in self._records if r.role == "calibration" and r.state == "measured"]
        load = max(self._space.levels)
        speeds = [speed for r in (baseline, *beside) if (speed := _speed(r, load)) is not None]
        if len(speeds) < 3:
            self._launcher.exclusive = True  # what is not known is not assumed
            self._observer.note("Calibration failed: trials measure one after another.")
            return
        found = Calibration(speeds[0], sum(speeds[1:]) / (len(speeds) - 1))
        self._launcher.exclusive = found.exclusive
        self._say(calibration=found.to_json())
        how = "one after another" if found.exclusive else "side by side"
        self._observer.note(f"A neighbour that measures costs {found.loss:.1%} of speed: trials measure {how}.")

    def _search(self, journal: Journal) -> str:
        while (stop := self._why_stop()) is None:
            self._give_up_if_nothing_runs()
            batch = self._ask(journal)
            if not batch:
                return "every point that can run here has been tried"
            if (poor := self._why_poor(batch[-1].gain)) is not None:
                return poor
            self._run(journal, batch)
        return stop

    def _confirm(self, journal: Journal) -> None:
        """Measure the best configurations again, next to the baseline, and launch the policy that they make.

        What is recommended may change with every confirmation, so the next one is chosen only then.
        """
        self._take_back(journal)
        while (planned := self._next_to_confirm()) is not None:
            takes = self._launcher.seconds([planned.config], self._records, planned.role)
            stop = why_stop(self._budget, self._ledger(), self._gpus_of_next(), count=False, expected=takes)
            if stop is not None:
                self._observer.note(f"Confirmation ends: {stop}.")
                return
            self._run(journal, [planned])
            self._take_back(journal)

    def _take_back(self, journal: Journal) -> None:
        """Record anew, as failed, what passed the gate with text that the relaunched baseline denies."""
        for record in taken_back(self._records):
            journal.record(record)
            self._records = [record if each.trial == record.trial else each for each in self._records]
            self._observer.trial_ends(record, self._progress(record.role, record.trial))

    def _next_to_confirm(self) -> Planned | None:
        outcome = outcome_of(self._records, self._space)
        again = confirmed(self._records)
        most = confirmations(launched(self._records))
        self._to_confirm = max(0, most - len(again))
        best, baseline = outcome.recommendation, baseline_of(outcome)
        if best is not None and baseline in again and (table := self._table(best.point)) is not None:
            return self._planned("policy", table)
        front = list(dict.fromkeys(point.trial for point in outcome.front))
        trial = next_confirmation(outcome, most)
        last = self._records[-1]
        shown = last.of == baseline and not last.blameless  # what the baseline has just not scored it never will
        if trial is None and not shown and any(unseen(self._records, member) for member in front):
            trial = baseline
        if trial is None:
            return None
        config = next(record.config for record in self._records if record.trial == trial)
        planned = self._planned("confirm", recorded_config(trial, config), trial)
        texts = to_score(self._records, front) if trial == baseline else ()
        return planned.model_copy(update={"score": texts})

    def _table(self, best: Point) -> EngineConfig | None:
        """Return the fitted table to launch; None when it was, or there is none, or the server cannot switch."""
        if not self._strategy.policy or any(r.role == "policy" and not r.blameless for r in self._records):
            return None
        like = recorded_config(best.trial, best.config)
        policy = fit_for(self._records, like)
        config = policy_config(like, policy) if policy is not None else None
        if config is None or not isinstance(config.draft, PolicyDraft):
            return None
        if refused := self._refusals(config):
            self._say(policy=f"it cannot be launched here: {refused[0]}")
            return None
        return config

    # -------------------------------------------------------------------------------------------- asking

    def _ask(self, journal: Journal) -> list[Planned]:
        """Return the next launches, as many as have room side by side; what can never launch is recorded.

        One that would not end in time is left for a later batch, if there is one.
        """
        found, self._late = self._late, []
        while self._has_room([config for _, config in found]):
            careful = self._wandering >= WANDERING
            suggestion = self._advisor.ask(self._next_number() + len(found), careful=careful)
            self._tell_prior()
            if suggestion is None:
                break
            if isinstance(suggestion.judged, Infeasible):
                self._wandering += 1
                self._refuse(journal, suggestion, suggestion.judged)
                continue
            self._wandering = 0
            if found and not self._in_time([config for _, config in found], suggestion.judged):
                self._late = [(suggestion, suggestion.judged)]
                break
            found.append((suggestion, suggestion.judged))
        start = self._next_number()
        return [
            Planned(
                trial=start + index,
                role="search" if suggestion.repeat is None else "repeat",
                config=config,
                of=suggestion.repeat,
                gain=suggestion.gain,
            )
            for index, (suggestion, config) in enumerate(found)
        ]

    def _has_room(self, batch: Sequence[EngineConfig]) -> bool:
        """Whether a batch has room for another launch: there is always room for one."""
        if not batch:
            return True
        taken = sum(max(1, config.parallel.gpus) for config in batch)
        trials = self._budget.trials
        spent = launched(self._records) + len(batch)
        return taken < ROUNDS * self._launcher.room and (trials is None or spent < trials)

    def _in_time(self, batch: Sequence[EngineConfig], one: EngineConfig) -> bool:
        """Whether a batch will probably end before the search's wall time with one more launch, or no later for it."""
        if self._budget.wall is None:
            return True
        left = self._budget.wall - self._ledger().seconds - self._reserve()
        alone = self._launcher.seconds(batch, self._records)
        return self._launcher.seconds([*batch, one], self._records) <= max(left, alone)

    def _refuse(self, journal: Journal, suggestion: Suggestion, infeasible: Infeasible) -> None:
        """Record a point that can never launch: it teaches, and costs no trial."""
        advice = "left out without a launch"
        failure = Failure(kind="config", stage="lease", evidence=infeasible.reasons, advice=advice)
        record = TrialRecord(
            trial=self._next_number(),
            role="search",
            state="infeasible",
            config=self._space.raw_config(suggestion.assignment),
            failure=failure,
        )
        self._keep(journal, record)

    def _tell_prior(self) -> None:
        """Say when the prior is taken up, and when the trials contradict it."""
        state = self._advisor.prior
        if state == self._prior:
            return
        said = {
            "none": "No prior leads the search.",
            "believed": "A roofline prior leads the search.",
            "dropped": "The roofline prior errs too much: it is dropped.",
        }
        self._observer.note(said[state])
        self._say(prior=state)
        self._prior = state

    # ------------------------------------------------------------------------------------------- running

    def _run(self, journal: Journal, batch: Sequence[Planned]) -> None:
        """Run launches and keep their records."""
        if not batch:
            return
        if len(batch) > 1:
            self._folder.write_batch(tuple(batch))
        began = time.monotonic()
        known = tuple(self._records)
        for record in self._launcher.run(batch, known, journal, self._begins, self._observer.event):
            self._keep(journal, record)
        self._records.sort(key=lambda record: record.trial)
        self._durations += [(time.monotonic() - began) / len(batch)] * len(batch)
        self._folder.write_batch(())
        if len(batch) > 1:
            numbers = {planned.trial for planned in batch}
            self._account([record for record in self._records if record.trial in numbers])
        self._stop_if_unwell(batch[0].role)

    def _begins(self, spec: TrialSpec) -> None:
        self._observer.trial_begins(spec, self._progress(spec.role, spec.trial))

    def _account(self, done: Sequence[TrialRecord]) -> None:
        packed = self._launcher.account(done)
        self._say(packing=[*self._said.get("packing", []), packed.to_json()])
        ratio = packed.makespan / packed.bound if packed.bound else 1.0
        took = format_duration(packed.makespan)
        self._observer.note(f"{packed.trials} trials side by side in {took}, {ratio:.2f} × the least possible.")

    def _keep(self, journal: Journal, record: TrialRecord) -> None:
        journal.record(record)
        self._records.append(record)
        self._advisor.tell(record)
        self._observer.trial_ends(record, self._progress(record.role, record.trial))

    def _say(self, **more: Any) -> None:
        """Keep what the search says of itself, for the report."""
        self._said |= more
        try:
            write_atomic(self._folder.search, json.dumps(self._said, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise StudyError(f"{self._folder.search}: cannot be written: {error.strerror or error}") from error

    def _planned(self, role: Role, config: EngineConfig, of: int | None = None, number: int | None = None) -> Planned:
        return Planned(trial=self._next_number() if number is None else number, role=role, config=config, of=of)

    def _next_number(self) -> int:
        return self._records[-1].trial + 1 if self._records else 0

    # ------------------------------------------------------------------------------------------ accounts

    def _why_stop(self) -> str | None:
        each = [sum(split_seconds(record)) for record in self._ran()]
        usual = statistics.median(each[-LATEST:]) if each else None
        return why_stop(self._budget, self._ledger(), self._gpus_of_next(), self._reserve(), expected=usual)

    def _reserve(self) -> float:
        """Return the seconds that are kept for the confirmation: of launches one at a time, with whole windows."""
        ran = [(record, *split_seconds(record)) for record in self._ran()]
        rest = [outside for _, outside, _ in ran]
        whole = [measure for record, _, measure in ran if record.role != "search" and record.state == "measured"]
        if not whole:
            return 0.0
        each = statistics.median(rest[-LATEST:]) + statistics.median(whole[-LATEST:])
        return reserve(self._budget, launched(self._records), each)

    def _ran(self) -> list[TrialRecord]:
        return [record for record in self._records if record.seconds]

    def _why_poor(self, gain: float | None) -> str | None:
        """Return why no further launch pays, None while one may."""
        least = self._strategy.least_gain
        gains = [record.gain for record in self._records if record.role == "search" and record.state != "infeasible"]
        return None if least is None else should_stop([*gains[1 - PATIENCE :], gain], least)

    def _exclusive(self) -> bool | None:
        """Return whether windows must not overlap, None when a calibration has to find out."""
        executor = self._space.file.executor
        windows = executor.windows if executor.kind == "packed" else "overlapping"
        known = self._said.get("calibration", {}).get("exclusive")
        if windows != "calibrate" or isinstance(known, bool):
            return windows == "exclusive" if windows != "calibrate" else bool(known)
        baseline = next((r for r in self._records if r.role == "baseline" and r.state == "measured"), None)
        if baseline is None:
            return True  # what is not known is not assumed
        return None if 2 * max(1, baseline.gpus) <= self._launcher.room else False

    def _ledger(self) -> Ledger:
        return Ledger(
            launched=launched(self._records),
            seconds=self._earlier + time.monotonic() - self._began,
            gpu_seconds=sum(trial_seconds(record) * record.gpus for record in self._records),
            durations=tuple(self._durations),
        )

    def _progress(self, role: Role, number: int) -> Progress:
        ledger = self._ledger()
        return Progress(
            role=role,
            number=number,
            launched=ledger.launched,
            trials=self._budget.trials,
            seconds=ledger.seconds,
            left=seconds_left(self._budget, ledger, self._to_confirm),
        )

    def _gpus_of_next(self) -> int:
        return max((record.gpus for record in self._records), default=0)

    def _stop_if_unwell(self, role: Role) -> None:
        """Stop when the machine, not the configurations, keeps launches from beginning.

        Raises:
            StudyError: it did so several times in a row, or its disk is full.
        """
        launches = [record for record in self._records if record.state != "infeasible"][-TRIES:]
        failure = launches[-1].failure if launches and launches[-1].blameless else None
        if failure is None:
            return
        if failure.kind == "disk_full" or (len(launches) == TRIES and all(r.blameless for r in launches)):
            raise StudyError(f"nothing can be launched here now, no configuration is to blame: {describe(failure)}")
        self._observer.note(f"The {role} is tried again: {failure.kind} is not its configuration's fault.")

    def _give_up_if_nothing_runs(self) -> None:
        launches = [record for record in self._records if record.state != "infeasible" and not record.blameless]
        if len(launches) >= FRUITLESS and all(record.failure is not None for record in launches):
            failure = launches[-1].failure
            last = describe(failure) if failure is not None else ""
            raise NothingFeasible(f"{len(launches)} launches failed and none was measured; the last: {last}")


def without_graphs(baseline: TrialRecord) -> EngineConfig | None:
    """Return the configuration of a baseline whose graphs could not be captured, without any; None for all others."""
    if baseline.failure is None or baseline.failure.kind not in UNCAPTURED:
        return None
    config = recorded_config(baseline.trial, baseline.config)
    return config.model_copy(update={"graphs": Eager()}) if isinstance(config.graphs, Captured) else None


def _speed(record: TrialRecord, load: int) -> float | None:
    level = record.level(load)
    return level.metrics.get(THROUGHPUT) if level is not None else None


def describe(failure: Failure) -> str:
    """Return a failure on one line."""
    told = failure.told or (failure.evidence[-1] if failure.evidence else "")
    evidence = f": {told}" if told else ""
    advice = f"; {failure.advice}" if failure.advice else ""
    return f"{failure.kind} at {failure.stage}{evidence}{advice}"
