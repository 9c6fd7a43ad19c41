"""DDTree: the most probable continuations under DFlash's block distributions, as one tree to verify."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine import sampling, tree
from engine.cost import CostTable, best_size
from engine.drafters.base import Proposal
from engine.drafters.dflash import DFlashDrafter
from engine.kv_cache import KVCache, Reservation


@dataclass(frozen=True)
class Fixed:
    """Every tree has so many nodes."""

    nodes: int

    def of_round(self, requests: int) -> None:
        """Nothing to decide."""


@dataclass(frozen=True)
class Growing:
    """Trees grow while expected tokens per second rises, by costs measured at start-up."""

    nodes: int  # at most
    table: CostTable

    def of_round(self, requests: int) -> tree.Budget:
        """Return how many nodes each of so many requests gets."""
        curve = self.table.curve(requests, self.nodes)
        return lambda gains: best_size(gains, requests, curve)


Budget = Fixed | Growing


class DDTreeDrafter:
    """A tree over a DFlash block (arXiv 2604.12989); see `engine.tree` for which nodes, and the budget for how many."""

    def __init__(self, chain: DFlashDrafter, budget: Budget, width: int | None) -> None:
        self.rows, self.depth, self.taps = max(chain.rows, budget.nodes + 1), chain.depth, chain.taps
        self._chain, self._budget, self._width = chain, budget, width

    def propose(self, roots: Tensor, places: Reservation, draws: sampling.Batch | None, cache: KVCache) -> Proposal:
        """Return [R, nodes + 1]; the draft's temperature is 1, whatever the requests' own."""
        _, hidden, work = self._chain.block(roots, places, cache)
        log_probs, tokens = self._chain.model.likeliest(hidden.flatten(0, 1), self._budget.nodes)
        depth = hidden.shape[1]
        log_probs, tokens = (part.view(roots.shape[0], depth, -1) for part in (log_probs, tokens))
        budget = self._budget.of_round(roots.shape[0])
        nodes = tree.build(log_probs, tokens, self._budget.nodes, self._width, budget)
        rows = nodes.tokens.clone()
        rows[:, 0] = roots
        return Proposal(rows, work, depth, nodes, forced=self._chain.forced)

    def observe(self, features: Tensor | None, positions: Tensor, write: Tensor, cache: KVCache) -> None:
        """As the chain."""
        self._chain.observe(features, positions, write, cache)

    def settle(self, cache: KVCache) -> None:
        """As the chain."""
        self._chain.settle(cache)
