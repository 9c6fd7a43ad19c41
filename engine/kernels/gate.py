"""SwiGLU's gate: silu(gate) · up."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import ceil_div

BLOCK = 1024


@triton.jit
def gate(gate_value, up_value, dtype: tl.constexpr):
    """Return silu(gate) · up of float32 blocks, rounded to `dtype` where separate operations would round."""
    rounded = gate_value.to(dtype).to(tl.float32)
    opened = (rounded / (1.0 + tl.exp(-rounded))).to(dtype).to(tl.float32)
    return opened * up_value.to(dtype).to(tl.float32)


@triton.jit
def _silu_mul(gate_up, out, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    opened = tl.load(gate_up + row * 2 * inner + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + at, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + row * inner + at, gate(opened, up, dtype).to(dtype), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up, [T, inner], of [T, 2 × inner]."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inner)
    _silu_mul[(rows, ceil_div(inner, BLOCK))](gate_up, out, inner, BLOCK=BLOCK, num_warps=4)
    return out
