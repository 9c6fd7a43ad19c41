"""Log-probabilities of a step on their way to the host; the numbers of `engine.scoring`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.request import Scored


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
    log_probs = logits.float().log_softmax(dim=-1)
    best = log_probs.topk(top, dim=-1)
    own = log_probs.gather(2, tokens[:, :, None])[:, :, 0]
    return Scores(*(each.to("cpu", non_blocking=True) for each in (own, best.indices, best.values)))
