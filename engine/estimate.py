"""What a config needs, how fast it could be, and what can never work: pure arithmetic, no device, no torch.

This is the one module others import for estimates: `memory` and `check` live here, the parameter counts in
`engine.parameters`, the roofline in `engine.roofline`, and config.json's readers in `engine.shape`. Figures that
rest on a guess say so (`MemoryEstimate.guessed`, `RoundEstimate.assumed`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from engine.config import Captured, DDTreeDraft, EngineConfig
from engine.machine import (
    GIB,
    MIB,
    Machine,
    NoAnswer,
    cpu_machine,
    cpu_name,
    detect_machine,
    gpu,
    host_memory,
    measure_cpu,
    nvidia_smi,
    usable_cores,
    visible_gpus,
)
from engine.parameters import (
    SAMPLED_NUMBERS,
    Parameters,
    attention_backend,
    compute_dtype,
    draft_at,
    draft_layers,
    draft_parameters,
    draft_paths,
    kernels_fit,
    kv_bytes_per_token,
    kv_dtype,
    max_len,
    page_size,
    parameters,
    prefill_chunk,
    rows_behind,
    weight_bytes_each,
)
from engine.roofline import (
    CEILING,
    TYPICAL,
    Efficiency,
    RoundEstimate,
    expected_accept_length,
    headroom,
    round_time,
)
from engine.shape import (
    DTYPE_BYTES,
    DraftShape,
    ModelShape,
    build_target_layer_ids,
    read_draft_shape,
    read_shape,
)

__all__ = [
    "CEILING",
    "GIB",
    "MIB",
    "TYPICAL",
    "DraftShape",
    "Efficiency",
    "Machine",
    "MemoryEstimate",
    "ModelShape",
    "NoAnswer",
    "Parameters",
    "Refusal",
    "RoundEstimate",
    "advise",
    "attention_backend",
    "build_target_layer_ids",
    "check",
    "compute_dtype",
    "cpu_machine",
    "cpu_name",
    "detect_machine",
    "draft_at",
    "draft_parameters",
    "draft_paths",
    "expected_accept_length",
    "gpu",
    "headroom",
    "host_memory",
    "kv_bytes_per_token",
    "kv_dtype",
    "max_len",
    "measure_cpu",
    "memory",
    "nvidia_smi",
    "page_size",
    "parameters",
    "prefill_chunk",
    "read_draft_shape",
    "read_shape",
    "round_time",
    "rows_behind",
    "usable_cores",
    "visible_gpus",
]

KV_FRACTION = {"cuda": 0.85, "cpu": 0.25}  # a CPU serves other programs too
RUNTIME_BYTES = {"cuda": 900 * MIB, "cpu": 450 * MIB}  # CUDA context and libraries; Python, torch, the front
NATIVE_CUDA_BYTES = 780 * MIB  # this engine's CUDA context, libraries and kernels: 761 to 805 MiB on an H200
# One captured graph's own nodes and static buffers: this engine's, fitted on an H200, and other servers'.
GRAPH_BYTES, OTHERS_GRAPH_BYTES = 24 * MIB, 32 * MIB
SAMPLING_TENSORS = 10  # float64 tensors of probabilities that sampling holds at once, sorted and not


@dataclass(frozen=True)
class Refusal:
    """A reason not to launch a config: the dotted path that asks for it, and one line with what to do."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device, by what holds them. `kv_tokens` is the cache's size in tokens, whole pages.

    `guessed` says, a line each, which figures rest on an assumption.
    """

    weights: int
    draft_weights: int
    kv: int
    draft_kv: int
    activations: int
    graphs: int
    runtime: int
    kv_tokens: int
    kv_bytes_per_token: int
    guessed: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.items().values())

    def items(self) -> dict[str, int]:
        """Return bytes by name, in the order they are taken."""
        names = ("weights", "draft_weights", "kv", "draft_kv", "activations", "graphs", "runtime")
        return {name: getattr(self, name) for name in names}

    def shortfall(self, machine: Machine) -> int:
        """Return by how many bytes one device is too small, 0 when it fits."""
        return max(0, self.total - machine.memory)

    def fits(self, machine: Machine) -> bool:
        """Whether one device holds it all."""
        return self.shortfall(machine) == 0


def _activation_bytes(
    config: EngineConfig, shape: ModelShape, draft: DraftShape | None, machine: Machine
) -> tuple[int, int]:
    """Return the peak bytes of (any step, a decode round): the widest layer's tensors, features and logits."""
    each, tensor = DTYPE_BYTES[compute_dtype(config, shape, machine)], config.parallel.tensor
    experts = shape.experts
    wide = max(shape.intermediate, experts.per_token * experts.intermediate if experts else 0)
    row = 4 * shape.hidden + ((shape.heads + 2 * shape.kv_heads) * shape.head_dim + 3 * wide) / tensor
    row = row * each + 4 * shape.hidden  # the norms compute in float32
    row += len(draft.taps) * shape.hidden * each if draft else 0
    logits = shape.vocab * (each + 4) / tensor
    decode_rows = config.memory.max_running * config.verify_rows
    decode = decode_rows * (row + logits)
    prefill = prefill_chunk(config) * row + config.memory.max_running * logits
    # Attention reads the pages of one layer through a copy when no kernel reads them in place.
    gathers = config.backend.kind == "native" and attention_backend(config, shape, machine) == "torch"
    per_layer = kv_bytes_per_token(shape, kv_dtype(config, shape, machine), 1, tensor)
    longest = min(max_len(config, shape), config.memory.kv_tokens or max_len(config, shape))
    gathered = per_layer * longest * config.memory.max_running if gathers else 0
    return int(max(decode, prefill) + gathered), int(decode)


