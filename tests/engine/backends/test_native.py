"""The native backend: what it runs, and that nothing it cannot do is accepted or ignored."""

from __future__ import annotations

import dataclasses
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import backends
from engine.backends import native
from engine.config import DFlashDraft, EngineConfig, bundled
from engine.errors import ConfigError, ModelError
from engine.estimate import gpu
from engine.front.answer import Tally
from engine.front.metrics import Meters, exposition
from engine.machine import cpu_machine
from engine.protocol import Acceptance
from engine.shape import read_draft_shape, read_shape
from tests.engine.folders import DRAFT_8B, QWEN3_8B, QWEN3_30B_A3B, draft, shape, write
from tests.engine.strategies import raw_configs

CPU = cpu_machine()
H200 = gpu("H200")


def config(**sections: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model": {"target": "bundled"}, **sections})


def test_the_command() -> None:
    launch = backends.get(bundled()).command(bundled(), Path("some/config.yaml"), "127.0.0.1", 8123)
    assert launch.argv[0] == sys.executable
    assert launch.argv[1:5] == ("-m", "engine", "serve", "some/config.yaml")
    assert launch.argv[5:] == ("--host", "127.0.0.1", "--port", "8123")
    assert launch.env == {}


def test_version_is_the_package_version() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert project["project"]["version"] == native.VERSION


def test_the_bundled_pair_is_accepted() -> None:
    assert native.refusals(bundled(), CPU) == ()
    assert native.refusals(config(draft={"kind": "dflash"}, attention={"backend": "torch"}), CPU) == ()
    assert native.refusals(config(backend={"version": native.VERSION}), CPU) == ()


TREE = {"kind": "ddtree"}
NOT_YET = {
    "ddtree": ({"draft": TREE}, "draft.kind"),
    "policy": ({"draft": {"kind": "policy", "by_running": [[1, None, {"kind": "none"}]]}}, "draft.kind"),
    "window": ({"draft": {"kind": "dflash", "window": 64}}, "draft.window"),
    "captured": ({"graphs": {"kind": "captured", "batch_sizes": [1, 16]}}, "graphs.kind"),
    "captured_trees": ({"graphs": {"kind": "captured", "batch_sizes": [1, 16]}, "draft": TREE}, "draft.kind"),
    "triton_trees": ({"attention": {"backend": "triton"}, "draft": TREE}, "draft.kind"),
    "tensor": ({"parallel": {"tensor": 2}}, "parallel.tensor"),
    "data": ({"parallel": {"data": 2}}, "parallel.data"),
    "expert": ({"parallel": {"tensor": 2, "expert": 2}}, "parallel.expert"),
    "pipeline": ({"parallel": {"pipeline": 2}}, "parallel.pipeline"),
    "quantization": ({"model": {"target": "bundled", "quantization": "fp8"}}, "model.quantization"),
    "kv_dtype": ({"model": {"target": "bundled", "kv_dtype": "fp8_e4m3"}}, "model.kv_dtype"),
    "prefix_cache": ({"memory": {"prefix_cache": True}}, "memory.prefix_cache"),
}


@pytest.mark.parametrize("name", NOT_YET)
def test_a_capability_decides_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sections, path = NOT_YET[name]
    others = frozenset(NOT_YET) - {name}
    monkeypatch.setattr(native, "CAPABILITIES", native.CAPABILITIES - {name} | others)
    found = native.refusals(config(**sections), H200)
    assert [refusal.path for refusal in found] == [path]
    assert "yet" in found[0].reason
    monkeypatch.setattr(native, "CAPABILITIES", native.CAPABILITIES | {name})
    assert native.refusals(config(**sections), H200) == ()


def test_every_capability_is_known() -> None:
    named = {name for name in native.CAPABILITIES if not name.startswith("attention.")}
    assert named <= set(native._ADVICE)


def test_a_policy_names_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "CAPABILITIES", native.CAPABILITIES - {"ddtree"} | {"policy"})
    policy = {"kind": "policy", "by_running": [[1, 4, {"kind": "none"}], [5, None, TREE]]}
    assert [refusal.path for refusal in native.refusals(config(draft=policy), CPU)] == ["draft.by_running.1.2.kind"]


def test_captured_graphs_need_a_gpu_even_when_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "CAPABILITIES", native.CAPABILITIES | {"captured"})
    found = native.refusals(config(graphs={"kind": "captured"}), CPU)
    assert [refusal.path for refusal in found] == ["graphs.kind"]
    assert "CUDA" in found[0].reason


