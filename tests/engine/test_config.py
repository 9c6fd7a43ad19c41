"""EngineConfig and launch files: what is valid survives a file, what is not says what was meant."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from engine.config import (
    PAIR,
    DDTreeDraft,
    DFlashDraft,
    EngineConfig,
    LaunchFile,
    Model,
    bundled,
    draft_folder,
    expanded,
    explain,
    field_names,
    load_launch,
    target_folder,
)
from engine.errors import ConfigError
from tests.engine.strategies import engine_configs, policies, raw_configs

THOROUGH = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FILES = settings(THOROUGH, max_examples=20)


def problems(**sections: Any) -> list[str]:
    """Return what is wrong with a config of these sections, none when nothing is."""
    try:
        EngineConfig.model_validate({"model": {"target": "bundled"}, **sections})
    except ValidationError as error:
        return explain(error)
    return []


# --- completeness ---

DESIGN = {
    "model": {"target", "revision", "dtype", "quantization", "kv_dtype", "max_len", "trust_remote_code", "load"},
    "graphs": {"kind", "batch_sizes"},
    "parallel": {"tensor", "data", "expert", "pipeline"},
    "memory": {"kv_fraction", "kv_tokens", "page_size", "max_running", "prefill_chunk", "prefix_cache"},
    "attention": {"backend"},
    "backend": {"kind", "version"},
    "draft": {"kind", "model", "block_size", "layers", "window", "sample", "simulate_accept"}
    | {"nodes", "width", "max_nodes", "by_running"},
}


def members(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models of a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from members(part)


def test_every_section_and_field_of_the_design() -> None:
    fields = EngineConfig.model_fields
    assert set(fields) == set(DESIGN)
    for name, expected in DESIGN.items():
        assert {field for model in members(fields[name].annotation) for field in model.model_fields} == expected


def test_every_field_is_described() -> None:
    sections = {model for field in EngineConfig.model_fields.values() for model in members(field.annotation)}
    for model in sections:
        for name, field in model.model_fields.items():
            assert field.description or name == "kind", f"{model.__name__}.{name}"


def test_defaults() -> None:
    config = bundled()
    assert config.draft.kind == "none"
    assert config.graphs.kind == "eager"
    assert not config.model.trust_remote_code
    assert config.memory.max_running == 16
    assert config.backend.kind == "native"
    assert DFlashDraft().block_size == 16


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        bundled().memory.max_running = 3  # type: ignore[misc]


# --- round trips ---


@THOROUGH
@given(config=engine_configs())
def test_round_trip_json_and_yaml(config: EngineConfig) -> None:
    assert EngineConfig.model_validate_json(config.model_dump_json()) == config
    plain = config.model_dump(mode="json")
    assert EngineConfig.model_validate(json.loads(json.dumps(plain))) == config
    assert EngineConfig.model_validate(yaml.safe_load(yaml.safe_dump(plain, allow_unicode=True))) == config


@THOROUGH
@given(config=engine_configs())
def test_derived_facts(config: EngineConfig) -> None:
    rows = [draft.verify_rows for draft in config.drafts if isinstance(draft, DFlashDraft)]
    assert config.verify_rows == max([1, *rows])
    forced = [d for d in config.drafts if isinstance(d, DFlashDraft) and d.simulate_accept is not None]
    assert config.synthetic == (bool(forced) or config.model.load == "dummy")
    assert config.parallel.gpus == config.parallel.tensor * config.parallel.data * config.parallel.pipeline


@FILES
@given(config=engine_configs(), last=st.none() | st.integers(1, 99), synthetic=st.booleans())
def test_a_launch_file_survives_a_file(tmp_path: Path, config: EngineConfig, last: int | None, synthetic: bool) -> None:
    document = {
        "schema": 1,
        "entries": [{"from": 1, "to": last, "config": config.model_dump(mode="json")}],
        "expected": {4: {"tpot_ms_p50": [1.5, 2.5]}},
        "synthetic": synthetic,
        "study": {"name": "s", "trial": 3, "digest": "abc"},
        "deploy": {"replicas": 2, "endpoint": None, "gpus": [0, 1]},
    }
    path = tmp_path / "launch.yaml"
    path.write_text(yaml.safe_dump(document, allow_unicode=True), encoding="utf-8")
    launch = load_launch(path)
    assert launch.entries[0].config == config
    assert (launch.entries[0].first, launch.entries[0].last) == (1, last)
    written = launch.model_dump(mode="json")
    assert set(written) == set(document)
    assert set(written["entries"][0]) == {"from", "to", "config"}
    path.write_text(yaml.safe_dump(written, allow_unicode=True), encoding="utf-8")
    assert load_launch(path) == launch


def test_a_bare_config_is_a_launch_of_one_entry(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("schema: 1\nmodel: {target: bundled}\n")
    launch = load_launch(path)
    assert [entry.config for entry in launch.entries] == [bundled()]
    assert (launch.entries[0].first, launch.entries[0].last) == (1, None)


# --- refusals ---


def holders(node: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the paths of all mappings in a document."""
    found = [path] if isinstance(node, dict) else []
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return found + [inner for key, child in children for inner in holders(child, (*path, key))]


