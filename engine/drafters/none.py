"""No speculation: propose nothing but the root."""

from __future__ import annotations

from torch import Tensor

from engine.drafters.base import DraftWork
from engine.kv_cache import KVCache, Reservation


class NoDrafter:
    """The empty proposal."""

    rows = 1
    taps: tuple[int, ...] = ()

    def propose(self, roots: Tensor, places: Reservation, cache: KVCache) -> tuple[Tensor, DraftWork]:
        """Return [requests, 1]; see `base.Drafter`."""
        return roots[:, None], DraftWork()

    def observe(self, features: Tensor | None, positions: Tensor, write: Tensor, cache: KVCache) -> None:
        """Nothing to remember."""
