"""Samplers, one class each, told apart by `kind`; see base.Sampler for what they share."""

from tuner.sampling.base import Observation, Pool, Proposal, Sampler, View, key_of, seed_of
from tuner.sampling.optuna_kinds import Gp, Nsga2, Random, Tpe, TpeFail
from tuner.sampling.plain import Grid, Hill, Sobol
from tuner.sampling.surrogate import Surrogate

DEFAULT: Sampler = Surrogate()
SAMPLERS: dict[str, Sampler] = {
    sampler.kind: sampler for sampler in (DEFAULT, Gp(), Tpe(), TpeFail(), Nsga2(), Random(), Sobol(), Grid(), Hill())
}

__all__ = [
    "DEFAULT",
    "SAMPLERS",
    "Observation",
    "Pool",
    "Proposal",
    "Sampler",
    "View",
    "key_of",
    "seed_of",
]
