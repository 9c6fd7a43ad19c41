"""A worker that speaks the worker's protocol and computes what it measures: no server, no load, and no imports but
the standard library's, since a study of tests starts it a dozen times.

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
from typing import Any


def speed(draft: dict[str, Any], concurrency: int) -> float:
    """Tokens per second: block 8 and two layers are best alone, no speculation is best at 8."""
    alone = 100.0
    if draft["kind"] == "dflash":
        block, layers = draft["block_size"], draft["layers"] or 4
        alone *= max(0.2, 2.0 - 0.1 * abs(block - 8) - 0.1 * abs(layers - 2))
        return alone * concurrency / (1 + 0.3 * (block + 2) * (concurrency - 1) / 8)
    return alone * concurrency / (1 + 0.05 * (concurrency - 1))


def measured(draft: dict[str, Any], concurrency: int) -> dict[str, Any]:
    """Return what is said to be measured: a level."""
    total = speed(draft, concurrency)
    metrics = {
        "tpot_ms_p50": 1000 * concurrency / total,
        "output_tok_s": total,
        "ttft_ms_p90": 20.0 * concurrency,
        "accept_length": 3.0 if draft["kind"] == "dflash" else 1.0,
    }
    intervals = {name: (value * 0.99, value * 1.01) for name, value in metrics.items()}
    return {"concurrency": concurrency, "metrics": metrics, "intervals": intervals, "n": 24}


def main() -> int:
    spec = json.load(sys.stdin.buffer)

    def say(kind: str, stage: str, **more: Any) -> None:
        event = {"kind": kind, "trial": spec["trial"], "stage": stage, "time": time.time()} | more
        os.write(1, json.dumps(event).encode() + b"\n")

    say("begin", "lease")
    plan = Path(spec["study"]) / "misbehave.json"
    how = json.loads(plan.read_text()).get(str(spec["trial"])) if plan.is_file() else None
    record = {name: spec[name] for name in ("trial", "role", "config")}
    record |= {"state": "measured", "resolved": spec["config"], "seconds": {"ready": 0.01, "load": 0.01}}
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "babble":
        os.write(1, b"this is no event\n")
    if how == "hang":
        Path(spec["study"], "hanging").write_text(str(os.getpid()))
        while True:
            signal.pause()
    if how is not None:
        failure = {"kind": how, "stage": "ready", "evidence": ["<b>boom</b> & more"], "advice": "do otherwise"}
        record |= {"state": "failed", "failure": failure}
    else:
        record["levels"] = []
        for concurrency in spec["levels"]:
            say("begin", "load", level=concurrency)
            record["levels"].append(measured(spec["config"]["draft"], concurrency))
            say("end", "load", level=concurrency, data=record["levels"][-1])
    say("record", "stop", record=record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
