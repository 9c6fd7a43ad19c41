"""`python -m benchmarks.fuzz`: malformed HTTP requests against a real server of the bundled pair."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from benchmarks.common import RESULTS, write
from benchmarks.server import serving
from engine.config import BUNDLED
from tests.engine.fuzz_http import attacks, run

SEED = 20261129
GROWTH_BYTES = 40e6  # allowed between half-way and the end: by then every page of the KV cache has been used once


def malformed(requests: int) -> dict[str, Any]:
    """Send `requests` malformed requests; the server must answer each with cause, survive, and stay small."""
    with serving({"model": {"target": BUNDLED}, "draft": {"kind": "dflash", "block_size": 8}}) as server:
        made = list(attacks(requests, BUNDLED, SEED))
        head, tail = made[: requests // 2], made[requests // 2 :]
        first = asyncio.run(run(server.port, head))
        early = server.rss_bytes()
        rest = asyncio.run(run(server.port, tail))
        late = server.rss_bytes()
        assert server.process.poll() is None, "the server died"
        answer = httpx.post(
            f"http://127.0.0.1:{server.port}/v1/completions",
            json={"model": BUNDLED, "prompt": "def main():", "max_tokens": 8},
            timeout=60,
        )
    violations = first.violations + rest.violations
    assert not violations, f"{len(violations)} answers without a cause, first: {violations[0]}"
    assert answer.status_code == 200, f"afterwards a good request gets {answer.status_code}"
    assert late - early < GROWTH_BYTES, f"memory grew by {(late - early) / 1e6:.0f} MB"
    return {
        "sent": first.sent + rest.sent,
        "kinds": dict(first.kinds + rest.kinds),
        "statuses": dict(first.statuses + rest.statuses),
        "rss_bytes_half_way": early,
        "rss_bytes_at_end": late,
        "seed": SEED,
    }


def main() -> None:
    """Send 10,000 and write."""
    figures = malformed(10_000)
    print(json.dumps(figures, indent=1))
    write(RESULTS / "fuzz.json", figures)


if __name__ == "__main__":
    main()
