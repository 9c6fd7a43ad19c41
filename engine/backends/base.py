"""What every backend answers, so that no caller asks which server it is talking to."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engine.config import EngineConfig, LaunchEntry
from engine.estimate import DraftShape, Machine, ModelShape, Refusal


@dataclass(frozen=True)
class Launch:
    """A command: its arguments, and what is added to the environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Probes:
    """HTTP paths of a server."""

    health: str = "/health"  # the process is alive, whatever the load
    ready: str = "/ready"  # a generation would start now
    models: str = "/v1/models"
    server_info: str = "/server_info"
    always_informs: bool = True  # every server has server_info; False: 404 is no fault, and what runs stays unknown
    metrics: str = "/metrics"


@dataclass(frozen=True)
class MetricNames:
    """Names in the Prometheus text of /metrics; None where the server has no such metric."""

    running: str
    waiting: str
    generated_tokens: str
    kv_usage: str | None
    accept_length: str | None
    accepted_by_position: str | None


@dataclass(frozen=True)
class RequestStats:
    """How speculation went for one request; None where the server does not say.

    `verify_count` target rounds yielded the tokens after the first; `accept_length` is tokens a round.
    """

    accept_length: float | None
    verify_count: int | None


@dataclass(frozen=True)
class Ask:
    """A greedy completion by token ids: what the parity gate asks of every server.

    Exactly one of `prompt` (token ids or text) and `messages`. `top`: alternatives scored at every position, 0 asks
    for ids alone. `echo`: score the prompt's tokens too, which are then given as ids.
    """

    model: str
    max_tokens: int
    prompt: tuple[int, ...] | str = ()
    messages: tuple[Mapping[str, Any], ...] | None = None
    top: int = 0
    echo: bool = False
    ignore_eos: bool = False


@dataclass(frozen=True)
class Score:
    """How likely the target finds a token, and its likeliest alternatives (id, log-probability), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Answer:
    """What a server said to an `Ask`: token ids, a final eos included, never text tokenised anew.

    `scores`: one a token, where asked for. `prompt_scores`: one a prompt token with `echo`; None for the first.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    scores: tuple[Score | None, ...] = ()
    prompt_scores: tuple[Score | None, ...] = ()
    stats: RequestStats = RequestStats(None, None)


@dataclass(frozen=True)
class RoundCounts:
    """Tokens that verify rounds yielded, and the rounds, since the server started; both only grow."""

    tokens: float
    rounds: float

    def accept_length(self, earlier: RoundCounts) -> float | None:
        """Return tokens a round since `earlier`; None when there was no round."""
        rounds = self.rounds - earlier.rounds
        return (self.tokens - earlier.tokens) / rounds if rounds > 0 else None


def counter(metrics_text: str, name: str) -> float | None:
    """Return a Prometheus metric summed over its labels; None where the text has no finite sample of it."""
    values = []
    for line in metrics_text.splitlines():
        if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " "):
            with contextlib.suppress(ValueError, IndexError):  # no number, or nothing at all: no sample
                values.append(float(line.rpartition("}")[2].split()[0] if "{" in line else line.split()[1]))
    return sum(values) if values and all(map(math.isfinite, values)) else None


def present(**values: Any) -> dict[str, Any]:
    """Return what a server reports; what it does not (None) is left out."""
    return {name: value for name, value in values.items() if value is not None}


class Backend(Protocol):
    """A server that an EngineConfig can run on."""

    @property
    def kind(self) -> str:
        """The name in `backend.kind`."""
        ...

    @property
    def probes(self) -> Probes:
        """Where the server answers."""
        ...

    @property
    def metrics(self) -> MetricNames:
        """What the server calls its metrics."""
        ...

    def command(self, config: EngineConfig, config_path: Path, host: str, port: int) -> Launch:
        """Return the command that serves `config`, which the caller has written to `config_path`.

        Raises:
            ConfigError: the config cannot be expressed; `refusals` says so beforehand.
        """
        ...

    def refusals(self, config: EngineConfig, machine: Machine) -> tuple[Refusal, ...]:
        """Return what this backend version cannot do of `config`, whatever the model."""
        ...

    def model_refusals(self, shape: ModelShape, draft: DraftShape | None) -> tuple[Refusal, ...]:
        """Return what of these models this backend version cannot run."""
        ...

    def request_stats(self, body: Mapping[str, Any]) -> RequestStats:
        """Read a completion's statistics from its body (when streamed: its last chunk)."""
        ...

    def ask(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        """Return (path, JSON body) of a greedy completion by token ids, not streamed.

        Raises:
            ConfigError: this server cannot be asked so.
        """
        ...

    def answer(self, ask: Ask, body: Mapping[str, Any]) -> Answer:
        """Read the JSON that came back with status 200.

        Raises:
            ConfigError: token ids or scores are missing.
        """
        ...

    def round_counts(self, metrics_text: str) -> RoundCounts | None:
        """Read verify rounds from /metrics; None where each request tells its own, or nothing does."""
        ...

    def entries(self, config: EngineConfig) -> tuple[LaunchEntry, ...]:
        """Return the servers that a config needs, each for a range of running requests: one, where it can switch."""
        ...

    def resolved(self, server_info: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config that the server says it really runs, from its /server_info.

        A key `pins` beside the config's own holds what was pinned and runs otherwise: {name: {pinned, runs}}.

        Raises:
            ConfigError: the answer does not hold one.
        """
        ...
