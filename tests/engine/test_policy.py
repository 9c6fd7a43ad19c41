"""Policies by load: the right entry at the right time, and the same text whatever switches under it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.bench import run_requests
from engine.config import DDTreeDraft, DFlashDraft, NoDraft, PolicyDraft
from engine.cost import CostTable, best_nodes, smooth
from engine.errors import ConfigError
from engine.loop import Loop
from engine.policy import HOLD_ROUNDS, Switch, entry_for
from engine.request import Request
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
def test_a_switch_needs_the_same_wish_for_some_rounds(wishes: list[int]) -> None:
    state, history = Switch(), []
    for wish in wishes:
        state = state.after(wish)
        history.append(wish)
        if state.entry != wish:
            assert history[-HOLD_ROUNDS:] != [wish] * HOLD_ROUNDS
        if len(history) >= HOLD_ROUNDS and len(set(history[-HOLD_ROUNDS:])) == 1:
            assert state.entry == wish


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


def test_a_request_that_returns_to_speculation_has_a_whole_draft_context() -> None:
    """Accept length after an interlude without speculation equals that of speculation all along."""
    prompt = smoke_prompts(1)[0]
    chain: dict[str, Any] = {"kind": "dflash", "block_size": 8, **DRAFT}
    none = NoDraft()
    always = loop_of(SMOKE / "target", {"kind": "policy", "by_running": [[1, None, chain]]})
    made = [run_requests(always, [prompt], 110).outputs]
    reference = always.stats().acceptance

    loop = loop_of(SMOKE / "target", {"kind": "policy", "by_running": [[1, None, chain]]})
    on = PolicyDraft(by_running=((1, None, DFlashDraft.model_validate(chain)),))
    tail = loop_of(SMOKE / "target", {"kind": "policy", "by_running": [[1, None, chain]]})
    assert loop.submit(Request(0, prompt, 110)) is None
    text: list[int] = []
    off_for = 40
    while not loop.idle:
        if not text:
            # A policy that is off keeps the features; its drafter still takes them in.
            loop.set_draft(PolicyDraft(by_running=((1, 1, none), (2, None, on.by_running[0][2]))))
        elif len(text) == off_for:
            loop.set_draft(on)
        for progress in loop.advance():
            text += progress.tokens
    made.append((tuple(text),))
    assert made[0] == made[1]
    run_requests(tail, [prompt + tuple(text[:off_for])], 110 - off_for)
    lengths = [each.stats().acceptance["accept_length"] for each in (tail, loop)]
    assert isinstance(lengths[0], float)
    assert isinstance(lengths[1], float)
    rounds = loop.stats().acceptance["verify_count"]
    assert isinstance(rounds, int)
    speculative = rounds - (off_for - 1)
    assert (110 - off_for) / speculative == pytest.approx(lengths[0], rel=0.12)
    assert reference["accept_length"] is not None


def test_set_draft_refuses_what_the_server_was_not_started_for() -> None:
    loop = loop_of(SMOKE / "target", {"kind": "policy", "by_running": TABLE})
    with pytest.raises(ConfigError, match="rows a round"):
        loop.set_draft(DFlashDraft(block_size=64))
    with pytest.raises(ConfigError, match="costs"):
        loop.set_draft(DDTreeDraft(block_size=8, nodes="auto", max_nodes=10))
    with pytest.raises(ConfigError, match="incomplete"):
        loop.set_draft(NoDraft())
    with pytest.raises(ConfigError, match="without a drafter"):
        loop_of(SMOKE / "target", {"kind": "none"}).set_draft(DFlashDraft(block_size=8))


@given(
    st.lists(st.floats(-8, 0), min_size=1, max_size=30),
    st.lists(st.floats(1e-6, 0.1), min_size=2, max_size=6),
    st.integers(1, 4),
)
def test_best_nodes_equals_trying_every_size(weights: list[float], seconds: list[float], requests: int) -> None:
    rows = tuple(2**i for i in range(len(seconds)))
    table = CostTable(0.001, rows, smooth(seconds))
    log_weights = torch.tensor([[0.0, *sorted(weights, reverse=True)]] * requests, dtype=torch.float64)
    rates = []
    for nodes in range(len(weights) + 1):
        tokens = float(log_weights[:, : nodes + 1].exp().sum())
        rates.append(tokens / (0.001 + float(table.verify([requests * (nodes + 1)])[0])))
    assert rates[best_nodes(log_weights, table)] == pytest.approx(max(rates), rel=1e-9)


def test_cost_table_interpolates_and_extrapolates() -> None:
    table = CostTable(0.0, (1, 4, 8), (1.0, 4.0, 6.0))
    assert table.verify([1, 2, 4, 6, 8, 12]).tolist() == pytest.approx([1.0, 2.0, 4.0, 5.0, 6.0, 8.0])
    assert smooth([3.0, 2.0, 5.0]) == (3.0, 3.0, 5.0)


def test_growing_trees_are_lossless_and_shown() -> None:
    chosen = smoke_prompts(6)
    expected = run_requests(loop_of(SMOKE / "target", {"kind": "none"}), chosen, 40).outputs
    draft = {"kind": "ddtree", "block_size": 8, "nodes": "auto", "max_nodes": 24, **DRAFT}
    loop = loop_of(SMOKE / "target", draft)
    costs = loop._kit.costs
    assert costs is not None
    assert costs.rows[0] == 1
    assert costs.rows[-1] == 25
    assert run_requests(loop, chosen, 40).outputs == expected
