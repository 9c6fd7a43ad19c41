"""Which kernels a device gets."""

from __future__ import annotations

import torch

from engine.kernels.base import Ops
from engine.kernels.reference import ReferenceOps


def ops_for(device: torch.device) -> Ops:
    """Return Triton's kernels on a GPU, plain torch elsewhere."""
    if device.type != "cuda":
        return ReferenceOps()
    from engine.kernels.triton_ops import TritonOps  # a CPU-only torch comes without Triton

    return TritonOps(device)
