"""Studies of any size that were never measured: every kind of record a real one has, from a seed."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from tuner.records import Event, Failure, Level, TrialRecord, config_dict
from tuner.store import Journal, StudyFolder

LEVELS = (1, 4, 16, 48)
GPUS = 8
BEGAN = 1_790_000_000.0
SPACE = """\
schema: 1
study: {name: %(name)s, seed: 7, budget: {trials: %(trials)d}}
engine:
  model: {target: bundled}
search:
  draft.kind: [none, dflash, ddtree]
  draft.block_size: {choices: [4, 6, 8, 12, 16], when: {draft.kind: [dflash, ddtree]}}
  draft.layers: {int: [1, 4], when: {draft.kind: [dflash, ddtree]}}
  draft.nodes: {choices: [7, 15, 31, 63], when: {draft.kind: [ddtree]}}
  memory.max_running: [48, 64, 96]
  memory.page_size: [16, 32]
workload: {prompts: bundled, output_tokens: 128, concurrency: [1, 4, 16, 48], window: 20s}
objectives:
  - {metric: tpot_ms_p50, goal: min, at: 1}
  - {metric: output_tok_s, goal: max, at: 48}
constraints: [{metric: ttft_ms_p90, max: 900, at: 48}]
pick: {slo: "ttft_ms_p90<800", load: 16}
executor: {kind: local}
"""
FAILURES = {
    "oom_start": (
        "ready",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.31 GiB",
        "lower memory.kv_fraction to 0.82",
    ),
    "graph_capture": (
        "ready",
        "RuntimeError: operation not permitted when stream is capturing",
        "leave batch size 96 out of graphs.batch_sizes",
    ),
    "oom_load": ("load", "CUDA out of memory at 48 running requests", "lower memory.max_running to 64"),
}


def config(rng: random.Random, kind: str) -> dict[str, Any]:
    """Return a random configuration of one drafter kind."""
    draft: dict[str, Any] = {"kind": kind}
    if kind != "none":
        draft |= {"block_size": rng.choice([4, 6, 8, 12, 16]), "layers": rng.randint(1, 4)}
    if kind == "ddtree":
        draft["nodes"] = rng.choice([nodes for nodes in (7, 15, 31, 63) if nodes >= draft["block_size"] - 1])
    memory = {"max_running": rng.choice([48, 64, 96]), "page_size": rng.choice([16, 32])}
    return config_dict(EngineConfig.model_validate({"model": {"target": "bundled"}, "draft": draft, "memory": memory}))


def accept_length(draft: dict[str, Any]) -> float:
    """Return tokens per round: more with deeper drafts, saturating with the block."""
    if draft["kind"] == "none":
        return 1.0
    depth = (
        1
        + 0.9 * (draft["layers"] / 4) ** 0.6
        + (0.35 * math.log2(draft["nodes"]) / 3 if draft["kind"] == "ddtree" else 0)
    )
    return 1 + 1.55 * depth * (1 - math.exp(-draft["block_size"] / 6))


def level(rng: random.Random, asked: dict[str, Any], concurrency: int) -> Level:
    """Return what one concurrency might measure: verify rows are free until the batch is full of them."""
    draft = asked["draft"]
    rows = {"none": 1, "dflash": draft.get("block_size", 1), "ddtree": draft.get("nodes", 0) + 1}[draft["kind"]]
    accepted = accept_length(draft) * rng.gauss(1, 0.015)
    draft_ms = 0.0 if rows == 1 else 0.35 + 0.22 * draft["layers"] + 0.004 * concurrency
    forward_ms = (
        4.9 + 0.008 * concurrency * rows + 0.018 * concurrency + (0.1 if asked["memory"]["page_size"] == 16 else 0)
    )
    step_ms = (forward_ms + draft_ms + 0.28) * rng.gauss(1, 0.02)
    tpot = step_ms / accepted
    speed = 1000 * concurrency / tpot * 0.93
    ttft = 18 + 9.5 * concurrency * (1 + rows / 60) * rng.gauss(1, 0.04)
    metrics: dict[str, float | None] = {
        "ttft_ms_p50": ttft, "ttft_ms_p90": 1.35 * ttft, "tpot_ms_p50": tpot, "tpot_ms_p90": 1.25 * tpot,
        "chunk_gap_ms_p99": 2.1 * step_ms, "e2e_ms_p50": ttft + 127 * tpot, "output_tok_s": speed,
        "output_tok_s_per_gpu": speed, "goodput_rps": speed / 128, "accept_length": accepted, "error_rate": 0.0,
    }  # fmt: skip
    spread = 0.03 / math.sqrt(1 + concurrency / 8)
    intervals = {
        name: (value * (1 - spread), value * (1 + spread))
        for name, value in metrics.items()
        if value is not None and name not in ("error_rate", "ttft_ms_p90")
    }
    rounds = int(20_000 / step_ms)
    server: dict[str, Any] = {
        "rounds": rounds, "requests": rounds * concurrency, "tokens": int(rounds * concurrency * accepted),
        "seconds": {"prefill": 0.9, "propose": rounds * draft_ms / 1e3, "forward": rounds * forward_ms / 1e3,
                    "accept": rounds * 0.2 / 1e3, "commit": rounds * 0.08 / 1e3},
    }  # fmt: skip
    if rows > 1:
        decay = 1 - 1 / accepted
        shares = [round(decay ** (0.75 * (i + 1)), 4) for i in range(draft["block_size"] - 1)]
        server |= {"verify_count": rounds * concurrency, "by_position": shares}
    return Level(concurrency=concurrency, metrics=metrics, intervals=intervals, n=40 * concurrency, server=server)


def roofline(found: Level, draft: dict[str, Any]) -> dict[str, Any]:
    """Return a level's headroom."""
    limit = 330.0 * found.concurrency * accept_length(draft)
    bound = "memory" if found.concurrency < 40 else "compute"
    return {"share": (found.metrics["output_tok_s"] or 0) / limit, "bound": bound, "tok_s_limit": limit}


