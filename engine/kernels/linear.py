"""Linear layers at few rows: weights streamed once at memory speed, what surrounds them done on the way.

RMSNorm in front: its weight is folded into W, so that RMSNorm(x) Wᵀ = s · (x Wᵀ) with s the inverse RMS of the row,
and s is summed up while x passes. Behind: bias, residual, or silu(gate) · up of two rows of W that one program
computes together. Where W has too few output rows to fill the chip, the inner dimension is split, each part sums to a
buffer of its own, and a second kernel adds them in order: the result never depends on timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.gate import gate, silu_mul
from engine.kernels.launch import ceil_div, dot, power_of_two
from engine.kernels.norm import add_norm

ASYNCHRONOUS_ROWS = 64  # left rows from which a product is Hopper's asynchronous instruction
PART_COLUMNS = 256  # outputs a program of the adding up handles


@dataclass(frozen=True)
class Product:
    """What is to be computed: y = f(norm(x) Wᵀ + b) of `weight` [out, in]; f is SwiGLU's when `gated`.

    `eps`: of the RMSNorm in front, whose weight is folded into W; None without one.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float | None
    gated: bool

    @property
    def columns(self) -> int:
        """Outputs of a row."""
        return self.weight.shape[0] // 2 if self.gated else self.weight.shape[0]


@dataclass(frozen=True)
class Library:
    """The framework's matrix product, with norm and gate as kernels of their own."""

    kind: Literal["library"] = "library"

    def __call__(self, product: Product, x: Tensor, residual: Tensor | None) -> Tensor:
        if product.eps is not None:
            _, x = add_norm(x, None, None, product.eps)
        if residual is not None:
            y = torch.addmm(residual, x, product.weight.t())
            return y if product.bias is None else y.add_(product.bias)
        y = F.linear(x, product.weight, product.bias)
        return silu_mul(y) if product.gated else y


@dataclass(frozen=True)
class Stream:
    """Matrix units with a tile of all rows: `rows` (≥ 16) × `block_n` outputs, the inner dimension in `block_k` steps.

    `swap` computes the tile transposed, so that W is the left operand and fills the 64 rows that Hopper's matrix
    instructions want. `norm_first` runs the norm as a kernel of its own.

    Tiles that Hopper's asynchronous instructions read always have their norm first: a tile of x that the norm reads
    too gets one buffer too few from Triton's pipeliner, and is overwritten while the instruction still reads it.
    """

    rows: int
    block_n: int
    block_k: int
    split: int = 1
    warps: int = 4
    stages: int = 4
    swap: bool = False
    norm_first: bool = False
    kind: Literal["stream"] = "stream"

    @property
    def norm_apart(self) -> bool:
        """Whether a norm in front is a kernel of its own."""
        return self.norm_first or self.swap or self.rows >= ASYNCHRONOUS_ROWS

    def __call__(self, product: Product, x: Tensor, residual: Tensor | None) -> Tensor:
        norm = product.eps is not None
        if norm and self.norm_apart:
            _, x = add_norm(x, None, None, product.eps or 0.0)
            norm = False
        job = _Job.of(product, x, residual, norm)
        return job.run(_stream, self, ceil_div(x.shape[0], self.rows), ROWS=self.rows, SWAP=self.swap)


@dataclass(frozen=True)
class Vector:
    """Multiply and add, for one row: `block_n` outputs, the inner dimension in `block_k` steps."""

    block_n: int
    block_k: int
    split: int = 1
    warps: int = 4
    stages: int = 1
    kind: Literal["vector"] = "vector"

    def __call__(self, product: Product, x: Tensor, residual: Tensor | None) -> Tensor:
        return _Job.of(product, x, residual, product.eps is not None).run(_vector, self, x.shape[0])


Plan = Library | Stream | Vector


