from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.load.client import Client, Endpoint, Framer, FramingError, Reply

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def chunked(parts: list[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    body = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts if part)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n" + trailer + b"\r\n"


def plain(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


BODIES = st.lists(
    st.one_of(st.binary(max_size=40), st.sampled_from([b"\r\n0\r\n\r\n", b"0\r\n\r\n", b"\r\n"])), max_size=6
)


@settings(max_examples=150, deadline=None)
@given(
    BODIES,
    st.lists(st.integers(0, 10_000), max_size=12),
    st.sampled_from(["chunked", "ext", "trailer", "plain", "close"]),
)
def test_any_split_of_an_answer_gives_its_body(parts: list[bytes], cuts: list[int], form: str) -> None:
    body = b"".join(parts)
    wire = {
        "chunked": chunked(parts),
        "ext": chunked(parts, extension=b";a=b"),
        "trailer": chunked(parts, trailer=b"x: y\r\n"),
        "plain": b"HTTP/1.1 100 Continue\r\n\r\n" + plain(body),
        "close": b"HTTP/1.1 200 OK\r\n\r\n" + body,
    }[form]
    framer = Framer()
    for number, piece in enumerate(split(wire, cuts)):
        framer.feed(piece, float(number))
    assert framer.close() if form == "close" else framer.complete
    assert framer.status == 200
    assert b"".join(data for _, data in framer.pieces) == body
    times = [time for time, _ in framer.pieces]
    assert times == sorted(times)


def test_bytes_are_stamped_when_they_come() -> None:
    framer = Framer()
    wire = chunked([b"one", b"two"])
    first = wire.index(b"two")
    framer.feed(wire[:first], 1.0)
    framer.feed(wire[first:], 2.0)
    assert framer.pieces == [(1.0, b"one"), (2.0, b"two")]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([b"", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"]))
def test_noise_is_a_framing_error_or_incomplete(noise: bytes, start: bytes) -> None:
    framer = Framer()
    try:
        framer.feed(start + noise, 0.0)
    except FramingError:
        return
    assert framer.complete or not framer.close() or framer.until_close


@pytest.mark.parametrize(
    "wire",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -4\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabcd\r\n",
        b"x" * 70_000,
    ],
)
def test_what_is_no_http_answer_is_refused(wire: bytes) -> None:
    with pytest.raises(FramingError):
        Framer().feed(wire, 0.0)


# --- over real sockets ---


async def talk(handler: Handler, *, requests: int = 1, stall: float = 5.0) -> tuple[list[Reply], int]:
    """Run a handler per connection, send requests one after another; return replies and connections made."""
    connections = 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            await handler(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(count, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with Client(Endpoint("127.0.0.1", port)) as client:
            replies = [await client.request("POST", "/x", b"{}", stall) for _ in range(requests)]
    return replies, connections


async def read_request(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(2)


def test_a_connection_is_kept() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            try:
                head = await read_request(reader)
            except asyncio.IncompleteReadError:
                return
            assert head.startswith(b"POST /x HTTP/1.1\r\n")
            writer.write(chunked([b"hello"]))

    replies, connections = asyncio.run(talk(handler, requests=3))
    assert [reply.body for reply in replies] == [b"hello"] * 3
    assert connections == 1


def test_a_connection_closed_while_idle_is_replaced() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(plain(b"hello"))
        await writer.drain()

    replies, connections = asyncio.run(talk(handler, requests=3))
    assert [(reply.status, reply.error) for reply in replies] == [(200, None)] * 3
    assert connections == 3


@pytest.mark.parametrize("announced", [b"connection: close\r\n", b""])
def test_an_answer_may_end_with_the_connection(announced: bytes) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n" + announced + b"\r\nall of it")
        await writer.drain()

    [reply], _ = asyncio.run(talk(handler))
    assert (reply.body, reply.error) == (b"all of it", None)


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"", "reset"),
        (chunked([b"half"])[:-5], "reset"),
        (plain(b"four")[:-1], "reset"),
        (b"what?\r\n\r\n", "malformed"),
    ],
)
def test_broken_answers_are_errors_of_a_kind(sent: bytes, kind: str) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(sent)
        await writer.drain()

    [reply], _ = asyncio.run(talk(handler))
    assert reply.error is not None
    assert reply.error.kind == kind
    assert reply.done >= reply.sent


def test_silence_ends_a_request_and_its_connection() -> None:
    closed: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(chunked([b"first"])[:-5])
        closed.append(await reader.read())

    [reply], _ = asyncio.run(talk(handler, stall=0.1))
    assert reply.error is not None
    assert (reply.error.kind, reply.body) == ("stalled", b"first")


def test_slow_but_steady_is_no_stall() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for piece in split(chunked([b"x" * 40]), list(range(0, 90, 10))):
            writer.write(piece)
            await asyncio.sleep(0.1)

    [reply], _ = asyncio.run(talk(handler, stall=2.0))
    assert (reply.error, len(reply.body)) == (None, 40)


def test_unasked_bytes_end_the_connection() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(plain(b"ok") + b"and more")
        await reader.read()

    replies, connections = asyncio.run(talk(handler, requests=2))
    assert [reply.body for reply in replies] == [b"ok", b"ok"]
    assert connections == 2


def test_nobody_there_is_an_error() -> None:
    async def ask() -> Reply:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        async with Client(Endpoint("127.0.0.1", port)) as client:
            return await client.get("/health", 2.0)

    reply = asyncio.run(ask())
    assert reply.error is not None
    assert reply.error.kind == "connect"


def test_a_get_is_bounded() -> None:
    async def ask() -> Reply:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        async with server, Client(Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])) as client:
            return await client.get("/health", 0.1)

    reply = asyncio.run(ask())
    assert reply.error is not None
    assert reply.error.kind == "stalled"
