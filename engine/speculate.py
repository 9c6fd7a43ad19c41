"""One step of decoding: propose, forward, accept, commit. Read this file first.

A decode round extends the cache of every running request by one verified block:

1. the drafter proposes a block per request, its root the newest token (no speculation: the root alone);
2. the target computes all rows of all blocks in one forward, on top of the cached tokens;
3. acceptance keeps the drafted tokens that the target would have produced, and adds its own next token;
4. the cache keeps the rows of the root and the accepted tokens; the drafter takes in their features, once.

Prompts are the same forward without a proposal. Nothing committed is ever computed again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine import sampling, scoring, verify
from engine.drafters.base import Drafter, DraftWork, Proposal
from engine.kv_cache import KVCache, Reservation
from engine.model.attention.base import Attention
from engine.model.layers import Rows
from engine.model.target import Target
from engine.request import Request, Scored
from engine.scheduler import Batch, Chunk


@dataclass(frozen=True)
class Engine:
    """Everything a step reads: models, kernels, cache."""

    target: Target
    drafter: Drafter
    attention: Attention
    cache: KVCache
    device: torch.device
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Forward:
    """What the target says of rows: logits [R, rows, vocab], features by row, KV positions one layer read."""

    logits: Tensor
    features: Tensor | None
    kv_rows_read: int


@dataclass(frozen=True)
class Work:
    """What a step computed; see `protocol.Rounds` for the meaning of the counts."""

    requests: int = 0
    depth: int = 0  # most drafted tokens that the round could accept, of each request
    target_rows: int = 0
    draft: DraftWork = field(default_factory=DraftWork)
    context_rows: int = 0
    target_kv_rows_read: int = 0
    prefill_rows: int = 0
    prefill_kv_rows_read: int = 0
    accepted: tuple[int, ...] = ()
    seconds: tuple[float, ...] = (0.0,) * 5  # prefill, propose, forward, accept, commit
    captured: bool = False  # the round was the replay of a CUDA graph


@dataclass(frozen=True)
class StepOutput:
    """New tokens by request id, and what they cost."""

    tokens: dict[int, tuple[int, ...]]
    work: Work
    scores: dict[int, tuple[Scored, ...]] = field(default_factory=dict)  # of those tokens, where asked for
    prompt_scores: dict[int, tuple[Scored, ...]] = field(default_factory=dict)


@torch.inference_mode()
def step(batch: Batch, engine: Engine) -> StepOutput:
    """Run one step: the prompts' next chunks, then one decode round of all running requests."""
    marks = [time.perf_counter()]
    prompts = prefill(batch.prefill, engine)
    marks.append(time.perf_counter())
    if not batch.decode:
        return replace(prompts, work=replace(prompts.work, seconds=_laps(marks)))
    ids = [decode.id for decode in batch.decode]
    roots = torch.tensor([decode.root for decode in batch.decode], device=engine.device)
    draws = _draws([decode.request for decode in batch.decode], engine)

    places = engine.cache.reserve(ids, engine.drafter.rows)
    proposal = engine.drafter.propose(roots, places, draws, engine.cache)
    marks.append(time.perf_counter())

    places = places_of(proposal, places)
    scored = forward(proposal, places, engine)
    marks.append(time.perf_counter())

    verdict = accept(proposal, scored.logits, places, draws, engine)
    marks.append(time.perf_counter())

    commit(verdict, scored.features, places, engine)
    marks.append(time.perf_counter())

    work = replace(
        prompts.work,
        requests=len(ids),
        depth=proposal.depth,
        target_rows=proposal.tokens.numel(),
        draft=proposal.work,
        context_rows=sum(map(len, verdict.rows)) if engine.drafter.taps else 0,
        target_kv_rows_read=scored.kv_rows_read,
        accepted=verdict.accepted,
        seconds=_laps(marks),
    )
    made = StepOutput(
        dict(zip(ids, verdict.tokens, strict=True)), work, scoring.of_round(batch.decode, verdict, scored.logits)
    )
    return StepOutput(prompts.tokens | made.tokens, work, prompts.scores | made.scores, prompts.prompt_scores)


