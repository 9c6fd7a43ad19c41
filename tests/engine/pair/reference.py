"""The DFlash round in float64, written straight from the equations, one token and one head at a time.

Independent of ``engine.pair.modules``: numpy only, loops instead of batched tensors.  Source: DFlash
(arXiv 2602.06036) for the drafter; Qwen3 for norms, heads, rope and SwiGLU.
"""

from __future__ import annotations

import numpy as np

Weights = dict[str, np.ndarray]


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight for one vector."""
    return x / np.sqrt(np.mean(x * x) + eps) * weight


def rope(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Rotate pair (i, i + d/2) of one head by position * theta^(-2i/d)."""
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return out


def heads(vector: np.ndarray, size: int) -> list[np.ndarray]:
    """Cut a projection into heads."""
    return [vector[i : i + size] for i in range(0, len(vector), size)]


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def attend(query: np.ndarray, keys: list[np.ndarray], values: list[np.ndarray]) -> np.ndarray:
    """Softmax attention of one query head."""
    scores = np.array([query @ key for key in keys]) / np.sqrt(len(query))
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def layer(
    weights: Weights,
    prefix: str,
    config: dict[str, float],
    states: list[np.ndarray],
    given: list[np.ndarray],
    positions: list[int],
    given_positions: list[int],
    causal: bool,
) -> list[np.ndarray]:
    """One layer over ``states``; ``given`` vectors are keys and values only, taken without the input norm."""
    eps, theta, size = config["rms_norm_eps"], config["rope_theta"], int(config["head_dim"])
    part = {name: weights[f"{prefix}.self_attn.{name}.weight"] for name in
            ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}  # fmt: skip
    normed = [rms(x, weights[f"{prefix}.input_layernorm.weight"], eps) for x in states]
    sources = list(zip(given, given_positions, strict=True)) + list(zip(normed, positions, strict=True))
    keys = [[rope(rms(head, part["k_norm"], eps), place, theta) for head in heads(part["k_proj"] @ x, size)]
            for x, place in sources]  # fmt: skip
    values = [heads(part["v_proj"] @ x, size) for x, _ in sources]
    out = []
    for number, (x, state, place) in enumerate(zip(normed, states, positions, strict=True)):
        seen = len(given) + number + 1 if causal else len(sources)
        queries = [rope(rms(head, part["q_norm"], eps), place, theta)
                   for head in heads(part["q_proj"] @ x, size)]  # fmt: skip
        group = len(queries) // len(keys[0])
        mixed = [attend(query, [k[h // group] for k in keys[:seen]], [v[h // group] for v in values[:seen]])
                 for h, query in enumerate(queries)]  # fmt: skip
        after = state + part["o_proj"] @ np.concatenate(mixed)
        inner = rms(after, weights[f"{prefix}.post_attention_layernorm.weight"], eps)
        gate = silu(weights[f"{prefix}.mlp.gate_proj.weight"] @ inner)
        up = weights[f"{prefix}.mlp.up_proj.weight"] @ inner
        out.append(after + weights[f"{prefix}.mlp.down_proj.weight"] @ (gate * up))
    return out


def target_forward(weights: Weights, config: dict[str, float], ids: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits [S, V], and the residual stream [S, H] after each layer."""
    embedding = weights["model.embed_tokens.weight"]
    states, after = [embedding[token] for token in ids], []
    places = list(range(len(ids)))
    for number in range(int(config["num_hidden_layers"])):
        states = layer(weights, f"model.layers.{number}", config, states, [], places, [], causal=True)
        after.append(np.stack(states))
    final = [rms(x, weights["model.norm.weight"], config["rms_norm_eps"]) for x in states]
    return np.stack(final) @ embedding.T, after


def draft_logits(
    draft: Weights,
    config: dict[str, float],
    embedding: np.ndarray,
    features: list[np.ndarray],
    anchor: int,
    token: int,
    mask_token: int,
    block: int,
    depth: int,
) -> np.ndarray:
    """Logits [block - 1, V] of one block whose real token sits at position ``anchor``.

    ``features``: one vector per position before the anchor, the tapped layers side by side.
    """
    eps = config["rms_norm_eps"]
    context = [rms(draft["fc.weight"] @ x, draft["hidden_norm.weight"], eps) for x in features[:anchor]]
    states = [embedding[token]] + [embedding[mask_token]] * (block - 1)
    places = [anchor + i for i in range(block)]
    for number in range(depth):
        states = layer(draft, f"layers.{number}", config, states, context, places, list(range(anchor)), causal=False)
    normed = [rms(x, draft["norm.weight"], eps) for x in states]
    return np.stack(normed[1:]) @ embedding.T
