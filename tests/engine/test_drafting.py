"""The engine's drafts, counted by the rounds they save: as many as an independent drafting on the known text says.

A fault in the drafter's cache, positions, mask or taps leaves the text exact; only the rounds tell.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.loop import Loop
from engine.pair.acceptance import CHAIN, Trajectories, draft_everywhere, trajectories, verify_rounds
from engine.pair.checkpoint import load_drafter, load_target
from engine.pair.modules import Drafter, Target
from engine.request import Request
from engine.runtime import build, resolve

SMOKE = Path(__file__).parents[1] / "data" / "smoke_pair"
NEW = 40
PROMPTS = 4


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(SMOKE / "target", torch.float64)


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return load_drafter(SMOKE / "draft", torch.float64)


@pytest.fixture(scope="module")
def known(target: Target, drafter: Drafter) -> Trajectories:
    prompts = [each["token_ids"] for each in json.loads((SMOKE / "prompts.json").read_text())][:PROMPTS]
    return trajectories(target, drafter.config.target_layer_ids, torch.tensor(prompts), NEW, 0.0, ())


def served(known: Trajectories, draft: dict[str, Any], together: bool) -> tuple[list[list[int]], list[int]]:
    """Return the texts and the verify rounds of every prompt, one after another or all at once."""
    config = {
        "model": {"target": str(SMOKE / "target"), "dtype": "float64"},
        "draft": {"model": str(SMOKE / "draft"), **draft},
        "memory": {"page_size": 16},
    }
    loop = Loop(build(resolve(EngineConfig.model_validate(config))))
    texts: dict[int, list[int]] = {}
    rounds: dict[int, int] = {}
    for number in range(PROMPTS):
        texts[number] = []
        loop.submit(Request(number, tuple(known.tokens[number, : known.prompt].tolist()), NEW))
        while not loop.idle and (not together or number == PROMPTS - 1):
            for progress in loop.advance():
                texts[progress.id] += progress.tokens
                rounds[progress.id] = progress.verify_count
    return [texts[i] for i in range(PROMPTS)], [rounds[i] for i in range(PROMPTS)]


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize(
    ("block", "layers", "nodes"), [(4, 2, CHAIN), (16, 2, CHAIN), (8, 1, CHAIN), (8, 2, 12), (16, 2, 31)]
)
def test_drafts_save_the_rounds_they_should(
    target: Target, drafter: Drafter, known: Trajectories, block: int, layers: int, nodes: int, together: bool
) -> None:
    [drafts] = draft_everywhere(target, drafter, known, block, [layers], max(nodes, 1))
    [expected] = verify_rounds(drafts, known, [nodes])
    tree = {"kind": "ddtree", "nodes": nodes} if nodes != CHAIN else {"kind": "dflash"}
    texts, rounds = served(known, {**tree, "block_size": block, "layers": layers}, together)
    assert texts == [known.generated(number) for number in range(PROMPTS)]
    assert rounds == expected
    assert sum(rounds) < PROMPTS * (NEW - 1)  # else nothing was accepted, and nothing tested
