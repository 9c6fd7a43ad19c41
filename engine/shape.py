"""What a model folder's config.json says, as plain numbers: the target's shape and the drafter's. No torch.

Estimates, static checks and the model code all read these dataclasses, so a field has one meaning everywhere.
A feature that only some servers run (experts, sliding windows, a drafter's extra heads) is reported here and
judged by the backend; a family whose arithmetic is unknown raises.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from engine.errors import ModelError, UnsupportedModel

FAMILIES = ("qwen3", "llama", "qwen3_moe")
Dtype = Literal["bfloat16", "float16", "float32", "float64"]
DTYPE_BYTES: dict[str, float] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


@dataclass(frozen=True)
class DefaultRope:
    """Rotary embedding without scaling."""

    kind: ClassVar[str] = "default"
    theta: float


@dataclass(frozen=True)
class LinearRope:
    """Positions divided by `factor`."""

    kind: ClassVar[str] = "linear"
    theta: float
    factor: float


@dataclass(frozen=True)
class DynamicRope:
    """Dynamic NTK: the base grows once the text is longer than `original_positions`."""

    kind: ClassVar[str] = "dynamic"
    theta: float
    factor: float
    original_positions: int


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's frequency-dependent scaling."""

    kind: ClassVar[str] = "llama3"
    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class YarnRope:
    """YaRN (arXiv 2309.00071). `attention_factor` multiplies cos and sin; None = 0.1·ln(factor) + 1."""

    kind: ClassVar[str] = "yarn"
    theta: float
    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


Rope = DefaultRope | LinearRope | DynamicRope | Llama3Rope | YarnRope


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: `layers` of the model's layers have `count` experts, `per_token` of them used."""

    count: int
    per_token: int
    intermediate: int
    layers: int


@dataclass(frozen=True)
class ModelShape:
    """A decoder's dimensions.

    `intermediate` is the dense layers' width. `windows[i]` is layer i's sliding window in tokens, None for
    full attention. `eos` are the token ids in config.json (generation_config.json may name others).
    """

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    dtype: Dtype
    max_position: int
    rope: Rope
    norm_eps: float
    qk_norm: bool
    attention_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    experts: Experts | None = None
    quantization: str | None = None  # of the checkpoint
    eos: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        """Most positions the rotary embedding is made for: prompt plus output, in tokens."""
        match self.rope:
            case YarnRope(factor=factor, original_positions=original):
                return max(self.max_position, int(factor * original))
            case _:
                return self.max_position


@dataclass(frozen=True)
class DraftShape:
    """A DFlash drafter: `core` is its decoder, and it reads the target's residual stream after `taps`.

    `block_size` B is the trained one, root included. `head_rows`: rows of its own output head (with a map
    from draft to target ids), None when it borrows the target's. `causal[i]`: whether block rows of layer i
    see only earlier rows of the block. `extras` are features beyond plain DFlash, by their config keys.
    """

    core: ModelShape
    block_size: int
    taps: tuple[int, ...]
    mask_token_id: int
    target_layers: int | None
    target_hidden: int
    head_rows: int | None
    causal: tuple[bool, ...]
    extras: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        """Decoder layers of the drafter."""
        return self.core.layers

    def mismatch(self, target: ModelShape) -> str | None:
        """Return why this drafter cannot serve `target`, or None when it can."""
        ours = self.core
        if self.target_hidden != target.hidden:
            return f"the drafter reads hidden size {self.target_hidden}, the target has {target.hidden}"
        if ours.hidden != target.hidden:
            return f"the drafter's hidden size is {ours.hidden}, the target's embedding has {target.hidden}"
        if ours.vocab != target.vocab:
            return f"the drafter was trained for vocabulary {ours.vocab}, the target has {target.vocab}"
        if self.target_layers is not None and self.target_layers != target.layers:
            return f"the drafter was trained for {self.target_layers} target layers, this has {target.layers}"
        if max(self.taps) >= target.layers:
            return f"the drafter reads target layer {max(self.taps)}, the last one is {target.layers - 1}"
        if self.mask_token_id >= target.vocab:
            return f"the drafter's mask token {self.mask_token_id} is outside the vocabulary of {target.vocab}"
        return None


