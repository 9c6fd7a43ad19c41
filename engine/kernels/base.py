"""What a model on a device is made of: the interface of the kernels.

Every operation works on tensors of one device in bfloat16 or float32, accumulates in float32, allocates its outputs
and never waits for the device: all of them can be captured into a CUDA graph, with shapes that depend on no data.
Rows beyond the real ones (padding) are computed like any other and stay finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Paged:
    """Where requests keep their cache: rows of a page table.

    `table` [requests, pages] int32: page of every `page_size` positions; slot = page × page_size + offset.
    `lanes` [b] int32: the table row of every request of this forward.
    `lengths` [b] int32: tokens cached for it before this forward's rows.
    """

    table: Tensor
    lanes: Tensor
    lengths: Tensor
    page_size: int


@dataclass(frozen=True)
class Standing:
    """Where requests stand between rounds, one row each; the last row is nobody's, and stays 0 in the first two.

    `lengths` [requests] int32: cached tokens. `roots` [requests] int64: the newest token, not cached yet.
    `slots` [requests, positions] int32: the KV slot of every position, the page table written out.
    """

    lengths: Tensor
    roots: Tensor
    slots: Tensor

    @property
    def nobody(self) -> int:
        """The last row."""
        return self.lengths.shape[0] - 1


@dataclass(frozen=True)
class Places:
    """A round's rows. `cached` [b] int32 tokens before them, `roots` [b] int64 the newest token of every lane;
    `positions`, `write` [b × rows] int32: position and KV slot of every row."""

    cached: Tensor
    roots: Tensor
    positions: Tensor
    write: Tensor


class Linear(Protocol):
    """y = x Wᵀ + b for x [rows, in], behind whatever it was built with (a norm in front, a gate after it)."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, out]."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return residual + y, [rows, out]."""
        ...


class Gated(Protocol):
    """silu(gate) · up behind a norm: SwiGLU's first half."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, inner]."""
        ...


class Ops(Protocol):
    """A kernel family."""

    name: str

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return x ↦ x Wᵀ + b of `weight` [out, in]; the kernel is chosen by the number of rows."""
        ...

    def norm_linear(self, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return x ↦ RMSNorm(x) Wᵀ + b. `weight` is taken over: the norm's weight may be folded into it in place."""
        ...

    def gated(self, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Gated:
        """Return x ↦ silu(g) · u with [g, u] = RMSNorm(x) Wᵀ + b; `weight` [2 × inner, in], gate first, taken over."""
        ...

    def prepare(self, rows: Sequence[int]) -> None:
        """Choose the kernel of every linear layer built so far for these numbers of rows: before any capture."""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return RMSNorm(x) · weight of x [T, hidden]."""
        ...

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return x + delta, and its RMSNorm · weight: [T, hidden] each."""
        ...

    def rope_write(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos_sin: Tensor,
        positions: Tensor,
        pool: Tensor,
        write: Tensor,
    ) -> Tensor:
        """Normalise (where there are norms) and rotate queries and keys; write keys and values into the pool.

        Args:
            qkv: [T, (Hq + 2 × Hkv) × D], rotation partners adjacent in q and k (`model.rope.interleave`).
            q_norm, k_norm: [D] RMSNorm weights, in the same order of dimensions.
            cos_sin: [positions, D] float32: D / 2 cosines, then D / 2 sines.
            positions: [T] int32.
            pool: [slots, 2 × Hkv, D] of one layer: keys, then values.
            write: [T] int32, slot of every row.

        Returns:
            Queries [T, Hq, D].
        """
        ...

    def context_write(
        self,
        kv: Tensor,
        k_norm: Tensor | None,
        eps: float,
        cos_sin: Tensor,
        positions: Tensor,
        pool: Tensor,
        write: Tensor,
    ) -> None:
        """Write context keys and values of all draft layers: `rope_write` without queries.

        Args:
            kv: [T, layers × 2 × Hkv × D]: keys and values of every layer, layer by layer.
            k_norm: [layers, D].
            pool: [≥ layers, slots, 2 × Hkv, D].
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) · up, [T, inner], of [T, 2 × inner]."""
        ...

    def attend(self, q: Tensor, pool: Tensor, paged: Paged, queries: int, max_len: int, causal: bool) -> Tensor:
        """Attend with `queries` rows of every lane, whose own keys and values are already in the pool.

        Args:
            q: [b × queries, Hq, D], rotated; row i of a lane is at position lengths + i.
            max_len: most tokens a lane can hold, its rows included: what the work is split for.
            causal: a row sees the cached tokens, and of the block itself and what is before it; otherwise the whole
                block (a DFlash draft block).

        Returns:
            [b × queries, Hq × D].
        """
        ...

    def attend_prefill(self, q: Tensor, pool: Tensor, paged: Paged, offsets: Tensor) -> Tensor:
        """Attend causally with prompt chunks, whose own keys and values are already in the pool.

        Args:
            q: [T, Hq, D], rotated: the rows of lane i are offsets[i] … offsets[i + 1] − 1, at positions lengths[i] on.
            offsets: [lanes + 1] int32, ascending from 0; chunks may be empty, rows from offsets[-1] on are padding.

        Returns:
            [T, Hq × D]; zeros in padding rows.
        """
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """Return the index [T] int64 of the largest of [T, vocab]: the first of equals, a valid one in any case."""
        ...

    def places(self, standing: Standing, lanes: Tensor, rows: int) -> Places:
        """Return the places of `rows` rows behind what `lanes` [b] int32 have cached."""
        ...

    def settle(self, standing: Standing, lanes: Tensor, drafted: Tensor, tokens: Tensor, kept: Tensor | None) -> Tensor:
        """End a round: lengths grow by the tokens kept, the last of which is the new root. Nobody's row stays 0.

        Args:
            lanes: [b] int32, none twice but nobody's.
            drafted: [b, rows] int64, the root first.
            tokens: [b, rows] int64, what follows each row.
            kept: [b] int64, 1 … rows; when None, one more than the leading drafted tokens that equal `tokens`.

        Returns:
            [b, 1 + rows] int64: the number kept, then `tokens`.
        """
        ...
