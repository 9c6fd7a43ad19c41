"""Rotary position embedding, as complex rotations of adjacent pairs.

Checkpoints pair dimension i with i + d/2. Attention does not change when the rows of the q and k projections
are permuted alike, so loading reorders them (`interleave`) until partners are adjacent; a rotation is then one
complex product (RoFormer, arXiv 2104.09864, eq. 34).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.errors import UnsupportedModel
from engine.shape import DefaultRope, DynamicRope, LinearRope, Llama3Rope, Rope, YarnRope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return [head_dim / 2] radians per position, float64.

    Raises:
        UnsupportedModel: a rope type whose frequencies change with the length.
    """
    plain = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    match rope:
        case DefaultRope():
            return plain
        case LinearRope():
            return plain / rope.factor
        case Llama3Rope():
            return _llama3(rope, plain)
        case YarnRope():
            return _yarn(rope, plain, head_dim)
        case DynamicRope():
            raise UnsupportedModel("rope type dynamic is not implemented; use default, linear, llama3 or yarn")


def vector_scale(rope: Rope) -> float:
    """Return the factor on rotated vectors (YaRN's temperature, arXiv 2309.00071 eq. 22), else 1."""
    if not isinstance(rope, YarnRope):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def _llama3(rope: Llama3Rope, plain: Tensor) -> Tensor:
    """Slow waves are stretched by `factor`, fast ones kept, those between blended."""
    turns = rope.original_positions * plain / (2 * math.pi)  # rotations over the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: YarnRope, plain: Tensor, head_dim: int) -> Tensor:
    """NTK-by-parts (arXiv 2309.00071 §3.2): interpolate slow dimensions, keep fast ones."""

    def dimension(rotations: float) -> float:
        span = math.log(rope.original_positions / (rotations * 2 * math.pi))
        return head_dim * span / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
    ramp = ramp.clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def rotation_table(rope: Rope, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [positions, head_dim / 2] complex rotations; complex128 for float64 models, else complex64."""
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), inverse_frequencies(rope, head_dim))
    table = torch.polar(torch.full_like(angle, vector_scale(rope)), angle)
    return table.to(torch.complex128 if dtype == torch.float64 else torch.complex64).to(device)


def interleave(weight: Tensor, heads: int, head_dim: int) -> Tensor:
    """Reorder the head dimension (dim 0 = heads × head_dim) so that rotation partners are adjacent."""
    rest = weight.shape[1:]
    halves = weight.view(heads, 2, head_dim // 2, *rest)
    return halves.transpose(1, 2).reshape(heads * head_dim, *rest).contiguous()
