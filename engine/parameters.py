"""Counts that everything else is made of: parameters, bytes each, KV bytes a token, the drafts of a config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.config import DDTreeDraft, DFlashDraft, EngineConfig, NoDraft, PolicyDraft
from engine.errors import ConfigError
from engine.machine import Machine
from engine.shape import DTYPE_BYTES, DraftShape, ModelShape

PAGE_SIZE = 32  # tokens
PREFILL_CHUNK = 512  # tokens
ROUNDS_BEHIND = 2  # rounds that a request on a device may be in with its text full: its last, and the one behind it
SAMPLED_NUMBERS = 2**23  # probabilities that a device round computes at once, at most: float64, several times over


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters. `embedding` counts once when tied, then `head` is 0.

    `layer` is one layer without its dense feed-forward or experts, `dense` one dense feed-forward, `expert` one
    expert of one layer, `router` one layer's router; `rest` is what belongs to no layer (norms, a drafter's fc).
    """

    layers: int
    layer: int
    dense: int
    dense_layers: int
    expert: int
    experts: int  # per expert layer
    used: int  # experts a token passes
    router: int
    rest: int
    embedding: int
    head: int

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers

    @property
    def body(self) -> int:
        """Everything but embedding and head."""
        return self.shared_body + self.expert_layers * self.experts * self.expert

    @property
    def shared_body(self) -> int:
        """The body without experts: what every forward reads."""
        return self.layers * self.layer + self.dense_layers * self.dense + self.expert_layers * self.router + self.rest

    @property
    def active_body(self) -> int:
        """The body's share that one token passes."""
        return self.shared_body + self.expert_layers * self.used * self.expert

    @property
    def total(self) -> int:
        """All parameters."""
        return self.body + self.embedding + self.head

    def touched_body(self, rows: float) -> float:
        """Return the body's parameters that a forward of `rows` tokens reads.

        Each token picks `used` of `experts`; taken as independent, a share 1 − (1 − used/experts)^rows is hit.
        """
        if not self.experts:
            return self.body
        hit: float = 1 - (1 - self.used / self.experts) ** rows
        return self.shared_body + self.expert_layers * self.experts * hit * self.expert


def parameters(shape: ModelShape) -> Parameters:
    """Count a target's parameters."""
    return _decoder_parameters(shape, shape.layers, shape.hidden, head_rows=0 if shape.tied else shape.vocab)


def draft_parameters(draft: DraftShape, layers: int | None = None) -> Parameters:
    """Count a drafter's own parameters, with only its first `layers` layers when given; no embedding of its own."""
    core = draft.core
    fuse = core.hidden * len(draft.taps) * draft.target_hidden
    count = _decoder_parameters(core, layers or core.layers, core.hidden * 2 + fuse, draft.head_rows or 0)
    return Parameters(**{**count.__dict__, "embedding": 0})


def _decoder_parameters(shape: ModelShape, layers: int, rest: int, head_rows: int) -> Parameters:
    h, width = shape.hidden, shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    layer = h * (width + 2 * kv) + width * h + 2 * h
    layer += (width + 2 * kv + h) if shape.attention_bias else 0
    layer += 2 * shape.head_dim if shape.qk_norm else 0
    dense = 3 * h * shape.intermediate + ((2 * shape.intermediate + h) if shape.mlp_bias else 0)
    experts = shape.experts
    return Parameters(
        layers=layers,
        layer=layer,
        dense=dense,
        dense_layers=layers - min(layers, experts.layers) if experts else layers,
        expert=3 * h * experts.intermediate if experts else 0,
        experts=experts.count if experts else 0,
        used=experts.per_token if experts else 0,
        router=h * experts.count if experts else 0,
        rest=rest,
        embedding=shape.vocab * h,
        head=head_rows * h,
    )


# --- precision and cache ---


def compute_dtype(config: EngineConfig, shape: ModelShape, machine: Machine) -> str:
    """Return the precision of weights and activations.

    `auto` is the checkpoint's, but bfloat16 for float16, and float32 where the machine has no fast bfloat16.
    """
    if config.model.dtype != "auto":
        return config.model.dtype
    wanted = "bfloat16" if shape.dtype == "float16" else shape.dtype
    return "float32" if wanted == "bfloat16" and not machine.bfloat16 else wanted


def kv_dtype(config: EngineConfig, shape: ModelShape, machine: Machine) -> str:
    """Return the precision of the KV cache."""
    if config.model.kv_dtype != "auto":
        return config.model.kv_dtype
    return compute_dtype(config, shape, machine)


