"""Servers that answer wrongly: every failure is counted by its kind, is in no latency, and ends no run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.tuner.running import prompts
from tuner.load.arrivals import Target
from tuner.load.client import Endpoint
from tuner.load.level import Plan, Run, level_of, run_level
from tuner.load.workload import make_requests
from tuner.records import Workload

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str, total: int | None, finish: str | None = None) -> bytes:
    document: dict[str, object] = {"choices": [{"text": text, "finish_reason": finish}]}
    if total is not None:
        document["usage"] = {"completion_tokens": total}
    return chunk(b"data: " + json.dumps(document).encode() + b"\n\n")


END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
GOOD = HEAD + event("a", 2) + event("b", 4, "stop") + END


def plain(status: bytes, body: bytes = b"", headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, headers, len(body), body)


def says(data: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return answer


async def resets(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + event("a", 2))
    await writer.drain()
    writer.transport.abort()


async def goes_silent(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + event("a", 2))
    await asyncio.sleep(60)


async def never_begins(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    await asyncio.sleep(60)


async def never_ends(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    for number in range(10**6):
        writer.write(event("a", number + 1))
        await writer.drain()
        await asyncio.sleep(0.01)


BAD: dict[str, tuple[Answer, str]] = {
    "reset in mid-stream": (resets, "reset"),
    "malformed SSE": (says(HEAD + chunk(b"data: {oops\n\n") + END), "malformed"),
    "malformed HTTP": (says(b"what?\r\n\r\n"), "malformed"),
    "cut off": (says(HEAD + event("a", 2) + b"0\r\n\r\n"), "incomplete"),
    "no usage": (says(HEAD + event("a", None) + event("b", None, "stop") + END), "no_usage"),
    "usage too high": (says(HEAD + event("a", 2) + event("b", 99, "stop") + END), "wrong_usage"),
    "usage that shrinks": (says(HEAD + event("a", 3) + event("b", 2, "stop") + END), "wrong_usage"),
    "an HTML page": (says(plain(b"200 OK", b"<html>hello", b"content-type: text/html\r\n")), "not_a_stream"),
    "an HTML error": (says(plain(b"502 Bad Gateway", b"<html>oh")), "status"),
    "a redirect": (says(plain(b"307 Temporary Redirect", headers=b"location: /elsewhere\r\n")), "redirect"),
    "429": (says(plain(b"429 Too Many Requests", headers=b"retry-after: 0\r\n")), "throttled"),
    "503": (says(plain(b"503 Service Unavailable", headers=b"retry-after: 1\r\n")), "throttled"),
    "an error event": (says(HEAD + chunk(b'data: {"error": {"message": "oom"}}\n\n') + END), "status"),
    "silence in mid-stream": (goes_silent, "stalled"),
    "the first token never comes": (never_begins, "no_first_token"),
    "never ends": (never_ends, "endless"),
}


async def run_against(folder: Path, bad: Answer, every: int, requests: int = 6) -> Run:
    """Measure `requests` of which every `every`-th is answered badly."""
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
                asked += 1
                await (bad if asked % every == 0 else says(GOOD))(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    workload = Workload.model_validate({"prompts": str(prompts(folder)), "output_tokens": 16})
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        endpoint = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
        # Generous for a good answer on a busy machine, short enough for the two that wait it out.
        target = Target(endpoint, make_requests(workload, "m", 0), stall=2.0, total=4.0)
        return await run_level(target, Plan(1, workload, requests=requests))


@pytest.mark.parametrize("name", BAD)
def test_a_bad_answer_is_counted_by_kind(tmp_path: Path, name: str) -> None:
    bad, kind = BAD[name]
    run = asyncio.run(run_against(tmp_path, bad, every=6))
    level = level_of([run])
    assert level.errors == {kind: 1}, [trace.detail for trace in run.traces]
    assert (level.n, len(run.traces)) == (5, 6)
    assert level.metrics["error_rate"] == pytest.approx(1 / 6)
    assert level.output_tokens == 20
    assert level.metrics["e2e_ms_mean"] is not None
    assert level.metrics["e2e_ms_mean"] < 2000  # the bad one, which may take four seconds, is in no latency
    for trace in run.traces:
        assert trace.ended >= trace.due
        assert all(arrival.time >= trace.due for arrival in trace.arrivals)


def test_when_all_fail_nothing_is_measured(tmp_path: Path) -> None:
    run = asyncio.run(run_against(tmp_path, BAD["429"][0], every=1, requests=3))
    level = level_of([run])
    assert level.n == 0
    assert level.errors == {"throttled": 3}
    assert level.metrics["output_tok_s"] == 0.0
    assert level.metrics["ttft_ms_p50"] is None
