"""When a search stops, and what it says is left."""

from __future__ import annotations

import pytest

from tests.tuner.make import level, record
from tuner.budget import Ledger, busy_seconds, launched, reserve, seconds_left, why_stop
from tuner.durations import format_duration, parse_duration
from tuner.records import TrialRecord
from tuner.space.model import Budget


def ledger(launched: int = 3, seconds: float = 30.0, gpu_seconds: float = 0.0, each: float = 10.0) -> Ledger:
    return Ledger(launched, seconds, gpu_seconds, (each,) * launched)


def test_trials_count_launches_of_baseline_and_search_only() -> None:
    refused = record(3, None, state="infeasible")
    again = record(4, [level(1, 8.0, 120)], role="confirm", of=0)
    assert launched([record(0, [level(1, 8.0, 120)]), record(1), record(2), refused, again]) == 3
    assert why_stop(Budget(trials=4), ledger(3), 0) is None
    assert why_stop(Budget(trials=3), ledger(3), 0) == "3 of 3 trials are done"
    assert why_stop(Budget(trials=3), ledger(3), 0, count=False) is None


def test_a_trial_that_would_exceed_the_wall_time_is_not_started() -> None:
    assert why_stop(Budget(wall=40.0), ledger(seconds=30.0), 0) is None
    assert why_stop(Budget(wall=39.0), ledger(seconds=30.0), 0) == "of 39s wall time 9.0s is left; a trial takes 10s"
    kept = why_stop(Budget(wall=60.0), ledger(seconds=30.0), 0, kept_back=25.0)
    assert kept == "of 1m 00s wall time 30s is left, 25s kept for the confirmation; a trial takes 10s"


def test_the_first_trial_always_starts() -> None:
    fresh = Ledger(0, 0.0, 0.0, ())
    assert why_stop(Budget(trials=1, wall=1.0, gpu_hours=0.001), fresh, 8) is None
    assert seconds_left(Budget(trials=5), fresh) is None


def test_gpu_hours() -> None:
    assert why_stop(Budget(gpu_hours=1.0), ledger(gpu_seconds=3590.0), 1) is None
    assert why_stop(Budget(gpu_hours=1.0), ledger(gpu_seconds=3590.0), 2) == "1.00 of 1 GPU-hours are spent"


def test_trials_side_by_side_are_counted_once() -> None:
    def ran(started: float | None, seconds: float) -> TrialRecord:
        times = {"lease": 1.0, "load": seconds - 1.0}
        return TrialRecord(trial=0, role="search", state="measured", config={}, seconds=times, started=started)

    assert busy_seconds([]) == 0.0
    assert busy_seconds([ran(100.0, 50.0), ran(105.0, 20.0), ran(140.0, 20.0), ran(300.0, 10.0)]) == 70.0
    assert busy_seconds([ran(100.0, 50.0), ran(None, 20.0)]) == 70.0


def test_the_confirmation_gets_three_trials_but_at_most_a_fifth() -> None:
    assert reserve(Budget(wall=1000.0), 2, 10.0) == 30.0
    assert reserve(Budget(wall=1000.0), 40, 10.0) == 60.0
    assert reserve(Budget(wall=100.0), 2, 10.0) == 20.0
    assert reserve(Budget(trials=9), 2, 10.0) == 0.0


def test_what_is_left_is_the_nearer_limit() -> None:
    assert seconds_left(Budget(trials=10, wall=1000.0), ledger(3)) == 100.0
    assert seconds_left(Budget(trials=10, wall=1000.0), ledger(3), 2) == 20.0
    assert seconds_left(Budget(trials=10, wall=50.0), ledger(3, seconds=30.0)) == 20.0
    assert seconds_left(Budget(wall=50.0), ledger(3, seconds=80.0)) == 0.0


def test_the_estimate_follows_the_last_trials() -> None:
    assert Ledger(9, 0, 0, (100.0, *(10.0,) * 8)).trial_seconds == 10.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("150s", 150), ("10m", 600), ("2h", 7200), ("1h 30m", 5400), ("800ms", 0.8), (90, 90), (1.5, 1.5), ("1d", 86400)],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "10", "10x", "s", "-5s", "10m5", True, None, [], -1, 1e12, "9999999d", "1e3s"])
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.84, "0.8s"), (9.96, "10.0s"), (12.4, "12s"), (59.7, "1m 00s"), (200, "3m 20s"), (7500, "2h 05m")],
)
def test_durations_are_shown_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