@dataclass(frozen=True)
class _Job:
    """One call: what both kernels and the adding up of parts take."""

    product: Product
    x: Tensor
    residual: Tensor | None
    flags: dict[str, bool]

    @classmethod
    def of(cls, product: Product, x: Tensor, residual: Tensor | None, norm: bool) -> _Job:
        flags = {
            "NORM": norm,
            "GATED": product.gated,
            "BIAS": product.bias is not None,
            "RESIDUAL": residual is not None,
        }
        return cls(product, x, residual, flags)

    def run(self, kernel: Any, plan: Stream | Vector, row_programs: int, **meta: Any) -> Tensor:
        (rows, inner), columns, product = self.x.shape, self.product.columns, self.product
        out = self.x.new_empty(rows, columns)
        parts = squares = None
        if plan.split > 1:
            parts = self.x.new_empty(plan.split, rows, product.weight.shape[0], dtype=torch.float32)
            squares = self.x.new_empty(plan.split, rows, dtype=torch.float32)
        sizes = (rows, columns, inner, product.eps or 0.0)
        kernel[(ceil_div(columns, plan.block_n), row_programs, plan.split)](
            self.x, product.weight, product.bias, self.residual, out, parts, squares, *sizes,
            BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, SPLIT=plan.split, STAGES=plan.stages,
            EVEN=columns % plan.block_n == 0 and inner % plan.block_k == 0,
            num_warps=plan.warps, **meta, **self.flags,
        )  # fmt: skip
        if plan.split > 1:
            _add_parts[(ceil_div(columns, PART_COLUMNS), rows)](
                parts, squares, product.bias, self.residual, out, *sizes,
                BLOCK=PART_COLUMNS, SPLIT=plan.split, SPLIT_BLOCK=power_of_two(plan.split),
                num_warps=4, **self.flags,
            )  # fmt: skip
        return out


