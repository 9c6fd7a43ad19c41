"""Samplers without a model, to compare with: an even spread, one by one in the file's order, and hill climbing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from tuner.sampling.base import Costs, Proposal, Repeats, View, key_of, seed_of, unlike
from tuner.sampling.design import sobol_points
from tuner.space import Assignment, FloatRange, Space


@dataclass(frozen=True)
class _Plain:
    kind: ClassVar[str]
    repeats: ClassVar[Repeats] = "never"
    forgets_failures: ClassVar[bool] = False

    def starting_after(self, launches: int) -> Self:
        """Return this sampler: nothing is modelled."""
        return self


@dataclass(frozen=True)
class Sobol(_Plain):
    """Sobol's sequence, scrambled by the study's seed."""

    kind: ClassVar[str] = "sobol"

    def propose(self, view: View) -> Proposal | None:
        """Return the next new point of the sequence."""
        seed = seed_of(view.pool.space.file.study.seed)
        found = unlike(view, sobol_points(view.pool.space, seed, 2048))
        return None if found is None else Proposal(found)


@dataclass(frozen=True)
class Grid(_Plain):
    """Every point in the order of the file."""

    kind: ClassVar[str] = "grid"

    def propose(self, view: View) -> Proposal | None:
        """Return the first new point."""
        found = unlike(view, view.pool.assignments)
        return None if found is None else Proposal(found)


@dataclass(frozen=True)
class Hill(_Plain):
    """From the best point so far, by one objective after the other, to a random untried neighbour."""

    kind: ClassVar[str] = "hill"
    startup: int = 5

    def propose(self, view: View) -> Proposal | None:
        """Return an untried neighbour of the best point; a random point when it has none."""
        rng = random.Random(view.seed)
        measured = [o for o in view.observations if o.values is not None and all(b <= 0 for b in o.broken)]
        if len(view.observations) >= self.startup and measured:
            costs = Costs.of(view).values
            rows = [o for o in view.observations if o.values is not None]
            axis = view.number % costs.shape[1]
            order = sorted(range(len(rows)), key=lambda row: float(costs[row, axis]))
            best = next(rows[row] for row in order if rows[row] in measured)
            around = list(neighbours(view.pool.space, best.assignment))
            rng.shuffle(around)
            found = unlike(view, around)
            if found is not None:
                return Proposal(found)
        drawn = [view.pool.assignments[rng.randrange(len(view.pool.assignments))] for _ in range(50)]
        found = unlike(view, drawn)
        return None if found is None else Proposal(found)


def neighbours(space: Space, assignment: Assignment) -> Iterator[Assignment]:
    """Yield the points that differ in one domain: the next value of a range, any other word.

    Domains that a change switches on take their first value.
    """
    for domain in space.domains:
        if domain.path not in assignment or isinstance(domain, FloatRange):
            continue
        values = list(domain.values)
        here = values.index(assignment[domain.path])
        for there in {here - 1, here + 1} if len(values) > 3 else set(range(len(values))) - {here}:
            if 0 <= there < len(values):
                changed: Assignment = {}
                for other in space.domains:
                    if other.active(changed):
                        same = values[there] if other is domain else assignment.get(other.path)
                        first = other.low if isinstance(other, FloatRange) else other.values[0]
                        changed[other.path] = first if same is None else same
                if key_of(changed) != key_of(assignment):
                    yield changed
