"""How much of a known continuation a draft tree holds (DDTree, arXiv 2604.12989)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def best_first(log_probs: Sequence[Sequence[float]], nodes: int) -> list[tuple[int, ...]]:
    """Rank paths of the ``nodes`` best tree nodes, best first.

    ``log_probs[d][r]``: log-probability of the r-th best token at depth d, non-increasing in r.  A node is
    the path of ranks from the root's child down; its score is the sum along it.  A popped node offers its
    next sibling and its first child, neither of which can score above it, so the first N popped are the
    prefix-closed set of N nodes with the largest total path probability.  Ties go to the smaller path.
    """
    order: list[tuple[int, ...]] = []
    heap: list[tuple[float, tuple[int, ...]]] = []
    if log_probs and nodes > 0:
        heap.append((-log_probs[0][0], (0,)))
    while heap and len(order) < nodes:
        cost, path = heapq.heappop(heap)
        order.append(path)
        depth, rank = len(path) - 1, path[-1]
        row = log_probs[depth]
        if rank + 1 < len(row):
            heapq.heappush(heap, (cost + row[rank] - row[rank + 1], (*path[:-1], rank + 1)))
        if len(path) < len(log_probs):
            heapq.heappush(heap, (cost - log_probs[depth + 1][0], (*path, 0)))
    return order


def tree_accepts(log_probs: Sequence[Sequence[float]], truth: Sequence[int | None], nodes: int) -> int:
    """Tokens that a walk accepts in the best-first tree of ``nodes``.

    ``truth[d]``: rank among ``log_probs[d]`` of the token that the target emits at depth d, None when it is
    not among them or when the continuation has ended.
    """
    known: list[int] = []
    for rank in truth:
        if rank is None:
            break
        known.append(rank)
    accepted = 0
    wanted = tuple(known)
    if wanted:
        for path in best_first(log_probs, nodes):
            if path == wanted[: len(path)]:
                accepted = max(accepted, len(path))
    return accepted
