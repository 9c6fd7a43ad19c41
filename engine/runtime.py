"""From an EngineConfig to a running engine: judge, resolve, load, allocate.

`resolve` turns every "auto" and null into what will run; the server reports that, and a record keeps it beside
what was asked.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine import estimate
from engine.backends.native import VERSION, model_refusals, refusals
from engine.calibrate import measure_costs
from engine.config import (
    DEFAULT_MAX_NODES,
    DDTreeDraft,
    DFlashDraft,
    Draft,
    EngineConfig,
    NoDraft,
    PolicyDraft,
    draft_folder,
    target_folder,
)
from engine.cost import CostTable
from engine.drafters.build import DraftKit
from engine.drafters.none import NoDrafter
from engine.errors import (
    ConfigError,
    EngineError,
    ModelError,
    NotYet,
    OutOfMemory,
    OutOfMemoryInTraffic,
    UnsupportedModel,
    is_full,
)
from engine.kv_cache import KVCache, PoolShape
from engine.machine import cpu_name, detect_machine, usable_cores
from engine.model.attention.torch import TorchAttention
from engine.model.draft import DraftModel, draft_tensors
from engine.model.target import Target, target_tensors
from engine.protocol import MemoryInfo, Versions
from engine.scheduler import Scheduler
from engine.shape import DraftShape, ModelShape, read_draft_shape, read_shape
from engine.speculate import Engine

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
DUMMY_SEED = 0
# Kernels that oneDNN keeps, one a layer shape and row count; it reads this at its first product. Its own 1024 are not
# enough for trees that grow: they meet many row counts, and a kernel that was dropped costs as much as a round.
CPU_KERNELS = 8192


@dataclass(frozen=True)
class Plan:
    """A resolved config with the shapes it was resolved against."""

    config: EngineConfig
    shape: ModelShape
    draft_shape: DraftShape | None
    device: torch.device
    threads: int

    @property
    def longest(self) -> int:
        """Most tokens of one request, prompt and answer."""
        return self.config.model.max_len or self.shape.longest


@dataclass(frozen=True)
class Runtime:
    """A loaded engine, with what /server_info says about it."""

    plan: Plan
    engine: Engine
    kit: DraftKit
    versions: Versions
    memory: MemoryInfo

    def scheduler(self) -> Scheduler:
        """Return an empty scheduler that fits this engine."""
        memory = self.plan.config.memory
        if memory.page_size is None or memory.prefill_chunk is None:
            raise ValueError("the plan is not resolved")
        return Scheduler(memory.max_running, memory.prefill_chunk, self.kit.rows, memory.page_size)

    def describe(self) -> dict[str, Any]:
        """Return the constant fields of `protocol.ServerInfo`."""
        return describe(self.plan, self.versions, self.memory, self.kit.costs)


def describe(plan: Plan, versions: Versions, memory: MemoryInfo, costs: CostTable | None) -> dict[str, Any]:
    """Return the constant fields of `protocol.ServerInfo`."""
    return {
        "config": plan.config.model_dump(mode="json"),
        "versions": versions.model_dump(),
        "memory": memory.model_dump(),
        "vocab": plan.shape.vocab,
        "costs": None if costs is None else dataclasses.asdict(costs),
    }


def resolve(config: EngineConfig) -> Plan:
    """Judge a config and fill in every choice it leaves open. Loads nothing.

    Raises:
        ConfigError: it asks for what this engine or this machine cannot do; every reason is named.
        ModelError: the model's config is missing or of an unknown family, or the drafter belongs to another target.
        OutOfMemory: by the estimate, it does not fit.
    """
    machine = detect_machine()
    _refuse(NotYet, refusals(config, machine))
    shape = read_shape(target_folder(config))
    speculative = [draft for draft in config.drafts if isinstance(draft, DFlashDraft)]
    draft_shape = _draft_shape(config, speculative[0], shape) if speculative else None
    _refuse(UnsupportedModel, model_refusals(shape, draft_shape))
    reasons = estimate.check(config, shape, draft_shape, machine)
    _refuse(OutOfMemory, [reason for reason in reasons if reason.path.startswith("memory")])
    _refuse(ConfigError, reasons)
    dtype = estimate.compute_dtype(config, shape, machine)
    max_len, page = estimate.max_len(config, shape), estimate.page_size(config)
    attention = estimate.attention_backend(config, shape, machine)
    kv_tokens = estimate.memory(config, shape, draft_shape, machine).kv_tokens
    memory = {"page_size": page, "prefill_chunk": estimate.prefill_chunk(config), "kv_tokens": kv_tokens}
    resolved = config.model_copy(
        update={
            "model": config.model.model_copy(update={"dtype": dtype, "kv_dtype": dtype, "max_len": max_len}),
            "draft": resolve_draft(config.draft, 0 if draft_shape is None else draft_shape.layers),
            "attention": config.attention.model_copy(update={"backend": attention}),
            "backend": config.backend.model_copy(update={"version": VERSION}),
            "memory": config.memory.model_copy(update=memory | {"kv_fraction": None}),
        }
    )
    device = torch.device("cuda" if machine.kind == "cuda" else "cpu")
    return Plan(resolved, shape, draft_shape, device, max(1, usable_cores() - 1))


def build(plan: Plan) -> Runtime:
    """Load weights and allocate the cache.

    Raises:
        ModelError: files are missing, truncated or of the wrong shape.
        OutOfMemory: weights or cache do not fit.
    """
    config, device = plan.config, plan.device
    torch.set_num_threads(plan.threads)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(CPU_KERNELS))
    # cuDNN's attention plans anew for every shape that it meets; caches grow, so that would be every round.
    torch.backends.cuda.enable_cudnn_sdp(False)
    dtype = DTYPES[config.model.dtype]
    max_len = plan.longest
    rows = config.reserved_rows
    seed = DUMMY_SEED if config.model.load == "dummy" else None
    with memory_errors():
        attention = TorchAttention(plan.shape.kv_heads, plan.shape.heads // plan.shape.kv_heads, dtype, device)
        tensors = target_tensors(plan.shape, target_folder(config), dtype, device, seed)
        target = Target(plan.shape, tensors, attention, max_len + rows)
        kit, draft_kv = _kit(plan, target, dtype, max_len + rows, seed)
        cache = _cache(plan, draft_kv, dtype, max_len + rows)
    engine = Engine(target, NoDrafter(), attention, cache, device)
    growing = [draft for draft in config.drafts if isinstance(draft, DDTreeDraft) and draft.nodes == "auto"]
    if growing:
        widest = max(growing, key=lambda draft: draft.verify_rows)
        with traffic_errors(plan):
            kit = replace(kit, costs=measure_costs(engine, kit, widest, config.memory.max_running))
    return Runtime(
        plan=plan,
        engine=replace(engine, drafter=kit.make(config.draft)),
        kit=kit,
        versions=versions_of(plan),
        memory=MemoryInfo(
            weight_bytes=target.weight_bytes,
            draft_weight_bytes=0 if kit.model is None else kit.model.weight_bytes,
            kv_tokens=cache.pages * cache.page_size,
            kv_bytes_per_token=target_pool(plan.shape).bytes_per_token(dtype)
            + (0 if draft_kv is None else draft_kv.bytes_per_token(dtype)),
            page_size=cache.page_size,
        ),
    )


def _refuse(error: type[EngineError], reasons: Iterable[estimate.Refusal]) -> None:
    text = "; ".join(str(reason) for reason in reasons)
    if text:
        raise error(text)


def _draft_shape(config: EngineConfig, draft: DFlashDraft, shape: ModelShape) -> DraftShape:
    folder = draft_folder(config, draft)
    found = read_draft_shape(folder)
    mismatch = found.mismatch(shape)
    if mismatch is not None:
        raise ModelError(f"{folder}: {mismatch}; give the drafter of this target as draft.model")
    return found


def resolve_draft(draft: Draft, layers: int) -> Draft:
    """Return a draft with the choices made that it leaves open; `layers`: those of the draft model, as loaded."""
    if isinstance(draft, PolicyDraft):
        table = tuple((first, last, resolve_draft(each, layers)) for first, last, each in draft.by_running)
        return draft.model_copy(update={"by_running": table})
    if isinstance(draft, NoDraft):
        return draft
    update: dict[str, Any] = {"layers": draft.layers or layers}
    if isinstance(draft, DDTreeDraft) and draft.nodes == "auto":
        update["max_nodes"] = draft.max_nodes or DEFAULT_MAX_NODES
    return draft.model_copy(update=update)


def target_pool(shape: ModelShape) -> PoolShape:
    """Return the KV of a target."""
    return PoolShape(shape.layers, shape.kv_heads, shape.head_dim)


def draft_pool(shape: DraftShape, layers: int) -> PoolShape:
    """Return the KV of a drafter's first `layers` layers."""
    return PoolShape(layers, shape.core.kv_heads, shape.core.head_dim)


