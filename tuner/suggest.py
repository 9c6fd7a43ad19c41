"""Optuna at arm's length: what to try next, taught by what was measured and by what failed.

Optuna's study lives in memory and is rebuilt from the records: it is a view of trials.jsonl, never a truth of its
own. Each suggestion is drawn by a sampler seeded with (study seed, trial number, attempt), so that a resumed study
goes on as the uninterrupted one would have.

A failed trial is told as a violated constraint with the worst values seen so far. Telling it as FAIL would hide it
from every sampler, which then suggests the crash again; zeros or infinities would bend the model.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from tuner.points import violations
from tuner.records import TrialRecord, canonical, config_dict
from tuner.space import Assignment, Choices, Domain, FloatRange, Infeasible, Refusals, Space

if TYPE_CHECKING:
    import optuna

ATTEMPTS = 12  # suggestions drawn before a point is drawn at random instead
DRAWS = 2000  # random points tried before the space counts as exhausted, where it cannot be counted out
ENUMERABLE = 5000


@dataclass(frozen=True)
class Suggestion:
    """A point to try: a configuration, or a contradiction that costs no launch."""

    assignment: Assignment
    judged: EngineConfig | Infeasible


def suggest(trial: optuna.trial.Trial, space: Space) -> Assignment:
    """Ask an Optuna trial for every active domain: the only place with `suggest_*`."""
    assignment: Assignment = {}
    for domain in space.domains:
        if domain.active(assignment):
            assignment[domain.path] = _value(domain, trial)
    return assignment


def _value(domain: Domain, trial: optuna.trial.Trial) -> Any:
    name = parameter(domain)
    if isinstance(domain, Choices):
        if domain.ordered:
            return domain.values[trial.suggest_int(name, 0, len(domain.values) - 1)]
        labels = [canonical(value) for value in domain.values]
        return domain.values[labels.index(trial.suggest_categorical(name, labels))]
    if isinstance(domain, FloatRange):
        return trial.suggest_float(name, domain.low, domain.high, log=domain.log)
    high = domain.low + (len(domain) - 1) * domain.step
    return trial.suggest_int(name, domain.low, high, step=domain.step, log=domain.log)


def parameter(domain: Domain) -> str:
    """Return Optuna's name of a domain; an index into ascending numbers is marked as one."""
    return f"{domain.path}#" if isinstance(domain, Choices) and domain.ordered else domain.path


def parameters(space: Space, assignment: Assignment) -> dict[str, Any]:
    """Return Optuna's parameters of an assignment: the inverse of `suggest`."""
    result: dict[str, Any] = {}
    for domain in space.domains:
        if domain.path not in assignment:
            continue
        value = assignment[domain.path]
        if isinstance(domain, Choices):
            labels = [canonical(choice) for choice in domain.values]
            value = labels.index(canonical(value)) if domain.ordered else canonical(value)
        result[parameter(domain)] = value
    return result


