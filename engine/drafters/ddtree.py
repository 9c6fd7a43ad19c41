"""DDTree: the most probable continuations under DFlash's block distributions, as one tree to verify."""

from __future__ import annotations

from torch import Tensor

from engine import sampling, tree
from engine.drafters.base import Proposal
from engine.drafters.dflash import DFlashDrafter
from engine.kv_cache import KVCache, Reservation


class DDTreeDrafter:
    """A tree of `nodes` nodes over a DFlash block (arXiv 2604.12989); see `engine.tree` for which nodes."""

    def __init__(self, chain: DFlashDrafter, nodes: int, width: int | None) -> None:
        self.rows, self.depth, self.taps = max(chain.rows, nodes + 1), chain.depth, chain.taps
        self._chain, self._nodes, self._width = chain, nodes, width

    def propose(self, roots: Tensor, places: Reservation, draws: sampling.Batch | None, cache: KVCache) -> Proposal:
        """Return [R, nodes + 1]; the draft's temperature is 1, whatever the requests' own."""
        _, hidden, work = self._chain.block(roots, places, cache)
        log_probs, tokens = self._chain.model.likeliest(hidden.flatten(0, 1), self._nodes)
        depth = hidden.shape[1]
        log_probs, tokens = (part.view(roots.shape[0], depth, -1) for part in (log_probs, tokens))
        nodes = tree.build(log_probs, tokens, self._nodes, self._width)
        rows = nodes.tokens.clone()
        rows[:, 0] = roots
        return Proposal(rows, work, nodes)

    def observe(self, features: Tensor | None, positions: Tensor, write: Tensor, cache: KVCache) -> None:
        """As the chain."""
        self._chain.observe(features, positions, write, cache)
