"""What uvicorn leaves open: clients that connect and say little, nothing, or too much.

uvicorn has no time limit for a request's headers, httptools none for their size, and neither for a reader that has
stopped reading. `guarded` adds these to either of its HTTP protocols, and answers broken HTTP in JSON.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.front.limits import Limits
from engine.protocol import error_body

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    _Base = HttpToolsProtocol
else:
    _Base = object


def _raw_error(status: int, message: str, kind: str) -> bytes:
    """Return a whole HTTP error answer, for connections that have no request yet."""
    body = json.dumps(error_body(message, kind, status)).encode()
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


class Guard(_Base):
    """Mixed into a uvicorn HTTP protocol: limits on headers, idle connections and stalled readers."""

    limits: Limits  # set by `guarded`

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit a connection, at the cost of the one that has been idle for longest when there are too many."""
        self._header_size = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._since = self.loop.time()
        self._deaf = False  # what comes is thrown away
        super().connection_made(transport)
        self._arm()
        if len(self.connections) > self.limits.connections:
            others = cast("list[Guard]", [one for one in self.connections if one is not self])
            idle = [one for one in others if one.between_requests]
            victim = min(idle, key=lambda one: one._since, default=self)
            victim.turn_away(503, "too many connections, try again later", "overloaded")

    @property
    def between_requests(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def turn_away(self, status: int, message: str, kind: str) -> None:
        """Close a connection that has no request, with an answer when it has begun to send one."""
        if self.transport.is_closing() or self._deaf:
            return
        if self._header_size or status == HTTPStatus.SERVICE_UNAVAILABLE:
            self._last_words(_raw_error(status, message, kind))
        else:
            self.transport.close()

    def _last_words(self, answer: bytes) -> None:
        """Answer, and read on for a while: a socket closed with unread data is reset, and the answer lost."""
        self._deaf = True
        self._disarm()
        self.transport.write(answer)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(self.limits.discard_seconds, self.transport.close)

    def _arm(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.limits.header_seconds, self._too_slow)

    def _disarm(self) -> None:
        self._header_size = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _too_slow(self) -> None:
        self._header_timer = None
        if self.between_requests:
            seconds = self.limits.header_seconds
            self.turn_away(408, f"the headers did not arrive within {seconds:g} seconds", "timeout")

    def data_received(self, data: bytes) -> None:
        """Parse, and bound what comes before a request is complete (asyncio)."""
        if self._deaf:
            return
        super().data_received(data)
        if self._deaf:
            return
        if not self.between_requests:
            self._disarm()
        elif not self.transport.is_closing():
            self._header_size += len(data)
            self._since = self.loop.time()
            if self._header_size > self.limits.header_bytes:
                self.turn_away(431, f"the headers exceed {self.limits.header_bytes} bytes", "headers_too_large")
            else:
                self._arm()

    def send_400_response(self, msg: str) -> None:
        """Answer broken HTTP in JSON; in the middle of an answer only close (uvicorn)."""
        if self.between_requests:
            self._last_words(_raw_error(400, "not a valid HTTP/1.1 request", "invalid_request_error"))
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        """The client does not read: give it a while (asyncio)."""
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self.limits.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again (asyncio)."""
        super().resume_writing()
        self._end_stall()

    def _end_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers (asyncio)."""
        self._disarm()
        self._end_stall()
        super().connection_lost(exc)


class NoPipelining(_Base):
    """Mixed into uvicorn's httptools protocol: a request sent before the last one's answer is not taken up.

    uvicorn would queue it, and then lose sight of the first one's client going away. The connection closes after the
    first answer, as HTTP allows; clients send the rest again.
    """

    _behind = False  # what is being parsed belongs to a later request

    def on_headers_complete(self) -> None:
        """Start the request, unless another one is being answered (httptools)."""
        current = self.cycle
        super().on_headers_complete()
        if current is not None and not current.response_complete:
            self._behind = True
            current.keep_alive = False
            self.pipeline.clear()
            self.cycle = current

    def on_body(self, body: bytes) -> None:
        """Take a part of the body (httptools)."""
        if not self._behind:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request (httptools)."""
        if not self._behind:
            super().on_message_complete()


def guarded(limits: Limits) -> tuple[str, type[asyncio.Protocol]]:
    """Return (name of the HTTP parser, the protocol class for uvicorn): httptools when it is installed, else h11."""
    members: dict[str, Any] = {"limits": limits}
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11", type("GuardedH11", (Guard, H11Protocol), members)
    return "httptools", type("GuardedHttpTools", (Guard, NoPipelining, HttpToolsProtocol), members)
