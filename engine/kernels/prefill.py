"""Causal attention of prompt chunks of different lengths over the paged cache, in one launch.

A tile is some query rows of one chunk times the query heads that share a KV head. Which chunk a tile belongs to is
found on the device from the chunks' offsets, so shapes depend on no length.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention import LOG2_E, fold
from engine.kernels.base import Paged
from engine.kernels.launch import ceil_div, power_of_two


@dataclass(frozen=True)
class PrefillPlan:
    """Rows of a tile (queries × shared heads, at least one query), cached positions a step."""

    tile_rows: int = 64
    block: int = 64
    warps: int = 4
    stages: int = 3


@triton.jit(do_not_specialize=["table_stride", "rows", "chunks"])
def _prefill(
    q, pool, table, lanes, starts, offsets, out, table_stride, scale, rows, chunks,
    CHUNKS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    # The padding behind the last chunk is one chunk more.
    chunk = tl.arange(0, CHUNKS)
    begins = tl.load(offsets + chunk, mask=chunk <= chunks, other=0)
    ends = tl.load(offsets + chunk + 1, mask=chunk < chunks, other=0)
    ends = tl.where(chunk == chunks, rows, ends)
    tiles = tl.where(chunk <= chunks, tl.cdiv(ends - begins, TILE), 0)
    mine = tl.sum((tl.cumsum(tiles, axis=0) <= tl.program_id(0)).to(tl.int32), axis=0)
    if mine <= chunks:
        tile = tl.program_id(0) - tl.sum(tl.where(chunk < mine, tiles, 0), axis=0)
        begin = tl.sum(tl.where(chunk == mine, begins, 0), axis=0)
        size = tl.sum(tl.where(chunk == mine, ends, 0), axis=0) - begin
        row = tl.arange(0, ROWS)
        query = tile * TILE + row // GROUP
        exists = (row < TILE * GROUP) & (query < size)
        line = (begin + query).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
        dim = tl.arange(0, DIM)
        place = line[:, None] * DIM + dim[None, :]
        value = tl.zeros([ROWS, DIM], tl.float32)
        if mine < chunks:
            block = tl.load(q + place, mask=exists[:, None], other=0.0)
            cached = tl.load(starts + mine)
            table_row = table + tl.load(lanes + mine).to(tl.int64) * table_stride
            best = tl.full([ROWS], -float("inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            end = cached + tl.minimum((tile + 1) * TILE, size)
            all_see = cached + tile * TILE + 1
            best, total, value = fold(
                block, pool, table_row, 0, end, all_see, cached + query, kv_head, best, total, value, scale,
                KV_HEADS, DIM, PAGE, BLOCK, STAGES,
            )  # fmt: skip
            value /= total[:, None]
        tl.store(out + place, value.to(out.dtype.element_ty), mask=exists[:, None])


def attend_prefill(q: Tensor, pool: Tensor, paged: Paged, offsets: Tensor, plan: PrefillPlan) -> Tensor:
    """Attend causally with prompt chunks; see `base.Ops.attend_prefill`."""
    rows, heads, dim = q.shape
    kv_heads, chunks = pool.shape[1] // 2, paged.lanes.shape[0]
    group = heads // kv_heads
    tile = max(1, plan.tile_rows // group)
    out = q.new_empty(rows, heads * dim)
    # Chunks and padding may each end in a tile that is not full.
    _prefill[(ceil_div(rows, tile) + chunks, kv_heads)](
        q, pool, paged.table, paged.lanes, paged.lengths, offsets, out,
        paged.table.stride(0), dim**-0.5 * LOG2_E, rows, chunks,
        CHUNKS=power_of_two(chunks + 1), TILE=tile, GROUP=group, KV_HEADS=kv_heads, DIM=dim, PAGE=paged.page_size,
        ROWS=power_of_two(tile * group, 16), BLOCK=plan.block, STAGES=plan.stages,
        num_warps=plan.warps,
    )  # fmt: skip
    return out
