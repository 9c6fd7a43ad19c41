"""The pieces every kernel file shares."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, acc):
    """Return acc + a b, in float32."""
    if INTERPRETED:  # which keeps bfloat16 as integers, and would multiply those
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


def power_of_two(value: int, at_least: int = 1) -> int:
    """Return the least power of two ≥ both."""
    return max(at_least, 1 << (value - 1).bit_length())


def ceil_div(value: int, by: int) -> int:
    """Divide, rounding up."""
    return -(-value // by)
