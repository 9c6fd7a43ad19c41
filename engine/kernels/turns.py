"""The two ends of a round: where its rows go, and what it leaves for the next one. One small kernel each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.base import Places, Standing
from engine.kernels.launch import power_of_two


@triton.jit(do_not_specialize=["stride"])
def _places(
    lanes, lengths, roots, slots, cached, root, positions, write, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    lane = tl.program_id(0)
    row = tl.load(lanes + lane).to(tl.int64)
    length = tl.load(lengths + row)
    tl.store(cached + lane, length)
    tl.store(root + lane, tl.load(roots + row))
    step = tl.arange(0, BLOCK)
    inside = step < ROWS
    slot = tl.load(slots + row * stride + length + step, mask=inside, other=0)
    tl.store(positions + lane * ROWS + step, length + step, mask=inside)
    tl.store(write + lane * ROWS + step, slot, mask=inside)


def places(standing: Standing, lanes: Tensor, rows: int) -> Places:
    """Return where `rows` rows a lane go; see `base.Ops.places`."""
    count = lanes.shape[0]
    made = Places(
        cached=torch.empty_like(lanes),
        roots=standing.roots.new_empty(count),
        positions=lanes.new_empty(count * rows),
        write=lanes.new_empty(count * rows),
    )
    _places[(count,)](
        lanes, standing.lengths, standing.roots, standing.slots, made.cached, made.roots, made.positions, made.write,
        standing.slots.stride(0), ROWS=rows, BLOCK=power_of_two(rows), num_warps=1,
    )  # fmt: skip
    return made


@triton.jit(do_not_specialize=["nobody"])
def _settle(
    lanes, drafted, tokens, kept, lengths, roots, packed, nobody,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    row = tl.load(lanes + lane)
    at = tl.arange(0, BLOCK)
    inside = at < ROWS
    token = tl.load(tokens + lane * ROWS + at, mask=inside, other=0)
    if KEPT:
        count = tl.load(kept + lane)
    else:
        following = tl.load(drafted + lane * ROWS + at + 1, mask=at < ROWS - 1, other=0)
        agrees = (following == token) & (at < ROWS - 1)
        count = (tl.min(tl.where(agrees, ROWS - 1, at), axis=0) + 1).to(tl.int64)
    tl.store(packed + lane * (ROWS + 1), count)
    tl.store(packed + lane * (ROWS + 1) + 1 + at, token, mask=inside)
    if row != nobody:
        newest = tl.sum(tl.where(at == count - 1, token, 0), axis=0)
        tl.store(lengths + row, tl.load(lengths + row) + count.to(tl.int32))
        tl.store(roots + row, newest)


def settle(standing: Standing, lanes: Tensor, drafted: Tensor, tokens: Tensor, kept: Tensor | None) -> Tensor:
    """Return what a round adds, [b, 1 + rows], and grow the lanes; see `base.Ops.settle`."""
    count, rows = tokens.shape
    packed = tokens.new_empty(count, 1 + rows)
    _settle[(count,)](
        lanes, drafted, tokens, kept, standing.lengths, standing.roots, packed, standing.nobody,
        ROWS=rows, BLOCK=power_of_two(rows), KEPT=kept is not None, num_warps=1,
    )  # fmt: skip
    return packed
