"""Which kernels a device gets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.errors import KernelError
from engine.kernels.base import Ops
from engine.kernels.reference import ReferenceOps


def ops_for(device: torch.device) -> Ops:
    """Return Triton's kernels on a GPU, plain torch elsewhere."""
    if device.type != "cuda":
        return ReferenceOps()
    from engine.kernels.triton_ops import TritonOps  # a CPU-only torch comes without Triton

    return TritonOps(device)


@contextmanager
def kernel_errors(device: torch.device) -> Iterator[None]:
    """Turn what Triton raises, while kernels compile and run for the first time, into a `KernelError`."""
    if device.type != "cuda":
        yield
        return
    from triton.errors import TritonError

    try:
        yield
    except TritonError as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise KernelError(f"a GPU kernel does not run here: {cause}; use attention.backend torch") from error
