"""Acceptance: which drafted tokens the target would have produced itself. Pure: tensors in, verdict out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """Per request: how many drafted tokens were accepted, and the tokens of the round, the bonus token last."""

    accepted: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]


def greedy(proposal: Tensor, choices: Tensor) -> Verdict:
    """Accept the leading drafted tokens that equal the target's greedy choices.

    Args:
        proposal: [requests, rows] token ids, the root first; rows 1 is no speculation.
        choices: [requests, rows] the target's likeliest token after each row.
    """
    agree = (proposal[:, 1:] == choices[:, :-1]).cumprod(dim=1).sum(dim=1)
    return _verdict(agree.tolist(), proposal, choices)


def forced(proposal: Tensor, choices: Tensor, accept_length: float, generator: torch.Generator) -> Verdict:
    """Accept as many drafted tokens as makes the mean round yield `accept_length` tokens, whatever they are.

    For timing without a trained drafter: the text means nothing. Rounds yield the neighbouring whole numbers at
    random in proportion, so the mean is exact in the long run.
    """
    requests, rows = proposal.shape
    base = int(accept_length)
    more = torch.rand(requests, generator=generator) < accept_length - base
    accepted = (more.int() + base - 1).clamp(0, rows - 1)
    return _verdict(accepted.tolist(), proposal, choices)


def _verdict(accepted: list[int], proposal: Tensor, choices: Tensor) -> Verdict:
    drafted, bonus = proposal[:, 1:].tolist(), choices.tolist()
    tokens = tuple((*drafted[request][:count], bonus[request][count]) for request, count in enumerate(accepted))
    return Verdict(tuple(accepted), tokens)
