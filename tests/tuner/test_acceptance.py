"""Accept lengths that no draft config explains, and those that one does."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import EngineConfig
from tests.tuner.make import record
from tuner.acceptance import Rounds, Seen, collapse, no_more, peer_of
from tuner.reference import Parity, Peer

CHAIN = {"kind": "dflash", "block_size": 8}
TREE = {"kind": "ddtree", "block_size": 8, "nodes": 15}
NONE = {"kind": "none"}


def config(draft: dict[str, Any]) -> EngineConfig:
    return EngineConfig.model_validate({"model": {"target": "bundled"}, "draft": draft, "memory": {"max_running": 16}})


def seen(rounds: int, length: float) -> Seen:
    return Seen(Rounds.of(length, rounds // 4), Rounds.of(length, rounds))


@pytest.mark.parametrize(
    ("draft", "rounds", "length", "collapsed"),
    [
        (CHAIN, 400, 1.0, True),
        (TREE, 400, 1.02, True),
        (CHAIN, 400, 1.4, False),  # weak, but it drafts
        (CHAIN, 20, 1.0, False),  # too few rounds to tell
        (NONE, 400, 1.0, False),
        ({**TREE, "nodes": "auto"}, 400, 1.0, False),  # may choose to draft nothing
        ({"kind": "policy", "by_running": [[1, None, CHAIN]]}, 400, 1.0, True),
        ({"kind": "policy", "by_running": [[1, 2, CHAIN], [3, None, NONE]]}, 400, 1.0, True),  # alone it must draft
        ({"kind": "policy", "by_running": [[1, 2, NONE], [3, None, CHAIN]]}, 400, 1.0, False),
    ],
)
def test_next_to_nothing_accepted(draft: dict[str, Any], rounds: int, length: float, collapsed: bool) -> None:
    why = collapse(config(draft), seen(rounds, length))
    assert bool(why) == collapsed
    assert ("were accepted" in why) == collapsed


def test_the_same_text_beside_others_and_alone() -> None:
    def both(alone: float, together: float) -> str:
        pair = (Rounds.of(alone, 40), Rounds.of(together, 60))
        return collapse(config(CHAIN), Seen(pair[0], pair[0] + pair[1], pair))

    assert "beside other requests" in both(4.0, 1.5)
    assert both(4.0, 3.6) == ""
    assert both(1.3, 1.2) == ""


def test_far_below_another_trial() -> None:
    peer = Peer(trial=4, accept_length=3.8)
    assert "trial 4 has 3.80" in collapse(config(CHAIN), seen(200, 1.8), peer)
    assert collapse(config(CHAIN), seen(200, 3.0), peer) == ""
    assert collapse(config(NONE), seen(200, 1.0), peer) == ""


@pytest.mark.parametrize(
    ("smaller", "draft", "fits"),
    [
        (CHAIN, {**CHAIN, "block_size": 16}, True),
        ({**CHAIN, "block_size": 16}, CHAIN, False),
        ({**CHAIN, "layers": 1}, CHAIN, True),
        (CHAIN, {**CHAIN, "layers": 1}, False),
        (CHAIN, {**CHAIN, "model": "other"}, False),
        (CHAIN, TREE, True),
        (CHAIN, {**TREE, "nodes": 4}, False),
        (TREE, CHAIN, False),
        (TREE, {**TREE, "nodes": 31}, True),
        ({**TREE, "width": 3}, TREE, True),
        (TREE, {**TREE, "width": 2}, False),
        ({**TREE, "nodes": "auto"}, TREE, False),
        (NONE, CHAIN, False),
        (CHAIN, {"kind": "policy", "by_running": [[1, None, CHAIN]]}, False),
    ],
)
def test_which_drafts_are_smaller(smaller: dict[str, Any], draft: dict[str, Any], fits: bool) -> None:
    assert no_more(config(smaller).draft, config(draft).draft) == fits


def test_the_peer_is_the_best_that_passed() -> None:
    def judged(trial: int, draft: dict[str, Any], length: float, verdict: Any = "passed") -> Any:
        parity = Parity(verdict=verdict, accept_length=length, verify_count=100)
        return record(trial, config=config(draft).model_dump(mode="json"), parity=parity)

    records = [
        judged(1, {**CHAIN, "block_size": 4}, 2.5),
        judged(2, CHAIN, 3.1),
        judged(3, CHAIN, 9.0, "failed"),
        judged(4, {**CHAIN, "block_size": 16}, 4.0),
        record(5),
    ]
    assert peer_of(records, config(CHAIN)) == Peer(trial=2, accept_length=3.1)
    assert peer_of(records, config({**CHAIN, "block_size": 2})) is None
