"""The reference kernels compute what the CPU engine computes."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.base import Paged
from engine.kernels.reference import ReferenceOps, norm_rotate
from engine.model.attention.base import Span
from engine.model.attention.torch import TorchAttention
from engine.model.layers import NormRotate

OPS = ReferenceOps()
WIDE = torch.float64


def _cache(lanes: int, pages: int, page_size: int, heads: int, dim: int) -> tuple[torch.Tensor, Paged]:
    """Return a random pool and lanes of 3, 3 + page_size … cached tokens on shuffled pages."""
    table = torch.randperm(lanes * pages).view(lanes, pages).int()
    pool = torch.randn(lanes * pages * page_size, 2 * heads, dim, dtype=WIDE)
    lengths = torch.tensor([3 + i * page_size for i in range(lanes)], dtype=torch.int32)
    return pool, Paged(table, torch.arange(lanes, dtype=torch.int32), lengths, page_size)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [1, 5])
def test_attention_of_a_block(queries: int, causal: bool) -> None:
    pool, paged = _cache(3, 6, 4, heads=2, dim=16)
    q = torch.randn(3 * queries, 6, 16, dtype=WIDE)
    slots = (paged.table.long()[:, :, None] * 4 + torch.arange(4)).flatten(1)
    engine = TorchAttention(2, 3, WIDE, torch.device("cpu"))
    plan = engine.plan([Span(slots, paged.lengths.tolist(), queries, None, causal)])
    made = OPS.attend(q, pool, paged, queries, 24, causal)
    torch.testing.assert_close(made, engine(q, pool, plan), rtol=1e-12, atol=1e-12)


def test_attention_of_prompt_chunks() -> None:
    pool, paged = _cache(3, 6, 4, heads=2, dim=16)
    offsets = torch.tensor([0, 7, 7, 9], dtype=torch.int32)  # the second chunk is empty, two rows are padding
    q = torch.randn(11, 6, 16, dtype=WIDE)
    made = OPS.attend_prefill(q, pool, paged, offsets)
    for lane, (first, end) in enumerate(((0, 7), (7, 7), (7, 9))):
        if end > first:
            one = Paged(paged.table, paged.lanes[lane : lane + 1], paged.lengths[lane : lane + 1], 4)
            torch.testing.assert_close(made[first:end], OPS.attend(q[first:end], pool, one, end - first, 24, True))
    assert not made[9:].any()


def test_rotation_is_the_engines() -> None:
    heads, angle = torch.randn(5, 3, 16, dtype=WIDE), torch.randn(5, 1, 8, dtype=WIDE)
    weight = torch.rand(16, dtype=WIDE)
    rotation = torch.polar(torch.ones_like(angle), angle)
    expected = NormRotate(weight.expand(3, -1), 1e-6)(heads.clone(), rotation)
    made = norm_rotate(heads, weight, 1e-6, torch.cat([angle.cos(), angle.sin()], dim=-1))
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)