@THOROUGH
@given(raw=raw_configs(), data=st.data())
def test_an_unknown_key_at_any_depth_is_refused_with_what_was_meant(raw: dict[str, Any], data: st.DataObject) -> None:
    raw = copy.deepcopy(raw)  # drafts without fields are shared between examples
    path = data.draw(st.sampled_from(holders(raw)))
    place: Any = raw
    for part in path:
        place = place[part]
    known = data.draw(st.sampled_from(sorted(set(place) - {"kind"} or {"kind"})))
    place[f"{known}x"] = place[known] if known != "kind" else 1
    with pytest.raises(ValidationError) as caught:
        EngineConfig.model_validate(raw)
    dotted = ".".join(str(part) for part in (*path, f"{known}x"))
    found = [line for line in explain(caught.value) if line.startswith(f"{dotted}: no such field")]
    assert found, explain(caught.value)
    if known != "kind":
        meant = ".".join(str(part) for part in (*path, known))
        assert f"did you mean {meant}?" in found[0]


def test_a_field_of_another_section_is_pointed_to() -> None:
    assert problems(memory={"block_size": 4}) == ["memory.block_size: no such field, did you mean draft.block_size?"]
    assert problems(max_runing=4) == ["max_runing: no such field, did you mean memory.max_running?"]
    assert problems(zzz=4) == ["zzz: no such field"]


WORD_FIELDS = [
    ("model.target", "off"),
    ("model.revision", "no"),
    ("model.dtype", "off"),
    ("model.quantization", "no"),
    ("model.kv_dtype", "off"),
    ("model.load", "no"),
    ("model.max_len", "yes"),
    ("draft.kind", "off"),
    ("graphs.kind", "no"),
    ("memory.max_running", "on"),
    ("memory.kv_fraction", "yes"),
    ("memory.page_size", "on"),
    ("parallel.tensor", "yes"),
    ("attention.backend", "off"),
    ("backend.kind", "off"),
    ("backend.version", "no"),
]


@pytest.mark.parametrize(("path", "written"), WORD_FIELDS)
def test_a_yaml_boolean_where_a_word_is_meant(path: str, written: str) -> None:
    section, field = path.split(".")
    document = yaml.safe_load(f"{section}: {{{field}: {written}}}")
    if section == "model":
        document["model"].setdefault("target", "x")
    (line,) = problems(**document)
    assert line.startswith(f"{path}: YAML read this as a boolean")


@pytest.mark.parametrize("field", ["model", "block_size", "layers", "window", "simulate_accept", "nodes", "width"])
def test_a_yaml_boolean_in_a_draft(field: str) -> None:
    (line,) = problems(draft={"kind": "ddtree", field: True})
    assert line.startswith(f"draft.{field}: YAML read this as a boolean (yes/on/true)")


