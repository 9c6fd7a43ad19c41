"""Latency limits as people write them: `ttft_ms_p90<500, tpot_ms_p50<20`. Parsed, never evaluated."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tuner.records import metric_of

_LIMIT = re.compile(r"\s*([A-Za-z0-9_]+)\s*(<=|>=|<|>)\s*([^\s<>=,]+)\s*")
MAX_LENGTH = 1000


@dataclass(frozen=True)
class Limit:
    """One condition on one metric."""

    metric: str
    operator: str  # < <= > >=
    value: float

    def holds(self, measured: float) -> bool:
        """Whether a measured value meets the limit."""
        match self.operator:
            case "<":
                return measured < self.value
            case "<=":
                return measured <= self.value
            case ">":
                return measured > self.value
            case _:
                return measured >= self.value

    def __str__(self) -> str:
        return f"{self.metric}{self.operator}{self.value:g}"


@dataclass(frozen=True)
class Slo:
    """Conditions that all must hold; none holds always."""

    limits: tuple[Limit, ...] = ()

    def misses(self, metrics: Mapping[str, float | None]) -> tuple[str, ...]:
        """Return what is not met, in words; a metric that was not measured is not met."""
        missed = []
        for limit in self.limits:
            value = metrics.get(limit.metric)
            if value is None:
                missed.append(f"{limit.metric} was not measured")
            elif not limit.holds(value):
                missed.append(f"{limit.metric} is {value:.4g}, not {limit.operator} {limit.value:g}")
        return tuple(missed)

    def uppers(self) -> dict[str, float]:
        """Return the upper limits, by metric."""
        return {limit.metric: limit.value for limit in self.limits if limit.operator.startswith("<")}

    def __str__(self) -> str:
        return ", ".join(str(limit) for limit in self.limits)


def parse_slo(text: str) -> Slo:
    """Parse comma-separated limits.

    Raises:
        ValueError: not of the form `metric<number`, or no such metric.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"longer than {MAX_LENGTH} characters")
    limits = []
    for part in text.split(","):
        if not part.strip():
            continue
        match = _LIMIT.fullmatch(part)
        if match is None:
            raise ValueError(f"{part.strip()[:60]!r} is no limit; write them as ttft_ms_p90<500, tpot_ms_p50<20")
        name, operator, number = match.groups()
        metric_of(name)
        limits.append(Limit(name, operator, _number(number)))
    return Slo(tuple(limits))


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]!r} is no number (units are part of the metric's name)")
    return value
