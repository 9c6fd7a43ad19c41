"""What crosses between controller, worker and files: trials, events, metrics and the workload.

The worker protocol: the controller starts `python -m tuner.worker`, one process per trial, writes one
`TrialSpec` as JSON to its stdin and closes it, and reads `Event` JSON lines from its stdout. The last has
kind `record` and carries the `TrialRecord`; a worker that ends without it has crashed. The controller is the
only writer of the study's files but for `logs/`, where the worker puts what the server printed.

No torch here, and nothing that starts a process.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from engine.config import EngineConfig, Size, Strict, Word
from tuner.durations import Duration
from tuner.load.laws import Arrivals, Closed
from tuner.load.sources import BundledPrompts, Prompts, RandomPrompts
from tuner.reference import OwnText, Parity, Peer, Record, Reference

if TYPE_CHECKING:
    from tuner.space.model import Objective

SCHEMA = 1
NORMAL_95 = 1.96  # standard deviations from the mean to an end of a 95 % interval

Role = Literal["baseline", "search", "repeat", "confirm", "policy", "calibration"]
State = Literal["measured", "failed", "pruned", "infeasible"]
Stage = Literal["lease", "launch", "ready", "parity", "load", "stop"]
STAGES: tuple[Stage, ...] = get_args(Stage)

FailureKind = Literal[
    "config",
    "missing_file",
    "gated_model",
    "unsupported_model",
    "oom_start",
    "oom_capture",
    "oom_load",
    "graph_capture",
    "kernel_compile",
    "distributed_init",
    "port",
    "no_progress",
    "wrong_model",
    "garbage_output",
    "lost_parity",
    "acceptance_collapse",
    "crashed",
    "client_bound",
    "disk_full",
    "foreign_gpu_process",
]

FAILURES: dict[FailureKind, str] = {
    "config": "The server refuses the configuration, or static checks show that it cannot run.",
    "missing_file": "A model's folder or file is absent, truncated or of the wrong shape.",
    "gated_model": "The hub wants a login or an accepted licence for these weights.",
    "unsupported_model": "The server does not implement this model family or feature.",
    "oom_start": "Weights or KV cache do not fit when the server starts.",
    "oom_capture": "Memory runs out while graphs are captured.",
    "oom_load": "Memory runs out under load, after a good start.",
    "graph_capture": "A graph could not be captured, for another reason than memory.",
    "kernel_compile": "A kernel does not compile on this machine.",
    "distributed_init": "The processes of one server do not find each other.",
    "port": "The address is taken, or another process answers on it.",
    "no_progress": "Alive but stalled: no output and no progress until the deadline.",
    "wrong_model": "The server serves another model than the one asked for.",
    "garbage_output": "The text is not sane: empty, unprintable, or looping where the reference does not.",
    "lost_parity": "Emitted tokens that the reference without speculation would not have chosen.",
    "acceptance_collapse": "The target accepts next to none of the drafted tokens.",
    "crashed": "The server ended or broke for a cause not named above.",
    "client_bound": "The load generator, not the server, was the limit: the numbers would be wrong.",
    "disk_full": "Too little free disk for logs and files.",
    "foreign_gpu_process": "A GPU of the lease is used by someone else's process.",
}

MACHINE_FAILURES: frozenset[FailureKind] = frozenset({"disk_full", "foreign_gpu_process", "port"})
"""Failures that no configuration is to blame for."""

# ---------------------------------------------------------------------------------------------------- metrics

Goal = Literal["min", "max"]
STATISTICS = ("mean", "p50", "p90", "p95", "p99")


@dataclass(frozen=True)
class Metric:
    """A measured quantity; `statistics` empty means one number per level."""

    name: str
    unit: str
    goal: Goal
    description: str
    statistics: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every full name: the metric itself, or one per statistic."""
        return tuple(f"{self.name}_{s}" for s in self.statistics) if self.statistics else (self.name,)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "ttft_ms", "ms", "min", "Time to first token: from when a request was due to its first token.", STATISTICS
        ),
        Metric(
            "tpot_ms",
            "ms/token",
            "min",
            "(t_last − t_first) / (tokens − tokens in the first chunk); null for a single chunk.",
            STATISTICS,
        ),
        Metric(
            "chunk_gap_ms",
            "ms",
            "min",
            "Gap between two streamed chunks, the pause a reader sees; a chunk may carry several tokens.",
            STATISTICS,
        ),
        Metric("e2e_ms", "ms", "min", "From when the request was due to its last token.", STATISTICS),
        Metric("normalized_ms", "ms/token", "min", "Normalised latency: `e2e_ms` / output tokens.", STATISTICS),
        Metric("output_tok_s", "tokens/s", "max", "Generated tokens of all requests per second, counted by usage."),
        Metric("output_tok_s_per_gpu", "tokens/s/GPU", "max", "`output_tok_s` per GPU of the lease; null without."),
        Metric(
            "output_tok_s_per_user",
            "tokens/s",
            "max",
            "What one user sees once the text runs: 1000 / `tpot_ms_p50`.",
        ),
        Metric("request_rps", "requests/s", "max", "Requests answered per second."),
        Metric("goodput_rps", "requests/s", "max", "Requests per second that met every latency limit of `pick.slo`."),
        Metric(
            "accept_length",
            "tokens/round",
            "max",
            "Tokens a request gains per target forward, each request weighing by its rounds; 1 without drafts.",
        ),
        Metric("error_rate", "share", "min", "Failed requests / sent requests; failed ones are in no latency."),
    )
}
THROUGHPUT = "output_tok_s"  # what recommendations are best at
METRIC_NAMES: tuple[str, ...] = tuple(name for metric in METRICS.values() for name in metric.names)


