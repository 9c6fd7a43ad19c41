"""From what a level's requests said to metrics with 95 % intervals. Pure: no clock, no randomness, no I/O.

Let request i be due at d_i, its events bring k_ij tokens at times t_ij (j = 1 … m), and its answer end at e_i.

- TTFT = t_i1 − d_i; E2E = t_im − d_i: from when the request was due, so a late client shows.
- TPOT = (t_im − t_i1) / (Σ_j k_ij − k_i1): the tokens of the first event came at t_i1 and cost nothing after it.
  Null for a single event.
- Chunk gaps are t_ij − t_i(j−1): what a reader sees; a chunk may carry many tokens.
- Output tokens/s of a closed loop of c slots = c · Σ tokens / Σ cycle, cycle = e_i − d_i. Each slot is a renewal
  process and Little's law turns its mean cycle into a rate; requests that failed add time and no tokens. Its
  interval is that of a ratio of means (regenerative method: Crane & Iglehart 1975; Fieller's first order, with
  Student's t). Goodput and accept length are ratios of the same kind.
- Percentile intervals are order statistics: the narrowest [x_l, x_u] with binomial probability ≤ 2.5 % on either
  side, free of any assumption on the shape. Where the sample is too small for a bound there is no interval.
- A percentile of fewer than MIN_SAMPLE values is null: with fewer, it is the sample's extreme under another name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist

from tuner.load.streams import Arrival
from tuner.records import STATISTICS, Level, metric_of

CONFIDENCE = 0.95
PERCENTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
MIN_SAMPLE = {
    "mean": 1,
    "p50": 2,
    "p90": 10,
    "p95": 20,
    "p99": 100,
}  # 1 / (1 − q): one value lies beyond
MIN_GAP_REQUESTS = 10  # gaps of one request resemble each other: their interval needs this many requests


@dataclass(frozen=True)
class Trace:
    """One counted request. Times in seconds of one clock; `arrivals` empty when it failed.

    `accept_length` and `verify_count`: tokens a verify round and rounds, where the server says.
    """

    due: float
    ended: float
    arrivals: tuple[Arrival, ...] = ()
    output_tokens: int = 0
    accept_length: float | None = None
    verify_count: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval; either may be unknown."""

    value: float | None
    interval: tuple[float, float] | None = None


UNKNOWN = Estimate(None)


def measure(
    traces: Sequence[Trace],
    *,
    concurrency: int,
    gpus: int = 0,
    slo: Mapping[str, float] | None = None,
) -> Level:
    """Return the metrics of one closed-loop level.

    Args:
        concurrency: requests kept in flight.
        gpus: GPUs of the lease, for `output_tok_s_per_gpu`.
        slo: upper limits by metric name; a request is good when it meets all (a statistic in the name is dropped:
            `ttft_ms_p90<500` asks 500 ms of each request).
    """
    good = [trace for trace in traces if trace.error is None]
    found: dict[str, Estimate] = {}
    samples = {
        "ttft_ms": [ttft_ms(trace) for trace in good],
        "tpot_ms": [value for trace in good if (value := tpot_ms(trace)) is not None],
        "e2e_ms": [e2e_ms(trace) for trace in good],
    }
    for name, values in samples.items():
        for statistic in STATISTICS:
            found[f"{name}_{statistic}"] = summary(values, statistic)
    gaps = [chunk_gaps_ms(trace) for trace in good]
    for statistic in STATISTICS:
        found[f"chunk_gap_ms_{statistic}"] = _pooled(gaps, statistic)
    cycles = [trace.ended - trace.due for trace in traces]
    tokens = [float(trace.output_tokens) if trace.error is None else 0.0 for trace in traces]
    found["output_tok_s"] = scaled(ratio(tokens, cycles), concurrency)
    found["output_tok_s_per_gpu"] = scaled(found["output_tok_s"], 1 / gpus) if gpus else UNKNOWN
    met = [float(trace.error is None and _meets(trace, slo or {})) for trace in traces]
    found["goodput_rps"] = scaled(ratio(met, cycles), concurrency) if slo else UNKNOWN
    found["accept_length"] = accept_length(good)
    found["error_rate"] = Estimate(1 - len(good) / len(traces) if traces else None)
    return Level(
        concurrency=concurrency,
        metrics={name: estimate.value for name, estimate in found.items()},
        intervals={name: e.interval for name, e in found.items() if e.interval is not None},
        n=len(good),
    )


def ttft_ms(trace: Trace) -> float:
    """Return milliseconds from when a request was due to its first token."""
    return 1e3 * (trace.arrivals[0].time - trace.due)


def e2e_ms(trace: Trace) -> float:
    """Return milliseconds from when a request was due to its last token."""
    return 1e3 * (trace.arrivals[-1].time - trace.due)


def tpot_ms(trace: Trace) -> float | None:
    """Return milliseconds per token after the first event; None when there is only one."""
    if len(trace.arrivals) < 2:
        return None
    first, last = trace.arrivals[0], trace.arrivals[-1]
    return 1e3 * (last.time - first.time) / (sum(a.tokens for a in trace.arrivals) - first.tokens)


def chunk_gaps_ms(trace: Trace) -> list[float]:
    """Return milliseconds between events that brought tokens."""
    times = [arrival.time for arrival in trace.arrivals]
    return [1e3 * (after - before) for before, after in pairwise(times)]


def accept_length(traces: Sequence[Trace]) -> Estimate:
    """Return tokens per verify round over all requests, each weighing by its rounds."""
    known = [(t.accept_length, t.verify_count) for t in traces if t.accept_length is not None and t.verify_count]
    return ratio(
        [length * count for length, count in known],
        [float(count) for _, count in known],
    )


