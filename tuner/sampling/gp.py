"""Gaussian-process regression in numpy: what a study of some hundred trials needs, without torch.

Kernel: Matérn 5/2 with one length scale per domain (Rasmussen & Williams 2006, eq. 4.17), once over all domains
together and once over each by itself, added up (Duvenaud et al. 2011): logarithms of speeds are mostly sums of what
each knob does, and a sum is learnt from few launches. Plus an effect for each set of shapes that kernels run with,
unlike those of its neighbours. Plus noise: known, and fitted.
Hyperparameters maximise the marginal likelihood times broad log-normal priors, by L-BFGS with exact gradients from
the priors' means: the same observations give the same model, in whatever order they came and whatever was fitted
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky, solve_triangular

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
ROOT5 = 5**0.5
JITTER = 1e-8
LEAST = 1e-12  # variance of a prediction
SAME = 1e-9  # squared distance of coordinates that are the same
BLOCK = 512  # candidates predicted at once: what fits a core's cache


@dataclass(frozen=True)
class Prior:
    """Means and spreads of the logarithms of hyperparameters, variances being of scaled targets: length scales (of
    domains that are minor, and of others), the variance of what domains do together, of what each does by itself, of
    what shapes do, and of the noise."""

    length: tuple[float, float] = (1.2, 1.4)
    minor: tuple[float, float] = (2.5, 1.4)
    signal: tuple[float, float] = (0.0, 1.0)
    own: tuple[float, float] = (-1.0, 1.0)
    shape: tuple[float, float] = (-2.5, 1.0)
    noise: tuple[float, float] = (-5.0, 1.5)

    def of(self, minor: Sequence[bool]) -> tuple[Array, Array]:
        """Return means and spreads of the vector that is fitted: length scales, signal, own, shape, noise."""
        lengths = [self.minor if each else self.length for each in minor]
        rows = np.array([*lengths, self.signal, self.own, self.shape, self.noise])
        return rows[:, 0], rows[:, 1]


# A search expects that kernels like some sizes better than their neighbours, or it would not look for them. To decide
# between points that were launched, this is believed as far as launches show it: else neighbours tell too little.
USUAL, ALIKE = Prior(), Prior(shape=(-5.0, 2.0))


@dataclass(frozen=True)
class Knobs:
    """What is known of domains before anything is measured, one flag each. `minor`: expected to matter little.
    `shapes`: changes the shapes that kernels run with, which may like some sizes better than those beside them."""

    minor: tuple[bool, ...]
    shapes: tuple[bool, ...]

    @classmethod
    def nothing(cls, domains: int) -> Knobs:
        """Nothing is known of so many domains."""
        return cls((False,) * domains, (False,) * domains)


@dataclass(frozen=True)
class Rows:
    """Rows to predict at, factored: a domain has few values, so what they contribute is computed once each."""

    levels: tuple[Array, ...]  # of each domain, (values, coordinates)
    which: tuple[Indices, ...]  # of each domain, the value of every row
    length: int

    def __len__(self) -> int:
        """How many rows."""
        return self.length

    def __getitem__(self, rows: slice | Indices) -> Rows:
        """Return some of the rows."""
        which = tuple(each[rows] for each in self.which)
        return Rows(self.levels, which, len(np.arange(self.length)[rows]))


def rows_of(x: Array, groups: Sequence[Indices]) -> Rows:
    """Return the rows of a matrix, factored by the coordinates of each domain."""
    found = [np.unique(x[:, group], axis=0, return_inverse=True) for group in groups]
    return Rows(tuple(levels for levels, _ in found), tuple(which.ravel() for _, which in found), len(x))


def members(groups: Sequence[int]) -> tuple[Indices, ...]:
    """Return the coordinates of each domain, given the domain of each coordinate."""
    owner = np.asarray(groups, dtype=np.intp)
    return tuple(np.flatnonzero(owner == group) for group in range(int(owner.max()) + 1 if len(owner) else 0))


@dataclass(frozen=True)
class Gp:
    """A fitted process; predictions are in the units of the targets."""

    x: Array  # (n, coordinates)
    groups: tuple[Indices, ...]  # coordinates of each domain
    lengths: Array  # length scale of every domain
    signal: float
    own: float
    shape: float  # variance of what a set of shapes does
    knobs: Knobs
    noise: float  # variance of an observation beyond what is known of it, in scaled units
    noises: Array  # variance of each observation, what is known of it included
    factor: Array  # lower Cholesky factor of the covariance
    weights: Array  # covariance⁻¹ · scaled targets
    mean: float
    spread: float

    def predict(self, x: Array | Rows) -> tuple[Array, Array]:
        """Return mean and standard deviation of the noise-free value at rows, as a matrix or as what `rows_of` made
        of one."""
        rows = x if isinstance(x, Rows) else rows_of(x, self.groups)
        means, variances = np.empty(len(rows)), np.empty(len(rows))
        for start in range(0, len(rows), BLOCK):
            part = slice(start, start + BLOCK)
            means[part], variances[part], _ = self._block(rows[part])
        return self.mean + self.spread * means, self.spread * np.sqrt(variances)

    def compare(self, x: Array | Rows) -> tuple[Array, Array, Array]:
        """Return what `predict` does, and how far each row may be from anything observed: the smallest standard
        deviation, given all observations, of its difference to the true value at one of them. It is near zero where a
        launch would only repeat another, in whatever knobs that do not matter it differs."""
        rows = x if isinstance(x, Rows) else rows_of(x, self.groups)
        means, variances, apart = (np.empty(len(rows)) for _ in range(3))
        inverse = solve_triangular(self.factor, np.eye(len(self.x)), lower=True, check_finite=False)
        # Given observations of f(X) with noise N (diagonal): cov(f(x), f(X)) = k(x, X) K⁻¹ N, var f(X) = N − N K⁻¹ N.
        own = self.noises - self.noises**2 * np.einsum("ij,ij->j", inverse, inverse)
        for start in range(0, len(rows), BLOCK):
            part = slice(start, start + BLOCK)
            means[part], variances[part], inner = self._block(rows[part])
            shared = self.noises[:, None] * (inverse.T @ inner)
            apart[part] = variances[part] + (own[:, None] - 2 * shared).min(axis=0)
        apart = np.sqrt(np.maximum(apart, LEAST))
        return self.mean + self.spread * means, self.spread * np.sqrt(variances), self.spread * apart

    def _block(self, rows: Rows) -> tuple[Array, Array, Array]:
        """Return scaled means and variances of rows, and their covariances with the observations, whitened."""
        cross = self._cross(rows)
        inner = solve_triangular(self.factor, cross.T, lower=True, check_finite=False)
        most = self.signal + self.own * len(self.groups) + self.shape
        return cross @ self.weights, np.maximum(most - np.einsum("ij,ij->j", inner, inner), LEAST), inner

    def _cross(self, rows: Rows) -> Array:
        """Return the covariance of rows with the observations, (rows, n)."""
        total = np.zeros((len(rows), len(self.x)))
        made = np.zeros_like(total)
        alike = np.full(total.shape, any(self.knobs.shapes))
        each = zip(self.groups, self.lengths, self.knobs.shapes, rows.levels, rows.which, strict=True)
        for group, length, shapes, levels, which in each:
            squared = distances(levels, self.x[:, group]) ** 2
            if shapes:
                alike &= (squared < SAME)[which]
            squared /= length**2
            total += squared[which]
            made += matern(np.sqrt(squared), self.own)[which]
        made += self.shape * alike
        return np.asarray(made + matern(np.sqrt(total), self.signal))

    @property
    def noise_sd(self) -> float:
        """Standard deviation of one observation, in the units of the targets."""
        return float(self.spread * np.sqrt(self.noise))


def distances(a: Array, b: Array) -> Array:
    """Return Euclidean distances between rows, shape (len(a), len(b))."""
    squared = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2 * a @ b.T
    return np.asarray(np.sqrt(np.maximum(squared, 0.0)))


def matern(r: Array, signal: float) -> Array:
    """Return the Matérn 5/2 covariance at scaled distances."""
    scaled = ROOT5 * r
    return np.asarray(signal * (1 + scaled + scaled**2 / 3) * np.exp(-scaled))


def fit(
    x: Array,
    y: Array,
    groups: Sequence[int],
    *,
    prior: Prior = USUAL,
    scatter: Array | None = None,
    center: float | None = None,
    knobs: Knobs | None = None,
) -> Gp:
    """Fit a process to observations.

    Args:
        x: coordinates, (n, c).
        y: targets, (n,).
        groups: the domain of each coordinate; a domain has one length scale.
        scatter: the standard deviation that each observation is known to have; noise that is fitted comes on top.
        center: what is expected far from data; default the mean.
        knobs: what is known of the domains.
    """
    from scipy.optimize import minimize  # slow to import, and a study that is only read fits nothing

    mean = float(y.mean()) if center is None else center
    spread = float(np.sqrt(np.mean((y - mean) ** 2))) or 1.0
    target = (y - mean) / spread
    known = np.zeros(len(y)) if scatter is None else (scatter / spread) ** 2
    coordinates = members(groups)
    knobs = knobs or Knobs.nothing(len(coordinates))
    pairs, priors = _Pairs.of(x, coordinates, knobs), prior.of(knobs.minor)
    found = minimize(
        _objective,
        priors[0],
        args=(pairs, target, known, priors),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 30},
    )
    theta = np.exp(np.clip(np.asarray(found.x), -12, 8))
    lengths, (signal, own, shape, noise) = theta[:-4], map(float, theta[-4:])
    shape *= pairs.shaped
    scaled = pairs.squared / lengths[:, None] ** 2
    shared = matern(np.sqrt(scaled.sum(0)), signal) + matern(np.sqrt(scaled), own).sum(0) + shape * pairs.alike
    most = signal + own * len(coordinates) + shape
    noises = known + noise + JITTER
    factor = cholesky(pairs.matrix(shared, most + noises), lower=True)
    weights = np.asarray(cho_solve((factor, True), target))
    return Gp(x, coordinates, lengths, signal, own, shape, knobs, noise, noises, factor, weights, mean, spread)


@dataclass(frozen=True)
class _Pairs:
    """What a fit needs of pairs of observations, each pair once."""

    where: tuple[Indices, Indices]  # (pairs,) each: the first and the second
    squared: Array  # (domains, pairs), squared distances
    alike: Array  # (pairs,), 1.0 where the shapes are the same
    shaped: bool  # whether shapes are modelled

    @classmethod
    def of(cls, x: Array, groups: Sequence[Indices], knobs: Knobs) -> _Pairs:
        """Return the pairs of rows, given the coordinates of each domain."""
        first, second = np.triu_indices(len(x), 1)
        difference = (x[first] - x[second]) ** 2
        squared = np.array([difference[:, group].sum(1) for group in groups]).reshape(len(groups), len(first))
        shapes = squared[np.array(knobs.shapes, dtype=np.bool_)]
        alike = (shapes < SAME).all(axis=0) & (len(shapes) > 0)
        return cls((first, second), squared, np.where(alike, 1.0, 0.0), len(shapes) > 0)

    def matrix(self, values: Array, diagonal: Array) -> Array:
        """Return the symmetric matrix of values of pairs."""
        made = np.zeros((len(diagonal), len(diagonal)))
        made[self.where] = values
        made += made.T
        made[np.diag_indices(len(diagonal))] = diagonal
        return made


def _objective(theta: Array, pairs: _Pairs, y: Array, known: Array, priors: tuple[Array, Array]) -> tuple[float, Array]:
    """Return the negative log posterior of log hyperparameters, and its gradient."""
    means, spreads = priors
    away = (theta - means) / spreads
    theta = np.clip(theta, -12, 8)
    signal, own, shape, noise = np.exp(theta[-4:])
    each = pairs.squared * np.exp(-2 * theta[:-4])[:, None]
    joint, single = ROOT5 * np.sqrt(each.sum(0)), ROOT5 * np.sqrt(each)
    decay, decays = np.exp(-joint), np.exp(-single)
    together = signal * (1 + joint + joint**2 / 3) * decay
    alone = own * ((1 + single + single**2 / 3) * decays).sum(0)
    most = signal + own * len(pairs.squared) + shape * pairs.shaped
    covariance = pairs.matrix(together + alone + shape * pairs.alike, most + known + noise + JITTER)
    factor = cholesky(covariance, lower=True, check_finite=False)
    inverse = cho_solve((factor, True), np.eye(len(y)), check_finite=False)
    alpha = inverse @ y
    value = 0.5 * float(y @ alpha) + float(np.log(np.diag(factor)).sum())
    outer = inverse - np.outer(alpha, alpha)
    twice, trace = outer[pairs.where], 0.5 * float(np.trace(outer))
    slope = signal * (5 / 3) * (1 + joint) * decay + own * (5 / 3) * (1 + single) * decays
    gradient = np.empty_like(theta)
    gradient[:-4] = np.einsum("gp,gp,p->g", slope, each, twice)
    gradient[-4] = float(twice @ together) + trace * signal
    gradient[-3] = float(twice @ alone) + trace * own * len(pairs.squared)
    gradient[-2] = shape * (float(twice @ pairs.alike) + trace * pairs.shaped)
    gradient[-1] = trace * noise
    return value + 0.5 * float(away @ away), gradient + away / spreads
