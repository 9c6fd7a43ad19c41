"""Estimates against the files of a trained pair: bytes on disk, read from the safetensors headers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from engine.config import DFlashDraft, EngineConfig, Memory, Model
from engine.estimate import draft_parameters, memory, parameters, read_draft_shape, read_shape
from engine.machine import cpu_machine

PAIR = Path(__file__).parents[1] / "data" / "smoke_pair"


def stored(folder: Path) -> tuple[int, int]:
    """Return (elements, bytes) of all tensors of a folder."""
    elements = size = 0
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        elements += sum(math.prod(tensor["shape"]) for tensor in header.values())
        size += len(data) - 8 - length
    return elements, size


def test_parameters_and_bytes_equal_the_files() -> None:
    target, drafter = read_shape(PAIR / "target"), read_draft_shape(PAIR / "draft")
    assert drafter.mismatch(target) is None
    config = EngineConfig(
        model=Model(target=str(PAIR / "target"), dtype=target.dtype if target.dtype != "float16" else "auto"),
        draft=DFlashDraft(model=str(PAIR / "draft"), block_size=min(16, drafter.block_size)),
        memory=Memory(kv_tokens=1024),
    )
    need = memory(config, target, drafter, cpu_machine())
    assert (parameters(target).total, need.weights) == stored(PAIR / "target")
    assert (draft_parameters(drafter).total, need.draft_weights) == stored(PAIR / "draft")


def test_the_reader_counts(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    assert stored(tmp_path) == (6, 24)


@pytest.mark.parametrize("part", ["target", "draft"])
def test_the_pair_is_there(part: str) -> None:
    assert list((PAIR / part).glob("*.safetensors"))
