"""All the work a server may launch, by size: rounds of every batch size, draft and style, prompts of every size.

A size is a batch size that rounds are padded up to. Captured graphs name theirs; without them the sizes are powers of
two, so that a text does not depend on how the work is launched, only on what it is padded to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from engine.config import Captured, DDTreeDraft, DFlashDraft, EngineConfig, NoDraft
from engine.device.graphs import CapturedGraphs, EagerGraphs, Graphs
from engine.device.prefill import PromptOutcome, Prompts, buckets
from engine.device.round import Models, Outcome, Round
from engine.device.state import State, Style, upload
from engine.errors import ConfigError
from engine.estimate import prefill_chunk

Drafted = NoDraft | DFlashDraft


def batch_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Return the sizes rounds are padded up to, ascending; the last is `memory.max_running`."""
    if isinstance(config.graphs, Captured):
        return config.graphs.batch_sizes
    most = config.memory.max_running
    return (*(2**power for power in range(most.bit_length()) if 2**power < most), most)


@dataclass(frozen=True)
class PromptWork:
    """A prompt forward: its input, and what runs it."""

    forward: Prompts
    run: Callable[[], PromptOutcome]


class Rounds:
    """Rounds and prompt forwards of one server."""

    def __init__(self, config: EngineConfig, models: Models, state: State, drafts: Sequence[Drafted]) -> None:
        """Make, and capture where the config says so, everything that `drafts` need.

        Raises:
            GraphCaptureError, OutOfMemoryInCapture: see `graphs.CapturedGraphs`.
        """
        self.models, self.state, self.sizes = models, state, batch_sizes(config)
        self.graphs: Graphs = CapturedGraphs() if isinstance(config.graphs, Captured) else EagerGraphs()
        self._lanes = {size: _Lanes(size, state) for size in self.sizes}
        self.buckets = buckets(prefill_chunk(config))
        self._rounds: dict[tuple[Drafted, Style], dict[int, Callable[[], Tensor]]] = {}
        self.extend(drafts)
        self._prompts = {rows: self._prompt(rows) for rows in reversed(self.buckets)}

    @property
    def captured(self) -> bool:
        """Whether rounds are replays of CUDA graphs."""
        return self.graphs.captured

    def extend(self, drafts: Sequence[Drafted]) -> None:
        """Make the rounds of more drafts, the largest first: the others fit into its memory.

        Raises:
            GraphCaptureError, OutOfMemoryInCapture: see `graphs.CapturedGraphs`.
        """
        new = [draft for draft in dict.fromkeys(drafts) if (draft, Style.GREEDY) not in self._rounds]
        new.sort(key=rows_of, reverse=True)
        self._prepare(new)
        for style, draft in product(reversed(Style), new):
            work = Round(draft, style, self.models, self.state)
            self._rounds[draft, style] = {size: self._round(work, size, draft) for size in reversed(self.sizes)}

    def run(self, lanes: Sequence[int], draft: Drafted, style: Style) -> Tensor:
        """Launch a round of `lanes`, rows of the state, at most as many as the largest size; see `Outcome.packed`."""
        size = self.size_of(len(lanes))
        self._lanes[size].load(lanes)
        return self._rounds[draft, style][size]()

    def run_eagerly(self, lanes: Sequence[int], draft: Drafted, style: Style) -> Outcome:
        """Launch the same round operation by operation: its logits are the caller's to keep."""
        size = self.size_of(len(lanes))
        self._lanes[size].load(lanes)
        return Round(draft, style, self.models, self.state)(self._lanes[size].tensor)

    def size_of(self, requests: int) -> int:
        """Return the batch size that a round of so many requests has."""
        return next(size for size in self.sizes if size >= requests)

    def prompts(self, rows: int) -> PromptWork:
        """Return the smallest prompt forward of at least `rows` rows."""
        return self._prompts[next(size for size in self.buckets if size >= rows)]

    def _round(self, work: Round, size: int, draft: Drafted) -> Callable[[], Tensor]:
        lanes = self._lanes[size]
        lanes.load(())  # the work runs for nobody
        name = f"a round of batch size {size} with {rows_of(draft)} rows a request"
        return self.graphs.add(name, lambda: work(lanes.tensor).packed)

    def _prompt(self, rows: int) -> PromptWork:
        prompts = Prompts(rows, self.models, self.state)
        return PromptWork(prompts, self.graphs.add(f"a prompt forward of {rows} rows", prompts))

    def _prepare(self, drafts: Sequence[Drafted]) -> None:
        """Have the kernels chosen for every number of rows that will come.

        Raises:
            OutOfMemory: there is no room to measure them; in capture, where rounds are captured.
        """
        blocks = {rows_of(draft) for draft in drafts}
        rows = {size * block for size, block in product(self.sizes, blocks)}
        rows |= {size * (block - 1) for size, block in product(self.sizes, blocks) if block > 1}
        with self.graphs.room_for("measuring kernels"):
            self.models.ops.prepare(sorted(rows | {*self.buckets, self.state.nobody}))


class _Lanes:
    """The input of rounds of one size: which rows of the state they serve."""

    def __init__(self, size: int, state: State) -> None:
        self._nobody, self._size = state.nobody, size
        self._loaded = [state.nobody] * size
        self.tensor: Tensor = torch.full((size,), state.nobody, dtype=torch.int32, device=state.device)

    def load(self, lanes: Sequence[int]) -> None:
        """Send them, when they changed."""
        wanted = [*lanes, *[self._nobody] * (self._size - len(lanes))]
        if wanted != self._loaded:
            self.tensor.copy_(upload(wanted, torch.int32, self.tensor.device), non_blocking=True)
            self._loaded = wanted


def rows_of(draft: Drafted) -> int:
    """Return the rows of one request in a round."""
    return draft.verify_rows if isinstance(draft, DFlashDraft) else 1


def chains(drafts: Sequence[NoDraft | DFlashDraft | DDTreeDraft]) -> tuple[Drafted, ...]:
    """Return drafts as what a device round can run.

    Raises:
        ConfigError: one of them is a tree.
    """
    if any(isinstance(draft, DDTreeDraft) for draft in drafts):
        raise ConfigError("device rounds cannot verify trees yet; use dflash or none")
    return tuple(drafts)
