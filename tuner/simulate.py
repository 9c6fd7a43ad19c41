"""Replaying a table of known outcomes against samplers: what a search would have found, without a launch.

A table is lines of trials.jsonl, failed ones included, each with optional `noise: {metric: cv}`. A launch of a point
answers with its line's metrics times a log-normal factor of that coefficient of variation; a failed line fails again.
The brain is the one that real searches use; only the executor is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, FiniteFloat, ValidationError

from engine.config import EngineConfig
from tuner.brain import Brain
from tuner.budget import SHARE
from tuner.errors import UsageError
from tuner.outcome import next_confirmation, outcome_of
from tuner.pareto import non_dominated
from tuner.pick import Recommendation, slo_of
from tuner.points import objectives_of, violations
from tuner.records import Level, MetricName, Role, TrialRecord, canonical
from tuner.sampling import SAMPLERS, Pool, Sampler, seed_of
from tuner.sampling.acquisition import hypervolume
from tuner.sampling.encode import Array
from tuner.space import Assignment, Objective, Space

Z95 = 1.96
WANDERING = 20  # points ruled out in a row before one that can run is drawn, as in a study


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
    fewest: int  # limits of `pick` that the best point misses

    @classmethod
    def of(cls, space: Space, table: Table) -> Truth:
        """Return the truth of a table. Volumes are counted from the worst of the true front on each axis and a tenth of
        its extent more, so that the front's ends count and nothing far behind it does."""
        objectives = space.file.objectives
        costs = {key: _costs(row.record, space) for key, row in table.by_config.items()}
        good = np.array([cost for cost in costs.values() if cost is not None])
        if not len(good):
            raise UsageError(_nothing_good(space, table))
        front = good[non_dominated(good)]
        reference = front.max(axis=0) + 0.1 * np.ptp(front, axis=0)
        if not (front < reference).all(axis=1).any():  # a single point: count from the worst of all
            reference = good.max(axis=0) + 1e-9
        load = space.file.pick.load or max(space.levels)
        metric = picked(objectives, table)
        rows = [row.record for key, row in table.by_config.items() if costs[key] is not None]
        known = [(misses(space, each, load), v) for each in rows if (v := value_at(each, metric, load)) is not None]
        if not known:
            raise UsageError(f"the table has no {metric.metric} at concurrency {load}; set `pick.load` to one it has")
        fewest = min(known)[0]
        allowed = [value for missed, value in known if missed == fewest]
        best = min(allowed) if metric.goal == "min" else max(allowed)
        return cls(space, objectives, costs, reference, hypervolume(good, reference), load, metric, best, fewest)

    def share_of(self, found: Sequence[Array]) -> float:
        """Return the share of the whole table's hypervolume that feasible costs have."""
        return hypervolume(np.array(found).reshape(len(found), len(self.objectives)), self.reference) / self.volume

    def objective_costs(self, row: Row) -> Array | None:
        """Return a row's true costs, None where it fails or breaks a limit."""
        return self.costs[canonical(row.record.config)]

    def regret(self, record: TrialRecord) -> float:
        """Return by which share a configuration's true value misses the best; 1 where it fails, or breaks limits that
        the best one keeps."""
        value = value_at(record, self.metric, self.load)
        if value is None or self.costs[canonical(record.config)] is None:
            return 1.0
        if misses(self.space, record, self.load) > self.fewest:
            return 1.0
        return abs(value - self.best) / abs(self.best)


def _nothing_good(space: Space, table: Table) -> str:
    """Return why no point of a table can be compared with others."""
    measured = [row.record for row in table.rows if row.record.state == "measured"]
    for objective in space.file.objectives:
        level = objective.level(space.levels)
        if all(value_at(record, objective, level) is None for record in measured):
            return f"no measured line of the table has {objective.metric} at concurrency {level}, which is an objective"
    return "no point of the table meets the constraints"


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


def misses(space: Space, record: TrialRecord, load: int) -> int:
    """Return how many limits of the space's `pick` a record misses at a load."""
    level = record.level(load)
    return len(slo_of(space.file.pick).misses({} if level is None else level.metrics))


def _costs(record: TrialRecord, space: Space) -> Array | None:
    if record.state != "measured" or any(v > 0 for v in violations(record.levels, space.file.constraints)):
        return None
    values = objectives_of(record, space)
    if any(value is None for value in values):
        return None
    signs = [1.0 if objective.goal == "min" else -1.0 for objective in space.file.objectives]
    return np.array(values, dtype=np.float64) * signs


