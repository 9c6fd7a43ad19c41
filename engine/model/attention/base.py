"""The attention interface: what a forward must say about its rows, and what a kernel returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Requests of one forward that have equally many rows.

    `slots` [R, ≥ longest length]: KV slot of every position; `starts` [R]: tokens cached before this forward.
    The rows of request r take positions starts[r] … starts[r] + queries − 1. `contiguous`: first slot when R is 1
    and its slots follow one another, else None. `causal`: a row sees itself and what is before it; otherwise it
    sees the whole block too (a DFlash draft block). `tree` [R, queries, queries]: which rows of its own request a
    row sees, instead; all see the cached tokens.
    """

    slots: Tensor
    starts: Sequence[int]
    queries: int
    contiguous: int | None
    causal: bool
    tree: Tensor | None = None

    @property
    def longest(self) -> int:
        """KV length of the longest request, its own rows included."""
        return max(self.starts) + self.queries


class Attention(Protocol):
    """A kernel family."""

    name: str

    def plan(self, spans: Sequence[Span]) -> Any:
        """Prepare what all layers of one forward share."""
        ...

    def kv_rows_read(self, plan: Any) -> int:
        """KV positions that one layer's call reads, padding included."""
        ...

    def __call__(self, query: Tensor, pool: Tensor, plan: Any) -> Tensor:
        """Attend.

        Args:
            query: [rows, heads, head_dim], rotated; rows ordered by span, request, position.
            pool: [slots, 2 × kv_heads, head_dim] of one layer: keys, then values.
            plan: from `plan`.

        Returns:
            [rows, heads × head_dim].
        """
        ...
