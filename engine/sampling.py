"""From logits to the target's own token, per request: temperature, top-k, top-p, seed. Pure tensor functions.

A token is chosen by inverting the distribution at a number u in [0, 1) that depends on the request's seed and the
token's position alone. So a seeded text is the same whether or not drafts were accepted, whoever shares the batch:
a drafted token is accepted exactly when it is the token that plain decoding would have drawn. For a greedy draft x
this happens with probability p(x), and otherwise the draw follows p without x, renormalised: speculative sampling
(arXiv 2211.17192, Appendix A) with a point-mass proposal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.request import Sampling

#: Independent streams of random numbers at one position.
TARGET, DRAFT, ACCEPT, FORCED = 0, 1, 2, 3


@dataclass(frozen=True)
class Batch:
    """Sampling of several requests as tensors: [R] each."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    all_greedy: bool
    any_greedy: bool
    any_limited: bool

    @classmethod
    def of(cls, requests: Sequence[Sampling], device: torch.device) -> Batch:
        """Collect the requests' settings."""
        return cls(
            temperature=torch.tensor([each.temperature for each in requests], dtype=torch.float64, device=device),
            top_k=torch.tensor([each.top_k for each in requests], device=device),
            top_p=torch.tensor([each.top_p for each in requests], dtype=torch.float64, device=device),
            seed=torch.tensor([signed(each.seed) for each in requests], device=device),
            all_greedy=all(each.greedy for each in requests),
            any_greedy=any(each.greedy for each in requests),
            any_limited=any(each.limited and not each.greedy for each in requests),
        )


def choose(logits: Tensor, positions: Tensor, batch: Batch) -> Tensor:
    """Return the target's token after every row: [R, rows] ids.

    Args:
        logits: [R, rows, vocab].
        positions: [R, rows] position of the token that is chosen (the row's own position + 1).
    """
    best = logits.max(dim=-1).indices
    if batch.all_greedy:
        return best
    probabilities = distribution(logits, batch)
    drawn = invert(probabilities, uniform(batch.seed[:, None], positions, TARGET))
    return torch.where(batch.temperature[:, None] == 0, best, drawn) if batch.any_greedy else drawn


def distribution(logits: Tensor, batch: Batch) -> Tensor:
    """Return the probabilities a request draws from, [R, rows, vocab] float64, cut and renormalised.

    Greedy requests get all mass on the likeliest token. Ties at the edge of top-k and top-p are broken by the
    sort's order, so exactly k tokens stay; the likeliest token always does.
    """
    greedy = batch.temperature == 0
    warmth = batch.temperature.masked_fill(greedy, 1.0)[:, None, None]
    # The best score becomes 0, which no temperature can make infinite.
    scores = logits.double()
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / warmth
    probabilities = scores.softmax(dim=-1)
    if batch.any_limited:
        probabilities = _cut(probabilities, batch)
    if batch.any_greedy:
        point = torch.zeros_like(probabilities).scatter_(-1, logits.max(dim=-1, keepdim=True).indices, 1.0)
        probabilities = torch.where(greedy[:, None, None], point, probabilities)
    return probabilities


def _cut(probabilities: Tensor, batch: Batch) -> Tensor:
    """Zero what top-k, then top-p leave out, and renormalise."""
    vocab = probabilities.shape[-1]
    top_k = batch.top_k.masked_fill((batch.top_k <= 0) | (batch.top_k > vocab), vocab)[:, None, None]
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=probabilities.device)
    kept = ordered * (rank < top_k)
    # top-p acts on what top-k left: a token stays while the mass before it is below p.
    total = kept.sum(dim=-1, keepdim=True)
    before = kept.cumsum(dim=-1) - kept
    kept = kept * ((before < batch.top_p[:, None, None] * total) | (rank == 0))
    kept = kept / kept.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter_(-1, order, kept)


def invert(probabilities: Tensor, u: Tensor) -> Tensor:
    """Return the token at which the cumulative distribution passes u: [...] ids of [..., vocab] and [...].

    A token without mass is never returned, whatever the rounding.
    """
    cumulative = probabilities.cumsum(dim=-1)
    aim = (u * cumulative[..., -1]).unsqueeze(-1)
    token = torch.searchsorted(cumulative, aim, right=True)
    # Rounding may put the aim on the very end: take the last token that has mass.
    last = (cumulative < cumulative[..., -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(token, last).squeeze(-1)


def uniform(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """Return numbers in [0, 1), float64, that depend on (seed, position, stream) only; int64 tensors broadcast.

    A counter-based generator: SplitMix64 started at a scrambled seed and taken at its position-th step. It needs
    no state, so it runs inside a captured graph and does not care in which round a position is reached.
    """
    start = _finalise(_finalise(seed + _GOLDEN))  # neighbouring seeds must not give neighbouring sequences
    mixed = _finalise(start + _GOLDEN * (position * 4 + stream + 1))
    return _shift(mixed, 11).double() * 2.0**-53


_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def _finalise(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 30)) * _FIRST
    value = (value ^ _shift(value, 27)) * _SECOND
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Shift right without the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def signed(seed: int) -> int:
    """Return the seed modulo 2⁶⁴ as a signed number."""
    return (seed + 2**63) % 2**64 - 2**63
