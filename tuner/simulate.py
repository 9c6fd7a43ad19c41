"""Replaying a table of known outcomes against samplers: what a search would have found, without a launch.

A table is lines of trials.jsonl, failed ones included, each with optional `noise: {metric: cv}`. A launch of a point
answers with its line's metrics times a log-normal factor of that coefficient of variation; a failed line fails again.
The brain is the one that real searches use; only the executor is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from pydantic import Field, FiniteFloat, ValidationError

from engine.config import EngineConfig
from tuner.brain import Brain
from tuner.errors import UsageError
from tuner.points import violations
from tuner.records import Level, MetricName, TrialRecord, canonical
from tuner.sampling import Pool, Sampler, seed_of
from tuner.sampling.acquisition import hypervolume
from tuner.sampling.encode import Array
from tuner.space import Assignment, Infeasible, Objective, Space

Z95 = 1.96


class TableLine(TrialRecord):
    """A line of a table: a trial record, and how much its metrics scatter between launches."""

    noise: dict[MetricName, FiniteFloat] = Field(default_factory=dict, description="Coefficient of variation.")


@dataclass(frozen=True)
class Row:
    """One point of a table."""

    record: TrialRecord
    assignment: Assignment
    noise: Mapping[str, float]


@dataclass(frozen=True)
class Table:
    """The truth about a space: one row per point."""

    rows: tuple[Row, ...]

    @cached_property
    def by_config(self) -> dict[str, Row]:
        """Rows by their configuration."""
        return {canonical(row.record.config): row for row in self.rows}

    def refusals(self, config: EngineConfig) -> tuple[str, ...]:
        """Return why a configuration cannot be simulated; empty when it can."""
        known = canonical(config.model_dump(mode="json")) in self.by_config
        return () if known else ("not in the table",)

    def pool(self, space: Space) -> Pool:
        """Return the table's points, for a sampler to choose from."""
        return Pool(space, tuple(row.assignment for row in self.rows))


def read_table(path: Path, space: Space) -> Table:
    """Read a table. Of a configuration with several lines the first launch counts, unless any of them failed.

    Raises:
        UsageError: unreadable, a broken line, or no line of this space.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    rows: dict[str, Row] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = TableLine.model_validate_json(line)
        except ValidationError as error:
            raise UsageError(f"{path}:{number}: not a trial record: {error.errors()[0]['msg']}") from error
        if record.state not in ("measured", "failed"):
            continue
        assignment = space.assignment_of(record.config)
        key = canonical(record.config)
        if assignment is not None and (key not in rows or record.state == "failed"):
            rows[key] = Row(record, assignment, record.noise)
    if not rows:
        raise UsageError(f"{path}: no line is of this space; pass the space.yaml of the study that made the table")
    return Table(tuple(rows.values()))


@dataclass(frozen=True)
class Truth:
    """What a perfect search would find."""

    space: Space
    objectives: tuple[Objective, ...]
    costs: dict[str, Array | None]  # by configuration: the objectives' costs, None where it fails or breaks a limit
    reference: Array
    volume: float
    load: int
    metric: Objective
    best: float

    @classmethod
    def of(cls, space: Space, table: Table) -> Truth:
        """Return the truth of a table. Volumes are counted from the median of the feasible points on each axis: what
        is worse than half of them on either axis adds nothing."""
        objectives = space.file.objectives
        costs = {key: _costs(row.record, space) for key, row in table.by_config.items()}
        good = np.array([cost for cost in costs.values() if cost is not None])
        if not len(good):
            raise UsageError("no point of the table meets the constraints")
        reference = np.median(good, axis=0)
        load = space.file.pick.load or max(space.levels)
        metric = picked(objectives, table)
        values = [value_at(row.record, metric, load) for k, row in table.by_config.items() if costs[k] is not None]
        known = [value for value in values if value is not None]
        best = min(known) if metric.goal == "min" else max(known)
        return cls(space, objectives, costs, reference, hypervolume(good, reference), load, metric, best)

    def share(self, keys: Sequence[str]) -> float:
        """Return the share of the whole table's hypervolume that these configurations have."""
        found = [cost for key in keys if (cost := self.costs[key]) is not None]
        return hypervolume(np.array(found).reshape(len(found), len(self.objectives)), self.reference) / self.volume

    def regret(self, record: TrialRecord) -> float:
        """Return by which share a configuration's true value misses the best."""
        value = value_at(record, self.metric, self.load)
        if value is None:
            return 1.0
        return abs(value - self.best) / abs(self.best)