@triton.jit
def _finish(
    value, up, scale, bias, residual, out, place, inside, column, columns,
    GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Scale, add the bias, then gate or add the residual; store at `place`. `column` broadcasts to the block."""
    dtype: tl.constexpr = out.dtype.element_ty
    if SCALE:
        value *= scale
        if GATED:
            up *= scale
    if BIAS:
        value += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + columns + column, mask=column < columns, other=0.0).to(tl.float32)
    if GATED:
        value = gate(value, up, dtype)
    if RESIDUAL:
        value += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, value.to(dtype), mask=inside)


@triton.jit
def _product(x, w, acc, SWAP: tl.constexpr):
    if SWAP:
        acc = dot(w, tl.trans(x), acc)
    else:
        acc = dot(x, tl.trans(w), acc)
    return acc


@triton.jit(do_not_specialize=["rows"])
def _stream(
    x, weight, bias, residual, out, parts, squares, rows, columns, inner, eps,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    SWAP: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    stretch = tl.cdiv(tl.cdiv(inner, BLOCK_K), SPLIT) * BLOCK_K
    k_first = split * stretch
    k_end = tl.minimum(k_first + stretch, inner)
    up_weight = weight + columns.to(tl.int64) * inner
    wide = column.to(tl.int64)

    if SWAP:
        acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    up = acc
    square = tl.zeros([ROWS], tl.float32)
    x_row = x + row.to(tl.int64)[:, None] * inner
    w_row = weight + wide[:, None] * inner
    u_row = up_weight + wide[:, None] * inner
    for k in tl.range(k_first, k_end, BLOCK_K, num_stages=STAGES):
        at = k + tl.arange(0, BLOCK_K)
        if EVEN:
            x_tile = tl.load(x_row + at[None, :], mask=(row < rows)[:, None], other=0.0)
            w_tile = tl.load(w_row + at[None, :], eviction_policy="evict_first")
        else:
            inside = (at < k_end)[None, :]
            x_tile = tl.load(x_row + at[None, :], mask=(row < rows)[:, None] & inside, other=0.0)
            w_mask = (column < columns)[:, None] & inside
            w_tile = tl.load(w_row + at[None, :], mask=w_mask, other=0.0, eviction_policy="evict_first")
        acc = _product(x_tile, w_tile, acc, SWAP)
        if GATED:
            if EVEN:
                u_tile = tl.load(u_row + at[None, :], eviction_policy="evict_first")
            else:
                u_tile = tl.load(u_row + at[None, :], mask=w_mask, other=0.0, eviction_policy="evict_first")
            up = _product(x_tile, u_tile, up, SWAP)
        if NORM:
            value = x_tile.to(tl.float32)
            square += tl.sum(value * value, axis=1)
    if SWAP:
        acc = tl.trans(acc)
        up = tl.trans(up)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    if SPLIT == 1:
        scale = 1.0
        if NORM:
            scale = tl.rsqrt(square / inner + eps)[:, None]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        _finish(
            acc, up, scale, bias, residual, out, place, inside, column[None, :], columns, GATED, BIAS, RESIDUAL, NORM
        )
    else:
        every = columns * 2 if GATED else columns
        place = (split * rows + row).to(tl.int64)[:, None] * every + column[None, :]
        tl.store(parts + place, acc, mask=inside)
        if GATED:
            tl.store(parts + place + columns, up, mask=inside)
        if NORM and tl.program_id(0) == 0:
            tl.store(squares + split * rows + row, square, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _vector(
    x, weight, bias, residual, out, parts, squares, rows, columns, inner, eps,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1)
    split = tl.program_id(2)
    stretch = tl.cdiv(tl.cdiv(inner, BLOCK_K), SPLIT) * BLOCK_K
    k_first = split * stretch
    k_end = tl.minimum(k_first + stretch, inner)
    up_weight = weight + columns.to(tl.int64) * inner
    wide = column.to(tl.int64)

    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = acc
    squared = tl.zeros([BLOCK_K], tl.float32)
    x_row = x + row.to(tl.int64) * inner
    w_row = weight + wide[:, None] * inner
    u_row = up_weight + wide[:, None] * inner
    for k in tl.range(k_first, k_end, BLOCK_K, num_stages=STAGES):
        at = k + tl.arange(0, BLOCK_K)
        if EVEN:
            value = tl.load(x_row + at).to(tl.float32)
            w_tile = tl.load(w_row + at[None, :], eviction_policy="evict_first")
        else:
            value = tl.load(x_row + at, mask=at < k_end, other=0.0).to(tl.float32)
            w_mask = (column < columns)[:, None] & (at < k_end)[None, :]
            w_tile = tl.load(w_row + at[None, :], mask=w_mask, other=0.0, eviction_policy="evict_first")
        acc += w_tile.to(tl.float32) * value[None, :]
        if GATED:
            if EVEN:
                u_tile = tl.load(u_row + at[None, :], eviction_policy="evict_first")
            else:
                u_tile = tl.load(u_row + at[None, :], mask=w_mask, other=0.0, eviction_policy="evict_first")
            up += u_tile.to(tl.float32) * value[None, :]
        if NORM:
            squared += value * value
    result = tl.sum(acc, axis=1)
    up_result = tl.sum(up, axis=1) if GATED else result
    square = tl.sum(squared, axis=0)
    inside = column < columns
    if SPLIT == 1:
        scale = 1.0
        if NORM:
            scale = tl.rsqrt(square / inner + eps)
        place = row.to(tl.int64) * columns + column
        _finish(
            result, up_result, scale, bias, residual, out, place, inside, column, columns, GATED, BIAS, RESIDUAL, NORM
        )
    else:
        every = columns * 2 if GATED else columns
        place = (split * rows + row).to(tl.int64) * every + column
        tl.store(parts + place, result, mask=inside)
        if GATED:
            tl.store(parts + place + columns, up_result, mask=inside)
        if NORM and tl.program_id(0) == 0:
            tl.store(squares + split * rows + row, square)


@triton.jit(do_not_specialize=["rows"])
def _add_parts(
    parts, squares, bias, residual, out, rows, columns, inner, eps,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, SPLIT_BLOCK: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1)
    inside = column < columns
    every = columns * 2 if GATED else columns
    value = tl.zeros([BLOCK], tl.float32)
    up = value
    for split in tl.static_range(SPLIT):
        place = (split * rows + row).to(tl.int64) * every + column
        value += tl.load(parts + place, mask=inside, other=0.0)
        if GATED:
            up += tl.load(parts + place + columns, mask=inside, other=0.0)
    scale = 1.0
    if NORM:
        every_split = tl.arange(0, SPLIT_BLOCK)
        square = tl.sum(tl.load(squares + every_split * rows + row, mask=every_split < SPLIT, other=0.0), axis=0)
        scale = tl.rsqrt(square / inner + eps)
    place = row.to(tl.int64) * columns + column
    _finish(value, up, scale, bias, residual, out, place, inside, column, columns, GATED, BIAS, RESIDUAL, NORM)
