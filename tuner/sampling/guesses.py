"""How far a prior's guesses are believed, judged by what was measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tuner.sampling.encode import Array

LEAST = 4  # measurements before a guess can be judged
BELIEF = 4.0  # measurements that the slope of 1 weighs as much as
EXPLAINED = 0.5  # share of the variance that a guess must explain to be kept


@dataclass(frozen=True)
class Calibrated:
    """What trials say about a guess: costs are about `offset + slope × guess`. A slope of 0: it is not used."""

    slope: float
    explained: float

    @property
    def kept(self) -> bool:
        """Whether the guess is used."""
        return self.slope > 0


def calibrate(guess: Array, cost: Array) -> Calibrated:
    """Fit the slope of measured costs over guesses, both logarithms, shrunk towards 1.

    With fewer than four measurements the guess is taken as it is; it is dropped when, with a free offset, it leaves
    more than half of the variance, and where it is unknown.
    """
    if not np.isfinite(guess).all():
        return Calibrated(0.0, 0.0)
    if len(cost) < LEAST:
        return Calibrated(1.0, 1.0)
    x, y = guess - guess.mean(), cost - cost.mean()
    weight = BELIEF * float(np.mean(x * x)) + 1e-12
    slope = float((x @ y + weight) / (x @ x + weight))
    total = float(y @ y)
    left = float(((y - slope * x) ** 2).sum())
    explained = 1 - left / total if total > 0 else 0.0
    return Calibrated(slope if explained >= EXPLAINED and slope > 0 else 0.0, explained)
