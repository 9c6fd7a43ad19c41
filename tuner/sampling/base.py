"""What a sampler is told and what it answers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tuner.records import canonical, metric_of
from tuner.sampling.encode import Array, Encoder
from tuner.sampling.gp import Rows, members, rows_of
from tuner.space import Assignment, Objective, Space

if TYPE_CHECKING:
    import optuna

PER_TOKEN = ("tpot_ms", "normalized_ms", "e2e_ms", "output_tok_s", "output_tok_s_per_gpu", "output_tok_s_per_user")
POOL = 20_000  # points held at once; of a larger or continuous space, as many are drawn


@dataclass(frozen=True)
class Observation:
    """One launch. `values`: one per objective, None after a crash; `broken`: one per constraint, at most 0 if met;
    `scatter`: the standard deviation of each value, 0 where it is not known; `whole`: no value is a guess of what a
    race left out; `accept`: the accept length, None where it is not known."""

    key: str
    assignment: Assignment
    values: tuple[float, ...] | None
    broken: tuple[float, ...] = ()
    scatter: tuple[float, ...] = ()
    whole: bool = True
    accept: float | None = None


@dataclass(frozen=True)
class Pool:
    """The points a sampler may choose from; `guesses` are a prior's logarithms of their costs and, last, of
    their accept lengths, (points, objectives + 1), NaN where it has none."""

    space: Space
    assignments: tuple[Assignment, ...]
    guesses: Array | None = None

    @classmethod
    def of(cls, space: Space, limit: int = POOL) -> Pool:
        """Return every point of a space, or `limit` random ones (seeded by the study) where there are more."""
        size = space.size()
        if size is not None and size <= limit:
            return cls(space, tuple(space.points()))
        rng = random.Random(space.file.study.seed)
        drawn = {key_of(assignment): assignment for assignment in (space.draw(rng) for _ in range(limit))}
        return cls(space, tuple(drawn.values()))

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The key of each point."""
        return tuple(key_of(assignment) for assignment in self.assignments)

    @cached_property
    def index(self) -> dict[str, int]:
        """The position of each key."""
        return {key: position for position, key in enumerate(self.keys)}

    @cached_property
    def encoder(self) -> Encoder:
        """How points become vectors."""
        return Encoder(self.space.domains)

    @cached_property
    def features(self) -> Array:
        """The points as vectors, (points, coordinates)."""
        return self.encoder.matrix(self.assignments)

    @cached_property
    def rows(self) -> Rows:
        """The points as models want them."""
        return rows_of(self.features, members(self.encoder.groups))


@dataclass(frozen=True)
class View:
    """What a sampler may look at when asked for one point.

    `taken`: keys that must not be answered, because they crashed, cannot run, or run now. `pending`: the points
    that run now. `seed` belongs to this question alone.
    """

    pool: Pool
    objectives: tuple[Objective, ...]
    observations: tuple[Observation, ...]
    study: optuna.study.Study
    number: int
    seed: int
    taken: frozenset[str] = frozenset()
    pending: tuple[Assignment, ...] = ()

    @cached_property
    def seen(self) -> frozenset[str]:
        """Keys that were launched."""
        return frozenset(observation.key for observation in self.observations)


@dataclass(frozen=True)
class Proposal:
    """A point, and the Optuna trial that asked for it, if one did."""

    assignment: Assignment
    trial: optuna.trial.Trial | None = None


Repeats = Literal["never", "blindly"]


class Sampler(Protocol):
    """Says which point to launch next; pure in what it is shown."""

    @property
    def kind(self) -> str:
        """Its name in files and on the command line."""

    @property
    def repeats(self) -> Repeats:
        """Whether a known point is launched again because nobody looked: other tuners do that."""

    @property
    def forgets_failures(self) -> bool:
        """Whether a crash is told to Optuna as FAIL, which every sampler ignores; what other tuners do."""

    def starting_after(self, launches: int) -> Sampler:
        """Return this sampler with another number of launches before it models anything."""

    def propose(self, view: View) -> Proposal | None:
        """Return a point, None when this sampler has no more of its own."""


