"""Asks and tells for one study: what to launch next, taught by what was measured and by what failed.

Optuna's study lives in memory and is rebuilt from the records: it is a view of trials.jsonl, never a truth of its
own. Each suggestion is drawn by a sampler seeded with (study seed, trial number, attempt), so that a resumed study
goes on as the uninterrupted one would have.

A failed trial is told as a violated constraint with the worst values seen so far. Telling it as FAIL would hide it
from every sampler, which then suggests the crash again; zeros or infinities would bend the model.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from tuner.labels import draft_kind
from tuner.points import objectives_of, violations
from tuner.racing import Axis, doubt, expected
from tuner.records import Level, TrialRecord, canonical, config_dict
from tuner.sampling import DEFAULT, Observation, Pool, Proposal, Sampler, View, key_of, seed_of
from tuner.sampling.surrogate import believed
from tuner.space import Assignment, Infeasible, Refusals, Space
from tuner.suggest import Suggestion, parameters, suggest

if TYPE_CHECKING:
    import optuna

    from tuner.sampling.process import PriorState

ATTEMPTS = 12  # suggestions drawn before a point is drawn at random instead
DRAWS = 2000  # random points tried before the space counts as exhausted, where it cannot be counted out
ENUMERABLE = 5000
LEGACY = "constraints"  # the attribute that optuna-dashboard reads; Optuna 5 itself writes one per constraint


class Brain:
    """Asks and tells for one study."""

    def __init__(
        self,
        space: Space,
        refusals: Refusals,
        startup: int | None = None,
        *,
        sampler: Sampler = DEFAULT,
        pool: Pool | None = None,
        storage: optuna.storages.BaseStorage | None = None,
    ) -> None:
        """Begin without any knowledge.

        Args:
            startup: launches before the sampler models anything; default its own.
            sampler: who chooses.
            pool: the points to choose from; default every point of the space, or a sample of a very large one.
            storage: where Optuna keeps its study; default in memory.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._space = space
        self._refusals = refusals
        self._sampler = sampler if startup is None else sampler.starting_after(startup)
        self._pool = pool
        self._seed = space.file.study.seed
        self._objectives = space.file.objectives
        directions = ["minimize" if o.goal == "min" else "maximize" for o in self._objectives]
        blank = optuna.samplers.RandomSampler(seed=0)
        self._study = optuna.create_study(
            directions=directions, sampler=blank, storage=storage, study_name=space.file.study.name
        )
        self._observations: list[Observation] = []
        self._curves: list[dict[int, Level]] = []
        self._trial_of: dict[str, int] = {}  # the first launch of each key
        self._seen: set[str] = set()  # configurations, also of points that are not of the space
        self._barred: set[str] = set()  # keys of points that can't run
        self._running: dict[str, tuple[Assignment, optuna.trial.Trial | None]] = {}
        self._worst: list[float] | None = None
        self._worst_violations: list[float] = []
        self._untold: list[tuple[Assignment, TrialRecord]] = []

    @property
    def study(self) -> optuna.study.Study:
        """Optuna's view, for inspection."""
        return self._study

    @property
    def pool(self) -> Pool:
        """The points to choose from."""
        if self._pool is None:
            self._pool = Pool.of(self._space)
        return self._pool

    @property
    def sampler(self) -> Sampler:
        """Who chooses."""
        return self._sampler

    def prior(self, number: int) -> PriorState:
        """Return what has become of the prior's guesses: none given, believed so far, or dropped on every axis."""
        if self.pool.guesses is None:
            return "none"
        return "believed" if believed(self.view(number)) else "dropped"

    def view(self, number: int, attempt: int = 0) -> View:
        """Return what a sampler is shown for a trial number."""
        return View(
            pool=self.pool,
            objectives=self._objectives,
            observations=tuple(self._observations),
            study=self._study,
            number=number,
            seed=seed_of(self._seed, number, attempt),
            taken=frozenset(self._barred | self._running.keys()),
            pending=tuple(assignment for assignment, _ in self._running.values()),
        )

    # ----------------------------------------------------------------------------------------------- tell

    def tell(self, record: TrialRecord) -> None:
        """Learn from a record; what belongs to no point of the space is only remembered as seen.

        What the machine was to blame for, and what was disturbed on purpose, teaches nothing.
        """
        if record.blameless or record.role == "calibration":
            assignment = self._space.assignment_of(record.config)
            if assignment is not None and record.blameless:
                self._running.pop(key_of(assignment), None)
            return
        self._seen.add(canonical(record.config))
        assignment = self._space.assignment_of(record.config)
        if assignment is None:
            return
        values = self._values(record)
        broken = violations(record.levels, self._space.file.constraints) if values is not None else ()
        key = key_of(assignment)
        self._trial_of.setdefault(key, record.trial)
        if record.state == "infeasible":
            self._barred.add(key)
        else:
            if record.state == "measured":
                self._curves.append({level.concurrency: level for level in record.levels})
            self._observations.append(
                Observation(
                    key,
                    assignment,
                    values=None if values is None else tuple(values),
                    broken=tuple(broken),
                    scatter=self._scatter(record),
                    whole=record.state != "pruned",
                    accept=_accept_length(record),
                )
            )
        if record.role not in ("baseline", "search"):
            self._running.pop(key, None)
            return  # Optuna is told of each point once
        if values is None:
            self._tell_failure(assignment, record)
            return
        self._tell(assignment, values, 0.0, broken)
        self._note_worst(values, broken)
        for earlier, failed in self._untold:
            self._tell_failure(earlier, failed)
        self._untold = []

    def bar(self, assignment: Assignment) -> None:
        """Note that a point cannot run, without a record of it."""
        key = key_of(assignment)
        self._barred.add(key)
        self._running.pop(key, None)

    def _values(self, record: TrialRecord) -> list[float] | None:
        """Return one value per objective, or None where there is none to tell."""
        if record.state == "pruned" and record.levels:
            return self._expected(record)
        if record.state != "measured":
            return None
        found = objectives_of(record, self._space)
        values = [value for value in found if value is not None]
        return values if len(values) == len(found) else None

    def _scatter(self, record: TrialRecord) -> tuple[float, ...]:
        """Return the standard deviation of each objective as its interval tells it, 0 where it has none; and of what a
        race left out, how far it may be from what is expected."""
        found = []
        for axis in Axis.of(self._objectives, self._space.levels):
            level = record.level(axis.level)
            if level is None and record.state == "pruned" and record.levels:
                found.append(doubt(axis, record.levels[0], self._curves))
            else:
                found.append(0.0 if level is None else level.deviation(axis.metric))
        return tuple(found)

    def _expected(self, record: TrialRecord) -> list[float] | None:
        """Return the values that a candidate would probably have had whose other levels a race left out."""
        axes = Axis.of(self._objectives, self._space.levels)
        found = [expected(axis, record.levels[0], self._curves) for axis in axes]
        return None if any(value is None for value in found) else [value for value in found if value is not None]

    def _tell_failure(self, assignment: Assignment, record: TrialRecord) -> None:
        if self._sampler.forgets_failures and record.state == "failed":
            self._study.tell(self._trial(assignment), state=self._optuna.trial.TrialState.FAIL)
        elif self._worst is None:
            self._untold.append((assignment, record))  # nothing measured yet that could be called the worst
        else:
            self._tell(assignment, self._worst, 1.0, self._worst_violations)

    def _note_worst(self, values: Sequence[float], broken: Sequence[float]) -> None:
        if self._worst is None:
            self._worst, self._worst_violations = list(values), [max(0.0, v) for v in broken]
            return
        for index, objective in enumerate(self._objectives):
            worse = max if objective.goal == "min" else min
            self._worst[index] = worse(self._worst[index], values[index])
        self._worst_violations = [max(a, b) for a, b in zip(self._worst_violations, broken, strict=True)]

    def _tell(self, assignment: Assignment, values: Sequence[float], failed: float, broken: Sequence[float]) -> None:
        trial = self._trial(assignment)
        trial.set_constraint("launch", failed)
        for index, violation in enumerate(broken):
            trial.set_constraint(f"constraint {index}", violation)
        # Optuna has no public way to write the attribute of its older versions.
        self._study._storage.set_trial_system_attr(trial._trial_id, LEGACY, [failed, *broken])
        self._study.tell(trial, list(values))

    def _trial(self, assignment: Assignment) -> optuna.trial.Trial:
        """Return the Optuna trial that asked for a point, or a new one with its parameters."""
        _, trial = self._running.pop(key_of(assignment), (None, None))
        if trial is not None:
            return trial
        self._study.sampler = self._optuna.samplers.RandomSampler(seed=0)  # the parameters are given: draw nothing
        self._study.enqueue_trial(parameters(self._space, assignment))
        trial = self._study.ask()
        suggest(trial, self._space)
        return trial

    # ------------------------------------------------------------------------------------------------ ask

    def ask(self, number: int, *, careful: bool = False) -> Suggestion | None:
        """Return the point for trial `number`; None when every point that can run has been tried.

        A point that was tried before is not returned: where the sampler insists on one it is asked again with
        another seed, and then a point is drawn at random. (Samplers that repeat blindly, as in other tools, get
        their way; such a suggestion says which trial it repeats.) Points that were asked for and not told of yet count
        as running: ask again for a batch. `careful`: only points that can run, drawn at random.
        """
        for attempt in range(0 if careful else ATTEMPTS):
            proposal = self._sampler.propose(self.view(number, attempt))
            if proposal is None:
                break
            suggestion = self._judge(proposal)
            if suggestion is not None:
                self._running[key_of(suggestion.assignment)] = suggestion.assignment, proposal.trial
                return suggestion
            self._answer(proposal)
        drawn = self._draw(number)
        if drawn is not None:
            self._running[key_of(drawn.assignment)] = drawn.assignment, None
        return drawn

    def _answer(self, proposal: Proposal) -> None:
        """Tell Optuna what becomes of a point that is not launched: it is a crash where it cannot run, else nothing."""
        if proposal.trial is None:
            return
        key = key_of(proposal.assignment)
        if key in self._barred and self._worst is not None and not self._sampler.forgets_failures:
            self._running[key] = proposal.assignment, proposal.trial
            self._tell(proposal.assignment, self._worst, 1.0, self._worst_violations)
        else:
            self._study.tell(proposal.trial, state=self._optuna.trial.TrialState.FAIL)  # only a question

    def _judge(self, proposal: Proposal) -> Suggestion | None:
        """Return the suggestion; None when it is barred, or known and the sampler did not mean to repeat it."""
        if key_of(proposal.assignment) in self._barred:
            return None
        judged = self._space.judge(proposal.assignment, self._refusals)
        if self._key(proposal.assignment, judged) not in self._seen:
            return Suggestion(proposal.assignment, judged)
        first = self._trial_of.get(key_of(proposal.assignment))
        if self._sampler.repeats == "never" or first is None or isinstance(judged, Infeasible):
            return None
        return Suggestion(proposal.assignment, judged, first)

    def _key(self, assignment: Assignment, judged: EngineConfig | Infeasible) -> str:
        if isinstance(judged, Infeasible):
            return canonical(self._space.raw_config(assignment))
        return canonical(config_dict(judged))

    def _draw(self, number: int) -> Suggestion | None:
        """Return a random point that can run and is new."""
        rng = random.Random(seed_of(self._seed, number, ATTEMPTS))
        size = self._space.size()
        candidates: Iterable[Assignment]
        if self._pool is not None or (size is not None and size <= ENUMERABLE):
            everything = list(self.pool.assignments)
            rng.shuffle(everything)
            candidates = everything
        else:
            candidates = (self._space.draw(rng) for _ in range(DRAWS))
        for assignment in candidates:
            if key_of(assignment) in self._running or key_of(assignment) in self._barred:
                continue
            suggestion = self._judge(Proposal(assignment))
            if suggestion is not None and suggestion.repeat is None and not isinstance(suggestion.judged, Infeasible):
                return suggestion
        return None


def _accept_length(record: TrialRecord) -> float | None:
    """Return the mean accept length of a record's levels, on which it hardly depends; 1 without drafts."""
    if draft_kind(record.config) == "none":
        return 1.0
    told = [length for level in record.levels if (length := level.metrics.get("accept_length")) is not None]
    return statistics.mean(told) if told else None
