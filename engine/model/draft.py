"""The DFlash draft model: context features fused once per token, one bidirectional forward per block.

Layout and equations: DFlash (arXiv 2602.06036). With H the tapped residual streams of committed tokens,
c = hidden_norm(fc(concat(H))); in draft layer l the keys and values are k_l, v_l of c (context, not normalised by
the layer's input norm) followed by k_l, v_l of the block's own states; attention is not causal inside the block.
Position i of the block predicts the token *at* i.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.model.attention.base import Attention
from engine.model.layers import NormRotate, Rotate, Rows, Stack, layer_shapes
from engine.model.linear import Linear, kernel_for
from engine.model.norm import Norm
from engine.model.rope import interleave, rotation_table
from engine.model.target import Target
from engine.model.weights import Shapes, dummy_weights, load_weights
from engine.shape import DraftShape, ModelShape

LAYERS = "layers."
SPARE = ("rotary_emb.inv_freq", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")  # change nothing here


class DraftModel:
    """Draft logits of blocks, against a draft KV pool that the caller owns."""

    def __init__(
        self,
        shape: DraftShape,
        tensors: Mapping[str, Tensor],
        target: Target,
        attention: Attention,
        layers: int,
        positions: int,
    ) -> None:
        stack = shape.core
        self.shape, self.layers, self._target = shape, layers, target
        fc = tensors["fc.weight"]
        kernel = kernel_for(fc.device, fc.dtype)
        self._fc: Linear = kernel(fc, None)
        self._hidden_norm = Norm(tensors["hidden_norm.weight"], stack.norm_eps)
        self._norm = Norm(tensors["norm.weight"], stack.norm_eps)
        self._stack = Stack(stack, tensors, LAYERS, attention)
        weight, bias, self._position = _context(stack, tensors, layers)
        self._context: Linear = kernel(weight, bias)
        self._head: Linear = kernel(tensors["lm_head.weight"], None) if "lm_head.weight" in tensors else target.head
        self._to_target = vocabulary(tensors)
        self.weight_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        self.rotation = rotation_table(stack.rope, stack.head_dim, positions, fc.dtype, fc.device)

    def write_context(self, features: Tensor, positions: Tensor, write: Tensor, pool: Tensor) -> None:
        """Turn features [N, taps × hidden] of committed tokens into context KV of every used layer.

        One product makes the keys and values of all layers; `pool` is [layers, slots, 2 × kv_heads, head_dim].
        """
        stack = self.shape.core
        rows, layers, heads, dim = features.shape[0], self.layers, stack.kv_heads, stack.head_dim
        fused = self._hidden_norm(self._fc(features))
        kv = self._context(fused).view(rows, layers, 2, heads, dim)
        keys = kv[:, :, 0].reshape(rows, layers * heads, dim)
        kv[:, :, 0] = self._position(keys, self.rotation[positions][:, None]).view(rows, layers, heads, dim)
        pool[:layers].index_copy_(1, write, kv.view(rows, layers, 2 * heads, dim).transpose(0, 1))

    def forward(self, tokens: Tensor, rows: Rows, pool: Tensor, layers: int) -> Tensor:
        """Return normalised hidden states [N, hidden] of block rows (root token, then masks) after `layers` layers."""
        hidden, _ = self._stack(self._target.embed(tokens), rows, pool, layers=layers)
        return self._norm(hidden)

    def choose(self, hidden: Tensor) -> Tensor:
        """Return the likeliest target token [N] of hidden states [N, hidden]."""
        best = self._head(hidden).max(dim=-1).indices
        return best if self._to_target is None else self._to_target[best]

    def likeliest(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities [N, k], descending, and target ids [N, k] of the k = min(count, vocabulary) best."""
        logits = self._head(hidden)
        best = logits.topk(min(count, logits.shape[-1]), dim=-1)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_probs = best.values.double() - wide.logsumexp(dim=-1, keepdim=True).double()
        return log_probs, best.indices if self._to_target is None else self._to_target[best.indices]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the target's vocabulary [N, vocab]; tokens the drafter cannot name get −inf."""
        own = self._head(hidden)
        if self._to_target is None:
            return own
        every = own.new_full((own.shape[0], self._target.shape.vocab), float("-inf"))
        return every.index_copy_(1, self._to_target, own)


def draft_shapes(shape: DraftShape) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of the checkpoint."""
    stack = shape.core
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (stack.hidden, len(shape.taps) * stack.hidden),
        "hidden_norm.weight": (stack.hidden,),
        "norm.weight": (stack.hidden,),
    }
    if shape.head_rows is not None:
        shapes["lm_head.weight"] = (shape.head_rows, stack.hidden)
        if shape.head_rows != stack.vocab:
            shapes["d2t"] = (shape.head_rows,)
    return shapes | layer_shapes(stack, LAYERS)


def draft_tensors(
    shape: DraftShape, folder: Path, dtype: torch.dtype, device: torch.device, dummy_seed: int | None
) -> dict[str, Tensor]:
    """Return the drafter's tensors, from the folder, or random when a seed is given.

    Raises:
        ModelError: see `load_weights`.
    """
    shapes: Shapes = draft_shapes(shape)
    if dummy_seed is not None:
        tensors = dummy_weights(shapes, dtype, device, dummy_seed)
        if "d2t" in tensors:
            tensors["d2t"] = torch.zeros_like(tensors["d2t"], dtype=torch.int64)
        return tensors
    return load_weights(folder, shapes, dtype, device, prefixes=("", "model."), spare=SPARE)


def _context(
    shape: ModelShape, tensors: Mapping[str, Tensor], layers: int
) -> tuple[Tensor, Tensor | None, Rotate | NormRotate]:
    """Return the fused k, v projection of the context for all layers [layers × 2 × kv, hidden], bias, k's norm."""
    weights, biases, norms = [], [], []
    for layer in range(layers):
        name = f"{LAYERS}{layer}.self_attn."
        key = interleave(tensors[f"{name}k_proj.weight"], shape.kv_heads, shape.head_dim)
        weights += [key, tensors[f"{name}v_proj.weight"]]
        if shape.attention_bias:
            bias = interleave(tensors[f"{name}k_proj.bias"], shape.kv_heads, shape.head_dim)
            biases += [bias, tensors[f"{name}v_proj.bias"]]
        if shape.qk_norm:
            norm = interleave(tensors[f"{name}k_norm.weight"], 1, shape.head_dim)
            norms.append(norm.expand(shape.kv_heads, -1))
    position = NormRotate(torch.cat(norms), shape.norm_eps) if norms else Rotate()
    return torch.cat(weights), torch.cat(biases) if biases else None, position


def vocabulary(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return the target id of every draft id, when the drafter has a vocabulary of its own (d2t holds offsets)."""
    if "d2t" not in tensors:
        return None
    offsets = tensors["d2t"].to(torch.int64)
    return offsets + torch.arange(offsets.shape[0], device=offsets.device)