def metric_of(name: str) -> Metric:
    """Return the metric behind a full name such as `ttft_ms_p90`.

    Raises:
        ValueError: no such name; the message says which was probably meant.
    """
    for metric in METRICS.values():
        if name in metric.names:
            return metric
    if name in METRICS:
        raise ValueError(f"{name} needs a statistic: one of {', '.join(METRICS[name].names)}")
    near = difflib.get_close_matches(name, METRIC_NAMES, n=1)
    if not near and name:
        near = [known for known in METRIC_NAMES if known.startswith(name) and known.endswith(("_p50", "_s"))][:1]
    meant = f", did you mean {near[0]}?" if near else f"; metrics are {', '.join(METRIC_NAMES)}"
    raise ValueError(f"no metric is called {name!r}{meant}")


def _known_metric(value: object) -> object:
    if isinstance(value, str):
        metric_of(value)
    return value


MetricName = Annotated[Word, BeforeValidator(_known_metric)]

# ------------------------------------------------------------------------------------------- what is measured


class Workload(Strict):
    """What every trial is measured with: the same prompts, order, arrivals and caps for all of them."""

    prompts: Prompts = Field(
        BundledPrompts(),
        description="`bundled`, a path (`.json` is ShareGPT-style, else JSONL), or a mapping with a `kind`, see below.",
    )
    categories: tuple[Word, ...] = Field((), max_length=64, description="Only prompts of these; empty is all.")
    shared_prefix: Annotated[FiniteFloat, Field(ge=0, le=0.99)] = Field(
        0.0, description="Share of a prompt that is a prefix common to all, for prefix caches."
    )
    output_tokens: Annotated[Size, Field(le=1_000_000)] = Field(
        64, description="Most tokens generated per request (max_tokens)."
    )
    concurrency: tuple[Annotated[Size, Field(le=100_000)], ...] = Field(
        (1, 4, 8),
        min_length=1,
        max_length=64,
        description="Users of each level: requests kept in flight, one level after another.",
    )
    arrivals: Arrivals = Field(Closed(), description="`closed`, or a mapping with a `kind`, see below.")
    window: Duration = Field(
        10.0, gt=0, description="Shortest measured time per level, warm-up not counted, such as 2s or 1m."
    )
    longest: Duration | None = Field(None, gt=0, description="Longest measured time per level; null is twice `window`.")
    width: Annotated[FiniteFloat, Field(gt=0, le=1)] = Field(
        0.1,
        description="A level ends between the two when half the 95 % interval of its completion rate is this share.",
    )
    repeats: Annotated[Size, Field(le=100)] = Field(1, description="Windows measured per level, one after another.")
    client_lag: Annotated[FiniteFloat, Field(gt=0)] = Field(
        0.01,
        description="The load generator's own p99 lag over the mean end-to-end latency; beyond, a trial fails as "
        "`client_bound`. Raise it where server and client share few cores.",
    )
    ignore_eos: bool = Field(False, description="Generate on past the end of the text, to output_tokens exactly.")

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.longest is not None and self.longest < self.window:
            raise ValueError("longest is shorter than window")
        return self

    @property
    def bound(self) -> float:
        """The longest measured time of one window, in seconds."""
        return 2 * self.window if self.longest is None else self.longest

    @property
    def warnings(self) -> tuple[str, ...]:
        """What must be said of numbers measured with it."""
        if isinstance(self.prompts, RandomPrompts):
            return ("random prompts misjudge speculation: no drafter predicts noise; measure with text",)
        return ()