def test_device_rounds_are_refused_where_they_cannot_run() -> None:
    captured = {"kind": "captured", "batch_sizes": [1, 8]}
    for sections, machine, path, words in (
        ({"attention": {"backend": "triton"}}, CPU, "attention.backend", "need a CUDA GPU"),
        ({"graphs": captured}, H200, "graphs.batch_sizes", "add 16, or lower memory.max_running to 8"),
        (
            {"graphs": captured, "memory": {"max_running": 8}, "attention": {"backend": "torch"}},
            H200,
            "attention.backend",
            "use auto",
        ),
    ):
        [refusal] = native.refusals(config(**sections), machine)
        assert (refusal.path, words in refusal.reason) == (path, True), refusal


@pytest.mark.parametrize(
    ("sections", "path", "words"),
    [
        ({"attention": {"backend": "fa9"}}, "attention.backend", "use auto or torch or triton"),
        ({"model": {"target": "bundled", "trust_remote_code": True}}, "model.trust_remote_code", "never runs code"),
        ({"model": {"target": "bundled", "revision": "main"}}, "model.revision", "set it to null"),
        ({"backend": {"version": "9.9"}}, "backend.version", native.VERSION),
        ({"backend": {"kind": "sglang"}}, "backend.kind", "the config is for sglang"),
        ({"model": {"target": "Qwen/Qwen3-8B"}}, "model.target", "hf download Qwen/Qwen3-8B"),
        ({"draft": {"kind": "dflash", "model": "z-lab/x"}}, "draft.model", "hf download z-lab/x"),
    ],
)
def test_what_it_never_does(sections: dict[str, Any], path: str, words: str) -> None:
    found = native.refusals(config(**sections), CPU)
    assert [refusal.path for refusal in found] == [path]
    assert words in found[0].reason


def test_a_missing_folder_is_no_hub_name(tmp_path: Path) -> None:
    """The loader reports it as missing model files, with the exit code of those."""
    for name in (str(tmp_path / "absent"), "./absent/model", "~/absent", "absent"):
        assert native.refusals(config(model={"target": name}), CPU) == ()


def test_a_local_folder_may_look_like_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "org" / "model", QWEN3_8B)
    monkeypatch.chdir(tmp_path)
    assert native.refusals(config(model={"target": "org/model"}), CPU) == ()


@settings(max_examples=100, deadline=None)
@given(raw=raw_configs(), sections=st.sets(st.sampled_from(sorted(EngineConfig.model_fields)), max_size=2))
def test_accepted_is_exactly_what_is_built(raw: dict[str, Any], sections: set[str]) -> None:
    """Independent of the table's code: the fields themselves are looked at. Names of models are judged elsewhere."""
    asked = config(**{name: raw[name] for name in sections | {"memory"}})
    asked = asked.model_copy(update={"model": asked.model.model_copy(update={"target": "bundled"})})
    named = any(d.model is not None for d in asked.drafts if isinstance(d, DFlashDraft))
    assert (native.refusals(asked, H200) == ()) == _is_built(asked) or named


def _is_built(asked: EngineConfig) -> bool:
    capable = native.CAPABILITIES
    trees = any(draft.kind == "ddtree" for draft in asked.drafts)
    degrees = dataclasses.asdict(Degrees(**asked.parallel.model_dump()))
    plain = {
        "policy": asked.draft.kind != "policy",
        "ddtree": not trees,
        "window": all(draft.window is None for draft in asked.drafts if isinstance(draft, DFlashDraft)),
        "captured": asked.graphs.kind == "eager",
        "captured_trees": asked.graphs.kind == "eager" or not trees,
        "triton_trees": asked.attention.backend != "triton" or not trees,
        "prefix_cache": not asked.memory.prefix_cache,
        "quantization": asked.model.quantization is None,
        "kv_dtype": asked.model.kv_dtype in ("auto", asked.model.dtype),
        f"attention.{asked.attention.backend}": asked.attention.backend == "auto",
        **{name: degree == 1 for name, degree in degrees.items()},
    }
    never = asked.model.trust_remote_code or asked.model.revision is not None
    if asked.graphs.kind == "captured":
        never |= asked.graphs.batch_sizes[-1] < asked.memory.max_running or asked.attention.backend == "torch"
    version = asked.backend.kind == "native" and asked.backend.version in (None, native.VERSION)
    return version and not never and all(fine or name in capable for name, fine in plain.items())


