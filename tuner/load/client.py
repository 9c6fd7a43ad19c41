"""A small HTTP/1.1 client whose clock can be trusted: bytes are stamped when they arrive and read later.

Nothing is decoded while a load runs but the framing (by httptools), which tells where an answer ends; server-sent
events and JSON are parsed by `streams.py` after the level is over, so that the client's own work does not delay its
stamps. One connection carries one request at a time and is kept for the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast
from urllib.parse import urlsplit

import httptools

MAX_HEAD = 64 * 1024
MAX_BODY = 256 * 2**20
CONNECT_SECONDS = 10.0

ErrorKind = Literal[
    "connect",
    "reset",
    "no_first_token",
    "stalled",
    "endless",
    "redirect",
    "throttled",
    "status",
    "not_a_stream",
    "malformed",
    "incomplete",
    "no_usage",
    "wrong_usage",
    "not_sent",
]
SILENT: frozenset[ErrorKind] = frozenset({"no_first_token", "stalled", "endless"})
UNREADABLE: frozenset[ErrorKind] = frozenset({"not_a_stream", "malformed", "incomplete", "no_usage", "wrong_usage"})
Clock = Callable[[], float]


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens. `prefix` goes before every path, `headers` into every request."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    headers: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"


def parse_endpoint(url: str, headers: tuple[tuple[str, str], ...] = ()) -> Endpoint:
    """Return the endpoint of a URL such as `http://127.0.0.1:8000`; a trailing `/v1` is that of the API.

    Raises:
        ValueError: no http or https URL, or one with parts that an endpoint has not.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{url!r}: {error}; write http://HOST:PORT") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no URL of a server; write http://HOST:PORT")
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ValueError(f"{url!r}: only scheme, host, port and path are taken")
    tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    if not prefix.isascii() or any(c.isspace() for c in prefix):
        raise ValueError(f"{url!r}: the path must be percent-encoded")
    return Endpoint(parts.hostname, port or (443 if tls else 80), tls, prefix, headers)


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

    `sent`: when the client got to sending the request. `pieces`: the body as it came, each piece with the time of
    the bytes that brought it. `done`: when the last of them came, or when the request was given up. `error` is set
    when the answer is not complete; what had come until then is kept.
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

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.pieces: list[tuple[float, bytes]] = []
        self.complete = False
        self.keep_alive = True
        self.until_close = False
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._headed = False  # the head of the final answer is over
        self._size = 0

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes that arrived at `now`.

        Raises:
            FramingError: they are not HTTP/1.1, or more than this client takes.
        """
        self._now = now
        self._size += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                cause = error.__context__ if isinstance(error.__context__, FramingError) else error
                raise FramingError(f"not an HTTP/1.1 answer: {str(cause)[:200]}") from error
            self.keep_alive = False  # bytes nobody asked for: this connection cannot be trusted any more
        if self._size > (MAX_BODY if self._headed else MAX_HEAD):
            raise FramingError("the answer is too long" if self._headed else "the head of the answer is too long")

    def close(self) -> bool:
        """The peer closed the connection; return whether that ends the answer properly."""
        if self.until_close and not self.complete:
            self.complete = True
        self.keep_alive = False
        return self.complete

    # httptools calls these

    def on_message_begin(self) -> None:
        if self.complete:
            self.keep_alive = False  # a second answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.complete:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.complete or 100 <= status < 200:
            return
        self.status = status
        self._headed = True
        length = self.headers.get("content-length")
        if length is not None and int(length) > MAX_BODY:
            raise FramingError(f"content-length {length[:40]}")
        chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        self.until_close = length is None and not chunked and status not in (204, 304)

    def on_body(self, data: bytes) -> None:
        if not self.complete:
            self.pieces.append((self._now, data))

    def on_message_complete(self) -> None:
        if not self._headed:  # an interim answer; the real one follows
            self.headers = {}
        elif not self.complete:
            self.complete = True
            self.keep_alive = self._parser.should_keep_alive()


class _Wire(asyncio.Protocol):
    """One connection. `begin` sends a request and returns the future of its end."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._framer: Framer | None = None
        self._done: asyncio.Future[RequestError | None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._began = 0.0
        self.last = 0.0
        self.open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.open = True

    def begin(
        self, request: bytes, framer: Framer, stall: float, total: float
    ) -> tuple[float, asyncio.Future[RequestError | None]]:
        """Send; return (when, future of the error or None)."""
        loop = asyncio.get_running_loop()
        self._framer = framer
        self._done = loop.create_future()
        self._began = self.last = self._clock()
        if self._transport is None:
            raise ConnectionError("not connected")
        self._transport.write(request)
        self._timer = loop.call_later(min(stall, total), self._check, stall, total)
        return self.last, self._done

    def data_received(self, data: bytes) -> None:
        now = self._clock()
        framer = self._framer
        if framer is None:
            self.abort()  # bytes between two requests
            return
        self.last = now
        try:
            framer.feed(data, now)
        except FramingError as error:
            self._finish(RequestError("malformed", str(error)))
            return
        if framer.complete:
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

    def _check(self, stall: float, total: float) -> None:
        now = self._clock()
        idle, age = now - self.last, now - self._began
        if idle >= stall and self._framer is not None and not self._framer.pieces:
            self._finish(RequestError("no_first_token", f"no token for {stall:g} s"))
        elif idle >= stall:
            self._finish(RequestError("stalled", f"no byte for {stall:g} s"))
        elif age >= total:
            self._finish(RequestError("endless", f"not over after {total:g} s"))
        else:
            wait = min(stall - idle, total - age)
            self._timer = asyncio.get_running_loop().call_later(wait, self._check, stall, total)

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
        self._head = "".join(f"{name}: {value}\r\n" for name, value in endpoint.headers)

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
                    lambda: _Wire(self._clock),
                    self._endpoint.host,
                    self._endpoint.port,
                    ssl=ssl.create_default_context() if self._endpoint.tls else None,
                )
        except (OSError, TimeoutError) as error:
            self._wire = None
            return RequestError("connect", f"cannot connect to {self._endpoint}: {error or 'timeout'}")
        return None

    async def request(
        self, method: str, path: str, body: bytes = b"", stall: float = 30.0, total: float = math.inf
    ) -> Reply:
        """Send a request and collect its answer; `stall` seconds without a byte end it, and `total` in any case.

        A server may close a kept connection whenever it is idle (RFC 9112, 9.3.1): a request that meets this, and
        got no byte, is sent once more on a new one. The time that takes is part of the request.
        """
        kept = self._wire is not None and self._wire.open
        reply = await self._once(method, path, body, stall, total)
        if kept and reply.status == 0 and reply.error is not None and reply.error.kind == "reset":
            again = await self._once(method, path, body, stall, total)
            return dataclasses.replace(again, sent=reply.sent)
        return reply

    async def _once(self, method: str, path: str, body: bytes, stall: float, total: float) -> Reply:
        framer = Framer()
        request = self._encode(method, path, body)
        began = self._clock()
        if (error := await self.connect()) is not None or self._wire is None:
            return Reply(began, self._clock(), 0, {}, (), error)
        wire = self._wire
        try:
            _, done = wire.begin(request, framer, stall, total)
            error = await done
        except ConnectionError as broken:
            return Reply(began, self._clock(), 0, {}, (), RequestError("reset", str(broken)))
        except asyncio.CancelledError:
            self.close()
            raise
        done_at = wire.last if error is None else self._clock()
        return Reply(began, done_at, framer.status, framer.headers, tuple(framer.pieces), error)

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
        head = (
            f"{method} {self._endpoint.prefix}{path} HTTP/1.1\r\nhost: {self._endpoint.host}:{self._endpoint.port}\r\n"
        )
        head += self._head
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return head.encode("latin-1") + b"\r\n" + body
