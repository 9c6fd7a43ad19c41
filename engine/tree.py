"""Draft trees: which N continuations to verify (DDTree, arXiv 2604.12989). Pure.

A DFlash drafter gives one distribution a position, independent of the others, so the probability of a path is the
product of its tokens'. The N most probable paths are closed under prefixes and maximise the expected accepted
length under those distributions. Two builders give the same tree in the same order: `best_first` walks a heap for
one request, `build` works on all requests at once without a host loop over nodes.

Order everywhere: log-probability descending, then depth, then the ranks along the path, lexicographic. A parent
stands before its children.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """Nodes of R requests' trees, rows 0 … N; row 0 is the root, whose token and parent are 0.

    `tokens`, `parents`, `depths`: [R, N + 1]; `log_weights`: [R, N + 1] log-probability of the path, root 0.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    log_weights: Tensor

    def visibility(self, depth: int) -> Tensor:
        """Return which rows a row sees, [R, rows, rows]; see `visibility`."""
        return visibility(self.parents, depth)

    def cut(self, nodes: int) -> Tree:
        """Keep the first `nodes` nodes: the best tree of that size."""
        rows = nodes + 1
        return Tree(self.tokens[:, :rows], self.parents[:, :rows], self.depths[:, :rows], self.log_weights[:, :rows])


def build(log_probs: Tensor, tokens: Tensor, nodes: int, width: int | None = None) -> Tree:
    """Return the best trees of `nodes` nodes, by levels, all requests at once.

    Args:
        log_probs: [R, depth, K] log-probabilities, descending along K, K ≥ min(nodes, vocabulary).
        tokens: [R, depth, K] their token ids.
        nodes: at most as many as there are paths.
        width: most children of a node.
    """
    requests, depth, most = log_probs.shape
    choices = min(most, nodes, width or most)
    weights = log_probs.new_zeros((requests, 1), dtype=torch.float64)
    kept, parents, ranks = [], [], []
    for level in range(depth):
        spread = weights[:, :, None] + log_probs[:, level, None, :choices].double()
        flat = spread.flatten(1)
        if flat.shape[1] > nodes:
            # A stable sort keeps ties in path order; sorting the survivors' places restores that order.
            place = flat.sort(dim=1, descending=True, stable=True).indices[:, :nodes].sort(dim=1).values
        else:
            place = torch.arange(flat.shape[1], device=flat.device).expand(requests, -1)
        weights = flat.gather(1, place)
        kept.append(weights)
        parents.append(place // choices)
        ranks.append(place % choices)
    return _select(kept, parents, ranks, tokens, nodes)


def _select(kept: list[Tensor], parents: list[Tensor], ranks: list[Tensor], tokens: Tensor, nodes: int) -> Tree:
    """Take the best `nodes` of all levels and renumber them in order."""
    device, requests = tokens.device, tokens.shape[0]
    sizes = [level.shape[1] for level in kept]
    starts = [sum(sizes[:level]) for level in range(len(sizes))]
    every = torch.cat(kept, dim=1)
    order = every.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
    row_of = torch.zeros_like(every, dtype=torch.int64)
    numbers = torch.arange(1, nodes + 1, device=device).expand(requests, -1)
    row_of.scatter_(1, order, numbers)
    # Place of each candidate's parent among all candidates; level 0's parent is the root, row 0.
    above = [parents[0].new_full(parents[0].shape, -1)]
    above += [parents[level] + starts[level - 1] for level in range(1, len(sizes))]
    parent_place = torch.cat(above, dim=1).gather(1, order)
    parent_row = torch.where(parent_place < 0, 0, row_of.gather(1, parent_place.clamp(min=0)))
    level_of = torch.repeat_interleave(
        torch.arange(len(sizes), device=device), torch.tensor(sizes, device=device), output_size=sum(sizes)
    )[order]
    rank = torch.cat(ranks, dim=1).gather(1, order)
    flat_tokens = tokens.flatten(1).gather(1, level_of * tokens.shape[2] + rank)
    return Tree(
        tokens=_with_root(flat_tokens),
        parents=_with_root(parent_row),
        depths=_with_root(level_of + 1),
        log_weights=_with_root(every.gather(1, order)),
    )


def _with_root(nodes: Tensor) -> Tensor:
    return torch.cat([nodes.new_zeros((nodes.shape[0], 1)), nodes], dim=1)


def best_first(
    log_probs: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], nodes: int, width: int | None = None
) -> Tree:
    """Return one request's tree by walking a heap: pop the best path, push its next sibling and its first child."""
    made_tokens, parents, depths, weights = [0], [0], [0], [0.0]
    # (-log weight, depth, ranks along the path, parent's row, parent's log weight)
    heap: list[tuple[float, int, tuple[int, ...], int, float]] = [(-float(log_probs[0][0]), 1, (0,), 0, 0.0)]
    while heap and len(made_tokens) <= nodes:
        negative, depth, ranks, parent, above = heapq.heappop(heap)
        rank = ranks[-1]
        row = len(made_tokens)
        made_tokens.append(tokens[depth - 1][rank])
        parents.append(parent)
        depths.append(depth)
        weights.append(-negative)
        sibling = rank + 1
        if sibling < min(len(log_probs[depth - 1]), width or sibling + 1):
            heapq.heappush(
                heap, (-(above + log_probs[depth - 1][sibling]), depth, (*ranks[:-1], sibling), parent, above)
            )
        if depth < len(log_probs):
            child = -negative + log_probs[depth][0]
            heapq.heappush(heap, (-child, depth + 1, (*ranks, 0), row, -negative))
    return Tree(
        torch.tensor([made_tokens]),
        torch.tensor([parents]),
        torch.tensor([depths]),
        torch.tensor([weights], dtype=torch.float64),
    )


def visibility(parents: Tensor, depth: int) -> Tensor:
    """Return which rows a row sees: itself and its ancestors. [R, rows, rows] bool of parents [R, rows].

    `depth`: the deepest node's; so many steps up reach the root from anywhere.
    """
    rows = parents.shape[1]
    seen = torch.eye(rows, dtype=torch.bool, device=parents.device).repeat(parents.shape[0], 1, 1)
    place = torch.arange(rows, device=parents.device).expand_as(parents)
    for _ in range(depth):
        place = parents.gather(1, place)
        seen.scatter_(2, place[:, :, None], True)
    return seen


def walk(tokens: Tensor, parents: Tensor, choices: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Follow the target's own tokens down the trees.

    Args:
        tokens, parents: [R, rows].
        choices: [R, rows] the target's token after each row.
        depth: the deepest node's.

    Returns:
        path [R, depth + 1]: rows visited, the root first, padded with the last one;
        length [R]: how many nodes below the root were accepted.
    """
    requests, rows = tokens.shape
    numbers = torch.arange(rows, device=tokens.device)
    here = tokens.new_zeros(requests)
    length = tokens.new_zeros(requests)
    path = [here]
    for _ in range(depth):
        wanted = choices.gather(1, here[:, None])
        fits = (parents == here[:, None]) & (tokens == wanted) & (numbers > 0)
        found = fits.any(dim=1)
        here = torch.where(found, fits.int().argmax(dim=1), here)
        length = length + found
        path.append(here)
        # Once no child fits, none fits later either: `here` stays, and so do its children.
    return torch.stack(path, dim=1), length
