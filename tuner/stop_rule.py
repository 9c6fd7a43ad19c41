"""When more launches will not pay: the gain in hypervolume that the model still expects. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuner.sampling.acquisition import hypervolume
from tuner.sampling.base import Costs, View
from tuner.sampling.surrogate import Surrogate, reference_of

LEAST_GAIN = 0.005  # of the hypervolume reached
PATIENCE = 5  # questions in a row


@dataclass(frozen=True)
class Outlook:
    """What the best next launch is expected to add, as a share of the hypervolume reached (logarithms of values)."""

    gain: float

    @property
    def poor(self) -> bool:
        """Whether that is less than a launch should bring."""
        return self.gain < LEAST_GAIN


def outlook(view: View, sampler: Surrogate) -> Outlook | None:
    """Return the outlook after what was observed; None before there is a model."""
    measured = [observation for observation in view.observations if observation.values is not None]
    if len(measured) < sampler.startup:
        return None
    allowed = sampler.allowed(view)
    if not len(allowed):
        return Outlook(0.0)
    costs = Costs.of(view)
    feasible = (costs.broken <= 0).all(axis=1)
    good = costs.values[feasible] if feasible.any() else costs.values
    reached = hypervolume(good, reference_of(good))
    gain = float(np.max(sampler.score(view, allowed)))
    return Outlook(gain / reached if reached > 0 else float("inf"))


def should_stop(outlooks: Sequence[Outlook], patience: int = PATIENCE) -> str | None:
    """Return why a search should end, None when it should go on: every one of the last outlooks is poor."""
    last = outlooks[-patience:]
    if len(last) < patience or not all(each.poor for each in last):
        return None
    return f"the last {patience} launches were each expected to add less than {LEAST_GAIN:.1%} hypervolume"