CASES: list[tuple[dict[str, Any], str]] = [
    ({"draft": False}, "draft: YAML read this as a boolean; a mapping is meant here"),
    ({"draft": "none"}, "draft: a mapping is meant, did you mean {kind: none}?"),
    ({"draft": {"block_size": 8}}, "draft: kind is missing: one of none, dflash, ddtree, policy"),
    (
        {"draft": {"kind": "dflsh"}},
        "draft.kind: 'dflsh' is none of none, dflash, ddtree, policy, did you mean dflash?",
    ),
    (
        {"draft": {"kind": "dflash", "block_size": 1}},
        "draft.block_size: input should be greater than or equal to 2, got 1",
    ),
    ({"draft": {"kind": "dflash", "window": 3}}, "draft: window 3 is below block_size 16"),
    (
        {"draft": {"kind": "dflash", "simulate_accept": 17}},
        "draft: simulate_accept 17.0 exceeds the 16 tokens a round can yield",
    ),
    ({"draft": {"kind": "ddtree", "max_nodes": 9}}, "draft: max_nodes belongs to nodes: auto"),
    (
        {"draft": {"kind": "ddtree", "width": 1, "nodes": 14}},
        "draft: width 1 is a chain and needs nodes >= block_size − 1 = 15",
    ),
    (
        {"draft": {"kind": "ddtree", "width": 1, "nodes": "auto", "max_nodes": 14}},
        "draft: width 1 is a chain and needs nodes >= block_size − 1 = 15",
    ),
    ({"draft": {"kind": "policy", "by_running": []}}, "draft.by_running: is empty"),
    (
        {"draft": {"kind": "policy", "by_running": [[1, None, {"kind": "policy", "by_running": []}]]}},
        "draft.by_running.0.2.kind: 'policy' is none of none, dflash, ddtree",
    ),
    (
        {"graphs": {"kind": "captured", "batch_sizes": [2, 1]}},
        "graphs: batch_sizes must ascend without repeats: [2, 1]",
    ),
    (
        {"graphs": {"kind": "captured", "batch_sizes": [32]}},
        "EngineConfig: graphs.batch_sizes reaches 32, but memory.max_running is 16",
    ),
    ({"parallel": {"tensor": 4, "expert": 3}}, "parallel: expert 3 must divide tensor 4"),
    ({"memory": {"kv_fraction": 0.5, "kv_tokens": 9}}, "memory: kv_fraction and kv_tokens exclude each other"),
    ({"memory": {"kv_fraction": 1.0}}, "memory.kv_fraction: input should be less than 1, got 1.0"),
    ({"model": {"target": "x", "dtype": "fp16"}}, "model.dtype: 'fp16' is none of auto, bfloat16, float32, float64"),
    (
        {"model": {"target": "x", "dtype": "float23"}},
        "model.dtype: 'float23' is none of auto, bfloat16, float32, float64, did you mean float32?",
    ),
    ({"model": {}}, "model.target: is missing"),
    ({"model": {"target": ""}}, "model.target: is empty"),
    ({"model": "bundled"}, "model: a mapping is meant, got 'bundled'"),
    ({"backend": {"version": 0.5}}, 'backend.version: a word is meant here, so quote it: "0.5"'),
]


@pytest.mark.parametrize(("sections", "line"), CASES)
def test_one_line_says_what_is_wrong(sections: dict[str, Any], line: str) -> None:
    assert problems(**sections) == [line]


@THOROUGH
@given(policy=policies(), data=st.data())
def test_a_policy_covers_every_load_once(policy: dict[str, Any], data: st.DataObject) -> None:
    ranges = policy["by_running"]
    assert problems(draft=policy) == []
    index = data.draw(st.integers(0, len(ranges) - 1))
    moved = [list(each) for each in ranges]
    moved[index][0] += data.draw(st.sampled_from([1, 2]))
    assert problems(draft={"kind": "policy", "by_running": moved})
    closed = [list(each) for each in ranges]
    closed[-1][1] = closed[-1][0]
    assert problems(draft={"kind": "policy", "by_running": closed})


def test_tree_rows() -> None:
    assert DDTreeDraft(nodes=31).verify_rows == 32
    assert DDTreeDraft(nodes="auto").verify_rows == 64
    assert DDTreeDraft(nodes="auto", max_nodes=99).verify_rows == 100
    assert DFlashDraft(block_size=8).verify_rows == DFlashDraft(block_size=8).longest_path == 8


# --- launch files ---

