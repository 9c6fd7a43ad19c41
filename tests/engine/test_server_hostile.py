"""Clients that are slow, gone, greedy or malicious: none of them costs the others anything."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine.fuzz_http import attacks, run
from tests.engine.serving import DEADLINE, Served, fake, raw_request, talk, text_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_folder(tmp_path_factory.mktemp("model"))


LONG = ("--rows", "200", "--max-len", "10000000")
MANY = 1_200_000  # tokens, some 12 MB: more than the kernel buffers


@pytest.fixture(scope="module", params=["httptools", "h11"])
def served(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    """A server of long answers, with either HTTP parser."""
    plain = request.param == "h11"
    with fake(folder, *LONG, limits={"keep_alive_seconds": 1}, plain=plain) as server:
        yield server


def completion(**body: Any) -> bytes:
    return raw_request(json.dumps({"model": "tiny", "prompt": "hello", **body}), connection="close")


def status(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


def error(answer: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert found["code"] == status(answer)
    return found


@pytest.mark.parametrize("seed", [1])
def test_malformed_requests(served: Served, seed: int) -> None:
    """No crash, no 5xx without a cause, every error in OpenAI's shape, no memory kept."""
    front = psutil.Process(served.process.pid)
    asyncio.run(run(served.port, attacks(50, "tiny", seed + 100)))
    before = front.memory_info().rss
    report = asyncio.run(run(served.port, attacks(200, "tiny", seed)))
    assert report.violations == []
    assert report.statuses["200"] > 0
    assert front.memory_info().rss < before + 64 * 2**20
    assert not any(event["event"] == "error" for event in served.events)
    asyncio.run(until(served, running(0)))
    assert b'"hellohello"' in asyncio.run(talk(served.port, completion(max_tokens=2)))


# Readers that stop, and readers that leave


async def stalled(port: int, tokens: int = MANY) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a stream of many megabytes and read only its beginning."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    writer.write(completion(stream=True, max_tokens=tokens, return_token_ids=True))
    assert (await reader.read(10)).startswith(b"HTTP/1.1 2")
    return reader, writer


def test_a_reader_that_stops_blocks_nobody(served: Served) -> None:
    async def scene(port: int) -> None:
        _, writer = await stalled(port)
        for streamed in (False, True):
            body = completion(max_tokens=2000, stream=streamed)
            answers = await asyncio.gather(*(talk(port, body) for _ in range(8)))
            assert all(status(answer) == 200 for answer in answers)
        writer.close()

    asyncio.run(scene(served.port))


def test_a_slow_reader_gets_everything(served: Served) -> None:
    """Rounds that pile up are joined; not a token is lost."""

    async def scene(port: int) -> bytes:
        reader, writer = await stalled(port)
        await talk(port, completion(max_tokens=2000))
        received = await reader.read(-1)
        writer.close()
        return received

    received = asyncio.run(scene(served.port))
    chunks = [line for line in received.split(b"\n") if line.startswith(b"data: {")]
    documents = [json.loads(chunk.removeprefix(b"data: ")) for chunk in chunks]
    assert b"data: [DONE]" in received
    assert sum(len(each["choices"][0]["token_ids"]) for each in documents) == MANY
    assert len(documents) < MANY // 200, "nothing piled up: this test has tested nothing"


def test_a_reader_that_stalls_for_long_is_dropped(folder: Path) -> None:
    async def scene(served: Served) -> None:
        _, writer = await stalled(served.port, tokens=8_000_000)
        await until(served, lambda metrics: 'finish_reason="aborted"' in metrics)
        writer.close()

    # 4,000 rounds of 10 ms: the answer can't end, however slow the front is, before its reader has been dropped.
    endless = ("--rows", "2000", "--max-len", "10000000", "--delay", "0.01")
    with fake(folder, *endless, limits={"stall_seconds": 0.3}) as served:
        asyncio.run(scene(served))


async def until(served: Served, condition: Callable[[str], bool]) -> None:
    """Poll /metrics until the condition holds."""
    async with asyncio.timeout(DEADLINE):
        while not condition((await talk(served.port, raw_request("", "/metrics", "GET", connection="close"))).decode()):
            await asyncio.sleep(0.02)


def running(count: int) -> Callable[[str], bool]:
    return lambda metrics: f'num_running_reqs{{model_name="tiny"}} {count}.0' in metrics


