"""One step of decoding: propose, forward, accept, commit. Read this file first.

A decode round extends the cache of every running request by one verified block:

1. the drafter proposes a block per request, its root the newest token (no speculation: the root alone);
2. the target computes all rows of all blocks in one forward, on top of the cached tokens;
3. acceptance keeps the drafted tokens that the target would have produced, and adds its own next token;
4. the cache keeps the rows of the root and the accepted tokens; the drafter takes in their features, once.

Prompts are the same forward without a proposal. Nothing committed is ever computed again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine import verify
from engine.drafters.base import Drafter, DraftWork
from engine.kv_cache import KVCache, Reservation
from engine.model.attention.base import Attention
from engine.model.layers import Rows
from engine.model.target import Target
from engine.scheduler import Batch, Chunk, Decode


@dataclass(frozen=True)
class Engine:
    """Everything a step reads: models, kernels, cache."""

    target: Target
    drafter: Drafter
    attention: Attention
    cache: KVCache
    device: torch.device
    simulate_accept: float | None = None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Work:
    """What a step computed; see `protocol.Rounds` for the meaning of the counts."""

    requests: int = 0
    target_rows: int = 0
    draft: DraftWork = field(default_factory=DraftWork)
    context_rows: int = 0
    target_kv_rows_read: int = 0
    prefill_rows: int = 0
    prefill_kv_rows_read: int = 0
    accepted: tuple[int, ...] = ()
    seconds: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # propose, forward, accept, commit
    seconds_prefill: float = 0.0


@dataclass(frozen=True)
class StepOutput:
    """New tokens by request id, and what they cost."""

    tokens: dict[int, tuple[int, ...]]
    work: Work


@torch.inference_mode()
def step(batch: Batch, engine: Engine) -> StepOutput:
    """Run one step: the prompts' next chunks, then one decode round of all running requests."""
    began = time.perf_counter()
    first, prefill_kv = prefill(batch.prefill, engine)
    prefilled = time.perf_counter()
    rows = sum(len(chunk.tokens) for chunk in batch.prefill)
    if not batch.decode:
        work = Work(prefill_rows=rows, prefill_kv_rows_read=prefill_kv, seconds_prefill=prefilled - began)
        return StepOutput(first, work)
    ids = [decode.id for decode in batch.decode]

    places = engine.cache.reserve(ids, engine.drafter.rows)
    proposal, draft_work = engine.drafter.propose(_roots(batch.decode, engine), places, engine.cache)
    proposed = time.perf_counter()

    choices, features, kv_rows = forward(proposal, places, engine)
    forwarded = time.perf_counter()

    verdict = accept(proposal, choices, engine)
    accepted = time.perf_counter()

    commit(verdict, features, places, engine)
    committed = time.perf_counter()

    work = Work(
        requests=len(ids),
        target_rows=proposal.numel(),
        draft=draft_work,
        context_rows=sum(verdict.accepted) + len(ids) if engine.drafter.taps else 0,
        target_kv_rows_read=kv_rows,
        prefill_rows=rows,
        prefill_kv_rows_read=prefill_kv,
        accepted=verdict.accepted,
        seconds=(proposed - prefilled, forwarded - proposed, accepted - forwarded, committed - accepted),
        seconds_prefill=prefilled - began if batch.prefill else 0.0,
    )
    return StepOutput(first | dict(zip(ids, verdict.tokens, strict=True)), work)


def prefill(chunks: tuple[Chunk, ...], engine: Engine) -> tuple[dict[int, tuple[int, ...]], int]:
    """Compute prompt chunks in one forward; return the first token of each prompt that ends, and KV rows read."""
    if not chunks:
        return {}, 0
    reserved = [engine.cache.reserve([chunk.id], len(chunk.tokens)) for chunk in chunks]
    positions = torch.cat([places.positions for places in reserved])
    write = torch.cat([places.write for places in reserved])
    plan = engine.attention.plan([places.span(causal=True) for places in reserved])
    tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens], device=engine.device)
    rows = Rows(positions, write, engine.target.rotation[positions][:, None], plan)
    hidden, features = engine.target.forward(tokens, rows, engine.cache.target, engine.drafter.taps)

    engine.cache.commit([chunk.id for chunk in chunks], [len(chunk.tokens) for chunk in chunks])
    engine.drafter.observe(features, positions, write, engine.cache)
    ends, row = [], 0
    for chunk in chunks:
        row += len(chunk.tokens)
        if chunk.last:
            ends.append((chunk.id, row - 1))
    if not ends:
        return {}, engine.attention.kv_rows_read(plan)
    last = hidden[torch.tensor([row for _, row in ends], device=engine.device)]
    best = engine.target.head(last).max(dim=-1).indices.tolist()
    return {ends[i][0]: (best[i],) for i in range(len(ends))}, engine.attention.kv_rows_read(plan)


def forward(proposal: Tensor, places: Reservation, engine: Engine) -> tuple[Tensor, Tensor | None, int]:
    """Run the target on [requests, rows]; return its choices alike, features by row, and KV rows read a layer."""
    plan = engine.attention.plan([places.span(causal=True)])
    rows = Rows(places.positions, places.write, engine.target.rotation[places.positions][:, None], plan)
    hidden, features = engine.target.forward(proposal.flatten(), rows, engine.cache.target, engine.drafter.taps)
    choices = engine.target.head(hidden).max(dim=-1).indices.view(proposal.shape)
    return choices, features, engine.attention.kv_rows_read(plan)


def accept(proposal: Tensor, choices: Tensor, engine: Engine) -> verify.Verdict:
    """Judge the proposal, or force the judgement when acceptance is simulated."""
    if engine.simulate_accept is not None:
        return verify.forced(proposal, choices, engine.simulate_accept, engine.generator)
    return verify.greedy(proposal, choices)


def commit(verdict: verify.Verdict, features: Tensor | None, places: Reservation, engine: Engine) -> None:
    """Keep the rows of root and accepted tokens, and show them to the drafter."""
    counts = [accepted + 1 for accepted in verdict.accepted]
    engine.cache.commit(places.ids, counts)
    if features is None:
        return
    kept = [request * places.rows + row for request, count in enumerate(counts) for row in range(count)]
    index = torch.tensor(kept, device=engine.device)
    engine.drafter.observe(features[index], places.positions[index], places.write[index], engine.cache)


def _roots(decodes: tuple[Decode, ...], engine: Engine) -> Tensor:
    return torch.tensor([decode.root for decode in decodes], device=engine.device)
