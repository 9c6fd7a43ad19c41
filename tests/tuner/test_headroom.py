from __future__ import annotations

from pathlib import Path

import pytest

from engine import estimate
from engine.config import EngineConfig
from tuner.headroom import headroom
from tuner.records import Level

PAIR = Path(__file__).resolve().parents[1] / "data" / "smoke_pair"


def level(concurrency: int, speed: float | None, accept: float) -> Level:
    return Level(concurrency=concurrency, metrics={"output_tok_s": speed, "accept_length": accept}, n=6)


def config(**draft: object) -> EngineConfig:
    return EngineConfig.model_validate({"model": {"target": str(PAIR / "target")}, "draft": draft or {"kind": "none"}})


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "detect_machine", lambda: estimate.gpu("NVIDIA H200"))


@pytest.mark.usefixtures("h200")
def test_a_share_of_the_roofline() -> None:
    found = headroom(config(), [level(1, 1000.0, 1.0), level(8, 4000.0, 1.0), level(16, None, 1.0)])
    assert found is not None
    assert set(found) == {"1", "8"}
    for part in found.values():
        assert 0 < part["share"] < 1
        assert part["bound"] in ("memory", "compute")
    assert found["1"]["share"] == pytest.approx(1000 / found["1"]["tok_s_limit"])
    assert found["8"]["tok_s_limit"] > found["1"]["tok_s_limit"]


@pytest.mark.usefixtures("h200")
def test_acceptance_moves_the_limit() -> None:
    draft = {"kind": "dflash", "model": str(PAIR / "draft"), "block_size": 4}
    low = headroom(config(**draft), [level(1, 1000.0, 1.5)])
    high = headroom(config(**draft), [level(1, 1000.0, 3.0)])
    assert low is not None
    assert high is not None
    assert high["1"]["tok_s_limit"] > 1.9 * low["1"]["tok_s_limit"]


def test_where_nothing_is_known_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "detect_machine", estimate.cpu_machine)
    assert "bandwidth" in (headroom(config(), [level(1, 100.0, 1.0)]) or {})["unknown"]
    elsewhere = EngineConfig.model_validate({"model": {"target": "/nowhere"}})
    monkeypatch.setattr(estimate, "detect_machine", lambda: estimate.gpu("NVIDIA H200"))
    assert "/nowhere" in (headroom(elsewhere, [level(1, 100.0, 1.0)]) or {})["unknown"]
    assert headroom(config(), [level(1, None, 1.0)]) is None
