"""A roofline cost model as a first guess of every point, calibrated by the trials, dropped when it errs.

Analytic models of serving mislead as answers (errors of 4.6× are on record) and help as hints: they know that weights
are read once a round and that rows cost products. So the guess is never believed as a level, only as a shape: the
surrogate models what is left of the measurements after the guess, times a slope fitted to them, is taken off
(`tuner.sampling.guesses`). The slope is 0 as soon as the guess explains too little of what was measured, and the
search goes on without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.config import DFlashDraft, EngineConfig, draft_folder, target_folder
from engine.errors import EngineError
from engine.estimate import (
    TYPICAL,
    DraftShape,
    Machine,
    ModelShape,
    RoundEstimate,
    read_draft_shape,
    read_shape,
    round_time,
)
from tuner.sampling.base import Pool
from tuner.space import Objective


@dataclass(frozen=True)
class Roofline:
    """Guesses of one model pair on one machine."""

    shape: ModelShape
    draft: DraftShape | None
    machine: Machine

    @classmethod
    def of(cls, config: EngineConfig, drafted: EngineConfig | None, machine: Machine) -> Roofline:
        """Read the shapes.

        Args:
            config: any configuration of the study.
            drafted: one that speculates, None when the space has none.

        Raises:
            EngineError: the models are not readable here.
        """
        drafts = [d for d in drafted.drafts if isinstance(d, DFlashDraft)] if drafted is not None else []
        draft = read_draft_shape(draft_folder(drafted, drafts[0])) if drafted is not None and drafts else None
        return cls(read_shape(target_folder(config)), draft, machine)

    def guess(self, config: EngineConfig, objective: Objective, level: int) -> float:
        """Return the logarithm of the objective's cost, NaN where the roofline says nothing of this metric."""
        estimate = self._round(config, level)
        if estimate is None:
            return math.nan
        sign = 1.0 if objective.goal == "min" else -1.0
        if objective.metric.startswith("tpot_ms"):
            return sign * math.log(1e3 * estimate.seconds / estimate.accept_length)
        if objective.metric.startswith("output_tok_s"):
            return sign * math.log(estimate.tokens_per_second)
        return math.nan

    def length(self, config: EngineConfig) -> float:
        """Return the logarithm of the accept length, NaN where the roofline knows nothing."""
        estimate = self._round(config, 1)
        return math.nan if estimate is None else math.log(estimate.accept_length)

    def _round(self, config: EngineConfig, level: int) -> RoundEstimate | None:
        try:
            return round_time(config, self.shape, self.draft, self.machine, running=level, efficiency=TYPICAL)
        except EngineError:
            return None  # bandwidth unknown, or no drafter: no guess, and calibrate() drops it


def with_guesses(pool: Pool, roofline: Roofline, objectives: Sequence[Objective]) -> Pool:
    """Return the pool with a guess of every point: for each objective, and of its accept length."""
    guesses = np.full((len(pool.assignments), len(objectives) + 1), np.nan)
    levels = [objective.level(pool.space.levels) for objective in objectives]
    for row, assignment in enumerate(pool.assignments):
        config = pool.space.assemble(assignment)
        if isinstance(config, EngineConfig):
            for column, objective in enumerate(objectives):
                guesses[row, column] = roofline.guess(config, objective, levels[column])
            guesses[row, -1] = roofline.length(config)
    return replace(pool, guesses=guesses)


def guessed(pool: Pool, machine: Machine) -> Pool | None:
    """Return the pool with guesses for its space's objectives; None where the roofline knows nothing: the models'
    shapes or the machine's speed are unknown, or no objective is one of its."""
    configs = (pool.space.assemble(assignment) for assignment in pool.assignments)
    known = [config for config in configs if isinstance(config, EngineConfig)]
    drafted = next((c for c in known if any(isinstance(draft, DFlashDraft) for draft in c.drafts)), None)
    if not known or machine.bandwidth is None:
        return None
    try:
        made = with_guesses(pool, Roofline.of(known[0], drafted, machine), pool.space.file.objectives)
    except EngineError:
        return None  # a hub name, say: its shape is not on this machine
    return made if made.guesses is not None and np.isfinite(made.guesses[:, :-1]).any() else None
