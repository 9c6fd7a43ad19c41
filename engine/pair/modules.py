"""The two models as trained: a Qwen3 target and its DFlash drafter.

Parameter names are those of the published layouts (Hugging Face ``Qwen3ForCausalLM``; z-lab DFlash), so
a state dict is a checkpoint.  Shapes: B batch, S context, Q draft-block tokens, H hidden, h heads,
d head size, V vocabulary, F tapped layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TargetConfig:
    """The Qwen3 fields that this pair varies; names as in config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096


@dataclass(frozen=True)
class DraftConfig(TargetConfig):
    """A drafter: the target's widths, its own depth, and what it taps.

    ``target_layer_ids``: the feature of id i is the residual stream after target layer i.
    """

    block_size: int = 16
    mask_token_id: int = 1
    num_target_layers: int = 0
    target_layer_ids: tuple[int, ...] = ()


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32 (float64 stays float64)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def rope_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rope:
    """cos and sin [..., S, d] for ``positions`` [..., S] (Su et al. 2021; halves paired, not neighbours)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim
    angles = positions[..., None].to(wide) * theta**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Apply rotary positions to heads ``x`` [B, h, S, d] with tables [B or 1, S, d]."""
    cos, sin = rope[0].unsqueeze(1), rope[1].unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention with an RMS norm on every query and key head (Qwen3)."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def query(self, x: Tensor, rope: Rope) -> Tensor:
        """Rotated queries [B, h, S, d] of ``x`` [B, S, H]."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)))
        return rotate(q.transpose(1, 2), rope)

    def key_value(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [B, kv heads, S, d] of ``x`` [B, S, H]."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        return rotate(k.transpose(1, 2), rope), v.transpose(1, 2)

    def output(self, mixed: Tensor) -> Tensor:
        """Back to the residual width: ``mixed`` [B, h, S, d] to [B, S, H]."""
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return projected


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Layer(nn.Module):
    """One pre-norm decoder layer's parameters, shared in form by target and drafter."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def causal(self, x: Tensor, rope: Rope) -> Tensor:
        """The target's layer over a whole sequence ``x`` [B, S, H]."""
        normed = self.input_layernorm(x)
        q = self.self_attn.query(normed, rope)
        k, v = self.self_attn.key_value(normed, rope)
        x = x + self.self_attn.output(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        mixed: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return mixed

    def draft(self, x: Tensor, context: Tensor, ropes: tuple[Rope, Rope], mask: Tensor) -> Tensor:
        """The drafter's layer: block tokens ``x`` [B, Q, H] attend to ``context`` [B, S, H] and themselves.

        The context enters as keys and values through the layer's own projections, without the input norm
        (DFlash, arXiv 2602.06036).  ``ropes`` are the block's and the context's; ``mask`` [B, 1, Q, S+Q]
        is True where a query may look.
        """
        attention, normed = self.self_attn, self.input_layernorm(x)
        q = attention.query(normed, ropes[0])
        own, given = attention.key_value(normed, ropes[0]), attention.key_value(context, ropes[1])
        groups = attention.heads // attention.kv_heads
        k, v = (torch.cat([a, b], dim=2).repeat_interleave(groups, dim=1)
                for a, b in zip(given, own, strict=True))  # fmt: skip
        x = x + attention.output(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        mixed: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return mixed


class TargetBody(nn.Module):
    """Everything below ``model.`` in a Qwen3 checkpoint."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Target(nn.Module):
    """Qwen3 with tied embeddings."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.model = TargetBody(config)
        initialise(self)

    def layers(self) -> list[Layer]:
        """The decoder layers, first to last."""
        return [layer for layer in self.model.layers if isinstance(layer, Layer)]

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings [..., H]."""
        embedded: Tensor = self.model.embed_tokens(ids)
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits [..., V] of normed ``hidden`` (the head is the embedding)."""
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype))

    def forward(self, ids: Tensor, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Final normed hidden [B, S, H] of ``ids`` [B, S], and the features [B, S, F*H] after ``taps``."""
        x = self.embed(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        rope = rope_tables(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        kept: dict[int, Tensor] = {}
        for number, layer in enumerate(self.layers()):
            x = layer.causal(x, rope)
            if number in taps:
                kept[number] = x
        features = torch.cat([kept[tap] for tap in taps], dim=-1) if taps else None
        return self.model.norm(x), features

    def features(self, ids: Tensor, taps: Sequence[int]) -> Tensor:
        """The tapped residual streams [B, S, F*H] alone."""
        _, features = self(ids, taps)
        if not isinstance(features, Tensor):
            raise ValueError("at least one layer must be tapped")
        return features


class Drafter(nn.Module):
    """DFlash drafter (arXiv 2602.06036): no embedding and no head, both are the target's."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        initialise(self)

    def fuse(self, features: Tensor) -> Tensor:
        """The context all draft layers share: hidden_norm(fc(features)), [B, S, H]."""
        fused: Tensor = self.hidden_norm(self.fc(features))
        return fused

    def forward(
        self, block: Tensor, features: Tensor, block_positions: Tensor, context_positions: Tensor, mask: Tensor
    ) -> list[Tensor]:
        """Normed hidden [B, Q, H] after each draft layer; apply the target's head to any of them.

        ``block`` [B, Q, H]: embeddings of real first tokens and mask tokens.  ``features`` [B, S, F*H].
        ``block_positions`` [B, Q] and ``context_positions`` [B or 1, S] are absolute.  ``mask``
        [B, 1, Q, S+Q]: each block sees the context before its first token and, in both directions, itself.
        """
        context, x = self.fuse(features), block
        config = self.config
        ropes = (
            rope_tables(block_positions, config.head_dim, config.rope_theta, x.dtype),
            rope_tables(context_positions, config.head_dim, config.rope_theta, x.dtype),
        )
        outputs = []
        for layer in self.layers:
            if isinstance(layer, Layer):
                x = layer.draft(x, context, ropes, mask)
                outputs.append(self.norm(x))
        return outputs


def initialise(module: nn.Module) -> None:
    """Normal weights scaled by fan-in; projections back into the residual start at zero."""
    for name, parameter in module.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)
        elif "embed_tokens" in name:
            nn.init.normal_(parameter, std=0.02)
        elif parameter.ndim == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
