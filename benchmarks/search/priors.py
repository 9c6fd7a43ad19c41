"""Priors for simulated studies: a right one, and one that misleads."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tuner.sampling import Pool, seed_of
from tuner.simulate import Game


def guessing(of: Game, *, wrong: bool, seed: int) -> Pool:
    """Return the game's pool with a prior. Right: the truth, 15 % off at random at each point. Wrong: off by up to
    4.6×, as the knobs go, so that what is fast looks slow."""
    rng = np.random.default_rng(seed_of(seed, 77))
    rows = of.table.rows
    truths = [of.truth.objective_costs(row) for row in rows]
    known = np.array([cost for cost in truths if cost is not None])
    spread = np.log(np.abs(known))
    signs = np.sign(known[0])
    guesses = np.empty((len(rows), known.shape[1]))
    for index, cost in enumerate(truths):
        # Of a point that crashes a cost model knows as little as of the crash: it says what it says of the average.
        level = np.log(np.abs(cost)) if cost is not None else spread.mean(axis=0)
        if wrong:
            center = spread.mean(axis=0)
            flipped = np.clip(-(level - center) * 1.5, -math.log(4.6), math.log(4.6))
            level = level + flipped
        guesses[index] = signs * (level + 0.15 * rng.standard_normal(known.shape[1]))
    return replace(of.pool, guesses=guesses)
