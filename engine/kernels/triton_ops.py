"""The kernels in Triton: what a GPU runs (in Triton's interpreter, a CPU too, for tests)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import UnsupportedModel
from engine.kernels import argmax, attention, choice, gate, norm, prefill, rope, turns
from engine.kernels.attention import AttendPlan
from engine.kernels.base import Gated, Linear, Paged, Places, Standing
from engine.kernels.choice import Book, TritonLinear
from engine.kernels.linear import Product
from engine.kernels.prefill import PrefillPlan

LARGEST_HEAD = 256
# Where lengths may be at least LONG: wide steps for one row a lane; for more, one program per multiprocessor with as
# many steps in flight as fit, as long as stretches of the cache are all there is to share out.
LONG, LONG_ATTEND, LONG_VERIFY = 8192, AttendPlan(block=128), AttendPlan(stages=5, programs=132)
# In float32 the matrix units do not help: small tiles, which fit into registers.
NARROW_ATTEND = AttendPlan(block=32, tile_rows=32, stages=2)
NARROW_PREFILL = PrefillPlan(tile_rows=32, block=32, warps=4, stages=2)


def plan_for(dim: int, streams: int, queries: int, max_len: int) -> AttendPlan:
    """Return how attention of 16-bit rows is cut; `streams`: lanes × KV heads, of `queries` rows each."""
    if max_len < LONG:
        return AttendPlan()
    if queries == 1:
        return LONG_ATTEND
    # Five steps of wide heads do not fit into a multiprocessor, and with many streams it is no faster.
    return LONG_VERIFY if dim <= 128 and 4 * streams <= LONG_VERIFY.programs else AttendPlan()


class TritonOps:
    """See `base.Ops`."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layers: list[TritonLinear] = []

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._layer(Product(weight.contiguous(), bias, None, gated=False))

    def norm_linear(self, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._layer(Product(fold_norm(norm, weight), bias, eps, gated=False))

    def gated(self, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Gated:
        return self._layer(Product(fold_norm(norm, weight), bias, eps, gated=True))

    def prepare(self, rows: Sequence[int]) -> None:
        if self._device.type == "cuda":
            choice.choose(self._layers, rows, Book.of(self._device))
            torch.cuda.empty_cache()  # buffers that measuring took

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.add_norm(x, None, weight, eps)[1]

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return norm.add_norm(x, delta, weight, eps)

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
        _check_head(pool.shape[-1])
        return rope.rope_write(qkv, q_norm, k_norm, eps, cos_sin, positions, pool, write)

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
        _check_head(pool.shape[-1])
        rope.context_write(kv, k_norm, eps, cos_sin, positions, pool, write)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return gate.silu_mul(gate_up)

    def attend(self, q: Tensor, pool: Tensor, paged: Paged, queries: int, max_len: int, causal: bool) -> Tensor:
        streams = paged.lanes.shape[0] * pool.shape[1] // 2
        plan = NARROW_ATTEND if q.dtype == torch.float32 else plan_for(q.shape[-1], streams, queries, max_len)
        return attention.attend(q, pool, paged, queries, max_len, causal, plan)

    def attend_prefill(self, q: Tensor, pool: Tensor, paged: Paged, offsets: Tensor) -> Tensor:
        plan = NARROW_PREFILL if q.dtype == torch.float32 else PrefillPlan()
        return prefill.attend_prefill(q, pool, paged, offsets, plan)

    def argmax(self, logits: Tensor) -> Tensor:
        return argmax.argmax(logits)

    def places(self, standing: Standing, lanes: Tensor, rows: int) -> Places:
        return turns.places(standing, lanes, rows)

    def settle(self, standing: Standing, lanes: Tensor, drafted: Tensor, tokens: Tensor, kept: Tensor | None) -> Tensor:
        return turns.settle(standing, lanes, drafted, tokens, kept)

    def _layer(self, product: Product) -> TritonLinear:
        layer = TritonLinear(product)
        self._layers.append(layer)
        return layer


def fold_norm(norm: Tensor, weight: Tensor) -> Tensor:
    """Multiply the columns of W by the norm's weight, in place, part by part: no second copy of a large W."""
    weight = weight.contiguous()
    for part in weight.split(4096):
        part.copy_(part.float() * norm.float())
    return weight


def _check_head(dim: int) -> None:
    if dim & (dim - 1) or not 16 <= dim <= LARGEST_HEAD:
        raise UnsupportedModel(
            f"head_dim {dim} is not a power of two from 16 to {LARGEST_HEAD}; the GPU kernels cannot run it"
        )
