"""Log-probabilities: the target's own, whatever drafts, and whether a token was prompted or generated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.loop import Loop
from engine.pair.checkpoint import load_target
from engine.request import Request, Scored
from engine.runtime import build, resolve

SMOKE = Path(__file__).parents[1] / "data" / "smoke_pair"
PROMPTS = [
    tuple(each["token_ids"][: 20 + 9 * i])
    for i, each in enumerate(json.loads((SMOKE / "prompts.json").read_text())[:4])
]
NEW, TOP = 24, 5
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "dflash": {"kind": "dflash", "model": str(SMOKE / "draft"), "block_size": 6},
    "ddtree": {"kind": "ddtree", "model": str(SMOKE / "draft"), "block_size": 6, "nodes": 12},
}


def scored(draft: dict[str, Any], requests: list[Request]) -> dict[int, tuple[list[int], list[Scored], list[Scored]]]:
    """Return tokens, their scores and the prompt's scores by request, all running at once."""
    document = {
        "model": {"target": str(SMOKE / "target"), "dtype": "float64"},
        "draft": draft,
        "memory": {"prefill_chunk": 24},
    }
    loop = Loop(build(resolve(EngineConfig.model_validate(document))))
    found: dict[int, tuple[list[int], list[Scored], list[Scored]]] = {r.id: ([], [], []) for r in requests}
    for request in requests:
        loop.submit(request)
    while not loop.idle:
        for progress in loop.advance():
            for kept, new in zip(
                found[progress.id], (progress.tokens, progress.scores, progress.prompt_scores), strict=True
            ):
                kept.extend(new)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("name", DRAFTS)
def test_scores_are_the_targets_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against one forward of a model that is not the engine's, over prompt and text; a prompt in several slices."""
    monkeypatch.setattr("engine.scoring.SCORED_ROWS", 3)
    requests = [Request(i, prompt, NEW, logprobs=TOP, echo=True) for i, prompt in enumerate(PROMPTS)]
    target = load_target(SMOKE / "target", torch.float64)
    for number, (tokens, scores, prompt_scores) in scored(DRAFTS[name], requests).items():
        ids = [*PROMPTS[number], *tokens]
        with torch.inference_mode():
            hidden, _ = target(torch.tensor([ids]))
            expected = target.logits(hidden)[0].float().log_softmax(dim=-1)
        given = [*prompt_scores, *scores]
        assert len(given) == len(ids) - 1
        for place, score in enumerate(given):
            row = expected[place]
            assert score.logprob == pytest.approx(float(row[ids[place + 1]]), abs=1e-4)
            assert [value for _, value in score.top] == pytest.approx(row.topk(TOP).values.tolist(), abs=1e-4)
            assert all(float(row[token]) == pytest.approx(value, abs=1e-4) for token, value in score.top)
