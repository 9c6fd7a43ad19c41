"""`python -m benchmarks.start`: seconds from start to ready, and resident memory after serving a full batch."""

from __future__ import annotations

import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from benchmarks.common import RESULTS, bundled_prompts, write
from benchmarks.server import serving
from engine.config import BUNDLED

CONFIG = {"model": {"target": BUNDLED}, "draft": {"kind": "dflash", "block_size": 16}}


def measure(starts: int) -> dict[str, Any]:
    """Start the bundled pair with DFlash `starts` times; the last server also serves 16 long requests at once."""
    seconds, rss = [], 0
    for number in range(starts):
        with serving(CONFIG) as server:
            seconds.append(server.seconds_to_ready)
            if number == starts - 1:
                _serve_all(server.port)
                rss = server.rss_bytes()
    return {
        "seconds_to_ready": [round(s, 2) for s in seconds],
        "seconds_to_ready_median": statistics.median(seconds),
        "rss_bytes": rss,
        "rss_after": "16 concurrent requests of 96 + 400 tokens",
    }


def _serve_all(port: int) -> None:
    def one(prompt: tuple[int, ...]) -> None:
        body = {"model": BUNDLED, "prompt": list(prompt), "max_tokens": 400, "ignore_eos": True}
        httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120).raise_for_status()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, bundled_prompts()[:16]))


def main() -> None:
    """Measure and write."""
    figures = measure(starts=5)
    print(json.dumps(figures, indent=1))
    write(RESULTS / "start.json", figures)


if __name__ == "__main__":
    main()
