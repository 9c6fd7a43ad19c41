"""Many continuations at once: a static KV cache, one decode step, replayed as a CUDA graph on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.loops import MAX_PERIOD, WINDOW
from engine.pair.modules import Rope, Target, rope_tables


def looping(tokens: Tensor) -> Tensor:
    """:func:`engine.loops.loops` for every row of ``tokens`` [B, T] at once: bool [B]."""
    if tokens.shape[1] < WINDOW:
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    tail = tokens[:, -WINDOW:]
    periodic = [(tail[:, p:] == tail[:, :-p]).all(dim=1) for p in range(1, MAX_PERIOD + 1)]
    return torch.stack(periodic).any(dim=0)


class Sampler:
    """Continues ``batch`` prompts of one length to ``length`` tokens; greedy where temperature is 0.

    The caches are [layers, B, kv heads, length, d].  A decode step reads its position from a device
    tensor, so one captured graph serves every step.
    """

    def __init__(self, target: Target, batch: int, length: int, sampled: bool) -> None:
        config, weight = target.config, target.model.embed_tokens.weight
        if length > config.max_position_embeddings:
            raise ValueError(f"length {length} is over max_position_embeddings")
        self.target, self.length, self.sampled = target, length, sampled
        shape = (config.num_hidden_layers, batch, config.num_key_value_heads, length, config.head_dim)
        device = weight.device
        self._keys = torch.zeros(shape, dtype=weight.dtype, device=device)
        self._values = torch.zeros(shape, dtype=weight.dtype, device=device)
        self._ids = torch.zeros(batch, length, dtype=torch.long, device=device)
        self._position = torch.zeros(1, dtype=torch.long, device=device)
        self._temperature = torch.zeros(batch, 1, device=device)
        self._places = torch.arange(length, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def run(self, prompts: Tensor, temperature: Tensor) -> Tensor:
        """Whole sequences [B, length] that begin with ``prompts`` [B, P]; ``temperature`` [B]."""
        prompt = prompts.shape[1]
        self._ids[:, :prompt] = prompts
        self._temperature.copy_(temperature[:, None])
        self._ids[:, prompt] = self._prefill(prompts)
        if self._graph is None and prompts.is_cuda:
            self._capture(prompt)
        self._position.fill_(prompt)
        for _ in range(self.length - prompt - 1):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
        return self._ids.clone()

    def _prefill(self, prompts: Tensor) -> Tensor:
        """Fill the caches with ``prompts``' keys and values; the first new tokens [B]."""
        target, prompt = self.target, prompts.shape[1]
        x = target.embed(prompts)
        rope = self._rope(self._places[None, :prompt], x)
        for number, layer in enumerate(target.layers()):
            k, v = layer.self_attn.key_value(layer.input_layernorm(x), rope)
            self._keys[number, :, :, :prompt], self._values[number, :, :, :prompt] = k, v
            x = layer.causal(x, rope)
        return self._choose(target.logits(target.model.norm(x[:, -1])))

    def _step(self) -> None:
        """One token for every row: read at the position, write at the next, advance it."""
        target, position = self.target, self._position
        x = target.embed(self._ids.index_select(1, position))
        rope = self._rope(position[None], x)
        seen = self._places <= position
        for number, layer in enumerate(target.layers()):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            k, v = attention.key_value(normed, rope)
            keys, values = self._keys[number], self._values[number]
            keys.index_copy_(2, position, k)
            values.index_copy_(2, position, v)
            # the query heads that share a KV head become rows of one small matrix product
            q = attention.query(normed, rope).unflatten(1, (attention.kv_heads, -1)).squeeze(3)
            scores = (q @ keys.mT).float() * attention.head_dim**-0.5
            weights = F.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1).to(values.dtype)
            x = x + attention.output((weights @ values).flatten(1, 2).unsqueeze(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        chosen = self._choose(target.logits(target.model.norm(x[:, 0])))
        self._ids.index_copy_(1, position + 1, chosen[:, None])
        position += 1

    def _choose(self, logits: Tensor) -> Tensor:
        """Arg-max, or a sample at the row's temperature by the Gumbel-max identity."""
        scores = logits.float()
        if self.sampled:
            gumbel = -torch.empty_like(scores).exponential_().log()
            warm = scores / self._temperature.clamp_min(1e-4) + gumbel
            scores = torch.where(self._temperature > 0, warm, scores)
        return scores.argmax(dim=-1)

    def _rope(self, positions: Tensor, x: Tensor) -> Rope:
        config = self.target.config
        return rope_tables(positions, config.head_dim, config.rope_theta, x.dtype)

    def _capture(self, prompt: int) -> None:
        """Capture one step; warm-up and capture run at the first new position and are then overwritten."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        first = self._ids[:, prompt].clone()
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._position.fill_(prompt)
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self._position.fill_(prompt)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self._graph = graph
        self._ids[:, prompt] = first