@dataclass(frozen=True)
class Costs:
    """Observations as arrays, lower being better: what models are fitted to."""

    x: Array  # (n, coordinates), every launch
    crashed: Array  # (n,), 1.0 where it crashed
    values: Array  # (measured, objectives), logarithms where all are positive
    broken: Array  # (measured, constraints)
    scatter: Array  # (measured, objectives), standard deviations of values
    whole: NDArray[np.bool_]  # (measured,), no value is a guess of what a race left out
    accept: Array | None  # (measured,), logarithms of accept lengths; None where one is missing or none can differ
    per_token: NDArray[np.bool_]  # (objectives,), costs that are in inverse proportion to accept lengths
    measured: tuple[int, ...] = field(default=())

    @property
    def usual_scatter(self) -> Array:
        """The median of what measurements scatter, (objectives,); those a race cut short only where all are."""
        return np.asarray(np.median(self.scatter[self.whole] if self.whole.any() else self.scatter, axis=0))

    @property
    def last(self) -> Costs:
        """The last objective's alone."""
        one = slice(-1, None)
        return replace(self, values=self.values[:, one], scatter=self.scatter[:, one], per_token=self.per_token[one])

    @classmethod
    def of(cls, view: View) -> Costs:
        """Return the arrays of a view."""
        rows = view.observations
        measured = tuple(index for index, row in enumerate(rows) if row.values is not None)
        raw = np.array([rows[index].values for index in measured], dtype=np.float64)
        raw = raw.reshape(len(measured), len(view.objectives))
        broken = np.array([rows[index].broken for index in measured], dtype=np.float64)
        constraints = len(rows[measured[0]].broken) if measured else 0
        columns = [_cost(raw[:, index], objective.goal) for index, objective in enumerate(view.objectives)]
        scatter = np.array([rows[index].scatter or [0.0] * raw.shape[1] for index in measured], dtype=np.float64)
        return cls(
            x=view.pool.encoder.matrix([row.assignment for row in rows]),
            crashed=np.array([float(row.values is None) for row in rows]),
            values=np.stack(columns, axis=1),
            broken=broken.reshape(len(measured), constraints),
            scatter=scatter.reshape(raw.shape) / np.where((raw > 0).all(axis=0), np.abs(raw) + 1e-300, 1.0),
            whole=np.array([rows[index].whole for index in measured], dtype=np.bool_),
            accept=_logarithms([rows[index].accept for index in measured]) if view.pool.encoder.drafts else None,
            per_token=np.array([metric_of(objective.metric).name in PER_TOKEN for objective in view.objectives]),
            measured=measured,
        )


def _logarithms(lengths: Sequence[float | None]) -> Array | None:
    """Return logarithms of accept lengths; None if one is missing, or no launch was sped up by drafts."""
    known = [length for length in lengths if length is not None]
    found = np.log(np.maximum(known, 1.0))
    return found if len(known) == len(lengths) and found.any() else None


def _cost(column: Array, goal: str) -> Array:
    """Speeds multiply, so their logarithms add up; what is not positive stays as it is."""
    scaled = np.log(column) if (column > 0).all() else column
    return scaled if goal == "min" else -scaled


def key_of(assignment: Assignment) -> str:
    """Return the identity of a point."""
    return canonical(assignment)


def seed_of(*parts: int) -> int:
    """Return a 32-bit seed that differs for every tuple of numbers."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def unlike(view: View, wanted: Sequence[Assignment]) -> Assignment | None:
    """Return the first point that was neither launched nor is taken."""
    for assignment in wanted:
        key = key_of(assignment)
        if key in view.pool.index and key not in view.seen and key not in view.taken:
            return assignment
    return None
