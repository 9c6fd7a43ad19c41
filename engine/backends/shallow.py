"""A drafter with only its first layers, as a folder that any server loads: `draft.layers` where no option exists.

The folder is made once and kept in the user's cache, named by the content it was made from; the model's own folder
is never written. safetensors files are a JSON table and bytes (no code, no tensor library needed): the kept tensors
are copied as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from engine.errors import ModelError
from engine.estimate import DraftShape, read_draft_shape

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_NAME = re.compile(r"[0-9a-f]{16}-first-(\d+)")
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
_MAX_HEADER = 64 * 2**20
_MAX_SIDE_FILE = 16 * 2**20
_CHUNK = 8 * 2**20


@dataclass(frozen=True)
class _Tensor:
    """A tensor in a file: its table entry, and where its bytes lie."""

    entry: Mapping[str, Any]
    path: Path
    start: int
    size: int


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where generated drafters are kept."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "dflash-tuner" / "drafts"


def shallow_name(path: str) -> int | None:
    """Return how many layers a folder made by `first_layers` holds; None for any other folder."""
    match = _NAME.fullmatch(Path(path).name)
    return int(match[1]) if match else None


def first_layers(folder: Path, layers: int, cache: Path | None = None, *, dummy: bool = False) -> Path:
    """Return a folder that holds the drafter of `folder` with its first `layers` layers; made when it is not there.

    The whole drafter is returned as it is when it has no more layers. `dummy`: a server draws its weights, and needs
    none of these.

    Raises:
        ModelError: no DFlash drafter, not as safetensors, damaged, or the cache cannot be written.
    """
    shape = read_draft_shape(folder)
    if layers >= shape.layers:
        return folder
    cache = cache_folder() if cache is None else cache
    try:
        files = [] if dummy else sorted(folder.glob("*.safetensors"))
        if not files and not dummy:
            raise ModelError(f"{folder}: no *.safetensors; draft.layers needs the drafter's weights as safetensors")
        made = cache / f"{_digest([folder / 'config.json', *(_side_files(folder) if dummy else files)])}-first-{layers}"
        if made.is_dir():
            return made
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=cache) as temporary:
            work = Path(temporary) / made.name
            work.mkdir()
            _write_config(folder, work, shape, layers)
            if not dummy:
                _write_weights(files, work / "model.safetensors", layers)
            _copy_side_files(folder, work)
            try:
                work.rename(made)
            except OSError:
                if not made.is_dir():  # else another process made the same meanwhile
                    raise
    except OSError as error:
        raise ModelError(f"{folder}: a drafter of {layers} layers cannot be made in {cache}: {error}") from error
    return made


def _digest(paths: list[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()[:16]


def _write_config(folder: Path, work: Path, shape: DraftShape, layers: int) -> None:
    """Rewrite config.json: fewer layers, and the tapped target layers by name.

    Without names they follow from the number of layers, which would now give other taps than `fc` was trained for.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    inner = config.get("dflash_config")
    nested = config.get("transformer_layer_config")
    for section in (config, inner, nested):
        if not isinstance(section, dict):
            continue
        if "num_hidden_layers" in section:
            section["num_hidden_layers"] = layers
        if isinstance(section.get("layer_types"), list):
            section["layer_types"] = section["layer_types"][:layers]
    if "speculators_model_type" not in config:
        config["dflash_config"] = {"target_layer_ids": list(shape.taps)} | {
            key: value for key, value in (inner or {}).items() if value is not None
        }
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_weights(files: list[Path], target: Path, layers: int) -> None:
    """Write one safetensors file with every tensor that belongs to no later layer."""
    kept = [
        (name, tensor)
        for path in files
        for name, tensor in _tensors(path)
        if (match := _LAYER.search(name)) is None or int(match[1]) < layers
    ]
    table: dict[str, Any] = {}
    offset = 0
    for name, tensor in kept:
        table[name] = {**tensor.entry, "data_offsets": [offset, offset + tensor.size]}
        offset += tensor.size
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with target.open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        for _, tensor in kept:
            with tensor.path.open("rb") as source:
                source.seek(tensor.start)
                _copy(source, out, tensor)


def _tensors(path: Path) -> Iterator[tuple[str, _Tensor]]:
    """Yield (name, tensor) of a safetensors file, in the order of its table."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(_MAX_HEADER, size - 8):
            raise ModelError(f"{path}: not a safetensors file; copy the drafter again")
        try:
            table = json.loads(stream.read(length))
            entries = [(name, entry) for name, entry in table.items() if name != "__metadata__"]
            spans = [tuple(map(int, entry["data_offsets"])) for _, entry in entries]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ModelError(f"{path}: its table cannot be read ({error}); copy the drafter again") from error
    data = 8 + length
    for (name, entry), (start, end) in zip(entries, spans, strict=True):
        if not 0 <= start <= end <= size - data:
            raise ModelError(f"{path}: {name} lies outside the file; copy the drafter again")
        yield name, _Tensor(entry, path, data + start, end - start)


def _copy(source: BinaryIO, out: BinaryIO, tensor: _Tensor) -> None:
    left = tensor.size
    while left:
        piece = source.read(min(left, _CHUNK))
        if not piece:
            raise ModelError(f"{tensor.path}: shorter than its table says; copy the drafter again")
        out.write(piece)
        left -= len(piece)


def _copy_side_files(folder: Path, work: Path) -> None:
    """Copy what a server may want beside the weights: tokenizer, generation config, model code."""
    for path in _side_files(folder):
        shutil.copyfile(path, work / path.name)


def _side_files(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.iterdir())
        if path.name != "config.json"
        and not path.name.endswith(_WEIGHTS)
        and path.is_file()
        and path.stat().st_size <= _MAX_SIDE_FILE
    ]
