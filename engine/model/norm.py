"""RMSNorm (arXiv 1910.07467), alone and in front of a linear layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.linear import Linear, PackedLinear, kernel_for


class Norm:
    """RMSNorm over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps, self._shape = weight, eps, tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise [..., hidden]."""
        return F.rms_norm(x, self._shape, self._weight, self._eps)


class InverseRms:
    """1 / sqrt(mean(x²) + eps) over the last dimension, in few operations: at one row each call costs its dispatch."""

    def __init__(self, eps: float, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._eps = torch.tensor(eps, dtype=dtype, device=device)
        self._share, self._dtype = 1 / size, dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Return [..., 1] in the wider precision."""
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=self._dtype)
        return torch.addcmul(self._eps, length, length, value=self._share).rsqrt_()


class NormThenLinear:
    """y = W · RMSNorm(x) + b, one after the other."""

    def __init__(self, norm: Norm, linear: Linear) -> None:
        self._norm, self._linear = norm, linear

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, out] of [rows, hidden]."""
        return self._linear(self._norm(x))


class FoldedNormLinear:
    """y = s · (W diag(w)) x with s the inverse RMS of x: the same function, the norm's weight folded into W.

    On a CPU at one row the framework's RMSNorm takes as long as the product behind it; this leaves three small
    operations of it. Only without a bias, which s must not scale.
    """

    def __init__(self, norm: Tensor, eps: float, weight: Tensor) -> None:
        wide = torch.float32
        self._linear = PackedLinear((weight.to(wide) * norm.to(wide)).to(weight.dtype), None)
        self._scale = InverseRms(eps, norm.shape[0], wide, norm.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, out] of [rows, hidden]."""
        return self._linear(x).mul_(self._scale(x))


def norm_linear(norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> NormThenLinear | FoldedNormLinear:
    """Return W · RMSNorm(·) + b in the form that is fastest here."""
    kernel = kernel_for(weight.device, weight.dtype)
    if kernel is PackedLinear and bias is None:
        return FoldedNormLinear(norm, eps, weight)
    return NormThenLinear(Norm(norm, eps), kernel(weight, bias))
