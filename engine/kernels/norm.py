"""RMSNorm of rows, with the residual sum in front: one program a row, which stays in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import power_of_two


@triton.jit
def _norm(
    x, delta, weight, total, normed, hidden, eps,
    BLOCK: tl.constexpr, DELTA: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    row = tl.program_id(0).to(tl.int64) * hidden
    value = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    if DELTA:
        # Rounded before it is normalised: the residual stream is what later layers add to.
        value += tl.load(delta + row + at, mask=inside, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty)
        tl.store(total + row + at, value, mask=inside)
        value = value.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value) / hidden + eps)
    if WEIGHT:
        value *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + at, value.to(normed.dtype.element_ty), mask=inside)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + delta and its RMSNorm · weight, [T, hidden] each; without a delta the sum is x itself."""
    rows, hidden = x.shape
    normed = torch.empty_like(x)
    total = x if delta is None else torch.empty_like(x)
    block = power_of_two(hidden)
    _norm[(rows,)](
        x, delta, weight, total, normed, hidden, eps,
        BLOCK=block, DELTA=delta is not None, WEIGHT=weight is not None,
        num_warps=8 if block > 2048 else 4,
    )  # fmt: skip
    return total, normed
