"""Target and DFlash drafter on device kernels: the same functions as `engine.model`, over page tables.

Tensors are taken out of the mapping they come in as layers fuse them, so loading peaks at one layer above the weights.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.base import Gated, Linear, Ops
from engine.model.draft import LAYERS as DRAFT_LAYERS
from engine.model.draft import vocabulary
from engine.model.rope import interleave, rotation_table
from engine.model.target import LAYERS as TARGET_LAYERS
from engine.shape import DraftShape, ModelShape, Rope

Tensors = MutableMapping[str, Tensor]
Attend = Callable[[Tensor, Tensor], Tensor]
"""Attention of queries [T, heads, head_dim] in the pool of one layer; returns [T, heads × head_dim]."""


class Layer:
    """Pre-norm attention and SwiGLU, both residual."""

    def __init__(self, shape: ModelShape, take: Take, ops: Ops, cos_sin: Tensor) -> None:
        self._ops, self._cos_sin, self._eps = ops, cos_sin, shape.norm_eps
        q, k, v = (take.projection(name, shape) for name in "qkv")
        bias = take.biases(shape)
        self.q_norm: Tensor | None
        self.k_norm: Tensor | None
        self.q_norm, self.k_norm = take.norms(shape)
        self._qkv: Linear = ops.norm_linear(take("input_layernorm.weight"), self._eps, torch.cat([q, k, v]), bias)
        self._out: Linear = ops.linear(take("self_attn.o_proj.weight"), take.optional("self_attn.o_proj.bias"))
        gate_up = torch.cat([take("mlp.gate_proj.weight"), take("mlp.up_proj.weight")])
        gate_up_bias = take.join("mlp.gate_proj.bias", "mlp.up_proj.bias")
        post = take("post_attention_layernorm.weight")
        self._gated: Gated = ops.gated(post, self._eps, gate_up, gate_up_bias)
        self._down: Linear = ops.linear(take("mlp.down_proj.weight"), take.optional("mlp.down_proj.bias"))

    def __call__(self, x: Tensor, positions: Tensor, write: Tensor, pool: Tensor, attend: Attend) -> Tensor:
        """Return [T, hidden] after the layer; writes the rows' keys and values into `pool` first."""
        ops = self._ops
        qkv = self._qkv(x)
        q = ops.rope_write(qkv, self.q_norm, self.k_norm, self._eps, self._cos_sin, positions, pool, write)
        x = self._out.add(attend(q, pool), x)
        return self._down.add(self._gated(x), x)


