"""From a file's bytes to a `Space`: every problem that can be seen without launching, at its place."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path as FilePath
from typing import Any

from pydantic import BaseModel, ValidationError

from engine.config import EngineConfig
from tuner.errors import Problem, SpaceError
from tuner.load.workload import WorkloadError, make_requests
from tuner.space.domains import Choices, Domain, DomainReader, FloatRange, IntRange
from tuner.space.fields import NoSuchPath, Variant, models_in, resolve, unions
from tuner.space.model import Constraint, Objective, SpaceFile
from tuner.space.problems import (
    config_problems,
    did_you_mean,
    expected_words,
    file_problems,
    shorten,
    value_problem,
)
from tuner.space.source import Document, Path, read_document
from tuner.space.space import Infeasible, Space

SAMPLES = 300
MOST_BYTES = 4 * 2**20  # a search space has a few kilobytes; a path may be /dev/zero


def load_space(path: FilePath) -> Space:
    """Read and check a search-space file.

    Raises:
        SpaceError: unreadable or invalid; every problem found, with line, column and hint.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SpaceError(path, [Problem(1, 1, f"cannot be read: {reason}")]) from error
    if len(data) > MOST_BYTES:
        raise SpaceError(path, [Problem(1, 1, f"longer than {MOST_BYTES // 2**20} MiB", "is this the right file?")])
    space, document = _parse(data, str(path))
    try:
        make_requests(space.file.workload, "", space.file.study.seed)
    except WorkloadError as error:
        place, hint = ("workload", "prompts"), "`bundled`, the path of a JSONL or ShareGPT file, or `kind: random`"
        raise SpaceError(path, [document.problem(place, str(error), hint)]) from error
    return space


def parse_space(data: bytes, source: str = "space.yaml") -> Space:
    """Check a search space given as bytes; no other file is looked at.

    Raises:
        SpaceError: as `load_space`.
    """
    return _parse(data, source)[0]


def _parse(data: bytes, source: str) -> tuple[Space, Document]:
    document = read_document(data, source)
    problems: list[Problem] = []
    file: SpaceFile | None = None
    try:
        file = SpaceFile.model_validate(document.value)
    except ValidationError as error:
        problems += file_problems(error, document, SpaceFile)
    raw = document.value.get("search", {})
    domains = _Domains(document).read(raw if isinstance(raw, dict) else {})
    engine = document.value.get("engine", {})
    checks = _Checks(document, engine if isinstance(engine, dict) else {}, domains)
    problems += domains.problems + list(checks.problems())
    if file is not None:
        problems += _section_problems(file, document)
    if problems or file is None:
        raise SpaceError(source, problems)
    space = Space(source, document.text, file, _in_order(domains.found))
    problems = list(_point_problems(space, document))
    if problems:
        raise SpaceError(source, problems)
    return space, document


# ------------------------------------------------------------------------------------- sections of the file


def _section_problems(file: SpaceFile, document: Document) -> Iterator[Problem]:
    levels = file.workload.concurrency
    if list(levels) != sorted(set(levels)):
        hint = f"write {sorted(set(levels))}"
        yield document.problem(("workload", "concurrency"), "concurrency must ascend without repeats", hint)
    measured = f"measured are {', '.join(map(str, levels))}"
    sections: tuple[tuple[str, tuple[Objective | Constraint, ...]], ...] = (
        ("objectives", file.objectives),
        ("constraints", file.constraints),
    )
    for section, items in sections:
        for index, item in enumerate(items):
            if item.at is not None and item.at not in levels:
                message = f"concurrency {item.at} is not in workload.concurrency"
                yield document.problem((section, index, "at"), message, measured)
    if file.pick.load is not None and file.pick.load not in levels:
        message = f"concurrency {file.pick.load} is not in workload.concurrency"
        yield document.problem(("pick", "load"), message, measured)
    metrics = [objective.metric for objective in file.objectives]
    if len(set(metrics)) < len(metrics):
        message = f"both objectives are {metrics[0]}: a front needs two metrics"
        yield document.problem(("objectives", 1, "metric"), message, "such as tpot_ms_p50 and output_tok_s")


