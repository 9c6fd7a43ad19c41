"""Drafter stage: DFlash blocks at random anchors of the target's own generations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.pair.modules import Drafter, Target
from engine.pair.optim import Clock, Optimiser, trapezoid
from engine.pair.recipe import Recipe
from engine.pair.train_target import compiled, precision


@dataclass(frozen=True)
class Layout:
    """The draft slots of one sequence, all blocks side by side; every tensor is [Q].

    ``anchor``: which of the sequence's anchors a slot belongs to.  ``offset``: its place in the block, 0
    for the real token.  ``start``: the slot where its block begins.  ``size``: its block's size.
    ``drafted`` [fewer]: the slots of mask tokens, as indices so that shapes stay static.
    """

    anchor: Tensor
    offset: Tensor
    start: Tensor
    size: Tensor
    drafted: Tensor
    blocks: int

    @classmethod
    def of(cls, blocks: tuple[tuple[int, int], ...], device: torch.device) -> Layout:
        """From (block size, how many) pairs."""
        sizes = [size for size, count in blocks for _ in range(count)]
        anchor = [number for number, size in enumerate(sizes) for _ in range(size)]
        offset = [place for size in sizes for place in range(size)]
        start = [slot - place for slot, place in enumerate(offset)]
        size = [sizes[number] for number in anchor]
        drafted = [slot for slot, place in enumerate(offset) if place > 0]

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, device=device)

        return cls(column(anchor), column(offset), column(start), column(size), column(drafted), len(sizes))


def draft_mask(anchors: Tensor, layout: Layout, context: int) -> Tensor:
    """Where slots may look, bool [B, 1, Q, S+Q]: the context before their anchor, and their own block."""
    before = torch.arange(context, device=anchors.device) < anchors[:, layout.anchor, None]
    own = (layout.anchor[:, None] == layout.anchor).expand(len(anchors), -1, -1)
    return torch.cat([before, own], dim=-1).unsqueeze(1)


class DraftPass(NamedTuple):
    """One drafter pass over generated rows; D drafted slots a row.

    ``loss`` and ``expected`` (accept length at the full block and depth) are scalars.  ``guess`` [B, D] is
    the full drafter's arg-max token, ``slots`` [B, D] the place each slot drafts, ``live`` [B, D] whether
    that place exists and everything before it in the block was guessed right.
    """

    loss: Tensor
    expected: Tensor
    guess: Tensor
    slots: Tensor
    live: Tensor


def draft_pass(
    drafter: Drafter,
    target: Target,
    rows: Tensor,
    features: Tensor,
    anchors: Tensor,
    layout: Layout,
    recipe: Recipe,
) -> DraftPass:
    """Draft at ``anchors`` [B, A] of ``rows`` [B, S] from the target's ``features`` [B, S, F*H].

    Cross-entropy against the token at each masked place (DFlash: mask filling, no shift), after every
    draft layer.  Weight exp(-(k-1)/gamma) for the k-th drafted token (DFlash eq. 4), reduced behind a
    token the full drafter gets wrong, since acceptance ends there.
    """
    length = rows.shape[1]
    places = anchors[:, layout.anchor] + layout.offset  # [B, Q]
    tokens = rows.gather(1, places.clamp(max=length - 1))
    masked = torch.where(layout.offset > 0, drafter.config.mask_token_id, tokens)
    positions = torch.arange(length, device=rows.device)[None]
    mask = draft_mask(anchors, layout, length)
    outputs = drafter(target.embed(masked), features, places, positions, mask)
    drafted = layout.drafted
    labels, valid = tokens[:, drafted], (places < length)[:, drafted]
    logits = [target.logits(output[:, drafted]).float() for output in outputs]
    guess = logits[-1].argmax(dim=-1)
    wrong = torch.zeros_like(places)
    wrong[:, drafted] = (guess != labels).long()
    earlier = wrong.cumsum(dim=1) - wrong
    live = (earlier == earlier[:, layout.start])[:, drafted] & valid
    weight = torch.exp(-(layout.offset[drafted] - 1) / recipe.gamma) * valid
    weight = torch.where(live, 1.0, recipe.prefix_floor) * weight
    loss = torch.zeros((), device=rows.device)
    for factor, scores in zip(recipe.layer_weights, logits, strict=True):
        cost = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none")
        loss = loss + factor * (cost * weight.flatten()).sum() / weight.sum()
    full = (layout.size[drafted] == recipe.draft.block_size) & valid
    right = live & (guess == labels) & full
    blocks = (full & (layout.offset[drafted] == 1)).sum().clamp_min(1)
    slots = places[:, drafted].clamp(max=length - 1)
    return DraftPass(loss, 1 + right.sum() / blocks, guess, slots, live)


def random_anchors(rows: Tensor, first: int, count: int, generator: torch.Generator) -> Tensor:
    """Anchors [B, count], uniform over the generated tokens that have at least 4 tokens behind them."""
    shape = (len(rows), count)
    return torch.randint(first, rows.shape[1] - 4, shape, generator=generator, device=rows.device)


def train_drafter(
    recipe: Recipe,
    target: Target,
    generations: list[Tensor],
    seconds: float,
    seed: int,
    log: Callable[[str], None],
    start: Drafter | None = None,
) -> tuple[Drafter, dict[str, Any]]:
    """A trained drafter (float32) and what was spent on it.

    ``generations``: for each of the recipe's shapes, the target's sequences [N, S]; a step takes one
    shape, in proportion to its share.  ``start``: weights to go on from.
    """
    device = target.model.embed_tokens.weight.device
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    choice = torch.Generator().manual_seed(seed)
    drafter = (start or Drafter(recipe.draft)).to(device, torch.float32).requires_grad_(True)
    optimiser = Optimiser(drafter, *recipe.draft_lr, weight_decay=0.01)
    layout = Layout.of(recipe.blocks, device)
    shares = torch.tensor([shape.share for shape in recipe.shapes])
    taps = recipe.draft.target_layer_ids

    def loss_of(rows: Tensor, features: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        drafted = draft_pass(drafter, target, rows, features, anchors, layout, recipe)
        return drafted.loss, drafted.expected

    observe, cost = compiled(target.features, device, seconds), compiled(loss_of, device, seconds)
    clock, step, accept, history, blocks = Clock(seconds), 0, math.nan, [], 0
    while clock.fraction() < 1:
        number = int(torch.multinomial(shares, 1, generator=choice)) if step > 1 else step % len(shares)
        shape, pool = recipe.shapes[number], generations[number]
        count = max(1, recipe.draft_rows * recipe.shapes[0].length // shape.length)
        rows = pool[torch.randint(len(pool), (count,), generator=generator, device=device)].long()
        anchors = random_anchors(rows, shape.prompt, layout.blocks, generator)
        with torch.no_grad():
            features = observe(rows, taps)
        with precision(device):
            loss, expected = cost(rows, features, anchors)
        loss.backward()
        optimiser.step(trapezoid(clock.fraction(), step, recipe.warmup, 0.4))
        step, blocks = step + 1, blocks + count * layout.blocks
        if step % 20 == 1:
            accept = expected.item()
            history.append(accept)
        if step % 500 == 0:
            recent = sum(history[-25:]) / len(history[-25:])
            log(f"drafter step {step} loss {loss.item():.3f} accept@16 {recent:.3f} {clock.elapsed():.0f}s")
    recent = sum(history[-25:]) / max(1, len(history[-25:]))
    return drafter, {"steps": step, "blocks": blocks, "train_accept_length": recent}
