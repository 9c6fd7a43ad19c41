"""The points that are launched before anything can be modelled: defaults, corners, then a scrambled Sobol sequence."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from pydantic import BaseModel

from tuner.records import canonical
from tuner.sampling.encode import numeric
from tuner.space import Assignment, Choices, Domain, FloatRange, Space
from tuner.space.fields import resolve

SOBOL = 256


def first_points(space: Space) -> Iterator[Assignment]:
    """Yield the vendor's defaults, with each kind of draft there is, and the corners: everything small, everything
    large. The baseline is the study's own first launch."""
    kinds = _kinds(space)
    for kind in kinds:
        yield _walk(space, _default, kind)
    for kind in kinds[-1:]:
        yield _walk(space, _low, kind)
        yield _walk(space, _high, kind)


def sobol_points(space: Space, seed: int, count: int = SOBOL) -> list[Assignment]:
    """Return points spread evenly over the space (Sobol's sequence, Owen-scrambled by `seed`)."""
    from scipy.stats import qmc  # a second of imports, which commands that only read a study do not need

    if not space.domains:
        return [{}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # balance wants powers of two, which `count` need not be
        numbers = qmc.Sobol(len(space.domains), scramble=True, rng=np.random.default_rng(seed)).random(count)
    made: list[Assignment] = []
    for row in numbers:
        assignment: Assignment = {}
        for domain, share in zip(space.domains, row, strict=True):
            if domain.active(assignment):
                assignment[domain.path] = at_share(domain, float(share))
        made.append(assignment)
    return made


def at_share(domain: Domain, share: float) -> Any:
    """Return the value at a share in [0, 1) of a domain."""
    if isinstance(domain, FloatRange):
        if domain.log:
            return float(domain.low * (domain.high / domain.low) ** share)
        return domain.low + share * (domain.high - domain.low)
    return domain.values[min(len(domain) - 1, int(share * len(domain)))]


def _kinds(space: Space) -> list[str | None]:
    """Return the drafts to begin with: every speculative one, or None where the draft is not searched."""
    domain = next((d for d in space.domains if d.path == "draft.kind"), None)
    if not isinstance(domain, Choices):
        return [None]
    return [value for value in domain.values if value != "none"] or [None]


def _walk(space: Space, choose: Callable[[Domain], Any], kind: str | None) -> Assignment:
    assignment: Assignment = {}
    for domain in space.domains:
        if domain.active(assignment):
            fixed = kind is not None and domain.path == "draft.kind"
            assignment[domain.path] = kind if fixed else choose(domain)
    return assignment


def _default(domain: Domain) -> Any:
    """The field's default where it is among the choices, else the middle of numbers, else the first word."""
    default = resolve(domain.path)[0].default
    plain = default.model_dump(mode="json") if isinstance(default, BaseModel) else default
    if plain is ...:  # a field without a default, such as a policy's table
        plain = None
    for choice in domain.values if isinstance(domain, Choices) else ():
        if canonical(choice) == canonical(plain):
            return choice
    if not isinstance(domain, Choices) and domain.contains(plain):
        return plain
    return at_share(domain, 0.5) if numeric(domain) else at_share(domain, 0.0)


def _low(domain: Domain) -> Any:
    return at_share(domain, 0.0)


def _high(domain: Domain) -> Any:
    return domain.high if isinstance(domain, FloatRange) else domain.values[len(domain) - 1]
