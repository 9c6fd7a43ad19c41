"""A validated search space: its domains, its fixed part, and how an assignment becomes a configuration."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from engine.config import EngineConfig, explain
from tuner.records import canonical, digest
from tuner.space.domains import Assignment, Choices, Domain, FloatRange
from tuner.space.fields import resolve, unions
from tuner.space.model import SpaceFile

Refusals = Callable[[EngineConfig], tuple[str, ...]]
"""Why a configuration cannot run here, as far as that is known without a launch; empty when it can."""

COUNTABLE = 50_000


@dataclass(frozen=True)
class Infeasible:
    """A point that can never launch, and why."""

    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Space:
    """What a search-space file says. `domains` are ordered so that conditions come before what they guard."""

    source: str
    text: str
    file: SpaceFile
    domains: tuple[Domain, ...]

    @property
    def digest(self) -> str:
        """Identity of what is searched and how it is measured; budget and strategy may change without changing it."""
        content = self.file.model_dump(
            mode="json", by_alias=True, exclude={"study": {"budget"}, "pick": True, "strategy": True}
        )
        return digest(content)

    @property
    def levels(self) -> tuple[int, ...]:
        """Concurrencies, ascending."""
        return self.file.workload.concurrency

    def raw_config(self, assignment: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration's fields: the fixed part with the assigned paths put in."""
        raw = copy.deepcopy(self.file.engine)
        for path, value in assignment.items():
            _put(raw, path, value)
        for name, kinds in unions().items():
            section = raw.get(name)
            if isinstance(section, dict) and (kind := section.get("kind")) in kinds:
                # The fixed part may hold fields of another kind than the one this point has.
                keep = kinds[kind]
                fixed = self.file.engine.get(name, {})
                assigned = {path.split(".", 2)[1] for path in assignment if path.startswith(f"{name}.")}
                raw[name] = {
                    key: value for key, value in section.items() if key in keep or key in assigned or key not in fixed
                }
        return raw

    def assemble(self, assignment: Mapping[str, Any]) -> EngineConfig | Infeasible:
        """Return the configuration of an assignment, or why the values contradict each other."""
        try:
            return EngineConfig.model_validate(self.raw_config(assignment))
        except ValidationError as error:
            return Infeasible(tuple(explain(error)))

    def judge(self, assignment: Mapping[str, Any], refusals: Refusals) -> EngineConfig | Infeasible:
        """Return the configuration if it is consistent and this machine can run it."""
        config = self.assemble(assignment)
        if isinstance(config, Infeasible):
            return config
        reasons = refusals(config)
        return Infeasible(reasons) if reasons else config

    # ------------------------------------------------------------------------------------------- baseline

    def baseline_raw(self, assignment: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration's fields without speculation."""
        raw = self.raw_config({p: v for p, v in assignment.items() if p.split(".")[0] != "draft"})
        raw["draft"] = {"kind": "none"}
        return raw

    def baselines(self) -> Iterator[Assignment]:
        """Yield assignments of the baseline, the preferred first.

        Preferred is the first of a list, and in a range the field's own default or else the lower end; drafts
        are off. The others follow in the order of the lists, for when this machine cannot run the first.
        """
        lists = [_preferences(domain) for domain in self.domains]
        for values in itertools.islice(itertools.product(*lists), COUNTABLE):
            assignment: Assignment = {}
            for domain, value in zip(self.domains, values, strict=True):
                if domain.active(assignment):
                    assignment[domain.path] = value
            yield assignment

    def baseline(self, refusals: Refusals) -> tuple[EngineConfig, Assignment] | Infeasible:
        """Return the first baseline that can run here."""
        reasons: tuple[str, ...] = ()
        for assignment in self.baselines():
            try:
                config = EngineConfig.model_validate(self.baseline_raw(assignment))
            except ValidationError as error:
                reasons = reasons or tuple(explain(error))
                continue
            refused = refusals(config)
            if not refused:
                return config, assignment
            reasons = reasons or refused
        return Infeasible(reasons or ("the space has no baseline",))

    # --------------------------------------------------------------------------------------------- points

    def size(self) -> int | None:
        """Return the number of points; None where a range is continuous or there are too many conditions."""
        if any(isinstance(domain, FloatRange) and domain.low < domain.high for domain in self.domains):
            return None
        parents = {condition.path for domain in self.domains for condition in domain.when}
        visits = 0

        def count(index: int, assignment: Assignment) -> int | None:
            nonlocal visits
            visits += 1
            if visits > COUNTABLE:
                return None
            if index == len(self.domains):
                return 1
            domain = self.domains[index]
            if not domain.active(assignment):
                return count(index + 1, assignment)
            if domain.path not in parents:
                rest = count(index + 1, assignment)
                return None if rest is None else rest * (1 if isinstance(domain, FloatRange) else len(domain))
            total = 0
            for value in _values(domain):
                part = count(index + 1, {**assignment, domain.path: value})
                if part is None:
                    return None
                total += part
            return total

        return count(0, {})

    def points(self) -> Iterator[Assignment]:
        """Yield every assignment in the order of the file; a continuous range yields its two ends only."""

        def walk(index: int, assignment: Assignment) -> Iterator[Assignment]:
            if index == len(self.domains):
                yield assignment
                return
            domain = self.domains[index]
            if not domain.active(assignment):
                yield from walk(index + 1, assignment)
                return
            for value in _values(domain):
                yield from walk(index + 1, {**assignment, domain.path: value})

        return walk(0, {})

    def draw(self, rng: random.Random) -> Assignment:
        """Return a random assignment."""
        assignment: Assignment = {}
        for domain in self.domains:
            if domain.active(assignment):
                assignment[domain.path] = domain.draw(rng)
        return assignment

    def assignment_of(self, config: Mapping[str, Any]) -> Assignment | None:
        """Return the assignment that leads to a recorded configuration; None if it is not of this space.

        Of a point that could not run, the record keeps the raw fields; both forms are understood.
        """
        assignment: Assignment = {}
        for domain in self.domains:
            if not domain.active(assignment):
                continue
            value = _recorded(domain, _get(config, domain.path))
            if value is _ABSENT:
                return None
            assignment[domain.path] = value
        recorded = canonical(config)
        if canonical(self.raw_config(assignment)) == recorded:
            return assignment
        assembled = self.assemble(assignment)
        if isinstance(assembled, EngineConfig) and canonical(assembled.model_dump(mode="json")) == recorded:
            return assignment
        return None


_ABSENT = object()


def _put(raw: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for part in parents:
        child = raw.get(part)
        if not isinstance(child, dict):
            child = {}
        raw[part] = child
        raw = child
    raw[last] = copy.deepcopy(value)


def _get(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _recorded(domain: Domain, value: Any) -> Any:
    """Return the domain's value whose normal form is the recorded one."""
    if value is _ABSENT:
        return _ABSENT
    if not isinstance(domain, Choices):
        return value if domain.contains(value) else _ABSENT
    recorded = canonical(value)
    for choice in domain.values:
        if recorded in _normal_forms(domain.path, canonical(choice), choice):
            return choice
    return _ABSENT


def _normal_forms(path: str, key: str, choice: Any) -> set[str]:
    forms = {key}
    for variant in resolve(path):
        try:
            value = variant.adapter.validate_python(choice)
        except ValidationError:
            continue
        forms.add(canonical(variant.adapter.dump_python(value, mode="json")))
    return forms


def _values(domain: Domain) -> tuple[Any, ...] | range:
    if isinstance(domain, FloatRange):
        return (domain.low, domain.high) if domain.low < domain.high else (domain.low,)
    return domain.values


def _preferences(domain: Domain) -> tuple[Any, ...]:
    """Return the values that a baseline may take, the preferred first."""
    if isinstance(domain, Choices):
        if domain.path == "draft.kind":
            return ("none",)
        if domain.path.split(".")[0] == "draft":
            return domain.values[:1]
        return domain.values
    default = resolve(domain.path)[0].default
    return (default if domain.contains(default) else domain.low,)
