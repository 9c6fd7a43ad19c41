"""Mistakes that leave the text alone: the drafter sees the wrong thing, and less of what it drafts is accepted.

How much less depends on the drafter. On the bundled pair (float32, dflash, block 8, six prompts of 96 tokens, 64 new)
the accept length is 3.50; with these faults, in order: 2.44, 1.28, 2.71, 1.01, 1.09; the last needs a policy. The smoke
pair's drafter hardly uses its context: other tokens are accepted, but some of these cost it nothing on average.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.faults.fault import DRAFTED, Need, Patches, Setting, Shows, fault


@fault("the drafter's features are tapped before the layers, not after them", DRAFTED, Shows.ACCEPTANCE)
def taps_off_by_one(patch: Patches) -> None:
    @patch("engine.model.layers:Stack.__call__")
    def call(
        original: Any, stack: Any, x: Any, rows: Any, pool: Any, taps: tuple[int, ...] = (), layers: int | None = None
    ) -> Any:
        import torch

        features = []
        for index, layer in enumerate(stack._layers[:layers]):
            if index in taps:
                features.append(x)
            x = layer(x, rows, pool[index])
        return x, torch.cat(features, dim=-1) if features else None


@fault("draft KV is not cropped after a round: block rows stay where context belongs", DRAFTED, Shows.ACCEPTANCE)
def draft_kv_not_cropped(patch: Patches) -> None:
    @patch("engine.speculate:commit")
    def commit(original: Any, verdict: Any, features: Any, places: Any, engine: Any) -> None:
        original(verdict, None, places, engine)  # without features nothing replaces the block's rows


@fault("context KV is written twice, the second time one slot too far", DRAFTED, Shows.ACCEPTANCE)
def context_written_twice(patch: Patches) -> None:
    @patch("engine.model.draft:DraftModel.write_context")
    def write_context(original: Any, model: Any, features: Any, positions: Any, write: Any, pool: Any) -> None:
        original(model, features, positions, write, pool)
        original(model, features, positions + 1, (write + 1) % pool.shape[1], pool)


@fault("the block is filled with token 0 instead of the mask token", DRAFTED, Shows.ACCEPTANCE)
def mask_token_wrong(patch: Patches) -> None:
    @patch("engine.model.draft:DraftModel.__init__")
    def init(original: Any, model: Any, shape: Any, *rest: Any) -> None:
        original(model, replace(shape, mask_token_id=0), *rest)


@fault(
    "the draft block's positions count from the block's start, its context's from the text's", DRAFTED, Shows.ACCEPTANCE
)
def draft_positions_restart(patch: Patches) -> None:
    @patch("engine.drafters.dflash:DFlashDrafter.block")
    def block(original: Any, drafter: Any, roots: Any, places: Any, cache: Any) -> Any:
        positions = places.positions.view(len(places.ids), -1)
        return original(drafter, roots, replace(places, positions=(positions - positions[:, :1]).flatten()), cache)


@fault(
    "what piles up for the drafter while speculation is off is thrown away, not taken in",
    (Setting.POLICY,),
    Shows.ACCEPTANCE,
    (Need.FALLING_LOAD,),
)
def policy_backlog_lost(patch: Patches) -> None:
    @patch("engine.drafters.policy:PolicyDrafter.settle")
    def settle(original: Any, drafter: Any, cache: Any) -> None:
        if len(drafter._backlog) > 1:
            drafter._backlog.clear()
        original(drafter, cache)
