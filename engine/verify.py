"""Acceptance: which drafted tokens are the target's own. Pure: tensors in, verdict out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine import tree
from engine.sampling import invert


@dataclass(frozen=True)
class Verdict:
    """Per request: the rows of the proposal that stay in the cache, the root first, and the round's new tokens.

    The tokens are those of the kept rows without the root, and the bonus token: as many as kept rows.
    """

    rows: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]

    @property
    def accepted(self) -> tuple[int, ...]:
        """Drafted tokens that were accepted."""
        return tuple(len(rows) - 1 for rows in self.rows)


def chain(proposal: Tensor, choices: Tensor) -> Verdict:
    """Accept the leading drafted tokens that equal the target's choices.

    Args:
        proposal: [R, rows] token ids, the root first; one row is no speculation.
        choices: [R, rows] the target's token after each row, greedy or drawn (see `sampling.choose`).
    """
    return _leading(agreed(proposal, choices).tolist(), choices.tolist())


def agreed(proposal: Tensor, choices: Tensor) -> Tensor:
    """Return how many leading drafted tokens of a chain equal the target's choices, [R]; see `chain`."""
    return (proposal[:, 1:] == choices[:, :-1]).cumprod(dim=1).sum(dim=1)


def branches(nodes: tree.Tree, proposal: Tensor, choices: Tensor, depth: int) -> Verdict:
    """Walk the trees along the target's choices (DDTree, arXiv 2604.12989): exact, no draft probabilities needed.

    Args:
        proposal, choices: [R, rows], rows as in `nodes`.
        depth: the deepest node's.
    """
    rows = tree.walk(proposal, nodes.parents, choices, depth)
    own = choices.tolist()
    return Verdict(rows, tuple(tuple(own[r][row] for row in kept) for r, kept in enumerate(rows)))


def rejection(proposal: Tensor, drafted: Tensor, target: Tensor, accept_u: Tensor, target_u: Tensor) -> Verdict:
    """Accept drawn tokens by speculative sampling (arXiv 2211.17192, Algorithm 1).

    A token x drawn from q stays with probability min(1, p(x) / q(x)); the first that does not is replaced by a draw
    from max(p − q, 0), renormalised; after a whole accepted block the bonus token is drawn from p.

    Args:
        proposal: [R, rows] the root, then tokens drawn from `drafted`.
        drafted: [R, rows − 1, vocab] q, after the request's own temperature, top-k and top-p.
        target: [R, rows, vocab] p after each row, alike.
        accept_u: [R, rows − 1] numbers in [0, 1) that decide acceptance.
        target_u: [R, rows] numbers in [0, 1) that draw replacements and bonus tokens.
    """
    counts, bonus = kept_and_bonus(proposal, drafted, target, accept_u, target_u)
    kept, own, last = counts.tolist(), proposal[:, 1:].tolist(), bonus.tolist()
    return Verdict(
        tuple(tuple(range(count + 1)) for count in kept),
        tuple((*own[r][:count], last[r]) for r, count in enumerate(kept)),
    )


def kept_and_bonus(
    proposal: Tensor, drafted: Tensor, target: Tensor, accept_u: Tensor, target_u: Tensor
) -> tuple[Tensor, Tensor]:
    """Return how many drafted tokens stay, and the token behind them, [R] each; see `rejection`."""
    requests = proposal.shape[0]
    tokens = proposal[:, 1:, None]
    q, p = drafted.gather(2, tokens).squeeze(2), target[:, :-1].gather(2, tokens).squeeze(2)
    counts = (accept_u * q < p).cumprod(dim=1).sum(dim=1)
    index = torch.arange(requests, device=proposal.device)
    here = target[index, counts]  # p after the last kept row
    # A zero proposal behind the block leaves p itself: the bonus token is the residual against nothing.
    against = torch.cat([drafted, drafted.new_zeros((requests, 1, drafted.shape[2]))], dim=1)[index, counts]
    residual = (here - against).clamp(min=0)
    # p = q up to rounding leaves no residual; then the token was accepted but for rounding, and p is right.
    residual = torch.where(residual.sum(dim=1, keepdim=True) > 0, residual, here)
    return counts, invert(residual, target_u[index, counts])


def forced(choices: Tensor, accept_length: float, depth: int, generator: torch.Generator) -> Verdict:
    """Accept as many rows as makes the mean round yield `accept_length` tokens, whatever was drafted.

    For timing without a trained drafter: the text means nothing. Rounds yield the neighbouring whole numbers at
    random in proportion, so the mean is exact in the long run.

    Args:
        choices: [R, rows] the target's token after each row.
        depth: most drafted tokens a round can accept.
    """
    requests, rows = choices.shape
    base = int(accept_length)
    more = torch.rand(requests, generator=generator) < accept_length - base
    accepted = (more.int() + base - 1).clamp(0, min(depth, rows - 1)).tolist()
    return _leading(accepted, choices.tolist())


def _leading(accepted: list[int], choices: list[list[int]]) -> Verdict:
    """Keep the first rows; where drafts were accepted for good, the target's choices are the drafted tokens."""
    return Verdict(
        tuple(tuple(range(count + 1)) for count in accepted),
        tuple(tuple(choices[r][: count + 1]) for r, count in enumerate(accepted)),
    )