@dataclasses.dataclass(frozen=True)
class Degrees:
    """The degrees of parallelism that exist: a new one breaks this test until it is thought of."""

    tensor: int
    data: int
    expert: int
    pipeline: int


# --- models ---


@pytest.mark.parametrize(
    ("target", "drafter", "paths"),
    [
        ({}, {}, []),
        (QWEN3_30B_A3B, None, ["model.target"]),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, None, ["model.target"]),
        ({"quantization_config": {"quant_method": "fp8"}}, None, ["model.target"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, None, ["model.target"]),
        ({}, {"is_causal": True}, ["draft.model"]),
        ({}, {"layer_types": ["sliding_attention"] * 5, "sliding_window": 64}, ["draft.model"]),
        ({}, {"selector_rank": 8}, ["draft.model"]),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, ["draft.model"]),
    ],
)
def test_models_it_cannot_run(
    tmp_path: Path,
    target: dict[str, Any],
    drafter: dict[str, Any] | None,
    paths: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "CAPABILITIES", frozenset({"dflash"}))
    found = native.model_refusals(
        shape(tmp_path / "t", QWEN3_8B, **target), None if drafter is None else draft(tmp_path / "d", **drafter)
    )
    assert [refusal.path for refusal in found] == paths


# --- what a server answers ---


def test_reads_a_request_as_the_server_writes_it() -> None:
    backend = backends.get(bundled())
    tally = Tally(prompt_tokens=3)
    tally.add(1, 0)  # the prefill's token is no round's
    tally.add(4, 1)
    tally.add(1, 2)
    assert backend.request_stats({"usage": tally.usage(), "spec": tally.spec()}) == backends.RequestStats(2.5, 2)
    assert backend.request_stats({"spec": Tally(3).spec()}) == backends.RequestStats(None, 0)
    assert backend.request_stats({"usage": tally.usage()}) == backends.RequestStats(None, None)


def test_metric_names_are_the_servers() -> None:
    acceptance = Acceptance(accept_length=2.5, accept_rate=0.5, verify_count=2, by_position=(0.9, 0.4))
    stats = {"running": 1, "waiting": 0, "tokens_used": 5, "acceptance": acceptance.model_dump()}
    text = exposition(Meters(), "bundled", stats, 0.0, 100).decode()
    for name in dataclasses.asdict(backends.get(bundled()).metrics).values():
        assert re.search(rf"^{name}\{{", text, re.MULTILINE), name


def test_reads_the_resolved_config() -> None:
    backend = backends.get(bundled())
    assert backend.resolved({"config": {"model": {}}}) == {"model": {}}
    with pytest.raises(ConfigError, match="native engine"):
        backend.resolved({"server_args": {}})


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_another_backend_without_a_version_needs_the_machines_file(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_BACKENDS", "/nowhere/backends.yaml")
    with pytest.raises(ConfigError, match=f"backend {kind} needs a command"):
        backends.get(config(backend={"kind": kind}))
    assert backends.get(config(backend={"kind": kind, "version": "1.0"})).kind == kind


def test_a_policy_is_one_server() -> None:
    policy = {"kind": "policy", "by_running": [[1, 4, {"kind": "dflash"}], [5, None, {"kind": "none"}]]}
    asked = config(draft=policy)
    (entry,) = backends.get(asked).entries(asked)
    assert (entry.first, entry.last, entry.config) == (1, None, asked)


# --- the verdict ---


def test_the_verdict_joins_backend_model_and_arithmetic(tmp_path: Path) -> None:
    target = write(tmp_path / "target", QWEN3_8B)
    write(target / "draft", DRAFT_8B)
    model = {"target": str(target)}
    assert backends.verdict(config(model=model, draft={"kind": "dflash"}), H200) == ()
    refused = backends.verdict(config(model=model, graphs={"kind": "captured"}, memory={"prefix_cache": True}), CPU)
    assert {"graphs.kind", "memory.prefix_cache"} >= {refusal.path for refusal in refused} != set()
    long = backends.verdict(config(model={**model, "max_len": 10**6}), H200)
    assert [refusal.path for refusal in long] == ["model.max_len"]
    deep = backends.verdict(config(model=model, draft={"kind": "dflash", "layers": 6}), H200)
    assert [refusal.path for refusal in deep] == ["draft.layers"]
    assert read_shape(target).layers == 36
    assert read_draft_shape(target / "draft").layers == 5


def test_the_verdict_needs_the_models_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        backends.verdict(config(model={"target": str(tmp_path / "absent")}), H200)
