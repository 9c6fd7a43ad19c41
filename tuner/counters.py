"""What a server counted during one level: where its rounds' time went, and how far drafts got, by position.

Read from /server_info before and after; its counters only grow, so their difference is the level's, warm-up and
drain included. A server that does not count gives nothing, and nothing is made up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from engine.backends import Backend, RoundCounts
from tuner.load.client import Client, Endpoint
from tuner.records import Level

SECONDS = 5.0
PARTS = ("prefill", "propose", "forward", "accept", "commit")  # of a round, as engine.protocol.Rounds counts them


async def read_counters(endpoint: Endpoint, path: str) -> dict[str, Any]:
    """Return /server_info, or nothing where there is none."""
    async with Client(endpoint) as client:
        reply = await client.get(path, SECONDS)
    if reply.error is not None or reply.status != 200:
        return {}
    return json_object(reply.body) or {}


def json_object(body: bytes) -> dict[str, Any] | None:
    """Read a body that is one JSON object; None for any other."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


async def read_rounds(endpoint: Endpoint, backend: Backend) -> RoundCounts | None:
    """Return the verify rounds in /metrics of a server whose requests do not tell theirs; None where there are none."""
    async with Client(endpoint) as client:
        reply = await client.get(backend.probes.metrics, SECONDS)
    if reply.error is not None or reply.status != 200:
        return None
    return backend.round_counts(reply.body.decode("utf-8", "replace"))


def with_accept_length(level: Level, before: RoundCounts | None, after: RoundCounts | None) -> Level:
    """Return the level with the server's accept length where its requests told none."""
    if level.metrics.get("accept_length") is not None or before is None or after is None:
        return level
    return level.model_copy(update={"metrics": {**level.metrics, "accept_length": after.accept_length(before)}})


def between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return {rounds, requests, tokens, seconds: {part: s}, by_position: [share, …]} of what lies between.

    `by_position[i]` is the share of verify rounds whose draft i + 1 was accepted, over `verify_count` rounds. Keys
    that the server does not count are absent; None when it counts nothing.
    """
    found: dict[str, Any] = {}
    for name in ("rounds", "requests", "tokens"):
        if (spent := _spent(before, after, "rounds", name)) is not None:
            found[name] = int(spent)
    seconds = {part: _spent(before, after, "rounds", f"seconds_{part}") for part in PARTS}
    if any(seconds.values()):
        found["seconds"] = {part: round(spent, 6) for part, spent in seconds.items() if spent is not None}
    return found | _acceptance(before, after) or None


def _acceptance(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    verified = _spent(before, after, "acceptance", "verify_count")
    reached = _section(after, "acceptance").get("by_position")
    if not verified or not isinstance(reached, list) or not reached:
        return {}
    earlier = _section(before, "acceptance").get("by_position")
    earlier = earlier if isinstance(earlier, list) and len(earlier) == len(reached) else [0.0] * len(reached)
    first = _number(_section(before, "acceptance").get("verify_count")) or 0.0
    shares = []
    for one, other in zip(earlier, reached, strict=True):
        then, now = _number(one), _number(other)
        if then is None or now is None:
            return {}
        # A share times its rounds is a count; rounding errors must not leave 0 … 1.
        shares.append(round(min(1.0, max(0.0, (now * (first + verified) - then * first) / verified)), 5))
    return {"verify_count": int(verified), "by_position": shares}


def _spent(before: Mapping[str, Any], after: Mapping[str, Any], section: str, name: str) -> float | None:
    now = _number(_section(after, section).get(name))
    if now is None:
        return None
    return max(0.0, now - (_number(_section(before, section).get(name)) or 0.0))


def _section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = document.get(name)
    return section if isinstance(section, Mapping) else {}


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
