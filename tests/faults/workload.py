"""One workload in which every fault can show: a crowd of requests of all kinds, through the engine's loop."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.loop import Loop
from engine.request import GREEDY, Request, Sampling
from engine.runtime import build, resolve
from tests.faults.fault import Setting

SMOKE = Path(__file__).parents[1] / "data" / "smoke_pair"
# How each request draws, in order of submission; lengths of prompts and outputs differ, so they end one by one.
DRAWS = (Sampling(0.9, seed=5), Sampling(0.9, top_k=3, seed=6), Sampling(0.9, top_p=0.5, seed=7), *[GREEDY] * 8)
LATE = len(DRAWS)  # id of the request that comes after the cancelled one has gone
CANCELLED, CANCEL_AFTER = 4, 16  # rounds
ENDS = (3, 9)  # the requests that eos tokens may end
EOS = (436, 427)  # the second first comes inside a round of request 9, whatever drafts


@dataclass(frozen=True)
class Seen:
    """What the workload's clients and counters saw, by request.

    `scores`: log-probabilities of the tokens; `verify_counts`: rounds that they took.
    """

    tokens: dict[int, tuple[int, ...]]
    finishes: dict[int, str | None]
    scores: dict[int, tuple[float, ...]]
    verify_counts: dict[int, int]

    def greedy(self) -> list[tuple[int, ...]]:
        """Return the greedy texts."""
        return [tokens for request, tokens in self.tokens.items() if request == LATE or DRAWS[request].greedy]


def loop_for(setting: Setting, sample: str = "greedy", dtype: str = "float32") -> Loop:
    """Return a fresh engine on the smoke pair; small pages and chunks, so that every border is crossed."""
    drafter = {"model": str(SMOKE / "draft"), "block_size": 6, "sample": sample}
    chain, tree = {"kind": "dflash", **drafter}, {"kind": "ddtree", "nodes": 12, **drafter}
    longer = {**chain, "block_size": 13}
    drafts: dict[Setting, dict[str, Any]] = {
        Setting.NONE: {"kind": "none"},
        Setting.DFLASH: chain,
        Setting.DDTREE: tree,
        Setting.POLICY: {"kind": "policy", "by_running": [[1, 3, longer], [4, 6, {"kind": "none"}], [7, None, tree]]},
    }
    config = {
        "model": {"target": str(SMOKE / "target"), "dtype": dtype},
        "draft": drafts[setting],
        "memory": {"page_size": 16, "prefill_chunk": 24},
    }
    return Loop(build(resolve(EngineConfig.model_validate(config))))


def requests() -> list[Request]:
    """Return the crowd, and the latecomer."""
    prompts = [each["token_ids"] for each in json.loads((SMOKE / "prompts.json").read_text())]
    made = []
    for number, draw in enumerate((*DRAWS, GREEDY)):
        eos = EOS if number in ENDS else ()
        prompt = tuple(prompts[number - 3][: 12 if number == LATE else 96 - 7 * number])
        made.append(Request(number, prompt, 12 + 6 * number, eos, draw, logprobs=0))
    return made


def run(loop: Loop) -> Seen:
    """Serve the crowd; cancel one request after some rounds, then admit another."""
    *crowd, late = requests()
    seen: dict[int, list[Any]] = {request.id: [] for request in (*crowd, late)}
    for request in crowd:
        loop.submit(request)
    rounds = 0
    while not loop.idle:
        for progress in loop.advance():
            seen[progress.id].append(progress)
        rounds += 1
        if rounds == CANCEL_AFTER:
            loop.cancel(CANCELLED)
            loop.submit(late)
    del seen[CANCELLED]  # how far it came depends on how much was accepted
    return Seen(
        {number: tuple(token for part in parts for token in part.tokens) for number, parts in seen.items()},
        {number: parts[-1].finish for number, parts in seen.items()},
        {number: tuple(each.logprob for part in parts for each in part.scores) for number, parts in seen.items()},
        {number: parts[-1].verify_count for number, parts in seen.items()},
    )
