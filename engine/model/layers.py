"""One transformer layer, and a stack of them: shared by targets and DFlash drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.attention.base import Attention
from engine.model.linear import Linear, kernel_for
from engine.model.norm import InverseRms, norm_linear
from engine.model.rope import interleave
from engine.shape import ModelShape


@dataclass(frozen=True)
class Rows:
    """The rows of one forward: [N] each, ordered by span, request, position."""

    positions: Tensor
    write: Tensor  # KV slot each row's key and value go to
    rotation: Tensor  # [N, 1, head_dim / 2] complex
    plan: Any  # of the attention kernel


class Rotate:
    """Rotary embedding of heads; Llama's way between projection and attention."""

    def __call__(self, heads: Tensor, rotation: Tensor) -> Tensor:
        """Rotate [N, heads, head_dim] (pairs adjacent) by [N, 1, head_dim / 2]; returned in the wider precision."""
        return rotate(heads.to(rotation.real.dtype), rotation)


class NormRotate:
    """Per-head RMSNorm, then rotary embedding; Qwen3's way."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._weight, self._dtype = weight.to(wide), wide
        self._scale = InverseRms(eps, weight.shape[-1], wide, weight.device)

    def __call__(self, heads: Tensor, rotation: Tensor) -> Tensor:
        """Normalise and rotate [N, heads, head_dim]; `weight` is [heads, head_dim]."""
        x = heads.to(self._dtype)
        return rotate((x * self._scale(x)).mul_(self._weight), rotation)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Multiply adjacent pairs of [N, heads, head_dim] as complex numbers by [N, 1, head_dim / 2]."""
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2)


class Layer:
    """Pre-norm attention and SwiGLU, both residual."""

    def __init__(self, shape: ModelShape, tensors: Mapping[str, Tensor], prefix: str, attention: Attention) -> None:
        self._dims, self._attention = shape, attention
        self._mixed = shape.heads + shape.kv_heads  # heads that are rotated: queries, then keys
        get = _Getter(tensors, prefix)
        first = get("input_layernorm.weight")
        kernel = kernel_for(first.device, first.dtype)
        self._position = _position(shape, get)
        qkv, bias = projection(shape, get)
        self._qkv = norm_linear(first, shape.norm_eps, qkv, bias)
        self._out: Linear = kernel(get("self_attn.o_proj.weight"), get.optional("self_attn.o_proj.bias"))
        gate_up = torch.cat([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")])
        gate_up_bias = get.join("mlp.gate_proj.bias", "mlp.up_proj.bias")
        post_norm = get("post_attention_layernorm.weight")
        self._gate_up = norm_linear(post_norm, shape.norm_eps, gate_up, gate_up_bias)
        self._down: Linear = kernel(get("mlp.down_proj.weight"), get.optional("mlp.down_proj.bias"))

    def __call__(self, x: Tensor, rows: Rows, pool: Tensor) -> Tensor:
        """Return [N, hidden] after the layer; writes the rows' keys and values into `pool` first."""
        shape = self._dims
        heads = self._qkv(x).view(x.shape[0], self._mixed + shape.kv_heads, shape.head_dim)
        mixed = heads[:, : self._mixed]
        mixed.copy_(self._position(mixed, rows.rotation))
        pool.index_copy_(0, rows.write, heads[:, shape.heads :])
        x = self._out.add(self._attention(heads[:, : shape.heads], pool, rows.plan), x)
        gate_up = self._gate_up(x)
        gated = F.silu(gate_up[:, : shape.intermediate]).mul_(gate_up[:, shape.intermediate :])
        return self._down.add(gated, x)


class Stack:
    """Layers in order, tapping the residual stream after some of them."""

    def __init__(self, shape: ModelShape, tensors: Mapping[str, Tensor], prefix: str, attention: Attention) -> None:
        self._layers = [Layer(shape, tensors, f"{prefix}{i}.", attention) for i in range(shape.layers)]

    def __call__(
        self, x: Tensor, rows: Rows, pool: Tensor, taps: tuple[int, ...] = (), layers: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run the first `layers` layers.

        Args:
            x: [N, hidden].
            pool: [layers, slots, 2 × kv_heads, head_dim].
            taps: layer indices, ascending.

        Returns:
            [N, hidden], and [N, len(taps) × hidden] when there are taps.
        """
        features = []
        for index, layer in enumerate(self._layers[:layers]):
            x = layer(x, rows, pool[index])
            if index in taps:
                features.append(x)
        return x, torch.cat(features, dim=-1) if features else None


def layer_shapes(shape: ModelShape, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a stack whose layers are called `{prefix}{i}.`."""
    q, kv, hidden, inner = (
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
        shape.hidden,
        shape.intermediate,
    )
    one: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if shape.qk_norm:
        one |= {"self_attn.q_norm.weight": (shape.head_dim,), "self_attn.k_norm.weight": (shape.head_dim,)}
    if shape.attention_bias:
        sizes = {"q": q, "k": kv, "v": kv, "o": hidden}
        one |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    if shape.mlp_bias:
        one |= {"mlp.gate_proj.bias": (inner,), "mlp.up_proj.bias": (inner,), "mlp.down_proj.bias": (hidden,)}
    return {f"{prefix}{i}.{name}": size for i in range(shape.layers) for name, size in one.items()}


class _Getter:
    """Tensors of one layer by their short names."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        self._tensors, self._prefix = tensors, prefix

    def __call__(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name]

    def optional(self, name: str) -> Tensor | None:
        return self._tensors.get(self._prefix + name)

    def join(self, *names: str) -> Tensor | None:
        found = [tensor for name in names if (tensor := self.optional(name)) is not None]
        return torch.cat(found) if found else None


def projection(shape: ModelShape, get: _Getter) -> tuple[Tensor, Tensor | None]:
    """Return the fused q, k, v weight and bias, rotation partners adjacent in q and k."""

    def fuse(kind: str) -> Tensor | None:
        parts = [get.optional(f"self_attn.{name}_proj.{kind}") for name in "qkv"]
        if parts[0] is None or parts[1] is None or parts[2] is None:
            return None
        q = interleave(parts[0], shape.heads, shape.head_dim)
        k = interleave(parts[1], shape.kv_heads, shape.head_dim)
        return torch.cat([q, k, parts[2]])

    weight = fuse("weight")
    if weight is None:
        raise KeyError("self_attn.q_proj.weight")
    return weight, fuse("bias")


def _position(shape: ModelShape, get: _Getter) -> Rotate | NormRotate:
    if not shape.qk_norm:
        return Rotate()
    q, k = (interleave(get(f"self_attn.{name}_norm.weight"), 1, shape.head_dim) for name in "qk")
    weight = torch.cat([q.expand(shape.heads, -1), k.expand(shape.kv_heads, -1)])
    return NormRotate(weight, shape.norm_eps)
