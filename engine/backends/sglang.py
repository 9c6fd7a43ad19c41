"""SGLang as a backend: EngineConfig → options of `sglang serve`, with everything it would change silently pinned.

An option that SGLang would fill in by itself, differently with and without speculation, is always given: the cap on
running requests (48 with speculation), the prefill delay (on with DFLASH), the drafter's quantisation (the target's),
acceptance thresholds (1 = lossless). `resolved` compares what runs with what was pinned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.backends.base import (
    Answer,
    Ask,
    Launch,
    MetricNames,
    Probes,
    RequestStats,
    RoundCounts,
    counter,
    present,
)
from engine.backends.commands import find_command
from engine.backends.names import (
    draft_path,
    hub_drafts,
    last_layer_tapped,
    one_of,
    precision,
    target_path,
    too_many_gpus,
    unknown_word,
)
from engine.backends.probe import unmapped
from engine.backends.sglang_tokens import answer_generate, ask_generate
from engine.backends.sglang_versions import NEWEST, VERSIONS, Version
from engine.backends.shallow import shallow_name
from engine.config import Captured, DDTreeDraft, DFlashDraft, EngineConfig, LaunchEntry, PolicyDraft
from engine.errors import ConfigError
from engine.estimate import DraftShape, Machine, ModelShape, Refusal, draft_paths

# The drafter's layers are ordinary attention: these run them, anything else SGLang replaces by flashinfer.
DRAFT_ATTENTION = ("flashinfer", "fa3", "fa4", "triton")

# option: (value, name in /server_info). Given to every server, with and without speculation.
PINS: Mapping[str, tuple[Any, str]] = {
    "--min-free-slots-delay": (1, "min_free_slots_delay"),  # 1 is off; DFLASH would delay admissions (TTFT)
    "--moe-a2a-backend": ("none", "moe_a2a_backend"),  # the others set ep = tp
    "--random-seed": (0, "random_seed"),
    "--stream-interval": (1, "stream_interval"),  # a chunk a round, so that arrivals mean something
}
# Given with speculation.
SPECULATIVE_PINS: Mapping[str, tuple[Any, str]] = {
    "--speculative-num-steps": (1, "speculative_num_steps"),
    "--speculative-eagle-topk": (1, "speculative_eagle_topk"),
    "--speculative-accept-threshold-single": (1.0, "speculative_accept_threshold_single"),  # below 1 is lossy
    "--speculative-accept-threshold-acc": (1.0, "speculative_accept_threshold_acc"),
}
# What has no pin because its default is meant, but must run as that default.
DEFAULTS: Mapping[str, Any] = {"enable_mixed_chunk": False, "speculative_adaptive": False, "enable_dp_attention": False}

METRICS = MetricNames(
    running="sglang:num_running_reqs",
    waiting="sglang:num_queue_reqs",
    generated_tokens="sglang:generation_tokens_total",
    kv_usage="sglang:token_usage",
    accept_length="sglang:spec_accept_length",
    accepted_by_position=None,
)
FORCED_ACCEPT = "SGLANG_SIMULATE_ACC_LEN"
VERIFY_CALLS, REQUESTS = "sglang:spec_verify_calls_total", "sglang:num_requests_total"


@dataclass(frozen=True)
class SGLang:
    """`sglang serve` of one version. `table` None: a version that no table describes; it is probed with `--help`."""

    version: str
    table: Version | None
    kind: str = "sglang"
    metrics: MetricNames = METRICS
    probes: Probes = field(init=False)

    def __post_init__(self) -> None:
        ready = (self.table or NEWEST).ready
        object.__setattr__(self, "probes", Probes(health="/model_info", ready=ready))

    # ------------------------------------------------------------------------------------------------ the command

    def command(self, config: EngineConfig, config_path: Path, host: str, port: int) -> Launch:
        """Return the machine's command with SGLang's options; a shallow drafter is made on the way.

        Raises:
            ConfigError: no command for this version in the machine's file.
            ModelError: `draft.layers`, and the drafter's files cannot be used.
        """
        _, command = find_command(self.kind, self.version)
        options = [*self.options(config, draft_path(config)), ("--host", host), ("--port", port)]
        words = [str(word) for name, *values in options for word in (name, *values)]
        forced = config.draft.simulate_accept if isinstance(config.draft, DFlashDraft) else None
        # Below 0 is off: acceptance that this shell or the machine's file forces would pass for the drafter's.
        env = {**command.env, FORCED_ACCEPT: str(-1 if forced is None else forced)}
        return Launch((*command.command, *words), env)

    def options(self, config: EngineConfig, drafter: str) -> list[tuple[Any, ...]]:
        """Return every option with its values, in a fixed order; host and port not included.

        `drafter` is what `names.draft_path` returns.
        """
        return [
            *self._model(config),
            *self._parallel(config),
            *self._memory(config),
            *self._graphs(config),
            *((name, value) for name, (value, _) in PINS.items()),
            ("--enable-metrics",),
            *(self._draft(config, config.draft, drafter) if isinstance(config.draft, DFlashDraft) else ()),
        ]

    def _model(self, config: EngineConfig) -> Iterator[tuple[Any, ...]]:
        model = config.model
        yield "--model-path", target_path(config)
        yield "--served-model-name", model.target
        yield "--dtype", model.dtype
        yield "--kv-cache-dtype", _kv_dtype(config)
        yield "--load-format", _load_format(config)
        if model.revision is not None:
            yield "--revision", model.revision
        if model.quantization is not None:
            yield "--quantization", model.quantization
        if model.max_len is not None:
            yield "--context-length", model.max_len
        if model.trust_remote_code:
            yield ("--trust-remote-code",)
        if config.attention.backend != "auto":
            yield "--attention-backend", config.attention.backend

    def _parallel(self, config: EngineConfig) -> Iterator[tuple[Any, ...]]:
        parallel = config.parallel
        yield "--tp-size", parallel.tensor
        yield "--dp-size", parallel.data
        yield "--ep-size", parallel.expert
        yield "--pp-size", parallel.pipeline

    def _memory(self, config: EngineConfig) -> Iterator[tuple[Any, ...]]:
        memory = config.memory
        yield "--max-running-requests", memory.max_running
        if memory.kv_fraction is not None:
            yield "--mem-fraction-static", memory.kv_fraction
        if memory.kv_tokens is not None:
            yield "--max-total-tokens", memory.kv_tokens
        if memory.page_size is not None:
            yield "--page-size", memory.page_size
        if memory.prefill_chunk is not None:
            yield "--chunked-prefill-size", memory.prefill_chunk
        if not memory.prefix_cache:
            yield ("--disable-radix-cache",)

    def _graphs(self, config: EngineConfig) -> Iterator[tuple[Any, ...]]:
        """Decode graphs as asked. Prefill graphs are off in every arm: they are not part of a round, and crash some."""
        if isinstance(config.graphs, Captured):
            yield "--cuda-graph-backend-decode", "full"
            yield "--cuda-graph-bs-decode", *config.graphs.batch_sizes
        else:
            yield "--cuda-graph-backend-decode", "disabled"
        yield "--cuda-graph-backend-prefill", "disabled"

    def _draft(self, config: EngineConfig, draft: DFlashDraft, drafter: str) -> Iterator[tuple[Any, ...]]:
        yield "--speculative-algorithm", "DFLASH"
        yield "--speculative-draft-model-path", drafter
        yield "--speculative-num-draft-tokens", draft.block_size  # SGLang counts the root, as block_size does
        yield "--speculative-draft-model-quantization", "unquant"  # it would inherit the target's
        yield "--speculative-draft-load-format", _load_format(config)
        if draft.window is not None:
            yield "--speculative-draft-window-size", draft.window
        if config.attention.backend != "auto":
            yield "--speculative-draft-attention-backend", _draft_attention(config)
        if (option := (self.table or NEWEST).draft_kv_dtype) is not None:
            yield option, _kv_dtype(config)
        yield from ((name, value) for name, (value, _) in SPECULATIVE_PINS.items())

    def entries(self, config: EngineConfig) -> tuple[LaunchEntry, ...]:
        """Return one server, or one a range of a policy: SGLang cannot switch its DFlash draft while it runs."""
        if not isinstance(config.draft, PolicyDraft):
            return (LaunchEntry(config=config),)
        return tuple(
            LaunchEntry(first=low, last=high, config=config.model_copy(update={"draft": draft}))
            for low, high, draft in config.draft.by_running
        )

    # ------------------------------------------------------------------------------------------------- refusals

    def refusals(self, config: EngineConfig, machine: Machine) -> tuple[Refusal, ...]:
        """Return what this SGLang cannot do of `config` on `machine`, whatever the model."""
        found = [
            *self._refused_draft(config, machine),
            *self._refused_values(config),
            *_refused_parallel(config),
            *too_many_gpus(config, machine),
            *precision(config, "SGLang"),
        ]
        if isinstance(config.graphs, Captured) and machine.kind == "cpu":
            found.append(Refusal("graphs.kind", "captured graphs need a CUDA GPU and none is visible; use eager"))
        if not found and self.table is None:
            wanted = (name for name, *_ in self.options(config, ""))
            found += unmapped(self.kind, "SGLang", self.version, tuple(VERSIONS), wanted)
        return tuple(found)

    def _refused_draft(self, config: EngineConfig, machine: Machine) -> Iterator[Refusal]:
        if isinstance(config.draft, PolicyDraft):
            yield Refusal(
                "draft.kind",
                "SGLang cannot switch drafts while it runs; search its ranges one by one, and deploy one entry of "
                "launch.yaml a range",
            )
        for path, draft in draft_paths(config):
            if isinstance(draft, DDTreeDraft):
                yield Refusal(f"{path}.kind", "SGLang has no DDTree; use dflash or none")
            if draft.sample != "greedy":
                yield Refusal(f"{path}.sample", "SGLang drafts the likeliest tokens only; use greedy")
        if any(draft_paths(config)) and machine.kind == "cpu":
            yield Refusal("draft.kind", "SGLang runs DFLASH on CUDA GPUs only and none is visible; use none")
        yield from hub_drafts(config, "SGLang")

    def _refused_values(self, config: EngineConfig) -> Iterator[Refusal]:
        """Yield words that the options of a version with a table do not take, and page sizes that would not hold."""
        attention, page, chunk = config.attention.backend, config.memory.page_size, config.memory.prefill_chunk
        if (table := self.table) is not None:
            server, quantization = f"SGLang {table.name}", config.model.quantization or "null"
            yield from unknown_word("attention.backend", attention, "auto", table.attention, server)
            yield from unknown_word("model.quantization", quantization, "null", table.quantization, server)
            pages = table.pages.get(attention, ())
            if page is not None and pages and page not in pages:
                reason = f"SGLang would replace {page} for attention {attention}; use {one_of(pages)}"
                yield Refusal("memory.page_size", reason)
        if page is not None and chunk is not None and chunk % page:
            yield Refusal("memory.prefill_chunk", f"SGLang needs a multiple of page_size {page}, not {chunk}")

    def model_refusals(self, shape: ModelShape, draft: DraftShape | None) -> tuple[Refusal, ...]:
        """Return what of these models is not served: drafters are pinned unquantised, and see no last layer."""
        found = list(last_layer_tapped(shape, draft, "SGLang"))
        if draft is not None and draft.core.quantization is not None:
            found.append(
                Refusal(
                    "draft.model",
                    f"the drafter is quantised ({draft.core.quantization}) and would be loaded as if it were not; "
                    "use a bfloat16 drafter",
                )
            )
        return tuple(found)

    # -------------------------------------------------------------------------------------------- what it answers

    def request_stats(self, body: Mapping[str, Any]) -> RequestStats:
        """Read a request's verify rounds where an answer carries them (meta_info, or sglext).

        SGLang's own length divides all tokens by the rounds; the first token is the prefill's and no round's.
        """
        for holder in _holders(body):
            count, usage = holder.get("spec_verify_ct"), body.get("usage")
            tokens = holder.get("completion_tokens") or (usage or {}).get("completion_tokens")
            if isinstance(count, int) and count > 0 and isinstance(tokens, int):
                return RequestStats((tokens - 1) / count, count)
        return RequestStats(None, None)

    def ask(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        """See `sglang_tokens.ask_generate`."""
        return ask_generate(ask)

    def answer(self, ask: Ask, body: Mapping[str, Any]) -> Answer:
        """See `sglang_tokens.answer_generate`."""
        return answer_generate(ask, body, self.request_stats(body))

    def round_counts(self, metrics_text: str) -> RoundCounts | None:
        """Read tokens and verify rounds of all finished requests from /metrics, without each request's first token."""
        tokens, rounds, requests = (
            counter(metrics_text, name) for name in (self.metrics.generated_tokens, VERIFY_CALLS, REQUESTS)
        )
        if tokens is None or requests is None:
            return None
        return RoundCounts(tokens - requests, rounds or 0.0)  # the rounds' counter appears with the first one

    def resolved(self, server_info: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config that runs, and under `pins` what was pinned and runs otherwise.

        Raises:
            ConfigError: the answer is not SGLang's.
        """
        if "model_path" not in server_info or "max_running_requests" not in server_info:
            raise ConfigError("/server_info holds no server arguments; is this SGLang?")
        return resolved_config(server_info) | {"pins": self._pins(server_info)}

    def _pins(self, info: Mapping[str, Any]) -> dict[str, Any]:
        speculative = info.get("speculative_algorithm") is not None
        wanted = {name: value for value, name in PINS.values()} | dict(DEFAULTS) | {"version": self.version}
        if speculative:
            wanted |= {name: value for value, name in SPECULATIVE_PINS.values()}
            wanted["speculative_algorithm"] = "DFLASH"
            wanted["speculative_draft_model_quantization"] = None  # unquant, as SGLang reports it
        return {
            name: {"pinned": value, "runs": info[name]}
            for name, value in wanted.items()
            if name in info and info[name] != value
        }


def _holders(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the places where SGLang's endpoints put a request's statistics."""
    choices = body.get("choices")
    places = [body, *(choices if isinstance(choices, list) else ())]
    for place in places:
        if not isinstance(place, Mapping):
            continue
        if isinstance(meta := place.get("meta_info"), Mapping):
            yield meta
        extension = place.get("sglext")
        if isinstance(extension, Mapping) and isinstance(details := extension.get("spec_tokens_details"), Mapping):
            yield details


def _kv_dtype(config: EngineConfig) -> str:
    """Return SGLang's word; float32 has none, and is `auto` beside dtype float32."""
    return "auto" if config.model.kv_dtype == "float32" else config.model.kv_dtype


def _load_format(config: EngineConfig) -> str:
    return "dummy" if config.model.load == "dummy" else "auto"


def _draft_attention(config: EngineConfig) -> str:
    asked = config.attention.backend
    return asked if asked in DRAFT_ATTENTION else "flashinfer"


def _refused_parallel(config: EngineConfig) -> Iterator[Refusal]:
    parallel = config.parallel
    if parallel.expert not in (1, parallel.tensor):
        yield Refusal(
            "parallel.expert", f"SGLang needs 1 or parallel.tensor ({parallel.tensor}), not {parallel.expert}"
        )
    if parallel.pipeline > 1 and any(draft_paths(config)):
        yield Refusal("parallel.pipeline", "SGLang runs DFLASH without pipeline stages only; set it to 1")


# ------------------------------------------------------------------------------------------------- /server_info


def resolved_config(info: Mapping[str, Any]) -> dict[str, Any]:
    """Translate SGLang's arguments into the shape of an EngineConfig; what it does not report is absent."""
    graphs = info.get("cuda_graph_config")
    decode = graphs.get("decode") if isinstance(graphs, Mapping) else None
    captured = isinstance(decode, Mapping) and decode.get("backend") != "disabled"
    draft: dict[str, Any] = {"kind": "none"}
    if info.get("speculative_algorithm") is not None:
        folder = str(info.get("speculative_draft_model_path"))
        draft = {
            "kind": str(info["speculative_algorithm"]).lower(),
            "model": folder,
            "block_size": info.get("speculative_num_draft_tokens"),
            "window": info.get("speculative_draft_window_size"),
        }
        if (layers := shallow_name(folder)) is not None:
            draft["layers"] = layers
    kv_dtype = info.get("kv_cache_dtype")
    found: dict[str, Any] = {
        "model": present(
            target=info.get("served_model_name"),
            revision=info.get("revision"),
            dtype=info.get("dtype"),
            quantization=info.get("quantization"),
            kv_dtype=info.get("dtype") if kv_dtype == "auto" else kv_dtype,
            max_len=info.get("context_length"),
            trust_remote_code=info.get("trust_remote_code"),
            load="dummy" if info.get("load_format") == "dummy" else "weights",
        ),
        "draft": draft,
        "parallel": present(
            tensor=info.get("tp_size"),
            data=info.get("dp_size"),
            expert=info.get("ep_size"),
            pipeline=info.get("pp_size"),
        ),
        "memory": present(
            kv_fraction=info.get("mem_fraction_static"),
            kv_tokens=_kv_tokens(info),
            page_size=info.get("page_size"),
            max_running=info.get("max_running_requests"),
            prefill_chunk=info.get("chunked_prefill_size"),
            prefix_cache=not info["disable_radix_cache"] if "disable_radix_cache" in info else None,
        ),
        "attention": present(backend=info.get("attention_backend")),
        "backend": present(kind="sglang", version=info.get("version")),
    }
    if captured and isinstance(decode, Mapping):
        found["graphs"] = {"kind": "captured", "batch_sizes": decode.get("bs")}
    elif decode is not None:
        found["graphs"] = {"kind": "eager"}
    return found


def _kv_tokens(info: Mapping[str, Any]) -> int | None:
    """Return the cache's size: the one asked for when that many whole pages are there, else what is there."""
    runs, asked, page = info.get("max_total_num_tokens"), info.get("max_total_tokens"), info.get("page_size") or 1
    if isinstance(runs, int) and isinstance(asked, int) and runs // page == asked // page:
        return asked
    return runs if isinstance(runs, int) else None
