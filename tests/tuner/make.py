"""Short forms of records for tests."""

from __future__ import annotations

from typing import Any

from engine.config import EngineConfig
from tests.tuner.tiny_worker import measured
from tuner.records import Failure, Level, TrialRecord, config_dict


def config(draft: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return a normal-form configuration of the bundled pair."""
    fields = {"model": {"target": "bundled"}, "draft": draft or {"kind": "none"}, "memory": {"max_running": 16}}
    return config_dict(EngineConfig.model_validate(fields | more))


def level(
    concurrency: int, tpot: float | None, speed: float | None, ttft: float | None = 50.0, spread: float = 0.05
) -> Level:
    """Return a level with three metrics and intervals of ± `spread`."""
    metrics = {"tpot_ms_p50": tpot, "output_tok_s": speed, "ttft_ms_p90": ttft}
    intervals = {k: (v * (1 - spread), v * (1 + spread)) for k, v in metrics.items() if v is not None}
    return Level(concurrency=concurrency, metrics=metrics, intervals=intervals, n=20)


def record(trial: int, levels: list[Level] | None = None, **more: Any) -> TrialRecord:
    """Return a measured record, or a failed one without levels."""
    fields: dict[str, Any] = {
        "trial": trial,
        "role": "baseline" if trial == 0 else "search",
        "state": "measured" if levels else "failed",
        "config": config() if trial == 0 else config({"kind": "dflash", "block_size": 2 + trial % 200}),
        "levels": levels or [],
        "seconds": {"ready": 2.0, "load": 3.0},
    }
    if not levels:
        fields["failure"] = Failure(kind="oom_load", stage="load", evidence=("out of memory",), advice="lower it")
    return TrialRecord.model_validate(fields | more)


def measure(config: EngineConfig, concurrency: int) -> Level:
    """Return what the tiny worker says of a configuration."""
    return Level.model_validate(measured(config_dict(config)["draft"], concurrency))
