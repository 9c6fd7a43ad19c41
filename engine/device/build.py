"""From a plan to rounds on a device: load, allocate, capture."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from engine import estimate
from engine.config import DFlashDraft, Draft, PolicyDraft, draft_folder, target_folder
from engine.device.model import DeviceDraft, DeviceTarget
from engine.device.pages import Pages
from engine.device.round import Models
from engine.device.rounds import Rounds, chains
from engine.device.schedule import LateScheduler
from engine.device.state import State
from engine.drafters.build import judge
from engine.errors import ConfigError, OutOfMemoryInCapture
from engine.kernels.base import Ops
from engine.kernels.build import kernel_errors, ops_for
from engine.kv_cache import PoolShape
from engine.model.draft import draft_tensors
from engine.model.target import target_tensors
from engine.parameters import ROUNDS_BEHIND
from engine.protocol import MemoryInfo, Versions
from engine.runtime import (
    DTYPES,
    DUMMY_SEED,
    Plan,
    describe,
    draft_pool,
    memory_errors,
    resolve_draft,
    target_pool,
    versions_of,
)


@dataclass(frozen=True)
class DeviceRuntime:
    """A loaded engine whose rounds run on a device, with what /server_info says about it."""

    plan: Plan
    rounds: Rounds
    pages: Pages
    versions: Versions
    memory: MemoryInfo
    target_token_bytes: int
    draft_token_bytes: int

    def scheduler(self) -> LateScheduler:
        """Return an empty scheduler that fits this engine."""
        memory = self.plan.config.memory
        if memory.page_size is None or memory.prefill_chunk is None:
            raise ValueError("the plan is not resolved")
        return LateScheduler(memory.max_running, memory.prefill_chunk, self.plan.config.reserved_rows, memory.page_size)

    def judge(self, draft: Draft) -> Draft:
        """Return another draft for this server, with every choice made.

        Raises:
            ConfigError: it needs more than this server has.
        """
        model = self.rounds.models.draft
        ranges = draft.by_running if isinstance(draft, PolicyDraft) else ((1, None, draft),)
        for each in chains([each for _, _, each in ranges]):
            if not isinstance(each, DFlashDraft):
                continue
            if model is None:
                raise ConfigError("this server was started without a drafter; start it with a policy that has one")
            judge(each, model.layers, self.plan.config.reserved_rows, _folder(self.plan))
        return resolve_draft(draft, 0 if model is None else model.layers)

    def describe(self) -> dict[str, Any]:
        """Return the constant fields of `protocol.ServerInfo`."""
        return describe(self.plan, self.versions, self.memory, None)


@torch.inference_mode()
def build_device(plan: Plan, ops: Ops | None = None) -> DeviceRuntime:
    """Load weights, allocate the cache, and make every round and prompt forward; capture them where asked.

    Args:
        ops: the kernels; those that fit the device when None.

    Raises:
        ModelError: files are missing, truncated or of the wrong shape.
        OutOfMemory: weights, cache or a captured graph do not fit.
        GraphCaptureError: a graph cannot be captured.
        KernelError: a kernel does not compile or run on this device.
    """
    config, device = plan.config, plan.device
    memory, dtype = config.memory, DTYPES[config.model.dtype]
    if memory.kv_tokens is None or memory.page_size is None:
        raise ValueError("the plan is not resolved")
    torch.set_num_threads(plan.threads)
    if device.type == "cuda":
        torch.cuda.set_stream(_stream(device))  # graphs cannot be captured on the default one
    rows = config.reserved_rows
    longest = plan.longest + ROUNDS_BEHIND * rows
    pages = memory.kv_tokens // memory.page_size
    layers = max((draft.layers or 0 for draft in config.drafts if isinstance(draft, DFlashDraft)), default=0)
    draft_kv = None if plan.draft_shape is None else draft_pool(plan.draft_shape, layers)
    with memory_errors(), kernel_errors(device):
        models = _models(plan, ops or ops_for(device), dtype, layers, longest)
        state = State(
            target=target_pool(plan.shape),
            draft=draft_kv,
            pages=pages,
            page_size=memory.page_size,
            max_running=memory.max_running,
            max_tokens=longest,
            rows=rows,
            dtype=dtype,
            device=device,
        )
    with kernel_errors(device):
        rounds = _rounds(plan, models, state)
    target_bytes, draft_bytes = _token_bytes(target_pool(plan.shape), dtype), _token_bytes(draft_kv, dtype)
    return DeviceRuntime(
        plan=plan,
        rounds=rounds,
        pages=Pages(pages, memory.max_running, memory.page_size),
        versions=versions_of(plan),
        memory=MemoryInfo(
            weight_bytes=models.target.weight_bytes,
            draft_weight_bytes=0 if models.draft is None else models.draft.weight_bytes,
            kv_tokens=pages * memory.page_size,
            kv_bytes_per_token=target_bytes + draft_bytes,
            page_size=memory.page_size,
        ),
        target_token_bytes=target_bytes,
        draft_token_bytes=draft_bytes,
    )


def _rounds(plan: Plan, models: Models, state: State) -> Rounds:
    """Make the rounds; where a graph does not fit, the error says what the estimate expected."""
    try:
        return Rounds(plan.config, models, state, chains(plan.config.drafts))
    except OutOfMemoryInCapture as error:
        guess = estimate.memory(plan.config, plan.shape, plan.draft_shape, estimate.detect_machine())
        raise OutOfMemoryInCapture(
            f"{error}; the estimate was {guess.graphs / 2**30:.1f} GiB for graphs, {guess.total / 2**30:.1f} in all"
        ) from error


def _models(plan: Plan, ops: Ops, dtype: torch.dtype, layers: int, positions: int) -> Models:
    config = plan.config
    seed = DUMMY_SEED if config.model.load == "dummy" else None
    tensors = target_tensors(plan.shape, target_folder(config), dtype, plan.device, seed)
    target = DeviceTarget(plan.shape, tensors, ops, positions)
    speculative = [draft for draft in config.drafts if isinstance(draft, DFlashDraft)]
    if plan.draft_shape is None or not speculative:
        return Models(ops, target, None)
    tensors = draft_tensors(plan.draft_shape, draft_folder(config, speculative[0]), dtype, plan.device, seed)
    return Models(ops, target, DeviceDraft(plan.draft_shape, tensors, target, ops, layers, positions))


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream all engines of this process work on."""
    return torch.cuda.Stream(device)


def _folder(plan: Plan) -> Any:
    drafts = [draft for draft in plan.config.drafts if isinstance(draft, DFlashDraft)]
    return draft_folder(plan.config, drafts[0]) if drafts else None


def _token_bytes(shape: PoolShape | None, dtype: torch.dtype) -> int:
    return 0 if shape is None else shape.bytes_per_token(dtype)