class Limits(Strict):
    """Deadlines in seconds: past one, the trial fails at that stage (`no_progress`) and is stopped."""

    lease_s: FiniteFloat = Field(3600.0, gt=0)
    ready_s: FiniteFloat = Field(900.0, gt=0)  # from launch to a finished real completion
    request_s: FiniteFloat = Field(120.0, gt=0)  # one request without any progress
    level_s: FiniteFloat = Field(600.0, gt=0)  # one concurrency level, warm-up and drain included
    stop_s: FiniteFloat = Field(15.0, gt=0)  # from SIGTERM to SIGKILL

    @classmethod
    def of(cls, workload: Workload, ready_s: float) -> Self:
        """Return the deadlines of a workload: a level may take its warm-up, its longest window and a drain."""
        return cls(ready_s=ready_s, level_s=4 * workload.bound + 300)


class LeaseRequest(Strict):
    """What a trial occupies while it runs."""

    gpus: NonNegativeInt = 0
    cpus: PositiveInt = 1  # CPU slots, counted when no GPU is asked for
    devices: tuple[str, ...] = Field((), description="UUIDs of the GPUs it may choose from; empty is every one.")
    exclusive: bool = Field(False, description="No other trial of this user measures while it does.")


class Axis(Strict):
    """One objective at the concurrency where it counts."""

    metric: MetricName
    goal: Goal
    level: PositiveInt

    @classmethod
    def of(cls, objectives: Sequence[Objective], levels: Sequence[int]) -> tuple[Axis, ...]:
        """Return the axes of a study."""
        return tuple(cls(metric=o.metric, goal=o.goal, level=o.level(tuple(levels))) for o in objectives)

    def cost(self, value: float) -> float:
        """Return the value so that lower is better."""
        return value if self.goal == "min" else -value


class Race(Strict):
    """What a candidate races against: the curves measured so far, with the metrics of the axes alone.

    A candidate that one of them beats whatever is still to come stops after its first level; windows are short where
    that can settle it (`tuner.racing`).
    """

    axes: tuple[Axis, ...] = Field(min_length=1)
    curves: tuple[tuple[Level, ...], ...] = ()
    like: tuple[NonNegativeInt, ...] = Field((), description="Curves of the same kind of draft: they rise alike.")


