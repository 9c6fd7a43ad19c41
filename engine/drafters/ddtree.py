"""DDTree: the most probable continuations under DFlash's block distributions, as one tree to verify."""

from __future__ import annotations

from contextlib import suppress
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

    def of_round(self, requests: int) -> tree.Budget | None:
        """Return how many nodes each of so many requests gets; None: as many as there may be."""
        curve = self.table.curve(requests, self.nodes)
        return None if curve.flat else lambda gains: best_size(gains, requests, curve)


Budget = Fixed | Growing
FEW = 12


class DDTreeDrafter:
    """A tree over a DFlash block (arXiv 2604.12989); see `engine.tree` for which nodes, and the budget for how many."""

    def __init__(self, chain: DFlashDrafter, budget: Budget, width: int | None) -> None:
        self.rows, self.depth, self.taps = max(chain.rows, budget.nodes + 1), chain.depth, chain.taps
        self._chain, self._budget, self._width = chain, budget, width

    def propose(self, roots: Tensor, places: Reservation, draws: sampling.Batch | None, cache: KVCache) -> Proposal:
        """Return [R, nodes + 1]; the draft's temperature is 1, whatever the requests' own."""
        _, hidden, work = self._chain.block(roots, places, cache)
        nodes = self._grow(hidden)
        rows = nodes.tokens.clone()
        rows[:, 0] = roots
        return Proposal(rows, work, hidden.shape[1], nodes, forced=self._chain.forced)

    def _grow(self, hidden: Tensor) -> tree.Tree:
        """Return the trees over hidden states [R, depth, H].

        A tree of N nodes may need N candidates at one place. One that grows while it pays hardly ever asks for more
        than a few: on a CPU, where finding candidates costs more than the tree, it is first tried with `FEW`.
        """
        budget, most = self._budget.of_round(hidden.shape[0]), self._budget.nodes
        if budget is not None and hidden.device.type == "cpu" and most > FEW:
            with suppress(tree.TooFew):
                return tree.by_heap(*self._candidates(hidden, FEW), most, self._width, budget, partial=True)
        return tree.build(*self._candidates(hidden, most), most, self._width, budget)

    def _candidates(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and ids of the likeliest tokens at every place, [R, depth, count]."""
        log_probs, tokens = self._chain.model.likeliest(hidden.flatten(0, 1), count)
        return log_probs.view(*hidden.shape[:2], -1), tokens.view(*hidden.shape[:2], -1)

    def observe(self, features: Tensor | None, positions: Tensor, write: Tensor, cache: KVCache) -> None:
        """As the chain."""
        self._chain.observe(features, positions, write, cache)

    def settle(self, cache: KVCache) -> None:
        """As the chain."""
        self._chain.settle(cache)