def _weight_bytes(count: Parameters, each: float, plain: float, tensor: int, pipeline: int) -> int:
    """Return the bytes of one rank: layers split by both, embedding and head by tensor; the first or last stage
    is the largest."""
    stage_share = math.ceil(count.layers / pipeline) / count.layers
    body = (count.body - count.rest) * stage_share / tensor + count.rest
    ends = count.embedding + count.head if pipeline == 1 else max(count.embedding, count.head)
    return int(body * each + ends * plain / tensor)


def memory(config: EngineConfig, shape: ModelShape, draft: DraftShape | None, machine: Machine) -> MemoryEstimate:
    """Estimate the bytes on the fullest device of `machine`.

    `draft` is the drafter's shape, None without speculation. The KV cache is what the config says; without
    kv_tokens and kv_fraction it holds max_running requests of the longest text, as far as the default fraction
    of the device allows.
    """
    each, guess = weight_bytes_each(config, shape, machine)
    plain = DTYPE_BYTES[compute_dtype(config, shape, machine)]
    tensor, pipeline = config.parallel.tensor, config.parallel.pipeline
    draft = draft if any(draft_paths(config)) else None
    weights = _weight_bytes(parameters(shape), each, plain, tensor, pipeline)
    kv_each = kv_bytes_per_token(shape, kv_dtype(config, shape, machine), math.ceil(shape.layers / pipeline), tensor)
    draft_weights = draft_kv_each = 0
    if draft is not None:
        layers = draft_layers(config, draft)
        draft_weights = _weight_bytes(draft_parameters(draft, layers), plain, plain, tensor, 1)
        draft_kv_each = kv_bytes_per_token(draft.core, kv_dtype(config, shape, machine), layers, tensor)
    activations, decode = _activation_bytes(config, shape, draft, machine)
    native, graphs = config.backend.kind == "native", 0
    guessed = ["activations: widest layer, features and logits", "runtime: a typical process"]
    if isinstance(config.graphs, Captured):
        graphs = decode + (GRAPH_BYTES if native else OTHERS_GRAPH_BYTES) * len(config.graphs.batch_sizes)
        if native:
            sampled = config.memory.max_running * config.verify_rows * shape.vocab
            graphs += min(SAMPLED_NUMBERS, sampled) * 8 * SAMPLING_TENSORS
        guessed.append("graphs: one pool of a decode round's activations, 24 or 32 MiB a graph")
    runtime = NATIVE_CUDA_BYTES if native and machine.kind == "cuda" else RUNTIME_BYTES[machine.kind]
    fixed = weights + draft_weights
    tokens = _kv_tokens(config, shape, machine, fixed, activations + graphs, kv_each + draft_kv_each)
    return MemoryEstimate(
        weights=weights,
        draft_weights=draft_weights,
        kv=tokens * kv_each,
        draft_kv=tokens * draft_kv_each,
        activations=activations,
        graphs=graphs,
        runtime=runtime,
        kv_tokens=tokens,
        kv_bytes_per_token=kv_each + draft_kv_each,
        guessed=tuple(guessed + ([guess] if guess else [])),
    )


