"""A simulated study of which windows are counted: full ones, or raced."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tuner.brain import Brain
from tuner.outcome import outcome_of
from tuner.racing import LONG, SHORT, dominated, touches_front
from tuner.records import Axis, Level, TrialRecord, canonical
from tuner.sampling import seed_of
from tuner.simulate import Game, Row, baseline_row, next_row, reseeded, scattered, seeded

RUN_SHARE = 0.6  # of a measurement's scatter that a longer window does not reduce: launches differ


def raced(of: Game, seed: int, trials: int, *, race: bool) -> dict[str, Any]:
    """Simulate a study of which windows are counted: full ones, or raced. A full level is one unit of seconds."""
    space = seeded(of.space, seed)
    brain = Brain(space, of.table.refusals, pool=reseeded(of.pool, space))
    rng = np.random.default_rng(seed_of(seed, 1_000_003))
    axes = Axis.of(space.file.objectives, space.levels)
    curves: list[dict[int, Level]] = []
    records: list[TrialRecord] = []
    rows: list[Row] = []
    found, seconds = [], 0.0
    row: Row | None = baseline_row(space, of.table)
    repeat: int | None = None
    for number in range(trials):
        if row is None:
            break
        record, spent = _launch(row, number, repeat, rng, curves, axes, race=race)
        seconds += spent
        records.append(record)
        rows.append(row)
        if record.state == "measured":
            curves.append({level.concurrency: level for level in record.levels})
        cost = of.truth.costs[canonical(row.record.config)]
        if cost is not None and record.state == "measured":
            found.append(cost)
        brain.tell(record)
        row, repeat = next_row(brain, of.table, number + 1)
    best = outcome_of(records, space).recommendation
    regret = 1.0 if best is None else of.truth.regret(rows[best.point.trial].record)
    return {
        "hypervolume": [round(of.truth.share_of(found), 4)],
        "seconds": round(seconds, 2),
        "regret": round(regret, 5),
    }


def _launch(
    row: Row,
    number: int,
    repeat: int | None,
    rng: np.random.Generator,
    curves: list[dict[int, Level]],
    axes: tuple[Axis, ...],
    *,
    race: bool,
) -> tuple[TrialRecord, float]:
    """Return what a launch is recorded as, and the window units it took."""
    fields: dict[str, Any] = {"trial": number, "of": repeat, "role": "search" if repeat is None else "repeat"}
    if row.record.state == "failed":
        return row.record.model_copy(update=fields), 0.0
    luck = {name: rng.standard_normal() for name in row.noise}
    short = [_windowed(level, row, luck, SHORT if race else 1.0, rng) for level in row.record.levels]
    if not race:
        return row.record.model_copy(update=fields | {"levels": tuple(short)}), float(len(short))
    if dominated(short[0], curves, axes):
        return row.record.model_copy(update=fields | {"levels": (short[0],), "state": "pruned"}), SHORT
    spent = SHORT * len(short)
    if touches_front({level.concurrency: level for level in short}, curves, axes):
        counted = {axis.level for axis in axes}
        short = [
            _windowed(true, row, luck, LONG, rng) if true.concurrency in counted else had
            for true, had in zip(row.record.levels, short, strict=True)
        ]
        spent += (LONG - SHORT) * len(counted)
    return row.record.model_copy(update=fields | {"levels": tuple(short)}), spent


def _windowed(level: Level, row: Row, luck: dict[str, float], share: float, rng: np.random.Generator) -> Level:
    """Return a level as a window of this share of the full one shows it: the launch's own luck stays, the window's
    scatter grows with the inverse root of its length."""
    within = {name: cv * math.sqrt((1 - RUN_SHARE**2) / share) for name, cv in row.noise.items()}
    shifted = {
        name: value * math.exp(RUN_SHARE * row.noise[name] * luck[name])
        if name in luck and value is not None
        else value
        for name, value in level.metrics.items()
    }
    return scattered(level.model_copy(update={"metrics": shifted}), within, rng)
