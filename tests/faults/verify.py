"""Mistakes in acceptance: which drafts stay, and what follows them."""

from __future__ import annotations

from typing import Any

from tests.faults.fault import CHAIN, DRAFTED, EVERY, Need, Patches, Shows, fault

THRESHOLD = 0.2  # of the target's probability


@fault("one drafted token too many is accepted: the first that is not the target's", CHAIN, Shows.TEXT)
def one_too_many_accepted(patch: Patches) -> None:
    @patch("engine.verify:chain")
    def chain(original: Any, proposal: Any, choices: Any) -> Any:
        from engine.verify import Verdict

        last = proposal.shape[1] - 1
        counts = [min(count + 1, last) for count in original(proposal, choices).accepted]
        drafts, own = proposal[:, 1:].tolist(), choices.tolist()
        return Verdict(
            tuple(tuple(range(count + 1)) for count in counts),
            tuple((*drafts[r][:count], own[r][count]) for r, count in enumerate(counts)),
        )


@fault("the bonus token is the target's after the block's last row, not after the last accepted", DRAFTED, Shows.TEXT)
def bonus_from_last_row(patch: Patches) -> None:
    def spoil(verdict: Any, choices: Any) -> Any:
        last = choices[:, -1].tolist()
        return type(verdict)(verdict.rows, tuple((*own[:-1], last[r]) for r, own in enumerate(verdict.tokens)))

    @patch("engine.verify:chain")
    def chain(original: Any, proposal: Any, choices: Any) -> Any:
        return spoil(original(proposal, choices), choices)

    @patch("engine.verify:branches")
    def branches(original: Any, nodes: Any, proposal: Any, choices: Any, depth: int) -> Any:
        return spoil(original(nodes, proposal, choices, depth), choices)


@fault("logits are compared in bfloat16 and the last of equal ones is taken", EVERY, Shows.TEXT, (Need.FLOAT32,))
def tie_to_last(patch: Patches) -> None:
    @patch("engine.speculate:choose")
    def choose(original: Any, logits: Any, positions: Any, draws: Any) -> Any:
        if draws is not None:
            return original(logits, positions, draws)
        return logits.shape[-1] - 1 - logits.bfloat16().flip(-1).max(dim=-1).indices


@fault("a draft that the target gives a probability of 0.2 is accepted, whatever it would choose", CHAIN, Shows.TEXT)
def accepted_by_threshold(patch: Patches) -> None:
    @patch("engine.speculate:accept")
    def accept(original: Any, proposal: Any, logits: Any, places: Any, draws: Any, engine: Any) -> Any:
        if proposal.tree is not None:
            return original(proposal, logits, places, draws, engine)
        drafts = proposal.tokens[:, 1:, None]
        likely = logits[:, :-1].float().softmax(dim=-1).gather(2, drafts) >= THRESHOLD
        logits = logits.clone()
        logits[:, :-1].scatter_add_(2, drafts, likely.to(logits.dtype) * 1000)
        return original(proposal, logits, places, draws, engine)


@fault("a request's logits begin too late by a row for each request before it", EVERY, Shows.TEXT, (Need.BATCH,))
def logits_of_neighbour(patch: Patches) -> None:
    @patch("engine.speculate:accept")
    def accept(original: Any, proposal: Any, logits: Any, places: Any, draws: Any, engine: Any) -> Any:
        import torch

        requests, rows = proposal.tokens.shape
        stride = rows + (requests > 1)
        index = torch.arange(requests)[:, None] * stride + torch.arange(rows)
        mixed = logits.flatten(0, 1)[index.clamp(max=requests * rows - 1)]
        return original(proposal, mixed, places, draws, engine)