# -------------------------------------------------------------------------------------------------- domains


class _Domains:
    """Reads every domain; their conditions are checked once all are known."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[Problem] = []
        self.found: dict[str, Domain] = {}
        self.unclear: set[str] = set()  # domains whose conditions have problems

    def read(self, raw: dict[str, Any]) -> _Domains:
        for path, value in raw.items():
            try:
                resolve(path)
            except NoSuchPath as error:
                place: Path = ("search", path)
                self.problems.append(self.document.problem(place, str(error), error.hint, key=True))
                continue
            reader = DomainReader(self.document, path)
            domain = reader.read(value)
            self.problems += reader.problems
            if domain is not None:
                self.found[path] = domain
        self._check_conditions(raw)
        return self

    def _check_conditions(self, raw: dict[str, Any]) -> None:
        for path, domain in self.found.items():
            for condition in domain.when:
                place: Path = ("search", path, "when", condition.path)
                other = self.found.get(condition.path)
                if other is None:
                    self.unclear.add(path)
                    if condition.path not in raw:  # else it has a problem of its own
                        hint = did_you_mean(condition.path, [p for p in raw if p != path])
                        message = f"{path}: when names {condition.path}, which is not searched"
                        self.problems.append(self.document.problem(place, message, hint, key=True))
                    continue
                for index, value in enumerate(condition.values):
                    if not other.contains(value):
                        self.unclear.add(path)
                        words = [str(v) for v in other.values] if isinstance(other, Choices) else []
                        message = f"{path}: {condition.path} is never {shorten(value)}"
                        hint = did_you_mean(str(value), words)
                        self.problems.append(self.document.problem((*place, index), message, hint))
        for path in self._circular():
            message = f"{path}: when leads back to {path}"
            place = ("search", path, "when")
            self.problems.append(self.document.problem(place, message, "conditions must not form a circle"))

    def _circular(self) -> Iterator[str]:
        for start in self.found:
            seen: set[str] = set()
            ahead = [condition.path for condition in self.found[start].when]
            while ahead:
                path = ahead.pop()
                if path == start:
                    yield start
                    break
                if path not in seen and path in self.found:
                    seen.add(path)
                    ahead += [condition.path for condition in self.found[path].when]


def _in_order(domains: dict[str, Domain]) -> tuple[Domain, ...]:
    """Return the domains with conditions before what they guard, else in the order of the file."""
    ordered: dict[str, Domain] = {}

    def visit(path: str) -> None:
        if path not in ordered:
            for condition in domains[path].when:
                visit(condition.path)
            ordered[path] = domains[path]

    for path in domains:
        visit(path)
    return tuple(ordered.values())


# --------------------------------------------------------------------------------- paths and values of both


class _Checks:
    """Checks fixed part and domains against EngineConfig's types and against each other."""

    def __init__(self, document: Document, engine: dict[str, Any], domains: _Domains) -> None:
        self.document = document
        self.engine = engine
        self.domains = domains.found
        self.skip = domains.unclear

    def problems(self) -> Iterator[Problem]:
        yield from self._fixed(self.engine, ())
        yield from self._overlaps()
        for domain in self.domains.values():
            if domain.path in self.skip:
                continue
            variants = resolve(domain.path)
            reachable = [variant for variant in variants if self._missing_kind(variant, domain) is None]
            missing = [missing for v in variants if (missing := self._missing_kind(v, domain)) is not None]
            if not reachable:
                yield self._unreachable(domain, missing)
                continue
            yield from self._uncovered(domain, variants)
            yield from self._values(domain, reachable)

    # the fixed part

    def _fixed(self, value: Any, path: tuple[str, ...]) -> Iterator[Problem]:
        place: Path = ("engine", *path)
        if path:
            dotted = ".".join(path)
            try:
                variants = resolve(dotted)
            except NoSuchPath as error:
                yield self.document.problem(place, f"engine: {error}", error.hint, key=True)
                return
            if not isinstance(value, dict) or not _holds_fields(dotted):
                yield from self._typed(value, variants, place, dotted)
                return
        for key, child in value.items():
            yield from self._fixed(child, (*path, key))

    def _typed(self, value: Any, variants: Iterable[Variant], place: Path, name: str) -> Iterator[Problem]:
        errors: list[ValidationError] = []
        for variant in variants:
            try:
                variant.adapter.validate_python(value)
            except ValidationError as error:
                errors.append(error)
            else:
                return
        boolean = self.document.booleans.get(place)
        inner, message, hint = value_problem(errors[0], self.document, place, value)
        expected = _literals(errors)
        if len(expected) > 1 and boolean is None and inner == place:
            message = f"{shorten(value)} is not one of {', '.join(expected)}"
            hint = did_you_mean(str(value), expected, all_=False)
        elif boolean is not None and "none" in expected:
            hint = "without speculation is `none`"
        elif isinstance(value, str) and value in unions().get(name, {}):
            hint = f"write {name}.kind: [{value}, …], or {{kind: {value}}}"
        yield self.document.problem(inner, f"{name}: {message}", hint, key=message.endswith("no such field"))

    # domains

    def _overlaps(self) -> Iterator[Problem]:
        fixed = set(_leaves(self.engine, ()))
        for path in self.domains:
            place: Path = ("search", path)
            for other in self.domains:
                if path.startswith(other + "."):
                    message = f"{path} is a part of {other}, which is searched as a whole"
                    yield self.document.problem(place, message, "search one or the other", key=True)
            for leaf in fixed:
                if leaf == path or leaf.startswith(path + ".") or path.startswith(leaf + "."):
                    message = f"{path} is searched, and {leaf} is fixed in engine"
                    yield self.document.problem(place, message, "remove one of them", key=True)

    def _possible(self, path: str, domain: Domain) -> set[str]:
        """Return the kinds that `path` (of a `kind`) can have while `domain` is active."""
        union = path.removesuffix(".kind")
        source = self.domains.get(path)
        if source is None:
            whole = self.domains.get(union)
            if isinstance(whole, Choices):
                return {str(value.get("kind")) for value in whole.values if isinstance(value, dict)}
            section = self.engine.get(union)
            fixed = section.get("kind") if isinstance(section, dict) else None
            return {str(fixed)} if fixed is not None else {_default_kind(union)}
        allowed = {str(value) for value in source.values} if isinstance(source, Choices) else set()
        for condition in self._conditions(domain):
            if condition[0] == path:
                allowed &= condition[1]
        return allowed

    def _conditions(self, domain: Domain) -> Iterator[tuple[str, set[str]]]:
        """Yield (path, allowed values) of a domain's conditions and of theirs."""
        ahead, seen = [domain], {domain.path}
        while ahead:
            for condition in ahead.pop().when:
                yield condition.path, {str(value) for value in condition.values}
                above = self.domains.get(condition.path)
                if above is not None and above.path not in seen:
                    seen.add(above.path)
                    ahead.append(above)

    def _missing_kind(self, variant: Variant, domain: Domain) -> tuple[str, str] | None:
        if domain.path.endswith(".kind"):
            return None
        for path, kind in variant.kinds:
            if kind not in self._possible(path, domain):
                return path, kind
        return None

    def _unreachable(self, domain: Domain, missing: list[tuple[str, str]]) -> Problem:
        path = missing[0][0]
        kinds = list(dict.fromkeys(kind for _, kind in missing))
        possible = ", ".join(sorted(self._possible(path, domain))) or "nothing"
        message = f"{domain.path} exists only for {path} {' or '.join(kinds)}, and {path} is {possible} here"
        place: Path = ("search", domain.path)
        return self.document.problem(place, message, f"add {kinds[0]} to {path} in search", key=True)

    def _uncovered(self, domain: Domain, variants: tuple[Variant, ...]) -> Iterator[Problem]:
        """Complain if a domain is active for a kind that has no such field."""
        if domain.path.endswith(".kind"):
            return
        for path in {path for variant in variants for path, _ in variant.kinds}:
            having = {kind for variant in variants for at, kind in variant.kinds if at == path}
            possible = self._possible(path, domain)
            if possible - having:
                kinds = [kind for kind in _ordered_kinds(path) if kind in possible & having]
                message = f"{domain.path} does not exist for {path} {', '.join(sorted(possible - having))}"
                hint = f"add when: {{{path}: [{', '.join(kinds)}]}}"
                yield self.document.problem(("search", domain.path), message, hint, key=True)

    def _values(self, domain: Domain, variants: list[Variant]) -> Iterator[Problem]:
        place: Path = ("search", domain.path)
        if isinstance(domain, Choices):
            if isinstance(self.document.value["search"][domain.path], dict):
                place = (*place, "choices")
            for index, value in enumerate(domain.values):
                yield from self._typed(value, variants, (*place, index), domain.path)
            return
        kind = "int" if isinstance(domain, IntRange) else "float"
        for index, bound in enumerate((domain.low, domain.high)):
            yield from self._typed(bound, variants, (*place, kind, index), domain.path)
        if isinstance(domain, FloatRange) and domain.low < domain.high:
            between = domain.low + (domain.high - domain.low) * 0.3719
            ends = all(_accepts(v, bound) for v in variants for bound in (domain.low, domain.high))
            if ends and not any(_accepts(variant, between) for variant in variants):
                message = f"{domain.path} takes whole numbers"
                yield self.document.problem((*place, kind), message, "write {int: [low, high]}")


