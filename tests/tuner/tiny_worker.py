"""A worker that speaks the worker's protocol and computes what it measures: no server, no load.

What it answers is a smooth function of the configuration, so that a study over it has a known best. A file
`misbehave.json` in the study's folder, {trial: how}, makes single trials fail, crash, hang or babble.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from engine.config import DFlashDraft, EngineConfig
from tuner.records import Event, Failure, Level, TrialRecord, TrialSpec, config_dict


def speed(config: EngineConfig, concurrency: int) -> float:
    """Tokens per second: block 8 and two layers are best alone, no speculation is best at 8."""
    alone = 100.0
    if isinstance(config.draft, DFlashDraft):
        block, layers = config.draft.block_size, config.draft.layers or 4
        alone *= max(0.2, 2.0 - 0.1 * abs(block - 8) - 0.1 * abs(layers - 2))
        return alone * concurrency / (1 + 0.3 * (block + 2) * (concurrency - 1) / 8)
    return alone * concurrency / (1 + 0.05 * (concurrency - 1))


def measure(config: EngineConfig, concurrency: int) -> Level:
    """Return what is said to be measured."""
    total = speed(config, concurrency)
    metrics: dict[str, float | None] = {
        "tpot_ms_p50": 1000 * concurrency / total,
        "output_tok_s": total,
        "ttft_ms_p90": 20.0 * concurrency,
        "accept_length": 3.0 if isinstance(config.draft, DFlashDraft) else 1.0,
    }
    intervals = {name: (value * 0.99, value * 1.01) for name, value in metrics.items() if value is not None}
    return Level(concurrency=concurrency, metrics=metrics, intervals=intervals, n=24)


def main() -> int:
    spec = TrialSpec.model_validate_json(sys.stdin.buffer.read())

    def say(event: Event) -> None:
        os.write(1, event.model_dump_json().encode() + b"\n")

    say(Event(kind="begin", trial=spec.trial, stage="lease", time=time.time()))
    plan = Path(spec.study) / "misbehave.json"
    how = json.loads(plan.read_text()).get(str(spec.trial)) if plan.is_file() else None
    record = TrialRecord(
        trial=spec.trial,
        role=spec.role,
        state="measured",
        config=config_dict(spec.config),
        resolved=config_dict(spec.config),
        seconds={"ready": 0.01, "load": 0.01},
    )
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "babble":
        os.write(1, b"this is no event\n")
    if how == "hang":
        Path(spec.study, "hanging").write_text(str(os.getpid()))
        while True:
            signal.pause()
    if how is not None:
        failure = Failure(kind=how, stage="ready", evidence=("<b>boom</b> & more",), advice="do otherwise")
        record = record.model_copy(update={"state": "failed", "failure": failure})
    else:
        levels = []
        for concurrency in spec.levels:
            say(Event(kind="begin", trial=spec.trial, stage="load", level=concurrency, time=time.time()))
            levels.append(measure(spec.config, concurrency))
            data = levels[-1].model_dump(mode="json")
            say(Event(kind="end", trial=spec.trial, stage="load", level=concurrency, time=time.time(), data=data))
        record = record.model_copy(update={"levels": tuple(levels)})
    say(Event(kind="record", trial=spec.trial, stage="stop", time=time.time(), record=record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
