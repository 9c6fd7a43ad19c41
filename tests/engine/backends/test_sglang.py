"""SGLang: golden command lines of both versions, what it refuses, and what its answers say."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import backends
from engine.backends import VLLM, Ask, Backend, SGLang, shallow
from engine.backends.sglang import PINS, SPECULATIVE_PINS
from engine.backends.sglang_versions import VERSIONS
from engine.config import PAIR, EngineConfig
from engine.errors import ConfigError
from engine.estimate import cpu_machine, gpu
from tests.engine.backends.golden import FOLDER, argv_text, known_options, machine_file, options_used
from tests.engine.folders import DRAFT_8B, QWEN3_8B, draft, shape

__all__ = ["machine_file"]

H200 = gpu("H200", devices=8)
CPU = cpu_machine()
KIMI: dict[str, Any] = {
    "model": {"target": "moonshotai/Kimi-K2.6", "trust_remote_code": True},
    "draft": {"kind": "dflash", "model": "z-lab/Kimi-K2.6-DFlash", "block_size": 8},
    "graphs": {"kind": "captured", "batch_sizes": [1, 2, 4, 8]},
    "parallel": {"tensor": 8, "expert": 8},
    "memory": {"max_running": 64, "kv_fraction": 0.85},
    "attention": {"backend": "flashmla"},
}
BUNDLED: dict[str, Any] = {
    "model": {"target": "bundled"},
    "draft": {"kind": "dflash", "block_size": 16, "layers": 2, "window": 512, "simulate_accept": 4.5},
    "memory": {"kv_tokens": 65536, "max_running": 48, "page_size": 32, "prefill_chunk": 2048, "prefix_cache": True},
}
NONE = {**BUNDLED, "draft": {"kind": "none"}}
FORCING = '{command: [sglang, serve], env: {SGLANG_SIMULATE_ACC_LEN: "4"}}'
CONFIGS = {"kimi": KIMI, "bundled": BUNDLED, "none": NONE}


def config(raw: dict[str, Any], version: str = "0.5.17", **sections: Any) -> EngineConfig:
    return EngineConfig.model_validate({**raw, "backend": {"kind": "sglang", "version": version}, **sections})


@pytest.mark.usefixtures("machine_file")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CONFIGS)
def test_golden_command(name: str, version: str) -> None:
    asked = config(CONFIGS[name], version)
    assert backends.get(asked).refusals(asked, H200) == ()
    assert argv_text(asked) == (FOLDER / f"sglang-{version}-{name}.txt").read_text(encoding="utf-8")
    assert set(options_used(asked)) <= known_options(f"sglang-{version}")


def test_what_is_pinned_exists_in_every_version() -> None:
    for version in VERSIONS:
        assert {*PINS, *SPECULATIVE_PINS} <= known_options(f"sglang-{version}")


@pytest.mark.usefixtures("machine_file")
def test_arms_differ_only_in_speculation() -> None:
    """Caps, delays, precision and graphs are the same words with and without a draft."""
    with_draft = options_used(config({**BUNDLED, "draft": {"kind": "dflash"}}))
    without = options_used(config(NONE))
    assert [option for option in with_draft if not option.startswith("--speculative")] == without


def test_acceptance_is_forced_only_where_asked(machine_file: Path) -> None:
    """Also where the machine's file or the shell says otherwise: a lossy server must not pass for a lossless one."""
    text = machine_file.read_text().replace("{command: [sglang, serve]}", FORCING)
    machine_file.write_text(text)
    asked = config({"model": {"target": "bundled"}, "draft": {"kind": "dflash"}})
    assert backends.get(asked).command(asked, Path("c"), "h", 1).env["SGLANG_SIMULATE_ACC_LEN"] == "-1"
    forced = config({"model": {"target": "bundled"}, "draft": {"kind": "dflash", "simulate_accept": 3.5}})
    assert backends.get(forced).command(forced, Path("c"), "h", 1).env["SGLANG_SIMULATE_ACC_LEN"] == "3.5"