def prefill(chunks: Sequence[Chunk], engine: Engine) -> StepOutput:
    """Compute prompt chunks in one forward; a prompt that ends gives its first token."""
    if not chunks:
        return StepOutput({}, Work())
    reserved = [engine.cache.reserve([chunk.id], len(chunk.tokens)) for chunk in chunks]
    positions = torch.cat([places.positions for places in reserved])
    write = torch.cat([places.write for places in reserved])
    plan = engine.attention.plan([places.span(causal=True) for places in reserved])
    tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens], device=engine.device)
    rows = Rows(positions, write, engine.target.rotation[positions][:, None], plan)
    hidden, features = engine.target.forward(tokens, rows, engine.cache.target, engine.drafter.taps)

    engine.cache.commit([chunk.id for chunk in chunks], [len(chunk.tokens) for chunk in chunks])
    engine.drafter.observe(features, positions, write, engine.cache)
    work = Work(prefill_rows=len(tokens), prefill_kv_rows_read=engine.attention.kv_rows_read(plan))
    prompt_scores = scoring.of_prompts(chunks, hidden, engine.target.head)
    ends, row = [], -1
    for chunk in chunks:
        row += len(chunk.tokens)
        if chunk.last:
            ends.append((chunk.request, row))
    if not ends:
        return StepOutput({}, work, prompt_scores=prompt_scores)
    last = torch.tensor([row for _, row in ends], device=engine.device)
    logits = engine.target.head(hidden[last])[:, None]
    draws = _draws([request for request, _ in ends], engine)
    chosen = choose(logits, positions[last][:, None], draws).flatten().tolist()
    made: dict[int, tuple[int, ...]] = {request.id: (token,) for (request, _), token in zip(ends, chosen, strict=True)}
    scores = {
        request.id: scoring.score(logits[index], made[request.id], request.logprobs)
        for index, (request, _) in enumerate(ends)
        if request.logprobs is not None
    }
    return StepOutput(made, work, scores, prompt_scores)


def forward(proposal: Proposal, places: Reservation, engine: Engine) -> Forward:
    """Run the target on all rows of all proposals."""
    tree = None if proposal.tree is None else proposal.tree.visibility(proposal.depth)
    plan = engine.attention.plan([places.span(causal=True, tree=tree)])
    rows = Rows(places.positions, places.write, engine.target.rotation[places.positions][:, None], plan)
    tokens = proposal.tokens.flatten()
    hidden, features = engine.target.forward(tokens, rows, engine.cache.target, engine.drafter.taps)
    logits = engine.target.head(hidden).view(*proposal.tokens.shape, -1)
    return Forward(logits, features, engine.attention.kv_rows_read(plan))


def accept(
    proposal: Proposal, logits: Tensor, places: Reservation, draws: sampling.Batch | None, engine: Engine
) -> verify.Verdict:
    """Judge the proposal by the target's logits, or force the judgement when acceptance is simulated."""
    positions = places.positions.view(proposal.tokens.shape)
    if proposal.forced is None and draws is not None and proposal.probabilities is not None:
        return verify.rejection(
            proposal.tokens,
            proposal.probabilities,
            sampling.distribution(logits, draws),
            sampling.uniform(draws.seed[:, None], positions[:, 1:], sampling.ACCEPT),
            sampling.uniform(draws.seed[:, None], positions + 1, sampling.TARGET),
        )
    choices = choose(logits, positions, draws)
    if proposal.forced is not None:
        return verify.forced(choices, proposal.forced, proposal.depth, engine.generator)
    if proposal.tree is not None:
        return verify.branches(proposal.tree, proposal.tokens, choices, proposal.depth)
    return verify.chain(proposal.tokens, choices)


def choose(logits: Tensor, positions: Tensor, draws: sampling.Batch | None) -> Tensor:
    """Return the target's token [R, rows] after rows at `positions` [R, rows]: likeliest, or drawn."""
    if draws is None:
        return logits.max(dim=-1).indices
    return sampling.choose(logits, positions + 1, draws)


def commit(verdict: verify.Verdict, features: Tensor | None, places: Reservation, engine: Engine) -> None:
    """Keep the rows of root and accepted tokens, and show them to the drafter."""
    engine.cache.compact(places, verdict.rows)
    counts = [len(rows) for rows in verdict.rows]
    engine.cache.commit(places.ids, counts)
    if features is None:
        return
    kept = [r * places.rows + row for r, rows in enumerate(verdict.rows) for row in rows]
    slots = [r * places.rows + place for r, count in enumerate(counts) for place in range(count)]
    index, slot = torch.tensor([kept, slots], device=engine.device)
    engine.drafter.observe(features[index], places.positions[index], places.write[slot], engine.cache)


def places_of(proposal: Proposal, places: Reservation) -> Reservation:
    """Return the reserved rows that the proposal fills, at the positions its tree gives them."""
    places = places.first(proposal.tokens.shape[1])
    return places if proposal.tree is None else places.at(proposal.tree.depths)


def _draws(requests: Sequence[Request], engine: Engine) -> sampling.Batch | None:
    """Return how the requests sample, None when all are greedy."""
    if all(request.sampling.greedy for request in requests):
        return None
    return sampling.Batch.of([request.sampling for request in requests], engine.device)


def _laps(marks: list[float]) -> tuple[float, ...]:
    laps = [after - before for before, after in itertools.pairwise(marks)]
    return (*laps, *(0.0,) * (5 - len(laps)))
