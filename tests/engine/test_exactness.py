"""Greedy text in float32 is the target's own, whatever drafts: every combination on 8 prompts of the smoke pair.

`make proof-decoding` does the same on 200 prompts of the shipped pair.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest
from pydantic import TypeAdapter

from benchmarks.decoding import Case, Outcome, decode, differences, loop_of
from engine.config import Draft
from engine.loop import Loop
from tests.engine.test_speculate import SMOKE, smoke_prompts

TOKENS = 24
LAYERS, NODES, WIDTHS = (1, 2), (0, 3, 7, 20, "auto"), (None, 1, 2)
MODEL = str(SMOKE / "draft")
DRAFT: TypeAdapter[Draft] = TypeAdapter(Draft)


@cache
def plain() -> list[Outcome]:
    return decode(loop_of(str(SMOKE / "target"), {"kind": "none"}), smoke_prompts(8), [TOKENS] * 8)


@cache
def server() -> Loop:
    """One engine that can run every draft of the grid."""
    widest = {"kind": "ddtree", "model": MODEL, "block_size": 16, "nodes": "auto", "max_nodes": 24}
    return loop_of(str(SMOKE / "target"), widest)


def use(case: Case) -> Loop:
    """The engine with another draft in force."""
    draft = case.draft(MODEL) | ({"max_nodes": 24} if case.nodes == "auto" else {})
    loop = server()
    loop.set_draft(DRAFT.validate_python(draft))
    return loop


@pytest.mark.parametrize("block", [2, 4, 8, 16])
def test_every_combination_equals_plain_decoding_alone_and_in_a_batch(block: int) -> None:
    prompts, expected = smoke_prompts(8), plain()
    alone = itertools.cycle(range(8))
    cases = [Case(block, *rest, batch=8) for rest in itertools.product(LAYERS, NODES, WIDTHS)]
    valid = [case for case in cases if case.valid]
    assert len(valid) >= 2 * 7
    most = 0.0
    for case in valid:
        loop = use(case)
        made = decode(loop, prompts, [TOKENS] * 8)
        assert not differences(made, expected), case
        number = next(alone)
        assert decode(loop, prompts[number : number + 1], [TOKENS])[0].text == expected[number].text, case
        most = max(most, 8 * (TOKENS - 1) / sum(each.rounds for each in made))
    assert most > 1.2  # or the equalities tested nothing


@pytest.mark.parametrize("nodes", [0, 7, 20])
def test_acceptance_in_a_batch_of_16_equals_acceptance_alone(nodes: int) -> None:
    """Every request takes as many rounds beside 15 others as by itself."""
    loop, prompts = use(Case(8, 2, nodes, None, 16)), smoke_prompts(16)
    together = decode(loop, prompts, [TOKENS] * 16)
    assert together == [decode(loop, [prompt], [TOKENS])[0] for prompt in prompts]


def test_a_tree_accepts_more_than_its_chain() -> None:
    rounds = {
        n: sum(o.rounds for o in decode(use(Case(8, 2, n, None, 8)), smoke_prompts(8), [40] * 8)) for n in (0, 20)
    }
    assert rounds[20] < rounds[0]
