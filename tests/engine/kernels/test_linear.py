"""Linear layers, with norm, gate, bias and residual, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.engine.kernels.cases import BOUND, DEVICE, DTYPES, WIDE, close, normal

pytest.importorskip("triton", reason="a CPU-only torch comes without Triton")

from engine.kernels.choice import TritonLinear, bucket, candidates
from engine.kernels.linear import Library, Plan, Product, Stream, Vector
from engine.kernels.triton_ops import TritonOps, fold_norm

EPS = 1e-5
PLANS: list[tuple[int, Plan]] = [
    (1, Vector(8, 64)),
    (1, Vector(16, 32, split=3, stages=2)),
    (2, Vector(8, 64, split=2)),
    (1, Stream(16, 16, 64)),
    (5, Stream(16, 32, 32, split=3)),
    (16, Stream(16, 64, 32, split=2, swap=True)),
    (21, Stream(32, 16, 64, norm_first=True)),
    (70, Stream(64, 64, 64, norm_first=True)),  # two tiles of rows
    (3, Library()),
]
named = pytest.mark.parametrize(("rows", "plan"), PLANS, ids=[f"{type(p).__name__}-{r}" for r, p in PLANS])


def layer(out: int, inner: int, norm: bool, gated: bool, bias: bool, dtype: torch.dtype) -> tuple[TritonLinear, list]:
    """Return a layer on a folded weight, and norm, weight and bias as they were."""
    weight = normal(out, inner, dtype=dtype, scale=inner**-0.5)
    parts = [normal(inner, dtype=dtype) if norm else None, weight.clone(), normal(out, dtype=dtype) if bias else None]
    if norm:
        fold_norm(parts[0], weight)
    return TritonLinear(Product(weight, parts[2], EPS if norm else None, gated)), parts


def wide(parts: list) -> list:
    return [None if part is None else part.double() for part in parts]


@DTYPES
@named
def test_plain_and_with_residual(rows: int, plan: Plan, dtype: torch.dtype) -> None:
    inner = 128 if rows == 5 else 176  # whole blocks, or not
    made, parts = layer(72, inner, norm=False, gated=False, bias=rows % 2 == 1, dtype=dtype)
    made.plans[bucket(rows)] = plan
    x, residual = normal(rows, inner, dtype=dtype), normal(rows, 72, dtype=dtype)
    _, weight, bias = wide(parts)
    expected = WIDE.linear(weight, bias)
    close(made(x), expected(x.double()))
    close(made.add(x, residual), expected.add(x.double(), residual.double()))


@DTYPES
@named
def test_behind_a_norm(rows: int, plan: Plan, dtype: torch.dtype) -> None:
    made, (norm, weight, bias) = layer(40, 144, norm=True, gated=False, bias=rows % 2 == 0, dtype=dtype)
    made.plans[bucket(rows)] = plan
    x = normal(rows, 144, dtype=dtype, scale=3.0)
    norm, weight, bias = wide([norm, weight, bias])
    close(made(x), WIDE.norm_linear(norm, EPS, weight, bias)(x.double()))


@DTYPES
@named
def test_gate_behind_a_norm(rows: int, plan: Plan, dtype: torch.dtype) -> None:
    made, (norm, weight, bias) = layer(2 * 40, 144, norm=True, gated=True, bias=rows == 1, dtype=dtype)
    made.plans[bucket(rows)] = plan
    x = normal(rows, 144, dtype=dtype)
    norm, weight, bias = wide([norm, weight, bias])
    close(made(x), WIDE.gated(norm, EPS, weight, bias)(x.double()))


def test_the_same_numbers_every_time() -> None:
    made, _ = layer(72, 176, norm=True, gated=False, bias=False, dtype=torch.bfloat16)
    made.plans[16] = Stream(16, 16, 32, split=4)
    x = normal(9, 176, dtype=torch.bfloat16)
    assert torch.equal(made(x), made(x))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize("rows", [1, 7, 16])
def test_a_transposed_tile_reads_its_norm_first(rows: int, split: int, gated: bool) -> None:
    plan = Stream(16, 64, 32, split, swap=True)
    assert plan.norm_apart
    made, (norm, weight, _) = layer(2 * 72 if gated else 72, 304, True, gated, False, torch.float32)
    made.plans[bucket(rows)] = plan
    x = normal(rows, 304, scale=2.0)
    norm, weight, _ = wide([norm, weight, None])
    expected = (WIDE.gated if gated else WIDE.norm_linear)(norm, EPS, weight)
    close(made(x), expected(x.double()))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="buffers come round again, and can race, in compiled kernels alone")
@pytest.mark.skipif(DEVICE.type != "cuda", reason="buffers come round again, and can race, in compiled kernels alone")
@pytest.mark.parametrize(("norm", "gated"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("rows", [1, 16, 32, 64])
def test_every_candidate_at_full_size(rows: int, norm: bool, gated: bool) -> None:
    made, parts = layer(8192 * (2 if gated else 1), 4096, norm, gated, bias=False, dtype=torch.bfloat16)
    narrow = Product(made.product.weight[:4096], None, made.product.eps, gated)  # splits the inner dimension
    scale, weight, _ = wide(parts)
    x = normal(rows, 4096, dtype=torch.bfloat16)
    if gated:
        expected = WIDE.gated(scale, EPS, weight)(x.double())
    else:
        expected = (WIDE.norm_linear(scale, EPS, weight) if norm else WIDE.linear(weight))(x.double())
    for plan in (*candidates(made.product, rows), *candidates(narrow, rows)):
        made.plans[bucket(rows)] = plan
        first = made(x)
        close(first, expected)
        assert all(torch.equal(made(x), first) for _ in range(20)), plan


def test_folding_keeps_what_the_layer_computes() -> None:
    ops = TritonOps(DEVICE)
    weight, norm, x = normal(24, 48), normal(48), normal(2, 48)
    before = weight.clone()
    close(ops.norm_linear(norm, EPS, weight)(x), WIDE.norm_linear(norm.double(), EPS, before.double())(x.double()))
    assert BOUND[x.dtype] < 1e-3


def test_every_candidate_suits_its_bucket() -> None:
    product = Product(torch.empty(8192, 64, dtype=torch.bfloat16), None, None, gated=False)
    for rows in (1, 16, 32, 64, 128):
        plans = candidates(product, rows)
        assert Library() in plans
        assert len(plans) <= 12
        assert all(plan.rows >= rows for plan in plans if isinstance(plan, Stream))
    assert candidates(product, 256) == (Library(),)
    assert [bucket(rows) for rows in (1, 2, 16, 17, 128, 129)] == [1, 16, 16, 32, 128, 256]
