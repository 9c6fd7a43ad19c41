"""Draft trees: which N continuations to verify (DDTree, arXiv 2604.12989). Pure.

A DFlash drafter gives one distribution a position, independent of the others, so the probability of a path is the
product of its tokens'. The N most probable paths are closed under prefixes and maximise the expected accepted
length under those distributions. Two builders give the same tree in the same order: `by_heap` takes path after path,
which is fastest on a CPU; `by_levels` works on all requests at once and never looks at a value on the host, so a
CUDA graph can hold it. `build` takes the one that fits the device.

Order everywhere: log-probability descending, then depth, then the ranks along the path, lexicographic. A parent
stands before its children.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Budget = Callable[[Iterator[float]], int]
"""How many nodes to verify, given what each adds to the expected tokens of the round, best first; read as needed."""


class TooFew(Exception):
    """A path's next sibling is not among the candidates that were given."""


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


def build(
    log_probs: Tensor, tokens: Tensor, nodes: int, width: int | None = None, budget: Budget | None = None
) -> Tree:
    """Return the best trees, equally many nodes for every request.

    Args:
        log_probs: [R, depth, K] log-probabilities, descending along K, K ≥ min(nodes, vocabulary).
        tokens: [R, depth, K] their token ids.
        nodes: so many, or as many as there are paths.
        width: most children of a node.
        budget: may ask for fewer.
    """
    if log_probs.device.type == "cpu":
        return by_heap(log_probs, tokens, nodes, width, budget)
    built = by_levels(log_probs, tokens, nodes, width)
    if budget is None:
        return built
    return built.cut(budget(iter(built.log_weights[:, 1:].exp().sum(dim=0).tolist())))


class Path(NamedTuple):
    """A node of one request's tree: ranks of the tokens along its path, its parent's row, its log-probability."""

    ranks: tuple[int, ...]
    parent: int
    weight: float


def best_first(log_probs: Sequence[Sequence[float]], width: int | None = None, partial: bool = False) -> Iterator[Path]:
    """Yield one request's paths, best first, by a heap.

    A path that is taken offers its next sibling and its first child: neither is more probable than itself.

    Args:
        log_probs: [depth][K] log-probabilities, descending along K.
        width: most children of a node.
        partial: there are more candidates than K, less likely ones.

    Raises:
        TooFew: `partial`, and one of those may be next.
    """
    # (−log weight, depth, ranks, parent's row, parent's log weight)
    heap: list[tuple[float, int, tuple[int, ...], int, float]] = [(-log_probs[0][0], 1, (0,), 0, 0.0)]
    for row in itertools.count(1):
        if not heap:
            return
        negative, depth, ranks, parent, above = heapq.heappop(heap)
        yield Path(ranks, parent, -negative)
        rank = ranks[-1] + 1
        if partial and rank == len(log_probs[depth - 1]) and rank != width:
            raise TooFew
        if rank < len(log_probs[depth - 1]) and (width is None or rank < width):
            heapq.heappush(heap, (-(above + log_probs[depth - 1][rank]), depth, (*ranks[:-1], rank), parent, above))
        if depth < len(log_probs):
            heapq.heappush(heap, (negative - log_probs[depth][0], depth + 1, (*ranks, 0), row, -negative))


def by_heap(
    log_probs: Tensor,
    tokens: Tensor,
    nodes: int,
    width: int | None = None,
    budget: Budget | None = None,
    partial: bool = False,
) -> Tree:
    """Return the trees of `build` from one heap a request; only paths that the budget looks at are ever found.

    Args:
        partial: K may be any number; then the trees are right or there are none.

    Raises:
        TooFew: `partial`, and K is too small.
    """
    walks = [best_first(rows, width, partial) for rows in log_probs.tolist()]
    found: list[tuple[Path, ...]] = []

    def gains() -> Iterator[float]:
        for paths in itertools.islice(zip(*walks, strict=True), nodes):
            found.append(paths)
            yield sum(math.exp(path.weight) for path in paths)

    if budget is None:
        found += itertools.islice(zip(*walks, strict=True), nodes)
    else:
        size = budget(gains())
        del found[size:]
    trees = list(zip(*found, strict=True)) or [()] * len(walks)
    ids = tokens.tolist()
    return Tree(
        torch.tensor(
            [[0, *(of[len(p.ranks) - 1][p.ranks[-1]] for p in paths)] for of, paths in zip(ids, trees, strict=True)]
        ),
        torch.tensor([[0, *(path.parent for path in paths)] for paths in trees]),
        torch.tensor([[0, *(len(path.ranks) for path in paths)] for paths in trees]),
        torch.tensor([[0.0, *(path.weight for path in paths)] for paths in trees], dtype=torch.float64),
    )


