"""Priors for simulated studies of the DFlash space: a right one, and one that misleads.

What a cost model says of a launch errs as its constants do: alike wherever the same constant counts. Of crashes it
knows nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from benchmarks.search.surfaces import Machine, dflash_curve
from engine.config import EngineConfig
from tuner.sampling import Pool, seed_of
from tuner.sampling.encode import Array
from tuner.simulate import Game

ERROR = 0.15  # of every constant of a right prior, the standard deviation of its logarithm
WRONG = 4.6  # by so much a misleading one errs


def guessing(of: Game, *, wrong: bool, seed: int) -> Pool:
    """Return the game's pool with a prior. Right: the cost model that made the surface, each of its constants 15 % off
    at random. Wrong: off by up to 4.6× as well, as the knobs go, so that what is fast looks slow,
    and a long accept length short."""
    rng = np.random.default_rng(seed_of(seed, 77))
    guesses = guessed(of, perturbed(Machine(), rng))
    if wrong:
        center = guesses.mean(axis=0)
        guesses = guesses + np.clip(-(guesses - center) * 1.5, -math.log(WRONG), math.log(WRONG))
    return replace(of.pool, guesses=guesses)


def perturbed(machine: Machine, rng: np.random.Generator) -> Machine:
    """Return a machine whose constants are taken for others; of acceptance, the share that is rejected."""

    def off(value: float) -> float:
        return value * math.exp(ERROR * rng.standard_normal())

    times = {name: off(getattr(machine, name)) for name in ("weights", "row", "host", "replay", "layer")}
    rejected = off(1.0)
    return replace(machine, **times, rates=tuple(1 - (1 - rate) * rejected for rate in machine.rates))


def guessed(of: Game, machine: Machine) -> Array:
    """Return the logarithm of what a machine's constants say of each point: costs by objective, and accept lengths."""
    objectives = [(each, each.level(of.space.levels)) for each in of.space.file.objectives]
    guesses = np.empty((len(of.table.rows), len(objectives) + 1))
    for index, row in enumerate(of.table.rows):
        curve = dflash_curve(EngineConfig.model_validate(row.record.config), machine)
        for column, (objective, level) in enumerate(objectives):
            sign = 1.0 if objective.goal == "min" else -1.0
            guesses[index, column] = sign * math.log(curve[level][objective.metric])
        guesses[index, -1] = math.log(curve[1]["accept_length"])
    return guesses