def picked(objectives: Sequence[Objective], table: Table) -> Objective:
    """Return what a recommendation is best at: throughput where it was measured, else the first objective."""
    for row in table.rows:
        if any(level.metrics.get("output_tok_s") is not None for level in row.record.levels):
            return Objective(metric="output_tok_s", goal="max")
    return objectives[0]


def value_at(record: TrialRecord, objective: Objective, load: int) -> float | None:
    """Return a record's value of an objective at a load."""
    level = record.level(load)
    return level.metrics.get(objective.metric) if level is not None else None


def _costs(record: TrialRecord, space: Space) -> Array | None:
    if record.state != "measured" or any(v > 0 for v in violations(record.levels, space.file.constraints)):
        return None
    made = []
    for objective in space.file.objectives:
        value = value_at(record, objective, objective.level(space.levels))
        if value is None:
            return None
        made.append(value if objective.goal == "min" else -value)
    return np.array(made)


def measured_again(row: Row, trial: int, rng: np.random.Generator, of: int | None = None) -> TrialRecord:
    """Return what a launch of a row would be recorded as."""
    levels = tuple(_scattered(level, row.noise, rng) for level in row.record.levels)
    role = "search" if of is None else "repeat"
    return row.record.model_copy(update={"trial": trial, "levels": levels, "role": role, "of": of})


def _scattered(level: Level, noise: Mapping[str, float], rng: np.random.Generator) -> Level:
    metrics = dict(level.metrics)
    intervals: dict[str, tuple[float, float]] = {}
    for name, value in level.metrics.items():
        cv = noise.get(name, 0.0)
        if value is None or not cv:
            continue
        sd = math.sqrt(math.log1p(cv * cv))
        metrics[name] = seen = value * math.exp(sd * rng.standard_normal())
        intervals[name] = (seen * math.exp(-Z95 * sd), seen * math.exp(Z95 * sd))
    return level.model_copy(update={"metrics": metrics, "intervals": intervals})


@dataclass(frozen=True)
class Played:
    """One simulated study. Shares of hypervolume and crashes so far, after each launch."""

    seed: int
    hypervolume: tuple[float, ...]
    crashes: tuple[int, ...]
    records: tuple[TrialRecord, ...]
    rows: tuple[Row, ...]
    brain: Brain


def play(
    space: Space, table: Table, truth: Truth, sampler: Sampler, seed: int, trials: int, pool: Pool | None = None
) -> Played:
    """Simulate one study of so many launches, the baseline being the first."""
    study = space.file.study.model_copy(update={"seed": seed})
    seeded = Space(space.source, space.text, space.file.model_copy(update={"study": study}), space.domains)
    shared = pool or table.pool(space)
    own = _reseeded(shared, seeded)
    brain = Brain(seeded, table.refusals, sampler=sampler, pool=own)
    rng = np.random.default_rng(seed_of(seed, 1_000_003))
    records: list[TrialRecord] = []
    rows: list[Row] = []
    shares: list[float] = []
    crashes: list[int] = []
    row, of = _baseline(seeded, table), None
    while row is not None and len(records) < trials:
        record = measured_again(row, len(records), rng, of)
        brain.tell(record)
        records.append(record)
        rows.append(row)
        shares.append(truth.share([canonical(r.record.config) for r in rows]))
        crashes.append(sum(r.state == "failed" for r in records))
        row, of = _next(brain, table, len(records))
    return Played(seed, tuple(shares), tuple(crashes), tuple(records), tuple(rows), brain)


def _next(brain: Brain, table: Table, number: int) -> tuple[Row | None, int | None]:
    suggestion = brain.ask(number)
    if suggestion is None or isinstance(suggestion.judged, Infeasible):
        return None, None
    return table.by_config[canonical(suggestion.judged.model_dump(mode="json"))], suggestion.repeat


def _reseeded(pool: Pool, space: Space) -> Pool:
    """Return the pool for the same space with another seed, sharing what was computed."""
    made = Pool(space, pool.assignments)
    for name in ("keys", "index", "encoder", "features"):
        made.__dict__[name] = getattr(pool, name)
    return made


def _baseline(space: Space, table: Table) -> Row:
    """Return the first baseline in the table; without one, its first measured row."""
    for assignment in space.baselines():
        config = space.assemble(assignment)
        if isinstance(config, EngineConfig):
            row = table.by_config.get(canonical(config.model_dump(mode="json")))
            if row is not None:
                return row
    return next(row for row in table.rows if row.record.state == "measured")
