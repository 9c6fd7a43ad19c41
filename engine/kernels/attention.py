"""Attention of decode, verify and draft rows over the paged cache: split over its length, then combined.

A program reads one stretch of one lane's cache for one KV head, once for all rows of the lane and all query heads
that share the head: together they are the rows of one tile. Lengths are read on the device and the grid is fixed, so
a stretch that a short lane does not have ends at once (flash decoding; online softmax of arXiv 1805.02867).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.base import Paged
from engine.kernels.launch import ceil_div, dot, power_of_two

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class AttendPlan:
    """How the work is cut: cached positions a step, and programs that the chip holds at once: splits fill it."""

    block: int = 64
    warps: int = 4
    stages: int = 3
    programs: int = 264
    tile_rows: int = 128  # query rows × shared heads of a program, at most


@triton.jit
def _blocks(
    q, pool, table_row, first, end, last_seen, kv_head, best, total, out, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Take positions first … end − 1 into the running softmax, see `fold`. Without masks: whole blocks all rows see."""
    dim = tl.arange(0, DIM)
    empty = tl.zeros([q.shape[0], BLOCK], tl.float32)
    for begin in tl.range(first, end, BLOCK, num_stages=STAGES):
        position = begin + tl.arange(0, BLOCK)
        inside = position < end
        if MASKED:
            page = tl.load(table_row + position // PAGE, mask=inside, other=0)
        else:
            page = tl.load(table_row + position // PAGE)
        row = ((page.to(tl.int64) * PAGE + position % PAGE) * (2 * KV_HEADS) + kv_head) * DIM
        place = pool + row[:, None] + dim[None, :]
        keys = tl.load(place, mask=inside[:, None], other=0.0) if MASKED else tl.load(place)
        scores = dot(q, tl.trans(keys), empty) * scale
        if MASKED:
            seen = inside[None, :] & (position[None, :] <= last_seen[:, None])
            scores = tl.where(seen, scores, -float("inf"))
        best_now = tl.maximum(best, tl.max(scores, axis=1))
        shift = best_now
        if MASKED:
            shift = tl.where(best_now == -float("inf"), 0.0, best_now)  # a row may see nothing of this stretch
        weights = tl.exp2(scores - shift[:, None])
        keep = tl.exp2(best - shift)
        place += KV_HEADS * DIM
        values = tl.load(place, mask=inside[:, None], other=0.0) if MASKED else tl.load(place)
        out = dot(weights.to(values.dtype), values, out * keep[:, None])
        total = total * keep + tl.sum(weights, axis=1)
        best = best_now
    return best, total, out


@triton.jit
def fold(
    q, pool, table_row, first, end, all_see, last_seen, kv_head, best, total, out, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take positions first … end − 1 into the running softmax of q [rows, D]: maximum, sum and weighted values.

    `scale` includes log2(e): exponentials are base 2. A row sees positions up to `last_seen` [rows], and every row
    those before `all_see`, most of a long text, which are taken without masks.
    """
    whole = first + tl.maximum(tl.minimum(all_see, end) - first, 0) // BLOCK * BLOCK
    best, total, out = _blocks(
        q, pool, table_row, first, whole, last_seen, kv_head, best, total, out, scale,
        KV_HEADS, DIM, PAGE, BLOCK, STAGES, False,
    )  # fmt: skip
    return _blocks(
        q, pool, table_row, whole, end, last_seen, kv_head, best, total, out, scale,
        KV_HEADS, DIM, PAGE, BLOCK, STAGES, True,
    )  # fmt: skip


@triton.jit
def _stretch(length, splits, BLOCK: tl.constexpr):
    """Return how many positions a split takes of `length`: whole blocks."""
    return tl.cdiv(tl.cdiv(length, splits), BLOCK) * BLOCK


@triton.jit(do_not_specialize=["table_stride", "splits"])
def _attend(
    q, pool, table, lanes, lengths, out, parts, stats, table_stride, splits, scale,
    QUERIES: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    CAUSAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    kv_head = tl.program_id(1) // TILES
    tile = tl.program_id(1) % TILES
    lane = tl.program_id(2)
    length = tl.load(lengths + lane) + QUERIES
    stretch = _stretch(length, splits, BLOCK)
    first = split * stretch
    if first < length:
        row = tl.arange(0, ROWS)
        query = tile * TILE + row // GROUP
        exists = (row < TILE * GROUP) & (query < QUERIES)
        head = kv_head * GROUP + row % GROUP
        line = (lane * QUERIES + query).to(tl.int64) * (KV_HEADS * GROUP) + head  # of [b × queries, Hq]
        dim = tl.arange(0, DIM)
        block = tl.load(q + line[:, None] * DIM + dim[None, :], mask=exists[:, None], other=0.0)
        last_seen = (length - QUERIES + query) if CAUSAL else tl.full([ROWS], 0, tl.int32) + length
        all_see = (length - QUERIES + tile * TILE + 1) if CAUSAL else length
        table_row = table + tl.load(lanes + lane).to(tl.int64) * table_stride
        best = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        value = tl.zeros([ROWS, DIM], tl.float32)
        end = tl.minimum(first + stretch, length)
        best, total, value = fold(
            block, pool, table_row, first, end, all_see, last_seen, kv_head, best, total, value, scale,
            KV_HEADS, DIM, PAGE, BLOCK, STAGES,
        )  # fmt: skip
        if WHOLE:
            value /= total[:, None]
            tl.store(out + line[:, None] * DIM + dim[None, :], value.to(out.dtype.element_ty), mask=exists[:, None])
        else:
            part = line * splits + split
            tl.store(parts + part[:, None] * DIM + dim[None, :], value, mask=exists[:, None])
            tl.store(stats + part * 2, best, mask=exists)
            tl.store(stats + part * 2 + 1, total, mask=exists)


@triton.jit(do_not_specialize=["splits"])
def _combine(
    parts, stats, lengths, out, splits,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    length = tl.load(lengths + tl.program_id(0) // QUERIES) + QUERIES
    used = tl.cdiv(length, _stretch(length, splits, BLOCK))  # splits that had something to do
    every = tl.arange(0, SPLITS_BLOCK)
    best = tl.max(tl.load(stats + (line * splits + every) * 2, mask=every < used, other=-float("inf")), axis=0)
    dim = tl.arange(0, DIM)
    total = 0.0
    value = tl.zeros([DIM], tl.float32)
    for begin in range(0, used, STEP):
        split = begin + tl.arange(0, STEP)
        inside = split < used
        part = line * splits + split
        weight = tl.exp2(tl.load(stats + part * 2, mask=inside, other=-float("inf")) - best)
        total += tl.sum(weight * tl.load(stats + part * 2 + 1, mask=inside, other=0.0), axis=0)
        made = tl.load(parts + part[:, None] * DIM + dim[None, :], mask=inside[:, None], other=0.0)
        value += tl.sum(made * weight[:, None], axis=0)
    tl.store(out + line * DIM + dim, (value / total).to(out.dtype.element_ty))


def splits_for(plan: AttendPlan, programs: int, max_len: int) -> int:
    """Return into how many stretches a lane's cache is cut, from what is fixed before lengths are known."""
    return max(1, min(plan.programs // programs, ceil_div(max_len, plan.block)))


def attend(
    q: Tensor,
    pool: Tensor,
    paged: Paged,
    queries: int,
    max_len: int,
    causal: bool,
    plan: AttendPlan,
) -> Tensor:
    """Attend with `queries` rows of every lane; see `base.Ops.attend`."""
    rows, heads, dim = q.shape
    kv_heads, lanes = pool.shape[1] // 2, paged.lanes.shape[0]
    group = heads // kv_heads
    tile = min(queries, max(1, plan.tile_rows // group))
    tiles = ceil_div(queries, tile)
    splits = splits_for(plan, lanes * kv_heads * tiles, max_len)
    out = q.new_empty(rows, heads * dim)
    parts = stats = None
    if splits > 1:
        parts = torch.empty(rows * heads * splits * dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(rows * heads * splits * 2, dtype=torch.float32, device=q.device)
    _attend[(splits, kv_heads * tiles, lanes)](
        q, pool, paged.table, paged.lanes, paged.lengths, out, parts, stats,
        paged.table.stride(0), splits, dim**-0.5 * LOG2_E,
        QUERIES=queries, TILE=tile, TILES=tiles, GROUP=group, KV_HEADS=kv_heads, DIM=dim, PAGE=paged.page_size,
        ROWS=power_of_two(tile * group, 16), BLOCK=plan.block, WHOLE=splits == 1, CAUSAL=causal, STAGES=plan.stages,
        num_warps=plan.warps,
    )  # fmt: skip
    if splits > 1:
        _combine[(rows, heads)](
            parts, stats, paged.lengths, out, splits,
            QUERIES=queries, HEADS=heads, DIM=dim, BLOCK=plan.block,
            SPLITS_BLOCK=power_of_two(splits), STEP=min(16, power_of_two(splits)), num_warps=2,
        )  # fmt: skip
    return out
