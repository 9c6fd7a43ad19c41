"""Domains of the search: a list of choices, a range of integers, a range of floats; each under conditions."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.errors import Problem
from tuner.records import canonical
from tuner.space.problems import did_you_mean, shorten
from tuner.space.source import Document, Path

MAX_CHOICES = 1000
MAX_INT = 10**12

Assignment = dict[str, Any]


@dataclass(frozen=True)
class Condition:
    """`path` must have one of these values for a domain to be active."""

    path: str
    values: tuple[Any, ...]

    def holds(self, assignment: Mapping[str, Any]) -> bool:
        """Whether the path is active with one of the values."""
        if self.path not in assignment:
            return False
        given = canonical(assignment[self.path])
        return any(given == canonical(value) for value in self.values)


@dataclass(frozen=True)
class _Domain:
    path: str
    when: tuple[Condition, ...]

    def active(self, assignment: Mapping[str, Any]) -> bool:
        """Whether every condition holds."""
        return all(condition.holds(assignment) for condition in self.when)


@dataclass(frozen=True)
class Choices(_Domain):
    """One of a list; values may be mappings."""

    values: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def ordered(self) -> bool:
        """Whether the choices are ascending numbers, so that neighbours are alike."""
        numbers = [v for v in self.values if isinstance(v, int | float) and not isinstance(v, bool)]
        return len(numbers) == len(self.values) >= 3 and list(numbers) == sorted(set(numbers))

    def draw(self, rng: random.Random) -> Any:
        """Return a uniformly random value."""
        return rng.choice(self.values)

    def contains(self, value: Any) -> bool:
        """Whether a value belongs to the domain."""
        given = canonical(value)
        return any(given == canonical(choice) for choice in self.values)


@dataclass(frozen=True)
class IntRange(_Domain):
    """Whole numbers low, low + step, … up to high."""

    low: int
    high: int
    step: int = 1
    log: bool = False

    def __len__(self) -> int:
        return (self.high - self.low) // self.step + 1

    @property
    def values(self) -> range:
        """Every value, ascending."""
        return range(self.low, self.high + 1, self.step)

    def draw(self, rng: random.Random) -> int:
        """Return a random value, uniform in its logarithm where `log` is set."""
        if self.log:
            drawn = math.exp(rng.uniform(math.log(self.low), math.log(self.high + 1)))
            return min(self.high, max(self.low, int(drawn)))
        return rng.randrange(self.low, self.high + 1, self.step)

    def contains(self, value: Any) -> bool:
        """Whether a value belongs to the domain."""
        return isinstance(value, int) and not isinstance(value, bool) and value in self.values


@dataclass(frozen=True)
class FloatRange(_Domain):
    """Real numbers from low to high."""

    low: float
    high: float
    log: bool = False

    def draw(self, rng: random.Random) -> float:
        """Return a random value, uniform in its logarithm where `log` is set."""
        if self.log:
            drawn = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
            return min(self.high, max(self.low, drawn))
        return rng.uniform(self.low, self.high)

    def contains(self, value: Any) -> bool:
        """Whether a value belongs to the domain."""
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high


Domain = Choices | IntRange | FloatRange

_KEYS = {"choices": {"when"}, "int": {"step", "log", "when"}, "float": {"log", "when"}}
_FORMS = "write [a, b], {choices: [a, b]}, {int: [low, high]} or {float: [low, high]}"


class DomainReader:
    """Reads one domain; collects problems instead of raising."""

    def __init__(self, document: Document, path: str) -> None:
        self.document = document
        self.path = path
        self.problems: list[Problem] = []

    def report(self, at: Path, message: str, hint: str = "", *, key: bool = False) -> None:
        """Note a problem at a place below this domain."""
        place: Path = ("search", self.path, *at)
        self.problems.append(self.document.problem(place, f"{self.path}: {message}", hint, key=key))

    def read(self, raw: Any) -> Domain | None:
        """Return the domain, or None if it has problems."""
        if isinstance(raw, list):
            values = self._choices(raw, ())
            return Choices(self.path, (), values) if values is not None else None
        if not isinstance(raw, dict):
            self.report((), f"a domain is meant here, got {shorten(raw)}", f"{_FORMS}; a fixed value goes to engine")
            return None
        kinds = [key for key in _KEYS if key in raw]
        if len(kinds) != 1:
            unknown = [key for key in raw if key not in {"step", "log", "when", *_KEYS}]
            message = f"a domain has one of choices, int, float; got {', '.join(map(str, raw)) or 'nothing'}"
            hint = did_you_mean(unknown[0], list(_KEYS)) if unknown and not kinds else _FORMS
            self.report((), message, hint)
            return None
        kind = kinds[0]
        for key in raw:
            if key not in _KEYS[kind] | {kind}:
                hint = did_you_mean(key, sorted(_KEYS[kind]))
                self.report((key,), f"{key} means nothing beside {kind}", hint, key=True)
        when = self._when(raw.get("when", {}))
        domain = self._of_kind(kind, raw, when or ())
        return None if self.problems else domain

    def _of_kind(self, kind: str, raw: dict[str, Any], when: tuple[Condition, ...]) -> Domain | None:
        if kind == "choices":
            values = self._choices(raw["choices"], ("choices",))
            return Choices(self.path, when, values) if values is not None else None
        log = raw.get("log", False)
        if not isinstance(log, bool):
            self.report(("log",), f"log is true or false, got {shorten(log)}")
            return None
        bounds = self._bounds(raw[kind], kind)
        if bounds is None:
            return None
        low, high = bounds
        if log and low <= 0:
            self.report((kind, 0), f"a log range starts above 0, got {low}")
            return None
        if kind == "float":
            return FloatRange(self.path, when, float(low), float(high), log)
        step = raw.get("step", 1)
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            self.report(("step",), f"step is a whole number from 1, got {shorten(step)}")
            return None
        if log and step != 1:
            self.report(("step",), "step and log exclude each other")
            return None
        return IntRange(self.path, when, int(low), int(high), step, log)

    def _choices(self, raw: Any, at: Path) -> tuple[Any, ...] | None:
        if not isinstance(raw, list):
            self.report(at, f"choices is a list, got {shorten(raw)}", "write [a, b]")
            return None
        if not raw:
            self.report(at, "an empty list leaves nothing to choose", "give at least one value")
            return None
        if len(raw) > MAX_CHOICES:
            self.report(at, f"{len(raw)} choices are more than {MAX_CHOICES}", "use {int: [low, high]}")
            return None
        seen: dict[str, int] = {}
        for index, value in enumerate(raw):
            first = seen.setdefault(canonical(value), index)
            if first != index:
                self.report((*at, index), f"{shorten(value)} is listed twice", "remove one")
        return None if len(seen) < len(raw) else tuple(raw)

    def _bounds(self, raw: Any, kind: str) -> tuple[float, float] | None:
        if not isinstance(raw, list) or len(raw) != 2:
            self.report((kind,), f"{kind} takes two numbers, got {shorten(raw)}", f"write {{{kind}: [1, 4]}}")
            return None
        allowed = int if kind == "int" else int | float
        for index, bound in enumerate(raw):
            if isinstance(bound, bool) or not isinstance(bound, allowed):
                named = "whole number" if kind == "int" else "number"
                self.report((kind, index), f"a {named} is meant here, got {shorten(bound)}")
                return None
            if abs(bound) > MAX_INT:
                self.report((kind, index), f"{shorten(bound)} is beyond any field's range")
                return None
        if raw[0] > raw[1]:
            self.report((kind,), f"the range is empty: {raw[0]} to {raw[1]}", f"write [{raw[1]}, {raw[0]}]")
            return None
        return raw[0], raw[1]

    def _when(self, raw: Any) -> tuple[Condition, ...] | None:
        if not isinstance(raw, dict):
            hint = "write when: {draft.kind: [dflash]}"
            self.report(("when",), f"when is a mapping of paths to lists, got {shorten(raw)}", hint)
            return None
        conditions = []
        for path, values in raw.items():
            if not isinstance(values, list) or not values:
                hint = f"write {path}: [{values}]" if isinstance(values, str | int) else "write [dflash]"
                self.report(("when", path), f"a non-empty list of values is meant, got {shorten(values)}", hint)
                continue
            conditions.append(Condition(path, tuple(values)))
        return tuple(conditions)