def measured_again(
    row: Row, trial: int, rng: np.random.Generator, role: Role = "search", of: int | None = None
) -> TrialRecord:
    """Return what a launch of a row would be recorded as."""
    levels = tuple(scattered(level, row.noise, rng) for level in row.record.levels)
    return row.record.model_copy(update={"trial": trial, "levels": levels, "role": role, "of": of})


def scattered(level: Level, noise: Mapping[str, float], rng: np.random.Generator) -> Level:
    """Return a level with log-normal noise of these coefficients of variation, and intervals to match."""
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
    """One simulated study. Shares of hypervolume and crashes so far, after each launch of the search; `confirmation`:
    the launches at the end of the study that the recommendation is of (`Game.play`)."""

    seed: int
    hypervolume: tuple[float, ...]
    crashes: tuple[int, ...]
    records: tuple[TrialRecord, ...]
    confirmation: tuple[TrialRecord, ...]
    recommendation: Recommendation | None
    chosen: Row | None
    trial: int | None
    regret: float
    value: float | None  # the true one of what is recommended

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval that is stated for the recommendation: of all launches, else of its own."""
        best = self.recommendation
        if best is None:
            return None
        return best.point.intervals.get(best.metric) if best.estimate is None else best.estimate.interval

    @property
    def covered(self) -> bool:
        """Whether the interval holds the true value."""
        found = self.interval
        return found is not None and self.value is not None and found[0] <= self.value <= found[1]

    @property
    def crash_repeats(self) -> int:
        """How often a point was launched that was known to crash."""
        failed = [canonical(r.config) for r in self.records if r.state == "failed"]
        return len(failed) - len(set(failed))

    def to_json(self, truth: Truth) -> dict[str, Any]:
        """Return the entry of `tuner simulate`'s document."""
        config = None if self.chosen is None else self.chosen.record.config
        return {
            "seed": self.seed,
            "hypervolume": [round(share, 5) for share in self.hypervolume],
            "crashes": list(self.crashes),
            "recommended": None
            if self.chosen is None
            else {"trial": self.trial, "concurrency": truth.load, "config": config},
            "regret": round(self.regret, 6),
            "interval": None if self.interval is None else [round(end, 6) for end in self.interval],
        }


@dataclass(frozen=True)
class Game:
    """What is simulated: a space, the truth about it, and the points to choose from."""

    space: Space
    table: Table
    truth: Truth
    pool: Pool

    @classmethod
    def of(cls, space: Space, table: Table) -> Game:
        """Prepare a table once for any number of studies."""
        return cls(space, table, Truth.of(space, table), table.pool(space))

    def play(self, sampler: Sampler, seed: int, trials: int, *, confirm: float = SHARE) -> Played:
        """Simulate one study of so many launches, the baseline being the first.

        Its hypervolume and crashes are those of a search of all launches. Its recommendation is that of a study that
        is over after as many: the share `confirm` of them is not searched with, but measures again what a study would
        (`tuner.outcome`).
        """
        space = seeded(self.space, seed)
        brain = Brain(space, self.table.refusals, sampler=sampler, pool=reseeded(self.pool, space))
        tape = _Tape(self, np.random.default_rng(seed_of(seed, 1_000_003)))
        tape.launch(baseline_row(space, self.table), "baseline", None)
        brain.tell(tape.records[-1])
        self._search(brain, tape, trials - round(confirm * trials) if trials >= 8 else trials)
        confirmed = tape.copy(np.random.default_rng(seed_of(seed, 1_000_033)))
        self._confirm(confirmed, trials)
        self._search(brain, tape, trials)
        return tape.played(seed, confirmed, outcome_of(confirmed.records, space).recommendation)

    def _search(self, brain: Brain, tape: _Tape, launches: int) -> None:
        while len(tape.records) < launches:
            row, of = next_row(brain, self.table, len(tape.records))
            if row is None:
                return
            tape.launch(row, "search" if of is None else "repeat", of)
            brain.tell(tape.records[-1])

    def _confirm(self, tape: _Tape, launches: int) -> None:
        most = launches - len(tape.records)
        while (trial := next_confirmation(outcome_of(tape.records, self.space), most)) is not None:
            tape.launch(tape.rows[trial], "confirm", trial)


