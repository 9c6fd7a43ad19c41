"""Explanations: rounds times acceptance, what bounds, what matters, what the next best loses."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from tests.tuner.make import config, level, measure, record
from tests.tuner.spaces import SPACE
from tuner.explain import (
    bound_of,
    compare,
    importance,
    importance_line,
    round_of,
    runner_up_line,
    trial_lines,
)
from tuner.points import points_of
from tuner.records import Level, TrialRecord, config_dict
from tuner.space import Objective, parse_space

SPEED = Objective(metric="output_tok_s", goal="max")


def with_accept(concurrency: int, tpot: float, accept: float) -> Level:
    made = level(concurrency, tpot, 1000 * concurrency / tpot)
    return made.model_copy(update={"metrics": {**made.metrics, "accept_length": accept}})


def test_a_speedup_is_tokens_over_time_of_a_round() -> None:
    plain, drafted = round_of(with_accept(1, 8.0, 1.0)), round_of(with_accept(1, 4.0, 4.0))
    assert plain is not None
    assert drafted is not None
    split = compare(drafted, plain)
    assert (split.tokens, split.ms) == (4.0, 2.0)
    assert split.speedup == 2.0


def test_the_lines_of_a_trial_say_all_of_it() -> None:
    baseline = record(0, [with_accept(1, 8.0, 1.0)])
    head = {"1": {"share": 0.6, "bound": "memory", "tok_s_limit": 400.0}}
    drafted = record(1, [with_accept(1, 4.0, 4.0)], headroom=head)
    (line,) = trial_lines(drafted, baseline)
    assert "16.00 ms a round" in line
    assert "2.00× no speculation (4.00× tokens, 2.00× time a round)" in line
    assert "reading weights" in line


@pytest.mark.parametrize(
    ("accept", "head", "bound"),
    [
        (1.2, {"share": 0.9, "bound": "compute"}, "acceptance"),
        (4.0, {"share": 0.1, "bound": "memory"}, "host"),
        (4.0, {"share": 0.7, "bound": "compute"}, "compute"),
        (4.0, None, None),
    ],
)
def test_what_bounds_a_trial(accept: float, head: dict[str, object] | None, bound: str | None) -> None:
    headroom = {"1": head} if head else {"unknown": "no bandwidth"}
    assert bound_of(record(1, [with_accept(1, 4.0, accept)], headroom=headroom), 1) == bound


def test_importance_finds_the_knobs_that_matter() -> None:
    space = parse_space(SPACE.encode())
    records: list[TrialRecord] = []
    for point in space.points():
        made = space.assemble(point)
        if isinstance(made, EngineConfig):
            levels = tuple(measure(made, c) for c in space.levels)
            records.append(record(len(records), list(levels), config=config_dict(made), role="search"))
    shares = importance(space, records, SPEED, 8)
    assert next(iter(shares)) == "draft.kind"  # no speculation is far ahead at 8
    assert shares["graphs"] < 0.05  # the tiny worker knows no graphs
    line = importance_line(shares)
    assert line is not None
    assert "next to nothing: " in line
    assert importance(space, records[:4], SPEED, 8) == {}


def test_the_runner_up_is_named_with_its_loss_or_as_a_tie() -> None:
    records = [record(0, [level(8, 8.0, 1000, spread=0.01)]), record(1, [level(8, 4.0, 1500, spread=0.01)])]
    points = points_of(records, ())
    best = next(point for point in points if point.trial == 1)
    line = runner_up_line(best, points, SPEED, ["draft.kind"])
    assert line is not None
    assert line.startswith("Next best: trial 0 (none) loses 33.3% of output_tok_s")
    assert runner_up_line(best, [best], SPEED, []) is None
    assert config() != records[1].config
