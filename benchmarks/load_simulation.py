"""Simulated levels whose truth is known: how often do the reported intervals hold it?

A run is what a client would have recorded: requests with a lognormal time to first token, a gamma time per round that
is each request's own, chunks of one to six tokens, a few failures. The truths are in closed form where
there is one, else computed from many more requests than any run has.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from tuner.load.gate import Gate, Rule, Window
from tuner.load.streams import Arrival
from tuner.load.traces import Trace
from tuner.measure import PERCENTILES, measure
from tuner.records import Level

SLO = {"ttft_ms_p90": 45.0, "tpot_ms_p50": 4.2}
TRUTH_REQUESTS = 100_000  # their own error is a fortieth of a run's


@dataclass(frozen=True)
class World:
    """What a request is drawn from."""

    name: str
    users: int
    requests: int  # of a run
    ttft_sigma: float = 0.4
    pace_shape: float = 20.0
    tokens: tuple[int, int] = (24, 72)
    failures: float = 0.02
    rule: Rule | None = None  # closes a run's window in place of `requests`

    def request(self, rng: random.Random, due: float) -> Trace:
        """Draw one."""
        if rng.random() < self.failures:
            return Trace(due, due + rng.uniform(0.01, 0.2), error="reset")
        time = due + 0.030 * rng.lognormvariate(0, self.ttft_sigma)
        pace = 0.012 * rng.gammavariate(self.pace_shape, 1 / self.pace_shape)  # seconds a round
        total = rng.randint(*self.tokens)
        arrivals, left, rounds = [Arrival(time, 1)], total - 1, 0
        while left > 0:
            time += pace * rng.uniform(0.8, 1.2)
            got = min(left, 1 + sum(1 for _ in range(5) if rng.random() < 0.6))
            arrivals.append(Arrival(time, got))
            left -= got
            rounds += 1
        return Trace(due, time, tuple(arrivals), total, (total - 1) / rounds, rounds)

    def run(self, rng: random.Random, requests: int | None = None) -> list[Trace]:
        """Draw one run of a closed loop: each slot sends when it is free."""
        if self.rule is not None and requests is None:
            return self.ruled(rng, self.rule)
        free = [0.0] * self.users
        traces = []
        for number in range(requests or self.requests):
            slot = number % self.users
            traces.append(self.request(rng, free[slot]))
            free[slot] = traces[-1].ended
        return traces

    def ruled(self, rng: random.Random, rule: Rule) -> list[Trace]:
        """Draw one run whose window closes by the rule that real levels close by."""
        gate = Gate()
        window = Window(rule, [gate])
        gate.steering = window
        window.warm(0.0)
        flying: list[tuple[float, int, Trace, bool]] = []
        found: list[Trace] = []

        def send(slot: int, due: float) -> None:
            _, counts = gate.claim(due)
            trace = self.request(rng, due)
            heapq.heappush(flying, (trace.ended, slot, trace, counts))

        for slot in range(self.users):
            send(slot, rng.uniform(0, 0.3))
        while not gate.over.is_set():
            now, slot, trace, counts = heapq.heappop(flying)
            if counts:
                found.append(trace)
            gate.finish(trace.due, now, counts)
            send(slot, now)
        return [trace for trace in found if trace.due >= window.opened]


WORLDS = (
    World("c=1, 40 requests", 1, 40),
    World("c=8, 120 requests", 8, 120),
    World("c=8, 120 requests, heavy tail", 8, 120, ttft_sigma=0.8, pace_shape=6.0),
    World("c=32, 400 requests", 32, 400),
    World("c=4, by the width rule", 4, 0, rule=Rule(window=2.0, longest=8.0, width=0.1, enough=8, flying=3)),
)
MEANS = ("ttft_ms_mean", "tpot_ms_mean", "e2e_ms_mean", "normalized_ms_mean", "chunk_gap_ms_mean")
RATIOS = ("output_tok_s", "request_rps", "goodput_rps", "accept_length")
ORDERED = tuple(f"{name}_{q}" for name in ("ttft_ms", "tpot_ms", "e2e_ms", "normalized_ms") for q in PERCENTILES)
POOLED = tuple(f"chunk_gap_ms_{q}" for q in PERCENTILES)


def truths(world: World, seed: int, requests: int = TRUTH_REQUESTS) -> Level:
    """Return the true metrics: of the time to first token in closed form, else those of a very long run."""
    level = measure(world.run(random.Random(seed), requests), concurrency=world.users, slo=SLO)
    normal = NormalDist(math.log(30.0), world.ttft_sigma)
    known: dict[str, float | None] = {f"ttft_ms_{name}": math.exp(normal.inv_cdf(q)) for name, q in PERCENTILES.items()}
    known["ttft_ms_mean"] = math.exp(normal.mean + normal.variance / 2)
    return level.model_copy(update={"metrics": level.metrics | known})


def coverage(
    world: World, truth: Level, runs: int, seed: int, tell: Callable[[int], None] = lambda _: None
) -> dict[str, tuple[int, int]]:
    """Return {metric: (intervals that hold the truth, intervals)} over `runs` simulated runs."""
    rng = random.Random(seed)
    held: Counter[str] = Counter()
    made: Counter[str] = Counter()
    for number in range(runs):
        level = measure(world.run(rng), concurrency=world.users, slo=SLO)
        for name, (low, high) in level.intervals.items():
            value = truth.metrics[name]
            if value is not None:
                made[name] += 1
                held[name] += low <= value <= high
        tell(number)
    return {name: (held[name], made[name]) for name in sorted(made)}


def shares(names: Sequence[str], counts: dict[str, tuple[int, int]]) -> dict[str, float]:
    """Return the coverage of those metrics that had an interval in most runs."""
    most = max(made for _, made in counts.values())
    return {name: counts[name][0] / counts[name][1] for name in names if counts.get(name, (0, 0))[1] > most / 2}


def standard_error(runs: int) -> float:
    """Return by how much a coverage of 95 % strays by chance in so many runs."""
    return math.sqrt(0.95 * 0.05 / runs)
