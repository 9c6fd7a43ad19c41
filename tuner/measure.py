"""From what a level's requests said to metrics with 95 % intervals. Pure: no clock, no randomness, no I/O.

Let request i be due at d_i, its events bring k_ij tokens at times t_ij (j = 1 … m), and its answer end at e_i.

- TTFT = t_i1 − d_i; E2E = t_im − d_i: from when the request was due, so a late client shows. Normalised latency is
  E2E over the request's tokens.
- TPOT = (t_im − t_i1) / (Σ_j k_ij − k_i1): the tokens of the first event came at t_i1 and cost nothing after it.
  Null for a single event.
- Chunk gaps are t_ij − t_i(j−1): what a reader sees; a chunk may carry many tokens.
- Rates (output tokens, requests, good requests per second) are ratios of sums, see `Rate`; requests that failed add
  time and nothing else. So is the accept length, over verify rounds.
- A percentile of fewer than MIN_SAMPLE values is null: with fewer, it is the sample's extreme under another name.
  `Level.few` says how many it needs.

Intervals are those of `load/intervals.py`, over requests; of gaps, which resemble each other within a request, over
whole requests. With three repeats or more an interval is no narrower than that between the repeats' own values.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from tuner.load.intervals import UNKNOWN, Estimate, mean, order_interval, percentile, pooled_interval, ratio
from tuner.load.traces import Trace
from tuner.records import STATISTICS, ClientError, Level, Slice, metric_of

PERCENTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
MIN_SAMPLE = {
    "mean": 1,
    "p50": 2,
    "p90": 10,
    "p95": 20,
    "p99": 100,
}  # 1 / (1 − q): one value lies beyond
MIN_GAP_REQUESTS = 10  # gaps of one request resemble each other: their interval needs this many requests
BATCHES = 20  # of an open loop's completions, which depend on each other
SLICED = ("ttft_ms_p50", "tpot_ms_mean", "tpot_ms_p50", "e2e_ms_p50", "accept_length", "error_rate")


class Rate(Protocol):
    """How amounts per request become an amount per second."""

    def per_second(self, traces: Sequence[Trace], amounts: Sequence[float]) -> Estimate:
        """Return the rate of what each request, failed ones too, brought."""
        ...


@dataclass(frozen=True)
class ClosedLoop:
    """c slots: c · Σ amounts / Σ cycle, cycle = e_i − d_i.

    Each slot is a renewal process and Little's law turns its mean cycle into a rate, without ramp or tail.
    """

    users: int

    def per_second(self, traces: Sequence[Trace], amounts: Sequence[float]) -> Estimate:
        """See `Rate`."""
        return ratio(amounts, [trace.ended - trace.due for trace in traces]).scaled(self.users)


@dataclass(frozen=True)
class Batch:
    """A given number of requests over the time from the first that was due to the end of the last, ramp and tail
    included. The interval is as wide in proportion as the closed loop's."""

    users: int

    def per_second(self, traces: Sequence[Trace], amounts: Sequence[float]) -> Estimate:
        """See `Rate`."""
        if not traces:
            return UNKNOWN
        seconds = max(trace.ended for trace in traces) - min(trace.due for trace in traces)
        steady = ClosedLoop(self.users).per_second(traces, amounts)
        return steady.at(math.fsum(amounts) / seconds) if seconds > 0 else UNKNOWN


