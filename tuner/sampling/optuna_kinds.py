"""Optuna's samplers, over the study that was told every record.

Each builds a fresh sampler seeded for one question. `Tpe` and `Gp` see crashes as violated constraints with the worst
values seen; the others are here to be compared with, as other tuners use them: crashes told as FAIL, and no look at
whether a point was launched before.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from tuner.sampling.base import Proposal, Repeats, View, unlike
from tuner.sampling.design import first_points
from tuner.suggest import parameters, suggest

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True)
class _Optuna(ABC):
    startup: int = 10
    kind: ClassVar[str]
    repeats: ClassVar[Repeats] = "never"
    forgets_failures: ClassVar[bool] = False

    def starting_after(self, launches: int) -> Self:
        """Return this sampler with another number of launches before it models anything."""
        return replace(self, startup=launches)

    def propose(self, view: View) -> Proposal | None:
        """Return what Optuna's sampler draws."""
        space = view.pool.space
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # experimental features, and unseen parameters of conditional spaces
            view.study.sampler = self.build(view)
            if self.repeats == "never" and len(view.observations) < self.startup // 2:
                first = unlike(view, list(first_points(space)))
                if first is not None:
                    view.study.enqueue_trial(parameters(space, first))
            trial = view.study.ask()
            return Proposal(suggest(trial, space), trial)

    @abstractmethod
    def build(self, view: View) -> optuna.samplers.BaseSampler:
        """Return the sampler for one question."""


@dataclass(frozen=True)
class Tpe(_Optuna):
    """Tree-structured Parzen estimators; parameters that occur together are modelled together."""

    kind: ClassVar[str] = "tpe"

    def build(self, view: View) -> optuna.samplers.BaseSampler:
        """Return the sampler for one question."""
        import optuna

        return optuna.samplers.TPESampler(
            multivariate=True, group=True, n_startup_trials=self.startup, seed=view.seed, constant_liar=True
        )


@dataclass(frozen=True)
class TpeFail(Tpe):
    """TPE that is told crashes as FAIL."""

    kind: ClassVar[str] = "tpe_fail"
    repeats: ClassVar[Repeats] = "blindly"
    forgets_failures: ClassVar[bool] = True

    def build(self, view: View) -> optuna.samplers.BaseSampler:
        """Return Optuna's default for several objectives."""
        import optuna

        return optuna.samplers.TPESampler(n_startup_trials=self.startup, seed=view.seed)


@dataclass(frozen=True)
class Gp(_Optuna):
    """Optuna's Gaussian process with constraints. It models the parameters that every trial has; needs torch."""

    kind: ClassVar[str] = "gp"

    def build(self, view: View) -> optuna.samplers.BaseSampler:
        """Return the sampler for one question."""
        import optuna

        return optuna.samplers.GPSampler(
            n_startup_trials=self.startup,
            seed=view.seed,
            deterministic_objective=False,
            warn_independent_sampling=False,
        )


@dataclass(frozen=True)
class Nsga2(_Optuna):
    """Optuna's genetic algorithm, population 20."""

    kind: ClassVar[str] = "nsga2"
    repeats: ClassVar[Repeats] = "blindly"
    forgets_failures: ClassVar[bool] = True

    def build(self, view: View) -> optuna.samplers.BaseSampler:
        """Return the sampler for one question."""
        import optuna

        return optuna.samplers.NSGAIISampler(population_size=20, seed=view.seed)


@dataclass(frozen=True)
class Random(_Optuna):
    """Uniform draws."""

    kind: ClassVar[str] = "random"
    repeats: ClassVar[Repeats] = "blindly"

    def build(self, view: View) -> optuna.samplers.BaseSampler:
        """Return the sampler for one question."""
        import optuna

        return optuna.samplers.RandomSampler(seed=view.seed)
