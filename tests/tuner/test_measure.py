from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tuner.load.intervals import Estimate, order_interval, order_ranks, percentile, ratio, student
from tuner.load.streams import Arrival
from tuner.load.traces import Trace
from tuner.measure import (
    MIN_SAMPLE,
    PERCENTILES,
    Batch,
    ClosedLoop,
    Joined,
    OpenLoop,
    accept_length,
    chunk_gaps_ms,
    client_error,
    measure,
    repeated,
    summary,
    tpot_ms,
    ttft_ms,
)
from tuner.records import METRIC_NAMES


def trace(due: float, *arrivals: tuple[float, float], ended: float | None = None, **more: float) -> Trace:
    events = tuple(Arrival(time, tokens) for time, tokens in arrivals)
    total = round(sum(tokens for _, tokens in arrivals))
    return Trace(due, arrivals[-1][0] if ended is None else ended, events, total, **more)  # type: ignore[arg-type]


FAILED = Trace(0.0, 2.0, error="reset")

# --- single requests ---


def test_tpot_leaves_the_first_event_out() -> None:
    """Nine tokens over 0.4 s, three of them with the first event: six tokens took 0.4 s."""
    request = trace(10.0, (10.5, 3), (10.7, 4), (10.9, 2))
    assert ttft_ms(request) == pytest.approx(500)
    assert tpot_ms(request) == pytest.approx(400 / 6)
    assert chunk_gaps_ms(request) == pytest.approx([200, 200])


def test_a_single_event_has_no_tpot() -> None:
    assert tpot_ms(trace(0.0, (0.5, 8))) is None


def test_an_exact_server_is_measured_exactly() -> None:
    """Four slots, 100 events of 4 tokens every 10 ms, the first after 20 ms: nothing here is random."""
    traces = [
        trace(start, *[(start + 0.02 + 0.01 * i, 4) for i in range(100)])
        for slot in range(4)
        for start in [0.01 * slot + 1.01 * k for k in range(5)]
    ]
    level = measure(traces, concurrency=4, gpus=2, slo={"ttft_ms_p90": 100.0})
    assert level.n == 20
    assert level.metrics["ttft_ms_p50"] == pytest.approx(20)
    assert level.metrics["tpot_ms_p90"] == pytest.approx(2.5)
    assert level.metrics["chunk_gap_ms_p99"] == pytest.approx(10)
    assert level.metrics["e2e_ms_mean"] == pytest.approx(1010)
    assert level.metrics["output_tok_s"] == pytest.approx(4 * 400 / 1.01)
    assert level.metrics["output_tok_s_per_gpu"] == pytest.approx(2 * 400 / 1.01)
    assert level.metrics["goodput_rps"] == pytest.approx(4 / 1.01)
    assert level.metrics["error_rate"] == 0


# --- a level ---


def test_every_metric_is_there_and_nothing_else() -> None:
    level = measure([trace(0.0, (0.5, 1), (0.6, 1))], concurrency=1)
    assert set(level.metrics) == set(METRIC_NAMES)
    assert set(level.intervals) <= set(METRIC_NAMES)


def test_failed_requests_cost_time_and_give_nothing() -> None:
    """Two slots' worth of two seconds, one request of 10 tokens each second: half of it fails."""
    good = [trace(float(i), (i + 0.5, 5), (i + 1.0, 5)) for i in range(2)]
    level = measure([*good, FAILED], concurrency=1)
    assert level.metrics["output_tok_s"] == pytest.approx(20 / 4)
    assert level.metrics["error_rate"] == pytest.approx(1 / 3)
    assert level.metrics["ttft_ms_p50"] == pytest.approx(500)
    assert level.n == 2


