"""Per-head norm, rotary embedding and the write into the KV pool, in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import ceil_div

HEADS = 4  # heads a program handles


@triton.jit
def _rope_write(
    qkv, q_norm, k_norm, cos_sin, positions, write, q_out, pool,
    row_stride, pool_layer_stride, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    pairs: tl.constexpr = DIM // 2
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_query = (head < Q_HEADS)[:, None, None]
    is_value = (head >= Q_HEADS + KV_HEADS)[:, None, None]
    exists = (head < Q_HEADS + 2 * KV_HEADS)[:, None, None]
    pair = tl.arange(0, pairs)
    within = (pair[:, None] * 2 + tl.arange(0, 2)[None, :])[None, :, :]  # [1, pairs, 2]: dimension of a head

    source = qkv + row * row_stride + layer * (Q_HEADS + 2 * KV_HEADS) * DIM + head[:, None, None] * DIM + within
    value = tl.load(source, mask=exists, other=0.0).to(tl.float32)
    if Q_NORM or K_NORM:
        square = tl.sum(tl.sum(value * value, axis=2), axis=1)[:, None, None]
        normed = value * tl.rsqrt(square / DIM + eps)
        if Q_NORM:
            value = tl.where(is_query, normed * tl.load(q_norm + within).to(tl.float32), value)
        if K_NORM:
            weight = tl.load(k_norm + layer * DIM + within).to(tl.float32)
            value = tl.where(is_query | is_value, value, normed * weight)
    angle = cos_sin + tl.load(positions + row).to(tl.int64) * DIM + pair
    cos = tl.where(is_value, 1.0, tl.load(angle)[None, :, None])
    sin = tl.where(is_value, 0.0, tl.load(angle + pairs)[None, :, None])
    even, odd = tl.split(value)
    cos = tl.reshape(cos, [HEADS, pairs])
    sin = tl.reshape(sin, [HEADS, pairs])
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos).to(pool.dtype.element_ty)

    if Q_HEADS > 0:
        tl.store(q_out + (row * Q_HEADS + head[:, None, None]) * DIM + within, turned, mask=is_query)
    slot = tl.load(write + row).to(tl.int64)
    target = pool + layer * pool_layer_stride + slot * 2 * KV_HEADS * DIM
    tl.store(target + (head - Q_HEADS)[:, None, None] * DIM + within, turned, mask=exists & (is_query == 0))


def rope_write(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    pool: Tensor,
    write: Tensor,
) -> Tensor:
    """Return rotated queries [T, Hq, D] and write keys and values; see `base.Ops.rope_write`."""
    rows, kv_heads, dim = qkv.shape[0], pool.shape[-2] // 2, pool.shape[-1]
    q_heads = qkv.shape[1] // dim - 2 * kv_heads
    q = qkv.new_empty(rows, q_heads, dim)
    _launch(qkv, q_norm, k_norm, eps, cos_sin, positions, pool[None], write, q, 1)
    return q


def context_write(
    kv: Tensor,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    pool: Tensor,
    write: Tensor,
) -> None:
    """Write rotated keys, and values, of all draft layers; see `base.Ops.context_write`."""
    layers = kv.shape[1] // (pool.shape[-2] * pool.shape[-1])
    _launch(kv, None, k_norm, eps, cos_sin, positions, pool, write, None, layers)


def _launch(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    pool: Tensor,
    write: Tensor,
    q: Tensor | None,
    layers: int,
) -> None:
    kv_heads, dim = pool.shape[-2] // 2, pool.shape[-1]
    q_heads = 0 if q is None else q.shape[1]
    _rope_write[(qkv.shape[0], ceil_div(q_heads + 2 * kv_heads, HEADS), layers)](
        qkv, q_norm, k_norm, cos_sin, positions, write, q, pool, qkv.stride(0), pool.stride(0), eps,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, DIM=dim, HEADS=HEADS,
        Q_NORM=q_norm is not None, K_NORM=k_norm is not None, num_warps=4,
    )  # fmt: skip
