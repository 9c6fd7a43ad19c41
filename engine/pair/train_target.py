"""Target stage: next-token training, then unlikelihood on the model's own greedy loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.pair.data import windows
from engine.pair.generate import Sampler, looping
from engine.pair.modules import Target
from engine.pair.optim import Clock, Optimiser, trapezoid
from engine.pair.recipe import Recipe

Function = TypeVar("Function", bound=Callable[..., object])
LOOP_PERIOD = 32  # longer than the rule's 16: a loop must not just grow out of its sight
LOOP_RUN = 32  # a row loops here when so many tokens in a row equal the one a period before
ANTILOOP_LR = 0.15  # of the peak, when the anti-loop phase begins
UNLIKELIHOOD = 0.5  # its weight beside the next-token loss
MIN_COMPILED = 180.0  # seconds; compiling a stage's functions takes up to 80, on its clock


def precision(device: torch.device) -> torch.autocast:
    """bfloat16 matmuls on a GPU; float32 on a CPU, where a smoke run gains nothing from autocast."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def compiled(function: Function, device: torch.device, seconds: float) -> Function:
    """``function`` compiled for static shapes on a GPU when ``seconds`` of training are left to gain from it."""
    if device.type != "cuda" or seconds < MIN_COMPILED:
        return function
    return cast(Function, torch.compile(function, dynamic=False))


def next_token_loss(target: Target, batch: Tensor) -> Tensor:
    """Mean cross-entropy, nats per token, of ``batch`` [B, S+1]."""
    hidden, _ = target(batch[:, :-1])
    logits = target.logits(hidden).float()
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def repetition(rows: Tensor, prompt: int) -> Tensor:
    """Tokens that extend a loop in generated ``rows`` [B, S]: bool [B, S].

    Only rows with a real loop (``LOOP_RUN`` tokens in a row that equal the token a period before) are
    marked, and there every token that lies more than 8 tokens into its second period.
    """
    places = torch.arange(rows.shape[1], device=rows.device)
    marked = torch.zeros_like(rows, dtype=torch.bool)
    looped = torch.zeros(len(rows), 1, dtype=torch.bool, device=rows.device)
    for period in range(1, LOOP_PERIOD + 1):
        same = F.pad(rows[:, period:] == rows[:, :-period], (period, 0)) & (places >= prompt)
        # length of the current run of matches: distance to the last mismatch
        last_break = torch.where(same, 0, places + 1).cummax(dim=1).values
        run = torch.where(same, places + 1 - last_break, 0)
        marked |= run >= period + 8
        looped |= (run >= max(LOOP_RUN, 2 * period)).any(dim=1, keepdim=True)
    return marked & looped


def unlikelihood_loss(target: Target, rows: Tensor, marked: Tensor) -> Tensor:
    """Mean of -log(1 - p(token)) over ``marked`` tokens of ``rows`` [B, S] (Welleck et al. 2019, eq. 4)."""
    hidden, _ = target(rows[:, :-1])
    logits = target.logits(hidden).float()
    chosen = -F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    penalty = -torch.log1p(-chosen.exp().clamp(max=1 - 1e-4))
    weight = marked[:, 1:].flatten().float()
    return (penalty * weight).sum() / weight.sum().clamp_min(1.0)


def train_target(
    recipe: Recipe, stream: Tensor, seconds: float, seed: int, log: Callable[[str], None]
) -> tuple[Target, dict[str, Any]]:
    """A trained target (float32) and what was spent on it; ``stream`` is 1-D ids on the device to use."""
    device = stream.device
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    target = Target(recipe.target).to(device)
    optimiser = Optimiser(target, *recipe.target_lr, weight_decay=0.01)
    clock = Clock(seconds)
    pretraining = Clock(seconds * (1 - recipe.antiloop_share))
    loss_of, step, last = compiled(next_token_loss, device, seconds), 0, math.nan
    while pretraining.fraction() < 1:
        with precision(device):
            loss = loss_of(target, windows(stream, recipe.batch, recipe.window + 1, generator))
        loss.backward()
        optimiser.step(trapezoid(pretraining.fraction(), step, recipe.warmup, 0.4, floor=ANTILOOP_LR))
        step += 1
        if step % 20 == 0:
            last = loss.item()  # also keeps the host from running far ahead of the device
        if step % 200 == 0:
            rate = step * recipe.batch * recipe.window / clock.elapsed()
            log(f"target step {step} loss {last:.3f} {rate / 1e3:.0f}k tok/s {clock.elapsed():.0f}s")
    spent: dict[str, Any] = {"steps": step, "tokens": step * recipe.batch * recipe.window, "last_loss": last}
    if recipe.antiloop_share:
        spent["antiloop"] = _train_antiloop(recipe, target, optimiser, stream, clock, generator, log)
    return target, spent


def _train_antiloop(
    recipe: Recipe,
    target: Target,
    optimiser: Optimiser,
    stream: Tensor,
    clock: Clock,
    generator: torch.Generator,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Train loops away on fresh greedy continuations beside ordinary text; loop shares as they fell."""
    device, shape = stream.device, recipe.shapes[0]
    greedy = torch.zeros(shape.batch, device=device)
    weights = torch.bfloat16 if device.type == "cuda" else torch.float32
    actor = Target(recipe.target).to(device, weights).requires_grad_(False)
    sampler = Sampler(actor, shape.batch, shape.length, sampled=False)
    nll = compiled(next_token_loss, device, clock.seconds)
    penalty = compiled(unlikelihood_loss, device, clock.seconds)
    began, step, shares = clock.fraction(), 0, []
    while clock.fraction() < 1:
        actor.load_state_dict(target.state_dict())
        rows = sampler.run(windows(stream, shape.batch, shape.prompt, generator), greedy)
        shares.append(looping(rows[:, shape.prompt :]).float().mean().item())
        marked = repetition(rows, shape.prompt)
        bad = marked.any(dim=1).nonzero().flatten()
        bad = bad[torch.randperm(len(bad), device=device, generator=generator)]
        for chunk in range(4):
            # a fixed number of rows keeps shapes static; short supply wraps around
            count = recipe.antiloop_rows
            pick = (torch.arange(count, device=device) + chunk * count) % max(1, len(bad))
            with precision(device):
                batch = windows(stream, recipe.antiloop_batch, recipe.window + 1, generator)
                loss = nll(target, batch)
                if len(bad):
                    loss = loss + UNLIKELIHOOD * penalty(target, rows[bad[pick]], marked[bad[pick]])
            loss.backward()
            progress = (clock.fraction() - began) / max(1e-6, 1 - began)
            optimiser.step(ANTILOOP_LR * (1 - progress))
            step += 1
        if len(shares) % 10 == 1:
            log(f"anti-loop step {step} loop share {shares[-1]:.3f} loss {loss.item():.3f}")
    return {"steps": step, "loop_share_first": shares[0], "loop_share_last": sum(shares[-5:]) / len(shares[-5:])}


@torch.no_grad()
def held_out_loss(target: Target, stream: Tensor, window: int, batch: int = 16) -> float:
    """Mean nats per token over ``stream`` (1-D ids), in adjoining windows of ``window`` tokens."""
    count = (len(stream) - 1) // window
    total, seen = 0.0, 0
    for start in range(0, count, batch):
        rows = [stream[i * window : (i + 1) * window + 1] for i in range(start, min(start + batch, count))]
        with precision(stream.device):
            total += next_token_loss(target, torch.stack(rows).long()).item() * len(rows)
        seen += len(rows)
    return total / seen