class _Tape:
    """What a simulated study has launched so far."""

    def __init__(self, game: Game, rng: np.random.Generator) -> None:
        self.game = game
        self.rng = rng
        self.records: list[TrialRecord] = []
        self.rows: list[Row] = []
        self.shares: list[float] = []
        self._front: list[Array] = []
        self.inherited = 0  # launches made before this copy was

    def launch(self, row: Row, role: Role, of: int | None) -> None:
        self.records.append(measured_again(row, len(self.records), self.rng, role, of))
        self.rows.append(row)
        cost = self.game.truth.costs[canonical(row.record.config)]
        if cost is not None:
            self._front.append(cost)
        self.shares.append(self.game.truth.share_of(self._front))

    def copy(self, rng: np.random.Generator) -> _Tape:
        other = _Tape(self.game, rng)
        other.records, other.rows = list(self.records), list(self.rows)
        other.shares, other._front = list(self.shares), list(self._front)
        other.inherited = len(self.records)
        return other

    def played(self, seed: int, confirmed: _Tape, found: Recommendation | None) -> Played:
        truth = self.game.truth
        crashes = np.cumsum([record.state == "failed" for record in self.records])
        chosen = None if found is None else self.rows[found.point.trial]
        value = None if chosen is None else value_at(chosen.record, truth.metric, truth.load)
        return Played(
            seed=seed,
            hypervolume=tuple(self.shares),
            crashes=tuple(int(count) for count in crashes),
            records=tuple(self.records),
            confirmation=tuple(confirmed.records[confirmed.inherited :]),
            recommendation=found,
            chosen=chosen,
            trial=None if found is None else found.point.trial,
            regret=1.0 if chosen is None else truth.regret(chosen.record),
            value=value,
        )


def next_row(brain: Brain, table: Table, number: int) -> tuple[Row | None, int | None]:
    """Return the row that a brain suggests, and the trial that it repeats; None, None when it has nothing left.

    As in a real study, a point that static checks rule out (it is not in the table) is told to the brain and costs
    no launch.
    """
    space = brain.pool.space
    refused = 0
    while (suggestion := brain.ask(number, careful=refused >= WANDERING)) is not None:
        if isinstance(suggestion.judged, EngineConfig):
            return table.by_config[canonical(suggestion.judged.model_dump(mode="json"))], suggestion.repeat
        config = space.raw_config(suggestion.assignment)
        brain.tell(TrialRecord(trial=number, role="search", state="infeasible", config=config))
        refused += 1
    return None, None


def seeded(space: Space, seed: int) -> Space:
    """Return the space with another seed of its study."""
    study = space.file.study.model_copy(update={"seed": seed})
    return replace(space, file=space.file.model_copy(update={"study": study}))


def reseeded(pool: Pool, space: Space) -> Pool:
    """Return the pool for the same space with another seed, sharing what was computed."""
    made = Pool(space, pool.assignments, pool.guesses)
    for name in ("keys", "index", "encoder", "features", "rows"):
        made.__dict__[name] = getattr(pool, name)
    return made


def baseline_row(space: Space, table: Table) -> Row:
    """Return the first baseline in the table; without one, its first measured row."""
    for assignment in space.baselines():
        config = space.assemble(assignment)
        if isinstance(config, EngineConfig):
            row = table.by_config.get(canonical(config.model_dump(mode="json")))
            if row is not None:
                return row
    return next(row for row in table.rows if row.record.state == "measured")


def simulate(
    space: Space, table: Table, samplers: Sequence[str], seeds: int, trials: int
) -> dict[str, list[dict[str, Any]]]:
    """Replay a table: {sampler: [{seed, hypervolume, crashes, recommended, regret, interval}]}.

    Raises:
        UsageError: no such sampler, or nothing in the table meets the constraints.
    """
    unknown = [name for name in samplers if name not in SAMPLERS]
    if unknown:
        raise UsageError(f"no sampler is called {unknown[0]!r}; there are {', '.join(SAMPLERS)}")
    game = Game.of(space, table)
    return {
        name: [game.play(SAMPLERS[name], seed, trials).to_json(game.truth) for seed in range(seeds)]
        for name in samplers
    }


def summary(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return one line per sampler for people."""
    lines = []
    for name, studies in found.items():
        share = sum(study["hypervolume"][-1] for study in studies) / len(studies)
        crashes = sum(study["crashes"][-1] for study in studies) / len(studies)
        regret = sum(study["regret"] for study in studies) / len(studies)
        lines.append(f"{name}: {share:.1%} of the table's hypervolume, {crashes:.1f} crashes, regret {regret:.2%}")
    return "\n".join(lines)
