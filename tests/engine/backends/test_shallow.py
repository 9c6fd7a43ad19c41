"""A drafter's first layers as a folder: exactly its tensors, its config, and nothing written beside the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.backends.shallow import first_layers, shallow_name
from engine.config import PAIR
from engine.errors import ModelError
from engine.estimate import read_draft_shape

DRAFT = PAIR / "draft"


def test_keeps_the_first_layers_and_everything_outside_layers(tmp_path: Path) -> None:
    made = first_layers(DRAFT, 2, tmp_path)
    assert shallow_name(str(made)) == 2
    whole, part = load_file(DRAFT / "model.safetensors"), load_file(made / "model.safetensors")
    later = {name for name in whole if "layers.2." in name or "layers.3." in name}
    assert later
    assert set(part) == set(whole) - later
    assert all(torch.equal(part[name], whole[name]) for name in part)
    before, after = read_draft_shape(DRAFT), read_draft_shape(made)
    assert after.layers == 2
    assert (after.taps, after.block_size, after.mask_token_id) == (before.taps, before.block_size, before.mask_token_id)


def test_is_made_once_and_by_content(tmp_path: Path) -> None:
    first = first_layers(DRAFT, 1, tmp_path)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert first_layers(DRAFT, 1, tmp_path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert sorted(path.name for path in tmp_path.iterdir()) == [first.name]
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((DRAFT / name).read_bytes())
    assert first_layers(copy, 1, tmp_path) == first
    (copy / "config.json").write_text(
        (DRAFT / "config.json").read_text().replace('"block_size": 16', '"block_size": 8')
    )
    assert first_layers(copy, 1, tmp_path) != first


def test_all_layers_are_the_folder_itself(tmp_path: Path) -> None:
    assert first_layers(DRAFT, 4, tmp_path) == DRAFT
    assert list(tmp_path.iterdir()) == []


def test_random_weights_need_no_files(tmp_path: Path) -> None:
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_bytes((DRAFT / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        first_layers(shape, 1, tmp_path / "cache")
    made = first_layers(shape, 1, tmp_path / "cache", dummy=True)
    assert [path.name for path in made.iterdir()] == ["config.json"]
    assert read_draft_shape(made).layers == 1
    assert first_layers(DRAFT, 1, tmp_path / "cache") != made  # with weights it is another drafter


def sharded(folder: Path, **changes: object) -> Path:
    """A drafter in two files, with default taps, prefixed names and a file of code."""
    folder.mkdir()
    config = json.loads((DRAFT / "config.json").read_text())
    del config["dflash_config"]["target_layer_ids"]
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "dflash.py").write_text("# code of the model\n")
    tensors = {f"model.{name}": value for name, value in load_file(DRAFT / "model.safetensors").items()}
    names = sorted(tensors)
    for index, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{index}.safetensors", {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def test_shards_default_taps_and_side_files(tmp_path: Path) -> None:
    source = sharded(tmp_path / "source")
    made = first_layers(source, 1, tmp_path / "cache")
    assert sorted(path.name for path in made.iterdir()) == ["config.json", "dflash.py", "model.safetensors"]
    assert read_draft_shape(made).taps == read_draft_shape(source).taps
    assert len(load_file(made / "model.safetensors")) == len(
        load_file(first_layers(DRAFT, 1, tmp_path) / "model.safetensors")
    )


@pytest.mark.parametrize("damage", ["short", "no table", "bad span", "none"])
def test_damaged_files_are_named(tmp_path: Path, damage: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((DRAFT / "config.json").read_bytes())
    good = (DRAFT / "model.safetensors").read_bytes()
    bad = {
        "short": good[: len(good) // 2],
        "no table": b"\x10" + b"\x00" * 7 + b"not json at all!",
        "bad span": b"\x40" + b"\x00" * 7 + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4000]}}'.ljust(64),
    }
    if damage != "none":
        (source / "model.safetensors").write_bytes(bad[damage])
    with pytest.raises(ModelError, match="safetensors"):
        first_layers(source, 1, tmp_path / "cache")
    left = list((tmp_path / "cache").iterdir()) if (tmp_path / "cache").exists() else []
    assert left == []
