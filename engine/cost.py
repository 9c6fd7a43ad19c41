"""What a round costs by its rows, and how large a tree that makes worth verifying. Pure.

CaDDTree (arXiv 2606.01813): grow the tree, best path first, while expected tokens per second rises. Each node adds
less than the one before; where the measured time is not convex the rate can fall and rise again, so growing ends
when no larger tree can have a better rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
# Shares by which the largest tree's round may be longer than the smallest tree's and than one without a tree, and it
# is still taken unseen: asking costs as much.
FLAT, FLAT_BESIDE_NONE = 0.02, 0.05


@dataclass(frozen=True)
class CostTable:
    """Measured at start-up, in seconds.

    `requests`: batch sizes, ascending; `rows`: rows a request, ascending, from 1. `draft[i]`: all of a round but
    verifying, at requests[i]. `verify[i][j]`: verifying rows[j] rows of each of requests[i] requests; large batches
    stop at fewer rows.
    """

    requests: tuple[int, ...]
    rows: tuple[int, ...]
    draft: tuple[float, ...]
    verify: tuple[tuple[float, ...], ...]

    @classmethod
    def of(
        cls,
        requests: Sequence[int],
        rows: Sequence[int],
        draft: Sequence[float],
        verify: Sequence[Sequence[float]],
    ) -> CostTable:
        """Return the table of measured seconds; see `rising`, which holds along the rows and along the requests."""
        times = np.full((len(requests), len(rows)), np.inf)
        for own, measured in zip(times, verify, strict=True):
            own[: len(measured)] = measured
        times = rising(rising(times, axis=0), axis=1)
        return cls(
            tuple(requests),
            tuple(rows),
            tuple(rising(np.asarray(draft), axis=0).tolist()),
            tuple(tuple(own[: len(each)].tolist()) for own, each in zip(times, verify, strict=True)),
        )

    @lru_cache(maxsize=256)  # noqa: B019 - one table a server
    def curve(self, requests: int, nodes: int) -> Curve:
        """Return what rounds of `requests` requests cost by the nodes of their trees, 0 … `nodes`.

        A tree counts as the next larger measured one, so that trees end at measured sizes: kernels prepare for every
        row count that they meet, and few counts are met again soonest. Between measured batches, and where large
        ones were not measured, cost is linear.
        """
        sizes = np.array([*self.rows, max(nodes + 1, self.rows[-1])], dtype=np.float64)
        wanted = sizes[np.searchsorted(sizes, np.arange(1, nodes + 2))]
        by_batch = [
            draft + _line(wanted, self.rows[: len(verify)], verify)
            for draft, verify in zip(self.draft, self.verify, strict=True)
        ]
        at = np.array([float(requests)])
        seconds = [float(_line(at, self.requests, column)[0]) for column in zip(*by_batch, strict=True)]
        return Curve.of(rising(np.asarray(seconds), axis=0).tolist())


@dataclass(frozen=True)
class Curve:
    """`seconds[n]`: a round with n nodes a request. `slopes[n]`: least seconds a node that any larger tree adds."""

    seconds: tuple[float, ...]
    slopes: tuple[float, ...]

    @property
    def flat(self) -> bool:
        """Whether all sizes cost nearly the same, so that the largest may be taken without asking which is best."""
        none, *trees = self.seconds
        return bool(trees) and trees[-1] <= min((1 + FLAT) * trees[0], (1 + FLAT_BESIDE_NONE) * none)

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Curve:
        """Return the curve of these costs, which do not fall."""
        slopes = [
            min(((later - here) / step for step, later in enumerate(seconds[nodes + 1 :], 1)), default=np.inf)
            for nodes, here in enumerate(seconds)
        ]
        return cls(tuple(seconds), tuple(slopes))


def best_size(gains: Iterator[float], requests: int, curve: Curve) -> int:
    """Return the nodes a request that maximise expected tokens per second of a round.

    Args:
        gains: expected tokens that each further node adds, all requests together, never more than the one before;
            as few are read as decide it.
        requests: each yields one token, the bonus, without any node.
    """
    tokens = float(requests)
    best, size = tokens / curve.seconds[0], 0
    for nodes, gain in enumerate(gains, 1):
        tokens += gain
        rate = tokens / curve.seconds[nodes]
        if rate > best:
            best, size = rate, nodes
        # From here on a node adds at most `gain` tokens and at least the slope's seconds.
        if gain <= best * curve.slopes[nodes]:
            break
    return size


def rising(seconds: Array, axis: int) -> Array:
    """Return measured costs made non-decreasing: noise only ever adds, so what more work costs, less costs at most."""
    least: Array = np.flip(np.minimum.accumulate(np.flip(seconds, axis), axis=axis), axis)
    return least


def _line(wanted: Array, known: Sequence[int], values: Sequence[float]) -> Array:
    """Return values at `wanted`, linear between known points and along the last slope beyond."""
    x, y = np.asarray(known, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if len(x) == 1:
        x, y = np.array([0.0, x[0]]), np.array([0.0, y[0]])
    right = np.searchsorted(x, wanted).clip(1, len(x) - 1)
    slope = (y[right] - y[right - 1]) / (x[right] - x[right - 1])
    line: Array = y[right - 1] + slope * (wanted - x[right - 1])
    return line
