"""Policy tables: the fastest draft at every load, never slower than none, few switches."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from tests.tuner.make import config, level, record
from tuner.policy_fit import Curve, curves_of, fit_policy, never_slower, policy_config

NONE = {"kind": "none"}
LIKE = EngineConfig.model_validate(config())


def curve(trial: int, draft: dict[str, object], spread: float = 0.02, **speeds: float) -> Curve:
    made = {int(c[1:]): (v * (1 - spread), v, v * (1 + spread)) for c, v in speeds.items()}
    return Curve(trial, draft, made)


def test_speculation_serves_where_it_pays_and_none_where_it_does_not() -> None:
    """The seed story: 86 against 65 tokens/s alone, 1146 against 1493 under load."""
    none, spec = curve(0, NONE, c1=65, c8=500, c64=1493), curve(1, {"kind": "dflash"}, c1=86, c8=610, c64=1146)
    policy = fit_policy([none, spec])
    assert policy is not None
    assert [(r.first, r.last, r.curve.draft["kind"]) for r in policy.ranges] == [(1, 22, "dflash"), (23, None, "none")]
    assert policy.expected == {1: 86, 8: 610, 64: 1493}
    assert policy.gain > 1
    assert policy_config(LIKE, policy).draft.kind == "policy"


def test_an_advantage_within_the_noise_is_none() -> None:
    policy = fit_policy([curve(0, NONE, c1=100, c8=500), curve(1, {"kind": "dflash"}, c1=103, c8=510)])
    assert policy is not None
    assert [r.curve.trial for r in policy.ranges] == [0]
    assert policy_config(LIKE, policy).draft.kind == "none"


def test_a_range_that_gains_next_to_nothing_is_merged() -> None:
    short, long = {"kind": "dflash", "block_size": 8}, {"kind": "dflash", "block_size": 16}
    curves = [curve(0, NONE, c1=50, c4=200, c8=300), curve(1, short, c1=99, c4=400, c8=600)]
    curves.append(curve(2, long, c1=100, c4=390, c8=500))
    policy = fit_policy(curves)
    assert policy is not None
    assert [r.curve.trial for r in policy.ranges] == [1]


def test_without_a_baseline_there_is_no_table() -> None:
    assert fit_policy([curve(1, {"kind": "dflash"}, c1=86)]) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(10, 1000), min_size=4, max_size=4), min_size=1, max_size=5))
def test_no_table_is_expected_to_be_slower_than_none(rows: list[list[float]]) -> None:
    names = ("c1", "c4", "c16", "c64")
    curves = [
        curve(i, NONE if i == 0 else {"kind": "dflash", "block_size": 2 + i}, **dict(zip(names, row, strict=True)))
        for i, row in enumerate(rows)
    ]
    policy = fit_policy(curves)
    assert policy is not None
    assert all(policy.expected[c] >= policy.baseline[c] for c in policy.expected)
    assert policy.draft.by_running[0][0] == 1
    assert policy.draft.by_running[-1][1] is None


def test_curves_come_from_launches_that_differ_in_the_draft_alone() -> None:
    other = config({"kind": "dflash"}, memory={"max_running": 8})
    records = [
        record(0, [level(1, 5, 200)]),
        record(1, [level(1, 4, 250)]),
        record(2, [level(1, 4, 270)], role="repeat", of=1, config=config({"kind": "dflash", "block_size": 3})),
        record(3),
        record(4, [level(1, 1, 999)], config=other),
    ]
    found = curves_of(records, LIKE)
    assert [c.trial for c in found] == [0, 1]
    assert found[1].speed[1][1] == 260


def test_a_validated_table_is_judged_by_intervals() -> None:
    assert never_slower({1: level(1, 4, 100)}, {1: level(1, 4, 104)}) == {1: True}
    assert never_slower({1: level(1, 4, 80)}, {1: level(1, 4, 104)}) == {1: False}
