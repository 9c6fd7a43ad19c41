"""Log-probabilities of tokens under the target's own distribution, for requests that ask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.model.linear import Linear
from engine.request import Scored
from engine.scheduler import Chunk, Decode
from engine.verify import Verdict

SCORED_ROWS = 64  # prompt rows whose logits exist at once: those of a long chunk would take gigabytes


def score(logits: Tensor, tokens: Sequence[int], top: int) -> tuple[Scored, ...]:
    """Return how likely each token is after its row, with the `top` likeliest: logits [rows, vocab]."""
    if not tokens:
        return ()
    log_probs = logits.float().log_softmax(dim=-1)
    own = log_probs.gather(1, torch.tensor(tokens, device=logits.device)[:, None]).flatten().tolist()
    best = log_probs.topk(top, dim=-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(
        Scored(each, tuple(zip(ids, values, strict=True))) for each, (ids, values) in zip(own, pairs, strict=True)
    )


def of_round(decodes: Sequence[Decode], verdict: Verdict, logits: Tensor) -> dict[int, tuple[Scored, ...]]:
    """Score the round's tokens of the requests that asked: each by the row it came after."""
    return {
        decode.id: score(logits[r, list(verdict.rows[r])], verdict.tokens[r], decode.request.logprobs)
        for r, decode in enumerate(decodes)
        if decode.request.logprobs is not None
    }


def of_prompts(chunks: Sequence[Chunk], hidden: Tensor, head: Linear) -> dict[int, tuple[Scored, ...]]:
    """Score the prompt tokens that follow each computed row, of the requests that asked."""
    found, first = {}, 0
    for chunk in chunks:
        rows = hidden[first : first + len(chunk.tokens)]
        first += len(chunk.tokens)
        if chunk.request.echo and chunk.request.logprobs is not None:
            following = [*chunk.tokens[1:]] + ([] if chunk.after is None else [chunk.after])
            scored: list[Scored] = []
            for start in range(0, len(following), SCORED_ROWS):
                tokens = following[start : start + SCORED_ROWS]
                scored += score(head(rows[start : start + len(tokens)]), tokens, chunk.request.logprobs)
            if scored:
                found[chunk.id] = tuple(scored)
    return found
