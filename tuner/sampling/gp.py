"""Gaussian-process regression in numpy: what a study of some hundred trials needs, without torch.

Kernel: Matérn 5/2 with one length scale per domain (Rasmussen & Williams 2006, eq. 4.17), plus noise that may be
larger for some observations. Hyperparameters maximise the marginal likelihood times broad log-normal priors, by
L-BFGS with exact gradients from the priors' means: the same observations give the same model, in whatever order they
came and whatever was fitted before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize

Array = NDArray[np.float64]
ROOT5 = 5**0.5
JITTER = 1e-8
BLOCK = 4096  # candidates predicted at once


@dataclass(frozen=True)
class Prior:
    """Means and spreads of the logarithms of length scale, signal variance and noise variance (of scaled targets)."""

    length: tuple[float, float] = (0.4, 1.0)
    signal: tuple[float, float] = (0.0, 1.0)
    noise: tuple[float, float] = (-5.0, 1.5)


@dataclass(frozen=True)
class Gp:
    """A fitted process; predictions are in the units of the targets."""

    x: Array  # (n, coordinates)
    scales: Array  # length scale of every coordinate
    signal: float
    noise: float  # variance of an observation of weight 1, in scaled units
    factor: Array  # lower Cholesky factor of the covariance
    weights: Array  # covariance⁻¹ · scaled targets
    mean: float
    spread: float

    def predict(self, x: Array) -> tuple[Array, Array]:
        """Return mean and standard deviation of the noise-free value at the rows of `x`."""
        means, spreads = np.empty(len(x)), np.empty(len(x))
        for start in range(0, len(x), BLOCK):
            part = slice(start, start + BLOCK)
            cross = matern(distances(x[part] / self.scales, self.x / self.scales), self.signal)
            means[part] = cross @ self.weights
            inner = solve_triangular(self.factor, cross.T, lower=True, check_finite=False)
            spreads[part] = np.sqrt(np.maximum(self.signal - np.einsum("ij,ij->j", inner, inner), 1e-12))
        return self.mean + self.spread * means, self.spread * spreads

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
    prior: Prior = Prior(),
    loads: Array | None = None,
    center: float | None = None,
) -> Gp:
    """Fit a process to observations.

    Args:
        x: coordinates, (n, c).
        y: targets, (n,).
        groups: the domain of each coordinate; a domain has one length scale.
        loads: how much more variance than usual each observation's noise has; default 1.
        center: what is expected far from data; default the mean.
    """
    mean = float(y.mean()) if center is None else center
    spread = float(np.sqrt(np.mean((y - mean) ** 2))) or 1.0
    target = (y - mean) / spread
    extra = np.ones(len(y)) if loads is None else loads
    index = np.asarray(groups, dtype=np.intp)
    squared = [_squared(x[:, index == group]) for group in range(int(index.max()) + 1 if len(index) else 0)]
    start = np.array([prior.length[0]] * len(squared) + [prior.signal[0], prior.noise[0]])
    found = minimize(
        _objective, start, (squared, target, extra, prior), jac=True, method="L-BFGS-B", options={"maxiter": 30}
    )
    theta = np.clip(np.asarray(found.x), -12, 8)
    lengths, signal, noise = np.exp(theta[:-2]), float(np.exp(theta[-2])), float(np.exp(theta[-1]))
    scales = lengths[index] if len(index) else np.ones(0)
    covariance = matern(distances(x / scales, x / scales), signal) + np.diag(noise * extra + JITTER)
    factor = cholesky(covariance, lower=True)
    weights = np.asarray(cho_solve((factor, True), target))
    return Gp(x, scales, signal, noise, factor, weights, mean, spread)


def _squared(columns: Array) -> Array:
    difference = columns[:, None, :] - columns[None, :, :]
    return np.asarray((difference**2).sum(-1))


def _objective(theta: Array, squared: list[Array], y: Array, extra: Array, prior: Prior) -> tuple[float, Array]:
    """Return the negative log posterior of log hyperparameters, and its gradient."""
    theta = np.clip(theta, -12, 8)
    inverse = np.exp(-2 * theta[:-2])
    signal, noise = np.exp(theta[-2]), np.exp(theta[-1])
    r2 = np.zeros((len(y), len(y)))
    for each, weight in zip(squared, inverse, strict=True):
        r2 += weight * each
    scaled = ROOT5 * np.sqrt(r2)
    decay = np.exp(-scaled)
    kernel = signal * (1 + scaled + scaled**2 / 3) * decay
    covariance = kernel + np.diag(noise * extra + JITTER)
    factor = cholesky(covariance, lower=True, check_finite=False)
    inverse_covariance = cho_solve((factor, True), np.eye(len(y)), check_finite=False)
    alpha = inverse_covariance @ y
    value = 0.5 * float(y @ alpha) + float(np.log(np.diag(factor)).sum())
    outer = inverse_covariance - np.outer(alpha, alpha)
    slope = signal * (5 / 3) * (1 + scaled) * decay * outer
    gradient = np.empty_like(theta)
    for position, (each, weight) in enumerate(zip(squared, inverse, strict=True)):
        gradient[position] = 0.5 * float((slope * each).sum()) * weight
    gradient[-2] = 0.5 * float((outer * kernel).sum())
    gradient[-1] = 0.5 * noise * float((np.diag(outer) * extra).sum())
    means = np.array([prior.length[0]] * len(squared) + [prior.signal[0], prior.noise[0]])
    spreads = np.array([prior.length[1]] * len(squared) + [prior.signal[1], prior.noise[1]])
    away = (theta - means) / spreads
    return value + 0.5 * float(away @ away), gradient + away / spreads