@pytest.mark.parametrize(
    ("sections", "path", "words"),
    [
        ({"draft": {"kind": "ddtree"}}, "draft.kind", "no DDTree"),
        ({"draft": {"kind": "dflash", "sample": "probabilistic"}}, "draft.sample", "use greedy"),
        (
            {"draft": {"kind": "policy", "by_running": [[1, 4, {"kind": "dflash"}], [5, None, {"kind": "none"}]]}},
            "draft.kind",
            "one entry",
        ),
        ({"parallel": {"tensor": 8, "expert": 2}}, "parallel.expert", "needs 1 or parallel.tensor (8), not 2"),
        ({"parallel": {"pipeline": 2}, "draft": {"kind": "dflash"}}, "parallel.pipeline", "set it to 1"),
        ({"attention": {"backend": "fa9"}}, "attention.backend", "auto or one of triton"),
        ({"memory": {"page_size": 16}, "attention": {"backend": "trtllm_mla"}}, "memory.page_size", "32 or 64"),
        ({"memory": {"page_size": 64, "prefill_chunk": 100}}, "memory.prefill_chunk", "multiple of page_size 64"),
        ({"model": {"target": "bundled", "dtype": "float64"}}, "model.dtype", "bfloat16 or float32"),
        ({"model": {"target": "bundled", "kv_dtype": "float32"}}, "model.kv_dtype", "fp8_e5m2"),
        ({"model": {"target": "bundled", "quantization": "fp9"}}, "model.quantization", "awq"),
        ({"model": {"target": "org/x"}, "draft": {"kind": "dflash"}}, "draft.model", "name it"),
        (
            {"model": {"target": "org/x"}, "draft": {"kind": "dflash", "model": "org/d", "layers": 2}},
            "draft.layers",
            "hf download org/d",
        ),
    ],
)
def test_what_it_cannot_do(sections: dict[str, Any], path: str, words: str) -> None:
    asked = config({"model": {"target": "bundled"}, **sections})
    found = backends.get(asked).refusals(asked, H200)
    assert [refusal.path for refusal in found] == [path]
    assert words in found[0].reason


def test_a_value_of_another_version_is_refused_in_this_one() -> None:
    for version, refused in (("0.5.17", False), ("0.5.23", True)):
        asked = config({"model": {"target": "bundled"}, "attention": {"backend": "cutlass_mla"}}, version)
        assert bool(backends.get(asked).refusals(asked, H200)) == refused


def test_a_machine_without_a_gpu_runs_no_speculation_and_no_graphs() -> None:
    asked = config({**KIMI, "parallel": {}})
    assert {refusal.path for refusal in backends.get(asked).refusals(asked, CPU)} == {"draft.kind", "graphs.kind"}
    asked = config(NONE)
    assert backends.get(asked).refusals(asked, CPU) == ()


@pytest.mark.parametrize("backend", [SGLang("0.5.17", VERSIONS["0.5.17"]), VLLM("0.33.0")], ids=lambda each: each.kind)
def test_a_drafter_that_reads_the_last_layer_is_refused(tmp_path: Path, backend: Backend) -> None:
    """Both keep what enters a layer, so nothing holds what leaves the last one: a request would end the server."""
    target = shape(tmp_path / "t", QWEN3_8B)
    reads = draft(tmp_path / "d", dflash_config={"mask_token_id": 1, "target_layer_ids": [1, 17, 35]})
    (refusal,) = backend.model_refusals(target, reads)
    assert "last layer (35 of 36)" in refusal.reason
    assert backend.model_refusals(target, draft(tmp_path / "e")) == ()


def test_a_quantised_drafter_is_refused(tmp_path: Path) -> None:
    backend = SGLang("0.5.17", VERSIONS["0.5.17"])
    plain, target = draft(tmp_path / "a"), shape(tmp_path / "t", QWEN3_8B)
    quantised = draft(tmp_path / "b", DRAFT_8B, quantization_config={"quant_method": "fp8"})
    assert backend.model_refusals(target, None) == backend.model_refusals(target, plain) == ()
    assert [refusal.path for refusal in backend.model_refusals(target, quantised)] == ["draft.model"]


def test_a_policy_becomes_one_launch_entry_a_range() -> None:
    ranges = [[1, 4, {"kind": "dflash", "block_size": 16}], [5, 16, {"kind": "dflash"}], [17, None, {"kind": "none"}]]
    asked = config({"model": {"target": "bundled"}, "draft": {"kind": "policy", "by_running": ranges}})
    entries = backends.get(asked).entries(asked)
    assert [(entry.first, entry.last, entry.config.draft.kind) for entry in entries] == [
        (1, 4, "dflash"),
        (5, 16, "dflash"),
        (17, None, "none"),
    ]
    assert all(backends.get(entry.config).refusals(entry.config, H200) == () for entry in entries)


# --- versions that no table describes ---


def fake_sglang(folder: Path, options: list[str], status: int = 0) -> Path:
    program = folder / "sglang"
    lines = "\\n".join(f"  {option} VALUE   what it does; see --else" for option in options)
    program.write_text(
        f"#!{sys.executable} -IS\nprint(1, file=open({str(folder / 'asked')!r}, 'a'))\n"
        f"print('usage: x [--not-an-option]\\n{lines}')\nraise SystemExit({status})\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def unknown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], status: int = 0, **sections: Any
) -> tuple[Any, ...]:
    path = folder / "backends.yaml"
    command = [str(fake_sglang(folder, options, status)), f"--instance={folder.name}"]
    path.write_text(json.dumps({"sglang": {"0.9.0": {"command": command}}}))
    monkeypatch.setenv("TUNER_BACKENDS", str(path))
    asked = config({"model": {"target": "bundled"}, "draft": {"kind": "dflash"}, **sections}, "0.9.0")
    return backends.get(asked).refusals(asked, H200)


