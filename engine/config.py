"""What a server is: the one typed description that the tuner searches and every backend serves.

`EngineConfig` is frozen and refuses unknown keys. What can be judged from the values alone is judged here;
what depends on the model's shape or the machine is judged by `engine.estimate`, and what a backend version
cannot do by `engine.backends`. Nothing here imports torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from engine.errors import ConfigError
from engine.problems import problems

SCHEMA = 1
PAIR = Path(__file__).parent / "pair"
BUNDLED = "bundled"
MOST_BYTES = 4 * 2**20  # a config has a few kilobytes; a path may be /dev/zero
DEFAULT_MAX_NODES = 63


def _no_boolean(value: object) -> object:
    """YAML reads off, no, on and yes as booleans; where a word or a number is meant, say so."""
    if isinstance(value, bool):
        word = "yes/on/true" if value else "no/off/false"
        raise ValueError(f"YAML read this as a boolean ({word}); a word or number is meant here, so quote it")
    return value


Word = Annotated[str, BeforeValidator(_no_boolean), Field(min_length=1)]
Size = Annotated[PositiveInt, BeforeValidator(_no_boolean)]
Count = Annotated[NonNegativeInt, BeforeValidator(_no_boolean)]
Number = Annotated[float, BeforeValidator(_no_boolean), Field(allow_inf_nan=False)]


class Strict(BaseModel):
    """A frozen model that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Model(Strict):
    """Which weights are served, and in what precision."""

    target: Word = Field(description="Folder or hub name of the target; `bundled` is the pair shipped with the engine.")
    revision: Word | None = Field(None, description="Hub revision of the target.")
    dtype: Annotated[Literal["auto", "bfloat16", "float32", "float64"], BeforeValidator(_no_boolean)] = Field(
        "auto", description="Compute precision; `auto` is the checkpoint's own."
    )
    quantization: Word | None = Field(None, description="Weight quantisation of the backend, such as fp8 or awq.")
    kv_dtype: Annotated[
        Literal["auto", "bfloat16", "float32", "float64", "fp8_e4m3", "fp8_e5m2"], BeforeValidator(_no_boolean)
    ] = Field("auto", description="Precision of the KV cache; `auto` follows `dtype`.")
    max_len: Size | None = Field(None, description="Longest prompt plus output in tokens; null is the model's own.")
    trust_remote_code: bool = Field(False, description="Run Python code found in the model's folder.")
    load: Annotated[Literal["weights", "dummy"], BeforeValidator(_no_boolean)] = Field(
        "weights", description="`dummy` draws random weights: timing only, results are labelled synthetic."
    )


class NoDraft(Strict):
    """No speculation: every round yields one token a request."""

    kind: Literal["none"] = "none"


