"""Races in real trials: what the first load shows beaten stops, long windows begin short, and both are recorded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_server.plan import Plan
from tests.tuner.make import config, level, record
from tests.tuner.running import run_fake
from tests.tuner.spaces import SPACE
from tuner.brain import Brain
from tuner.points import points_of
from tuner.racing import race_of
from tuner.records import Axis, Level, Race
from tuner.space import parse_space

AXES = (
    Axis(metric="tpot_ms_p50", goal="min", level=2),
    Axis(metric="output_tok_s", goal="max", level=4),
)


def against(tpot: float, speed: float) -> Race:
    """A race against four equal curves; speeds rise tenfold from 2 to 4 requests on none of them."""
    curve = (_level(2, tpot, speed / 2), _level(4, tpot, speed))
    return Race(axes=AXES, curves=(curve,) * 4)


def _level(concurrency: int, tpot: float, speed: float) -> Level:
    return level(concurrency, tpot, speed, spread=0.01)


def test_a_candidate_that_its_first_load_shows_beaten_is_measured_no_further(tmp_path: Path) -> None:
    race = against(tpot=0.0001, speed=1e9)
    made, events = run_fake(tmp_path, Plan(), levels=(2, 4), race=race)
    assert made.state == "pruned", made.failure
    assert [each.concurrency for each in made.levels] == [2]
    assert made.raced is not None
    assert made.raced.out
    assert made.raced.saved_s == pytest.approx(0.1)  # the window of the load that was left out
    assert [event.level for event in events if event.kind == "end" and event.level] == [2]


def test_one_that_may_be_on_the_front_is_measured_to_the_end(tmp_path: Path) -> None:
    made, _ = run_fake(tmp_path, Plan(), levels=(2, 4), race=against(tpot=1e6, speed=0.001))
    assert made.state == "measured", made.failure
    assert [each.concurrency for each in made.levels] == [2, 4]
    assert made.raced is None  # the window is too short to be split


def test_long_windows_begin_short_and_go_on_only_where_it_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.curve.LEAST", 0.5)
    plan = Plan()
    beaten = Race(axes=AXES, curves=against(0.0001, 1e9).curves[:3])  # too few to stop anybody
    made, _ = run_fake(tmp_path, plan, levels=(2, 4), race=beaten, window=0.6)
    assert made.raced is not None
    assert not made.raced.out
    assert set(made.raced.short) <= {2, 4}
    assert made.raced.short
    assert made.raced.saved_s > 0
    made, _ = run_fake(tmp_path, plan, levels=(2, 4), race=against(tpot=1e6, speed=0.001), window=0.6)
    assert made.raced is None or not made.raced.short
    assert all(each.seconds is not None and each.seconds >= 0.3 for each in made.levels)  # the confirmation has it all


def test_a_race_is_against_every_curve_on_the_axes_and_at_the_load_to_pick_for() -> None:
    space = parse_space(SPACE.replace("load: 8", "load: 4").encode())
    records = [record(0, [level(1, 5, 200), level(4, 6, 700), level(8, 8, 900)]), record(1)]
    race = race_of(records, space)
    assert [(axis.metric, axis.level) for axis in race.axes] == [
        ("tpot_ms_p50", 1),
        ("output_tok_s", 8),
        ("output_tok_s", 4),
    ]
    (curve,) = race.curves
    assert [set(each.metrics) for each in curve] == [{"tpot_ms_p50", "output_tok_s"}] * 3


def test_who_was_raced_out_teaches_and_is_no_point() -> None:
    space = parse_space(SPACE.encode())
    known = record(0, [level(1, 5, 200), level(8, 8, 1400)])
    drafted = config({"kind": "dflash", "block_size": 4, "layers": 1})
    out = record(1, [level(1, 20, 50)], state="pruned", config=drafted)
    brain = Brain(space, lambda _: ())
    brain.tell(known)
    brain.tell(out)
    (told,) = [o.values for o in brain.view(2).observations if o.assignment["draft.kind"] == "dflash"]
    assert told == (20, 50 * 1400 / 200)
    assert {point.trial for point in points_of([known, out], ())} == {0}


def test_a_worker_races_without_the_optimisers_libraries() -> None:
    code = "import sys, tuner.worker; assert not {'numpy', 'scipy', 'optuna', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
