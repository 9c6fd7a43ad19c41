"""What a drafter is to the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine import sampling
from engine.kv_cache import KVCache, Reservation
from engine.tree import Tree


@dataclass(frozen=True)
class DraftWork:
    """What one call computed: forward rows, and KV positions one layer of it read."""

    rows: int = 0
    kv_rows_read: int = 0


@dataclass(frozen=True)
class Proposal:
    """Drafted continuations of R requests.

    `tokens` [R, rows] ids, the root first. `depth`: most of them that can be accepted. `tree`: how the rows hang
    together; None is a chain. `probabilities` [R, rows − 1, vocab]: what the drafted tokens were drawn from, when they
    were drawn. `forced`: accept so many tokens a round on average, whatever they are (timing only).
    """

    tokens: Tensor
    work: DraftWork
    depth: int
    tree: Tree | None = None
    probabilities: Tensor | None = None
    forced: float | None = None


class Drafter(Protocol):
    """Proposes continuations of running requests, and learns what was committed."""

    rows: int  # most rows of a proposal or of the drafter's own forward: what a request reserves for a round
    depth: int  # most drafted tokens a round can accept
    taps: tuple[int, ...]  # target layers whose residual stream `observe` wants

    def propose(self, roots: Tensor, places: Reservation, draws: sampling.Batch | None, cache: KVCache) -> Proposal:
        """Propose.

        Args:
            roots: [R] newest token of each request, not yet in the cache.
            places: `rows` reserved rows a request.
            draws: how the requests sample; None when all are greedy.
        """
        ...

    def observe(self, features: Tensor | None, positions: Tensor, write: Tensor, cache: KVCache) -> None:
        """Take in committed tokens, once each.

        Args:
            features: [tokens, len(taps) × hidden], None without taps.
            positions, write: [tokens] position and KV slot of each.
        """
        ...

    def settle(self, cache: KVCache) -> None:
        """Finish what `observe` put off: cache slots are about to change owners."""
        ...
