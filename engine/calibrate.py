"""Measure at start-up what rounds cost, for trees that grow by it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from engine.config import DDTreeDraft
from engine.cost import CostTable
from engine.drafters.base import Proposal
from engine.drafters.build import DraftKit
from engine.kv_cache import KVCache, Reservation
from engine.speculate import Engine, accept, forward, places_of

CONTEXT = 128  # tokens before the measured rows: a typical length, costs depend on it little
ROWS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96, 128)
REQUESTS = (1, 4, 16, 64, 256)
# Rows of all requests together that are still measured; larger rounds are extrapolated. On a GPU rows cost so little
# that noise would decide the slope between the last two.
MOST_ROWS = {"cpu": 256, "cuda": 4096}
REPEATS = 4

Work = Callable[[], object]


@torch.inference_mode()
def measure_costs(engine: Engine, kit: DraftKit, draft: DDTreeDraft, most: int) -> CostTable:
    """Return what rounds of 1 … `most` requests cost with trees of 1 … `draft.verify_rows` rows; the cache is free."""
    cache = engine.cache
    rows = (*(count for count in ROWS if count < draft.verify_rows), draft.verify_rows)
    fits = max(1, min(most, cache.pages // cache.pages_for(kit.rows + 1)))
    requests = (*(count for count in REQUESTS if count < fits), fits)
    ids = range(-fits, 0)
    with _cached(cache, ids, kit.rows):
        works = [
            [
                _drafting(engine, kit, draft, ids[:count]),
                *(
                    _verifying(engine, kit, draft, ids[:count], each)
                    for each in rows
                    if each == rows[0] or count * each <= MOST_ROWS[engine.device.type]
                ),
            ]
            for count in requests
        ]
        seconds = _fastest(engine, works)
    return CostTable.of(requests, rows, [times[0] for times in seconds], [times[1:] for times in seconds])


@contextmanager
def _cached(cache: KVCache, ids: Sequence[int], rows: int) -> Iterator[None]:
    """Let scratch requests have a context in the cache, and room for so many rows behind it."""
    room = cache.pages // len(ids) * cache.page_size
    context = max(0, min(CONTEXT, cache.longest - rows, room - rows))
    for scratch in ids:
        cache.admit(scratch, context + rows)
    try:
        cache.commit(ids, [context] * len(ids))
        yield
    finally:
        for scratch in ids:
            cache.release(scratch)


def _verifying(engine: Engine, kit: DraftKit, draft: DDTreeDraft, ids: Sequence[int], rows: int) -> Work:
    """Return the work of verifying trees of so many rows."""
    engine = replace(engine, drafter=kit.make(_fixed(draft, max(1, rows - 1))))
    proposal, places = _proposal(engine, ids)
    if proposal.tree is None:
        raise ValueError("a tree drafter proposes trees")
    proposal = replace(proposal, tokens=proposal.tokens[:, :rows], tree=proposal.tree.cut(rows - 1))
    places = places_of(proposal, places)
    return lambda: accept(proposal, forward(proposal, places, engine).logits, places, None, engine)


def _drafting(engine: Engine, kit: DraftKit, draft: DDTreeDraft, ids: Sequence[int]) -> Work:
    """Return the work of drafting a tree and of taking in what a round commits.

    On a CPU a tree that grows costs what it has grown to, and small ones are usual. On a GPU the largest is built
    whatever is kept of it (`tree.build`).
    """
    most = draft.verify_rows - 1
    nodes = min(draft.block_size, most) if engine.device.type == "cpu" else most
    engine = replace(engine, drafter=kit.make(_fixed(draft, nodes)))
    proposal, places = _proposal(engine, ids)
    used = places_of(proposal, places)
    features = forward(proposal, used, engine).features
    if features is None:
        raise ValueError("a tree drafter wants features")
    kept = len(ids) * min(proposal.tokens.shape[1], draft.block_size // 2 + 1)
    committed = features[:kept].clone()  # the rest is not held while all works take turns

    def work() -> None:
        _proposal(engine, ids)
        engine.drafter.observe(committed, used.positions[:kept], used.write[:kept], engine.cache)

    return work


def _proposal(engine: Engine, ids: Sequence[int]) -> tuple[Proposal, Reservation]:
    places = engine.cache.reserve(ids, engine.drafter.rows)
    roots = torch.zeros(len(ids), dtype=torch.int64, device=engine.device)
    return engine.drafter.propose(roots, places, None, engine.cache), places


def _fixed(draft: DDTreeDraft, nodes: int) -> DDTreeDraft:
    return draft.model_copy(update={"nodes": nodes, "max_nodes": None})


def _fastest(engine: Engine, works: Sequence[Sequence[Work]]) -> list[list[float]]:
    """Return the fastest of several runs of each: what it costs when nothing disturbs it.

    All works take turns, so that what disturbs the machine for a while meets none of them every time. On one thread
    of a CPU its own time counts: what others take of the core is not the round's cost.
    """
    own = engine.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if own else time.perf_counter
    best = [[float("inf")] * len(row) for row in works]
    for _ in range(REPEATS + 1):  # the first warms up, and is never the fastest
        for row, fastest in zip(works, best, strict=True):
            for index, work in enumerate(row):
                began = clock()
                work()
                if engine.device.type == "cuda":
                    torch.cuda.synchronize(engine.device)
                fastest[index] = min(fastest[index], clock() - began)
    return best
