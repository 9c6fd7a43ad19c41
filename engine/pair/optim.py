"""Muon for hidden matrices, AdamW for the rest, and a schedule driven by the wall clock."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic coefficients, Jordan et al. 2024


class Clock:
    """A stage's time budget in seconds, started when made."""

    def __init__(self, seconds: float) -> None:
        if seconds <= 0:
            raise ValueError(f"no time left for this part of the stage ({seconds:.1f} s)")
        self.seconds = seconds
        self._start = time.monotonic()

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def fraction(self) -> float:
        """Share of the budget used, at most 1."""
        return min(1.0, self.elapsed() / self.seconds)


def trapezoid(fraction: float, step: int, warmup: int, flat: float, floor: float = 0.0) -> float:
    """Learning-rate factor: linear warm-up over steps, flat until ``flat`` of the time, linear to ``floor``."""
    ramp = min(1.0, (step + 1) / warmup)
    decay = 1.0 if fraction < flat else floor + (1.0 - floor) * (1.0 - fraction) / (1.0 - flat)
    return ramp * decay


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrices to ``matrices`` [N, rows, cols], by 5 Newton-Schulz steps.

    Singular values land in about 0.7-1.2, which is all that Muon needs (Jordan et al. 2024).
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    nearest: Tensor = x.mT if tall else x
    return nearest.to(matrices.dtype)


class Optimiser:
    """One optimiser for a whole module: matrices of one shape are stacked and updated together."""

    def __init__(self, module: nn.Module, matrix_lr: float, vector_lr: float, weight_decay: float = 0.0) -> None:
        self.matrix_lr, self.vector_lr, self.weight_decay = matrix_lr, vector_lr, weight_decay
        self._groups: dict[torch.Size, list[nn.Parameter]] = {}
        rest = []
        for name, parameter in module.named_parameters():
            if parameter.ndim == 2 and "embed_tokens" not in name:
                self._groups.setdefault(parameter.shape, []).append(parameter)
            else:
                rest.append(parameter)
        self._momentum = {
            shape: torch.zeros((len(group), *shape), device=group[0].device) for shape, group in self._groups.items()
        }
        self._adam = torch.optim.AdamW(rest, lr=vector_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=rest[0].is_cuda)

    def step(self, factor: float) -> None:
        """Update every parameter with its learning rate times ``factor``, and clear the gradients."""
        self._muon(self.matrix_lr * factor)
        for group in self._adam.param_groups:
            group["lr"] = self.vector_lr * factor
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _muon(self, lr: float) -> None:
        for shape, group in self._groups.items():
            gradients = torch.stack([p.grad for p in group if p.grad is not None])
            momentum = self._momentum[shape]
            momentum.lerp_(gradients, 1 - MOMENTUM)
            update = orthogonalise(gradients.lerp_(momentum, MOMENTUM))  # Nesterov
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for parameter, direction in zip(group, update, strict=True):
                parameter.mul_(1 - lr * self.weight_decay).add_(direction, alpha=-lr * scale)
                parameter.grad = None
