"""Sampling is exact: right distribution, cut where it should be, the same text however it was decoded."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from engine import sampling, verify
from engine.bench import run_requests
from engine.loop import Loop
from engine.request import GREEDY, Request, Sampling
from tests.engine.test_speculate import SMOKE, loop_of, smoke_prompts

CPU = torch.device("cpu")


def naive(logits: list[float], how: Sampling) -> list[float]:
    """The definition, one token at a time."""
    if how.greedy:
        best = max(range(len(logits)), key=logits.__getitem__)
        return [float(token == best) for token in range(len(logits))]
    top = max(logits)
    weights = [math.exp((score - top) / how.temperature) for score in logits]
    order = sorted(range(len(logits)), key=lambda token: -weights[token])
    kept = order[: how.top_k] if how.top_k else order
    total, mass, chosen = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if chosen and mass >= how.top_p * total:
            break
        chosen.append(token)
        mass += weights[token]
    return [weights[token] / mass if token in chosen else 0.0 for token in range(len(logits))]


HOW = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 1000]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(HOW, min_size=1, max_size=4), st.integers(0, 2**31))
def test_distribution_equals_the_definition(requests: list[Sampling], seed: int) -> None:
    logits = torch.randn(len(requests), 2, 9, generator=torch.Generator().manual_seed(seed)) * 3
    found = sampling.distribution(logits, sampling.Batch.of(requests, CPU))
    for r, how in enumerate(requests):
        for row in range(2):
            expected = naive(logits[r, row].double().tolist(), how)
            assert torch.allclose(found[r, row], torch.tensor(expected, dtype=torch.float64), atol=1e-9)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.1, 0.25, 1e-300]), min_size=1, max_size=8), st.floats(0, 1, exclude_max=True))
def test_invert_never_gives_a_token_without_mass(weights: list[float], u: float) -> None:
    if sum(weights) == 0:
        weights = [*weights, 1.0]
    token = sampling.invert(torch.tensor([weights], dtype=torch.float64), torch.tensor([u], dtype=torch.float64)).item()
    assert weights[token] > 0


def test_uniform_is_uniform_and_each_stream_its_own() -> None:
    seeds, positions = torch.arange(400)[:, None], torch.arange(250)[None]
    streams = [sampling.uniform(seeds, positions, stream) for stream in range(3)]
    for numbers in streams:
        assert stats.kstest(numbers.flatten().numpy(), "uniform").pvalue > 1e-4
        across = [numbers[:, :-1].flatten(), numbers[:, 1:].flatten()], [numbers[:-1].flatten(), numbers[1:].flatten()]
        assert all(abs(torch.corrcoef(torch.stack(pair))[0, 1]) < 0.02 for pair in across)
    assert abs(torch.corrcoef(torch.stack([s.flatten() for s in streams]))[0, 1]) < 0.02


def draws_of(
    setting: Sampling, draws: int, method: str, temperature_error: float = 1.0
) -> tuple[torch.Tensor, list[float]]:
    """Tokens that verification yields at the first drafted position over `draws` seeds, and their true distribution."""
    generator = torch.Generator().manual_seed(11)
    vocab, rows = 8, 3
    target = torch.randn(1, rows, vocab, generator=generator) * 2
    draft = target[:, :-1] + torch.randn(1, rows - 1, vocab, generator=generator) * 1.5
    batch = sampling.Batch.of(
        [Sampling(setting.temperature, setting.top_k, setting.top_p, s) for s in range(draws)], CPU
    )
    warm = sampling.Batch.of(
        [Sampling(setting.temperature * temperature_error, setting.top_k, setting.top_p, s) for s in range(draws)], CPU
    )
    positions = torch.arange(10, 10 + rows).expand(draws, -1)
    seeds = batch.seed[:, None]
    logits = target.expand(draws, -1, -1)
    if method == "drawn":
        q = sampling.distribution(draft.expand(draws, -1, -1), batch)
        drafted = sampling.invert(q, sampling.uniform(seeds, positions[:, 1:], sampling.DRAFT))
        proposal = torch.cat([drafted.new_zeros((draws, 1)), drafted], dim=1)
        verdict = verify.rejection(
            proposal,
            q,
            sampling.distribution(logits, warm),
            sampling.uniform(seeds, positions[:, 1:], sampling.ACCEPT),
            sampling.uniform(seeds, positions + 1, sampling.TARGET),
        )
    else:
        best = draft.argmax(dim=-1).expand(draws, -1)
        proposal = torch.cat([best.new_zeros((draws, 1)), best], dim=1)
        verdict = verify.chain(proposal, sampling.choose(logits, positions + 1, warm))
    first = torch.tensor([tokens[0] for tokens in verdict.tokens])
    return first, naive(target[0, 0].double().tolist(), setting)


def p_value(first: torch.Tensor, expected: list[float]) -> float:
    """Chi-square of the draws against the distribution; a token without mass is refuted at once."""
    counts = torch.bincount(first, minlength=len(expected)).tolist()
    if any(count and not mass for count, mass in zip(counts, expected, strict=True)):
        return 0.0
    kept = [(count, mass) for count, mass in zip(counts, expected, strict=True) if mass > 0]
    if len(kept) == 1:
        return 1.0
    observed, masses = zip(*kept, strict=True)
    return float(stats.chisquare(observed, [mass * len(first) for mass in masses]).pvalue)


SETTINGS = [Sampling(1.0), Sampling(0.7), Sampling(1.3, top_k=3), Sampling(1.0, top_p=0.8), Sampling(0.9, 4, 0.9)]


@pytest.mark.parametrize("method", ["likeliest", "drawn"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_verification_draws_from_the_target(setting: Sampling, method: str) -> None:
    first, expected = draws_of(setting, 20_000, method)
    assert p_value(first, expected) > 0.001 / (2 * len(SETTINGS))


@pytest.mark.parametrize("method", ["likeliest", "drawn"])
def test_a_wrong_temperature_is_seen(method: str) -> None:
    first, expected = draws_of(Sampling(1.0), 100_000, method, temperature_error=1.05)
    assert p_value(first, expected) < 1e-6


def sampled(loop: Loop, prompts: list[tuple[int, ...]], hows: list[Sampling]) -> list[tuple[int, ...]]:
    made: dict[int, list[int]] = {}
    for number, (prompt, how) in enumerate(zip(prompts, hows, strict=True)):
        made[number] = []
        assert loop.submit(Request(number, prompt, 30, (), how)) is None
    while not loop.idle:
        for progress in loop.advance():
            made[progress.id] += progress.tokens
    return [tuple(tokens) for tokens in made.values()]


def test_a_seeded_text_is_the_same_with_and_without_speculation_alone_and_in_a_batch() -> None:
    prompts = smoke_prompts(8)
    hows = [Sampling(0.8, seed=1), GREEDY, Sampling(1.0, 5, 1.0, 2), Sampling(0.6, 0, 0.9, 3)] * 2
    expected = sampled(loop_of(SMOKE / "target", {"kind": "none"}), prompts, hows)
    assert expected[0] != expected[4] or prompts[0] != prompts[4]
    for draft in (
        {"kind": "dflash", "block_size": 8},
        {"kind": "dflash", "block_size": 4, "layers": 1},
        {"kind": "ddtree", "block_size": 8, "nodes": 15},
    ):
        loop = loop_of(SMOKE / "target", draft | {"model": str(SMOKE / "draft")})
        assert sampled(loop, prompts, hows) == expected
        for number in (0, 2, 3):
            assert sampled(loop, [prompts[number]], [hows[number]]) == [expected[number]]
    other = sampled(loop_of(SMOKE / "target", {"kind": "none"}), prompts, [Sampling(0.8, seed=99)] * 8)
    assert other[0] != expected[0]


def test_drawn_drafts_are_accepted_and_depend_on_nothing_but_the_seed() -> None:
    prompts = smoke_prompts(6)
    hows = [Sampling(1.0, seed=number) for number in range(6)]
    draft = {"kind": "dflash", "model": str(SMOKE / "draft"), "block_size": 8, "sample": "probabilistic"}
    loop = loop_of(SMOKE / "target", draft)
    together = sampled(loop, prompts, hows)
    assert sampled(loop, prompts[:1], hows[:1]) == together[:1]
    length = loop.stats().acceptance["accept_length"]
    assert isinstance(length, float)
    assert length > 1.1
    greedy = run_requests(loop_of(SMOKE / "target", {"kind": "none"}), prompts, 30).outputs
    assert run_requests(loop, prompts, 30).outputs == greedy