@pytest.fixture(scope="module", params=["httptools", "h11"])
def narrow(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    """A server with a single slot."""
    slow = ("--max-len", "2000000", "--max-running", "1", "--delay", "0.02")
    with fake(folder, *slow, plain=request.param == "h11") as server:
        yield server


@pytest.mark.parametrize("streamed", [True, False])
def test_leaving_frees_the_slot(narrow: Served, streamed: bool) -> None:
    """In the middle of a stream, or while waiting for the whole answer."""

    async def scene(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(completion(stream=streamed, max_tokens=1_000_000))
        await until(narrow, running(1))
        if streamed:
            await reader.read(10)
        writer.transport.abort()
        # The only slot is free again: another request gets an answer, long before the first one's end.
        assert status(await talk(port, completion(max_tokens=3))) == 200
        await until(narrow, running(0))

    asyncio.run(scene(narrow.port))


# Senders


@pytest.fixture(scope="module")
def strict(folder: Path) -> Iterator[Served]:
    """A server with little patience."""
    limits = {
        "body_seconds": 0.3,
        "header_seconds": 0.3,
        "keep_alive_seconds": 1,
        "discard_seconds": 0.3,
        "connections": 8,
        "held_bytes": 100_000,
    }
    with fake(folder, limits=limits) as served:
        yield served


def test_slow_bodies(strict: Served) -> None:
    answer = asyncio.run(talk(strict.port, completion()[:-5]))
    assert (status(answer), error(answer)["type"]) == (408, "timeout")


def test_slow_headers(strict: Served) -> None:
    answer = asyncio.run(talk(strict.port, completion()[:30]))
    assert (status(answer), error(answer)["type"]) == (408, "timeout")


def test_drops_do_not_extend_the_time(strict: Served) -> None:
    async def drip(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nx: ")
        answer = asyncio.create_task(reader.read())
        began = time.monotonic()
        while not answer.done() and time.monotonic() - began < DEADLINE:
            writer.write(b"a")
            await asyncio.wait({answer}, timeout=0.05)
        writer.close()
        return await answer

    assert status(asyncio.run(drip(strict.port))) == 408


def test_silent_connections_are_closed(strict: Served) -> None:
    assert asyncio.run(talk(strict.port, b"")) == b""


def test_idle_connections_are_closed(strict: Served) -> None:
    answer = asyncio.run(talk(strict.port, raw_request("", "/health", "GET")))
    assert status(answer) == 200


def test_large_headers(served: Served) -> None:
    answer = asyncio.run(talk(served.port, b"GET /health HTTP/1.1\r\nx: " + b"a" * 2**20))
    assert status(answer) in (400, 431)
    assert error(answer)["message"]


@pytest.mark.parametrize("announced", [True, False])
def test_large_bodies(strict: Served, announced: bool) -> None:
    """The client sees the answer although it is still sending."""
    data = b'{"model": "' + b"a" * (9 * 2**20)
    if not announced:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        data = head + b"transfer-encoding: chunked\r\n\r\n" + b"%x\r\n" % len(data) + data + b"\r\n0\r\n\r\n"
    answer = asyncio.run(talk(strict.port, raw_request(data) if announced else data))
    assert status(answer) in ((413,) if announced else (413, 503))  # 503: more than all bodies may hold
    assert error(answer)["message"]


def test_many_large_bodies_at_once(strict: Served) -> None:
    async def scene(port: int) -> list[bytes]:
        big = raw_request(b'{"model": "' + b"a" * 60_000, content_length="70000", connection="close")
        return await asyncio.gather(*(talk(port, big) for _ in range(3)))

    statuses = sorted(status(answer) for answer in asyncio.run(scene(strict.port)))
    assert statuses[0] == 408  # one has its place, and its time runs out
    assert statuses[-1] == 503


def test_many_idle_connections_do_not_lock_anyone_out(strict: Served) -> None:
    async def scene(port: int) -> None:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        answer = await talk(port, raw_request("", "/health", "GET", connection="close"))
        assert status(answer) == 200
        for _, writer in idle:
            writer.close()

    asyncio.run(scene(strict.port))


def test_too_many_open_requests(folder: Path) -> None:
    async def scene(served: Served) -> None:
        first = asyncio.create_task(talk(served.port, completion(max_tokens=30)))
        await until(served, running(1))
        refused = await talk(served.port, completion(max_tokens=1))
        assert (status(refused), error(refused)["type"]) == (429, "overloaded")
        assert status(await first) == 200
        assert status(await talk(served.port, completion(max_tokens=1))) == 200

    with fake(folder, "--delay", "0.02", limits={"requests": 1}) as served:
        asyncio.run(scene(served))


def test_pipelined_requests_are_not_mixed_up(served: Served) -> None:
    """Each answer is whole; what is not answered is cut off cleanly."""
    data = raw_request(json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 3}))
    answer = asyncio.run(talk(served.port, data * 5))
    heads = answer.count(b"HTTP/1.1 200 OK")
    assert heads >= 1
    assert answer.count(b'"text":"hellohellohello"') == heads
    assert answer.count(b"HTTP/1.1 ") == heads
