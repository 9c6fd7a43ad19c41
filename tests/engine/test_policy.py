"""Policies by load: the right entry at the right time, and the same text whatever switches under it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.bench import run_requests
from engine.config import DDTreeDraft, DFlashDraft, EngineConfig, NoDraft, PolicyDraft
from engine.cost import CostTable, Curve, best_size
from engine.drafters.ddtree import Growing
from engine.errors import ConfigError
from engine.loop import Loop
from engine.policy import HOLD_ROUNDS, Switch, entry_for
from engine.request import Request, Sampling
from engine.runtime import build, resolve
from tests.engine.test_speculate import SMOKE, loop_of, smoke_prompts

DRAFT = {"model": str(SMOKE / "draft")}
TREE = {"kind": "ddtree", "block_size": 8, "nodes": 12, **DRAFT}
CHAIN = {"kind": "dflash", "block_size": 4, "layers": 1, **DRAFT}
TABLE = [[1, 2, TREE], [3, 5, {"kind": "none"}], [6, None, CHAIN]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True).map(sorted), st.integers(1, 60))
def test_entry_for_is_the_range_that_holds(lasts: list[int], running: int) -> None:
    index = entry_for(running, (*lasts, None))
    assert index == sum(running > last for last in lasts)


@given(st.lists(st.integers(0, 2), max_size=40))
def test_a_switch_comes_when_the_entry_was_not_wanted_for_some_rounds(wishes: list[int]) -> None:
    state, unwanted = Switch(), 0
    for wish in wishes:
        before, state = state.entry, state.after(wish)
        unwanted = 0 if wish == before else unwanted + 1
        assert state.entry == (wish if unwanted == HOLD_ROUNDS else before)
        if state.entry != before:
            unwanted = 0


def test_a_load_that_flickers_between_two_other_ranges_leaves_the_one_in_force() -> None:
    state = Switch()
    for wish in (1, 2) * HOLD_ROUNDS:
        state = state.after(wish)
    assert state.entry in (1, 2)


def staggered(loop: Loop, prompts: list[tuple[int, ...]], lengths: list[int]) -> list[tuple[int, ...]]:
    """Submit all at once; the load falls as short requests end."""
    made: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        assert loop.submit(Request(number, prompt, length)) is None
    while not loop.idle:
        for progress in loop.advance():
            made[progress.id] += progress.tokens
    return [tuple(tokens) for tokens in made.values()]


def test_text_is_the_same_while_the_policy_switches_drafts_on_and_off() -> None:
    prompts = smoke_prompts(8)
    lengths = [16, 20, 24, 28, 60, 64, 100, 120]
    expected = staggered(loop_of(SMOKE / "target", {"kind": "none"}), prompts, lengths)
    loop = loop_of(SMOKE / "target", {"kind": "policy", "by_running": TABLE})
    seen: set[int | None] = set()
    original = loop.advance

    def advance() -> Any:
        progress = original()
        seen.add(loop.stats().policy_entry)
        return progress

    loop.advance = advance  # type: ignore[method-assign]
    assert staggered(loop, prompts, lengths) == expected
    assert seen == {0, 1, 2}
    assert staggered(loop, prompts[:1], lengths[:1]) == expected[:1]


def test_a_drawn_chain_beside_a_larger_tree_draws_what_it_draws_alone() -> None:
    """A policy reserves rows for its largest entry; the chain's places are the first of them."""
    chain = {**CHAIN, "sample": "probabilistic"}
    texts = []
    for draft in (chain, {"kind": "policy", "by_running": [[1, 3, chain], [4, None, TREE]]}):
        loop, made = loop_of(SMOKE / "target", draft), []
        assert loop.submit(Request(0, smoke_prompts(1)[0], 40, (), Sampling(0.9, seed=7))) is None
        while not loop.idle:
            for progress in loop.advance():
                made += progress.tokens
        texts.append(made)
    assert texts[0] == texts[1]
    assert len(texts[0]) == 40


def context_kv(loop: Loop, request: int) -> torch.Tensor:
    """The draft KV of a running request's cached tokens, [layers, tokens, heads, dim]."""
    cache = loop._engine.cache
    loop._engine.drafter.settle(cache)
    entry = cache._entries[request]
    assert cache.draft is not None
    return cache.draft[:, cache._table[entry.row, : entry.length]].clone()