def trial(rng: random.Random, number: int, started: float) -> TrialRecord:
    """Return a record: the baseline first, then mostly measured, some failed, few refused."""
    kind = "none" if number == 0 else rng.choices(["none", "dflash", "ddtree"], [1, 4, 4])[0]
    asked = config(rng, kind)
    role = "baseline" if number == 0 else "search"
    luck = 1.0 if number == 0 else rng.random()
    seconds = {"lease": 0.01, "launch": 6.0 + rng.random(), "ready": 31 + 8 * rng.random(), "stop": 1.1}
    if luck < 0.02:
        failure = Failure(kind="config", stage="lease", evidence=("nodes 7 < block_size 12 − 1",), advice="left out")
        raw = {key: asked[key] for key in ("model", "draft", "memory")}
        return TrialRecord(trial=number, role="search", state="infeasible", config=raw, failure=failure)
    if luck < 0.11:
        named = rng.choice(list(FAILURES))
        stage, evidence, advice = FAILURES[named]
        failure = Failure.model_validate(
            {"kind": named, "stage": stage, "evidence": (f"[{number}] loading weights", evidence), "advice": advice}
        )
        levels = [level(rng, asked, c) for c in LEVELS[:3]] if stage == "load" else []
        seconds |= {"load": 66.0} if levels else {}
        return TrialRecord(
            trial=number, role="search", state="failed", config=asked, failure=failure, levels=tuple(levels),
            seconds=seconds, gpus=1, started=started,
        )  # fmt: skip
    levels = [level(rng, asked, c) for c in LEVELS]
    resolved = json.loads(json.dumps(asked))
    resolved["model"] |= {"dtype": "bfloat16", "kv_dtype": "bfloat16", "max_len": 32768}
    resolved["attention"] = {"backend": "triton"}
    headroom = {str(found.concurrency): roofline(found, asked["draft"]) for found in levels}
    return TrialRecord(
        trial=number, role="baseline" if role == "baseline" else "search", state="measured", config=asked,
        resolved=resolved, levels=tuple(levels), seconds=seconds | {"load": 88.0 + rng.random()}, headroom=headroom,
        gpus=1, started=started,
    )  # fmt: skip


def events_of(record: TrialRecord) -> list[Event]:
    """Return what a worker would have said of a record."""
    if record.started is None:
        return []
    at = record.started
    found = []
    for stage in ("lease", "launch", "ready", "load", "stop"):
        spent = record.seconds.get(stage)
        if spent is None:
            continue
        found.append(Event(kind="begin", trial=record.trial, stage=stage, time=at))
        if stage == "ready":
            found.append(Event(trial=record.trial, stage=stage, time=at + 1, text="GET /ready: HTTP 503"))
        for i, measured in enumerate(record.levels if stage == "load" else ()):
            begin = at + i * spent / len(record.levels)
            end = at + (i + 1) * spent / len(record.levels)
            data = measured.model_dump(mode="json")
            found.append(Event(kind="begin", trial=record.trial, stage=stage, level=measured.concurrency, time=begin))
            found.append(
                Event(kind="end", trial=record.trial, stage=stage, level=measured.concurrency, time=end, data=data)
            )
        at += spent
        found.append(Event(kind="end", trial=record.trial, stage=stage, time=at, text=f"{spent:.2f} s"))
    found.append(Event(kind="record", trial=record.trial, stage="stop", time=at))
    return found


def records(count: int, seed: int = 7) -> list[TrialRecord]:
    """Return records that ran on eight slots at once."""
    rng = random.Random(seed)
    free = [BEGAN] * min(GPUS, max(1, count // 4))
    made = []
    for number in range(count):
        slot = min(range(len(free)), key=free.__getitem__)
        made.append(trial(rng, number, free[slot]))
        free[slot] += sum(made[-1].seconds.values()) + 0.4
    return made


def make_study(path: Path, count: int, *, name: str = "synthetic", seed: int = 7, finish: bool = True) -> StudyFolder:
    """Write a study's folder; `finish`: with front and launch file, as a search that ended leaves it."""
    folder = StudyFolder(path)
    machine = {"cpu": "Some CPU", "cores": 96, "gpus": [{"name": "Some GPU 141 GB"}] * GPUS, "driver": "580.1"}
    provenance = {
        "schema": 1,
        "time": BEGAN,
        "machine": machine,
        "argv": ["tuner", "search", "space.yaml"],
        "seed": seed,
    }
    folder.create(SPACE % {"name": name, "trials": max(1, count)}, provenance)
    made = records(count, seed)
    with Journal(folder) as journal:
        append(journal, made)
    if finish and count:
        write_results(folder)
    return folder


def append(journal: Journal, made: list[TrialRecord]) -> None:
    """Append records with their events, those in the order of time."""
    for event in sorted((event for record in made for event in events_of(record)), key=lambda event: event.time):
        journal.event(event)
    for record in made:
        journal.record(record)


def write_results(folder: StudyFolder) -> None:
    """Write front.json and launch.yaml."""
    from tuner.export.launch_file import launch_file, write_launch
    from tuner.session import front_json, load_outcome
    from tuner.store import write_atomic

    space, outcome = load_outcome(folder)
    write_atomic(folder.front, front_json(outcome.front))
    if outcome.recommendation is not None:
        write_launch(
            launch_file(outcome.recommendation, outcome.points, space.file.study.name, space.digest), folder.launch
        )