@pytest.mark.parametrize("traces", [[], [FAILED], [FAILED, FAILED]])
def test_without_an_answer_nothing_is_measured(traces: list[Trace]) -> None:
    level = measure(traces, concurrency=3)
    assert level.n == 0
    assert level.metrics["ttft_ms_p50"] is None
    assert level.metrics["output_tok_s"] in (None, 0.0)
    assert level.metrics["error_rate"] in (None, 1.0)


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    quick = trace(0.0, (0.1, 1), (0.2, 1), ended=1.0)
    late = trace(0.0, (0.9, 1), (1.0, 1), ended=1.0)
    slow = trace(0.0, (0.1, 1), (0.9, 1), ended=1.0)
    slo = {"ttft_ms_p90": 500.0, "tpot_ms_p50": 300.0, "output_tok_s": 1e9}
    assert measure([quick, late, slow, FAILED], concurrency=5, slo=slo).metrics["goodput_rps"] == pytest.approx(1.0)
    assert measure([quick], concurrency=1).metrics["goodput_rps"] is None


def test_accept_length_weighs_by_rounds() -> None:
    """100 rounds of 2 and one of 10 are 210 tokens in 101 rounds, not 6 a round."""
    many = trace(0.0, (0.1, 1), (0.2, 1), accept_length=2.0, verify_count=100)
    one = trace(0.0, (0.1, 1), (0.2, 1), accept_length=10.0, verify_count=1)
    silent = trace(0.0, (0.1, 1), (0.2, 1))
    assert accept_length([many, one, silent]).value == pytest.approx(210 / 101)
    assert accept_length([silent]) == Estimate(None)


@pytest.mark.parametrize("statistic", PERCENTILES)
def test_a_percentile_below_its_minimum_sample_is_null(statistic: str) -> None:
    least = MIN_SAMPLE[statistic]
    assert summary([1.0] * (least - 1), statistic).value is None
    assert summary([1.0] * least, statistic).value == 1.0


# --- against brute force ---

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)


@settings(max_examples=100, deadline=None)
@given(VALUES, st.sampled_from(list(PERCENTILES.values())))
def test_percentiles_are_numpys(values: list[float], q: float) -> None:
    assert percentile(sorted(values), q) == pytest.approx(float(np.quantile(values, q)), rel=1e-9, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.sampled_from(list(PERCENTILES.values())))
def test_order_ranks_are_the_binomials(n: int, q: float) -> None:
    below = [float(stats.binom.cdf(k, n, q)) for k in range(n + 1)]
    low = sum(p <= 0.025 for p in below[:n])
    high = next((k for k in range(n + 2) if 1 - (below[k - 1] if k else 0) <= 0.025), n + 1)
    expected = (low, high) if low >= 1 and high <= n else None
    assert order_ranks(n, q) == expected


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 6, 9, 20, 100, 10_000])
def test_students_quantile(freedom: int) -> None:
    assert student(freedom) == pytest.approx(float(stats.t.ppf(0.975, freedom)), rel=2e-3)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 100), st.floats(1e-3, 1), st.lists(st.tuples(st.floats(0, 1), st.integers(1, 16)), min_size=1)
        ),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 64),
)
def test_no_number_is_ever_absurd(requests: list[tuple[float, float, list[tuple[float, int]]]], slots: int) -> None:
    traces = []
    for due, first, gaps in requests:
        times = [due + first]
        for gap, _ in gaps[1:]:
            times.append(times[-1] + gap)
        traces.append(trace(due, *zip(times, [float(tokens) for _, tokens in gaps], strict=True)))
    level = measure(traces, concurrency=slots)
    for name, value in level.metrics.items():
        assert value is None or (math.isfinite(value) and value >= 0), name
        if name in level.intervals and value is not None:
            low, high = level.intervals[name]
            assert low <= value + 1e-6 * abs(value) + 1e-9
            assert value <= high + 1e-6 * abs(value) + 1e-9
    speed = sum(t.output_tokens for t in traces) / sum(t.ended - t.due for t in traces) * slots
    assert level.metrics["output_tok_s"] == pytest.approx(speed)


# --- coverage: intervals hold the truth about as often as they say ---

RUNS = 1500


