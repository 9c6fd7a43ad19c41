"""What the costs of points are expected to be: the time of a round and the accept length are modelled apart.

A token's time is the time of a round over the tokens it brings, the accept length, which every server tells. The
logarithms are a difference of two functions that are each simpler than it: accept length depends on the draft alone
and grows with it, a round's time grows with rows and layers. Each is learnt from far fewer launches than the valley
that their ratio is. Without accept lengths, the costs are modelled as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.sampling.base import Costs
from tuner.sampling.encode import Array, Encoder
from tuner.sampling.gp import USUAL, Prior, Rows, fit

ACCEPT = Prior(length=(0.7, 1.0), noise=(-7.0, 1.5))


@dataclass(frozen=True)
class Forecast:
    """Means and standard deviations of points, how far each may be from anything launched (`Gp.compare`), and the
    means of what was launched; each (points or launches, objectives). `noise`: what one launch scatters beyond what is
    known of it, (objectives,)."""

    means: Array
    sds: Array
    apart: Array
    told: Array
    noise: Array

    def less(self, other: Forecast, where: NDArray[np.bool_]) -> Forecast:
        """Return the forecast of a difference for some of the objectives, the two being independent."""
        return Forecast(
            self.means - other.means * where,
            np.hypot(self.sds, other.sds * where),
            np.hypot(self.apart, other.apart * where),
            self.told - other.told * where,
            np.hypot(self.noise, other.noise * where),
        )


def forecast(encoder: Encoder, costs: Costs, x: Rows, prior: Prior = USUAL) -> Forecast:
    """Return what is expected of points; `prior` is of the costs, or of the times of rounds where these are told."""
    known = costs.x[list(costs.measured)]
    lengths = costs.accept
    times = costs.values if lengths is None else costs.values + lengths[:, None] * costs.per_token
    models = [
        fit(known, column, encoder.groups, prior=prior, scatter=spread, knobs=encoder.knobs)
        for column, spread in zip(times.T, costs.scatter.T, strict=True)
    ]
    means, sds, apart = (np.stack(each, axis=1) for each in zip(*(m.compare(x) for m in models), strict=True))
    told = np.stack([model.predict(known)[0] for model in models], axis=1)
    found = Forecast(means, sds, apart, told, np.array([model.noise_sd for model in models]))
    if lengths is None:
        return found
    return found.less(accepted(encoder, known, lengths, x), costs.per_token)


def accepted(encoder: Encoder, known: Array, lengths: Array, x: Rows) -> Forecast:
    """Return what logarithm of the accept length is expected of points, as of a single objective.

    Args:
        encoder: of a space that has drafts to choose from.
        known: coordinates of launches, (launches, coordinates).
        lengths: logarithms of their accept lengths, (launches,).
        x: the points.
    """
    domains = encoder.drafts
    columns = np.isin(encoder.groups, domains)
    groups = [domains.index(group) for group in encoder.groups if group in domains]
    different, back = np.unique(np.stack([x.which[i] for i in domains], axis=1), axis=0, return_inverse=True)
    drafts = Rows(tuple(x.levels[i] for i in domains), tuple(different.T), len(different))
    model = fit(known[:, columns], lengths, groups, prior=ACCEPT)
    means, sds, apart = (each[back.ravel(), None] for each in model.compare(drafts))
    told, _ = model.predict(known[:, columns])
    return Forecast(means, sds, apart, told[:, None], np.array([model.noise_sd]))
