"""How a fake server behaves, and the backend that starts it instead of an engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.backends import Launch, MetricNames, Native, Probes, RequestStats, RoundCounts
from engine.backends.base import Refusal
from engine.config import EngineConfig, LaunchEntry, Model
from engine.machine import Machine
from engine.shape import DraftShape, ModelShape

SERVER = Path(__file__).parent / "server.py"


@dataclass(frozen=True)
class Plan:
    """A fake server's behaviour.

    die_at: start (before anything), loaded (after start_s), listening, completion, stream (with answer: die),
        crowd (as soon as more than `most_at_once` are answered).
    answer: what happens to completions after the first `good_completions`, from their chunk `break_at` on; with
        `bad_completions`, only to so many of them; with `bad_every`, only to one in so many.
    start_log, start_mib: what it prints, and how much memory it takes, every 50 ms while it loads.
    redirects: paths answered with 307. statuses: paths answered with `{}` and this status.
    leak_kib: memory that every completion costs. spam_bytes: what every completion prints.
    listen: when it does; `spin` computes for ever instead, `close` stops at the first request, `deaf` accepts nobody.
    daemon: the started process leaves, and a child of a child in a session of its own serves.
    """

    start_s: float = 0.0
    ready_s: float = 0.0
    warm_s: float = 0.0
    listen: Literal["soon", "never", "spin", "close", "deaf"] = "soon"
    daemon: bool = False
    start_log: str = ""
    start_mib: int = 0
    leak_kib: int = 0
    spam_bytes: int = 0
    serve_as: str | None = None
    hang_on: tuple[str, ...] = ()
    redirects: tuple[str, ...] = ()
    statuses: dict[str, int] = field(default_factory=dict)
    die_at: str | None = None
    die_code: int = 1
    die_signal: int = 0
    last_words: tuple[str, ...] = ()
    ignore_sigterm: bool = False
    suicide_on_term: bool = False
    exit_on_term: int = 0
    children: bool = False
    chatter_bytes: int = 0
    tokens_per_chunk: int = 4
    first_ms: float = 4.0
    chunk_ms: float = 2.0
    stop_after: int | None = None
    text: str | None = None
    continuous: bool = True
    accept_length: float | None = 3.5
    keep_alive: bool = True
    buffered: bool = False
    finish: str = "length"
    overshoot: int = 0
    models: str | None = None
    good_completions: int = 0
    bad_completions: int | None = None
    bad_every: int = 1
    most_at_once: int = 10**9
    message: str = "planned"
    break_at: int = 1
    status: int = 500
    answer: Literal[
        "good",
        "error",
        "html",
        "hang",
        "reset",
        "stall",
        "die",
        "not_json",
        "error_event",
        "no_usage",
        "no_done",
        "no_finish",
    ] = "good"
    resolved: dict[str, Any] = field(default_factory=lambda: {"model": {"target": "fake"}})

    def config(self, folder: Path) -> EngineConfig:
        """Write the plan to `folder` and return the config that `FakeBackend` serves with it."""
        path = folder / "plan.json"
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return EngineConfig(model=Model(target=str(path)))


@dataclass(frozen=True)
class FakeBackend:
    """A backend whose model is a plan: `model.target` names its file."""

    kind: str = "fake"
    probes: Probes = Native().probes
    metrics: MetricNames = Native().metrics

    def command(self, config: EngineConfig, config_path: Path, host: str, port: int) -> Launch:
        argv = [sys.executable, "-I", "-S", str(SERVER), config.model.target, "fake"]
        return Launch((*argv, "--host", host, "--port", str(port)))

    def refusals(self, config: EngineConfig, machine: Machine) -> tuple[Refusal, ...]:
        return ()

    def model_refusals(self, shape: ModelShape, draft: DraftShape | None) -> tuple[Refusal, ...]:
        return ()

    def request_stats(self, body: Mapping[str, Any]) -> RequestStats:
        return Native().request_stats(body)

    def round_counts(self, metrics_text: str) -> RoundCounts | None:
        return None

    def entries(self, config: EngineConfig) -> tuple[LaunchEntry, ...]:
        return (LaunchEntry(config=config),)

    def resolved(self, server_info: Mapping[str, Any]) -> dict[str, Any]:
        return Native().resolved(server_info)
