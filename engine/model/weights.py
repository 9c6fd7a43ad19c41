"""Weights from safetensors, sharded or not, checked against the shapes the config implies; or drawn at random."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelError, UnsupportedModel

Shapes = Mapping[str, tuple[int, ...]]
DUMMY_STD = 0.02


def load_weights(
    folder: Path,
    shapes: Shapes,
    dtype: torch.dtype,
    device: torch.device,
    prefixes: tuple[str, ...] = ("",),
    spare: tuple[str, ...] | None = None,
) -> dict[str, Tensor]:
    """Return the tensors named by `shapes`, converted; integer tensors keep their type.

    A name may be stored behind any of `prefixes`. Other tensors are left unread; when `spare` is given, only names
    that end with one of it may be left.

    Raises:
        ModelError: a file is missing or truncated, a tensor is missing or of another shape.
        UnsupportedModel: a tensor that would be left unread but is not spare.
    """
    found: dict[str, Tensor] = {}
    for path in _files(folder):
        for name, tensor in _read(path, shapes, device, prefixes, spare):
            if tuple(tensor.shape) != tuple(shapes[name]):
                raise ModelError(
                    f"{path}: {name} has shape {list(tensor.shape)}, config.json implies {list(shapes[name])}; "
                    "config and weights belong to different models"
                )
            found[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    missing = [name for name in shapes if name not in found]
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} tensors are missing, first {missing[0]}; the checkpoint is incomplete or "
            "of another architecture"
        )
    return found


def dummy_weights(shapes: Shapes, dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Tensor]:
    """Return random tensors of the same names and shapes: norms are ones, the rest normal(0, 0.02)."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if len(shape) == 1:
            tensor.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        else:
            tensor.normal_(0.0, DUMMY_STD, generator=generator)
        tensors[name] = tensor
    return tensors


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.exists():
            raise ModelError(f"{folder}: no model.safetensors and no model.safetensors.index.json; weights are missing")
        return [single]
    try:
        mapping = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in mapping.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not an index of safetensors files ({error}); download it again") from error
    paths = [folder / Path(name).name for name in names]
    for path in paths:
        if not path.exists():
            raise ModelError(f"{path}: named by the index but missing; download it")
    return paths


def _read(
    path: Path, shapes: Shapes, device: torch.device, prefixes: tuple[str, ...], spare: tuple[str, ...] | None
) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            for stored in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                name = _strip(stored, shapes, prefixes)
                if name is not None:
                    yield name, file.get_tensor(stored)
                elif spare is not None and not stored.endswith(spare):
                    raise UnsupportedModel(
                        f"{path}: holds {stored}, which is no part of a plain DFlash drafter; without it the drafter "
                        "would propose worse, so it is refused"
                    )
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a whole safetensors file ({error}); download it again") from error


def _strip(stored: str, shapes: Shapes, prefixes: tuple[str, ...]) -> str | None:
    for prefix in prefixes:
        if stored.startswith(prefix) and stored[len(prefix) :] in shapes:
            return stored[len(prefix) :]
    return None
