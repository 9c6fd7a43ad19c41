"""Starting kernels: programmatic dependent launch, and the pieces every kernel file shares.

With programmatic dependent launch (Hopper, CUDA's PDL) a kernel's programs come onto the chip while its predecessor
still runs, and wait there: what a launch costs is hidden. The rule that makes it safe: every kernel calls
`wait_for_inputs` before it touches what another kernel writes or may still read; only weights may be fetched earlier.
"""

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


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Let the next kernel come onto the chip, then wait until the kernels before this one are done."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(address):
    """Ask for the cache lines at `address` (a block of pointers), without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1];\nmov.u32 $0, 0;",
        "=r,l",
        [address.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def start(pdl: bool) -> dict[str, bool]:
    """Return a launch's options, and the flag that `wait_for_inputs` takes."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


def power_of_two(value: int, at_least: int = 1) -> int:
    """Return the least power of two ≥ both."""
    return max(at_least, 1 << (value - 1).bit_length())


def ceil_div(value: int, by: int) -> int:
    """Divide, rounding up."""
    return -(-value // by)
