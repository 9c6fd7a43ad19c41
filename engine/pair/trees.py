"""How much of a known continuation a draft tree holds (DDTree, arXiv 2604.12989)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from engine.tree import best_first


def best_ranks(log_probs: Sequence[Sequence[float]], nodes: int) -> list[tuple[int, ...]]:
    """Ranks along the paths of the ``nodes`` best tree nodes, best first; see :func:`engine.tree.best_first`."""
    return [path.ranks for path in islice(best_first(log_probs), nodes)]


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
        for path in best_ranks(log_probs, nodes):
            if path == wanted[: len(path)]:
                accepted = max(accepted, len(path))
    return accepted
