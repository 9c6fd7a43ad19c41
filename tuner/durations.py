"""Wall time as people write it: `150s`, `10m`, `2h`, or a bare number of seconds."""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
LONGEST = 366 * 86400.0


def parse_duration(value: object) -> float:
    """Return seconds.

    Raises:
        ValueError: neither a number nor a duration, or not within 0 … 366 days.
    """
    if isinstance(value, bool):
        raise ValueError("YAML read this as a boolean; a duration such as 150s, 10m or 2h is meant here")
    if isinstance(value, int | float):
        seconds = float(value) if abs(value) < 1e18 else math.inf
    elif isinstance(value, str) and (parts := _PART.findall(value)) and not _PART.sub("", value).strip():
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    else:
        raise ValueError(f"expected a duration such as 150s, 10m or 2h, got {value!r:.60}")
    if not 0 <= seconds <= LONGEST:
        raise ValueError(f"a duration lies between 0 and 366 days, got {value!r:.60}")
    return seconds


Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "examples": ["150s", "10m", "2h"]}]}
    ),
]


def format_duration(seconds: float) -> str:
    """Return a short text: 0.8s, 12s, 3m 20s, 2h 05m."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
