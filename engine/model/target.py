"""The target: embedding, stack, norm and head of a Qwen3 or Llama dense model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.attention.base import Attention
from engine.model.layers import Rows, Stack, layer_shapes
from engine.model.linear import Linear, kernel_for
from engine.model.norm import Norm
from engine.model.rope import rotation_table
from engine.model.weights import dummy_weights, load_weights
from engine.shape import ModelShape

LAYERS = "model.layers."


class Target:
    """Logits and tapped features of rows, against a KV pool that the caller owns."""

    def __init__(self, shape: ModelShape, tensors: Mapping[str, Tensor], attention: Attention, positions: int) -> None:
        self.shape = shape
        self._embedding = tensors["model.embed_tokens.weight"]
        kernel = kernel_for(self._embedding.device, self._embedding.dtype)
        self.linear_kernel = kernel.name
        self._stack = Stack(shape, tensors, LAYERS, attention)
        self._norm = Norm(tensors["model.norm.weight"], shape.norm_eps)
        self.head: Linear = kernel(self._embedding if shape.tied else tensors["lm_head.weight"], None)
        self.weight_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        self.rotation = rotation_table(
            shape.rope, shape.head_dim, positions, self._embedding.dtype, self._embedding.device
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """Return [N, hidden] of [N] token ids."""
        return F.embedding(tokens, self._embedding)

    def forward(self, tokens: Tensor, rows: Rows, pool: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Run all layers on [N] tokens.

        Returns:
            Normalised hidden states [N, hidden] (input of `head`), and features [N, len(taps) × hidden].
        """
        hidden, features = self._stack(self.embed(tokens), rows, pool, taps)
        return self._norm(hidden), features


def target_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of the checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab, shape.hidden),
        "model.norm.weight": (shape.hidden,),
    }
    if not shape.tied:
        shapes["lm_head.weight"] = (shape.vocab, shape.hidden)
    return shapes | layer_shapes(shape, LAYERS)


def target_tensors(
    shape: ModelShape, folder: Path, dtype: torch.dtype, device: torch.device, dummy_seed: int | None
) -> dict[str, Tensor]:
    """Return the target's tensors, from the folder, or random when a seed is given.

    Raises:
        ModelError: see `load_weights`.
    """
    shapes = target_shapes(shape)
    if dummy_seed is not None:
        return dummy_weights(shapes, dtype, device, dummy_seed)
    return load_weights(folder, shapes, dtype, device)