class DeviceTarget:
    """The target: hidden states and tapped features of rows."""

    def __init__(self, shape: ModelShape, tensors: Tensors, ops: Ops, positions: int) -> None:
        self.shape = shape
        self.weight_bytes = _bytes(tensors)
        self.embedding = tensors.pop("model.embed_tokens.weight")
        self._norm = tensors.pop("model.norm.weight")
        self._ops = ops
        cos_sin = rotation(shape.rope, shape.head_dim, positions, self._norm.device)
        self._layers = [Layer(shape, Take(tensors, f"{TARGET_LAYERS}{i}."), ops, cos_sin) for i in range(shape.layers)]
        self.head: Linear = ops.linear(self.embedding if shape.tied else tensors.pop("lm_head.weight"))

    def embed(self, tokens: Tensor) -> Tensor:
        """Return [T, hidden] of [T] token ids."""
        return F.embedding(tokens, self.embedding)

    def forward(
        self, tokens: Tensor, positions: Tensor, write: Tensor, pools: Tensor, attend: Attend, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Run all layers on [T] tokens.

        Returns:
            Hidden states [T, hidden], not normalised, and features [T, len(taps) × hidden] when there are taps.
        """
        x, features = self.embed(tokens), []
        for index, layer in enumerate(self._layers):
            x = layer(x, positions, write, pools[index], attend)
            if index in taps:
                features.append(x)
        return x, torch.cat(features, dim=-1) if features else None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [T, vocab] of hidden states as `forward` gives them."""
        return self.head(self._ops.norm(hidden, self._norm, self.shape.norm_eps))


class DeviceDraft:
    """The DFlash drafter: context keys and values from features, hidden states of blocks; see `model.draft`."""

    def __init__(
        self, shape: DraftShape, tensors: Tensors, target: DeviceTarget, ops: Ops, layers: int, positions: int
    ) -> None:
        core = shape.core
        self.shape, self.layers, self._target, self._ops = shape, layers, target, ops
        self.weight_bytes = _bytes(tensors)
        self._to_target = vocabulary(tensors)
        self._eps = core.norm_eps
        self._cos_sin = rotation(core.rope, core.head_dim, positions, target.embedding.device)
        self._norm, self._hidden_norm = tensors.pop("norm.weight"), tensors.pop("hidden_norm.weight")
        self._fc = ops.linear(tensors.pop("fc.weight"))
        takes = [Take(tensors, f"{DRAFT_LAYERS}{i}.") for i in range(layers)]
        kv = torch.cat([take.projection(name, core, keep=True) for take in takes for name in "kv"])
        biases = [bias for take in takes if (bias := take.biases(core, keep=True, names="kv")) is not None]
        self._context = ops.norm_linear(self._hidden_norm, self._eps, kv, torch.cat(biases) if biases else None)
        self._layers = [Layer(core, take, ops, self._cos_sin) for take in takes]
        norms = [layer.k_norm for layer in self._layers if layer.k_norm is not None]
        self._k_norm = torch.stack(norms) if norms else None
        self._head: Linear = ops.linear(tensors.pop("lm_head.weight")) if "lm_head.weight" in tensors else target.head

    def write_context(self, features: Tensor, positions: Tensor, write: Tensor, pools: Tensor) -> None:
        """Turn features [T, taps × hidden] into context keys and values of every used layer."""
        kv = self._context(self._fc(features))
        self._ops.context_write(kv, self._k_norm, self._eps, self._cos_sin, positions, pools, write)

    def forward(
        self, tokens: Tensor, positions: Tensor, write: Tensor, pools: Tensor, attend: Attend, layers: int
    ) -> Tensor:
        """Return hidden states [T, hidden] of block rows after the first `layers` layers, not normalised."""
        x = self._target.embed(tokens)
        for index, layer in enumerate(self._layers[:layers]):
            x = layer(x, positions, write, pools[index], attend)
        return x

    def choose(self, hidden: Tensor) -> Tensor:
        """Return the likeliest target token [T] of hidden states as `forward` gives them."""
        best = self._ops.argmax(self._own_logits(hidden))
        return best if self._to_target is None else self._to_target[best]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the target's vocabulary [T, vocab]; tokens the drafter cannot name get −inf."""
        own = self._own_logits(hidden)
        if self._to_target is None:
            return own
        every = own.new_full((own.shape[0], self._target.shape.vocab), float("-inf"))
        return every.index_copy_(1, self._to_target, own)

    def _own_logits(self, hidden: Tensor) -> Tensor:
        return self._head(self._ops.norm(hidden, self._norm, self._eps))


class Take:
    """Tensors of one layer by their short names, taken out of the mapping."""

    def __init__(self, tensors: Tensors, prefix: str) -> None:
        self._tensors, self._prefix = tensors, prefix

    def __call__(self, name: str) -> Tensor:
        return self._tensors.pop(self._prefix + name)

    def optional(self, name: str) -> Tensor | None:
        """Return a tensor where there is one."""
        return self._tensors.pop(self._prefix + name, None)

    def join(self, *names: str) -> Tensor | None:
        """Return tensors one after the other, where there are any."""
        found = [tensor for name in names if (tensor := self.optional(name)) is not None]
        return torch.cat(found) if found else None

    def projection(self, name: str, shape: ModelShape, keep: bool = False) -> Tensor:
        """Return the weight of q, k or v; rotation partners adjacent in q and k."""
        return self._turned(name, "weight", shape, keep)

    def biases(self, shape: ModelShape, keep: bool = False, names: str = "qkv") -> Tensor | None:
        """Return the fused bias of the projections, where they have one."""
        if not shape.attention_bias:
            return None
        return torch.cat([self._turned(name, "bias", shape, keep) for name in names])

    def norms(self, shape: ModelShape) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return the norms of queries and keys [head_dim], where there are any."""
        if not shape.qk_norm:
            return None, None
        q, k = (interleave(self(f"self_attn.{name}_norm.weight"), 1, shape.head_dim) for name in "qk")
        return q, k

    def _turned(self, name: str, kind: str, shape: ModelShape, keep: bool) -> Tensor:
        full = f"{self._prefix}self_attn.{name}_proj.{kind}"
        tensor = self._tensors[full] if keep else self._tensors.pop(full)
        if name == "v":
            return tensor
        return interleave(tensor, shape.heads if name == "q" else shape.kv_heads, shape.head_dim)


def rotation(rope: Rope, head_dim: int, positions: int, device: torch.device) -> Tensor:
    """Return [positions, head_dim] float32: cosines, then sines."""
    turns = rotation_table(rope, head_dim, positions, torch.float32, device)
    return torch.cat([turns.real, turns.imag], dim=-1).contiguous()


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