def test_an_unknown_version_is_asked_and_refused_by_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks = ("--max-running-requests", "--speculative-num-draft-tokens")
    options = sorted(known_options("sglang-0.5.23") - set(lacks))
    (refusal,) = unknown(tmp_path, monkeypatch, options)
    assert refusal.path == "backend.version"
    assert "lacks --max-running-requests, --speculative-num-draft-tokens; use 0.5.17 or 0.5.23" in refusal.reason


def test_an_unknown_version_that_has_every_option_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unknown(tmp_path, monkeypatch, sorted(known_options("sglang-0.5.23"))) == ()


def test_an_unknown_version_is_not_judged_by_another_versions_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {"attention": {"backend": "newkernel"}, "model": {"target": "bundled", "quantization": "fp2"}}
    assert unknown(tmp_path, monkeypatch, sorted(known_options("sglang-0.5.23")), **words) == ()


def test_an_unknown_version_that_cannot_be_asked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (refusal,) = unknown(tmp_path, monkeypatch, ["--a"], status=1)
    assert "gave no options (exit status 1)" in refusal.reason
    asked = config({"model": {"target": "bundled"}}, "0.9.0")
    assert backends.get(asked).refusals(asked, H200) == (refusal,)  # another point of the plan
    assert (tmp_path / "asked").read_text() == "1\n"
    monkeypatch.setenv("TUNER_BACKENDS", str(tmp_path / "absent.yaml"))
    (refusal,) = backends.get(asked).refusals(asked, H200)
    assert "known: 0.5.17, 0.5.23" in refusal.reason


# --- what a server answers ---


def server_info(**changes: Any) -> dict[str, Any]:
    """A /server_info of 0.5.17 with DFLASH, only the keys that are read."""
    return {
        "model_path": "/m",
        "served_model_name": "bundled",
        "version": "0.5.17",
        "dtype": "auto",
        "kv_cache_dtype": "auto",
        "load_format": "auto",
        "trust_remote_code": False,
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": "/c/0123456789abcdef-first-2",
        "speculative_num_draft_tokens": 16,
        "speculative_draft_window_size": 512,
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
        "speculative_draft_model_quantization": None,
        "min_free_slots_delay": 1,
        "moe_a2a_backend": "none",
        "random_seed": 0,
        "stream_interval": 1,
        "enable_mixed_chunk": False,
        "tp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "pp_size": 1,
        "max_running_requests": 48,
        "max_total_tokens": 65536,
        "max_total_num_tokens": 65536,
        "page_size": 32,
        "chunked_prefill_size": 2048,
        "disable_radix_cache": False,
        "cuda_graph_config": {"decode": {"backend": "disabled", "bs": [1, 2]}},
        **changes,
    }


def test_what_runs_is_read_as_a_config() -> None:
    backend = SGLang("0.5.17", VERSIONS["0.5.17"])
    runs = backend.resolved(server_info())
    assert runs.pop("pins") == {}
    assert runs["draft"] == {
        "kind": "dflash",
        "model": "/c/0123456789abcdef-first-2",
        "layers": 2,
        "block_size": 16,
        "window": 512,
    }
    assert runs["memory"] == {
        "kv_tokens": 65536,
        "page_size": 32,
        "max_running": 48,
        "prefill_chunk": 2048,
        "prefix_cache": True,
    }
    assert runs["graphs"] == {"kind": "eager"}
    captured = server_info(cuda_graph_config={"decode": {"backend": "full", "bs": [1, 4]}})
    assert backend.resolved(captured)["graphs"] == {"kind": "captured", "batch_sizes": [1, 4]}
    with pytest.raises(ConfigError, match="is this SGLang"):
        backend.resolved({"config": {}})


def test_a_cache_rounded_to_pages_is_the_one_asked_for() -> None:
    backend = SGLang("0.5.17", VERSIONS["0.5.17"])
    rounded = backend.resolved(server_info(max_total_tokens=1000, max_total_num_tokens=992))
    smaller = backend.resolved(server_info(max_total_tokens=1000, max_total_num_tokens=960))
    assert rounded["memory"]["kv_tokens"] == 1000
    assert smaller["memory"]["kv_tokens"] == 960


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_free_slots_delay", None),
        ("speculative_accept_threshold_acc", 0.9),
        ("speculative_draft_model_quantization", "fp8"),
        ("moe_a2a_backend", "deepep"),
        ("enable_mixed_chunk", True),
        ("version", "0.5.23"),
    ],
)
def test_a_pin_that_did_not_hold_is_reported(name: str, value: Any) -> None:
    pins = SGLang("0.5.17", VERSIONS["0.5.17"]).resolved(server_info(**{name: value}))["pins"]
    assert list(pins) == [name]
    assert pins[name]["runs"] == value


