"""What a study recommends: judged by all launches, alike in searches, in `pick` and in simulated studies."""

from __future__ import annotations

import numpy as np
import pytest

from engine.config import EngineConfig
from tests.tuner.make import config, level, record
from tests.tuner.spaces import SPACE
from tuner.confirm import Contender, contenders, in_doubt
from tuner.explain import runner_up_line
from tuner.outcome import best_of, next_confirmation, outcome_of
from tuner.records import TrialRecord, config_dict
from tuner.space import Objective, parse_space
from tuner.space.model import Pick

SPACE_ = parse_space(SPACE.encode())
SPEED = Objective(metric="output_tok_s", goal="max")
CONFIGS = [config_dict(made) for a in SPACE_.points() if isinstance(made := SPACE_.assemble(a), EngineConfig)]
SPREAD = 0.06


def launch(trial: int, made: int, loaded: float, **more: object) -> TrialRecord:
    levels = [level(1, 5.0, 200.0), level(8, 8.0, loaded, spread=SPREAD)]
    return record(trial, levels, config=CONFIGS[made], **more)


def truth(made: int) -> float:
    """Speed of a configuration: a sum of what its knobs do."""
    draft = CONFIGS[made]["draft"]
    kept = 1.1 if CONFIGS[made]["graphs"]["kind"] == "captured" else 1.0
    return kept * (1000.0 if draft["kind"] == "none" else 900.0 + 12.0 * draft["block_size"] + 20.0 * draft["layers"])


def measured(lucky: int, luck: float) -> list[TrialRecord]:
    """Every configuration once, as it is, but for one that had luck."""
    rng = np.random.default_rng(0)
    speeds = [truth(made) * np.exp(0.005 * rng.standard_normal()) for made in range(len(CONFIGS))]
    speeds[lucky] *= luck
    return [launch(made, made, float(speed)) for made, speed in enumerate(speeds)]


def test_luck_that_no_neighbour_shares_is_not_recommended_and_what_is_expected_is_said() -> None:
    order = sorted(range(len(CONFIGS)), key=truth)
    best, lucky = order[-1], order[-6]
    records = measured(lucky, 1.02 * truth(best) / truth(lucky))
    speeds = [(r.level(8) or r.levels[0]).metrics["output_tok_s"] or 0.0 for r in records]
    assert int(np.argmax(speeds)) == lucky
    found = outcome_of(records, SPACE_).recommendation
    assert found is not None
    assert truth(found.point.trial) >= 0.99 * truth(best)
    assert found.estimate is not None
    low, high = found.estimate.interval
    assert low < truth(found.point.trial) < high
    assert found.ranked[0].trial == found.point.trial
    following = runner_up_line(found.point, outcome_of(records, SPACE_).points, SPEED, ["draft.kind"], found.ranked)
    assert following is not None
    assert f"trial {found.ranked[1].trial} " in following


def test_under_four_launches_the_means_decide() -> None:
    records = [launch(0, 0, 1000.0), launch(1, 1, 1050.0), launch(2, 1, 950.0, role="confirm", of=1)]
    ranked = contenders(SPACE_, records, SPEED, 8, {0, 1})
    assert [(c.trial, c.launches, c.assignment) for c in ranked] == [(0, 1, None), (1, 2, None)]
    assert in_doubt(ranked) is None


def test_a_point_that_is_not_of_the_space_is_compared_as_it_was_measured() -> None:
    records = measured(0, 1.0)
    best = outcome_of(records, SPACE_).recommendation
    assert best is not None
    own = best.point.metrics["output_tok_s"] or 0.0
    foreign = config({"kind": "policy", "by_running": [[1, None, {"kind": "none"}]]})
    for share, wins in ((0.999, False), (1.0, False), (1.001, True)):
        table = record(len(records), [level(1, 5.0, 200.0), level(8, 8.0, own * share)], config=foreign, role="search")
        found = outcome_of([*records, table], SPACE_).recommendation
        assert found is not None
        assert (found.point.trial == table.trial) is wins


def test_what_failed_once_or_breaks_a_limit_is_never_recommended() -> None:
    records = measured(0, 1.0)
    best = outcome_of(records, SPACE_).recommendation
    assert best is not None
    trial = best.point.trial
    crashed = record(len(records), role="confirm", of=trial, config=CONFIGS[trial])
    found = outcome_of([*records, crashed], SPACE_).recommendation
    assert found is not None
    assert found.point.trial != trial
    slow = best_of(outcome_of(records, SPACE_).points, records, SPACE_, Pick(slo="ttft_ms_p90<1", load=8))
    assert slow.misses


def test_a_value_that_has_no_logarithm_leaves_the_means_to_decide() -> None:
    records = [launch(made, made, 1000.0 + made) for made in range(6)] + [launch(6, 6, 0.0)]
    found = outcome_of(records, SPACE_).recommendation
    assert found is not None
    assert (found.point.trial, found.estimate, found.ranked) == (5, None, ())


def test_nothing_is_confirmed_when_there_is_nothing_to_tell_apart() -> None:
    assert next_confirmation(outcome_of([launch(0, 0, 1000.0)], SPACE_), 3) is None
    assert next_confirmation(outcome_of(measured(0, 1.0), SPACE_), 0) is None
    assert next_confirmation(outcome_of(measured(0, 1.0), SPACE_), 1) is not None


@pytest.mark.parametrize("goal", ["min", "max"])
def test_an_estimate_is_of_the_metric_itself(goal: str) -> None:
    objective = Objective(metric="tpot_ms_p50", goal=goal)
    made = Contender(0, None, 1, np.log(8.0) if goal == "min" else -np.log(8.0), 0.1).estimate(objective)
    assert made.value == pytest.approx(8.0)
    assert made.interval == pytest.approx((8.0 * np.exp(-0.196), 8.0 * np.exp(0.196)))
