"""The engine of this repository as a backend, and the one table of what it can do.

`CAPABILITIES` names every optional thing that is built. The server asks `refusals` before it starts and the
tuner before it launches, so a config is refused with the same words in both places.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.backends.base import Answer, Ask, Launch, MetricNames, Probes, RequestStats, RoundCounts
from engine.backends.tokens import answer_by_ids, ask_by_ids
from engine.config import (
    BUNDLED,
    Captured,
    DDTreeDraft,
    EngineConfig,
    LaunchEntry,
    PolicyDraft,
    expanded,
    target_folder,
)
from engine.errors import ConfigError
from engine.estimate import DraftShape, Machine, ModelShape, Refusal, draft_paths
from engine.shape import DynamicRope

VERSION = "0.1.0"  # pyproject.toml says the same; a test compares them

# What this version can do beyond the plain dense, one-device server. Later versions add names here and
# nowhere else; a config or model that needs a name that is not here is refused.
CAPABILITIES: frozenset[str] = frozenset(
    {
        "dflash",
        "ddtree",
        "policy",
        "captured",
        "attention.torch",
        "attention.triton",
    }
)

# name: (what it is called in a message, what to do instead)
_ADVICE: dict[str, tuple[str, str]] = {
    "dflash": ("draft.kind dflash", "use none"),
    "ddtree": ("draft.kind ddtree", "use dflash or none"),
    "policy": ("draft.kind policy", "use one draft for every load"),
    "policy_models": ("several drafter models in one policy", "name the same draft.model in every range"),
    "window": ("a draft window", "set it to null"),
    "captured": ("graphs.kind captured", "use eager"),
    "captured_trees": ("captured rounds of trees", "use eager, or draft.kind dflash or none"),
    "triton_trees": ("trees on the Triton kernels", "use auto, or draft.kind dflash or none"),
    "tensor": ("tensor parallelism", "set it to 1"),
    "data": ("data parallelism", "set it to 1"),
    "expert": ("expert parallelism", "set it to 1"),
    "pipeline": ("pipeline parallelism", "set it to 1"),
    "quantization": ("weight quantisation", "set it to null"),
    "kv_dtype": ("a KV cache in another precision than model.dtype", "set it to auto"),
    "prefix_cache": ("a prefix cache", "set it to false"),
    "moe": ("a mixture-of-experts target", "use a dense Qwen3 or Llama target"),
    "sliding_window": ("a target with sliding-window layers", "use one with full attention"),
    "dynamic_rope": ("rope type dynamic", "use a model with default, linear, llama3 or yarn"),
    "causal_draft": ("a drafter with causal blocks", "use one with is_causal false"),
    "draft_sliding_window": ("a drafter with sliding-window layers", "use one with full attention"),
}


@dataclass(frozen=True)
class Need:
    """A capability that a config or model needs, and the path that asks for it."""

    name: str
    path: str


def _needs(config: EngineConfig) -> Iterator[Need]:
    """Yield every optional capability that `config` asks for."""
    if isinstance(config.draft, PolicyDraft):
        yield Need("policy", "draft.kind")
    if len({draft.model for _, draft in draft_paths(config)}) > 1:
        yield Need("policy_models", "draft.by_running")
    for path, draft in draft_paths(config):
        if isinstance(draft, DDTreeDraft):
            yield Need("ddtree", f"{path}.kind")
            if isinstance(config.graphs, Captured):
                yield Need("captured_trees", f"{path}.kind")
            elif config.attention.backend == "triton":
                yield Need("triton_trees", f"{path}.kind")
        else:
            yield Need("dflash", f"{path}.kind")
        if draft.window is not None:
            yield Need("window", f"{path}.window")
    if isinstance(config.graphs, Captured):
        yield Need("captured", "graphs.kind")
    for name in ("tensor", "data", "expert", "pipeline"):
        if getattr(config.parallel, name) > 1:
            yield Need(name, f"parallel.{name}")
    if config.model.quantization is not None:
        yield Need("quantization", "model.quantization")
    if config.model.kv_dtype not in ("auto", config.model.dtype):
        yield Need("kv_dtype", "model.kv_dtype")
    if config.memory.prefix_cache:
        yield Need("prefix_cache", "memory.prefix_cache")


def _missing(needs: Iterator[Need]) -> Iterator[Refusal]:
    for need in needs:
        if need.name not in CAPABILITIES:
            what, instead = _ADVICE[need.name]
            yield Refusal(need.path, f"the native engine cannot do {what} yet; {instead}")


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def _hub_names(config: EngineConfig) -> Iterator[Refusal]:
    """Yield names that are no folder here but look like a hub's. A missing folder is for the loader."""
    named = [("model.target", config.model.target, target_folder(config))]
    named += [(f"{path}.model", d.model, expanded(d.model)) for path, d in draft_paths(config) if d.model]
    for path, name, folder in named:
        if name != BUNDLED and not folder.exists() and _HUB_NAME.fullmatch(name):
            yield Refusal(
                path,
                f"no folder {name!r} here, and the native engine downloads nothing; "
                f"run `hf download {name} --local-dir DIR` and give DIR",
            )