@pytest.mark.parametrize("swapped", [False, True], ids=["by load", "by POST /policy"])
def test_a_request_that_returns_to_speculation_has_the_draft_kv_of_one_that_never_left(swapped: bool) -> None:
    """Row for row, for every cached token: prompt, speculative rounds, and rounds without speculation."""
    prompt, length = smoke_prompts(1)[0], 90
    chain: dict[str, Any] = {"kind": "dflash", "block_size": 8, **DRAFT}
    on, off = DFlashDraft.model_validate(chain), NoDraft()
    always = loop_of(SMOKE / "target", chain)
    loop = loop_of(SMOKE / "target", chain)
    assert always.submit(Request(0, prompt, length)) is None
    assert loop.submit(Request(0, prompt, length)) is None
    texts: list[list[int]] = [[], []]
    for until, draft in ((10, on), (40, off), (55, on), (60, off), (75, on)):
        loop.set_draft(draft if swapped else PolicyDraft(by_running=((1, 1, draft), (2, None, on))))
        while len(texts[1]) < until:
            texts[1] += [token for progress in loop.advance() for token in progress.tokens]
        while len(texts[0]) < len(texts[1]):
            texts[0] += [token for progress in always.advance() for token in progress.tokens]
        mine, its = context_kv(loop, 0), context_kv(always, 0)
        tokens = min(mine.shape[1], its.shape[1])
        assert tokens >= len(prompt) + until - 1
        assert torch.allclose(mine[:, :tokens], its[:, :tokens], atol=1e-4)
    for text, engine in zip(texts, (always, loop), strict=True):
        while not engine.idle:
            text += [token for progress in engine.advance() for token in progress.tokens]
    assert texts[0] == texts[1]


def test_a_policy_that_switched_drafts_keeps_every_requests_draft_kv_whole() -> None:
    """Several requests at once, the load falling through all entries, pages changing owners."""
    prompts, lengths = smoke_prompts(8), [16, 20, 24, 28, 60, 64, 100, 120]
    switching = loop_of(SMOKE / "target", {"kind": "policy", "by_running": TABLE}, memory={"max_running": 4})
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        assert switching.submit(Request(number, prompt, length)) is None
    made: dict[int, tuple[int, ...]] = dict.fromkeys(range(8), ())
    checked = 0
    while not switching.idle:
        for progress in switching.advance():
            made[progress.id] += progress.tokens
        for number in list(switching._engine.cache._entries):
            if len(made[number]) % 7 == 6 and len(made[number]) < lengths[number]:
                mine = context_kv(switching, number)
                text = (*prompts[number], *made[number])[: mine.shape[1]]
                fresh = loop_of(SMOKE / "target", CHAIN | {"layers": 2})
                assert fresh.submit(Request(0, text, 4)) is None
                fresh.advance()
                assert torch.allclose(mine, context_kv(fresh, 0)[:, : mine.shape[1]], atol=1e-4)
                checked += 1
    assert checked > 8


def test_set_draft_refuses_what_the_server_was_not_started_for() -> None:
    loop = loop_of(SMOKE / "target", {"kind": "policy", "by_running": TABLE})
    with pytest.raises(ConfigError, match="rows a round"):
        loop.set_draft(DFlashDraft(block_size=64))
    with pytest.raises(ConfigError, match="costs"):
        loop.set_draft(DDTreeDraft(block_size=8, nodes="auto", max_nodes=10))
    with pytest.raises(ConfigError, match="window"):
        loop.set_draft(DFlashDraft(block_size=8, window=16))
    with pytest.raises(ConfigError, match="elsewhere"):
        loop.set_draft(DFlashDraft(block_size=8, model="elsewhere"))
    loop.set_draft(NoDraft())
    with pytest.raises(ConfigError, match="without a drafter"):
        loop_of(SMOKE / "target", {"kind": "none"}).set_draft(DFlashDraft(block_size=8))