def coverage(draw: Callable[[random.Random], tuple[float, float] | None], truth: float) -> float:
    """Return the share of seeded runs whose interval holds the truth."""
    rng = random.Random(20_240_611)
    intervals = [interval for _ in range(RUNS) if (interval := draw(rng)) is not None]
    assert len(intervals) == RUNS
    return sum(low <= truth <= high for low, high in intervals) / RUNS


@pytest.mark.parametrize(("q", "n"), [(0.5, 6), (0.5, 30), (0.9, 60), (0.99, 500)])
def test_order_intervals_cover_any_shape(q: float, n: int) -> None:
    """Lognormal latencies; the interval is conservative, for ranks are whole numbers."""
    truth = math.exp(stats.norm.ppf(q))
    covered = coverage(lambda rng: order_interval(sorted(rng.lognormvariate(0, 1) for _ in range(n)), q), truth)
    assert 0.94 <= covered <= 0.995


@pytest.mark.parametrize("n", [6, 12, 40])
def test_throughput_intervals_cover(n: int) -> None:
    """Requests of 64 tokens whose cycles vary by a quarter: the truth is 64 over the mean cycle."""

    def draw(rng: random.Random) -> tuple[float, float] | None:
        return ratio([64.0] * n, [max(0.05, rng.gauss(1.0, 0.25)) for _ in range(n)]).interval

    assert 0.92 <= coverage(draw, 64.0) <= 0.975


def test_accept_length_intervals_cover() -> None:
    """Rounds and tokens of a request go together; the truth is the ratio of their means."""

    def draw(rng: random.Random) -> tuple[float, float] | None:
        rounds = [rng.randint(10, 30) for _ in range(20)]
        tokens = [r * rng.uniform(2.0, 5.0) for r in rounds]
        return ratio(tokens, [float(r) for r in rounds]).interval

    assert 0.92 <= coverage(draw, 3.5) <= 0.975


def test_gap_intervals_cover_although_gaps_of_a_request_are_alike() -> None:
    """Each request has a pace of its own; an interval that took gaps as independent would cover far less."""

    def gaps(rng: random.Random) -> list[list[float]]:
        return [[pace * rng.uniform(0.5, 1.5) for _ in range(20)] for pace in (rng.uniform(5, 15) for _ in range(20))]

    def draw(rng: random.Random) -> tuple[float, float] | None:
        return measure([_with_gaps(group) for group in gaps(rng)], concurrency=1).intervals.get("chunk_gap_ms_p50")

    rng = random.Random(1)
    truth = float(np.median([gap for _ in range(500) for group in gaps(rng) for gap in group]))
    hits = []
    for _ in range(300):
        interval = draw(rng)
        assert interval is not None
        hits.append(interval[0] <= truth <= interval[1])
    assert 0.90 <= sum(hits) / len(hits) <= 0.99


def _with_gaps(group: Sequence[float]) -> Trace:
    times = np.cumsum([0.01, *[gap / 1e3 for gap in group]])
    return trace(0.0, *[(float(time), 2.0) for time in times])


# --- what a level says beside its metrics ---


def steady(n: int, cycle: float = 1.0, **more: Any) -> list[Trace]:
    """Return n requests of one slot, 8 tokens each, the first after a tenth of the cycle."""
    return [trace(i * cycle, ((i + 0.1) * cycle, 4), ((i + 1) * cycle, 4), **more) for i in range(n)]


def test_too_small_samples_are_marked() -> None:
    level = measure(steady(12), concurrency=1)
    assert level.metrics["ttft_ms_p90"] is not None
    assert level.metrics["ttft_ms_p95"] is None
    assert level.few["ttft_ms_p95"] == 20
    assert level.few["e2e_ms_p99"] == 100
    assert "ttft_ms_p90" not in level.few
    assert set(level.few) <= set(METRIC_NAMES)


def test_errors_are_counted_by_kind() -> None:
    level = measure([*steady(3), FAILED, FAILED, Trace(0.0, 1.0, error="stalled")], concurrency=1)
    assert level.errors == {"reset": 2, "stalled": 1}
    assert level.output_tokens == 24


