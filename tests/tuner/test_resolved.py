from __future__ import annotations

from typing import Any

import pytest

from engine.config import EngineConfig
from tuner.records import config_dict
from tuner.resolved import silent_changes


def asked(**parts: Any) -> dict[str, Any]:
    return config_dict(EngineConfig.model_validate({"model": {"target": "t"}, **parts}))


def test_a_config_that_filled_in_the_open_values_is_the_same() -> None:
    config = asked(draft={"kind": "dflash", "block_size": 8})
    resolved = asked(
        model={"target": "/models/t", "dtype": "bfloat16", "max_len": 4096},
        draft={"kind": "dflash", "block_size": 8, "layers": 4, "model": "/models/d"},
        memory={"kv_tokens": 1024, "page_size": 32},
        attention={"backend": "torch"},
        backend={"version": "0.1.0"},
    )
    assert silent_changes(config, resolved) == []
    assert silent_changes(config, {}) == []
    assert silent_changes(config, {"memory": {}}) == []


@pytest.mark.parametrize(
    ("wanted", "runs", "line"),
    [
        ({"memory": {"max_running": 64}}, {"memory": {"max_running": 48}}, "memory.max_running: asked 64, runs 48"),
        ({"draft": {"kind": "dflash"}}, {"draft": {"kind": "none"}}, "draft.kind: asked 'dflash', runs 'none'"),
        (
            {"graphs": {"kind": "captured", "batch_sizes": [1, 4]}},
            {"graphs": {"kind": "captured", "batch_sizes": [1, 2]}},
            "graphs.batch_sizes.1: asked 4, runs 2",
        ),
        (
            {"draft": {"kind": "policy", "by_running": [[1, 4, {"kind": "dflash", "block_size": 8}], [5, None, {}]]}},
            {"draft": {"kind": "policy", "by_running": [[1, 4, {"kind": "dflash", "block_size": 4}], [5, None, {}]]}},
            "draft.by_running.0.2.block_size: asked 8, runs 4",
        ),
        (
            {"model": {"target": "t", "dtype": "float32"}},
            {"model": {"dtype": "bfloat16"}},
            "model.dtype: asked 'float32', runs 'bfloat16'",
        ),
    ],
)
def test_a_value_that_was_asked_for_and_does_not_run_is_named(wanted: Any, runs: Any, line: str) -> None:
    for part in wanted.get("draft", {}).get("by_running", []):
        part[2].setdefault("kind", "none")
    for part in runs.get("draft", {}).get("by_running", []):
        part[2].setdefault("kind", "none")
    assert silent_changes(asked(**wanted), runs) == [line]


def test_a_broken_pin_is_named() -> None:
    resolved = {"pins": {"min_free_slots_delay": {"pinned": 1, "runs": 3}}}
    assert silent_changes(asked(), resolved) == ["min_free_slots_delay: pinned to 1, runs 3"]
    assert silent_changes(asked(), {"pins": {}}) == []
