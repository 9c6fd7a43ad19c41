"""The kernels in plain torch: any device, any precision, no speed. What the others are held against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from engine import verify
from engine.kernels.base import Gated, Linear, Paged, Places, Standing


class ReferenceLinear:
    """x Wᵀ + b, behind a norm where there is one."""

    def __init__(self, weight: Tensor, bias: Tensor | None, norm: Tensor | None = None, eps: float = 0.0) -> None:
        self._weight, self._bias, self._norm, self._eps = weight, bias, norm, eps

    def __call__(self, x: Tensor) -> Tensor:
        if self._norm is not None:
            x = rms_norm(x, self._norm, self._eps)
        return F.linear(x, self._weight, self._bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self(x)


class ReferenceGated:
    """silu(gate) · up behind a norm."""

    def __init__(self, linear: ReferenceLinear) -> None:
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        return silu_mul(self._linear(x))


class ReferenceOps:
    """See `base.Ops`."""

    name = "reference"

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return ReferenceLinear(weight, bias)

    def norm_linear(self, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return ReferenceLinear(weight, bias, norm, eps)

    def gated(self, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Gated:
        return ReferenceGated(ReferenceLinear(weight, bias, norm, eps))

    def prepare(self, rows: Sequence[int]) -> None:
        """There is one kernel: nothing to choose."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x if delta is None else x + delta
        return total, rms_norm(total, weight, eps)

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
        kv_heads, dim = pool.shape[1] // 2, pool.shape[2]
        heads = qkv.view(qkv.shape[0], -1, dim)
        q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        rotation = cos_sin[positions.long()][:, None]
        pool.index_copy_(0, write.long(), torch.cat([norm_rotate(k, k_norm, eps, rotation), v], dim=1))
        return norm_rotate(q, q_norm, eps, rotation)

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
        _, _, heads, dim = pool.shape
        layers = kv.shape[1] // (heads * dim)
        every = kv.view(-1, layers, heads * dim)
        for layer in range(layers):
            norm = None if k_norm is None else k_norm[layer]
            self.rope_write(every[:, layer], None, norm, eps, cos_sin, positions, pool[layer], write)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)

    def attend(self, q: Tensor, pool: Tensor, paged: Paged, queries: int, max_len: int, causal: bool) -> Tensor:
        lanes = paged.lanes.shape[0]
        slots = _slots(paged)
        place = torch.arange(slots.shape[1], device=q.device)
        ends = paged.lengths.long()[:, None] + torch.arange(1, queries + 1, device=q.device)  # first unseen position
        if not causal:
            ends = ends[:, -1:].expand(-1, queries)
        seen = place < ends[:, :, None]
        return _attend(q.view(lanes, queries, *q.shape[1:]), pool[slots], seen).flatten(0, 1)

    def attend_prefill(self, q: Tensor, pool: Tensor, paged: Paged, offsets: Tensor) -> Tensor:
        slots, row = _slots(paged), torch.arange(q.shape[0], device=q.device)
        place = torch.arange(slots.shape[1], device=q.device)
        out = torch.zeros(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        for chunk in range(paged.lanes.shape[0]):
            mine = (row >= offsets[chunk]) & (row < offsets[chunk + 1])
            position = torch.where(mine, paged.lengths[chunk] + row - offsets[chunk], 0)
            seen = (place <= position[:, None])[None]
            made = _attend(q[None], pool[slots[chunk]][None], seen)[0]
            out = torch.where(mine[:, None], made, out)
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.max(dim=-1).indices

    def places(self, standing: Standing, lanes: Tensor, rows: int) -> Places:
        wide = lanes.long()
        cached = standing.lengths[wide]
        positions = cached[:, None] + torch.arange(rows, dtype=torch.int32, device=lanes.device)
        write = standing.slots[wide[:, None], positions.long()]
        return Places(cached, standing.roots[wide], positions.flatten(), write.flatten())

    def settle(self, standing: Standing, lanes: Tensor, drafted: Tensor, tokens: Tensor, kept: Tensor | None) -> Tensor:
        wide = lanes.long()
        if kept is None:
            kept = verify.agreed(drafted, tokens) + 1
        standing.lengths.index_add_(0, wide, kept.to(torch.int32))
        standing.roots.index_copy_(0, wide, tokens.gather(1, kept[:, None] - 1)[:, 0])
        for each in (standing.lengths, standing.roots):
            each[standing.nobody].zero_()
        return torch.cat([kept[:, None], tokens], dim=1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, statistics in the wider precision."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def norm_rotate(heads: Tensor, norm: Tensor | None, eps: float, rotation: Tensor) -> Tensor:
    """Normalise and rotate [T, heads, D]; `rotation` [T, 1, D] holds cosines, then sines of adjacent pairs."""
    x = heads.to(torch.promote_types(heads.dtype, torch.float32))
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = rotation.chunk(2, dim=-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(heads.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half times the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _slots(paged: Paged) -> Tensor:
    """Return the slot of every position a lane could hold, [b, pages × page_size]."""
    pages = paged.table[paged.lanes.long()].long() * paged.page_size
    return (pages[:, :, None] + torch.arange(paged.page_size, device=pages.device)).flatten(1)


def _attend(q: Tensor, cached: Tensor, seen: Tensor) -> Tensor:
    """Attend with q [b, Q, Hq, D] to cached [b, L, 2 × Hkv, D] where seen [b, Q, L]; return [b, Q, Hq × D]."""
    b, queries, heads, dim = q.shape
    kv_heads = cached.shape[2] // 2
    wide = torch.promote_types(q.dtype, torch.float32)
    visible = seen.any(dim=1)[:, :, None, None]
    keys, values = torch.where(visible, cached, 0).to(wide).transpose(1, 2).split(kv_heads, dim=1)  # hidden may be NaN
    grouped = q.to(wide).view(b, queries, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    scores = grouped @ keys[:, :, None].transpose(-1, -2) * dim**-0.5
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(dim=-1)
    out: Tensor = (weights @ values[:, :, None]).permute(0, 3, 1, 2, 4)
    return out.reshape(b, queries, heads * dim).to(q.dtype)