def test_acceptance_of_a_request_leaves_out_the_prefills_token() -> None:
    backend = SGLang("0.5.17", VERSIONS["0.5.17"])
    stats = {"spec_accept_length": 3.75, "spec_verify_ct": 4, "completion_tokens": 15}
    assert backend.request_stats({"meta_info": stats}) == backends.RequestStats(3.5, 4)
    assert backend.request_stats({"choices": [{"meta_info": stats}]}) == backends.RequestStats(3.5, 4)
    body = {"sglext": {"spec_tokens_details": {"spec_verify_ct": 4}}, "usage": {"completion_tokens": 15}}
    assert backend.request_stats(body) == backends.RequestStats(3.5, 4)
    assert backend.request_stats({"usage": {"completion_tokens": 15}}) == backends.RequestStats(None, None)


def test_acceptance_of_a_server_is_between_two_looks() -> None:
    backend = SGLang("0.5.17", VERSIONS["0.5.17"])
    before = backend.round_counts(
        'sglang:generation_tokens_total{model_name="a {b}"} 10.0\nsglang:num_requests_total{} 2\n'
    )
    text = (
        'sglang:generation_tokens_total{model_name="a {b}"} 100.0\n'
        "# TYPE sglang:spec_verify_calls_total counter\n"
        'sglang:spec_verify_calls_total{rank="0"} 20.0\nsglang:spec_verify_calls_total{rank="1"} 5.0\n'
        "sglang:generation_tokens_total_other 7\nsglang:num_requests_total 4\n"
    )
    counts = backend.round_counts(text)
    assert before == backends.RoundCounts(8.0, 0.0)
    assert counts == backends.RoundCounts(96.0, 25.0)
    assert counts.accept_length(before) == 88 / 25
    assert counts.accept_length(counts) is None
    assert backend.round_counts("sglang:generation_tokens_total 5\n") is None
    assert backend.round_counts("sglang:generation_tokens_total NaN\nsglang:num_requests_total 1\n") is None
    assert backend.round_counts("sglang:generation_tokens_total \nsglang:num_requests_total{}\n") is None


def test_completions_by_token_ids() -> None:
    backend = SGLang("0.5.17", VERSIONS["0.5.17"])
    asked = Ask(model="m", max_tokens=2, prompt=(5, 6), top=2, echo=True)
    path, body = backend.ask(asked)
    assert (path, body["input_ids"], body["logprob_start_len"]) == ("/generate", [5, 6], 0)
    assert body["sampling_params"] == {"temperature": 0, "max_new_tokens": 2, "ignore_eos": False}
    answer = {
        "output_ids": [7, 8],
        "meta_info": {
            "output_token_logprobs": [[-0.1, 7, None], [-0.2, 8, None]],
            "output_top_logprobs": [[[-0.1, 7, None], [-2.0, 9, None]], [[-0.2, 8, None], [-3.0, 1, None]]],
            "input_token_logprobs": [[None, 5, None], [-1.0, 6, None]],
            "input_top_logprobs": [None, [[-0.5, 4, None], [-1.0, 6, None]]],
        },
    }
    read = backend.answer(asked, answer)
    assert (read.prompt, read.tokens) == ((5, 6), (7, 8))
    assert read.scores[1] == backends.Score(-0.2, ((8, -0.2), (1, -3.0)))
    assert read.prompt_scores == (None, backends.Score(-1.0, ((4, -0.5), (6, -1.0))))
    with pytest.raises(ConfigError, match="no token ids or scores"):
        backend.answer(asked, {"output_ids": [7, 8]})
    path, body = backend.ask(Ask(model="m", max_tokens=2, messages=({"role": "user", "content": "x"},), top=3))
    assert path == "/v1/chat/completions"
    assert body["return_meta_info"] is True


def test_a_shallow_drafter_is_named_in_the_command(machine_file: Path) -> None:
    asked = config({"model": {"target": "bundled"}, "draft": {"kind": "dflash", "layers": 3}})
    launch = backends.get(asked).command(asked, Path("c"), "127.0.0.1", 1)
    path = launch.argv[launch.argv.index("--speculative-draft-model-path") + 1]
    assert shallow.shallow_name(path) == 3
    assert Path(path).is_relative_to(machine_file.parent)
    whole = config({"model": {"target": "bundled"}, "draft": {"kind": "dflash", "layers": 4}})
    assert str(PAIR / "draft") in backends.get(whole).command(whole, Path("c"), "127.0.0.1", 1).argv
