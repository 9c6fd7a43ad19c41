"""One decode round on the device, for every lane at once: draft, verify, accept, commit. Read this file first.

The five lines of `Round.__call__` are those of `speculate.step`, but nothing here waits for the device or looks at a
value on the host, and every shape depends on the number of lanes alone: the whole round can be one CUDA graph. Its
inputs are the state that the round before it left on the device, so rounds follow each other without the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine import sampling, verify
from engine.config import DFlashDraft, NoDraft
from engine.device.model import Attend, DeviceDraft, DeviceTarget
from engine.device.state import Rows, State, Style
from engine.kernels.base import Ops
from engine.parameters import SAMPLED_NUMBERS


@dataclass(frozen=True)
class Models:
    """What rounds and prompts compute with. `draft` is None on a server without speculation."""

    ops: Ops
    target: DeviceTarget
    draft: DeviceDraft | None

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose residual stream the drafter takes in."""
        return () if self.draft is None else self.draft.shape.taps


@dataclass(frozen=True)
class Block:
    """Drafted rows of every lane: `tokens` [b, rows], the root first; `probabilities` [b, rows − 1, vocab] if drawn."""

    tokens: Tensor
    probabilities: Tensor | None = None


@dataclass(frozen=True)
class Scored:
    """What the target says of a block: `logits` [b, rows, vocab], `features` [b × rows, taps × hidden]."""

    logits: Tensor
    features: Tensor | None


@dataclass(frozen=True)
class Outcome:
    """What a round adds: `packed` [b, 1 + rows] int64, the number of new tokens, then so many, then anything.

    `logits` [b, rows, vocab]: after the root and the drafted tokens.
    """

    packed: Tensor
    logits: Tensor


class Alone:
    """No speculation: the root alone."""

    rows, forced = 1, None

    def __call__(self, places: Rows, draws: sampling.Batch | None) -> Block:
        """Return [b, 1]."""
        return Block(places.roots[:, None])


class Chain:
    """A DFlash block: one bidirectional forward over [root, mask, …, mask]."""

    def __init__(self, config: DFlashDraft, models: Models, state: State) -> None:
        if models.draft is None or state.draft is None:
            raise ValueError("a DFlash draft needs a draft model and a pool")
        self.rows, self.forced = config.block_size, config.simulate_accept
        self._model, self._pool, self._state, self._ops = models.draft, state.draft, state, models.ops
        self._layers = config.layers or models.draft.layers
        self._draws = config.sample == "probabilistic"

    def __call__(self, places: Rows, draws: sampling.Batch | None) -> Block:
        """Return [b, block]: the likeliest tokens, or drawn like the requests' own."""
        roots, rows = places.roots, self.rows
        lanes = roots.shape[0]
        tokens = torch.full((lanes, rows), self._model.shape.mask_token_id, dtype=roots.dtype, device=roots.device)
        tokens[:, 0] = roots
        attend = attention(self._ops, places, self._state.max_tokens, causal=False)
        hidden = self._model.forward(tokens.flatten(), places.positions, places.write, self._pool, attend, self._layers)
        hidden = hidden.view(lanes, rows, -1)[:, 1:].flatten(0, 1)
        if draws is None or not self._draws:
            tokens[:, 1:] = self._model.choose(hidden).view(lanes, rows - 1)
            return Block(tokens)
        at = places.positions.view(lanes, rows)[:, 1:].long()
        logits = self._model.logits(hidden).view(lanes, rows - 1, -1)
        numbers = sampling.uniform(draws.seed[:, None], at, sampling.DRAFT)
        probabilities = []
        for part in _parts(logits):
            probabilities.append(sampling.distribution(logits[part], _of(draws, part)))
            tokens[part, 1:] = sampling.invert(probabilities[-1], numbers[part])
        return Block(tokens, torch.cat(probabilities))


def attention(ops: Ops, places: Rows, max_len: int, causal: bool) -> Attend:
    """Return what layers call to attend with the rows of `places`."""
    return lambda q, pool: ops.attend(q, pool, places.paged, places.rows, max_len, causal)


