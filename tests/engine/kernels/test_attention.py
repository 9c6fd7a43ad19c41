"""Attention kernels against float64."""

from __future__ import annotations

import pytest
import torch

from tests.engine.kernels.cases import DEVICE, DTYPES, WIDE, cache, close, ints, normal

pytest.importorskip("triton", reason="a CPU-only torch comes without Triton")

from engine.kernels import attention, prefill
from engine.kernels.attention import AttendPlan
from engine.kernels.prefill import PrefillPlan
from engine.kernels.triton_ops import TritonOps, plan_for


@DTYPES
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "block"])
@pytest.mark.parametrize(
    ("queries", "heads", "kv_heads", "dim", "page_size", "lengths"),
    [
        (1, 4, 2, 64, 16, [0, 37]),
        (5, 6, 2, 32, 4, [41, 0, 3]),
        (16, 8, 1, 128, 16, [70]),
        (3, 2, 2, 16, 1, [7, 9]),
    ],
)
def test_rows_of_a_block(
    queries: int,
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    lengths: list[int],
    causal: bool,
    dtype: torch.dtype,
) -> None:
    made = cache(lengths, [queries] * len(lengths), kv_heads, dim, page_size, dtype)
    q = normal(len(lengths) * queries, heads, dim, dtype=dtype)
    expected = WIDE.attend(q.double(), made.wide, made.paged, queries, 128, causal)
    rows = 32 if dtype == torch.float32 else 128
    plan = AttendPlan(block=16, programs=3 * kv_heads * len(lengths), tile_rows=rows)  # three splits
    close(attention.attend(q, made.pool, made.paged, queries, 128, causal, plan), expected)
    if len(lengths) > 1:
        whole = AttendPlan(block=32, programs=1)
        close(attention.attend(q, made.pool, made.paged, queries, 128, causal, whole), expected)


def test_more_rows_than_a_tile_holds() -> None:
    made = cache([11, 30], [7, 7], 2, 32, 8, torch.float32)
    q = normal(14, 8, 32)
    expected = WIDE.attend(q.double(), made.wide, made.paged, 7, 64, True)
    close(attention.attend(q, made.pool, made.paged, 7, 64, True, AttendPlan(block=16, tile_rows=8)), expected)


def test_long_caches_are_cut_by_rows_and_streams() -> None:
    short, one, several = plan_for(128, 8, 16, 4096), plan_for(128, 8, 1, 32768), plan_for(128, 8, 16, 32768)
    assert (short, one.block) == (AttendPlan(), 128)
    assert attention.splits_for(several, 8, 32768) == several.programs // 8
    assert several.stages * 2 * several.block * 128 * 2 <= 227 * 1024  # keys and values in flight, bytes of an H200
    assert plan_for(128, 64, 16, 32768) == plan_for(256, 8, 16, 32768) == AttendPlan()


def test_splits_follow_from_what_capture_fixes() -> None:
    plan = AttendPlan(block=64, programs=264)
    assert attention.splits_for(plan, 8, 32768) == 33
    assert attention.splits_for(plan, 8, 100) == 2
    assert attention.splits_for(plan, 384, 32768) == 1


@DTYPES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "starts", "sizes", "padding"),
    [
        (4, 2, 32, [5, 0, 9, 0], [13, 7, 0, 1], 6),
        (3, 1, 64, [0, 20], [10, 21], 0),
        (2, 2, 16, [4], [0], 5),
    ],
)
def test_prompt_chunks(
    heads: int,
    kv_heads: int,
    dim: int,
    starts: list[int],
    sizes: list[int],
    padding: int,
    dtype: torch.dtype,
) -> None:
    made = cache(starts, sizes, kv_heads, dim, 4, dtype)
    offsets = torch.tensor([0, *sizes]).cumsum(0).int().to(DEVICE)
    q = normal(sum(sizes) + padding, heads, dim, dtype=dtype)
    if padding:
        q[-padding:] = float("nan")
    expected = WIDE.attend_prefill(q.nan_to_num().double(), made.wide, made.paged, offsets)
    plan = PrefillPlan(tile_rows=8, block=16, warps=4)
    close(prefill.attend_prefill(q, made.pool, made.paged, offsets, plan), expected)


def test_the_operations_take_the_kernels_defaults() -> None:
    ops = TritonOps(DEVICE)
    made = cache([70, 3], [2, 2], 2, 32, 16, torch.bfloat16)
    q = normal(4, 4, 32, dtype=torch.bfloat16)
    close(
        ops.attend(q, made.pool, made.paged, 2, 96, True), WIDE.attend(q.double(), made.wide, made.paged, 2, 96, True)
    )
    offsets = ints(0, 2, 4)
    close(
        ops.attend_prefill(q, made.pool, made.paged, offsets),
        WIDE.attend_prefill(q.double(), made.wide, made.paged, offsets),
    )
