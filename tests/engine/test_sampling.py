"""Sampling is exact: right distribution, cut where it should be, the same text however it was decoded."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from benchmarks.decoding_sampling import METHODS, Reference, definition, holm, p_value, through_the_engine, verify_alone
from engine import sampling
from engine.bench import run_requests
from engine.loop import Loop
from engine.request import GREEDY, Request, Sampling
from tests.engine.test_speculate import SMOKE, loop_of, smoke_prompts
from tests.faults.fault import Fault
from tests.faults.sampling import draft_probability_missing, residual_not_renormalised, temperature_high

CPU = torch.device("cpu")


def name_of(fault: Fault) -> str:
    return fault.name


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
            expected = torch.from_numpy(definition(logits[r, row].numpy(), how))
            assert torch.allclose(found[r, row], expected, atol=1e-9)


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


SETTINGS = [Sampling(1.0), Sampling(0.7), Sampling(1.3, top_k=3), Sampling(1.0, top_p=0.8), Sampling(0.9, 4, 0.9)]


def test_verification_draws_two_tokens_as_the_target_does() -> None:
    """Joint cells of consecutive tokens, for every setting and way of drafting; `make proof-decoding` draws more."""
    found = {(s, m): verify_alone(s, m, 10_000) for s, m in itertools.product(SETTINGS, METHODS)}
    assert not holm([p for p, _ in found.values()])
    assert min(length for _, length in found.values()) > 1.1


@pytest.mark.parametrize("fault", [temperature_high, residual_not_renormalised, draft_probability_missing], ids=name_of)
def test_a_mistake_in_sampling_is_seen(fault: Fault) -> None:
    with fault.applied():
        assert verify_alone(Sampling(1.0), "drawn", 30_000)[0] < 1e-6


def test_the_engine_draws_three_tokens_as_transformers_says() -> None:
    """Speculative sampling through the whole engine; nothing outside top-k and top-p."""
    prompt, how, draws = smoke_prompts(1)[0][:12], Sampling(1.0, 12, 0.95), 1500
    draft = {"kind": "dflash", "model": str(SMOKE / "draft"), "block_size": 4, "sample": "probabilistic"}
    loop = loop_of(SMOKE / "target", draft, memory={"max_running": 50})
    made = through_the_engine(loop, prompt, how, draws)
    reference = Reference(SMOKE / "target", prompt)
    assert p_value(made, reference.cells(how, 3, 5 / draws)) > 0.001
    assert reference.outside(made, how) == 0


def test_any_temperature_that_is_not_zero_draws() -> None:
    """Not even the smallest is taken for greedy decoding, or for temperature 1."""
    logits = torch.tensor([[[0.0, 1.0, 1.0]]])
    for temperature in (5e-324, 1e-50, 1e-9):
        found = sampling.distribution(logits, sampling.Batch.of([Sampling(temperature)], CPU))
        assert found.tolist() == [[[0.0, 0.5, 0.5]]]


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
