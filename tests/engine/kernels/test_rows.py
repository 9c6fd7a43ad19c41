"""Norm, rotation and KV write, gate and argmax against float64."""

from __future__ import annotations

import pytest
import torch

from tests.engine.kernels.cases import DEVICE, DTYPES, WIDE, close, ints, normal

pytest.importorskip("triton", reason="a CPU-only torch comes without Triton")

from engine.errors import UnsupportedModel
from engine.kernels.triton_ops import TritonOps

OPS = TritonOps(DEVICE)
EPS = 1e-5


@DTYPES
@pytest.mark.parametrize(("rows", "hidden"), [(1, 48), (3, 256), (2, 4096), (2, 700)])
def test_norm(rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, delta, weight = (normal(*shape, dtype=dtype) for shape in ((rows, hidden), (rows, hidden), (hidden,)))
    close(OPS.norm(x, weight, EPS), WIDE.norm(x.double(), weight.double(), EPS))
    total, normed = OPS.add_norm(x, delta, weight, EPS)
    expected = WIDE.add_norm(x.double(), delta.double(), weight.double(), EPS)
    close(total, expected[0])
    close(normed, expected[1])
    same, normed = OPS.add_norm(x, None, weight, EPS)
    assert same is x
    close(normed, WIDE.norm(x.double(), weight.double(), EPS))


@DTYPES
@pytest.mark.parametrize("norms", [True, False], ids=["qk-norm", "plain"])
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "dim"), [(1, 4, 2, 64), (3, 6, 2, 16), (2, 5, 1, 128)])
def test_rotation_and_write(rows: int, heads: int, kv_heads: int, dim: int, norms: bool, dtype: torch.dtype) -> None:
    qkv = normal(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    q_norm, k_norm = (normal(dim, dtype=dtype) if norms else None for _ in range(2))
    cos_sin, slots = normal(40, dim), 9
    positions = torch.randint(0, 40, (rows,)).int().to(DEVICE)
    write = torch.randperm(slots)[:rows].int().to(DEVICE)
    pool = torch.full((slots, 2 * kv_heads, dim), float("nan"), dtype=dtype, device=DEVICE)
    q = OPS.rope_write(qkv, q_norm, k_norm, EPS, cos_sin, positions, pool, write)

    wide = torch.full(pool.shape, float("nan"), dtype=torch.float64, device=DEVICE)
    wide_norms = [None if norm is None else norm.double() for norm in (q_norm, k_norm)]
    close(q, WIDE.rope_write(qkv.double(), *wide_norms, EPS, cos_sin.double(), positions, wide, write))
    close(pool[write.long()], wide[write.long()])
    assert int(pool.isnan().sum()) == (slots - rows) * 2 * kv_heads * dim  # no other slot was touched


@DTYPES
@pytest.mark.parametrize("norms", [True, False], ids=["k-norm", "plain"])
def test_context_of_all_draft_layers(norms: bool, dtype: torch.dtype) -> None:
    layers, kv_heads, dim, rows, slots = 3, 2, 32, 4, 7
    kv = normal(rows, layers * 2 * kv_heads * dim, dtype=dtype)
    k_norm = normal(layers, dim, dtype=dtype) if norms else None
    cos_sin, positions = normal(20, dim), ints(3, 4, 5, 19)
    write = torch.randperm(slots)[:rows].int().to(DEVICE)
    pool = torch.full((layers + 1, slots, 2 * kv_heads, dim), float("nan"), dtype=dtype, device=DEVICE)
    OPS.context_write(kv, k_norm, EPS, cos_sin, positions, pool, write)
    wide = torch.full(pool.shape, float("nan"), dtype=torch.float64, device=DEVICE)
    wide_norm = None if k_norm is None else k_norm.double()
    WIDE.context_write(kv.double(), wide_norm, EPS, cos_sin.double(), positions, wide, write)
    close(pool[:layers, write.long()], wide[:layers, write.long()])
    assert int(pool.isnan().sum()) == (slots - rows) * layers * 2 * kv_heads * dim + pool[0].numel()


@DTYPES
@pytest.mark.parametrize(("rows", "inner"), [(1, 80), (3, 704), (2, 2500)])
def test_gate(rows: int, inner: int, dtype: torch.dtype) -> None:
    gate_up = normal(rows, 2 * inner, dtype=dtype)
    close(OPS.silu_mul(gate_up), WIDE.silu_mul(gate_up.double()))


@DTYPES
@pytest.mark.parametrize(("rows", "vocab"), [(1, 96), (3, 4096), (2, 9001)])
def test_argmax(rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits = normal(rows, vocab, dtype=dtype)
    assert OPS.argmax(logits).tolist() == logits.float().argmax(-1).tolist() or _tied(logits)
    logits[:, [vocab // 2, vocab - 1, 5]] = 40.0  # equals: the first wins
    assert OPS.argmax(logits).tolist() == [5] * rows
    logits.fill_(-float("inf"))
    assert OPS.argmax(logits).tolist() == [0] * rows
    logits.fill_(float("nan"))  # padding may hold anything: the index must still be one
    assert all(0 <= index < vocab for index in OPS.argmax(logits).tolist())


def _tied(logits: torch.Tensor) -> bool:
    """Return whether the least index of the largest value is what the kernel found; torch may name another one."""
    first = (logits == logits.max(-1, keepdim=True).values).int().argmax(-1)
    return OPS.argmax(logits).tolist() == first.tolist()


def test_a_head_that_the_kernels_cannot_hold_is_refused() -> None:
    pool = torch.zeros(4, 2, 96, device=DEVICE)
    with pytest.raises(UnsupportedModel, match="head_dim 96"):
        OPS.rope_write(normal(1, 3 * 96), None, None, EPS, normal(4, 96), ints(0), pool, ints(1))
