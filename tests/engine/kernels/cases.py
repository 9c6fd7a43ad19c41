"""Inputs and the comparison with float64, shared by the kernels' tests."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.kernels.base import Paged
from engine.kernels.reference import ReferenceOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDE = ReferenceOps()  # run on float64 inputs
#: ‖made − expected‖ / ‖expected‖: above what rounding does (the interpreter cuts bfloat16 off instead of rounding to
#: nearest), far below what a mistake does.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2 if DEVICE.type == "cuda" else 2.5e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Return fresh numbers, other ones in every run."""
    return (torch.randn(*shape) * scale).to(dtype).to(DEVICE)


def ints(*values: int) -> Tensor:
    """Return [n] int32."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def close(made: Tensor, expected: Tensor) -> None:
    """Compare with the float64 result: over all elements, and no element unwritten."""
    wide = made.double()
    assert made.shape == expected.shape
    assert bool(wide.isfinite().all())
    error = (wide - expected).norm() / expected.norm().clamp_min(1e-30)
    assert float(error) < BOUND[made.dtype], float(error)


@dataclass(frozen=True)
class Cache:
    """A pool whose slots are NaN but where a lane may read, and the lanes' places in it."""

    pool: Tensor
    paged: Paged

    @property
    def wide(self) -> Tensor:
        """The pool in float64."""
        return self.pool.double()


def cache(
    lengths: list[int], rows: list[int], kv_heads: int, dim: int, page_size: int, dtype: torch.dtype, spare: int = 2
) -> Cache:
    """Return lanes on shuffled pages of a larger pool, in shuffled table rows; every lane has `rows` more than cached.

    The pool and the pages behind a lane's last are poisoned: reading them would make a result NaN.
    """
    lanes = len(lengths)
    pages = -(-max(length + more for length, more in zip(lengths, rows, strict=True)) // page_size) + 1
    table_rows = lanes + spare
    table = torch.randperm(table_rows * pages).view(table_rows, pages).int()
    order = torch.randperm(table_rows)[:lanes].int()
    pool = torch.full((table_rows * pages * page_size, 2 * kv_heads, dim), float("nan"), dtype=dtype)
    for lane, (length, more) in enumerate(zip(lengths, rows, strict=True)):
        position = torch.arange(length + more)
        slots = table[int(order[lane])][position // page_size].long() * page_size + position % page_size
        pool[slots] = torch.randn(len(position), 2 * kv_heads, dim).to(dtype)
    paged = Paged(table.to(DEVICE), order.to(DEVICE), ints(*lengths), page_size)
    return Cache(pool.to(DEVICE), paged)
