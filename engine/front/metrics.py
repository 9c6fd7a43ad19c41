"""Prometheus metrics of the front, beside what the engine process counts."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.protocol import Acceptance

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
THROUGHPUT_WINDOW = 10.0  # seconds
TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
TOKEN_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)
E2E_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


class Histogram:
    """Cumulative buckets of seconds. `prometheus_client`'s own takes a lock per observation; here one thread writes."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count `times` observations of `seconds`."""
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._sum += seconds * times

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return ([(upper bound, cumulative count)], sum of seconds)."""
        total = 0
        cumulative: list[tuple[str, float]] = []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            cumulative.append((bound, total))
        return cumulative, self._sum


class Meters:
    """What the front counts."""

    def __init__(self) -> None:
        self.ttft = Histogram(TTFT_BUCKETS)
        self.between = Histogram(TOKEN_BUCKETS)
        self.e2e = Histogram(E2E_BUCKETS)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: dict[str, int] = {}  # by finish reason
        self._recent: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def prompt(self, tokens: int) -> None:
        """Count an admitted prompt."""
        self.prompt_tokens += tokens

    def tokens(self, count: int, since_arrival: float, since_last: float | None) -> None:
        """Count a round's tokens of one request; `since_last` is None for its first."""
        self.generation_tokens += count
        if since_last is None:
            self.ttft.observe(since_arrival)
        else:
            self.between.observe(since_last / count, count)

    def finish(self, reason: str, seconds: float) -> None:
        """Count a request's end, `seconds` after it came."""
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.e2e.observe(seconds)

    def sample(self, now: float) -> None:
        """Remember the token count; called about once a second."""
        self._recent.append((now, self.generation_tokens))
        while len(self._recent) > 1 and now - self._recent[0][0] > THROUGHPUT_WINDOW:
            self._recent.popleft()

    def throughput(self) -> float:
        """Return generated tokens per second over the last `THROUGHPUT_WINDOW`."""
        then, count = self._recent[0]
        seconds = time.monotonic() - then
        return (self.generation_tokens - count) / seconds if seconds > 0 else 0.0


class _Families(Collector):
    """One scrape's metrics."""

    def __init__(
        self,
        meters: Meters,
        model: str,
        stats: Mapping[str, Any],
        stats_age: float | None,
        kv_tokens: int | None,
    ) -> None:
        self._kv_tokens = kv_tokens
        self._meters = meters
        self._labels = [model]
        self._stats = stats
        self._stats_age = stats_age

    def collect(self) -> Iterator[Metric]:
        """Yield every family (prometheus_client)."""
        yield from self._front()
        if self._stats:
            yield from self._engine()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"engine:{name}", text, labels=["model_name"])
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"engine:{name}", text, labels=["model_name"])
        family.add_metric(self._labels, value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"engine:{name}", text, labels=["model_name"])
        buckets, total = histogram.buckets()
        family.add_metric(self._labels, buckets, total)
        return family

    def _front(self) -> Iterator[Metric]:
        meters = self._meters
        yield self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", meters.ttft
        )
        yield self._histogram(
            "inter_token_latency_seconds", "Between tokens; a round's gap over its tokens.", meters.between
        )
        yield self._histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", meters.e2e)
        yield self._counter("prompt_tokens", "Prompt tokens admitted.", meters.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", meters.generation_tokens)
        yield self._gauge("gen_throughput", "Tokens per second over the last ten seconds.", meters.throughput())
        requests = CounterMetricFamily("engine:num_requests", "Requests ended.", labels=["model_name", "finish_reason"])
        for reason, count in meters.finished.items():
            requests.add_metric([*self._labels, reason], count)
        yield requests

    def _engine(self) -> Iterator[Metric]:
        stats = self._stats
        acceptance = Acceptance.model_validate(stats.get("acceptance", {}))
        yield self._gauge("num_running_reqs", "Requests being decoded.", stats.get("running", 0))
        yield self._gauge("num_queue_reqs", "Requests that wait for a slot.", stats.get("waiting", 0))
        if self._kv_tokens and "tokens_used" in stats:
            share = stats["tokens_used"] / self._kv_tokens
            yield self._gauge("token_usage", "Share of the KV cache's tokens in use.", share)
        yield self._counter("spec_verify_calls", "Verify rounds, summed over requests.", acceptance.verify_count)
        if acceptance.accept_length is not None:
            yield self._gauge("spec_accept_length", "Tokens a verify round yields.", acceptance.accept_length)
        if acceptance.accept_rate is not None:
            yield self._gauge("spec_accept_rate", "Accepted share of drafted tokens.", acceptance.accept_rate)
        by_position = GaugeMetricFamily(
            "engine:spec_accept_rate_by_position",
            "Share of rounds whose draft at this position was accepted.",
            labels=["model_name", "position"],
        )
        for position, share in enumerate(acceptance.by_position, 1):
            by_position.add_metric([*self._labels, str(position)], share)
        yield by_position
        if self._stats_age is not None:
            yield self._gauge("stats_age_seconds", "Age of what the engine process counts.", self._stats_age)


def exposition(
    meters: Meters, model: str, stats: Mapping[str, Any], stats_age: float | None, kv_tokens: int | None
) -> bytes:
    """Return Prometheus' text format.

    Args:
        stats: the engine's latest `Info.stats`, empty when it has never answered.
        stats_age: seconds since they were made.
        kv_tokens: size of the KV cache.
    """
    registry = CollectorRegistry()
    registry.register(_Families(meters, model, stats, stats_age, kv_tokens))
    return generate_latest(registry)