@dataclass(frozen=True)
class OpenLoop:
    """Amounts of all completions but the first, over the time from the first to the last.

    That is what was offered where the server keeps up, and what it can do where it does not. Completions depend on
    each other, so the interval is over BATCHES of them where there are enough.
    """

    def per_second(self, traces: Sequence[Trace], amounts: Sequence[float]) -> Estimate:
        """See `Rate`."""
        order = sorted(range(len(traces)), key=lambda i: traces[i].ended)
        gaps = [traces[b].ended - traces[a].ended for a, b in pairwise(order)]
        brought = [amounts[i] for i in order[1:]]
        size = max(1, len(gaps) // BATCHES) if len(gaps) >= 2 * BATCHES else 1
        starts = range(0, len(gaps) - len(gaps) % size, size)
        whole = ratio(brought, gaps)
        batched = ratio(
            [math.fsum(brought[i : i + size]) for i in starts], [math.fsum(gaps[i : i + size]) for i in starts]
        )
        return UNKNOWN if whole.value is None else batched.at(whole.value)


@dataclass(frozen=True)
class Joined:
    """Windows one after another, `sizes` requests each: the mean of their rates, weighted by their lengths."""

    sizes: tuple[int, ...]
    each: Rate
    seconds: tuple[float, ...] = ()  # empty: all of one length

    def per_second(self, traces: Sequence[Trace], amounts: Sequence[float]) -> Estimate:
        """See `Rate`."""
        ends = list(itertools.accumulate(self.sizes))
        spans = [slice(end - size, end) for size, end in zip(self.sizes, ends, strict=True)]
        found = [self.each.per_second(traces[span], amounts[span]) for span in spans]
        seconds = self.seconds or (1.0,) * len(found)
        known = [(e.value, weight) for e, weight in zip(found, seconds, strict=True) if e.value is not None]
        if not known:
            return UNKNOWN
        whole = math.fsum(weight for _, weight in known)
        value = math.fsum(each * weight for each, weight in known) / whole
        sides = [
            (weight * (e.value - e.interval[0]), weight * (e.interval[1] - e.value))
            for e, weight in zip(found, seconds, strict=True)
            if e.value and e.interval
        ]
        if len(sides) < len(found):
            return Estimate(value)
        below, above = (math.sqrt(math.fsum(each * each for each in side)) / whole for side in zip(*sides, strict=True))
        return Estimate(value, (max(0.0, value - below), value + above))


def measure(
    traces: Sequence[Trace],
    *,
    concurrency: int,
    gpus: int = 0,
    slo: Mapping[str, float] | None = None,
    rate: Rate | None = None,
) -> Level:
    """Return the metrics of one level.

    Args:
        concurrency: users: requests kept in flight, or the factor of an open loop's rate.
        gpus: GPUs of the lease, for `output_tok_s_per_gpu`.
        slo: upper limits by metric name; a request is good when it meets all (a statistic in the name is dropped:
            `ttft_ms_p90<500` asks 500 ms of each request).
        rate: how requests become rates; None is a closed loop of `concurrency` slots.
    """
    good = [trace for trace in traces if trace.error is None]
    found, few = _latencies(good)
    rate = rate or ClosedLoop(concurrency)
    tokens = [float(trace.output_tokens) if trace.error is None else 0.0 for trace in traces]
    answered = [float(trace.error is None) for trace in traces]
    met = [float(trace.error is None and _meets(trace, slo or {})) for trace in traces]
    found["output_tok_s"] = rate.per_second(traces, tokens)
    found["output_tok_s_per_gpu"] = found["output_tok_s"].scaled(1 / gpus) if gpus else UNKNOWN
    found["output_tok_s_per_user"] = _inverse(found["tpot_ms_p50"])
    found["request_rps"] = rate.per_second(traces, answered)
    found["goodput_rps"] = rate.per_second(traces, met) if slo else UNKNOWN
    found["accept_length"] = accept_length(good)
    found["error_rate"] = Estimate(1 - len(good) / len(traces) if traces else None)
    return Level(
        concurrency=concurrency,
        metrics={name: estimate.value for name, estimate in found.items()},
        intervals={name: e.interval for name, e in found.items() if e.interval is not None},
        n=len(good),
        few=few,
        errors=dict(Counter(trace.error for trace in traces if trace.error is not None)),
        slices=_slices(traces),
        output_tokens=sum(trace.output_tokens for trace in good),
    )


def _latencies(good: Sequence[Trace]) -> tuple[dict[str, Estimate], dict[str, int]]:
    """Return every latency's statistics, and how many values those need that have too few."""
    found: dict[str, Estimate] = {}
    few: dict[str, int] = {}
    samples = {
        "ttft_ms": [ttft_ms(trace) for trace in good],
        "tpot_ms": [value for trace in good if (value := tpot_ms(trace)) is not None],
        "e2e_ms": [e2e_ms(trace) for trace in good],
        "normalized_ms": [e2e_ms(trace) / trace.output_tokens for trace in good if trace.output_tokens],
    }
    gaps = [chunk_gaps_ms(trace) for trace in good]
    for statistic in STATISTICS:
        for name, values in samples.items():
            found[f"{name}_{statistic}"] = summary(values, statistic)
        found[f"chunk_gap_ms_{statistic}"] = _pooled(gaps, statistic)
        sizes = {name: len(values) for name, values in samples.items()} | {"chunk_gap_ms": sum(map(len, gaps))}
        short = (name for name, size in sizes.items() if 0 < size < MIN_SAMPLE[statistic])
        few |= {f"{name}_{statistic}": MIN_SAMPLE[statistic] for name in short}
    return found, few


def _slices(traces: Sequence[Trace]) -> dict[str, Slice]:
    """Return what differs between categories of prompts; nothing where there is only one."""
    names = sorted({trace.slice for trace in traces if trace.slice})
    parts = {name: [trace for trace in traces if trace.slice == name] for name in names}
    slices = {}
    for name, part in parts.items() if len(names) > 1 else ():
        good = [trace for trace in part if trace.error is None]
        found, _ = _latencies(good)
        found["accept_length"] = accept_length(good)
        found["error_rate"] = Estimate(1 - len(good) / len(part))
        kept = {metric: found[metric] for metric in SLICED}
        slices[name] = Slice(
            n=len(good),
            metrics={metric: estimate.value for metric, estimate in kept.items()},
            intervals={metric: e.interval for metric, e in kept.items() if e.interval is not None},
        )
    return slices


def repeated(levels: Sequence[Level], pooled: Level) -> Level:
    """Return the level of all repeats' requests, its intervals no narrower than those between the repeats.

    Requests of one window share what the machine did meanwhile; windows do not.
    """
    if len(levels) < 3:
        return pooled
    intervals = dict(pooled.intervals)
    for name, value in pooled.metrics.items():
        values = [v for level in levels if (v := level.metrics.get(name)) is not None]
        between = mean(values).interval if len(values) == len(levels) else None
        if value is None or between is None:
            continue
        low, high = intervals.get(name, (value, value))
        intervals[name] = (min(low, between[0], value), max(high, between[1], value))
    return pooled.model_copy(update={"intervals": intervals})


def client_error(
    traces: Iterable[Trace], lags: Sequence[float], *, share: float = 0.01, busy: float = 0.0, processes: int = 1
) -> ClientError:
    """Return the load generator's own error.

    Args:
        lags: how late it read what had arrived, in seconds, by regular ticks.
        share: of the mean end-to-end latency; a p99 lag beyond it means that the client measures itself.
        busy: CPU share of its busiest process.
    """
    traces = list(traces)
    reading, sending = sorted(lags), sorted(trace.lag for trace in traces)
    worst = max((percentile(each, 0.99) for each in (reading, sending) if each), default=0.0)
    latencies = [e2e_ms(trace) for trace in traces if trace.error is None]
    limit = share * math.fsum(latencies) / len(latencies) if latencies else None
    return ClientError(
        lag_ms_mean=1e3 * math.fsum(reading) / len(reading) if reading else 0.0,
        lag_ms_p99=1e3 * worst,
        limit_ms=limit,
        busy=busy,
        processes=processes,
        bound=limit is not None and 1e3 * worst > limit,
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


def _inverse(tpot: Estimate) -> Estimate:
    """Return tokens per second of milliseconds per token."""
    if not tpot.value:
        return UNKNOWN
    interval = tpot.interval
    turned = (1e3 / interval[1], 1e3 / interval[0]) if interval is not None and interval[0] > 0 else None
    return Estimate(1e3 / tpot.value, turned)


def _pooled(groups: Sequence[Sequence[float]], statistic: str) -> Estimate:
    """Return a statistic of all gaps; they are alike within a request, so the interval is over requests."""
    pooled = sorted(value for group in groups for value in group)
    if len(pooled) < MIN_SAMPLE[statistic]:
        return UNKNOWN
    filled = [group for group in groups if group]
    enough = len(filled) >= MIN_GAP_REQUESTS
    if statistic == "mean":
        estimate = ratio([math.fsum(group) for group in filled], [float(len(group)) for group in filled])
        return Estimate(estimate.value, estimate.interval if enough else None)
    q = PERCENTILES[statistic]
    return Estimate(percentile(pooled, q), pooled_interval(filled, pooled, q) if enough else None)


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
