"""Estimates against the files of a trained pair: bytes on disk, read from the safetensors headers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from engine.config import DFlashDraft, EngineConfig, Memory, Model
from engine.estimate import (
    compute_dtype,
    detect_machine,
    draft_parameters,
    max_len,
    memory,
    page_size,
    parameters,
    prefill_chunk,
    read_draft_shape,
    read_shape,
)
from engine.machine import cpu_machine
from engine.runtime import resolve

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


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"draft": {"kind": "dflash", "block_size": 8, "layers": 2}},
        {"draft": {"kind": "dflash"}, "memory": {"max_running": 3, "page_size": 16}},
        {"memory": {"kv_tokens": 1000}},
        {"memory": {"kv_fraction": 0.9, "prefill_chunk": 64}},
    ],
)
def test_the_engine_resolves_what_the_estimate_assumes(sections: dict[str, Any]) -> None:
    """One rule, two readers: the tuner's forecast and what the engine then allocates."""
    folders = {"model": {"target": str(PAIR / "target"), "max_len": 256}}
    config = EngineConfig.model_validate({**folders, **sections})
    if isinstance(config.draft, DFlashDraft):
        draft = config.draft.model_copy(update={"model": str(PAIR / "draft")})
        config = config.model_copy(update={"draft": draft})
    machine = detect_machine("cpu")
    plan = resolve(config)
    need = memory(config, plan.shape, plan.draft_shape, machine)
    assert plan.config.memory.kv_tokens == need.kv_tokens
    assert plan.config.memory.page_size == page_size(config)
    assert plan.config.memory.prefill_chunk == prefill_chunk(config)
    assert plan.config.model.dtype == compute_dtype(config, plan.shape, machine)
    assert plan.config.model.max_len == max_len(config, plan.shape)
