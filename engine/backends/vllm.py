"""vLLM 0.33 as a backend: EngineConfig → options of `vllm serve`. Mapped from its sources, not run here.

vLLM drafts B − 1 tokens for a block of B (`num_speculative_tokens` leaves the root out), counts captured graphs in
rows rather than requests, and switches the draft's length by batch size inside one server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
    precision,
    target_path,
    too_many_gpus,
    unknown_word,
)
from engine.backends.probe import unmapped
from engine.backends.shallow import shallow_name
from engine.backends.tokens import answer_by_ids, ask_by_ids
from engine.config import Captured, DDTreeDraft, DFlashDraft, EngineConfig, LaunchEntry, NoDraft, PolicyDraft
from engine.errors import ConfigError
from engine.estimate import DraftShape, Machine, ModelShape, Refusal, draft_paths

VERSIONS = ("0.33.0",)

METRICS = MetricNames(
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
    generated_tokens="vllm:generation_tokens_total",
    kv_usage="vllm:kv_cache_usage_perc",
    accept_length=None,
    accepted_by_position="vllm:spec_decode_num_accepted_tokens_per_pos_total",
)
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
# /server_info exists only in vLLM's developer mode, which lets every local user call into the workers: not switched
# on here. Without it the config that runs is unknown, and said to be.
PROBES = Probes(health="/health", ready="/health", server_info="/server_info?config_format=json", always_informs=False)
# The words of 0.33's options, without those for other devices than CUDA, and without those that need another option.
ATTENTION = (
    "flash_attn flash_attn_diffkv triton_attn triton_attn_diffkv triton_flash_attn flashinfer triton_flashinfer "
    "flex_attention hpc_attn turboquant ultraquant b12x flash_attn_mla flash_attn_mla_sparse flash_attn_mla_sparse_fa4 "
    "flashinfer_mla flashinfer_mla_sparse flashinfer_mla_sparse_sm90 flashinfer_mla_sparse_sm120 "
    "flashinfer_mla_sparse_dsv4 flashinfer_mla_sparse_dsv41 flashmla flashmla_sparse flashmla_sparse_dsv4 "
    "flashmla_sparse_dsv41 flashmla_mega_attn_dsv41 triton_mla cutlass_mla tokenspeed_mla minimax_m3_sparse "
    "cutlass_msa triton_msa step5_dsa"
)
QUANTIZATION = (
    "awq auto_awq awq_marlin gptq auto_gptq gptq_marlin fp8 fp8_per_tensor fp8_per_block fp8_per_channel "
    "deepseek_v4_fp8 mxfp8 mxfp4 gpt_oss_mxfp4 nvfp4_per_token int8_per_channel_weight_only experts_int8 moe_wna16 "
    "modelopt modelopt_fp4 modelopt_mxfp8 modelopt_mixed compressed-tensors quark torchao inc humming"
)
LEAST_STEP = 2048  # rows of one step that every device has by default


@dataclass(frozen=True)
class VLLM:
    """`vllm serve` of one version; a version that is not in `VERSIONS` is probed with `--help`."""

    version: str
    kind: str = "vllm"
    probes: Probes = PROBES
    metrics: MetricNames = METRICS

    # ------------------------------------------------------------------------------------------------ the command

    def command(self, config: EngineConfig, config_path: Path, host: str, port: int) -> Launch:
        """Return the machine's command with vLLM's options; a shallow drafter is made on the way.

        Raises:
            ConfigError: no command for this version in the machine's file.
            ModelError: `draft.layers`, and the drafter's files cannot be used.
        """
        _, command = find_command(self.kind, self.version)
        options = [*self.options(config, draft_path(config)), ("--host", host), ("--port", port)]
        words = [str(word) for name, *values in options for word in (name, *values)]
        # Both model runners exist and accept differently; every arm runs on the same one.
        env = {"VLLM_USE_V2_MODEL_RUNNER": "1", **command.env}
        return Launch((*command.command, target_path(config), *words), env)

    def options(self, config: EngineConfig, drafter: str) -> list[tuple[Any, ...]]:
        """Return every option with its values, in a fixed order; model, host and port not included.

        `drafter` is what `names.draft_path` returns.
        """
        return [
            *self._model(config),
            *self._parallel(config),
            *self._memory(config),
            *self._graphs(config),
            ("--seed", 0),
            ("--stream-interval", 1),
            ("--enable-chunked-prefill",),
            *self._speculation(config, drafter),
        ]

    def _model(self, config: EngineConfig) -> Iterator[tuple[Any, ...]]:
        model = config.model
        yield "--served-model-name", model.target
        yield "--dtype", model.dtype
        yield "--kv-cache-dtype", "auto" if model.kv_dtype == "float32" else model.kv_dtype
        yield "--load-format", "dummy" if model.load == "dummy" else "auto"
        if model.revision is not None:
            yield "--revision", model.revision
        if model.quantization is not None:
            yield "--quantization", model.quantization
        if model.max_len is not None:
            yield "--max-model-len", model.max_len
        if model.trust_remote_code:
            yield ("--trust-remote-code",)
        if config.attention.backend != "auto":
            yield "--attention-backend", config.attention.backend.upper()

    def _parallel(self, config: EngineConfig) -> Iterator[tuple[Any, ...]]:
        parallel = config.parallel
        yield "--tensor-parallel-size", parallel.tensor
        yield "--data-parallel-size", parallel.data
        yield "--pipeline-parallel-size", parallel.pipeline
        if parallel.expert > 1:
            yield ("--enable-expert-parallel",)

    def _memory(self, config: EngineConfig) -> Iterator[tuple[Any, ...]]:
        memory = config.memory
        yield "--max-num-seqs", memory.max_running
        if memory.kv_fraction is not None:
            yield "--gpu-memory-utilization", memory.kv_fraction
        if memory.page_size is not None:
            yield "--block-size", memory.page_size
        if memory.kv_tokens is not None and memory.page_size is not None:
            yield "--num-gpu-blocks-override", memory.kv_tokens // memory.page_size
        if memory.prefill_chunk is not None:
            yield "--max-num-batched-tokens", memory.prefill_chunk
        yield ("--enable-prefix-caching" if memory.prefix_cache else "--disable-prefix-caching",)

    def _graphs(self, config: EngineConfig) -> Iterator[tuple[Any, ...]]:
        """Decode graphs as asked; steps with prefill run without, in every arm."""
        if isinstance(config.graphs, Captured):
            graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": captured_rows(config)}
            yield "--compilation-config", json.dumps(graphs)
        else:
            yield ("--enforce-eager",)

    def _speculation(self, config: EngineConfig, drafter: str) -> Iterator[tuple[Any, ...]]:
        drafts = [draft for _, draft in draft_paths(config)]
        if not drafts:
            return
        first = drafts[0]
        asked: dict[str, Any] = {
            "method": "dflash",
            "model": drafter,
            "num_speculative_tokens": max(draft.block_size for draft in drafts) - 1,
            "draft_tensor_parallel_size": config.parallel.tensor,
            "rejection_sample_method": "standard",  # lossless
            "draft_sample_method": first.sample,
        }
        if isinstance(config.draft, PolicyDraft):
            asked["num_speculative_tokens_per_batch_size"] = schedule(config)
        yield "--speculative-config", json.dumps(asked)

    def entries(self, config: EngineConfig) -> tuple[LaunchEntry, ...]:
        """Return one server: vLLM changes the draft's length by batch size."""
        return (LaunchEntry(config=config),)

    # ------------------------------------------------------------------------------------------------- refusals

    def refusals(self, config: EngineConfig, machine: Machine) -> tuple[Refusal, ...]:
        """Return what this vLLM cannot do of `config` on `machine`, whatever the model."""
        found = [
            *_refused_draft(config),
            *_refused_policy(config),
            *_refused_values(config),
            *hub_drafts(config, "vLLM"),
            *too_many_gpus(config, machine),
        ]
        if self.version in VERSIONS:
            found += _refused_words(config, f"vLLM {self.version}")
        if machine.kind == "cpu":
            found.append(Refusal("backend.kind", "vLLM is mapped for CUDA GPUs and none is visible; use native"))
        if not found and self.version not in VERSIONS:
            wanted = (name for name, *_ in self.options(config, ""))
            found += unmapped(self.kind, "vLLM", self.version, VERSIONS, wanted, "--help=all")
        return tuple(found)

    def model_refusals(self, shape: ModelShape, draft: DraftShape | None) -> tuple[Refusal, ...]:
        """Return what vLLM would find out only at the first request; the rest it says itself, before it loads."""
        return tuple(last_layer_tapped(shape, draft, "vLLM"))

    # -------------------------------------------------------------------------------------------- what it answers

    def request_stats(self, body: Mapping[str, Any]) -> RequestStats:
        """Return nothing: vLLM counts acceptance for the server, not for a request."""
        return RequestStats(None, None)

    def ask(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        """See `tokens.ask_by_ids`."""
        return ask_by_ids(ask)

    def answer(self, ask: Ask, body: Mapping[str, Any]) -> Answer:
        """See `tokens.answer_by_ids`."""
        return answer_by_ids(ask, body, self.request_stats(body))

    def round_counts(self, metrics_text: str) -> RoundCounts | None:
        """Read drafts and accepted tokens from /metrics; each draft's round yields a bonus token besides."""
        drafts, accepted = counter(metrics_text, DRAFTS), counter(metrics_text, ACCEPTED)
        return None if drafts is None or accepted is None else RoundCounts(drafts + accepted, drafts)

    def resolved(self, server_info: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config that runs, where the server tells it (developer mode).

        Raises:
            ConfigError: the answer is not vLLM's.
        """
        config = server_info.get("vllm_config")
        if not isinstance(config, Mapping):
            raise ConfigError("/server_info holds no vllm_config; is this vLLM?")
        return resolved_config(config)


def captured_rows(config: EngineConfig) -> list[int]:
    """Return the rows of every captured step: running requests × the rows one request verifies at that load.

    A batch is padded up to the next captured size, so each range of a policy reaches one size beyond itself.
    """
    if not isinstance(config.graphs, Captured):
        return []
    sizes = config.graphs.batch_sizes
    rows: set[int] = set()
    for low, high, draft in _ranges(config):
        end = next((size for size in sizes if size >= high), sizes[-1])
        rows |= {size * _rows(draft) for size in sizes if low <= size <= end}
    return sorted(rows)


def schedule(config: EngineConfig) -> list[list[int]]:
    """Return a policy as vLLM's [[from, to, drafted tokens], …], up to max_running."""
    return [
        [low, high, draft.block_size - 1 if isinstance(draft, DFlashDraft) else 0]
        for low, high, draft in _ranges(config)
    ]


def _rows(draft: NoDraft | DFlashDraft) -> int:
    return draft.block_size if isinstance(draft, DFlashDraft) else 1


def _ranges(config: EngineConfig) -> list[tuple[int, int, NoDraft | DFlashDraft]]:
    """Return (from, to, draft) for every load that can occur."""
    most = config.memory.max_running
    if not isinstance(config.draft, PolicyDraft):
        return [(1, most, config.draft)]
    return [(low, min(high or most, most), draft) for low, high, draft in config.draft.by_running if low <= most]


def _refused_draft(config: EngineConfig) -> Iterator[Refusal]:
    for path, draft in draft_paths(config):
        if isinstance(draft, DDTreeDraft):
            yield Refusal(f"{path}.kind", "vLLM has no DDTree; use dflash or none")
        if draft.window is not None:
            yield Refusal(f"{path}.window", "vLLM has no draft window; set it to null")
        if draft.simulate_accept is not None:
            yield Refusal(f"{path}.simulate_accept", "not forced on vLLM; use native or sglang, or set it to null")


def _refused_policy(config: EngineConfig) -> Iterator[Refusal]:
    if not isinstance(config.draft, PolicyDraft):
        return
    drafts = [draft for _, draft in draft_paths(config)]
    if len({(draft.model, draft.layers, draft.sample) for draft in drafts}) > 1:
        yield Refusal(
            "draft.by_running", "vLLM switches only the block's length; give every range the same model, layers, sample"
        )
    if not drafts:
        yield Refusal("draft.by_running", "no range speculates; use draft.kind none")
    if config.parallel.data > 1:
        yield Refusal("parallel.data", "vLLM drops a policy with data parallelism; set it to 1 or use one draft")


def _refused_values(config: EngineConfig) -> Iterator[Refusal]:
    memory, parallel = config.memory, config.parallel
    yield from precision(config, "vLLM")
    if parallel.expert not in (1, parallel.tensor) or (parallel.expert > 1 and parallel.data > 1):
        yield Refusal("parallel.expert", "vLLM spreads experts over every rank or none; use 1, or tensor with data 1")
    if memory.kv_tokens is not None and memory.page_size is None:
        yield Refusal("memory.kv_tokens", "vLLM counts its cache in blocks; set memory.page_size too")
    elif memory.kv_tokens is not None and memory.page_size is not None and memory.kv_tokens % memory.page_size:
        yield Refusal("memory.kv_tokens", f"not a multiple of page_size {memory.page_size}; vLLM counts in blocks")
    step = memory.prefill_chunk or LEAST_STEP
    if step < memory.max_running:
        yield Refusal(
            "memory.prefill_chunk", f"a step of {step} rows is below max_running {memory.max_running}; raise it"
        )
    most = max(captured_rows(config), default=0)
    if most > step:
        yield Refusal(
            "memory.prefill_chunk", f"vLLM drops captured steps of more rows than this, and {most} are asked; raise it"
        )


def _refused_words(config: EngineConfig, server: str) -> Iterator[Refusal]:
    """Yield values of words that 0.33's options do not take; it takes attention kernels in any case of letters."""
    attention, quantization = config.attention.backend.lower(), config.model.quantization or "null"
    yield from unknown_word("attention.backend", attention, "auto", tuple(ATTENTION.split()), server)
    yield from unknown_word("model.quantization", quantization, "null", tuple(QUANTIZATION.split()), server)


# ------------------------------------------------------------------------------------------------- /server_info


def resolved_config(info: Mapping[str, Any]) -> dict[str, Any]:
    """Translate vLLM's own config into the shape of an EngineConfig; what it does not report is absent."""
    model, parallel, cache = (_section(info, f"{name}_config") for name in ("model", "parallel", "cache"))
    scheduler, speculative = _section(info, "scheduler_config"), _section(info, "speculative_config")
    graphs = _section(info, "compilation_config")
    found: dict[str, Any] = {
        "model": present(
            dtype=str(model["dtype"]).removeprefix("torch.") if "dtype" in model else None,
            quantization=model.get("quantization"),
            max_len=model.get("max_model_len"),
            trust_remote_code=model.get("trust_remote_code"),
        ),
        "parallel": present(
            tensor=parallel.get("tensor_parallel_size"),
            data=parallel.get("data_parallel_size"),
            pipeline=parallel.get("pipeline_parallel_size"),
        ),
        "memory": present(
            kv_fraction=cache.get("gpu_memory_utilization"),
            page_size=cache.get("block_size"),
            max_running=scheduler.get("max_num_seqs"),
            prefill_chunk=scheduler.get("max_num_batched_tokens"),
            prefix_cache=cache.get("enable_prefix_caching"),
        ),
        "draft": _draft(speculative),
    }
    mode = graphs.get("cudagraph_mode")
    if mode is not None:
        eager = str(mode).rpartition(".")[2] in ("NONE", "0")
        found["graphs"] = {"kind": "eager" if eager else "captured"}
    return found


def _draft(speculative: Mapping[str, Any]) -> dict[str, Any]:
    if not speculative:
        return {"kind": "none"}
    if speculative.get("num_speculative_tokens_per_batch_size") is not None:
        return {"kind": "policy"}
    folder = str(speculative.get("model"))
    found = {
        "kind": str(speculative.get("method")),
        "model": folder,
        "block_size": int(speculative["num_speculative_tokens"]) + 1,
        "sample": speculative.get("draft_sample_method"),
    }
    if (layers := shallow_name(folder)) is not None:
        found["layers"] = layers
    return found


def _section(info: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = info.get(name)
    return section if isinstance(section, Mapping) else {}