def test_acceptance_counts_what_each_round_drafted() -> None:
    """After a swap, and in rounds without speculation, the drafted tokens are those of the draft in force."""
    loop = loop_of(SMOKE / "target", {"kind": "dflash", "block_size": 8, **DRAFT})
    run_requests(loop, smoke_prompts(2), 20)
    first = loop.stats().acceptance
    loop.set_draft(NoDraft())
    run_requests(loop, smoke_prompts(2), 20)
    second = loop.stats().acceptance
    assert (second["drafted"], second["accepted"]) == (first["drafted"], first["accepted"])
    assert second["verify_count"] == first["verify_count"] + 2 * 19  # type: ignore[operator]
    assert loop.stats().policy_entry is None


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=30).map(lambda gains: sorted(gains, reverse=True)),
    st.lists(st.floats(0, 0.1), min_size=31, max_size=31),
    st.integers(1, 4),
)
def test_best_size_equals_trying_every_size(gains: list[float], steps: list[float], requests: int) -> None:
    seconds = list(itertools.accumulate([0.01, *steps]))
    tokens = list(itertools.accumulate([float(requests), *gains]))
    rates = [made / spent for made, spent in zip(tokens, seconds, strict=False)]
    size = best_size(iter(gains), requests, Curve.of(seconds))
    assert rates[size] == pytest.approx(max(rates), rel=1e-9)


def test_growing_reads_no_further_than_decides() -> None:
    read = iter([0.9, 0.5, 0.01, *[0.0] * 60])
    assert best_size(read, 1, Curve.of([1.0 + 0.1 * nodes for nodes in range(64)])) == 2
    assert len(list(read)) == 60


def test_a_tree_costs_what_the_next_larger_measured_one_does() -> None:
    table = CostTable((1, 4), (1, 4, 8), (1.0, 2.0), ((1.0, 4.0, 6.0), (5.0, 11.0)))
    assert table.curve(1, 9).seconds == pytest.approx((2.0, 5.0, 5.0, 5.0, 7.0, 7.0, 7.0, 7.0, 8.0, 8.0))
    assert table.curve(4, 7).seconds == pytest.approx((7.0, 13.0, 13.0, 13.0, 21.0, 21.0, 21.0, 21.0))
    assert table.curve(2, 0).seconds == pytest.approx((2.0 + 5.0 / 3,))
    assert table.curve(7, 0).seconds == pytest.approx((12.0,))
    assert best_size(iter([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]), 1, table.curve(1, 7)) in (3, 7)


def test_where_rows_cost_nothing_the_largest_tree_is_taken_unseen() -> None:
    free = CostTable((1,), (1, 2, 8), (1.0,), ((0.2, 0.2, 0.21),))
    assert Growing(7, free).of_round(1) is None
    dear = CostTable((1,), (1, 2, 8), (1.0,), ((0.2, 0.2, 0.25),))
    assert Growing(7, dear).of_round(1) is not None
    alone = CostTable((1,), (1, 2), (1.0,), ((0.2, 0.4),))
    assert Growing(1, alone).of_round(1) is not None  # a tree of one node against none
    assert not free.curve(1, 0).flat


def test_what_more_work_costs_less_costs_at_most() -> None:
    table = CostTable.of((1, 4), (1, 4, 8), [2.0, 1.0], [[3.0, 2.5, 9.0], [2.0, 7.0]])
    assert table == CostTable((1, 4), (1, 4, 8), (1.0, 1.0), ((2.0, 2.5, 9.0), (2.0, 7.0)))


def test_growing_trees_are_lossless_and_shown() -> None:
    chosen = smoke_prompts(6)
    expected = run_requests(loop_of(SMOKE / "target", {"kind": "none"}), chosen, 40).outputs
    draft = {"kind": "ddtree", "block_size": 8, "nodes": "auto", "max_nodes": 24, **DRAFT}
    document = {"model": {"target": str(SMOKE / "target"), "dtype": "float32"}, "draft": draft}
    runtime = build(resolve(EngineConfig.model_validate(document)))
    costs = runtime.describe()["costs"]  # as /server_info shows them
    assert (costs["rows"][0], costs["rows"][-1]) == (1, 25)
    assert (costs["requests"][0], costs["requests"][-1]) == (1, 16)
    assert len(costs["verify"]) == len(costs["draft"]) == len(costs["requests"])
    assert all(list(row) == sorted(row) and row[0] > 0 for row in costs["verify"])
    loop = Loop(runtime)
    assert run_requests(loop, chosen, 40).outputs == expected
