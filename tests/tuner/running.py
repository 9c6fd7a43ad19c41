"""What tests of running trials share: specs, plans, and who is still there."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.fake_server.plan import FakeBackend, Plan
from tests.waiting import alive
from tuner.records import Event, Limits, TrialRecord, TrialSpec, Workload
from tuner.trial import run_trial

FAKE_WORKER = (sys.executable, str(Path(__file__).resolve().parents[1] / "fake_server" / "worker.py"))
CLIENT_LAG = 1000.0  # answers of a fake server take milliseconds: no busy machine keeps to 1 % of that


def prompts(folder: Path, chat: bool = False) -> Path:
    """Write a file of 20 prompts."""
    path = folder / ("chat.jsonl" if chat else "prompts.jsonl")
    lines = [{"messages": [{"role": "user", "content": f"p{i}"}]} if chat else {"prompt": f"p{i}"} for i in range(20)]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def make_spec(folder: Path, plan: Plan, *, chat: bool = False, window: float = 0.1, **changes: Any) -> TrialSpec:
    """Return a short trial of a fake server."""
    changes.setdefault("levels", (2,))
    limits = {"ready_s": 20.0, "request_s": 10.0, "stop_s": 5.0} | changes.pop("limits", {})
    return TrialSpec(
        study=str(folder / "study"),
        trial=1,
        role="search",
        config=plan.config(folder),
        workload=Workload(prompts=str(prompts(folder, chat)), output_tokens=16, window=window, client_lag=CLIENT_LAG),
        served_name="fake",
        limits=Limits(**limits),
        **changes,
    )


def run_fake(
    folder: Path, plan: Plan, backend: FakeBackend | None = None, **changes: Any
) -> tuple[TrialRecord, list[Event]]:
    """Run a trial of a fake server in this process."""
    events: list[Event] = []
    record = asyncio.run(run_trial(make_spec(folder, plan, **changes), events.append, backend or FakeBackend()))
    return record, events


def family(mark: str) -> list[int]:
    """Return the living processes whose command line mentions `mark`."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    if mark.encode() in file.read() and alive(int(name)):
                        found.append(int(name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found