ENTRY = "{config: {model: {target: bundled}}}"
BAD_LAUNCH = [
    ("entries: []", "entries: is empty"),
    ("entries: 3", "entries: input should be a valid tuple, got 3"),
    ("schema: 2\nmodel: {target: bundled}", "schema 2 is unknown, this version reads schema 1"),
    ("schema: yes\nmodel: {target: bundled}", "schema True is unknown"),
    (f"schema: 2\nentries: [{ENTRY}]", "schema: input should be 1, got 2"),
    ("entries: [{from: 0, config: {model: {target: x}}}]", "entries.0.from: input should be greater than 0"),
    ("entries: [{frm: 1, config: {model: {target: x}}}]", "entries.0.frm: no such field, did you mean entries.0.from?"),
    ("entries: [{config: {model: {traget: x}}}]", "did you mean entries.0.config.model.target?"),
    (f"entries: [{{from: 3, to: 2, config: {{model: {{target: x}}}}}}, {ENTRY}]", "the range is empty: 3 to 2"),
    ("entries: [{from: 2, config: {model: {target: x}}}]", "entry 0 starts at 2, expected 1"),
    (f"entries: [{ENTRY}, {ENTRY}]", "entry 0 has no `to`"),
    (f"entries: [{ENTRY}]\nexpected: {{1: {{a: [2, 1]}}}}", "expected.1.a: the interval 2.0 to 1.0 is empty"),
    (f"entries: [{ENTRY}]\nexpected: {{0: {{a: [1, 2]}}}}", "expected.0: input should be greater than 0"),
    (f"entries: [{ENTRY}]\nstudy: {{name: s}}", "study.trial: is missing; study.digest: is missing"),
    (f"entries: [{ENTRY}]\ndeploy: {{replicas: 0}}", "deploy.replicas"),
    ("- 1", "expected a mapping"),
    ("", "expected a mapping"),
    ("[1", "not YAML"),
    ("x: " + "[" * 1100, "not YAML"),
    ("\0", "not YAML"),
    ("a: &a [*a]", "model: is missing; a: no such field"),
    ("model: {target: bundled}\nmodel: {target: [", "not YAML"),
    ("model: {target: bundled}\nmemory: {max_running: 1}\nmemory: {page_size: 2}", ":3: 'memory' stands twice"),
    ("model: {target: bundled, target: other}", ":1: 'target' stands twice"),
]


@pytest.mark.parametrize(("text", "words"), BAD_LAUNCH)
def test_a_bad_launch_file_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_launch(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_endless_launch_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="/dev/zero: longer than 4 MiB"):
        load_launch(Path("/dev/zero"))


def test_an_unreadable_launch_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_launch(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_launch(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"model: {target: \xff}")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_launch(tmp_path / "latin.yaml")


@THOROUGH
@given(
    document=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from([*field_names(LaunchFile), "kind", "x"]), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_any_document_is_read_or_refused(tmp_path: Path, document: object) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    assert "\n" not in _refusal(path)


def _refusal(path: Path) -> str:
    try:
        load_launch(path)
    except ConfigError as error:
        return str(error)
    return ""


def test_several_entries_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    config = "config: {model: {target: bundled}}"
    path.write_text(f"entries: [{{from: 1, to: 4, {config}}}, {{from: 5, {config}}}]")
    assert [(entry.first, entry.last) for entry in load_launch(path).entries] == [(1, 4), (5, None)]


# --- where the files lie ---


def test_folders(tmp_path: Path) -> None:
    chain = DFlashDraft()
    assert target_folder(bundled()) == PAIR / "target"
    assert draft_folder(bundled(), chain) == PAIR / "draft"
    local = EngineConfig(model=Model(target=str(tmp_path)))
    assert target_folder(local) == tmp_path
    assert draft_folder(local, chain) == tmp_path / "draft"
    assert draft_folder(local, DFlashDraft(model="bundled")) == PAIR / "draft"
    assert draft_folder(local, DFlashDraft(model="~/x")) == Path.home() / "x"


def test_a_home_that_nobody_has_is_a_missing_folder() -> None:
    assert expanded("~nobody-of-this-name/model") == Path("~nobody-of-this-name/model")
    assert expanded("~/model") == Path.home() / "model"