class Brain:
    """Asks and tells for one study."""

    def __init__(self, space: Space, refusals: Refusals, startup: int = 8) -> None:
        """`startup`: measured trials before the sampler models anything."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._space = space
        self._refusals = refusals
        self._startup = startup
        self._seed = space.file.study.seed
        self._objectives = space.file.objectives
        directions = ["minimize" if o.goal == "min" else "maximize" for o in self._objectives]
        self._study = optuna.create_study(directions=directions, sampler=optuna.samplers.RandomSampler(seed=0))
        self._seen: set[str] = set()
        self._worst: list[float] | None = None
        self._worst_violations: list[float] = []
        self._untold: list[tuple[dict[str, Any], TrialRecord]] = []

    @property
    def study(self) -> optuna.study.Study:
        """Optuna's view, for inspection."""
        return self._study

    # ----------------------------------------------------------------------------------------------- tell

    def tell(self, record: TrialRecord) -> None:
        """Learn from a record; what belongs to no point of the space is only remembered as seen."""
        self._seen.add(canonical(record.config))
        if record.role not in ("baseline", "search"):
            return  # a repeat says nothing new about the space
        assignment = self._space.assignment_of(record.config)
        if assignment is None:
            return
        told = parameters(self._space, assignment)
        values = self._values(record)
        if values is None:
            self._tell_failure(told, record)
            return
        broken = violations(record.levels, self._space.file.constraints)
        self._tell(told, values, 0.0, broken)
        self._note_worst(values, broken)
        for parameters_, failed in self._untold:
            self._tell_failure(parameters_, failed)
        self._untold = []

    def _values(self, record: TrialRecord) -> list[float] | None:
        """Return one value per objective, or None where there is none to tell."""
        if record.state != "measured":
            return None
        values = []
        for objective in self._objectives:
            level = record.level(objective.level(self._space.levels))
            value = level.metrics.get(objective.metric) if level is not None else None
            if value is None:
                return None
            values.append(value)
        return values

    def _tell_failure(self, told: dict[str, Any], record: TrialRecord) -> None:
        if self._worst is None:
            self._untold.append((told, record))  # nothing measured yet that could be called the worst
            return
        self._tell(told, self._worst, 1.0, self._worst_violations)

    def _note_worst(self, values: Sequence[float], broken: Sequence[float]) -> None:
        if self._worst is None:
            self._worst, self._worst_violations = list(values), [max(0.0, v) for v in broken]
            return
        for index, objective in enumerate(self._objectives):
            worse = max if objective.goal == "min" else min
            self._worst[index] = worse(self._worst[index], values[index])
        self._worst_violations = [max(a, b) for a, b in zip(self._worst_violations, broken, strict=True)]

    def _tell(self, told: dict[str, Any], values: Sequence[float], failed: float, broken: Sequence[float]) -> None:
        self._study.sampler = self._optuna.samplers.RandomSampler(seed=0)  # the parameters are given: draw nothing
        self._study.enqueue_trial(told)
        trial = self._study.ask()
        suggest(trial, self._space)
        trial.set_constraint("launch", failed)
        for index, violation in enumerate(broken):
            trial.set_constraint(f"constraint {index}", violation)
        self._study.tell(trial, list(values))

    # ------------------------------------------------------------------------------------------------ ask

    def ask(self, number: int, *, careful: bool = False) -> Suggestion | None:
        """Return the point for trial `number`; None when every point that can run has been tried.

        A point that was tried before is never returned. Where the sampler insists on one, it is asked again with
        another seed, and then a point is drawn at random. `careful`: only points that can run, drawn at random.
        """
        for attempt in range(0 if careful else ATTEMPTS):
            self._study.sampler = self._sampler(number, attempt)
            trial = self._study.ask()
            assignment = suggest(trial, self._space)
            # The outcome is told with `tell`, from the record; this trial only carried the question, and FAIL is
            # Optuna's word for "forget it".
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
            suggestion = self._judge(assignment)
            if suggestion is not None:
                return suggestion
        return self._draw(number)

    def _judge(self, assignment: Assignment) -> Suggestion | None:
        """Return the suggestion unless its configuration was seen."""
        judged = self._space.judge(assignment, self._refusals)
        return None if self._key(assignment, judged) in self._seen else Suggestion(assignment, judged)

    def _key(self, assignment: Assignment, judged: EngineConfig | Infeasible) -> str:
        if isinstance(judged, Infeasible):
            return canonical(self._space.raw_config(assignment))
        return canonical(config_dict(judged))

    def _draw(self, number: int) -> Suggestion | None:
        """Return a random point that can run and is new."""
        rng = random.Random(_seed(self._seed, number, ATTEMPTS))
        size = self._space.size()
        candidates: Iterable[Assignment]
        if size is not None and size <= ENUMERABLE:
            everything = list(self._space.points())
            rng.shuffle(everything)
            candidates = everything
        else:
            candidates = (self._space.draw(rng) for _ in range(DRAWS))
        for assignment in candidates:
            suggestion = self._judge(assignment)
            if suggestion is not None and not isinstance(suggestion.judged, Infeasible):
                return suggestion
        return None

    def _sampler(self, number: int, attempt: int) -> optuna.samplers.BaseSampler:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            return self._optuna.samplers.TPESampler(
                multivariate=True,
                group=True,  # conditional parameters are modelled together where they occur together
                n_startup_trials=self._startup,
                seed=_seed(self._seed, number, attempt),
            )


def _seed(*parts: int) -> int:
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
