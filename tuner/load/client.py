"""A small HTTP/1.1 client whose clock can be trusted: bytes are stamped when they arrive and read later.

Nothing is decoded while a load runs but the framing, which tells where an answer ends; server-sent events and JSON
are parsed by `streams.py` after the level is over, so that the client's own work does not delay its stamps.
One connection carries one request at a time and is kept for the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

MAX_HEAD = 64 * 1024
MAX_CHUNK_LINE = 1024
MAX_BODY = 256 * 2**20
CONNECT_SECONDS = 10.0

ErrorKind = Literal["connect", "reset", "stalled", "status", "malformed", "incomplete", "no_usage"]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True)
class RequestError:
    """Why a request has no good answer."""

    kind: ErrorKind
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclass(frozen=True)
class Reply:
    """One answer. Times in seconds of the client's clock.

    `pieces`: the body as it came, each piece with the time of the bytes that brought it. `done`: when the last of
    them came, or when the request was given up. `error` is set when the answer is not complete; what had come
    until then is kept.
    """

    sent: float
    done: float
    status: int
    headers: dict[str, str]
    pieces: tuple[tuple[float, bytes], ...]
    error: RequestError | None = None

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(data for _, data in self.pieces)


class FramingError(ValueError):
    """The bytes are no HTTP/1.1 answer."""


class Framer:
    """Cuts one HTTP/1.1 answer out of a byte stream. Feed it until `complete`."""

    def __init__(self, method: str = "POST") -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.pieces: list[tuple[float, bytes]] = []
        self.complete = False
        self.keep_alive = True
        self.until_close = False
        self._method = method
        self._buffer = bytearray()
        self._step: Callable[[float], bool] = self._head
        self._left = 0  # bytes of the current chunk or of the whole body
        self._size = 0

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes that arrived at `now`.

        Raises:
            FramingError: they are not HTTP/1.1, or more than this client takes.
        """
        self._buffer += data
        while not self.complete and self._step(now):
            pass
        if self.complete and self._buffer:
            self.keep_alive = False  # bytes nobody asked for: this connection cannot be trusted any more

    def close(self) -> bool:
        """The peer closed the connection; return whether that ends the answer properly."""
        if self.until_close and not self.complete:
            self.complete = True
        self.keep_alive = False
        return self.complete

    def _head(self, now: float) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                raise FramingError("the head of the answer is too long")
            return False
        lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        words = lines[0].split(" ", 2)
        if not words[0].startswith("HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            raise FramingError(f"not an HTTP/1.1 answer: {lines[0][:80]!r}")
        self.status = int(words[1])
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon:
                raise FramingError(f"not a header: {line[:80]!r}")
            self.headers[name.strip().lower()] = value.strip()
        if 100 <= self.status < 200:  # an interim answer; the real one follows
            self.headers = {}
            return True
        self._begin_body(words[0])
        return True

    def _begin_body(self, version: str) -> None:
        connection = self.headers.get("connection", "").lower()
        self.keep_alive = "close" not in connection and (version == "HTTP/1.1" or "keep-alive" in connection)
        length = self.headers.get("content-length")
        if self._method == "HEAD" or self.status in (204, 304):
            self.complete = True
        elif "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._step = self._chunk_size
        elif length is None:
            self.until_close = True
            self._left = MAX_BODY
            self._step = self._plain
        elif not length.isdigit() or int(length) > MAX_BODY:
            raise FramingError(f"content-length {length[:40]!r}")
        else:
            self._left = int(length)
            self._step = self._plain
            self.complete = self._left == 0

    def _plain(self, now: float) -> bool:
        self._take(now)
        if self._left == 0:
            if self.until_close:
                raise FramingError("the answer is too long")
            self.complete = True
        return False

    def _chunk_size(self, now: float) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > MAX_CHUNK_LINE:
                raise FramingError("the size line of a chunk is too long")
            return False
        word = bytes(self._buffer[:end]).split(b";", 1)[0].strip()
        try:
            self._left = int(word, 16)
        except ValueError as error:
            raise FramingError(f"not a chunk size: {word[:40]!r}") from error
        if self._left < 0 or self._size > MAX_BODY:
            raise FramingError("the answer is too long")
        del self._buffer[: end + 2]
        self._step = self._chunk_data if self._left else self._trailer
        return True

    def _chunk_data(self, now: float) -> bool:
        self._take(now)
        if self._left:
            return False
        self._step = self._chunk_end
        return True

    def _chunk_end(self, now: float) -> bool:
        if len(self._buffer) < 2:
            return False
        if self._buffer[:2] != b"\r\n":
            raise FramingError("a chunk is longer than it says")
        del self._buffer[:2]
        self._step = self._chunk_size
        return True

    def _trailer(self, now: float) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                raise FramingError("the trailer is too long")
            return False
        self.complete = end == 0
        del self._buffer[: end + 2]
        return True

    def _take(self, now: float) -> None:
        data = bytes(self._buffer[: self._left])
        if data:
            self.pieces.append((now, data))
            del self._buffer[: len(data)]
            self._left -= len(data)
            self._size += len(data)


class _Wire(asyncio.Protocol):
    """One connection. `begin` sends a request and returns the future of its end."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._framer: Framer | None = None
        self._done: asyncio.Future[RequestError | None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.last = 0.0
        self.open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._transport = transport
            self.open = True

    def begin(self, request: bytes, framer: Framer, stall: float) -> tuple[float, asyncio.Future[RequestError | None]]:
        """Send; return (when, future of the error or None). `stall` seconds without a byte end the request."""
        loop = asyncio.get_running_loop()
        self._framer = framer
        self._done = loop.create_future()
        self.last = self._clock()
        if self._transport is None:
            raise ConnectionError("not connected")
        self._transport.write(request)
        self._timer = loop.call_later(stall, self._check, stall)
        return self.last, self._done

    def data_received(self, data: bytes) -> None:
        now = self._clock()
        if self._framer is None:
            self.abort()  # bytes between two requests
            return
        self.last = now
        try:
            self._framer.feed(data, now)
        except FramingError as error:
            self._finish(RequestError("malformed", str(error)))
            return
        if self._framer.complete:
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._framer is None:
            return
        if exc is None and self._framer.close():
            self._finish(None)
        else:
            begun = "in the middle of the answer" if self._framer.status else "before an answer"
            self._finish(RequestError("reset", f"the server closed the connection {begun}"))

    def abort(self) -> None:
        """Close at once; the server sees that nobody reads any more."""
        self.open = False
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _check(self, stall: float) -> None:
        idle = self._clock() - self.last
        if idle >= stall:
            self._finish(RequestError("stalled", f"no byte for {stall:g} s"))
        else:
            self._timer = asyncio.get_running_loop().call_later(stall - idle, self._check, stall)

    def _finish(self, error: RequestError | None) -> None:
        framer, self._framer = self._framer, None
        if self._timer is not None:
            self._timer.cancel()
        if error is not None or framer is None or not framer.keep_alive:
            self.abort()
        if self._done is not None and not self._done.done():
            self._done.set_result(error)


class Client:
    """A connection to an endpoint that is opened when needed and kept between requests.

    One request at a time; use as a context. A request that cannot be answered is a Reply with an error, never an
    exception.
    """

    def __init__(self, endpoint: Endpoint, clock: Clock = time.perf_counter) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._wire: _Wire | None = None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; a request in flight is cancelled at the server."""
        if self._wire is not None:
            self._wire.abort()
            self._wire = None

    async def connect(self) -> RequestError | None:
        """Open the connection if there is none."""
        if self._wire is not None and self._wire.open:
            return None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, self._wire = await loop.create_connection(
                    lambda: _Wire(self._clock), self._endpoint.host, self._endpoint.port
                )
        except (OSError, TimeoutError) as error:
            return RequestError("connect", f"{self._endpoint}: {error or 'no answer'}")
        return None

    async def request(self, method: str, path: str, body: bytes = b"", stall: float = 30.0) -> Reply:
        """Send a request and collect its answer; `stall` seconds without a byte end it.

        A server may close a kept connection whenever it is idle (RFC 9112, 9.3.1): a request that meets this, and
        got no byte, is sent once more on a new one. The time that takes is part of the request.
        """
        kept = self._wire is not None and self._wire.open
        reply = await self._once(method, path, body, stall)
        if kept and reply.status == 0 and reply.error is not None and reply.error.kind == "reset":
            return await self._once(method, path, body, stall)
        return reply

    async def _once(self, method: str, path: str, body: bytes, stall: float) -> Reply:
        framer = Framer(method)
        began = self._clock()
        if (error := await self.connect()) is not None or self._wire is None:
            return Reply(began, self._clock(), 0, {}, (), error)
        wire = self._wire
        sent, done = wire.begin(self._encode(method, path, body), framer, stall)
        try:
            error = await done
        except asyncio.CancelledError:
            self.close()
            raise
        done_at = wire.last if error is None else self._clock()
        return Reply(sent, done_at, framer.status, framer.headers, tuple(framer.pieces), error)

    async def get(self, path: str, timeout: float) -> Reply:
        """GET with a bound on the whole exchange."""
        began = self._clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                return await self.request("GET", path, stall=timeout)
        return Reply(
            began,
            self._clock(),
            0,
            {},
            (),
            RequestError("stalled", f"no answer in {timeout:g} s"),
        )

    def _encode(self, method: str, path: str, body: bytes) -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nhost: {self._endpoint.host}:{self._endpoint.port}\r\n"
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return head.encode("ascii") + b"\r\n" + body
