"""Every field of an EngineConfig changes what a foreign server is told, or is refused by name: none is ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import backends
from engine.config import EngineConfig
from engine.estimate import gpu
from engine.problems import field_paths
from tests.engine.backends.golden import known_options, machine_file
from tests.engine.strategies import raw_configs

__all__ = ["machine_file"]

H200 = gpu("H200", devices=8)
SERVERS = [("sglang", "0.5.17"), ("sglang", "0.5.23"), ("vllm", "0.33.0")]
BASE: dict[str, Any] = {
    "model": {"target": "org/target"},
    "draft": {"kind": "dflash", "model": "org/draft", "block_size": 8},
    "graphs": {"kind": "captured", "batch_sizes": [1, 4]},
    "parallel": {"tensor": 2},
    "memory": {"max_running": 16, "page_size": 16},
}
# Another value of each field. Those of the tree and of the policy are reached through `draft.kind`, which is refused.
OTHER: dict[str, Any] = {
    "model.target": "org/other",
    "model.revision": "v2",
    "model.dtype": "float32",
    "model.quantization": "fp8",
    "model.kv_dtype": "fp8_e4m3",
    "model.max_len": 4096,
    "model.trust_remote_code": True,
    "model.load": "dummy",
    "draft.kind": "none",
    "draft.model": "org/draft2",
    "draft.block_size": 4,
    "draft.layers": 2,
    "draft.window": 64,
    "draft.sample": "probabilistic",
    "draft.simulate_accept": 3.0,
    "draft.nodes": 15,
    "draft.width": 4,
    "draft.max_nodes": 15,
    "draft.by_running": [[1, None, {"kind": "none"}]],
    "graphs.kind": "eager",
    "graphs.batch_sizes": [1, 2],
    "parallel.tensor": 4,
    "parallel.data": 2,
    "parallel.expert": 2,
    "parallel.pipeline": 2,
    "memory.kv_fraction": 0.5,
    "memory.kv_tokens": 4096,
    "memory.page_size": 32,
    "memory.max_running": 32,
    "memory.prefill_chunk": 1024,
    "memory.prefix_cache": True,
    "attention.backend": "triton",
    "backend.kind": "native",
    "backend.version": "0.0.1",
}
KIND_OF = {"nodes": "ddtree", "width": "ddtree", "max_nodes": "ddtree", "by_running": "policy"}


def changed(path: str, kind: str, version: str) -> EngineConfig:
    """Return BASE with another value at `path`; a section whose kind changes keeps only what the new kind has."""
    section, _, name = path.partition(".")
    raw = {**BASE, "backend": {"kind": kind, "version": version}}
    values = {**raw.get(section, {}), name: OTHER[path]}
    if name in KIND_OF:
        values["kind"] = KIND_OF[name]
        values |= {"nodes": "auto"} if name == "max_nodes" else {}
    if values.get("kind") in ("none", "eager"):
        values = {"kind": values["kind"]}
    if values.get("kind") == "policy":
        values = {"kind": "policy", "by_running": values["by_running"]}
    return EngineConfig.model_validate({**raw, section: values})


def told(config: EngineConfig) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return what a server is told."""
    launch = backends.get(config).command(config, Path("config.yaml"), "127.0.0.1", 31000)
    return launch.argv, dict(launch.env)


def test_the_table_above_names_every_field() -> None:
    fields = {path for path in field_paths(EngineConfig) if "." in path}
    assert fields == set(OTHER)


@pytest.mark.usefixtures("machine_file")
@pytest.mark.parametrize(("kind", "version"), SERVERS)
@pytest.mark.parametrize("path", [path for path in OTHER if path != "backend.kind"])
def test_no_field_is_ignored(path: str, kind: str, version: str) -> None:
    base = EngineConfig.model_validate({**BASE, "backend": {"kind": kind, "version": version}})
    assert backends.get(base).refusals(base, H200) == ()
    config = changed(path, kind, version)
    refused = backends.get(config).refusals(config, H200)
    if refused:
        section = path.partition(".")[0]
        assert all(refusal.reason for refusal in refused)
        assert any(refusal.path == path or refusal.path.startswith(f"{section}.") for refusal in refused), refused
    else:
        assert told(config) != told(base)


@pytest.mark.usefixtures("machine_file")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=raw_configs(), server=st.sampled_from(SERVERS), hub=st.booleans())
def test_what_is_not_refused_is_a_command_of_known_options(
    raw: dict[str, Any], server: tuple[str, str], hub: bool
) -> None:
    """Any config at all: refused with paths and reasons, or a command of options that the version has."""
    kind, version = server
    raw = {**raw, "backend": {"kind": kind, "version": version}}
    raw["model"] = {**raw["model"], "target": "org/target" if hub else "bundled"}
    config = EngineConfig.model_validate(raw)
    backend = backends.get(config)
    refused = backend.refusals(config, H200)
    assert all(refusal.path.partition(".")[0] in EngineConfig.model_fields and refusal.reason for refusal in refused)
    if not refused and not any(getattr(draft, "layers", None) for draft in config.drafts):
        argv, _ = told(config)
        assert {word for word in argv if word.startswith("--")} <= known_options(f"{kind}-{version}")
        assert all(word for word in argv)
