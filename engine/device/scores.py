"""Log-probabilities of a step on their way to the host; the numbers of `engine.scoring`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.request import Scored
from engine.scoring import SCORED_ROWS


@dataclass(frozen=True)
class Scores:
    """Of rows of several requests, on the host once their step is read: `own` [n, rows], the best [n, rows, top]."""

    own: Tensor
    ids: Tensor
    values: Tensor

    def of(self, index: int, rows: int, top: int) -> tuple[Scored, ...]:
        """Return the scores of a request's first rows, with `top` alternatives."""
        own = self.own[index, :rows].tolist()
        ids, values = self.ids[index, :rows, :top].tolist(), self.values[index, :rows, :top].tolist()
        return tuple(Scored(each, tuple(zip(*best, strict=True))) for each, *best in zip(own, ids, values, strict=True))


def score(logits: Tensor, tokens: Tensor, top: int) -> Scores:
    """Return how likely `tokens` [n, rows] are under `logits` [n, rows, vocab], with the `top` likeliest."""
    return Scores(*(each.to("cpu", non_blocking=True) for each in _scored(logits, tokens, top)))


def score_prompt(hidden: Tensor, head: Callable[[Tensor], Tensor], tokens: Tensor, top: int) -> Scores:
    """Return how likely `tokens` [rows] are after `hidden` [rows, hidden], as one request's. The logits of a whole
    chunk would take gigabytes, so they are computed for a few rows at a time."""
    slices = [slice(start, start + SCORED_ROWS) for start in range(0, len(tokens), SCORED_ROWS)]
    parts = [_scored(head(hidden[rows])[None], tokens[None, rows], top) for rows in slices]
    whole = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
    return Scores(*(each.to("cpu", non_blocking=True) for each in whole))


def _scored(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    log_probs = logits.float().log_softmax(dim=-1)
    best = log_probs.topk(top, dim=-1)
    return log_probs.gather(2, tokens[:, :, None])[:, :, 0], best.indices, best.values
