"""Mistakes in the target's forward: positions, masks, norms, heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.faults.fault import DRAFTED, EVERY, TREE, Need, Patches, Shows, fault


@fault("RoPE of a block's drafted rows is one position too far", DRAFTED, Shows.TEXT)
def verify_rope_shifted(patch: Patches) -> None:
    @patch("engine.speculate:forward")
    def forward(original: Any, proposal: Any, places: Any, engine: Any) -> Any:
        later = places.positions.view(proposal.tokens.shape).clone()
        later[:, 1:] += 1
        return original(proposal, replace(places, positions=later.flatten()), engine)


@fault("a tree's rows see their siblings, not their ancestors alone", TREE, Shows.TEXT)
def tree_sees_siblings(patch: Patches) -> None:
    @patch("engine.tree:visibility")
    def visibility(original: Any, parents: Any, depth: int) -> Any:
        siblings = parents[:, :, None] == parents[:, None, :]
        siblings[:, 0] = siblings[:, :, 0] = False  # the root has none
        return original(parents, depth) | siblings


@fault("a tree's rows are placed in row order, not at their depth", TREE, Shows.TEXT)
def tree_positions_by_row(patch: Patches) -> None:
    @patch("engine.kv_cache:Reservation.at")
    def at(original: Any, places: Any, depths: Any) -> Any:
        return places


@fault("the query norm's weight is not loaded", EVERY, Shows.TEXT)
def q_norm_missing(patch: Patches) -> None:
    @patch("engine.model.layers:_position")
    def position(original: Any, shape: Any, get: Any) -> Any:
        return original(shape, lambda name: get(name) ** 0 if "q_norm" in name else get(name))


@fault("attention heads come out rotated by one (query to KV head map off by one)", EVERY, Shows.TEXT)
def heads_rotated(patch: Patches) -> None:
    @patch("engine.model.attention.torch:TorchAttention._attend")
    def attend(original: Any, self: Any, query: Any, pool: Any, group: Any) -> Any:
        out = original(self, query, pool, group)
        return out.view(query.shape).roll(1, dims=1).flatten(1)


@fault("the mask's lower end is off by one: decode rows do not see position 0", EVERY, Shows.TEXT)
def first_token_hidden(patch: Patches) -> None:
    @patch("engine.model.attention.torch:TorchAttention._mask")
    def mask(original: Any, self: Any, span: Any, length: int) -> Any:
        import torch

        found = original(self, span, length)
        if not span.causal or 0 in span.starts:
            return found  # the drafter, or the start of a prompt
        if found is None:
            found = torch.zeros((1, 1, 1, length), dtype=self._dtype, device=self._device)
        found[..., 0] = float("-inf")
        return found


@fault("RMSNorm's epsilon is 1e-2 in the target, not its config's", EVERY, Shows.TEXT)
def norm_epsilon(patch: Patches) -> None:
    @patch("engine.model.target:Target.__init__")
    def init(original: Any, self: Any, shape: Any, *rest: Any) -> None:
        original(self, replace(shape, norm_eps=1e-2), *rest)


@fault(
    "the target's rotation angles are computed in bfloat16 (worse with every position)", EVERY, Shows.TEXT, (Need.LONG,)
)
def rope_in_bfloat16(patch: Patches) -> None:
    @patch("engine.model.target:rotation_table")
    def table(original: Any, rope: Any, head_dim: int, positions: int, dtype: Any, device: Any) -> Any:
        import torch

        from engine.model.rope import inverse_frequencies

        place = torch.arange(positions).bfloat16()
        angle = torch.outer(place, inverse_frequencies(rope, head_dim).bfloat16()).float()
        return torch.polar(torch.ones_like(angle), angle).to(device)


@fault("one layer's two norm weights are swapped", EVERY, Shows.TEXT)
def norms_swapped(patch: Patches) -> None:
    @patch("engine.model.layers:Layer.__init__")
    def init(original: Any, self: Any, shape: Any, tensors: Any, prefix: str, attention: Any) -> None:
        first, second = (f"{prefix}{name}_layernorm.weight" for name in ("input", "post_attention"))
        if prefix == "model.layers.1.":
            tensors = {**tensors, first: tensors[second], second: tensors[first]}
        original(self, shape, tensors, prefix, attention)
