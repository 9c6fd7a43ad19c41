"""Index of the largest logit of every row, in two steps: parts of the vocabulary, then the parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import ceil_div, power_of_two

PART = 4096  # logits a program looks at


@triton.jit
def _best(value, index, vocab):
    """Return the largest of `value` and the least `index` that holds it; NaN counts as −inf, so one always does."""
    value = tl.where(value != value, -float("inf"), value)
    best = tl.max(value, axis=0)
    return best, tl.min(tl.where(value == best, index, vocab - 1), axis=0)


@triton.jit
def _parts(logits, best, where, vocab, parts, PART: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    value = tl.load(logits + row * vocab + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
    value, index = _best(value, at, vocab)
    tl.store(best + row * parts + part, value)
    tl.store(where + row * parts + part, index)


@triton.jit
def _whole(best, where, out, vocab, parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    value = tl.load(best + row * parts + part, mask=part < parts, other=-float("inf"))
    index = tl.load(where + row * parts + part, mask=part < parts, other=vocab - 1)
    _, index = _best(value, index, vocab)
    tl.store(out + row, index.to(tl.int64))


def argmax(logits: Tensor) -> Tensor:
    """Return [T] int64 of [T, vocab]: the first of equals."""
    rows, vocab = logits.shape
    parts = ceil_div(vocab, PART)
    best = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    where = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _parts[(rows, parts)](logits, best, where, vocab, parts, PART=PART, num_warps=4)
    _whole[(rows,)](best, where, out, vocab, parts, PARTS=power_of_two(parts), num_warps=1)
    return out
