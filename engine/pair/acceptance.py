"""Accept length on known trajectories.

The target's continuation is generated once, features recorded.  A lossless verifier commits exactly that
continuation whatever is drafted (a greedy draft is a point mass: it is accepted when the target's own
choice or sample equals it), so rounds are walked along it without verifying again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.pair.generate import Sampler
from engine.pair.modules import Drafter, Target
from engine.pair.trees import tree_accepts

CHAIN = 0  # a "tree" of no budget: the arg-max token at every depth
ROWS, ANCHORS = 8, 32  # requests and anchors drafted at once


@dataclass(frozen=True)
class Trajectories:
    """Continuations of N prompts of one length P by up to T tokens.

    ``tokens`` [N, P+T]; ``features`` [N, P+T, F*H]; ``lengths``: generated tokens that count, up to and
    with the first stop token.
    """

    tokens: Tensor
    features: Tensor
    prompt: int
    lengths: list[int]

    def generated(self, request: int) -> list[int]:
        """The tokens of one request after its prompt."""
        ids: list[int] = self.tokens[request, self.prompt : self.prompt + self.lengths[request]].tolist()
        return ids


@torch.no_grad()
def trajectories(
    target: Target, taps: Sequence[int], prompts: Tensor, new: int, temperature: float, stops: Sequence[int]
) -> Trajectories:
    """Continue ``prompts`` [N, P] by ``new`` tokens, greedily at temperature 0."""
    rows, prompt = prompts.shape
    sampler = Sampler(target, rows, prompt + new, sampled=temperature > 0)
    tokens = sampler.run(prompts, torch.full((rows,), temperature, device=prompts.device))
    stopped = torch.isin(tokens[:, prompt:], torch.tensor(list(stops), device=tokens.device))
    first = torch.where(stopped.any(dim=1), stopped.int().argmax(dim=1) + 1, new)
    parts = [target(tokens[i : i + 32], taps)[1] for i in range(0, rows, 32)]
    features = torch.cat([part for part in parts if part is not None])
    return Trajectories(tokens, features, prompt, first.tolist())


@dataclass(frozen=True)
class Drafts:
    """Blocks drafted at every anchor of a few requests, by one draft depth.

    R requests from number ``first``; ``ranked`` and ``log_probs`` [R, A, B-1, top]: the likeliest tokens at
    each drafted place, anchors being generated tokens 0, 1, ...
    """

    first: int
    depth: int
    ranked: Tensor
    log_probs: Tensor


@torch.no_grad()
def draft_everywhere(
    target: Target, drafter: Drafter, known: Trajectories, block: int, depths: Sequence[int], top: int
) -> Iterator[Drafts]:
    """Drafts of ``block`` (its first token real) at every generated token, for each of ``depths``.

    ``top``: how many of the likeliest tokens to keep per place; a tree of N nodes needs at most N.
    """
    total, length = known.tokens.shape
    count = length - known.prompt - 1
    for first in range(0, total, ROWS):
        rows = slice(first, min(first + ROWS, total))
        parts: dict[int, list[tuple[Tensor, Tensor]]] = {depth: [] for depth in depths}
        for start in range(known.prompt, known.prompt + count, ANCHORS):
            stop = min(start + ANCHORS, known.prompt + count)
            anchors = torch.arange(start, stop, device=known.tokens.device)
            outputs = _draft(target, drafter, known.tokens[rows], known.features[rows, :stop], anchors, block)
            for depth in depths:
                drafted = outputs[depth - 1].view(rows.stop - first, stop - start, block, -1)[:, :, 1:]
                logits = target.logits(drafted.contiguous()).float()
                best = logits.topk(min(top, logits.shape[-1]))
                parts[depth].append((best.indices, best.values - logits.logsumexp(dim=-1, keepdim=True)))
        for depth, pieces in parts.items():
            ranked, log_probs = (torch.cat(column, dim=1).cpu() for column in zip(*pieces, strict=True))
            yield Drafts(first, depth, ranked, log_probs)


def _draft(
    target: Target, drafter: Drafter, tokens: Tensor, features: Tensor, anchors: Tensor, block: int
) -> list[Tensor]:
    """Normed hidden [R, A*block, H] per depth: blocks side by side, each blind to the others."""
    rows, context = len(tokens), features.shape[1]
    offset = torch.arange(block, device=tokens.device).repeat(len(anchors))
    anchor = anchors.repeat_interleave(block)
    ids = torch.where(offset == 0, tokens[:, anchor], drafter.config.mask_token_id)
    before = torch.arange(context, device=tokens.device) < anchor[:, None]
    mask = torch.cat([before, anchor[:, None] == anchor], dim=1)
    positions = (anchor + offset).expand(rows, -1)
    places = torch.arange(context, device=tokens.device)[None]
    outputs: list[Tensor] = drafter(target.embed(ids), features, positions, places, mask.expand(rows, 1, -1, -1))
    return outputs


def verify_rounds(drafts: Drafts, known: Trajectories, budgets: Sequence[int]) -> list[list[int]]:
    """Verify rounds of each request, [budget][request]; a budget of ``CHAIN`` is the arg-max chain."""
    result: list[list[int]] = [[] for _ in budgets]
    for row in range(len(drafts.ranked)):
        generated = known.generated(drafts.first + row)
        ranks = _true_ranks(drafts.ranked[row], generated)
        tables: dict[int, list[list[float]]] = {}

        def accepted(anchor: int, budget: int, row: int = row) -> int:
            truth = ranks[anchor]  # noqa: B023 - called before the loop goes on
            if budget == CHAIN:
                return leading_zeros(truth)
            if anchor not in tables:  # noqa: B023
                tables[anchor] = drafts.log_probs[row, anchor].tolist()  # noqa: B023
            return tree_accepts(tables[anchor], truth, budget)  # noqa: B023

        for index, budget in enumerate(budgets):
            result[index].append(walk(partial(accepted, budget=budget), len(generated)))
    return result


def _true_ranks(ranked: Tensor, generated: list[int]) -> list[list[int | None]]:
    """For each anchor, the rank of the true next tokens at each drafted place; ``ranked`` [A, B-1, TOP]."""
    drafted = ranked.shape[1]
    anchors = max(0, len(generated) - 1)
    padded = torch.tensor([*generated[1:], *[-1] * (drafted + 1)])
    places = torch.arange(anchors)[:, None] + torch.arange(drafted)
    hits = ranked[:anchors] == padded[places][:, :, None]
    ranks, found = hits.int().argmax(dim=-1).tolist(), hits.any(dim=-1).tolist()
    return [[r if f else None for r, f in zip(*pair, strict=True)] for pair in zip(ranks, found, strict=True)]


def leading_zeros(truth: Sequence[int | None]) -> int:
    """How many leading places have the true token ranked first."""
    for count, rank in enumerate(truth):
        if rank != 0:
            return count
    return len(truth)


def walk(accepted: Callable[[int], int], length: int) -> int:
    """Verify rounds that emit a request's generated tokens 1 .. ``length``-1 (token 0 is the prefill's).

    A round at generated token i commits ``accepted(i)`` drafts and one token more, cut at the end.
    """
    place, rounds = 0, 0
    while place < length - 1:
        place += accepted(place) + 1
        rounds += 1
    return rounds


@dataclass(frozen=True)
class AcceptLength:
    """Tokens committed per verify round.

    ``weighted``: all committed tokens over all rounds, so each request weighs by its verify count;
    ``per_request``: the plain mean of the requests' own ratios.
    """

    weighted: float
    per_request: float
    requests: int
    rounds: int


def accept_length(rounds: Sequence[int], lengths: Sequence[int], chosen: Sequence[int]) -> AcceptLength:
    """Over the requests in ``chosen``; one with fewer than two tokens never verifies and is left out."""
    pairs = [(lengths[i] - 1, rounds[i]) for i in chosen if lengths[i] > 1]
    if not pairs:
        raise ValueError("no request with at least two generated tokens")
    tokens, verifies = sum(t for t, _ in pairs), sum(r for _, r in pairs)
    return AcceptLength(tokens / verifies, sum(t / r for t, r in pairs) / len(pairs), len(pairs), verifies)
