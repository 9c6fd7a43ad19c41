"""Prompts on the device: chunks of several prompts packed into one forward of a fixed size.

A forward has one of a few sizes (`buckets`), and as many chunks as requests can run: rows and chunks beyond the
real ones belong to nobody. So a prompt forward is captured like a round, and its input is one vector of integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.device.round import Models, choose
from engine.device.state import State, Style, upload
from engine.kernels.base import Paged
from engine.scheduler import Chunk

SMALLEST = 128


def buckets(most: int) -> tuple[int, ...]:
    """Return the sizes of prompt forwards, ascending, the last no less than `most` rows."""
    sizes = [SMALLEST]
    while sizes[-1] < most:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)


@dataclass(frozen=True)
class PromptOutcome:
    """`logits` [chunks, 1, vocab] after the last row of every chunk; `hidden` [rows, hidden], not normalised."""

    logits: Tensor
    hidden: Tensor


class _Input(NamedTuple):
    """The parts of a forward's input, [rows] or [chunks] integers each; `offsets` is one longer.

    `owners`: the state's row of every row, `lanes` of every chunk; `last`: a chunk's last row; `ending`: the chunk's
    lane when its prompt ends with it, else nobody's.
    """

    tokens: Tensor
    positions: Tensor
    owners: Tensor
    lanes: Tensor
    starts: Tensor
    sizes: Tensor
    offsets: Tensor
    last: Tensor
    ending: Tensor


class Prompts:
    """Prompt forwards of one size."""

    def __init__(self, rows: int, models: Models, state: State) -> None:
        self.rows, self.chunks = rows, state.nobody  # at most one chunk a running request
        self._models, self._state = models, state
        sizes = [len(part) for part in self._pack((), ())]
        self._numbers = torch.zeros(sum(sizes), dtype=torch.int64, device=state.device)
        self._input = _Input(*self._numbers.split(sizes))
        self.load((), ())

    def load(self, chunks: Sequence[Chunk], places: Sequence[tuple[int, int]]) -> None:
        """Send the next chunks; `places`: (row of the state, tokens already cached) of each."""
        numbers = [number for part in self._pack(chunks, places) for number in part]
        self._numbers.copy_(upload(numbers, torch.int64, self._state.device), non_blocking=True)

    def __call__(self) -> PromptOutcome:
        """Run the target on what was loaded, and cache it; the drafter takes it in."""
        models, state, given = self._models, self._state, self._input
        write = state.slots(given.owners, given.positions)
        at, offsets = given.positions.int(), given.offsets.int()
        paged = Paged(state.table, given.lanes.int(), given.starts.int(), state.page_size)

        def attend(q: Tensor, pool: Tensor) -> Tensor:
            return models.ops.attend_prefill(q, pool, paged, offsets)

        hidden, features = models.target.forward(given.tokens, at, write, state.target, attend, models.taps)
        if models.draft is not None and state.draft is not None and features is not None:
            models.draft.write_context(features, at, write, state.draft)
        state.grow(given.lanes, given.sizes)
        return PromptOutcome(models.target.logits(hidden[given.last])[:, None], hidden)

    def first(self, outcome: PromptOutcome, style: Style) -> Tensor:
        """Choose the token [chunks] after every chunk; where a prompt ends it is the request's newest."""
        state, given = self._state, self._input
        at, draws = given.positions[given.last][:, None], state.draws(given.lanes, style)
        chosen = choose(outcome.logits, at, draws, self._models.ops)[:, 0]
        state.roots.index_copy_(0, given.ending, chosen)
        return chosen

    def _pack(self, chunks: Sequence[Chunk], places: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
        """Yield the numbers of `_Input`'s parts, in order."""
        nobody, spare = self._state.nobody, self.chunks - len(chunks)
        sizes = [len(chunk.tokens) for chunk in chunks]
        rows = self.rows - sum(sizes)
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        total = ends[-1] if ends else 0
        yield [token for chunk in chunks for token in chunk.tokens] + [0] * rows
        yield [start + i for (_, start), n in zip(places, sizes, strict=True) for i in range(n)] + [0] * rows
        yield [row for (row, _), n in zip(places, sizes, strict=True) for _ in range(n)] + [nobody] * rows
        yield [row for row, _ in places] + [nobody] * spare
        yield [start for _, start in places] + [0] * spare
        yield sizes + [0] * spare
        yield [0, *ends] + [total] * spare
        yield [end - 1 for end in ends] + [0] * spare
        yield [row if c.last else nobody for c, (row, _) in zip(chunks, places, strict=True)] + [nobody] * spare
