"""What a drafter is to the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.kv_cache import KVCache, Reservation


@dataclass(frozen=True)
class DraftWork:
    """What one call computed: forward rows, and KV positions one layer of it read."""

    rows: int = 0
    kv_rows_read: int = 0


class Drafter(Protocol):
    """Proposes continuations of running requests, and learns what was committed."""

    rows: int  # rows of a proposal, the root included: what verify computes for a request
    taps: tuple[int, ...]  # target layers whose residual stream `observe` wants

    def propose(self, roots: Tensor, places: Reservation, cache: KVCache) -> tuple[Tensor, DraftWork]:
        """Propose.

        Args:
            roots: [requests] newest token of each request, not yet in the cache.
            places: `rows` reserved rows a request.

        Returns:
            [requests, rows] token ids, the root first.
        """
        ...

    def observe(self, features: Tensor | None, positions: Tensor, write: Tensor, cache: KVCache) -> None:
        """Take in committed tokens, once each.

        Args:
            features: [tokens, len(taps) × hidden], None without taps.
            positions, write: [tokens] position and KV slot of each.
        """
        ...
