"""DFlash: one bidirectional forward over [root, mask, …, mask] proposes the whole block."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.drafters.base import DraftWork
from engine.kv_cache import KVCache, Reservation
from engine.model.attention.base import Attention
from engine.model.draft import DraftModel
from engine.model.layers import Rows


class DFlashDrafter:
    """A chain of `block_size` − 1 tokens from the first layers of a draft model.

    The block's own keys and values go to the reserved slots of the draft pool, where the context KV of the tokens
    that get committed replaces them: context is written once a token, from the target's features, never recomputed.
    """

    def __init__(self, model: DraftModel, attention: Attention, block_size: int) -> None:
        self.rows, self.taps = block_size, model.shape.taps
        self._model, self._attention = model, attention

    def propose(self, roots: Tensor, places: Reservation, cache: KVCache) -> tuple[Tensor, DraftWork]:
        """Return [requests, block_size]; see `base.Drafter`."""
        requests, block = roots.shape[0], self.rows
        tokens = torch.full((requests, block), self._model.shape.mask_token_id, dtype=roots.dtype, device=roots.device)
        tokens[:, 0] = roots
        plan = self._attention.plan([places.span(causal=False)])
        rotation = self._model.rotation[places.positions][:, None]
        rows = Rows(places.positions, places.write, rotation, plan)
        hidden = self._model.forward(tokens.view(-1), rows, _pool(cache))
        masks = hidden.view(requests, block, -1)[:, 1:].reshape(requests * (block - 1), -1)
        tokens[:, 1:] = self._model.choose(masks).view(requests, block - 1)
        return tokens, DraftWork(requests * block, self._attention.kv_rows_read(plan))

    def observe(self, features: Tensor | None, positions: Tensor, write: Tensor, cache: KVCache) -> None:
        """Write the context KV of committed tokens; see `base.Drafter`."""
        if features is None:
            raise ValueError("a DFlash drafter needs the target's features")
        self._model.write_context(features, positions, write, _pool(cache))


def _pool(cache: KVCache) -> Tensor:
    if cache.draft is None:
        raise ValueError("the cache has no draft pool")
    return cache.draft
