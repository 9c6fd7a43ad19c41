"""Measure at start-up what rounds cost, for trees that grow by it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from engine.config import DDTreeDraft
from engine.cost import CostTable, smooth
from engine.drafters.base import Proposal
from engine.drafters.build import DraftKit
from engine.kv_cache import Reservation
from engine.speculate import Engine, accept, forward, places_of

CONTEXT = 128  # tokens before the measured rows: a typical length, costs depend on it little
ROWS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96, 128)
REQUESTS = (1, 4, 16, 64, 256)
MOST_ROWS = 256  # rows of all requests together that are still measured; larger rounds are extrapolated
REPEATS = 4

Work = Callable[[], object]


@torch.inference_mode()
def measure_costs(engine: Engine, kit: DraftKit, draft: DDTreeDraft, most: int) -> CostTable:
    """Return what rounds of 1 … `most` requests cost with trees of 1 … `draft.verify_rows` rows; the cache is free."""
    rows = (*(count for count in ROWS if count < draft.verify_rows), draft.verify_rows)
    fits = max(1, min(most, engine.cache.pages // engine.cache.pages_for(kit.rows + 1)))
    requests = (*(count for count in REQUESTS if count < fits), fits)
    measured = [_measure(engine, kit, draft, count, rows) for count in requests]
    return CostTable(requests, rows, *zip(*measured, strict=True))


def _measure(
    engine: Engine, kit: DraftKit, draft: DDTreeDraft, requests: int, rows: tuple[int, ...]
) -> tuple[float, tuple[float, ...]]:
    """Return seconds of all but verifying, and of verifying by rows, for a round of so many requests."""
    cache, ids = engine.cache, range(-requests, 0)
    room = cache.pages // requests * cache.page_size
    context = max(0, min(CONTEXT, cache.longest - kit.rows, room - kit.rows))
    for scratch in ids:
        cache.admit(scratch, context + kit.rows)
    try:
        cache.commit(ids, [context] * requests)
        counts = [count for count in rows if count == rows[0] or requests * count <= MOST_ROWS]
        work = [_drafting(engine, kit, draft, ids), *(_verifying(engine, kit, draft, ids, count) for count in counts)]
        drafting, *verifying = _fastest(engine, work)
        return drafting, smooth(verifying)
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
    """Return the work of drafting a small tree and of taking in what a round commits."""
    engine = replace(engine, drafter=kit.make(_fixed(draft, min(draft.block_size, draft.verify_rows - 1))))
    proposal, places = _proposal(engine, ids)
    used = places_of(proposal, places)
    features = forward(proposal, used, engine).features
    if features is None:
        raise ValueError("a tree drafter wants features")
    kept = len(ids) * min(proposal.tokens.shape[1], draft.block_size // 2 + 1)

    def work() -> None:
        _proposal(engine, ids)
        engine.drafter.observe(features[:kept], used.positions[:kept], used.write[:kept], engine.cache)

    return work


def _proposal(engine: Engine, ids: Sequence[int]) -> tuple[Proposal, Reservation]:
    places = engine.cache.reserve(ids, engine.drafter.rows)
    roots = torch.zeros(len(ids), dtype=torch.int64, device=engine.device)
    return engine.drafter.propose(roots, places, None, engine.cache), places


def _fixed(draft: DDTreeDraft, nodes: int) -> DDTreeDraft:
    return draft.model_copy(update={"nodes": nodes, "max_nodes": None})


def _fastest(engine: Engine, works: Sequence[Work]) -> list[float]:
    """Return the fastest of several runs of each: what it costs when nothing disturbs it.

    The works take turns, so that a machine whose speed drifts slows all of them alike.
    """
    best = [float("inf")] * len(works)
    for _ in range(REPEATS + 1):  # the first warms up, and is never the fastest
        for index, work in enumerate(works):
            began = time.perf_counter()
            work()
            if engine.device.type == "cuda":
                torch.cuda.synchronize(engine.device)
            best[index] = min(best[index], time.perf_counter() - began)
    return best
