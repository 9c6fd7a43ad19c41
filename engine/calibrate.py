"""Measure at start-up what rounds cost, for trees that grow by it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from engine.cost import CostTable, smooth
from engine.drafters.base import DraftWork, Proposal
from engine.drafters.build import DraftKit
from engine.drafters.dflash import DFlashDrafter
from engine.speculate import Engine, accept, forward

CONTEXT = 128  # tokens before the measured rows: a typical length, costs depend on it little
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
REPEATS = 5
SCRATCH = -1  # id of the request whose cache is used and given back


@torch.inference_mode()
def measure_costs(engine: Engine, kit: DraftKit) -> CostTable:
    """Return seconds of one draft forward and of verifying 1 … kit.rows rows of one request; the cache must be free."""
    rows = [count for count in ROWS if count < kit.rows] + [kit.rows]
    context = max(0, min(CONTEXT, engine.cache.longest - kit.rows))
    engine.cache.admit(SCRATCH, context + kit.rows)
    try:
        engine.cache.commit([SCRATCH], [context])
        verify = [_verify(engine, count) for count in rows]
        propose = 0.0
        if kit.model is not None and kit.attention is not None:
            drafter = DFlashDrafter(kit.model, kit.attention, min(kit.rows, kit.model.shape.block_size), kit.layers)
            root = torch.zeros(1, dtype=torch.int64, device=engine.device)
            propose = _fastest(
                engine, lambda: drafter.block(root, engine.cache.reserve([SCRATCH], drafter.rows), engine.cache)
            )
    finally:
        engine.cache.release(SCRATCH)
    return CostTable(propose, tuple(rows), smooth(verify))


def _verify(engine: Engine, rows: int) -> float:
    places = engine.cache.reserve([SCRATCH], rows)
    tokens = torch.zeros((1, rows), dtype=torch.int64, device=engine.device)
    proposal = Proposal(tokens, DraftWork(), depth=rows - 1)

    def once() -> None:
        accept(proposal, forward(proposal, places, engine).logits, places, None, engine)

    return _fastest(engine, once)


def _fastest(engine: Engine, work: Callable[[], object]) -> float:
    """Return the fastest of several runs: what the work costs when nothing disturbs it."""
    best = float("inf")
    for _ in range(REPEATS + 1):  # the first warms up, and is never the fastest
        began = time.perf_counter()
        work()
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        best = min(best, time.perf_counter() - began)
    return best
