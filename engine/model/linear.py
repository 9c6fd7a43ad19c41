"""Linear layers: the plain kernel, and oneDNN's with weights packed once.

A packed weight saves the reordering that every call would repeat: on a CPU at one row this is a third to half of
the time of a layer. Which kernel runs is chosen once, from device and precision, and reported in /server_info.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

#: Rows a packed layout is chosen for; other counts work with it too.
PACK_ROWS = 16


class Linear(Protocol):
    """y = x Wᵀ + b for x [rows, in]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, out]."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return residual + x Wᵀ + b, [rows, out]."""
        ...


class PlainLinear:
    """The framework's own kernel: any device, any precision."""

    name = "torch"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias).add_(residual)


class PackedLinear:
    """oneDNN on a CPU, weight packed at load."""

    name = "onednn"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        self._bias = bias
        self._apply = torch.ops.mkldnn._linear_pointwise.default
        self._apply_binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._apply(x, self._weight, self._bias, "none", [], "")
        return out

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = self._apply_binary(x, residual, self._weight, self._bias, "add")
        return out


def kernel_for(device: torch.device, dtype: torch.dtype) -> type[PlainLinear] | type[PackedLinear]:
    """Return the kernel class that this device and precision use."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return PlainLinear
    if dtype == torch.float32:
        return PackedLinear
    if dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return PackedLinear
    return PlainLinear