def _kv_tokens(config: EngineConfig, shape: ModelShape, machine: Machine, weights: int, working: int, each: int) -> int:
    """Return the cache's size in tokens, rounded down to pages."""
    page = page_size(config)
    if config.memory.kv_tokens is not None:
        return config.memory.kv_tokens // page * page
    fraction = config.memory.kv_fraction
    room = machine.memory * (fraction or KV_FRACTION[machine.kind]) - weights
    if fraction is None:
        room -= working
    tokens = max(0, int(room // each // page) * page)
    if fraction is not None and (config.backend.kind != "native" or config.memory.prefix_cache):
        return tokens  # what no running request needs keeps prefixes
    one = math.ceil((max_len(config, shape) + rows_behind(config, shape, machine)) / page) * page
    return min(tokens, config.memory.max_running * one)


def check(config: EngineConfig, shape: ModelShape, draft: DraftShape | None, machine: Machine) -> tuple[Refusal, ...]:
    """Return why `config` can never run on `machine` with these models; empty when nothing speaks against it.

    `draft` is the drafter's shape, None when the config has no speculative draft.
    """
    found = list(_parallel(config, shape, draft, machine))
    found += _lengths(config, shape)
    if draft is not None:
        found += _drafter(config, shape, draft)
    if isinstance(config.graphs, Captured) and machine.kind == "cpu":
        found.append(Refusal("graphs.kind", "captured graphs need a CUDA GPU, and this machine has none; use eager"))
    found += _kernels(config, shape, machine)
    if not found:  # the arithmetic of memory means something only for a config that is otherwise possible
        found += _memory(config, shape, draft, machine)
    return tuple(found)


def _parallel(config: EngineConfig, shape: ModelShape, draft: DraftShape | None, machine: Machine) -> Iterator[Refusal]:
    parallel = config.parallel
    tensor, path = parallel.tensor, "parallel.tensor"
    for owner, core in (("target", shape), ("drafter", draft.core if draft else None)):
        if core is None:
            continue
        if core.heads % tensor:
            yield Refusal(path, f"{tensor} does not divide the {owner}'s {core.heads} attention heads")
        if core.kv_heads % tensor and tensor % core.kv_heads:
            yield Refusal(path, f"{tensor} ranks and the {owner}'s {core.kv_heads} KV heads: neither divides the other")
        width = core.experts.intermediate if core.experts else core.intermediate
        if width % (tensor // parallel.expert if core.experts else tensor):
            yield Refusal(path, f"{tensor} ranks do not divide the {owner}'s feed-forward width {width}")
    if config.backend.kind == "native" and shape.vocab % tensor:  # the others pad the vocabulary
        yield Refusal(path, f"{tensor} does not divide the vocabulary of {shape.vocab}")
    if parallel.expert > 1 and shape.experts is None:
        yield Refusal("parallel.expert", "the target has no experts; set it to 1")
    if shape.experts is not None and shape.experts.count % parallel.expert:
        yield Refusal("parallel.expert", f"{parallel.expert} does not divide the {shape.experts.count} experts")
    if parallel.pipeline > shape.layers:
        yield Refusal("parallel.pipeline", f"{parallel.pipeline} stages for {shape.layers} layers; use fewer")
    if machine.kind == "cuda" and parallel.gpus > machine.devices:
        yield Refusal("parallel", f"needs {parallel.gpus} GPUs, this machine has {machine.devices}; lower a degree")


def _kernels(config: EngineConfig, shape: ModelShape, machine: Machine) -> Iterator[Refusal]:
    """Yield why the native engine's device rounds cannot run the model, where the config insists on them."""
    if config.backend.kind != "native" or machine.kind == "cpu" or kernels_fit(config, shape, machine):
        return
    what = f"head_dim {shape.head_dim} in {compute_dtype(config, shape, machine)}"
    if config.attention.backend == "triton":
        yield Refusal("attention.backend", f"the Triton kernels have no {what}; use auto")
    elif isinstance(config.graphs, Captured):
        yield Refusal("graphs.kind", f"captured rounds need the Triton kernels, which have no {what}; use eager")


def _lengths(config: EngineConfig, shape: ModelShape) -> Iterator[Refusal]:
    asked, longest = max_len(config, shape), shape.longest
    if asked > longest:
        yield Refusal("model.max_len", f"{asked} exceeds the {longest} positions the target is made for; lower it")
    rows, page = config.reserved_rows, page_size(config)
    if rows >= asked:
        yield Refusal("draft", f"a round verifies {rows} rows and a text has at most {asked} tokens; shorten the block")
    tokens = config.memory.kv_tokens
    if tokens is not None and page > tokens:
        yield Refusal("memory.page_size", f"a page of {page} tokens exceeds kv_tokens {tokens}; lower it")
    elif tokens is not None and tokens < rows + 1:
        yield Refusal(
            "memory.kv_tokens",
            f"{tokens} tokens cannot hold one request of {rows} rows a round and its prompt; raise it",
        )


def _drafter(config: EngineConfig, shape: ModelShape, draft: DraftShape) -> Iterator[Refusal]:
    mismatch = draft.mismatch(shape)
    if mismatch is not None:
        yield Refusal("draft.model", f"{mismatch}; name a drafter of this target")
    for path, asked in draft_paths(config):
        if asked.layers is not None and asked.layers > draft.layers:
            yield Refusal(f"{path}.layers", f"the drafter has {draft.layers} layers, not {asked.layers}; lower it")
        if isinstance(asked, DDTreeDraft) and asked.nodes != "auto":
            most = _tree_capacity(asked.block_size - 1, asked.width or shape.vocab, asked.nodes)
            if asked.nodes > most:
                yield Refusal(
                    f"{path}.nodes",
                    f"depth {asked.block_size - 1} and width {asked.width} give at most {most} nodes; lower it",
                )


def _tree_capacity(depth: int, width: int, enough: int) -> int:
    """Return how many nodes a tree can have without its root, counted no further than past `enough`."""
    total, level = 0, 1
    for _ in range(depth):
        level *= width
        total += level
        if total > enough:
            break
    return total


def _memory(config: EngineConfig, shape: ModelShape, draft: DraftShape | None, machine: Machine) -> Iterator[Refusal]:
    need = memory(config, shape, draft, machine)
    kept = need.weights + need.draft_weights
    fraction = config.memory.kv_fraction
    least = config.reserved_rows + 1
    enough = (kept + least * need.kv_bytes_per_token) / machine.memory
    if need.kv_tokens < least and fraction is not None:
        yield Refusal(
            "memory.kv_fraction",
            f"{fraction} of {_gib(machine.memory)} leaves no KV cache beside {_gib(kept)} of weights; "
            + (f"raise it above {enough:.2f}" if enough < 0.95 else "raise parallel.tensor"),
        )
    elif need.kv_tokens < least:
        yield Refusal("memory", f"{_breakdown(need, machine)} leave no room for a KV cache; raise parallel.tensor")
    elif not need.fits(machine):
        short = need.shortfall(machine)
        if fraction is not None:
            fitting = math.floor((fraction - short / machine.memory) * 100) / 100
            other = "lower memory.max_running or raise parallel.tensor"
            advice = f"lower it to {fitting}" if fitting > enough else other
            yield Refusal("memory.kv_fraction", f"short by {_gib(short)} of {_gib(machine.memory)}; {advice}")
        else:
            tokens = need.kv_tokens - math.ceil(short / need.kv_bytes_per_token)
            path = "memory.kv_tokens" if config.memory.kv_tokens is not None else "memory"
            yield Refusal(
                path,
                f"short by {_gib(short)}: {_breakdown(need, machine)}; "
                + (f"lower kv_tokens to {tokens}" if tokens >= least else "raise parallel.tensor"),
            )


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"


def _breakdown(need: MemoryEstimate, machine: Machine) -> str:
    parts = ", ".join(f"{name} {_gib(count)}" for name, count in need.items().items() if count)
    return f"{parts} of {_gib(machine.memory)}"


def advise(config: EngineConfig, shape: ModelShape, draft: DraftShape | None) -> tuple[Refusal, ...]:
    """Return what is possible but probably not meant; the config runs all the same."""
    found = []
    for path, asked in draft_paths(config):
        if draft is not None and asked.block_size > draft.block_size:
            found.append(
                Refusal(
                    f"{path}.block_size",
                    f"the drafter was trained for blocks of {draft.block_size}; the last rows will seldom be accepted",
                )
            )
        if isinstance(asked, DDTreeDraft) and asked.width == 1 and asked.nodes != "auto":
            found.append(Refusal(f"{path}.width", "a tree of width 1 is a chain; kind: dflash is the same"))
    if draft is not None and max_len(config, shape) > draft.core.longest:
        found.append(
            Refusal(
                "model.max_len",
                f"the drafter was trained for {draft.core.longest} positions; beyond them it is seldom right",
            )
        )
    if isinstance(config.graphs, Captured) and config.graphs.batch_sizes[-1] < config.memory.max_running:
        largest = config.graphs.batch_sizes[-1]
        found.append(Refusal("graphs.batch_sizes", f"rounds of more than {largest} running requests are not captured"))
    tokens, rows = config.memory.kv_tokens, config.reserved_rows
    if tokens is not None and tokens < config.memory.max_running * (rows + 1):
        found.append(
            Refusal("memory.kv_tokens", f"{tokens} tokens cannot hold max_running {config.memory.max_running} requests")
        )
    if shape.dtype == "float16" and config.model.dtype == "auto":
        found.append(Refusal("model.dtype", "the checkpoint is float16; auto serves it in bfloat16"))
    return tuple(found)
