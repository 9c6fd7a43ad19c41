"""Assignments as vectors: what the surrogate sees of a conditional space.

A number becomes one coordinate in [0, 1], on a logarithmic scale where the range spans decades; a word becomes one
coordinate per choice. A domain that is inactive sits in the middle: what sets such points apart is the coordinate
of the choice that switched it off. All coordinates of a domain share one length scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.records import canonical
from tuner.sampling.gp import Knobs
from tuner.space.domains import Choices, Domain, FloatRange, IntRange

Array = NDArray[np.float64]
LOG_FROM = 4.0  # a positive range is logarithmic when its ends differ by this factor
MIDDLE = 0.5
DRAFT, LIMITS, DEPTH = "draft.", "memory.", "draft.layers"


@dataclass(frozen=True)
class Encoder:
    """Turns assignments of these domains into rows of a matrix."""

    domains: tuple[Domain, ...]

    @property
    def groups(self) -> tuple[int, ...]:
        """The domain of every coordinate."""
        return tuple(index for index, domain in enumerate(self.domains) for _ in range(width(domain)))

    @property
    def drafts(self) -> tuple[int, ...]:
        """The domains that accept length depends on."""
        return tuple(index for index, domain in enumerate(self.domains) if domain.path.startswith(DRAFT))

    @property
    def knobs(self) -> Knobs:
        """What is known of the domains: limits on memory and on what runs at once matter only where they are hit, and
        no kernel sees them; a deeper draft runs more of the same kernels."""
        minor = tuple(domain.path.startswith(LIMITS) for domain in self.domains)
        return Knobs(
            minor, tuple(not (domain.path.startswith(LIMITS) or domain.path == DEPTH) for domain in self.domains)
        )

    def matrix(self, assignments: Sequence[Mapping[str, Any]]) -> Array:
        """Return the coordinates, shape (assignments, coordinates)."""
        columns = [self._column(domain, assignments) for domain in self.domains]
        return np.concatenate(columns, axis=1) if columns else np.zeros((len(assignments), 0))

    @staticmethod
    def _column(domain: Domain, assignments: Sequence[Mapping[str, Any]]) -> Array:
        made = np.full((len(assignments), width(domain)), MIDDLE)
        known: dict[str, Array] = {}
        for row, assignment in enumerate(assignments):
            if domain.path in assignment:
                value = assignment[domain.path]
                key = value if isinstance(value, str) else repr(value)
                if key not in known:
                    known[key] = coordinates(domain, value)
                made[row] = known[key]
        return made


def numeric(domain: Domain) -> bool:
    """Whether a domain's values lie on a line."""
    return not isinstance(domain, Choices) or domain.ordered or _two_numbers(domain)


def _two_numbers(domain: Choices) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in domain.values)


def width(domain: Domain) -> int:
    """Return how many coordinates a domain takes."""
    return len(domain) if isinstance(domain, Choices) and not numeric(domain) else 1


def coordinates(domain: Domain, value: Any) -> Array:
    """Return the coordinates of one value."""
    if isinstance(domain, Choices) and not numeric(domain):
        given = canonical(value)
        # Two different words are as far apart as the two ends of a range.
        return np.array([math.sqrt(0.5) * (canonical(choice) == given) for choice in domain.values])
    if isinstance(domain, Choices):
        low, high = min(domain.values), max(domain.values)
        log = low > 0 and high / low >= LOG_FROM
    elif isinstance(domain, IntRange | FloatRange):
        low, high = domain.low, domain.high
        log = domain.log or (low > 0 and high / low >= LOG_FROM)
    return np.array([_share(float(value), float(low), float(high), log)])


def _share(value: float, low: float, high: float, log: bool) -> float:
    if high <= low:
        return MIDDLE
    if log:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)