_QUANTISED_BYTES = (("fp8", 1.0), ("int8", 1.0), ("w8", 1.0), ("fp4", 0.56), ("int4", 0.56), ("w4", 0.56))
_FOUR_BIT = ("awq", "gptq", "compressed-tensors", "marlin", "bitsandbytes")


def weight_bytes_each(config: EngineConfig, shape: ModelShape, machine: Machine) -> tuple[float, str | None]:
    """Return bytes per parameter of the linear layers, and what was guessed about it."""
    name = config.model.quantization or shape.quantization
    plain = DTYPE_BYTES[compute_dtype(config, shape, machine)]
    if name is None:
        return plain, None
    for part, size in _QUANTISED_BYTES:
        if part in name.lower():
            return size, None
    if any(part in name.lower() for part in _FOUR_BIT):
        return 0.56, f"quantisation {name} taken as 4 bits and scales"
    return plain, f"quantisation {name} is unknown, taken as none"


def kv_bytes_per_token(shape: ModelShape, dtype: str, layers: int | None = None, tensor: int = 1) -> int:
    """Return the bytes of keys and values of one token in one rank; KV heads repeat beyond their number."""
    heads = max(1, shape.kv_heads // tensor)
    return int(2 * (layers or shape.layers) * heads * shape.head_dim * DTYPE_BYTES[dtype])


def max_len(config: EngineConfig, shape: ModelShape) -> int:
    """Return the longest prompt plus output in tokens."""
    return config.model.max_len or shape.longest


def page_size(config: EngineConfig) -> int:
    """Return the tokens of a KV page."""
    return config.memory.page_size or PAGE_SIZE


def prefill_chunk(config: EngineConfig) -> int:
    """Return the most prompt tokens of one step."""
    return config.memory.prefill_chunk or PREFILL_CHUNK


# --- where rounds run ---


def attention_backend(config: EngineConfig, shape: ModelShape, machine: Machine) -> str:
    """Return the native engine's attention kernels: those asked for, else Triton's where they can run, else torch's.

    Triton's come with rounds that run on the device as a whole; trees, float64 and odd heads have none yet.
    """
    if config.attention.backend != "auto" or config.backend.kind != "native":
        return config.attention.backend
    fits = machine.kind == "cuda" and not any(isinstance(draft, DDTreeDraft) for draft in config.drafts)
    return "triton" if fits and kernels_fit(config, shape, machine) else "torch"


def kernels_fit(config: EngineConfig, shape: ModelShape, machine: Machine) -> bool:
    """Whether the Triton kernels know the model's precision and head dimension."""
    power_of_two = 16 <= shape.head_dim <= 256 and shape.head_dim & (shape.head_dim - 1) == 0
    return power_of_two and compute_dtype(config, shape, machine) in ("bfloat16", "float32")


def rows_behind(config: EngineConfig, shape: ModelShape, machine: Machine) -> int:
    """Return the cache slots that one request needs behind its text.

    Its last round's rows; rounds on a device are launched before the round before them is read, so one round more.
    """
    ahead = config.backend.kind == "native" and attention_backend(config, shape, machine) == "triton"
    return config.reserved_rows * (ROUNDS_BEHIND if ahead else 1)


# --- drafts of a config ---


def draft_paths(config: EngineConfig) -> Iterator[tuple[str, DFlashDraft]]:
    """Yield (dotted path, draft) for every speculative draft of a config: one, or a policy's."""
    if isinstance(config.draft, PolicyDraft):
        for index, (_, _, draft) in enumerate(config.draft.by_running):
            if isinstance(draft, DFlashDraft):
                yield f"draft.by_running.{index}.2", draft
    elif isinstance(config.draft, DFlashDraft):
        yield "draft", config.draft


def draft_at(config: EngineConfig, running: int) -> NoDraft | DFlashDraft:
    """Return the draft that serves `running` requests."""
    if isinstance(config.draft, PolicyDraft):
        for low, high, draft in config.draft.by_running:
            if low <= running and (high is None or running <= high):
                return draft
        raise ConfigError(f"draft.by_running has no range for {running} running requests; start it at 1")
    return config.draft


def draft_layers(config: EngineConfig, draft: DraftShape) -> int:
    """Return the most draft layers that any draft of the config uses."""
    return max((d.layers or draft.layers for _, d in draft_paths(config)), default=draft.layers)
