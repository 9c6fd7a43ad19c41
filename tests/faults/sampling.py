"""Mistakes in drawing: greedy text stays right, and sampled text looks right."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.faults.fault import CHAIN, DRAFTED, EVERY, Need, Patches, Shows, fault


def change_requests(patch: Patches, change: Callable[[Any], Any]) -> None:
    """Let every request draw by `change` of its settings."""

    @patch("engine.sampling:Batch.of")
    def of(original: Any, requests: Any, device: Any) -> Any:
        return original([change(each) for each in requests], device)


@fault("the temperature is 5 % too high", EVERY, Shows.DISTRIBUTION, (Need.SAMPLED,))
def temperature_high(patch: Patches) -> None:
    change_requests(patch, lambda each: replace(each, temperature=1.05 * each.temperature))


@fault("top-k keeps k + 1 tokens", EVERY, Shows.DISTRIBUTION, (Need.SAMPLED, Need.TOP_K))
def top_k_plus_one(patch: Patches) -> None:
    change_requests(patch, lambda each: replace(each, top_k=each.top_k + (each.top_k > 0)))


@fault("top-p leaves out the token that crosses p", EVERY, Shows.DISTRIBUTION, (Need.SAMPLED, Need.TOP_P))
def top_p_exclusive(patch: Patches) -> None:
    @patch("engine.sampling:_cut")
    def cut(original: Any, probabilities: Any, batch: Any) -> Any:
        kept = original(probabilities, batch)
        least = kept.masked_fill(kept == 0, 2.0).argmin(dim=-1, keepdim=True)
        shorter = kept.scatter(-1, least, 0.0)
        shorter = shorter / shorter.sum(dim=-1, keepdim=True)
        several = ((kept > 0).sum(dim=-1) > 1) & (batch.top_p[:, None] < 1)
        return shorter.where(several[..., None], kept)


@fault("the seed is ignored: every round draws afresh", EVERY, Shows.TEXT, (Need.SAMPLED, Need.SEED))
def seed_ignored(patch: Patches) -> None:
    fresh = itertools.count(1)
    change_requests(patch, lambda each: replace(each, seed=next(fresh)))


@fault("all rows of a block share one random number", DRAFTED, Shows.DISTRIBUTION, (Need.SAMPLED,))
def block_shares_draw(patch: Patches) -> None:
    @patch("engine.speculate:choose")
    def choose(original: Any, logits: Any, positions: Any, draws: Any) -> Any:
        return original(logits, positions[:, :1].expand_as(positions), draws)


@fault(
    "the residual after a rejection is not renormalised",
    CHAIN,
    Shows.DISTRIBUTION,
    (Need.SAMPLED, Need.DRAWN_DRAFTS),
)
def residual_not_renormalised(patch: Patches) -> None:
    @patch("engine.verify:invert")
    def invert(original: Any, probabilities: Any, u: Any) -> Any:
        cumulative = probabilities.cumsum(dim=-1)
        return original(probabilities, (u / cumulative[..., -1]).clamp(max=1.0))  # it multiplies by the sum


@fault(
    "drawn drafts are accepted with the target's probability, not divided by the draft's",
    CHAIN,
    Shows.DISTRIBUTION,
    (Need.SAMPLED, Need.DRAWN_DRAFTS),
)
def draft_probability_missing(patch: Patches) -> None:
    @patch("engine.verify:rejection")
    def rejection(original: Any, proposal: Any, drafted: Any, target: Any, accept_u: Any, target_u: Any) -> Any:
        q = drafted.gather(2, proposal[:, 1:, None]).squeeze(2)
        return original(proposal, drafted, target, accept_u / q, target_u)  # it compares u · q with p