def test_normalised_latency_and_the_users_speed() -> None:
    level = measure(steady(10), concurrency=1)
    assert level.metrics["normalized_ms_mean"] == pytest.approx(1000 / 8)
    assert level.metrics["output_tok_s_per_user"] == pytest.approx(4 / 0.9)
    assert level.metrics["request_rps"] == pytest.approx(1.0)


def test_categories_are_apart() -> None:
    code = [replace(t, slice="code") for t in steady(4)]
    prose = [replace(t, slice="prose", accept_length=3.0, verify_count=2) for t in steady(3, 2.0)]
    level = measure([*code, *prose], concurrency=1)
    assert {name: part.n for name, part in level.slices.items()} == {"code": 4, "prose": 3}
    assert level.slices["prose"].metrics["e2e_ms_p50"] == pytest.approx(2000)
    assert level.slices["code"].metrics["accept_length"] is None
    assert level.slices["prose"].metrics["accept_length"] == pytest.approx(3.0)
    assert measure(code, concurrency=1).slices == {}


def test_a_batch_includes_ramp_and_tail() -> None:
    """Two slots of 3 and 1 requests of a second: 4 in 3 seconds, where the closed loop's rate is 2 a second."""
    traces = [*steady(3), *steady(1)]
    assert measure(traces, concurrency=2, rate=Batch(2)).metrics["request_rps"] == pytest.approx(4 / 3)
    assert measure(traces, concurrency=2).metrics["request_rps"] == pytest.approx(2.0)


@pytest.mark.parametrize("seconds", [0.1, 30.0])
def test_an_open_loops_rate_is_that_of_its_completions(seconds: float) -> None:
    """Ten requests a second whatever an answer takes."""
    traces = [trace(i / 10, (i / 10 + seconds / 2, 4), (i / 10 + seconds, 4)) for i in range(200)]
    level = measure(traces, concurrency=5, rate=OpenLoop())
    assert level.metrics["request_rps"] == pytest.approx(10)
    assert level.metrics["output_tok_s"] == pytest.approx(80)


def test_repeats_that_disagree_widen_the_interval() -> None:
    runs = [steady(20, cycle) for cycle in (1.0, 1.3, 0.8)]
    levels = [measure(run, concurrency=1) for run in runs]
    pooled = measure([t for run in runs for t in run], concurrency=1)
    found = repeated(levels, pooled)
    for name in ("output_tok_s", "e2e_ms_mean", "tpot_ms_p50"):
        low, high = found.intervals[name]
        assert low <= min(pooled.intervals[name][0], min(level.metrics[name] or 0 for level in levels))
        assert high >= pooled.intervals[name][1]
    assert repeated(levels[:2], pooled) == pooled


@pytest.mark.parametrize(("lag", "sent_late", "bound"), [(0.001, 0.0, False), (0.02, 0.0, True), (0.001, 0.05, True)])
def test_a_late_client_says_so(lag: float, sent_late: float, bound: bool) -> None:
    """Requests take a second: 10 ms are allowed, of reading as of sending."""
    found = client_error([replace(t, lag=sent_late) for t in steady(50)], [lag] * 200, busy=0.5)
    assert found.bound is bound
    assert found.limit_ms == pytest.approx(10.0)
    assert found.lag_ms_p99 == pytest.approx(1e3 * max(lag, sent_late))
    assert client_error([FAILED], [1.0]).bound is False


def test_windows_of_unequal_length_count_by_their_length() -> None:
    def level_with(seconds: tuple[float, ...]) -> float:
        one, other = [trace(0.0, (1.0, 1))] * 2, [trace(0.0, (2.0, 1))] * 6
        rate = Joined((2, 6), ClosedLoop(1), seconds)
        found = rate.per_second([*one, *other], [1.0] * 8)
        assert found.value is not None
        return found.value

    assert level_with((1.0, 3.0)) == pytest.approx((1.0 * 1 + 0.5 * 3) / 4)
    assert level_with(()) == level_with((2.0, 2.0)) == pytest.approx(0.75)
