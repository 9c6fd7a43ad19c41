"""One HTTP request and its answer, over ASGI: bounded bodies, JSON errors, server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from engine.front.limits import Limits
from engine.front.link import ClientGone
from engine.protocol import error_body

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON_TYPE = b"application/json"
CLOSE: Header = (b"connection", b"close")


class Refused(Exception):
    """An answer other than 200, in OpenAI's error shape."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, kind, status, param)


class Budget:
    """Bytes of bodies held at once."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    @contextmanager
    def account(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes bytes, given back when the block ends.

        Raises:
            Refused: 503, too many bodies at once.
        """
        held = 0

        def take(size: int) -> None:
            nonlocal held
            if size > self._left:
                raise Refused(503, "too many large requests at once, try again later", "overloaded")
            held += size
            self._left -= size

        try:
            yield take
        finally:
            self._left += held


def encode(document: object) -> bytes:
    """Return compact JSON."""
    return json.dumps(document, separators=(",", ":")).encode()


class Exchange:
    """A request being answered."""

    def __init__(self, scope: Message, receive: Receive, send: Send, limits: Limits) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.peer: str = (scope.get("client") or ("", 0))[0]
        self.started = False
        self._headers: list[Header] = scope["headers"]
        self._receive = receive
        self._send = send
        self._limits = limits
        length = self.header(b"content-length")
        self._body_ended = length in (None, b"0") and self.header(b"transfer-encoding") is None

    def header(self, name: bytes) -> bytes | None:
        """Return a header's value; `name` in lower case."""
        return next((value for key, value in self._headers if key == name), None)

    async def _chunk(self) -> bytes:
        """Return the next part of the body.

        Raises:
            ClientGone: the client went away.
        """
        message = await self._receive()
        if message["type"] != "http.request":
            raise ClientGone
        self._body_ended = not message.get("more_body", False)
        body: bytes = message.get("body", b"")
        return body

    async def body(self, take: Callable[[int], None]) -> bytes:
        """Return the whole body.

        Args:
            take: told of every part's size before it is kept; may refuse.

        Raises:
            Refused: 413 too large, 408 too slow.
            ClientGone: the client went away.
        """
        limit = self._limits.body_bytes
        too_large = Refused(413, f"the body exceeds {limit} bytes", "request_too_large")
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and int(length) > limit:
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while not self._body_ended:
                    part = await self._chunk()
                    size += len(part)
                    if size > limit:
                        raise too_large
                    take(len(part))
                    parts.append(part)
        except TimeoutError:
            message = f"the body did not arrive within {self._limits.body_seconds:g} seconds"
            raise Refused(408, message, "timeout") from None
        return b"".join(parts)

    async def reply(
        self, status: int, body: bytes, content_type: bytes = JSON_TYPE, headers: tuple[Header, ...] = ()
    ) -> None:
        """Send a whole answer. When the request's body has not been read, read on for a while and then close."""
        self.started = True
        fields = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers]
        early = not self._body_ended
        if early and status != 408:
            fields.append(CLOSE)
            await self._send({"type": "http.response.start", "status": status, "headers": fields})
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            # Closing a socket with unread data resets it, and the client would lose the answer.
            await self._discard()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        if early:
            fields.append(CLOSE)
        await self._send({"type": "http.response.start", "status": status, "headers": fields})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _discard(self) -> None:
        left = 4 * self._limits.body_bytes
        try:
            async with asyncio.timeout(self._limits.discard_seconds):
                while not self._body_ended and left > 0:
                    left -= len(await self._chunk())
        except TimeoutError:
            return  # as much patience as there is

    async def refuse(self, refusal: Refused) -> None:
        """Answer with an error; inside a stream, as an event that ends it."""
        if self.started:
            await self.event(refusal.body)
            await self.end_stream()
            return
        headers: tuple[Header, ...] = ()
        if refusal.status in (429, 503):
            headers = ((b"retry-after", b"1"),)
        await self.reply(refusal.status, encode(refusal.body), headers=headers)

    async def start_stream(self) -> None:
        """Begin server-sent events."""
        self.started = True
        fields = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": 200, "headers": fields})

    async def write(self, data: bytes) -> None:
        """Send encoded events; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def event(self, document: object) -> None:
        """Send one event."""
        await self.write(b"data: " + encode(document) + b"\n\n")

    async def end_stream(self) -> None:
        """End the answer."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def gone(self) -> None:
        """Return when the client has gone away (call once the body has been read)."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
