"""One trial of the real engine in a real worker: the smoke pair, with and without speculation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from tests.tuner.running import family
from tuner.executors.local import LocalExecutor
from tuner.records import TrialSpec, Workload

PAIR = Path(__file__).resolve().parents[1] / "data" / "smoke_pair"
DFLASH = {"kind": "dflash", "model": str(PAIR / "draft"), "block_size": 4}


@pytest.mark.parametrize("draft", [{"kind": "none"}, DFLASH], ids=["none", "dflash"])
def test_the_engine_is_measured(tmp_path: Path, draft: dict[str, Any]) -> None:
    prompts = json.loads((PAIR / "prompts.json").read_text(encoding="utf-8"))
    lines = [json.dumps({"token_ids": prompt["token_ids"]}) for prompt in prompts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    model = {"target": str(PAIR / "target"), "dtype": "float32"}
    config = EngineConfig.model_validate({"model": model, "draft": draft})
    spec = TrialSpec(
        study=str(tmp_path / "study"),
        trial=0,
        role="baseline",
        config=config,
        workload=Workload(prompts=str(tmp_path / "prompts.jsonl"), output_tokens=24, window=0.3, client_lag=1000.0),
        levels=(1, 3),
        served_name=config.model.target,
    )
    with LocalExecutor() as executor, executor.run(spec) as events:
        *_, last = events
    record = last.record
    assert record is not None
    assert record.failure is None, record.failure
    assert record.resolved is not None
    assert record.resolved["draft"]["kind"] == draft["kind"]
    for level in record.levels:
        assert level.n >= 6
        assert level.metrics["error_rate"] == 0
        assert (level.metrics["output_tok_s"] or 0) > 0
        accepted = level.metrics["accept_length"] or 0
        assert accepted == 1 if draft["kind"] == "none" else 1 <= accepted <= 4
    assert family(str(tmp_path)) == []