class Round:
    """A round of one draft and one style of sampling; the number of lanes is its input's."""

    def __init__(self, draft: NoDraft | DFlashDraft, style: Style, models: Models, state: State) -> None:
        self._models, self._state, self._style = models, state, style
        self._draft = Chain(draft, models, state) if isinstance(draft, DFlashDraft) else Alone()

    def __call__(self, lanes: Tensor) -> Outcome:
        """Run one round of `lanes` [b] int32, rows of the state."""
        places, draws = self.begin(lanes)
        block = self.propose(places, draws)
        scored = self.verify(block, places)
        kept, tokens = self.accept(block, scored.logits, places, draws)
        packed = self.commit(block, kept, tokens, scored.features, places)
        return Outcome(packed, scored.logits)

    def begin(self, lanes: Tensor) -> tuple[Rows, sampling.Batch | None]:
        """Return the round's rows, and how lanes sample."""
        places = self._state.rows(lanes, self._draft.rows, self._models.ops)
        return places, self._state.draws(lanes, self._style)

    def propose(self, places: Rows, draws: sampling.Batch | None) -> Block:
        """Draft a block of every lane."""
        return self._draft(places, draws)

    def verify(self, block: Block, places: Rows) -> Scored:
        """Run the target on all rows of all blocks."""
        target, state = self._models.target, self._state
        attend = attention(self._models.ops, places, state.max_tokens, causal=True)
        hidden, features = target.forward(
            block.tokens.flatten(), places.positions, places.write, state.target, attend, self._models.taps
        )
        return Scored(target.logits(hidden).view(*block.tokens.shape, -1), features)

    def accept(
        self, block: Block, logits: Tensor, places: Rows, draws: sampling.Batch | None
    ) -> tuple[Tensor | None, Tensor]:
        """Return how many new tokens every lane gets [b], and the tokens [b, rows], anything behind them.

        No number means: one more than the leading drafted tokens that are the target's own.
        """
        positions = places.positions.view(block.tokens.shape)
        if draws is not None and block.probabilities is not None and self._draft.forced is None:
            return _rejection(block.tokens, block.probabilities, logits, positions.long(), draws)
        choices = choose(logits, positions, draws, self._models.ops)
        if self._draft.forced is None:
            return None, choices
        return self._forced(self._draft.forced, positions[:, 0].long(), places.paged.lanes.long()), choices

    def _forced(self, accept_length: float, positions: Tensor, lanes: Tensor) -> Tensor:
        """Return whole numbers next to the accept length, at random in proportion: see `verify.forced`."""
        base = int(accept_length)
        drawn = sampling.uniform(lanes, positions, sampling.FORCED)
        return ((drawn < accept_length - base).long() + base).clamp(1, self._draft.rows)

    def commit(
        self, block: Block, kept: Tensor | None, tokens: Tensor, features: Tensor | None, places: Rows
    ) -> Tensor:
        """Keep the rows of root and accepted tokens, and show all rows to the drafter; return `Outcome.packed`.

        Context of rejected rows lies behind the length, where nobody looks before the next round writes over it.
        """
        packed = self._models.ops.settle(self._state.standing, places.paged.lanes, block.tokens, tokens, kept)
        draft, pool = self._models.draft, self._state.draft
        if draft is not None and pool is not None and features is not None:
            draft.write_context(features, places.positions, places.write, pool)
        return packed


def choose(logits: Tensor, positions: Tensor, draws: sampling.Batch | None, ops: Ops) -> Tensor:
    """Return the target's token [b, rows] after rows at `positions` [b, rows]: likeliest, or drawn."""
    if draws is None:
        return ops.argmax(logits.flatten(0, 1)).view(logits.shape[:2])
    following = positions.long() + 1
    parts = [sampling.choose(logits[p], following[p], _of(draws, p)) for p in _parts(logits)]
    return torch.cat(parts)


def _rejection(
    tokens: Tensor, drafted: Tensor, logits: Tensor, positions: Tensor, draws: sampling.Batch
) -> tuple[Tensor, Tensor]:
    """Accept drawn tokens; see `verify.rejection`."""
    counts, bonuses = [], []
    for part in _parts(logits):
        here, own = positions[part], _of(draws, part)
        count, bonus = verify.kept_and_bonus(
            tokens[part],
            drafted[part],
            sampling.distribution(logits[part], own),
            sampling.uniform(own.seed[:, None], here[:, 1:], sampling.ACCEPT),
            sampling.uniform(own.seed[:, None], here + 1, sampling.TARGET),
        )
        counts.append(count)
        bonuses.append(bonus)
    kept = torch.cat(counts)
    made = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1)
    return kept + 1, made.scatter(1, kept[:, None], torch.cat(bonuses)[:, None])


def _parts(logits: Tensor) -> list[slice]:
    """Return slices of lanes small enough for the sampling functions: what they compute bounds a round's memory."""
    lanes, rows, vocab = logits.shape
    size = max(1, SAMPLED_NUMBERS // (rows * vocab))
    return [slice(first, first + size) for first in range(0, lanes, size)]


def _of(draws: sampling.Batch, part: slice) -> sampling.Batch:
    return sampling.Batch(
        draws.temperature[part],
        draws.top_k[part],
        draws.top_p[part],
        draws.seed[part],
        draws.all_greedy,
        draws.any_greedy,
        draws.any_limited,
    )
