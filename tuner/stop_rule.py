"""When more launches will not pay: the gain in hypervolume that the model still expects. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuner.sampling.base import Sampler, View
from tuner.sampling.surrogate import Surrogate

LEAST_GAIN = 0.005  # of the hypervolume reached
PATIENCE = 5  # questions in a row


@dataclass(frozen=True)
class Outlook:
    """What the best next launch is expected to add, as a share of the hypervolume reached (logarithms of values)."""

    gain: float


def outlook(view: View, sampler: Sampler) -> Outlook | None:
    """Return the outlook after what was observed; None before there is a model, or for a sampler without one."""
    measured = [observation for observation in view.observations if observation.values is not None]
    if not isinstance(sampler, Surrogate) or len(measured) < sampler.startup:
        return None
    allowed = sampler.allowed(view)
    if not len(allowed):
        return Outlook(0.0)
    promise = sampler.promise(view, allowed)
    return Outlook(float(np.max(promise.expected(promise.gain()))))


def should_stop(gains: Sequence[float | None], least: float = LEAST_GAIN, patience: int = PATIENCE) -> str | None:
    """Return why a search should end, None when it should go on.

    It ends when each of the last launches, and the next, was expected to add less than `least` hypervolume.
    `gains`: of every launch in their order and of the next; None is unknown.
    """
    last = [gain for gain in gains[-patience:] if gain is not None]
    if len(last) < patience or max(last) >= least:
        return None
    return f"each of the last {patience} launches was expected to add less than {least:.1%} hypervolume"
