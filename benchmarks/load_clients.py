"""One load client in a process of its own: `python benchmarks/load_clients.py CLIENT URL STREAMS ROUNDS TOKENS SEED`.

Every stream sends one uncounted request and then `ROUNDS`, one after another. Prints one JSON document: CPU seconds
of the counted part, reading of answers included, and per request its number (the `seed` it carried), seconds of the
monotonic clock when it was due, when its first token and its last came and when it was over, and its tokens.

httpx and aiohttp are used as their documentation shows: an asynchronous iteration over lines, a stamp and
`json.loads` for each. Standard library only, but for the client itself.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

now = time.perf_counter
Lines = Callable[[str, dict[str, Any]], AsyncIterator[Any]]


def body(number: int, tokens: int) -> dict[str, Any]:
    """Return the request numbered so."""
    return {
        "model": "exact",
        "prompt": "def main():",
        "max_tokens": tokens,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


async def one(lines: Lines, url: str, number: int, tokens: int, due: float) -> dict[str, Any]:
    """Send a request and stamp what comes."""
    found: dict[str, Any] = {"number": number, "due": due, "first": None, "tokens": 0, "first_tokens": 0}
    async for line in lines(url + "/v1/completions", body(number, tokens)):
        if not line.startswith("data: {"):
            continue
        stamp = now()
        event = json.loads(line[6:])
        if event["choices"]:
            found["last"] = stamp
            if found["first"] is None:
                found["first"], found["first_tokens"] = stamp, event["usage"]["completion_tokens"]
        found["tokens"] = event["usage"]["completion_tokens"]
    found["ended"] = now()
    return found


async def streams(lines: Lines, url: str, count: int, rounds: int, tokens: int, seed: int) -> dict[str, Any]:
    """Run all streams."""
    found: list[dict[str, Any]] = []
    await asyncio.gather(*(one(lines, url, seed + 10**6 + slot, tokens // 4, now()) for slot in range(count)))
    spent = time.process_time()

    async def slot(number: int) -> None:
        due = now()
        for turn in range(rounds):
            found.append(await one(lines, url, seed + turn * count + number, tokens, due))
            due = found[-1]["ended"]

    await asyncio.gather(*(slot(number) for number in range(count)))
    return {"cpu_s": time.process_time() - spent, "requests": found}


async def with_httpx(*arguments: Any) -> dict[str, Any]:
    """httpx."""
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as client:

        async def lines(url: str, document: dict[str, Any]) -> AsyncIterator[str]:
            async with client.stream("POST", url, json=document) as response:
                async for line in response.aiter_lines():
                    yield line

        return await streams(lines, *arguments)


async def with_aiohttp(*arguments: Any) -> dict[str, Any]:
    """aiohttp."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def lines(url: str, document: dict[str, Any]) -> AsyncIterator[str]:
            async with session.post(url, json=document) as response:
                async for line in response.content:
                    yield line.decode()

        return await streams(lines, *arguments)


async def with_ours(url: str, count: int, rounds: int, tokens: int, seed: int) -> dict[str, Any]:
    """`tuner.load`, in one process."""
    from tuner.load.arrivals import Target
    from tuner.load.client import parse_endpoint
    from tuner.load.level import Plan, run_level
    from tuner.load.workload import make_requests
    from tuner.records import Workload

    workload = Workload(output_tokens=tokens)
    target = Target(parse_endpoint(url), make_requests(workload, "exact", seed))
    spent = time.process_time()
    run = await run_level(target, Plan(count, workload, requests=count * rounds), processes=1)
    cpu = time.process_time() - spent  # with that of the warm-up, whose tokens count too
    found = [
        {
            "number": seed + trace.index,
            "due": trace.due,
            "first": trace.arrivals[0].time,
            "last": trace.arrivals[-1].time,
            "ended": trace.ended,
            "tokens": trace.output_tokens,
            "first_tokens": trace.arrivals[0].tokens,
        }
        for trace in run.traces
        if trace.error is None
    ]
    ordered = sorted(run.lags)
    lag = {"mean": sum(ordered) / len(ordered), "p99": ordered[int(0.99 * (len(ordered) - 1))]}
    return {"cpu_s": cpu, "requests": found, "own_lag_s": lag}


CLIENTS = {"httpx": with_httpx, "aiohttp": with_aiohttp, "aiohttp+uvloop": with_aiohttp, "ours": with_ours}


def main() -> None:
    """Run the client that the command line names."""
    name, url, *numbers = sys.argv[1:]
    work = CLIENTS[name](url, *map(int, numbers))
    if name in ("ours", "aiohttp+uvloop"):
        import uvloop

        result = uvloop.run(work)
    else:
        result = asyncio.run(work)
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