def summary(values: Sequence[float], statistic: str) -> Estimate:
    """Return the mean or a percentile of independent values, with its interval."""
    if len(values) < MIN_SAMPLE[statistic]:
        return UNKNOWN
    if statistic == "mean":
        return mean(values)
    ordered = sorted(values)
    q = PERCENTILES[statistic]
    return Estimate(percentile(ordered, q), order_interval(ordered, q))


def percentile(ordered: Sequence[float], q: float) -> float:
    """Return the q-quantile of ascending values, interpolated between neighbours."""
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    return min(high, low + (high - low) * (position - below))


def order_interval(ordered: Sequence[float], q: float) -> tuple[float, float] | None:
    """Return the order statistics that enclose the q-quantile; None where the sample is too small."""
    ranks = order_ranks(len(ordered), q)
    return None if ranks is None else (ordered[ranks[0] - 1], ordered[ranks[1] - 1])


@lru_cache(maxsize=4096)
def order_ranks(n: int, q: float) -> tuple[int, int] | None:
    """Return the ranks (from 1) l < u with P(x_l ≤ quantile ≤ x_u) ≥ 95 % for n independent values.

    The number of values below the quantile is binomial(n, q): l is the largest rank with P(B < l) ≤ 2.5 %, u the
    smallest with P(B ≥ u) ≤ 2.5 %. None if either does not exist.
    """
    if n < 1:
        return None
    tail = (1 - CONFIDENCE) / 2
    logs = [
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(q) + (n - k) * math.log1p(-q)
        for k in range(n + 1)
    ]
    chances = [math.exp(value) for value in logs]
    below, low = 0.0, 0
    while low < n and below + chances[low] <= tail:
        below += chances[low]
        low += 1
    above, high = 0.0, n + 1
    while high > 1 and above + chances[high - 1] <= tail:
        above += chances[high - 1]
        high -= 1
    return (low, high) if low >= 1 and high <= n else None


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean with Student's interval."""
    return ratio(values, [1.0] * len(values))


def ratio(tops: Sequence[float], bottoms: Sequence[float]) -> Estimate:
    """Return Σ tops / Σ bottoms with the interval of a ratio of means (first order, Student's t).

    Nothing measured here is negative, so an interval ends at 0.
    """
    n, total = len(tops), math.fsum(bottoms)
    if n == 0 or total <= 0:
        return UNKNOWN
    value = math.fsum(tops) / total
    if n < 3:
        return Estimate(value)
    residuals = [top - value * bottom for top, bottom in zip(tops, bottoms, strict=True)]
    variance = math.fsum(r * r for r in residuals) / (n - 1)
    half = student(n - 1) * math.sqrt(n * variance) / total
    return Estimate(value, (max(0.0, value - half), value + half))


@lru_cache(maxsize=4096)
def student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t for at least 2 degrees of freedom.

    In closed form for 2; else Cornish–Fisher's expansion around the normal quantile, which errs by 0.12 % at 3
    and less beyond (Abramowitz & Stegun 26.7.5).
    """
    p = 1 - (1 - CONFIDENCE) / 2
    if freedom == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z = NormalDist().inv_cdf(p)
    v = float(freedom)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / v ** (power + 1) for power, term in enumerate(terms))


def scaled(estimate: Estimate, factor: float) -> Estimate:
    """Return the estimate times a positive factor."""
    if estimate.value is None:
        return UNKNOWN
    interval = estimate.interval
    return Estimate(
        estimate.value * factor,
        None if interval is None else (interval[0] * factor, interval[1] * factor),
    )


def _pooled(groups: Sequence[Sequence[float]], statistic: str) -> Estimate:
    """Return a statistic of all gaps; they are alike within a request, so the interval is over requests."""
    pooled = sorted(value for group in groups for value in group)
    if len(pooled) < MIN_SAMPLE[statistic]:
        return UNKNOWN
    filled = [group for group in groups if group]
    enough = len(filled) >= MIN_GAP_REQUESTS
    if statistic == "mean":
        estimate = ratio(
            [math.fsum(group) for group in filled],
            [float(len(group)) for group in filled],
        )
        return Estimate(estimate.value, estimate.interval if enough else None)
    q = PERCENTILES[statistic]
    value = percentile(pooled, q)
    return Estimate(value, _pooled_interval(filled, pooled, q) if enough else None)


def _pooled_interval(
    groups: Sequence[Sequence[float]], pooled: Sequence[float], q: float
) -> tuple[float, float] | None:
    """Return Woodruff's interval (1952): the share of gaps below the quantile is a ratio over requests.

    Its standard error, from whole requests, moves the rank up and down; None when a rank leaves the sample.
    """
    value = percentile(pooled, q)
    below = [float(sum(gap <= value for gap in group)) for group in groups]
    share = ratio(below, [float(len(group)) for group in groups])
    if share.interval is None:
        return None
    half = (share.interval[1] - share.interval[0]) / 2
    low, high = q - half, q + half
    if low <= 0 or high >= 1 - 0.5 / len(pooled):
        return None
    return percentile(pooled, low), percentile(pooled, high)


def _meets(trace: Trace, slo: Mapping[str, float]) -> bool:
    """Tell whether a request meets every limit that concerns a single request."""
    for name, limit in slo.items():
        match metric_of(name).name:
            case "ttft_ms":
                value: float | None = ttft_ms(trace)
            case "tpot_ms":
                value = tpot_ms(trace)
            case "e2e_ms":
                value = e2e_ms(trace)
            case "chunk_gap_ms":
                value = max(chunk_gaps_ms(trace), default=None)
            case _:
                value = None  # a limit on the whole level, not on a request
        if value is not None and value > limit:
            return False
    return True