def _kit(
    plan: Plan, target: Target, dtype: torch.dtype, positions: int, seed: int | None
) -> tuple[DraftKit, PoolShape | None]:
    """Return what the server's drafters are made of, and the KV pool they need."""
    config, shape = plan.config, plan.draft_shape
    speculative = [draft for draft in config.drafts if isinstance(draft, DFlashDraft)]
    if shape is None or not speculative:
        return DraftKit(None, None, 0, config.reserved_rows), None
    layers = max(draft.layers or shape.layers for draft in speculative)
    core = shape.core
    attention = TorchAttention(core.kv_heads, core.heads // core.kv_heads, dtype, plan.device)
    tensors = draft_tensors(shape, draft_folder(config, speculative[0]), dtype, plan.device, seed)
    model = DraftModel(shape, tensors, target, attention, layers, positions)
    kit = DraftKit(model, attention, layers, config.reserved_rows, draft_folder(config, speculative[0]))
    return kit, draft_pool(shape, layers)


def _cache(plan: Plan, draft_kv: PoolShape | None, dtype: torch.dtype, max_tokens: int) -> KVCache:
    memory = plan.config.memory
    if memory.kv_tokens is None or memory.page_size is None:
        raise ValueError("the plan is not resolved")
    return KVCache(
        target=target_pool(plan.shape),
        draft=draft_kv,
        pages=memory.kv_tokens // memory.page_size,
        page_size=memory.page_size,
        max_running=memory.max_running,
        max_tokens=max_tokens,
        dtype=dtype,
        device=plan.device,
    )


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn what torch raises while weights load into an `OutOfMemory`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_full(error):
            raise
        raise OutOfMemory("the weights do not fit into memory; use a smaller model or precision") from error


@contextmanager
def traffic_errors(plan: Plan) -> Iterator[None]:
    """Turn what torch raises when a step's tensors do not fit into an `OutOfMemoryInTraffic`."""
    try:
        yield
    except RuntimeError as error:
        if not is_full(error):
            raise
        guess = estimate.memory(plan.config, plan.shape, plan.draft_shape, detect_machine())
        raise OutOfMemoryInTraffic(
            "a step does not fit beside weights and cache; lower memory.kv_tokens or kv_fraction, "
            "memory.prefill_chunk or memory.max_running; "
            f"the estimate was {guess.activations / 2**30:.1f} GiB for a step, {guess.total / 2**30:.1f} in all"
        ) from error


def versions_of(plan: Plan) -> Versions:
    """Return what runs a plan."""
    on_gpu = plan.device.type == "cuda"
    name = torch.cuda.get_device_name(plan.device) if on_gpu else cpu_name()
    return Versions(
        engine=VERSION,
        python=platform.python_version(),
        torch=torch.__version__,
        device=f"{plan.device.type}: {name}",
        threads=plan.threads,
    )


def end_with_parent() -> None:
    """Ask Linux to end this process when its parent ends, however that happens."""
    if platform.system() == "Linux":
        import ctypes
        import signal

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() == 1:
            raise SystemExit(0)