class TrialSpec(Strict):
    """All that a worker is told: one JSON document on its stdin."""

    schema_: Literal[1] = Field(1, alias="schema")
    study: str = Field(description="Absolute path of the study's folder.")
    trial: NonNegativeInt
    role: Role
    config: EngineConfig
    workload: Workload
    levels: tuple[PositiveInt, ...] = Field(min_length=1, description="Concurrencies, in the order measured.")
    seed: NonNegativeInt = Field(0, description="Order of prompts; the same for every trial of a study.")
    served_name: str = Field(description="Model name that requests carry and /v1/models must list.")
    slo: dict[str, FiniteFloat] = Field(default_factory=dict, description="Upper limits for `goodput_rps`.")
    limits: Limits = Limits()
    lease: LeaseRequest = LeaseRequest()
    reference: Reference | None = Field(None, description="What the baseline's server wrote; it is judged by this.")
    score: tuple[OwnText, ...] = Field((), description="Texts of other trials: it is the reference, relaunched.")
    peer: Peer | None = Field(None, description="The trial that its acceptance must not fall far below.")
    race: Race | None = Field(None, description="What it is measured against; null is measured in full.")

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), populate_by_name=True, serialize_by_alias=True
    )

    @property
    def log_name(self) -> str:
        """Name of the server's log below the study's `logs/`."""
        return f"trial-{self.trial:04d}.log"


# ----------------------------------------------------------------------------------------------- what results


class ClientError(Record):
    """What the load generator knows of its own error, in milliseconds."""

    lag_ms_mean: FiniteFloat = Field(description="How late the client reads what has arrived, on average.")
    lag_ms_p99: FiniteFloat = Field(description="99th percentile, of reading late or of sending late.")
    limit_ms: FiniteFloat | None = Field(None, description="What `client_lag` allows.")
    busy: FiniteFloat = Field(description="CPU share of the busiest of its processes.")
    processes: PositiveInt = 1
    bound: bool = Field(description="The lag is beyond the limit: the numbers are the client's, not the server's.")


class Slice(Record):
    """One category of a level's requests."""

    n: NonNegativeInt = Field(description="Requests measured.")
    metrics: dict[str, FiniteFloat | None]
    intervals: dict[str, tuple[FiniteFloat, FiniteFloat]] = Field(default_factory=dict)