class DFlashDraft(Strict):
    """A DFlash chain: one bidirectional draft forward proposes `block_size` − 1 tokens."""

    kind: Literal["dflash"] = "dflash"
    model: Word | None = Field(
        None, description="Drafter folder or hub name; null is the one that comes with the target."
    )
    block_size: Annotated[Size, Field(ge=2, le=256)] = Field(
        16,
        description="Rows a request verifies in a round, the root included: block_size − 1 tokens are drafted.",
    )
    layers: Size | None = Field(None, description="Use only the first k draft layers; null uses all.")
    window: Size | None = Field(None, description="Draft attends to this many last context tokens; null to all.")
    sample: Literal["greedy", "probabilistic"] = Field(
        "greedy", description="How a sampled request's drafts are made: likeliest tokens, or drawn like its own."
    )
    simulate_accept: Annotated[Number, Field(ge=1)] | None = Field(
        None, description="Force this mean accept length: timing only, results are labelled synthetic."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.window is not None and self.window < self.block_size:
            raise ValueError(f"window {self.window} is below block_size {self.block_size}")
        if self.simulate_accept is not None and self.simulate_accept > self.longest_path:
            raise ValueError(
                f"simulate_accept {self.simulate_accept} exceeds the {self.longest_path} tokens a round can yield"
            )
        return self

    @property
    def longest_path(self) -> int:
        """Most tokens one round can yield: the drafted path and the bonus token."""
        return self.block_size

    @property
    def verify_rows(self) -> int:
        """Target rows a request computes in one round."""
        return self.block_size


class DDTreeDraft(DFlashDraft):
    """A best-first tree over the same draft forward (DDTree, arXiv 2604.12989)."""

    kind: Literal["ddtree"] = "ddtree"  # type: ignore[assignment]
    nodes: Size | Literal["auto"] = Field(
        31, description="Tree nodes without the root; `auto` grows while expected tokens per second rises."
    )
    width: Size | None = Field(None, description="Most children of one node; null is no limit.")
    max_nodes: Size | None = Field(None, description="Upper bound of `nodes: auto`; null is 63 (64 rows).")

    @model_validator(mode="after")
    def _tree(self) -> Self:
        if self.nodes != "auto" and self.max_nodes is not None:
            raise ValueError("max_nodes belongs to nodes: auto")
        if self.width == 1 and self.verify_rows < self.block_size:
            raise ValueError(f"width 1 is a chain and needs nodes >= block_size − 1 = {self.block_size - 1}")
        return self

    @property
    def verify_rows(self) -> int:
        """Target rows a request computes in one round, at most."""
        nodes = (self.max_nodes or DEFAULT_MAX_NODES) if self.nodes == "auto" else self.nodes
        return nodes + 1


SimpleDraft = Annotated[NoDraft | DFlashDraft | DDTreeDraft, Field(discriminator="kind")]
Range = tuple[Size, Size | None, SimpleDraft]


class PolicyDraft(Strict):
    """Speculation by load: which draft serves how many running requests."""

    kind: Literal["policy"] = "policy"
    by_running: tuple[Range, ...] = Field(
        min_length=1,
        description="[[from, to, draft], …]: inclusive, from 1, without gaps; the last `to` is null.",
    )

    @model_validator(mode="after")
    def _covers_every_load(self) -> Self:
        expected = 1
        for index, (low, high, _) in enumerate(self.by_running):
            if low != expected:
                raise ValueError(f"range {index} starts at {low}, expected {expected}: ranges follow without gaps")
            last = index == len(self.by_running) - 1
            if (high is None) != last:
                raise ValueError("exactly the last range has `to: null`")
            if high is not None:
                if high < low:
                    raise ValueError(f"range {index} is empty: {low} to {high}")
                expected = high + 1
        return self


Draft = Annotated[NoDraft | DFlashDraft | DDTreeDraft | PolicyDraft, Field(discriminator="kind")]


class Eager(Strict):
    """Every round is launched operation by operation."""

    kind: Literal["eager"] = "eager"


class Captured(Strict):
    """Rounds replay CUDA graphs captured at these batch sizes (running requests, padded up)."""

    kind: Literal["captured"] = "captured"
    batch_sizes: tuple[Size, ...] = Field((1, 2, 4, 8), min_length=1, description="Running requests, ascending.")

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if list(self.batch_sizes) != sorted(set(self.batch_sizes)):
            raise ValueError(f"batch_sizes must ascend without repeats: {list(self.batch_sizes)}")
        return self


Graphs = Annotated[Eager | Captured, Field(discriminator="kind")]


class Parallel(Strict):
    """How many GPUs one replica spans, and how."""

    tensor: Size = Field(1, description="Tensor-parallel ranks.")
    data: Size = Field(1, description="Data-parallel replicas behind one endpoint.")
    expert: Size = Field(1, description="Expert-parallel ranks.")
    pipeline: Size = Field(1, description="Pipeline stages.")

    @model_validator(mode="after")
    def _expert_within_tensor(self) -> Self:
        if self.tensor % self.expert:
            raise ValueError(f"expert {self.expert} must divide tensor {self.tensor}")
        return self

    @property
    def gpus(self) -> int:
        """GPUs the server occupies."""
        return self.tensor * self.data * self.pipeline


class Memory(Strict):
    """KV cache and admission."""

    kv_fraction: Annotated[Number, Field(gt=0, lt=1)] | None = Field(
        None, description="Share of device memory for weights and KV cache."
    )
    kv_tokens: Size | None = Field(None, description="KV cache size in tokens.")
    page_size: Size | None = Field(None, description="Tokens in a KV page; null is the backend's own.")
    max_running: Size = Field(16, description="Most requests decoded at once; set alike in every arm of a comparison.")
    prefill_chunk: Size | None = Field(
        None, description="Most prompt tokens computed in one step; null is the backend's own."
    )
    prefix_cache: bool = Field(False, description="Reuse the KV of a shared prefix.")

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.kv_fraction is not None and self.kv_tokens is not None:
            raise ValueError("kv_fraction and kv_tokens exclude each other")
        return self


class Attention(Strict):
    """Which attention kernels run."""

    backend: Word = Field("auto", description="auto, or a name of the backend: torch, triton, flashinfer, fa3 …")


class Backend(Strict):
    """Which server runs the config."""

    kind: Annotated[Literal["native", "sglang", "vllm"], BeforeValidator(_no_boolean)] = "native"
    version: Word | None = Field(None, description="Version of the server; null is the one installed.")


class EngineConfig(Strict):
    """One server, completely. The tuner searches dotted paths of this type."""

    model: Model
    draft: Draft = NoDraft()
    graphs: Graphs = Eager()
    parallel: Parallel = Parallel()
    memory: Memory = Memory()
    attention: Attention = Attention()
    backend: Backend = Backend()

    @model_validator(mode="after")
    def _graphs_cover_the_load(self) -> Self:
        if isinstance(self.graphs, Captured) and self.graphs.batch_sizes[-1] > self.memory.max_running:
            raise ValueError(
                f"graphs.batch_sizes reaches {self.graphs.batch_sizes[-1]}, "
                f"but memory.max_running is {self.memory.max_running}"
            )
        return self

    @property
    def drafts(self) -> tuple[NoDraft | DFlashDraft | DDTreeDraft, ...]:
        """Every draft this server may run: one, or a policy's."""
        if isinstance(self.draft, PolicyDraft):
            return tuple(draft for _, _, draft in self.draft.by_running)
        return (self.draft,)

    @property
    def verify_rows(self) -> int:
        """Most target rows one request computes in one round."""
        return max((draft.verify_rows for draft in self.drafts if isinstance(draft, DFlashDraft)), default=1)

    @property
    def reserved_rows(self) -> int:
        """Most cache slots behind its tokens that one request needs in a round: verified rows, or the draft block."""
        blocks = (draft.block_size for draft in self.drafts if isinstance(draft, DFlashDraft))
        return max(self.verify_rows, *blocks, 1)

    @property
    def synthetic(self) -> bool:
        """Whether text and acceptance mean nothing: dummy weights or forced acceptance."""
        forced = any(d.simulate_accept is not None for d in self.drafts if isinstance(d, DFlashDraft))
        return forced or self.model.load == "dummy"


class LaunchEntry(Strict):
    """One server of a launch file, for the running-request range [first, last]."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, serialize_by_alias=True)

    first: Size = Field(1, alias="from")
    last: Size | None = Field(None, alias="to")
    config: EngineConfig

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.last is not None and self.last < self.first:
            raise ValueError(f"the range is empty: {self.first} to {self.last}")
        return self


class LaunchStudy(Strict):
    """Where a launch file comes from."""

    name: str
    trial: int
    digest: str


class LaunchDeploy(Strict):
    """How many servers a launch file stands for, where they answer, and on which GPUs."""

    replicas: Size = 1
    endpoint: str | None = None
    gpus: tuple[Count, ...] | None = None


class LaunchFile(Strict):
    """`launch.yaml`: what to serve, what to expect of it, and which study says so."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, serialize_by_alias=True)

    schema_: Annotated[Literal[1], BeforeValidator(_no_boolean)] = Field(1, alias="schema")
    entries: tuple[LaunchEntry, ...] = Field(min_length=1)
    expected: dict[Size, dict[str, tuple[Number, Number]]] = Field(
        default_factory=dict, description="By concurrency: metric name to its interval."
    )
    synthetic: bool = False
    study: LaunchStudy | None = None
    deploy: LaunchDeploy | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        expected_first = 1
        for index, entry in enumerate(self.entries):
            if entry.first != expected_first:
                raise ValueError(f"entry {index} starts at {entry.first}, expected {expected_first}: no gaps")
            if entry.last is None and index < len(self.entries) - 1:
                raise ValueError(f"entry {index} has no `to`; only the last entry may be without")
            expected_first = (entry.last or 0) + 1
        for concurrency, metrics in self.expected.items():
            for name, (low, high) in metrics.items():
                if low > high:
                    raise ValueError(f"expected.{concurrency}.{name}: the interval {low} to {high} is empty")
        return self


def bundled() -> EngineConfig:
    """Return the config that serves the bundled pair without speculation."""
    return EngineConfig(model=Model(target=BUNDLED))


def expanded(path: str) -> Path:
    """Return a path with its `~` expanded; a home that nobody has stays as it is written, and is then missing."""
    return Path(os.path.expanduser(path))  # Path.expanduser raises for such a home


def target_folder(config: EngineConfig) -> Path:
    """Return the folder of the target's files (`bundled` resolved)."""
    return PAIR / "target" if config.model.target == BUNDLED else expanded(config.model.target)


def draft_folder(config: EngineConfig, draft: DFlashDraft) -> Path:
    """Return the folder of a draft's files: named by the config, else the one that comes with the target."""
    if draft.model is not None and draft.model != BUNDLED:
        return expanded(draft.model)
    if config.model.target == BUNDLED or draft.model == BUNDLED:
        return PAIR / "draft"
    return target_folder(config) / "draft"


def explain(error: ValidationError, root: type[BaseModel] = EngineConfig) -> list[str]:
    """Return one line per problem: dotted path, what is wrong, and the field probably meant."""
    return [f"{path or root.__name__}: {message}" for path, message in explain_paths(error, root)]


def explain_paths(error: ValidationError, root: type[BaseModel] = EngineConfig) -> list[tuple[str, str]]:
    """Return (dotted path, message with hint) per problem of a validation error."""
    return problems(error, root)


def field_names(root: type[BaseModel] = EngineConfig) -> list[str]:
    """Return every field name that occurs in `root`'s JSON schema (for hints)."""
    schema = root.model_json_schema()
    names = set(schema.get("properties", {}))
    for definition in schema.get("$defs", {}).values():
        names |= set(definition.get("properties", {}))
    return sorted(names)


def read_yaml(path: Path) -> Any:
    """Return the document of a YAML file.

    Raises:
        ConfigError: the file cannot be read, is far too long, is not YAML, or gives a key twice.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ConfigError(f"{path}: longer than {MOST_BYTES // 2**20} MiB; is this the right file?")
        text = data.decode("utf-8")
        twice = _repeated_key(yaml.compose(text, Loader=yaml.SafeLoader))
        if twice is not None:
            raise ConfigError(f"{path}:{twice.start_mark.line + 1}: {twice.value!r} stands twice; remove one")
        return yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error


def _repeated_key(root: yaml.Node | None) -> yaml.ScalarNode | None:
    """Return a key that a mapping has twice: YAML takes the last without a word."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
            continue
        seen.add(id(node))  # an alias is the same node again
        if isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in keys:
                        return key
                    keys.add(key.value)
                waiting.append(value)
        else:
            waiting.extend(node.value)
    return None


def load_launch(path: Path) -> LaunchFile:
    """Read a launch file, or a bare EngineConfig as a launch file of one entry.

    Raises:
        ConfigError: unreadable, not YAML, or not a valid config; one line per problem.
    """
    document = read_yaml(path)
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected a mapping with `model:` (an EngineConfig) or `entries:` (a launch file)")
    try:
        if "entries" in document:
            return LaunchFile.model_validate(document)
        schema = document.pop("schema", SCHEMA)
        if schema != SCHEMA or isinstance(schema, bool):
            raise ConfigError(f"{path}: schema {schema!r} is unknown, this version reads schema {SCHEMA}")
        return LaunchFile(entries=(LaunchEntry(config=EngineConfig.model_validate(document)),))
    except ValidationError as error:
        root = LaunchFile if "entries" in document else EngineConfig
        raise ConfigError(f"{path}: " + "; ".join(explain(error, root))) from error