def build_target_layer_ids(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """Return the default tapped layers: evenly spread from 1 to `target_layers` − 3 (z-lab's rule)."""
    if draft_layers == 1:
        return (target_layers // 2,)
    step = (target_layers - 4) / (draft_layers - 1)
    return tuple(round(1 + index * step) for index in range(draft_layers))


# --- config.json ---


def _integer(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError("an integer is meant here")
    return value


Dim = Annotated[int, BeforeValidator(_integer), Field(ge=1, le=2**31 - 1)]
Id = Annotated[int, BeforeValidator(_integer), Field(ge=0, le=2**31 - 1)]
Real = Annotated[float, Field(allow_inf_nan=False)]


class _Json(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class _RopeJson(_Json):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: Annotated[Real, Field(gt=0)] | None = None
    factor: Annotated[Real, Field(gt=0)] | None = None
    original_max_position_embeddings: Dim | None = None
    low_freq_factor: Annotated[Real, Field(gt=0)] | None = None
    high_freq_factor: Annotated[Real, Field(gt=0)] | None = None
    beta_fast: Real | None = None
    beta_slow: Real | None = None
    attention_factor: Real | None = None
    mscale: Real | None = None
    mscale_all_dim: Real | None = None
    truncate: bool = True
    partial_rotary_factor: Real | None = None


class _QuantizationJson(_Json):
    quant_method: str = "unknown"


class _DecoderJson(_Json):
    model_type: str
    hidden_size: Dim
    num_hidden_layers: Annotated[Dim, Field(le=4096)]
    num_attention_heads: Dim
    num_key_value_heads: Dim | None = None
    head_dim: Dim | None = None
    intermediate_size: Dim
    vocab_size: Dim
    max_position_embeddings: Dim
    tie_word_embeddings: bool = False
    torch_dtype: str | None = None
    dtype: str | None = None
    rms_norm_eps: Annotated[Real, Field(ge=0)] = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: Annotated[Real, Field(gt=0)] | None = None
    rope_scaling: _RopeJson | None = None
    rope_parameters: _RopeJson | None = None
    partial_rotary_factor: Real | None = None
    use_sliding_window: bool = False
    sliding_window: Dim | None = None
    max_window_layers: Id | None = None
    layer_types: tuple[str, ...] | None = None
    num_experts: Dim | None = None
    num_experts_per_tok: Dim | None = None
    moe_intermediate_size: Dim | None = None
    decoder_sparse_step: Dim = 1
    mlp_only_layers: tuple[Id, ...] | None = None
    quantization_config: _QuantizationJson | None = None
    eos_token_id: Id | tuple[Id, ...] | None = None


class _DraftKeys(_Json):
    """The keys that `dflash_config` may hold and that may also stand at the top level."""

    block_size: Annotated[Dim, Field(ge=2, le=1024)] | None = None
    target_layer_ids: tuple[Id, ...] | None = None
    mask_token_id: Id | None = None
    num_target_layers: Dim | None = None
    is_causal: bool | None = None
    causal: bool | None = None  # the newer spelling of is_causal
    draft_vocab_size: Dim | None = None
    target_hidden_size: Dim | None = None


# Keys of DFlash2, Domino and friends, with the values that leave plain DFlash unchanged.
_OFF = (None, 0, False, "")
_ONE = (None, 1)
_EXTRAS: dict[str, tuple[object, ...]] = {
    "conv_kernel_size": _OFF,
    "conv_group_size": _OFF,
    "selector_rank": _OFF,
    "selector_top_k": _OFF,
    "projector_type": _OFF,
    "output_multiplier": _ONE,
    "final_logit_softcapping": _OFF,
    "attention_sink_bias": _OFF,
    "attention_value_scale": _ONE,
    "input_embedding_scale": _ONE,
    "sample_from_anchor": _OFF,
    "markov_rank": _OFF,
}

Parsed = TypeVar("Parsed", bound=BaseModel)


def _read_json(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; name the folder that holds config.json and *.safetensors")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path}: missing; copy the model's config.json there") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); copy the model's config.json again") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON ({error}); copy the model's config.json again") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path}: expected a JSON object; copy the model's config.json again")
    return document


def _parse(kind: type[Parsed], document: Any, path: Path) -> Parsed:
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "config"
        reason = problem["msg"].removeprefix("Value error, ")
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise ModelError(f"{path}: {where}: {reason}{more}; the file is not this family's config.json") from error


def _rope(document: _DecoderJson, path: Path) -> Rope:
    """Read either spelling: `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    scaling = document.rope_scaling or document.rope_parameters or _RopeJson()
    theta = scaling.rope_theta or document.rope_theta or 10000.0
    partial = scaling.partial_rotary_factor or document.partial_rotary_factor or 1.0
    if partial != 1.0:
        raise UnsupportedModel(
            f"{path}: partial_rotary_factor {partial} is not supported; use a model that rotates whole heads"
        )
    kind = scaling.rope_type or scaling.type or "default"
    if kind == "default":
        return DefaultRope(theta)
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        raise UnsupportedModel(
            f"{path}: rope type {kind!r} is not supported; supported: default, linear, dynamic, llama3, yarn"
        )
    original = scaling.original_max_position_embeddings or document.max_position_embeddings
    factor = scaling.factor
    if factor is None and kind == "yarn":
        factor = document.max_position_embeddings / original
    if factor is None:
        raise ModelError(f"{path}: rope type {kind} needs `factor`; copy the model's config.json again")
    if kind == "linear":
        return LinearRope(theta, factor)
    if kind == "dynamic":
        return DynamicRope(theta, factor, original)
    if kind == "yarn":
        if scaling.mscale and scaling.mscale_all_dim:
            raise UnsupportedModel(f"{path}: yarn with mscale is not supported; use attention_factor")
        return YarnRope(
            theta,
            factor,
            original,
            scaling.beta_fast or 32.0,
            scaling.beta_slow or 1.0,
            scaling.attention_factor,
            scaling.truncate,
        )
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if low is None or high is None or low == high:
        raise ModelError(f"{path}: rope type llama3 needs two different low_freq_factor and high_freq_factor")
    return Llama3Rope(theta, factor, low, high, original)


def _dtype(document: _DecoderJson, path: Path) -> Dtype:
    name = (document.dtype or document.torch_dtype or "float32").removeprefix("torch.")
    if name not in ("bfloat16", "float16", "float32", "float64"):
        raise UnsupportedModel(
            f"{path}: dtype {name!r} is not supported; supported: bfloat16, float16, float32, float64"
        )
    return name  # type: ignore[return-value]


def _windows(document: _DecoderJson, family: str, path: Path) -> tuple[int | None, ...]:
    """Return each layer's sliding window. Llama has none; Qwen3 has one when its config switches it on."""
    layers = document.num_hidden_layers
    types = document.layer_types
    if types is not None and (len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}):
        raise UnsupportedModel(f"{path}: layer_types must name {layers} layers of full_attention or sliding_attention")
    if family == "llama":
        return (None,) * layers
    if types is None:
        first = document.max_window_layers
        slides = document.use_sliding_window and document.sliding_window is not None and first is not None
        return tuple(document.sliding_window if slides and i >= (first or 0) else None for i in range(layers))
    if "sliding_attention" in types and document.sliding_window is None:
        raise ModelError(f"{path}: layer_types names sliding_attention but sliding_window is missing; add it")
    return tuple(document.sliding_window if kind == "sliding_attention" else None for kind in types)


def _experts(document: _DecoderJson, path: Path) -> Experts | None:
    if document.model_type != "qwen3_moe":
        return None
    count, used, width = document.num_experts, document.num_experts_per_tok, document.moe_intermediate_size
    if count is None or used is None or width is None:
        raise ModelError(
            f"{path}: num_experts, num_experts_per_tok, moe_intermediate_size needed; copy config.json again"
        )
    if used > count:
        raise ModelError(f"{path}: num_experts_per_tok {used} exceeds num_experts {count}; copy config.json again")
    dense = set(document.mlp_only_layers or ())
    sparse = [
        i for i in range(document.num_hidden_layers) if i not in dense and (i + 1) % document.decoder_sparse_step == 0
    ]
    return Experts(count, used, width, len(sparse))


def _decoder(raw: Any, path: Path) -> ModelShape:
    family = raw.get("model_type") if isinstance(raw, dict) else None
    if family not in FAMILIES:
        raise UnsupportedModel(f"{path}: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    document = _parse(_DecoderJson, raw, path)
    heads = document.num_attention_heads
    kv_heads = document.num_key_value_heads or heads
    if heads % kv_heads:
        raise ModelError(f"{path}: {heads} heads are not a multiple of {kv_heads} KV heads; copy config.json again")
    head_dim = document.head_dim or (document.hidden_size // heads if family == "llama" else 128)
    if head_dim == 0 or head_dim % 2:
        raise ModelError(f"{path}: head_dim {head_dim} must be even for the rotary embedding; copy config.json again")
    if document.hidden_act != "silu":
        raise UnsupportedModel(f"{path}: hidden_act {document.hidden_act!r} is not supported; supported: silu")
    eos = document.eos_token_id
    return ModelShape(
        family=family,
        hidden=document.hidden_size,
        layers=document.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=document.intermediate_size,
        vocab=document.vocab_size,
        tied=document.tie_word_embeddings,
        dtype=_dtype(document, path),
        max_position=document.max_position_embeddings,
        rope=_rope(document, path),
        norm_eps=document.rms_norm_eps,
        qk_norm=family.startswith("qwen3"),
        attention_bias=document.attention_bias,
        mlp_bias=document.mlp_bias and family == "llama",
        windows=_windows(document, family, path),
        experts=_experts(document, path),
        quantization=document.quantization_config.quant_method if document.quantization_config else None,
        eos=() if eos is None else (eos,) if isinstance(eos, int) else eos,
    )


def read_shape(folder: Path) -> ModelShape:
    """Read a target's config.json (Transformers' spelling, versions 4 and 5).

    Raises:
        ModelError: the folder or file is missing, or its values contradict each other.
        UnsupportedModel: another family, activation, dtype or rotary embedding.
    """
    raw = _read_json(folder)
    if "dflash_config" in raw or "speculators_model_type" in raw:
        raise ModelError(f"{folder}: this is a drafter; name it as draft.model, and its target as model.target")
    return _decoder(raw, folder / "config.json")


def _speculators_decoder(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the nested decoder config; sliding windows may stand beside it and then go first."""
    nested = raw.get("transformer_layer_config")
    if not isinstance(nested, dict):
        raise ModelError(f"{path}: transformer_layer_config is missing; copy the drafter's config.json again")
    windows = ("use_sliding_window", "sliding_window", "layer_types", "max_window_layers")
    return {**nested, **{key: raw[key] for key in windows if raw.get(key) is not None}}


def _speculators_taps(ids: object) -> object:
    """Speculators name the stream *entering* layer i, which is the one after layer i − 1 (vllm-project/vllm#40727)."""
    if isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        return [i - 1 for i in ids]
    return ids


def read_draft_shape(folder: Path) -> DraftShape:
    """Read a DFlash drafter's config.json: z-lab's layout, or speculators' with its own head.

    `dflash_config.X` goes before a top-level X. Without target_layer_ids the default rule applies.

    Raises:
        ModelError: the folder or file is missing, a needed key is absent, or this is no DFlash drafter.
        UnsupportedModel: another family of decoder.
    """
    raw = _read_json(folder)
    path = folder / "config.json"
    speculators = "speculators_model_type" in raw
    if speculators and raw["speculators_model_type"] != "dflash":
        raise UnsupportedModel(
            f"{path}: speculator {raw['speculators_model_type']!r} is not supported; supported: dflash"
        )
    inner = raw.get("dflash_config")
    inner = inner if isinstance(inner, dict) else {}
    if not speculators and "dflash_config" not in raw and "block_size" not in raw:
        raise ModelError(f"{path}: no dflash_config and no block_size, so no DFlash drafter; name the drafter's folder")
    core = _decoder(_speculators_decoder(raw, path) if speculators else raw, path)
    merged = {**raw, **{key: value for key, value in inner.items() if value is not None}}
    if speculators and merged.get("target_layer_ids") is None:
        merged["target_layer_ids"] = _speculators_taps(raw.get("aux_hidden_state_layer_ids"))
    keys = _parse(_DraftKeys, merged, path)
    if keys.block_size is None or keys.mask_token_id is None:
        missing = "block_size" if keys.block_size is None else "mask_token_id"
        raise ModelError(f"{path}: dflash_config.{missing} is missing; add the value the drafter was trained with")
    taps = keys.target_layer_ids
    if not taps and keys.num_target_layers is None:
        raise ModelError(f"{path}: target_layer_ids and num_target_layers are missing; add the trained ones")
    if not taps:
        taps = build_target_layer_ids(keys.num_target_layers or 0, core.layers)
    if min(taps) < 0:
        raise ModelError(
            f"{path}: num_target_layers {keys.num_target_layers} is too small for {core.layers} draft layers"
        )
    causal = keys.causal if keys.is_causal is None else keys.is_causal
    sliding = tuple(window is not None for window in core.windows)
    return DraftShape(
        core=core,
        block_size=keys.block_size,
        taps=taps,
        mask_token_id=keys.mask_token_id,
        target_layers=keys.num_target_layers,
        target_hidden=keys.target_hidden_size or core.hidden,
        head_rows=keys.draft_vocab_size if speculators else None,
        causal=sliding if causal is None else (causal,) * core.layers,
        extras=tuple(key for key, neutral in _EXTRAS.items() if merged.get(key) not in neutral),
    )
