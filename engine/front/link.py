"""Requests to the engine process and tokens from it, over its socket (`engine.wire`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, cast

from engine import wire
from engine.errors import Exit
from engine.front.job import Job
from engine.front.metrics import Meters
from engine.front.process import EngineProcess


class EngineGone(Exception):
    """The engine process cannot serve this request any more; the message is for the client."""


class ClientGone(Exception):
    """Nobody reads this answer any more."""


class Stream:
    """The rounds of one request, in order, for one reader; closing it frees the request's slot.

    What waits here is bounded by the request's own max_tokens, so a reader that stalls holds up nobody else.
    """

    def __init__(self, engine: Engine, request: int, arrived: float) -> None:
        self._engine = engine
        self._request = request
        self._frames: list[wire.Tokens] = []
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._ended = False
        self.arrived = arrived
        self.last: float | None = None  # when the latest tokens came

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.forget(self._request, cancel=not self._ended)

    def push(self, frame: wire.Tokens) -> None:
        """Take a round's tokens in (called by the socket's reader)."""
        self._frames.append(frame)
        self._ended = frame.finish is not None
        self._wake()

    def fail(self, failure: Exception) -> None:
        """Let the reader raise `failure`, now or when it comes back."""
        self._failure = self._failure or failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def rounds(self) -> list[wire.Tokens]:
        """Return the rounds that came since the last call, waiting for one.

        Raises:
            EngineGone: the engine process died or the server stops.
            ClientGone: the client went away.
        """
        while not self._frames:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if isinstance(self._failure, ClientGone):
            raise self._failure
        frames, self._frames = self._frames, []
        return frames


class Engine(asyncio.Protocol):
    """The engine process as the front sees it: requests out, tokens in."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self._lines = wire.LineBuffer()
        self._streams: dict[int, Stream] = {}
        self._asked: dict[int, asyncio.Future[wire.Info | wire.DraftSet]] = {}
        self._next = 0
        self._gone: str | None = None
        self._transport: asyncio.Transport | None = None
        loop = asyncio.get_running_loop()
        self.info: asyncio.Future[dict[str, Any]] = loop.create_future()  # of Ready
        self.closed: asyncio.Future[wire.Fatal | None] = loop.create_future()
        self._fatal: wire.Fatal | None = None
        self.broken = False  # it said what nobody can understand, and may still be running
        self._empty = asyncio.Event()
        self._empty.set()

    @classmethod
    async def connect(cls, process: EngineProcess, meters: Meters) -> Engine:
        """Take over a started engine process's socket."""
        loop = asyncio.get_running_loop()
        process.socket.setblocking(False)
        _, engine = await loop.create_unix_connection(lambda: cls(meters), sock=process.socket)
        return engine

    @property
    def open_requests(self) -> int:
        """Requests submitted and not yet forgotten."""
        return len(self._streams)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport (asyncio)."""
        self._transport = cast(asyncio.Transport, transport)  # a stream socket's

    def data_received(self, data: bytes) -> None:
        """Hand each frame to whom it concerns; a line that is no frame ends the connection (asyncio)."""
        try:
            for frame in self._lines.feed(data):
                self._dispatch(frame)
        except (ValueError, TypeError, KeyError) as error:
            self._fatal = wire.Fatal(Exit.INTERNAL, "crashed", f"the engine process sent a bad frame: {error!r}")
            self.broken = True
            if self._transport is not None:
                self._transport.abort()

    def _dispatch(self, frame: wire.Frame) -> None:
        match frame:
            case wire.Tokens():
                self._tokens(frame)
            case wire.Info() | wire.DraftSet():
                asked = self._asked.pop(frame.id, None)
                if asked is not None and not asked.done():
                    asked.set_result(frame)
            case wire.Ready() if not self.info.done():
                self.info.set_result(frame.info)
            case wire.Fatal():
                self._fatal = frame
            case _:
                raise ValueError(f"{type(frame).__name__} is not what the front expects")

    def _tokens(self, frame: wire.Tokens) -> None:
        stream = self._streams.get(frame.id)
        if stream is None:
            return  # cancelled meanwhile
        if frame.tokens:
            now = time.monotonic()
            self._meters.tokens(len(frame.tokens), now - stream.arrived, now - stream.last if stream.last else None)
            stream.last = now
        stream.push(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine process is gone or going (asyncio)."""
        self.fail("the engine process has died; the server is going down")
        if not self.closed.done():
            self.closed.set_result(self._fatal)

    def fail(self, reason: str) -> None:
        """Fail every open request and question, and refuse new ones."""
        self._gone = reason
        for stream in self._streams.values():
            stream.fail(EngineGone(reason))
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(EngineGone(reason))
        self._asked.clear()

    def _send(self, frame: wire.Frame) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(wire.encode(frame))

    def submit(self, job: Job, arrived: float) -> Stream:
        """Queue a request.

        Raises:
            EngineGone: the engine process died or the server stops.
        """
        if self._gone is not None:
            raise EngineGone(self._gone)
        self._next += 1
        stream = self._streams[self._next] = Stream(self, self._next, arrived)
        self._empty.clear()
        how = job.sampling
        self._send(
            wire.Submit(
                self._next,
                job.prompt,
                job.max_tokens,
                job.eos,
                how.temperature,
                how.top_k,
                how.top_p,
                how.seed,
                job.logprobs,
                job.echo,
            )
        )
        self._meters.prompt(len(job.prompt))
        return stream

    def forget(self, request: int, cancel: bool) -> None:
        """Drop a request; `cancel` tells the engine process to stop working on it."""
        if self._streams.pop(request, None) is not None and cancel:
            self._send(wire.Cancel(request))
        if not self._streams:
            self._empty.set()

    async def set_draft(self, draft: dict[str, Any], seconds: float) -> wire.DraftSet:
        """Let the engine use another draft; return it resolved, or why it does not.

        Raises:
            EngineGone: the engine process died.
            TimeoutError: it did not answer within `seconds`.
        """
        frame = await self._question(lambda number: wire.SetDraft(number, draft), seconds)
        return cast(wire.DraftSet, frame)  # which answers `SetDraft`

    async def ask(self, seconds: float) -> dict[str, Any]:
        """Return the engine's counters.

        Raises:
            EngineGone: the engine process died.
            TimeoutError: it did not answer within `seconds`.
        """
        frame = await self._question(wire.Ask, seconds)
        return frame.stats if isinstance(frame, wire.Info) else {}

    async def _question(self, ask: Callable[[int], wire.Frame], seconds: float) -> wire.Info | wire.DraftSet:
        if self._gone is not None:
            raise EngineGone(self._gone)
        self._next += 1
        number = self._next
        answer: asyncio.Future[wire.Info | wire.DraftSet] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._send(ask(number))
        try:
            async with asyncio.timeout(seconds):
                return await answer
        finally:
            self._asked.pop(number, None)

    def drain(self) -> None:
        """Tell the engine process to finish what runs, accept nothing new, and end."""
        self._send(wire.Drain())

    async def idle(self) -> None:
        """Wait until no request is open."""
        await self._empty.wait()
