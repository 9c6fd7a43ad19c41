"""How much a candidate is expected to add: closed forms on arrays of costs, where lower is better."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

Array = NDArray[np.float64]


def below(limit: Array | float, mean: Array, sd: Array) -> Array:
    """Return E[max(0, limit − Y)] of normal Y: the expected improvement (Jones et al. 1998)."""
    gap = limit - mean
    z = gap / sd
    return np.asarray(gap * ndtr(z) + sd * np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi))


def hypervolume(front: Array, reference: Array) -> float:
    """Return the volume that costs (n, 1 or 2) dominate below the reference."""
    inside = front[(front < reference).all(axis=1)]
    if not len(inside):
        return 0.0
    if inside.shape[1] == 1:
        return float(reference[0] - inside.min())
    first, ceilings, ends = _strips(inside, reference)
    return float(((ends - first) * (reference[1] - ceilings)).sum())


def _strips(points: Array, reference: Array) -> tuple[Array, Array, Array]:
    """Return (starts, lowest second cost, ends) of the staircase, by rising first cost."""
    order = np.lexsort((points[:, 1], points[:, 0]))
    ordered = points[order]
    lower = np.concatenate(([True], ordered[1:, 1] < np.minimum.accumulate(ordered[:, 1])[:-1]))
    kept = ordered[lower]
    return kept[:, 0], kept[:, 1], np.append(kept[1:, 0], reference[0])


def expected_improvement(front: Array, reference: Array, mean: Array, sd: Array) -> Array:
    """Return the expected gain in hypervolume of each candidate, for independent normal costs.

    One cost: expected improvement. Two: the exact expected hypervolume improvement, a sum over the strips of the
    staircase (Emmerich et al. 2011; Yang et al. 2019). Shapes: front (f, m), mean and sd (n, m).
    """
    inside = front[(front < reference).all(axis=1)]
    if mean.shape[1] == 1:
        best = inside.min() if len(inside) else reference[0]
        return below(float(best), mean[:, 0], sd[:, 0])
    if not len(inside):
        return below(reference[0], mean[:, 0], sd[:, 0]) * below(reference[1], mean[:, 1], sd[:, 1])
    starts, lows, _ = _strips(inside, reference)
    lefts = np.append(starts, reference[0])  # right edge of each strip: up to the next point of the front
    ceilings = np.append(reference[1], lows)
    gain = np.zeros(len(mean))
    before = np.zeros(len(mean))
    for edge, ceiling in zip(lefts, ceilings, strict=True):
        upto = below(float(edge), mean[:, 0], sd[:, 0])
        gain += (upto - before) * below(float(ceiling), mean[:, 1], sd[:, 1])
        before = upto
    return gain