class Level(Record):
    """One concurrency of one trial. Intervals are 95 %; a metric that could not be measured is null."""

    concurrency: PositiveInt
    metrics: dict[str, FiniteFloat | None] = Field(description="By metric name; null is not measured.")
    intervals: dict[str, tuple[FiniteFloat, FiniteFloat]] = Field(
        default_factory=dict, description="95 % intervals, [low, high] by metric name."
    )
    n: NonNegativeInt = Field(description="Requests measured.")
    server: dict[str, Any] | None = Field(
        None, description="What the server counted meanwhile: seconds of its rounds by part, acceptance by position."
    )
    few: dict[str, PositiveInt] = Field(
        default_factory=dict, description="Null for too small a sample: the values needed, by metric name."
    )
    errors: dict[str, PositiveInt] = Field(default_factory=dict, description="Failed requests, by kind.")
    slices: dict[str, Slice] = Field(default_factory=dict, description="By category of prompt.")
    output_tokens: NonNegativeInt = Field(0, description="Tokens of all measured requests.")
    seconds: FiniteFloat | None = Field(None, description="Length of the window, of all repeats together.")
    steady: bool = Field(True, description="Whether the completion rate settled within the longest window.")
    client: ClientError | None = Field(None, description="The load generator's own error.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for name, (low, high) in self.intervals.items():
            if low > high:
                raise ValueError(f"the interval of {name} is empty: {low:g} to {high:g}")
        return self

    def deviation(self, metric: str) -> float:
        """Return the standard deviation of a metric as its 95 % interval tells it, 0 where it has none."""
        low, high = self.intervals.get(metric, (0.0, 0.0))
        return (high - low) / (2 * NORMAL_95)


class Failure(Record):
    """Why a trial has no result."""

    kind: FailureKind
    stage: Stage
    evidence: tuple[str, ...] = Field((), description="Lines of the log, the exit status, what was seen.")
    told: str = Field("", description="The line of evidence that decided; empty where the last one did.")
    advice: str = Field("", description="What to change, with the number where there is one.")


class Raced(Record):
    """What a race left out of a trial."""

    out: bool = Field(False, description="Beaten after its first level; the others were not measured.")
    short: tuple[PositiveInt, ...] = Field((), description="Concurrencies measured in a short window only.")
    saved_s: FiniteFloat = Field(0.0, description="Seconds of windows that were not measured, without their warm-up.")


class TrialRecord(Record):
    """One line of `trials.jsonl`."""

    schema_: Literal[1] = Field(1, alias="schema")
    trial: NonNegativeInt = Field(description="Number of the record, from 0.")
    role: Role = Field(description="Why it was launched.")
    state: State = Field(description="What came of it.")
    config: dict[str, Any] = Field(description="The EngineConfig asked for.")
    resolved: dict[str, Any] | None = Field(None, description="The config that the server says it runs.")
    levels: tuple[Level, ...] = ()
    failure: Failure | None = None
    parity: Parity | None = Field(None, description="What the parity gate saw; null is a trial that did not reach it.")
    seconds: dict[str, FiniteFloat] = Field(default_factory=dict, description="By stage; load is the sum of levels.")
    headroom: dict[str, Any] | None = Field(None, description="Achieved share of the machine's roofline, by level.")
    of: NonNegativeInt | None = Field(None, description="The trial that a repeat or confirmation measures again.")
    synthetic: bool = Field(False, description="Dummy weights or forced acceptance: only the timing means anything.")
    gpus: NonNegativeInt = Field(0, description="GPUs it occupied.")
    raced: Raced | None = Field(None, description="What a race left out; null is measured in full.")
    gain: FiniteFloat | None = Field(
        None, description="Share of hypervolume that the sampler expected it to add; null before it has a model."
    )
    started: FiniteFloat | None = Field(None, description="Unix time.")

    def level(self, concurrency: int) -> Level | None:
        """Return the level of this concurrency, if it was measured."""
        return next((level for level in self.levels if level.concurrency == concurrency), None)

    @property
    def blameless(self) -> bool:
        """Whether it failed for a cause outside of its configuration: the machine was not free or not fit."""
        failure = self.failure
        if failure is None:
            return False
        return failure.kind in MACHINE_FAILURES or (failure.stage == "lease" and failure.kind == "no_progress")


class Planned(Strict):
    """A launch that was decided: its number, why, and with what."""

    trial: NonNegativeInt
    role: Role
    config: EngineConfig
    of: NonNegativeInt | None = None
    gain: FiniteFloat | None = None
    score: tuple[OwnText, ...] = ()  # texts of other trials that it is asked for


EventKind = Literal["begin", "progress", "end", "record"]


class Event(Record):
    """One line of a worker's stdout and of `events.jsonl`.

    kind: `begin` and `end` of a stage, or of a level where `level` is set (its end has `data` = the Level);
    `progress` in between; `record` last. The baseline's gate sends the reference that the others are judged by.
    """

    schema_: Literal[1] = Field(1, alias="schema")
    kind: EventKind = "progress"
    trial: NonNegativeInt
    stage: Stage
    level: PositiveInt | None = Field(None, description="Concurrency, during load.")
    time: FiniteFloat = Field(description="Unix time.")
    text: str = Field("", description="One line for people.")
    data: dict[str, Any] | None = None
    reference: Reference | None = Field(None, description="Kept in `reference.json`, never in `events.jsonl`.")
    record: TrialRecord | None = None


def canonical(value: Any) -> str:
    """Return JSON in which equal values have equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """Return the first 16 hex digits of the SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]


def config_dict(config: EngineConfig) -> dict[str, Any]:
    """Return the JSON form of a config: what records hold and duplicates are judged by."""
    return config.model_dump(mode="json")