def by_levels(log_probs: Tensor, tokens: Tensor, nodes: int, width: int | None = None) -> Tree:
    """Return the trees of `build`, all requests at once: the best `nodes` of every level, then of all levels.

    A path among the best N has all its prefixes among the best N of their levels, so a level keeps no more.
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
    numbers = torch.arange(1, order.shape[1] + 1, device=device).expand(requests, -1)
    row_of.scatter_(1, order, numbers)
    # Place of each candidate's parent among all candidates; level 0's parent is the root, row 0.
    above = [parents[0].new_full(parents[0].shape, -1)]
    above += [parents[level] + starts[level - 1] for level in range(1, len(sizes))]
    parent_place = torch.cat(above, dim=1).gather(1, order)
    parent_row = row_of.gather(1, parent_place.clamp(min=0)).masked_fill(parent_place < 0, 0)
    level_of = torch.cat([order.new_full((size,), level) for level, size in enumerate(sizes)])[order]
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


def visibility(parents: Tensor, depth: int) -> Tensor:
    """Return which rows a row sees: itself and its ancestors. [R, rows, rows] bool of parents [R, rows].

    `depth`: the deepest node's; so many steps up reach the root from anywhere.
    """
    if parents.device.type != "cpu":
        return visibility_all(parents, depth)
    requests, rows = parents.shape
    table = np.zeros((requests, rows, rows), dtype=np.bool_)
    table[:, np.arange(rows), np.arange(rows)] = True
    for own, above in zip(table, parents.tolist(), strict=True):
        for row in range(1, rows):  # a parent's row is whole before its children's
            own[row] |= own[above[row]]
    return torch.from_numpy(table)


def visibility_all(parents: Tensor, depth: int) -> Tensor:
    """Return `visibility` without looking at a value on the host."""
    requests, rows = parents.shape
    seen = torch.eye(rows, dtype=torch.bool, device=parents.device).repeat(requests, 1, 1)
    place = torch.arange(rows, device=parents.device).expand_as(parents)
    for _ in range(depth):
        place = parents.gather(1, place)
        seen.scatter_(2, place[:, :, None], True)
    return seen


def walk(tokens: Tensor, parents: Tensor, choices: Tensor, depth: int) -> tuple[tuple[int, ...], ...]:
    """Follow the target's own tokens down the trees.

    Args:
        tokens, parents: [R, rows].
        choices: [R, rows] the target's token after each row.
        depth: the deepest node's.

    Returns:
        Rows visited by each request, the root first: one more than nodes were accepted.
    """
    if tokens.device.type == "cpu":
        tables = zip(tokens.tolist(), parents.tolist(), choices.tolist(), strict=True)
        return tuple(_descend(*table) for table in tables)
    path, length = walk_all(tokens, parents, choices, depth)
    steps = torch.cat([length[:, None], path], dim=1).tolist()  # one copy to the host
    return tuple(tuple(path[: count + 1]) for count, *path in steps)


def _descend(tokens: list[int], parents: list[int], choices: list[int]) -> tuple[int, ...]:
    rows = {edge: row for row, edge in reversed([*enumerate(zip(parents, tokens, strict=True))][1:])}
    here: int | None = 0
    path = []
    while here is not None:
        path.append(here)
        here = rows.get((here, choices[here]))
    return tuple(path)


def walk_all(tokens: Tensor, parents: Tensor, choices: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Walk without looking at a value on the host; arguments as for `walk`.

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
