"""vLLM 0.33: golden command lines, units that differ, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine import backends
from engine.backends import VLLM
from engine.backends.vllm import captured_rows, schedule
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.estimate import cpu_machine, gpu
from tests.engine.backends.golden import FOLDER, argv_text, known_options, machine_file, options_used

__all__ = ["machine_file"]

H200 = gpu("H200", devices=8)
POLICY = {
    "kind": "policy",
    "by_running": [
        [1, 4, {"kind": "dflash", "block_size": 16}],
        [5, 16, {"kind": "dflash", "block_size": 8}],
        [17, None, {"kind": "none"}],
    ],
}
CAPTURED = {"kind": "captured", "batch_sizes": [1, 2, 4, 8, 16, 32]}
CONFIGS: dict[str, dict[str, Any]] = {
    "dflash": {
        "model": {"target": "Qwen/Qwen3-8B", "max_len": 8192, "trust_remote_code": True},
        "draft": {"kind": "dflash", "model": "z-lab/Qwen3-8B-DFlash-b16", "block_size": 16},
        "graphs": {"kind": "captured", "batch_sizes": [1, 4, 16]},
        "memory": {"kv_tokens": 65536, "page_size": 16, "prefill_chunk": 8192, "prefix_cache": True},
        "parallel": {"tensor": 2},
        "attention": {"backend": "flash_attn"},
    },
    "policy": {
        "model": {"target": "bundled"},
        "draft": POLICY,
        "graphs": CAPTURED,
        "memory": {"max_running": 32, "kv_fraction": 0.8},
    },
    "none": {"model": {"target": "bundled", "load": "dummy"}, "parallel": {"tensor": 4, "expert": 4}},
}


def config(raw: dict[str, Any], **sections: Any) -> EngineConfig:
    return EngineConfig.model_validate({**raw, "backend": {"kind": "vllm", "version": "0.33.0"}, **sections})


@pytest.mark.usefixtures("machine_file")
@pytest.mark.parametrize("name", CONFIGS)
def test_golden_command(name: str) -> None:
    asked = config(CONFIGS[name])
    assert backends.get(asked).refusals(asked, H200) == ()
    assert argv_text(asked) == (FOLDER / f"vllm-0.33.0-{name}.txt").read_text(encoding="utf-8")
    assert set(options_used(asked)) <= known_options("vllm-0.33.0")


def test_a_block_of_b_drafts_one_less() -> None:
    options = dict(pair for pair in VLLM("0.33.0").options(config(CONFIGS["dflash"]), "d") if len(pair) == 2)
    speculative = json.loads(options["--speculative-config"])
    assert speculative["num_speculative_tokens"] == 15
    assert speculative["rejection_sample_method"] == "standard"


def test_captured_sizes_count_rows() -> None:
    assert captured_rows(config(CONFIGS["dflash"])) == [16, 64, 256]
    assert captured_rows(config(CONFIGS["none"])) == []
    # 1-4 requests verify 16 rows each, 5-16 verify 8, more verify 1: each range up to a captured size that holds it.
    assert captured_rows(config(CONFIGS["policy"])) == [16, 32, 64, 128]
    open_end = {**POLICY, "by_running": [[1, 3, POLICY["by_running"][0][2]], [4, None, {"kind": "none"}]]}
    assert captured_rows(config(CONFIGS["policy"], draft=open_end)) == [4, 8, 16, 32, 64]


def test_a_policy_is_a_schedule_by_batch_size() -> None:
    assert schedule(config(CONFIGS["policy"])) == [[1, 4, 15], [5, 16, 7], [17, 32, 0]]
    assert schedule(config(CONFIGS["policy"], memory={"max_running": 32})) == [[1, 4, 15], [5, 16, 7], [17, 32, 0]]
    small = config({"model": {"target": "bundled"}, "draft": POLICY, "memory": {"max_running": 8}})
    assert schedule(small) == [[1, 4, 15], [5, 8, 7]]
    (entry,) = backends.get(small).entries(small)
    assert entry.config == small


@pytest.mark.parametrize(
    ("sections", "path", "words"),
    [
        ({"draft": {"kind": "ddtree"}}, "draft.kind", "no DDTree"),
        ({"draft": {"kind": "dflash", "window": 64}}, "draft.window", "set it to null"),
        ({"draft": {"kind": "dflash", "simulate_accept": 2}}, "draft.simulate_accept", "use native or sglang"),
        (
            {
                "draft": {
                    **POLICY,
                    "by_running": [[1, 2, {"kind": "dflash", "layers": 1}], [3, None, {"kind": "dflash"}]],
                }
            },
            "draft.by_running",
            "same model, layers, sample",
        ),
        ({"draft": {**POLICY, "by_running": [[1, None, {"kind": "none"}]]}}, "draft.by_running", "use draft.kind none"),
        ({"draft": POLICY, "parallel": {"data": 2}}, "parallel.data", "drops a policy"),
        ({"parallel": {"tensor": 4, "expert": 2}}, "parallel.expert", "use 1, or tensor"),
        ({"memory": {"kv_tokens": 1024}}, "memory.kv_tokens", "set memory.page_size too"),
        ({"memory": {"kv_tokens": 1000, "page_size": 16}}, "memory.kv_tokens", "multiple of page_size 16"),
        ({"memory": {"max_running": 64, "prefill_chunk": 32}}, "memory.prefill_chunk", "below max_running 64"),
        (
            {
                "draft": {"kind": "dflash"},
                "graphs": {"kind": "captured", "batch_sizes": [256]},
                "memory": {"max_running": 256},
            },
            "memory.prefill_chunk",
            "4096 are asked",
        ),
        ({"model": {"target": "bundled", "dtype": "float64"}}, "model.dtype", "bfloat16 or float32"),
        ({"model": {"target": "bundled", "kv_dtype": "float64"}}, "model.kv_dtype", "fp8_e4m3"),
    ],
)
def test_what_it_cannot_do(sections: dict[str, Any], path: str, words: str) -> None:
    asked = config({"model": {"target": "bundled"}, **sections})
    found = backends.get(asked).refusals(asked, H200)
    assert [refusal.path for refusal in found] == [path]
    assert words in found[0].reason


def spoken(section: str, word: str) -> EngineConfig:
    model, field = {"target": "bundled"}, "backend" if section == "attention" else "quantization"
    return config({"model": model, section: (model if section == "model" else {}) | {field: word}})


@pytest.mark.parametrize("word", ["triton_attn", "TRITON_ATTN", "flashinfer"])
def test_attention_kernels_are_named_as_in_vllm(word: str) -> None:
    assert backends.get(spoken("attention", word)).refusals(spoken("attention", word), H200) == ()


@pytest.mark.parametrize(
    ("section", "word", "meant"),
    [("attention", word, "triton_attn") for word in ("triton", "fa3", "nonsense")] + [("model", "fp9", "fp8")],
)
def test_words_that_its_options_do_not_take(section: str, word: str, meant: str) -> None:
    (refusal,) = backends.get(spoken(section, word)).refusals(spoken(section, word), H200)
    assert refusal.path in ("attention.backend", "model.quantization")
    assert f"vLLM 0.33.0 has no {word!r}; use" in refusal.reason
    assert f" {meant}," in refusal.reason


def test_it_is_mapped_for_gpus_only() -> None:
    asked = config({"model": {"target": "bundled"}})
    assert [refusal.path for refusal in backends.get(asked).refusals(asked, cpu_machine())] == ["backend.kind"]


def test_another_version_is_asked_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_BACKENDS", "/nowhere/backends.yaml")
    asked = config({"model": {"target": "bundled"}}, backend={"kind": "vllm", "version": "0.99"})
    (refusal,) = backends.get(asked).refusals(asked, H200)
    assert refusal.path == "backend.version"
    assert "known: 0.33.0" in refusal.reason


def test_acceptance_counts_the_bonus_token() -> None:
    text = (
        'vllm:spec_decode_num_drafts_total{engine="0"} 10.0\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 25.0\n'
    )
    counts = VLLM("0.33.0").round_counts(text)
    assert counts is not None
    assert counts.accept_length(backends.RoundCounts(0, 0)) == 3.5
    assert VLLM("0.33.0").round_counts("") is None


def test_reads_the_config_that_runs() -> None:
    info = {
        "vllm_config": {
            "model_config": {"dtype": "torch.bfloat16", "max_model_len": 4096},
            "parallel_config": {"tensor_parallel_size": 2},
            "cache_config": {"block_size": 16, "enable_prefix_caching": False},
            "scheduler_config": {"max_num_seqs": 48},
            "speculative_config": {
                "method": "dflash",
                "model": "/c/0123456789abcdef-first-3",
                "num_speculative_tokens": 7,
            },
            "compilation_config": {"cudagraph_mode": "CUDAGraphMode.FULL_DECODE_ONLY"},
        }
    }
    runs = VLLM("0.33.0").resolved(info)
    assert runs["draft"]["block_size"] == 8
    assert runs["draft"]["layers"] == 3
    assert runs["memory"] == {"page_size": 16, "max_running": 48, "prefix_cache": False}
    assert runs["model"]["dtype"] == "bfloat16"
    assert runs["graphs"] == {"kind": "captured"}
    with pytest.raises(ConfigError, match="is this vLLM"):
        VLLM("0.33.0").resolved({})