def refusals(config: EngineConfig, machine: Machine) -> tuple[Refusal, ...]:
    """Return what the native engine cannot do of `config` on `machine`, whatever the model."""
    found = list(_missing(_needs(config)))
    attention = config.attention.backend
    if attention != "auto" and f"attention.{attention}" not in CAPABILITIES:
        known = [
            "auto",
            *sorted(c.removeprefix("attention.") for c in CAPABILITIES if c.startswith("attention.")),
        ]
        found.append(Refusal("attention.backend", f"the native engine has no {attention!r}; use {' or '.join(known)}"))
    if config.model.trust_remote_code:
        found.append(
            Refusal(
                "model.trust_remote_code",
                "the native engine never runs code from a model's folder; set it to false",
            )
        )
    if config.model.revision is not None:
        found.append(
            Refusal("model.revision", "the native engine reads local folders, which have none; set it to null")
        )
    if config.backend.kind != "native":
        found.append(Refusal("backend.kind", f"this is the native engine, and the config is for {config.backend.kind}"))
    elif config.backend.version not in (None, VERSION):
        found.append(Refusal("backend.version", f"this native engine is {VERSION}; set it to null or {VERSION}"))
    if "captured" in CAPABILITIES:
        found.extend(_device_rounds(config, machine))
    found.extend(_hub_names(config))
    return tuple(found)


def _device_rounds(config: EngineConfig, machine: Machine) -> Iterator[Refusal]:
    """Yield what keeps rounds from running on a GPU as a whole, where the config asks for it."""
    captured = isinstance(config.graphs, Captured)
    if machine.kind == "cpu":
        if captured:
            yield Refusal("graphs.kind", "captured graphs need a CUDA GPU and none is visible; use eager")
        if config.attention.backend == "triton":
            yield Refusal("attention.backend", "the Triton kernels need a CUDA GPU and none is visible; use auto")
        return
    if captured and config.attention.backend == "torch":
        yield Refusal("attention.backend", "captured rounds need the Triton kernels; use auto")
    if isinstance(config.graphs, Captured) and config.graphs.batch_sizes[-1] < config.memory.max_running:
        largest, most = config.graphs.batch_sizes[-1], config.memory.max_running
        yield Refusal(
            "graphs.batch_sizes",
            f"a round of up to {most} running requests (memory.max_running) fits no captured size, the largest is "
            f"{largest}; add {most}, or lower memory.max_running to {largest}",
        )


def model_refusals(shape: ModelShape, draft: DraftShape | None = None) -> tuple[Refusal, ...]:
    """Return what of these models the native engine cannot run."""
    needs: list[Need] = []
    if shape.experts is not None:
        needs.append(Need("moe", "model.target"))
    if any(window is not None for window in shape.windows):
        needs.append(Need("sliding_window", "model.target"))
    if shape.quantization is not None:
        needs.append(Need("quantization", "model.target"))
    if isinstance(shape.rope, DynamicRope):
        needs.append(Need("dynamic_rope", "model.target"))
    if draft is not None:
        if any(window is not None for window in draft.core.windows):
            needs.append(Need("draft_sliding_window", "draft.model"))
        elif any(draft.causal):
            needs.append(Need("causal_draft", "draft.model"))
        if draft.core.experts is not None:
            needs.append(Need("moe", "draft.model"))
        if draft.core.quantization is not None:
            needs.append(Need("quantization", "draft.model"))
        if isinstance(draft.core.rope, DynamicRope):
            needs.append(Need("dynamic_rope", "draft.model"))
    found = list(_missing(iter(needs)))
    if draft is not None and draft.extras:
        keys = ", ".join(draft.extras)
        found.append(Refusal("draft.model", f"the native engine cannot do {keys} yet; use a plain DFlash drafter"))
    return tuple(found)


PROBES = Probes()
METRICS = MetricNames(
    running="engine:num_running_reqs",
    waiting="engine:num_queue_reqs",
    generated_tokens="engine:generation_tokens_total",
    kv_usage="engine:token_usage",
    accept_length="engine:spec_accept_length",
    accepted_by_position="engine:spec_accept_rate_by_position",
)


@dataclass(frozen=True)
class Native:
    """`python -m engine serve`, in the interpreter that asks."""

    kind: str = "native"
    probes: Probes = PROBES
    metrics: MetricNames = METRICS

    def command(self, config: EngineConfig, config_path: Path, host: str, port: int) -> Launch:
        """Return the command; the server reads the file at `config_path`."""
        argv = (
            sys.executable,
            "-m",
            "engine",
            "serve",
            str(config_path),
            "--host",
            host,
            "--port",
            str(port),
        )
        return Launch(argv)

    def refusals(self, config: EngineConfig, machine: Machine) -> tuple[Refusal, ...]:
        """See `native.refusals`."""
        return refusals(config, machine)

    def model_refusals(self, shape: ModelShape, draft: DraftShape | None) -> tuple[Refusal, ...]:
        """See `native.model_refusals`."""
        return model_refusals(shape, draft)

    def request_stats(self, body: Mapping[str, Any]) -> RequestStats:
        """Read `spec.accept_length` and `spec.verify_count`, beside `usage`."""
        spec = body.get("spec")
        if not isinstance(spec, Mapping):
            return RequestStats(None, None)
        length, count = spec.get("accept_length"), spec.get("verify_count")
        return RequestStats(
            float(length) if isinstance(length, int | float) else None,
            count if isinstance(count, int) else None,
        )

    def ask(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        """See `tokens.ask_by_ids`."""
        return ask_by_ids(ask)

    def answer(self, ask: Ask, body: Mapping[str, Any]) -> Answer:
        """See `tokens.answer_by_ids`."""
        return answer_by_ids(ask, body, self.request_stats(body))

    def round_counts(self, metrics_text: str) -> RoundCounts | None:
        """Return None: every request tells its own."""
        return None

    def entries(self, config: EngineConfig) -> tuple[LaunchEntry, ...]:
        """Return one server: a policy switches inside it."""
        return (LaunchEntry(config=config),)

    def resolved(self, server_info: Mapping[str, Any]) -> dict[str, Any]:
        """Return `config` of the server's answer."""
        config = server_info.get("config")
        if not isinstance(config, dict):
            raise ConfigError("/server_info holds no config; is this the native engine?")
        return config
