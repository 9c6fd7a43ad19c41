"""No speculation: propose nothing but the root."""

from __future__ import annotations

from torch import Tensor

from engine import sampling
from engine.drafters.base import DraftWork, Proposal
from engine.kv_cache import KVCache, Reservation


class NoDrafter:
    """The empty proposal."""

    rows = 1
    depth = 0
    taps: tuple[int, ...] = ()

    def propose(self, roots: Tensor, places: Reservation, draws: sampling.Batch | None, cache: KVCache) -> Proposal:
        """Return [R, 1]; see `base.Drafter`."""
        return Proposal(roots[:, None], DraftWork(), depth=0)

    def observe(self, features: Tensor | None, positions: Tensor, write: Tensor, cache: KVCache) -> None:
        """Nothing to remember."""

    def settle(self, cache: KVCache) -> None:
        """Nothing was put off."""
