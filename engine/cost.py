"""What a verify round costs by its rows, and how large a tree that makes worth verifying. Pure.

CaDDTree (arXiv 2606.01813): with the nodes ordered by path probability, expected tokens grow ever slower while the
time of verifying grows ever faster, so tokens per second has one maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CostTable:
    """Measured at start-up: seconds of a draft forward, and of verifying so many rows (ascending)."""

    propose: float
    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def verify(self, rows: Sequence[int]) -> Tensor:
        """Return seconds for row counts, [len(rows)] float64: interpolated, and along the last slope beyond."""
        known = torch.tensor(self.rows, dtype=torch.float64)
        cost = torch.tensor(self.seconds, dtype=torch.float64)
        wanted = torch.tensor(rows, dtype=torch.float64)
        if len(self.rows) == 1:
            return cost[0] * wanted / known[0]
        right = torch.searchsorted(known, wanted).clamp(1, len(self.rows) - 1)
        left = right - 1
        slope = (cost[right] - cost[left]) / (known[right] - known[left])
        return cost[left] + slope * (wanted - known[left])


def best_nodes(log_weights: Tensor, table: CostTable) -> int:
    """Return the tree size, the same for all requests, that maximises expected tokens per second of the round.

    Args:
        log_weights: [R, nodes + 1] log-probability of every path, best first, the root's 0.
    """
    requests, rows = log_weights.shape
    # Expected tokens of a tree: the bonus token, and each node with the probability of its path.
    tokens = log_weights.exp().cumsum(dim=1).sum(dim=0).cpu()
    seconds = table.propose + table.verify([requests * (nodes + 1) for nodes in range(rows)])
    return int((tokens / seconds).argmax())


def smooth(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return measured costs made non-decreasing: more rows never cost less, whatever the noise."""
    made: list[float] = []
    for each in seconds:
        made.append(max([each, *made[-1:]]))
    return tuple(made)
