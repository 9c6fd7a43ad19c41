"""The roofline of a decode round: time of a forward = max(bytes / bandwidth, FLOP / peak).

A round without speculation is one forward of a row a request; with DFlash it is one draft forward and one verify
forward of block_size rows a request (arXiv 2602.06036). Communication between devices, kernel launches and
Python are left out, so this is a ceiling: `headroom` says how near a measurement comes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from engine.config import DFlashDraft, EngineConfig
from engine.errors import ConfigError
from engine.machine import Machine
from engine.parameters import (
    compute_dtype,
    draft_at,
    draft_parameters,
    kv_bytes_per_token,
    kv_dtype,
    parameters,
    weight_bytes_each,
)
from engine.shape import DTYPE_BYTES, DraftShape, ModelShape

ASSUMED_POSITION_RATE = 0.8  # share of rounds that accept one more token, where nothing was measured


@dataclass(frozen=True)
class Efficiency:
    """Share of the datasheet that a real kernel reaches; 1 and 1 give the ceiling."""

    memory: float = 1.0
    compute: float = 1.0


CEILING = Efficiency()
TYPICAL = Efficiency(memory=0.8, compute=0.6)


@dataclass(frozen=True)
class Phase:
    """One forward of a round on one device: what it reads, what it computes, how long that takes."""

    bytes: float
    flops: float
    seconds: float
    bound: Literal["memory", "compute"]


@dataclass(frozen=True)
class RoundEstimate:
    """One decode round of `running` requests: `tokens` come out of `seconds` (propose, then verify).

    Communication between devices, launches and Python are not in it. `assumed`: the accept length was not given
    and stands for an untested drafter.
    """

    running: int
    accept_length: float
    propose: Phase | None
    verify: Phase
    assumed: bool

    @property
    def seconds(self) -> float:
        """Time of the round."""
        return self.verify.seconds + (self.propose.seconds if self.propose else 0.0)

    @property
    def tokens(self) -> float:
        """Tokens the round yields over all requests."""
        return self.running * self.accept_length

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second over all requests."""
        return self.tokens / self.seconds

    @property
    def bound(self) -> Literal["memory", "compute"]:
        """What limits the longer of the two forwards."""
        if self.propose is not None and self.propose.seconds > self.verify.seconds:
            return self.propose.bound
        return self.verify.bound


def expected_accept_length(block_size: int, rate: float = ASSUMED_POSITION_RATE) -> float:
    """Return the mean tokens a round yields when each drafted token is accepted with probability `rate`."""
    return float(block_size) if rate >= 1 else (1 - rate**block_size) / (1 - rate)


def round_time(
    config: EngineConfig,
    shape: ModelShape,
    draft_shape: DraftShape | None,
    machine: Machine,
    running: int,
    context: int = 0,
    accept_length: float | None = None,
    efficiency: Efficiency = CEILING,
) -> RoundEstimate:
    """Estimate one round of `running` requests with `context` tokens each, on the roofline.

    Per replica (parallel.data) the busiest one counts; tensor ranks share bytes and FLOP evenly; pipeline
    stages follow each other and save no time. `accept_length`: tokens a round, bonus included; None takes
    simulate_accept, else an assumption (`RoundEstimate.assumed`).

    Raises:
        ConfigError: bandwidth or FLOP/s of the machine are unknown, or the draft's shape is missing.
    """
    if machine.bandwidth is None or machine.flops is None:
        raise ConfigError(f"bandwidth and FLOP/s of {machine.name} are unknown; measure them (measure_cpu) first")
    draft = draft_at(config, running)
    local = math.ceil(running / config.parallel.data)
    bandwidth = machine.bandwidth * efficiency.memory * config.parallel.tensor
    flops = machine.flops * efficiency.compute * config.parallel.tensor
    rows = local * (draft.verify_rows if isinstance(draft, DFlashDraft) else 1)
    verify = _phase(_verify_work(config, shape, machine, rows, local, context), bandwidth, flops)
    if not isinstance(draft, DFlashDraft):
        return RoundEstimate(running, 1.0, None, verify, assumed=False)
    if draft_shape is None:
        raise ConfigError("the drafter's shape is needed to estimate a speculative round; read it first")
    given = accept_length if accept_length is not None else draft.simulate_accept
    length = given if given is not None else expected_accept_length(draft.block_size)
    work = _propose_work(config, shape, draft_shape, machine, draft, local, context, length)
    return RoundEstimate(running, length, _phase(work, bandwidth, flops), verify, assumed=given is None)


def _phase(work: tuple[float, float], bandwidth: float, flops: float) -> Phase:
    read, computed = work
    by_memory, by_compute = read / bandwidth, computed / flops
    return Phase(read, computed, max(by_memory, by_compute), "memory" if by_memory >= by_compute else "compute")


def _verify_work(
    config: EngineConfig, shape: ModelShape, machine: Machine, rows: int, running: int, context: int
) -> tuple[float, float]:
    """Return (bytes, FLOP) of the target's forward over `rows` rows."""
    count = parameters(shape)
    each, _ = weight_bytes_each(config, shape, machine)
    plain = DTYPE_BYTES[compute_dtype(config, shape, machine)]
    head = shape.vocab * shape.hidden
    cache = running * context * kv_bytes_per_token(shape, kv_dtype(config, shape, machine))
    attention = 4.0 * shape.layers * shape.heads * shape.head_dim * context * rows
    read = count.touched_body(rows) * each + head * plain + cache
    return read, 2.0 * rows * (count.active_body + head) + attention


def _propose_work(
    config: EngineConfig,
    shape: ModelShape,
    draft_shape: DraftShape,
    machine: Machine,
    draft: DFlashDraft,
    running: int,
    context: int,
    accept_length: float,
) -> tuple[float, float]:
    """Return (bytes, FLOP) of the draft forward: the block's rows, and the last round's tokens as context."""
    core, layers = draft_shape.core, draft.layers or draft_shape.layers
    count = draft_parameters(draft_shape, layers)
    plain = DTYPE_BYTES[compute_dtype(config, shape, machine)]
    head = (draft_shape.head_rows or shape.vocab) * core.hidden
    seen = min(context, draft.window) if draft.window is not None else context
    cache = running * seen * kv_bytes_per_token(core, kv_dtype(config, shape, machine), layers)
    rows = running * draft.block_size
    fuse = core.hidden * len(draft_shape.taps) * draft_shape.target_hidden
    new_context = fuse + layers * 2 * core.hidden * core.kv_heads * core.head_dim
    flops = 2.0 * rows * (count.active_body - fuse) + 2.0 * running * accept_length * new_context
    flops += 2.0 * running * (draft.block_size - 1) * head
    flops += 4.0 * layers * core.heads * core.head_dim * seen * rows
    return count.body * plain + head * plain + cache, flops


def headroom(measured_tok_s: float, estimate: RoundEstimate) -> float:
    """Return the share of the roofline that a measured output rate reaches (1 = the machine's limit)."""
    return measured_tok_s / estimate.tokens_per_second
