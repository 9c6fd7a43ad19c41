"""Optuna at arm's length: how a trial becomes an assignment of the space, and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from tuner.records import canonical
from tuner.space import Assignment, Choices, Domain, FloatRange, Infeasible, Space

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True)
class Suggestion:
    """A point to try: a configuration, or a contradiction that costs no launch.

    `repeat`: the trial that this would measure once more; None for a point that is new. `gain`: the share of
    hypervolume that the best point is expected to add, None without a model of it.
    """

    assignment: Assignment
    judged: EngineConfig | Infeasible
    repeat: int | None = None
    gain: float | None = field(default=None, compare=False)


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
