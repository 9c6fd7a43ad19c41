"""What can be known without a launch: capabilities of backend and machine, shapes, memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from engine import backends
from engine.config import BUNDLED, DFlashDraft, EngineConfig, draft_folder, target_folder
from engine.errors import EngineError
from engine.estimate import DraftShape, Machine, MemoryEstimate, ModelShape, check, memory, read_draft_shape, read_shape
from tuner.space import Assignment, Choices, Domain, FloatRange, Infeasible, IntRange, Space

ENUMERABLE = 5000


@dataclass
class StaticChecks:
    """Judges configurations for one machine; model shapes are read once."""

    machine: Machine
    _shapes: dict[Path, ModelShape | None] = field(default_factory=dict)
    _drafts: dict[Path, DraftShape | None] = field(default_factory=dict)
    _errors: dict[Path, str] = field(default_factory=dict)

    def __call__(self, config: EngineConfig) -> tuple[str, ...]:
        """Return why the configuration cannot run here; empty when nothing is known against it."""
        try:
            backend = backends.get(config)
            found = [str(refusal) for refusal in backend.refusals(config, self.machine)]
        except EngineError as error:
            return (str(error),)
        if found:
            return tuple(found)
        shape, draft, missing = self._read(config)
        if missing:
            return missing
        if shape is None:
            return ()
        found = [str(refusal) for refusal in backend.model_refusals(shape, draft)]
        found += [str(refusal) for refusal in check(config, shape, draft, self.machine)]
        return tuple(dict.fromkeys(found))

    def memory(self, config: EngineConfig) -> MemoryEstimate | None:
        """Return the memory estimate, None where the model's shape is not on this machine."""
        shape, draft, missing = self._read(config)
        return None if shape is None or missing else memory(config, shape, draft, self.machine)

    def _read(self, config: EngineConfig) -> tuple[ModelShape | None, DraftShape | None, tuple[str, ...]]:
        folder = target_folder(config)
        if config.model.target != BUNDLED and not folder.is_dir() and config.backend.kind != "native":
            return None, None, ()  # a hub name: the server downloads it
        shape = self._target(folder)
        if shape is None:
            return None, None, (f"model.target: {self._errors[folder]}",)
        drafter = next((draft for draft in config.drafts if isinstance(draft, DFlashDraft)), None)
        if drafter is None:
            return shape, None, ()
        folder = draft_folder(config, drafter)
        if drafter.model is not None and not folder.is_dir() and config.backend.kind != "native":
            return None, None, ()
        draft = self._drafter(folder)
        if draft is None:
            return shape, None, (f"draft.model: {self._errors[folder]}",)
        return shape, draft, ()

    def _target(self, folder: Path) -> ModelShape | None:
        if folder not in self._shapes:
            try:
                self._shapes[folder] = read_shape(folder)
            except EngineError as error:
                self._shapes[folder], self._errors[folder] = None, str(error)
        return self._shapes[folder]

    def _drafter(self, folder: Path) -> DraftShape | None:
        if folder not in self._drafts:
            try:
                self._drafts[folder] = read_draft_shape(folder)
            except EngineError as error:
                self._drafts[folder], self._errors[folder] = None, str(error)
        return self._drafts[folder]


@dataclass(frozen=True)
class Pruned:
    """A choice, or an end of a range, that no point of this machine can have."""

    path: str
    value: object
    reason: str


@dataclass(frozen=True)
class Pruning:
    """What is left of a space on this machine. Counts are None where the points cannot be counted."""

    space: Space
    dropped: tuple[Pruned, ...]
    points: int | None
    feasible: int | None
    reasons: dict[str, int]  # by how many points it forbids
    impossible: tuple[Assignment, ...] = ()  # points of the whole space that cannot run


def prune(space: Space, checks: StaticChecks) -> Pruning:
    """Drop the choices that can never run here, and count what is left.

    Small spaces are judged point by point, so that no search asks for an impossible one. In large ones nothing is
    dropped ahead: such a point is found out when it is suggested, which costs no launch either.
    """
    size = space.size()
    if size is None or size > ENUMERABLE:
        return Pruning(space, (), size, None, {})
    alive: dict[tuple[str, int], bool] = {}
    refused: dict[tuple[str, int], str] = {}
    reasons: dict[str, int] = {}
    impossible: list[Assignment] = []
    feasible = 0
    for assignment in space.points():
        judged = space.judge(assignment, checks)
        bad = isinstance(judged, Infeasible)
        feasible += not bad
        if isinstance(judged, Infeasible):
            impossible.append(assignment)
            for reason in judged.reasons:
                reasons[reason] = reasons.get(reason, 0) + 1
        for key in _chosen(space, assignment):
            alive[key] = alive.get(key, False) or not bad
            if isinstance(judged, Infeasible):
                refused.setdefault(key, judged.reasons[0])
    dropped: list[Pruned] = []
    domains: list[Domain] = []
    for domain in space.domains:
        dead = {index for (path, index), lives in alive.items() if path == domain.path and not lives}
        kept, gone = _narrow(domain, dead)
        domains.append(kept)
        dropped += [Pruned(domain.path, _value(domain, index), refused[domain.path, index]) for index in gone]
    left = replace(space, domains=tuple(domains))
    return Pruning(left, tuple(dropped), size, feasible, reasons, tuple(impossible))


def _chosen(space: Space, assignment: Assignment) -> list[tuple[str, int]]:
    return [
        (domain.path, index)
        for domain in space.domains
        if not isinstance(domain, FloatRange) and domain.path in assignment
        for index, value in enumerate(domain.values)
        if value is assignment[domain.path] or (isinstance(domain, IntRange) and value == assignment[domain.path])
    ]


def _narrow(domain: Domain, dead: set[int]) -> tuple[Domain, list[int]]:
    """Return the domain without dead values, and the indices that were taken off.

    A range loses only its ends. A domain that would lose everything stays as it is: then no point can run.
    """
    if isinstance(domain, FloatRange) or not dead or len(dead) >= len(domain):
        return domain, []
    if isinstance(domain, Choices):
        left = tuple(value for index, value in enumerate(domain.values) if index not in dead)
        return replace(domain, values=left), sorted(dead)
    alive = [index for index in range(len(domain)) if index not in dead]
    gone = [index for index in range(len(domain)) if not alive[0] <= index <= alive[-1]]
    low, high = domain.values[alive[0]], domain.values[alive[-1]]
    return replace(domain, low=low, high=high), gone


def _value(domain: Domain, index: int) -> object:
    return None if isinstance(domain, FloatRange) else domain.values[index]
