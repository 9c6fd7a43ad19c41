"""Results on their way to the host: copied behind the work that makes them, read when they are needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Steps whose results may be unread at once: one that runs, one that is launched behind it, one being read.
DEPTH = 3


class Ticket:
    """The results of one step: tensors on the host, not valid before `read`."""

    def __init__(self, parts: Sequence[Tensor], done: torch.cuda.Event | None) -> None:
        self._parts, self._done = parts, done

    def read(self) -> Sequence[Tensor]:
        """Wait for the step and return its results; they stay valid until `DEPTH` more steps are sent."""
        if self._done is not None:
            self._done.synchronize()
        return self._parts


class Ring:
    """Slots of pinned memory, used in turn."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate slots for `size` integers a step."""
        self._on_gpu = device.type == "cuda"
        self._slots = [torch.empty(size, dtype=torch.int64, pin_memory=self._on_gpu) for _ in range(DEPTH)]
        self._done = [torch.cuda.Event() if self._on_gpu else None for _ in range(DEPTH)]
        self._turn = 0

    def send(self, *results: Tensor) -> Ticket:
        """Copy integer results to the next slot, after everything launched so far."""
        slot, done = self._slots[self._turn], self._done[self._turn]
        self._turn = (self._turn + 1) % DEPTH
        parts, start = [], 0
        for result in results:
            part = slot[start : start + result.numel()].view(result.shape)
            part.copy_(result, non_blocking=self._on_gpu)
            parts.append(part)
            start += result.numel()
        if done is not None:
            done.record()
        return Ticket(parts, done)