def _accepts(variant: Variant, value: Any) -> bool:
    try:
        variant.adapter.validate_python(value)
    except ValidationError:
        return False
    return True


def _literals(errors: list[ValidationError]) -> list[str]:
    """Return the words that the variants of a `kind` accept."""
    words: dict[str, None] = {}
    for error in errors:
        for detail in error.errors(include_url=False):
            if detail["type"] == "literal_error":
                words |= dict.fromkeys(expected_words(detail))
    return list(words)


def _holds_fields(path: str) -> bool:
    """Whether a path is a group of fields rather than a value."""
    model: type[BaseModel] = EngineConfig
    models = [model]
    for part in path.split("."):
        fields = [m.model_fields[part] for m in models if part in m.model_fields]
        models = [child for field in fields for child in models_in(field.annotation)]
    return bool(models)


def _leaves(value: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    for key, child in value.items():
        if isinstance(child, dict) and child:
            yield from _leaves(child, (*path, str(key)))
        else:
            yield ".".join((*path, str(key)))


def _default_kind(union: str) -> str:
    default = EngineConfig.model_fields[union].default
    return str(default.kind)


def _ordered_kinds(path: str) -> list[str]:
    return list(unions()[path.removesuffix(".kind")])


# ----------------------------------------------------------------------------------------- whole configurations


def _point_problems(space: Space, document: Document) -> Iterator[Problem]:
    """Check the baseline and, where points can be counted out, that any of them is consistent."""
    baseline = space.baseline(lambda config: ())
    if isinstance(baseline, Infeasible):
        assignment = next(space.baselines())
        try:
            EngineConfig.model_validate(space.baseline_raw(assignment))
        except ValidationError as error:
            for path, message, hint in config_problems(error, EngineConfig):
                place = _place(space, document, path)
                text = f"the baseline (no speculation) is impossible: {path}: {message}"
                yield document.problem(place, text, hint)
        return
    exhaustive = (size := space.size()) is not None and size <= SAMPLES
    rng = random.Random(space.file.study.seed)
    drawn = (space.draw(rng) for _ in range(SAMPLES))
    points = itertools.islice(space.points(), SAMPLES) if exhaustive else drawn
    first: str | None = None
    for assignment in points:
        config = space.assemble(assignment)
        if not isinstance(config, Infeasible):
            return
        first = first or "; ".join(config.reasons)
    if first is not None:
        found = (
            "no point of the search is consistent" if exhaustive else f"none of {SAMPLES} random points is consistent"
        )
        yield document.problem(("search",), f"{found}: {first}", key=True)


def _place(space: Space, document: Document, path: str) -> Path:
    """Return where the file says something about a dotted path of the configuration."""
    for domain in space.domains:
        if path == domain.path or path.startswith(domain.path + "."):
            return ("search", domain.path)
    return ("engine", *path.split("."))
