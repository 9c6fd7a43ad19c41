"""What goes wrong at start: one line that says what to do, and the exit status of its cause."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from engine.__main__ import main
from tests.engine.tiny import make_draft, make_target

Break = Callable[[Path, dict[str, object]], None]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    make_target(folder)
    make_draft(folder / "draft", folder)
    return folder


def truncate(folder: Path, config: dict[str, object]) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1000)


def reshape(folder: Path, config: dict[str, object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name][:-1].clone()}, path)


def drop_tensor(folder: Path, config: dict[str, object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)


def other_target(folder: Path, config: dict[str, object]) -> None:
    make_target(folder / "other", hidden_size=32, num_hidden_layers=6)
    make_draft(folder / "other" / "draft", folder / "other")
    config["draft"] = {"kind": "dflash", "model": str(folder / "other" / "draft")}


def no_folder(folder: Path, config: dict[str, object]) -> None:
    config["model"] = {"target": str(folder / "nowhere")}


def no_weights(folder: Path, config: dict[str, object]) -> None:
    (folder / "model.safetensors").unlink()


def no_shard(folder: Path, config: dict[str, object]) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def other_family(folder: Path, config: dict[str, object]) -> None:
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | {"model_type": "mamba"}))


def unknown_key(folder: Path, config: dict[str, object]) -> None:
    config["draft"] = {"kind": "dflash", "block_sizes": 8}


def not_yet(folder: Path, config: dict[str, object]) -> None:
    config["parallel"] = {"tensor": 2}


def too_many_layers(folder: Path, config: dict[str, object]) -> None:
    config["draft"] = {"kind": "dflash", "layers": 9}


def too_long(folder: Path, config: dict[str, object]) -> None:
    config["model"] = {"target": str(folder), "max_len": 10**6}


def extra_draft_tensor(folder: Path, config: dict[str, object]) -> None:
    path = folder / "draft" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"embed_tokens.weight": tensors["fc.weight"].clone()}, path)


CASES: dict[str, tuple[Break, int, str, str]] = {
    "no folder": (no_folder, 3, "missing_file", "no such folder"),
    "no weights": (no_weights, 3, "missing_file", "weights are missing"),
    "shard missing": (no_shard, 3, "missing_file", "model-00002-of-00002.safetensors"),
    "truncated": (truncate, 3, "missing_file", "download it again"),
    "wrong shape": (reshape, 3, "missing_file", "mlp.up_proj.weight"),
    "tensor missing": (drop_tensor, 3, "missing_file", "model.norm.weight"),
    "another target's drafter": (other_target, 3, "missing_file", "drafter"),
    "a drafter with parts of its own": (extra_draft_tensor, 3, "unsupported_model", "embed_tokens.weight"),
    "another family": (other_family, 3, "unsupported_model", "mamba"),
    "unknown key": (unknown_key, 2, "config", "did you mean draft.block_size?"),
    "not yet": (not_yet, 2, "config", "parallel.tensor"),
    "too many draft layers": (too_many_layers, 2, "config", "draft.layers"),
    "longer than the model": (too_long, 2, "config", "model.max_len"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_start_is_one_line_and_its_exit_status(
    name: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, code, kind, words = CASES[name]
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    config: dict[str, object] = {"model": {"target": str(folder), "dtype": "float32"}, "draft": {"kind": "dflash"}}
    spoil(folder, config)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    capsys.readouterr()  # what making the model printed
    status = main(["generate", "--config", str(path), "a"])
    out, err = capsys.readouterr()
    document = json.loads(err)
    assert (status, document["code"], document["kind"]) == (code, code, kind), document
    assert words in document["message"]
    assert "\n" not in document["message"]
    assert out == ""


def test_the_good_model_generates(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cases above fail for their own reason only: the unspoilt model works."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"model": {"target": str(good), "dtype": "float32"}, "draft": {"kind": "dflash"}}))
    assert main(["generate", "--config", str(path), "--max-tokens", "5", "--json", "a"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"]


def test_a_server_that_cannot_load_exits_with_the_cause(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    truncate(folder, {})
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"model": {"target": str(folder), "dtype": "float32"}}))
    done = run("serve", str(path), "--port", "0")
    document = json.loads(done.stderr.strip().splitlines()[-1])
    assert (done.returncode, document["event"], document["kind"]) == (3, "exit", "missing_file")
    assert "download it again" in document["message"]


def test_port_in_use(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {target: bundled}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", str(path), "--port", str(port))
    document = json.loads(done.stderr.strip().splitlines()[-1])
    assert (done.returncode, document["code"], document["kind"]) == (6, 6, "port")
    assert str(port) in document["message"]


@pytest.mark.parametrize(
    "text",
    ["", "[1, 2]", "model: bundled", "a: b: c", "model: {target: off}", "entries: []", "\x00", "schema: 7\nmodel: {}"],
)
def test_a_bad_config_file_names_itself(text: str, tmp_path: Path) -> None:
    from engine.config import load_launch
    from engine.errors import ConfigError

    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_launch(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "engine", *arguments], capture_output=True, text=True, timeout=120, env=environment
    )
