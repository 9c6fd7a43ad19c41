"""DFlash: one bidirectional forward over [root, mask, …, mask] proposes the whole block."""

from __future__ import annotations

import torch
from torch import Tensor

from engine import sampling
from engine.drafters.base import DraftWork, Proposal
from engine.kv_cache import KVCache, Reservation
from engine.model.attention.base import Attention
from engine.model.draft import DraftModel
from engine.model.layers import Rows


class DFlashDrafter:
    """A chain of `block_size` − 1 tokens from the first layers of a draft model.

    The block's own keys and values go to the reserved slots of the draft pool, where the context KV of the tokens
    that get committed replaces them: context is written once a token, from the target's features, never recomputed.
    """

    def __init__(
        self,
        model: DraftModel,
        attention: Attention,
        block_size: int,
        layers: int,
        draws: bool = False,
        forced: float | None = None,
    ) -> None:
        """Propose blocks.

        Args:
            draws: draft tokens are drawn from the drafter's distribution instead of taking the likeliest.
            forced: the mean accept length that acceptance is forced to.
        """
        self.forced = forced
        self.rows, self.depth, self.taps = block_size, block_size - 1, model.shape.taps
        self.model, self._layers, self._draws = model, layers, draws
        self._block, self._attention = block_size, attention

    def propose(self, roots: Tensor, places: Reservation, draws: sampling.Batch | None, cache: KVCache) -> Proposal:
        """Return [R, block_size]; see `base.Drafter`."""
        tokens, hidden, work = self.block(roots, places, cache)
        if not self._draws or draws is None:
            tokens[:, 1:] = self.model.choose(hidden.flatten(0, 1)).view(hidden.shape[:2])
            return Proposal(tokens, work, self.depth, forced=self.forced)
        logits = self.model.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        probabilities = sampling.distribution(logits, draws)
        at = places.first(self._block).positions.view(tokens.shape)[:, 1:]
        tokens[:, 1:] = sampling.invert(probabilities, sampling.uniform(draws.seed[:, None], at, sampling.DRAFT))
        return Proposal(tokens, work, self.depth, probabilities=probabilities, forced=self.forced)

    def block(self, roots: Tensor, places: Reservation, cache: KVCache) -> tuple[Tensor, Tensor, DraftWork]:
        """Run the draft forward; return the block [R, B] with masks, the masks' hidden states [R, B − 1, H]."""
        requests, block = roots.shape[0], self._block
        places = places.first(block)
        tokens = torch.full((requests, block), self.model.shape.mask_token_id, dtype=roots.dtype, device=roots.device)
        tokens[:, 0] = roots
        plan = self._attention.plan([places.span(causal=False)])
        rotation = self.model.rotation[places.positions][:, None]
        rows = Rows(places.positions, places.write, rotation, plan)
        hidden = self.model.forward(tokens.view(-1), rows, _pool(cache), self._layers)
        work = DraftWork(requests * block, self._attention.kv_rows_read(plan))
        return tokens, hidden.view(requests, block, -1)[:, 1:], work

    def observe(self, features: Tensor | None, positions: Tensor, write: Tensor, cache: KVCache) -> None:
        """Write the context KV of committed tokens; see `base.Drafter`."""
        if features is None:
            raise ValueError("a DFlash drafter needs the target's features")
        self.model.write_context(features, positions, write, _pool(cache))

    def settle(self, cache: KVCache) -> None:
        """Nothing was put off."""


def _pool(cache: KVCache) -> Tensor:
    if cache.draft is None:
        raise ValueError("the cache has no draft pool")
    return cache.draft
