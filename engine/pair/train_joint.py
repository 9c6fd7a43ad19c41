"""Joint stage: target and drafter are fitted to each other on the target's fresh generations.

A drafter guesses several tokens from features that were trained to predict one.  Here the drafter's loss
also reaches the target's layers, so the features come to carry what follows (the effect of multi-token
prediction, Gloeckle et al. 2024, arXiv 2404.19737), and the target learns the drafter's guess wherever it
already finds it about as likely as its own choice.  Ordinary next-token training runs beside both and
holds the target to real text; loops are trained away as they appear.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.pair.data import windows
from engine.pair.generate import Sampler, looping
from engine.pair.modules import Drafter, Target
from engine.pair.optim import Clock, Optimiser
from engine.pair.recipe import Recipe
from engine.pair.train_drafter import DraftPass, Layout, draft_pass, random_anchors
from engine.pair.train_target import compiled, next_token_loss, precision, repetition

LOOP_SHARE = 0.04  # of greedy generations is left alone; above, the penalty grows with the excess
UNLIKELIHOOD = 0.2  # at twice the share; always on, it makes text hard to predict
POOL = 6  # generated batches kept
STEPS_A_BATCH = 24


@dataclass(frozen=True)
class Batch:
    """Generated rows [N, S] and which of their tokens extend a loop, bool [N, S]."""

    rows: Tensor
    marked: Tensor


def agreement_loss(
    target: Target, hidden: Tensor, rows: Tensor, marked: Tensor, drafted: DraftPass, penalise: Tensor
) -> tuple[Tensor, Tensor]:
    """Pull of the target toward the drafter's guesses, and away from loops.

    ``hidden`` [B, S, H] predicts the token after each place.  A guess reached through right guesses counts
    by its probability under the target relative to the likeliest token's: 1 where both agree, little where
    the target is sure of another token.  On ``marked`` tokens the loss is -log(1 - p) (Welleck et al.
    2019), scaled by ``penalise``.
    """
    before = (drafted.slots - 1)[..., None].expand(-1, -1, hidden.shape[-1])
    log_probs = target.logits(hidden.gather(1, before)).float().log_softmax(dim=-1)
    guessed = log_probs.gather(-1, drafted.guess[..., None]).squeeze(-1)
    looped = marked.gather(1, drafted.slots)
    with torch.no_grad():
        plausible = (guessed - log_probs.max(dim=-1).values).exp() * (drafted.live & ~looped)
    pull = -(guessed * plausible).sum() / plausible.sum().clamp_min(1.0)
    chosen = log_probs.gather(-1, rows.gather(1, drafted.slots)[..., None]).squeeze(-1)
    penalty = -torch.log1p(-chosen.exp().clamp(max=1 - 1e-4)) * looped
    return pull, penalise * penalty.sum() / looped.sum().clamp_min(1)


class JointTrainer:
    """Both models, their optimisers and the actor that generates; ``run`` trains for a time."""

    def __init__(
        self, recipe: Recipe, target: Target, drafter: Drafter, stream: Tensor, seconds: float, seed: int
    ) -> None:
        self.recipe, self.target, self.drafter, self.stream = recipe, target, drafter, stream
        self.device, self.seconds = stream.device, seconds
        torch.manual_seed(seed)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.target_optimiser = Optimiser(target, *recipe.target_lr, weight_decay=0.01)
        self.draft_optimiser = Optimiser(drafter, *recipe.draft_lr, weight_decay=0.01)
        self.layout = Layout.of(recipe.blocks, self.device)
        self.shape = recipe.shapes[0]
        weights = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.actor = Target(recipe.target).to(self.device, weights).requires_grad_(False)
        self.sampler = Sampler(self.actor, self.shape.batch, self.shape.length, sampled=True)
        self.pool: deque[Batch] = deque(maxlen=POOL)
        self.loop_share = 0.0
        self._text_cost = compiled(next_token_loss, self.device, seconds)
        self._draft_cost = compiled(self._draft_loss, self.device, seconds)

    def _draft_loss(self, rows: Tensor, marked: Tensor, anchors: Tensor, penalise: Tensor) -> tuple[Tensor, Tensor]:
        """Drafter loss and agreement with gradients to both models; expected accept length."""
        hidden, features = self.target(rows, self.recipe.draft.target_layer_ids)
        drafted = draft_pass(self.drafter, self.target, rows, features, anchors, self.layout, self.recipe)
        pull, penalty = agreement_loss(self.target, hidden, rows, marked, drafted, penalise)
        return self.recipe.joint_draft * drafted.loss + self.recipe.joint_pull * pull + penalty, drafted.expected

    def generate(self) -> None:
        """One more batch of the present target's continuations, greedy and sampled."""
        recipe, shape = self.recipe, self.shape
        self.actor.load_state_dict(self.target.state_dict())
        warm = int(shape.batch * recipe.sampled_share)
        temperature = torch.empty(shape.batch, device=self.device).uniform_(0.6, 1.0, generator=self.generator)
        temperature[warm:] = 0
        prompts = windows(self.stream, shape.batch, shape.prompt, self.generator)
        rows = self.sampler.run(prompts, temperature)
        share = looping(rows[warm:, shape.prompt :]).float().mean().item()
        self.loop_share = share if not self.pool else 0.7 * self.loop_share + 0.3 * share
        self.pool.append(Batch(rows, repetition(rows, shape.prompt)))

    def step(self, target_factor: float, draft_factor: float) -> Tensor:
        """One update of the drafter, and of the target unless its factor is 0; expected accept length."""
        recipe = self.recipe
        batch = self.pool[int(torch.randint(len(self.pool), (1,)))]
        count = recipe.draft_rows
        pick = torch.randint(len(batch.rows), (count,), generator=self.generator, device=self.device)
        anchors = random_anchors(batch.rows[pick], self.shape.prompt, self.layout.blocks, self.generator)
        excess = min(4.0, max(0.0, self.loop_share / LOOP_SHARE - 1))
        penalise = torch.full((), UNLIKELIHOOD * excess, device=self.device)
        with precision(self.device):
            loss, expected = self._draft_cost(batch.rows[pick], batch.marked[pick], anchors, penalise)
        loss.backward()
        if target_factor > 0:
            text = windows(self.stream, recipe.antiloop_batch, recipe.window + 1, self.generator)
            with precision(self.device):
                nll = self._text_cost(self.target, text)
            nll.backward()
            self.target_optimiser.step(target_factor)
        else:
            self.target.zero_grad(set_to_none=True)
        self.draft_optimiser.step(draft_factor)
        return expected.detach()

    def run(self, log: Callable[[str], None]) -> dict[str, Any]:
        """Train for the time given: the target's rate falls to 0 by 80 % of it, the drafter's by the end."""
        clock, step, history = Clock(self.seconds), 0, []
        while clock.fraction() < 1:
            if step % STEPS_A_BATCH == 0:
                self.generate()
            fraction = clock.fraction()
            ramp = min(1.0, (step + 1) / 50)
            target_factor = self.recipe.joint_target_lr * max(0.0, 1 - fraction / 0.8)
            expected = self.step(ramp * target_factor, ramp * self.recipe.joint_draft_lr * (1 - fraction))
            step += 1
            if step % STEPS_A_BATCH == 1:
                history.append(expected.item())
            if step % (20 * STEPS_A_BATCH) == 0:
                recent = sum(history[-20:]) / 20
                log(f"joint step {step} accept@16 {recent:.3f} loops {self.loop_share:.3f} {clock.elapsed():.0f}s")
        recent = sum(history[-20:]) / max(1, len(history[-20:]))
        return {"steps": step, "train_accept_length": recent, "loop_share": self.loop_share}
