"""The sections of a search-space file, as types: what `tuner schema` prints and the reference is made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from engine.config import Count, Number, Size, Strict, Word
from tuner.durations import Duration
from tuner.records import Goal, MetricName, Workload
from tuner.slo import parse_slo

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


def _local(value: object) -> object:
    """A section without a kind is the local one."""
    return {"kind": "local", **value} if isinstance(value, dict) else value


def _slo_text(value: str) -> str:
    parse_slo(value)
    return value


class Budget(Strict):
    """How much a search may spend; the first limit reached ends it."""

    trials: Annotated[Size, Field(le=100_000)] | None = Field(
        None, description="Launches. The baseline is trial 0 of them; the confirmation is not counted."
    )
    wall: Duration | None = Field(None, gt=0, description="Wall time of search and confirmation: 150s, 10m, 2h.")
    gpu_hours: Annotated[Number, Field(gt=0, le=1e9)] | None = Field(
        None, description="GPUs of each trial × its time, in hours."
    )

    @model_validator(mode="after")
    def _limited(self) -> Self:
        if self.trials is None and self.wall is None and self.gpu_hours is None:
            raise ValueError("a budget needs trials, wall or gpu_hours")
        return self


class Study(Strict):
    """What the study is called and may spend."""

    name: Word = Field(pattern=NAME, description="Folder below the results: letters, digits, `.`, `_`, `-`.")
    seed: Annotated[Count, Field(lt=2**31)] = Field(0, description="Same seed, same suggestions and prompts.")
    budget: Budget


class Objective(Strict):
    """One axis of the front."""

    metric: MetricName = Field(description="A metric with its statistic, such as tpot_ms_p50.")
    goal: Goal = Field(description="min or max.")
    at: Size | None = Field(
        None,
        description="Concurrency that guides the search; null is the lowest for min, the highest for max.",
    )

    def level(self, concurrency: tuple[int, ...]) -> int:
        """Return the concurrency that the optimiser is told of."""
        if self.at is not None:
            return self.at
        return min(concurrency) if self.goal == "min" else max(concurrency)


class Constraint(Strict):
    """A limit that a trial must meet to be recommended."""

    metric: MetricName = Field(description="A metric with its statistic, such as ttft_ms_p90.")
    max: Number | None = Field(None, description="Upper limit.")
    min: Number | None = Field(None, description="Lower limit.")
    at: Size | None = Field(None, description="Concurrency at which it must hold; null is every one measured.")

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if (self.max is None) == (self.min is None):
            raise ValueError("a constraint has either max or min")
        return self


class Pick(Strict):
    """Which point of the front is recommended."""

    slo: Annotated[Word, AfterValidator(_slo_text)] | None = Field(
        None,
        description="Limits that the recommendation must meet, such as `ttft_ms_p90<500, tpot_ms_p50<20`.",
    )
    load: Size | None = Field(None, description="Requests in flight to choose for; null is the highest measured.")
    give: Annotated[Number, Field(ge=0, lt=1)] = Field(
        0.0, description="Share of the best at `load` that may be given up for what is better over all loads."
    )


class Strategy(Strict):
    """How the search spends its budget."""

    sampler: Literal["surrogate", "gp", "tpe", "tpe_fail", "nsga2", "random", "sobol", "grid", "hill"] = Field(
        "surrogate", description="Who chooses what to launch next; the others are there to compare with."
    )
    prior: bool = Field(
        True, description="A roofline guess of every point leads the search until trials contradict it (GPUs only)."
    )
    race: bool = Field(
        True, description="A trial that its first level shows beaten stops, and long windows begin short."
    )
    least_gain: Annotated[Number, Field(ge=0, lt=1)] | None = Field(
        0.005, description="Ends the search when five launches in a row are expected to add less; null never does."
    )
    policy: bool = Field(
        True, description="A table of drafts by load is fitted to the curves, and launched to be judged beside none."
    )


class LocalExecutor(Strict):
    """Trials run on this machine one after another, on the GPUs that CUDA_VISIBLE_DEVICES leaves."""

    kind: Literal["local"] = "local"
    ready: Duration = Field(900.0, gt=0, description="Longest time from a launch to a finished completion.")


class PackedExecutor(Strict):
    """Trials run on this machine side by side, each on GPUs of its own; where neighbours disturb each other, which a
    calibration finds out, they load at the same time and measure one after another."""

    kind: Literal["packed"] = "packed"
    ready: Duration = Field(900.0, gt=0, description="Longest time from a launch to a finished completion.")
    windows: Literal["calibrate", "exclusive", "overlapping"] = Field(
        "calibrate", description="Whether trials may measure at the same time; `calibrate` launches the baseline twice."
    )


ExecutorSection = Annotated[LocalExecutor | PackedExecutor, Field(discriminator="kind"), BeforeValidator(_local)]


class SpaceFile(Strict):
    """A search-space file."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, protected_namespaces=())

    schema_: Literal[1] = Field(alias="schema", description="Version of this format: 1.")
    study: Study
    engine: dict[str, Any] = Field(description="The fixed part: an EngineConfig; `draft` may be left to the search.")
    search: dict[str, Any] = Field(
        default_factory=dict, max_length=64, description="What varies: dotted EngineConfig paths to domains."
    )
    workload: Workload = Workload()
    objectives: tuple[Objective, ...] = Field(
        min_length=1, max_length=2, description="One or two: the axes of the front."
    )
    constraints: tuple[Constraint, ...] = Field((), max_length=32)
    pick: Pick = Pick()
    strategy: Strategy = Strategy()
    executor: ExecutorSection = LocalExecutor()
