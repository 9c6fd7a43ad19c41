"""Greedy exactness in float32 and acceptance in a batch: what the proof and the tests share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.bench import Prompt
from engine.config import EngineConfig
from engine.loop import Loop
from engine.request import Request
from engine.runtime import build, resolve
from engine.start import AnyLoop

Text = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One point of the grid. `nodes` 0 is the chain, which has no width."""

    block: int
    layers: int
    nodes: int | str
    width: int | None
    batch: int

    @property
    def valid(self) -> bool:
        """Whether a config can say it: no more nodes than paths, and a tree of width 1 holds the whole block."""
        if self.width is None or self.nodes in (0, "auto"):
            return self.width is None or self.nodes != 0
        paths: int = sum(self.width**level for level in range(1, self.block))
        return (self.block - 1 if self.width == 1 else 1) <= int(self.nodes) <= paths

    def draft(self, model: str | None = None) -> dict[str, Any]:
        """Return the draft config."""
        common = {"model": model, "block_size": self.block, "layers": self.layers}
        if self.nodes == 0:
            return {"kind": "dflash", **common}
        return {"kind": "ddtree", **common, "nodes": self.nodes, "width": self.width}


def pairwise(*factors: Sequence[Any]) -> list[Case]:
    """Return few cases that hold every pair of values of any two factors which some valid case holds.

    Greedy: the case with the most pairs still missing comes next.
    """
    grid = [case for case in itertools.starmap(Case, itertools.product(*factors)) if case.valid]
    missing = {pair for case in grid for pair in _pairs(case)}
    chosen = []
    while missing:
        best = max(grid, key=lambda case: len(missing & _pairs(case)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(case: Case) -> set[Any]:
    values = enumerate((case.block, case.layers, case.nodes, case.width, case.batch))
    return set(itertools.combinations(values, 2))


def loop_of(target: str, draft: dict[str, Any], **memory: Any) -> Loop:
    """Return a float32 loop on a target."""
    document = {"model": {"target": target, "dtype": "float32"}, "draft": draft, "memory": memory}
    return Loop(build(resolve(EngineConfig.model_validate(document))))


@dataclass(frozen=True)
class Outcome:
    """A request's text, and the verify rounds it took."""

    text: Text
    rounds: int


def decode(loop: AnyLoop, prompts: Sequence[Prompt], lengths: Sequence[int]) -> list[Outcome]:
    """Decode all prompts greedily, submitted at once."""
    made: list[Text] = [()] * len(prompts)
    rounds = [0] * len(prompts)
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        reason = loop.submit(Request(number, prompt, length))
        if reason is not None:
            raise ValueError(reason)
    while not loop.idle:
        for progress in loop.advance():
            made[progress.id] += progress.tokens
            rounds[progress.id] = progress.verify_count
    return [Outcome(*each) for each in zip(made, rounds, strict=True)]


def in_batches(loop: AnyLoop, prompts: Sequence[Prompt], tokens: int, batch: int) -> Iterator[Outcome]:
    """Decode prompts in groups of `batch`."""
    for first in range(0, len(prompts), batch):
        group = prompts[first : first + batch]
        yield from decode(loop, group, [tokens] * len(group))


def differences(outcomes: Sequence[Outcome], expected: Sequence[Outcome]) -> list[str]:
    """Say where texts differ: request and first position."""
    return [
        f"request {number} from token {_shared(mine.text, its.text)}"
        for number, (mine, its) in enumerate(zip(outcomes, expected, strict=True))
        if mine.text != its.text
    ]


def _shared(a: Text, b: Text) -> int:
    """Return how many leading tokens are the same."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
