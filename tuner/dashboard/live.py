"""Studies that are watched: one task reads along per study, whoever many look at it; each change is made once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from tuner.dashboard.payload import Payload
from tuner.dashboard.study import StudyReader
from tuner.errors import TunerError
from tuner.store import StudyFolder

POLL_SECONDS = 0.5
STATE_SECONDS = 5.0  # a search that dies changes no file
BEHIND = 64  # messages; a reader further behind starts anew
HEARTBEAT_SECONDS = 15.0


class Unreadable(TunerError):
    """A study that cannot be shown."""


@dataclass(frozen=True)
class Message:
    """One change, ready to be sent. `version` is that of the document with it."""

    version: int
    kind: str  # delta, live, anew
    data: bytes

    def encode(self) -> bytes:
        """Return it as a server-sent event."""
        return b"event: %s\nid: %d\ndata: %s\n\n" % (self.kind.encode(), self.version, self.data)


def to_json(document: Any) -> bytes:
    """Return compact JSON."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


class LiveStudy:
    """One study, read along while anyone watches it."""

    def __init__(self, folder: StudyFolder, name: str) -> None:
        self.folder = folder
        self.name = name
        self.version = 0
        self._reader = StudyReader(folder)
        self._payload = Payload(self._reader, name)
        self._whole: tuple[int, bytes] | None = None
        self._watchers: set[asyncio.Queue[Message | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._busy = asyncio.Lock()
        self._told: dict[str, Any] = {}
        self._judged = 0.0

    async def whole(self) -> bytes:
        """Return the whole document as JSON, as new as the files.

        Raises:
            Unreadable: its files cannot be read, or not in this version.
        """
        async with self._busy:
            await self._refresh()
            if self._whole is None or self._whole[0] != self.version:
                document = await _in_thread(self._payload.whole)
                self._told = _settled(document["live"])
                self._whole = self.version, to_json({"version": self.version} | document)
            return self._whole[1]

    async def watch(self, since: int) -> AsyncIterator[bytes]:
        """Yield server-sent events of every change after a version; a reader that is behind is told to start anew."""
        queue: asyncio.Queue[Message | None] = asyncio.Queue(BEHIND)
        self._watchers.add(queue)
        if self._task is None:
            self._task = asyncio.create_task(self._follow())
        try:
            if since != self.version:
                yield Message(self.version, "anew", b"{}").encode()
            while True:
                message: Message | None
                try:
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        message = await queue.get()
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if message is None:
                    yield Message(self.version, "anew", b"{}").encode()
                    return
                yield message.encode()
        finally:
            self._watchers.discard(queue)
            if not self._watchers and self._task is not None:
                self._task.cancel()
                self._task = None

    def close(self) -> None:
        """End every watcher's stream, so that the server can stop."""
        for queue in self._watchers:
            _drain(queue)

    async def _follow(self) -> None:
        try:
            while True:
                with contextlib.suppress(Unreadable):  # shown when it is asked for; it may become readable again
                    async with self._busy:
                        await self._refresh()
                await asyncio.sleep(POLL_SECONDS)
        finally:
            self.close()  # nobody waits on heartbeats for what will not come

    async def _refresh(self) -> None:
        """Take in what the files brought, and tell everyone."""
        change = await _in_thread(self._reader.refresh)
        if change.anew:
            self._payload = Payload(self._reader, self.name)
            self.version += 1
            self._tell("anew", {})
        elif change.trials:
            document = await _in_thread(self._payload.changes, change)
            self._told = _settled(document["live"])
            self.version += 1
            self._tell("delta", {"version": self.version} | document)
        elif change.events or time.monotonic() - self._judged > STATE_SECONDS:
            self._judged = time.monotonic()
            live = await _in_thread(self._payload.live)
            if change.events or _settled(live) != self._told:
                self._told = _settled(live)
                self._whole = None
                self._tell("live", live)

    def _tell(self, kind: str, document: dict[str, Any]) -> None:
        if not self._watchers:
            return
        message = Message(self.version, kind, to_json(document))
        for queue in self._watchers:
            try:
                queue.put_nowait(message)
            except asyncio.QueueFull:
                _drain(queue)


def _settled(live: dict[str, Any]) -> dict[str, Any]:
    """Return what of the live part changes only when something happens."""
    return {key: live[key] for key in ("state", "text", "launched", "unreadable", "too_long")}


def _drain(queue: asyncio.Queue[Message | None]) -> None:
    """Leave only the end in a queue."""
    while not queue.empty():
        queue.get_nowait()
    queue.put_nowait(None)


async def _in_thread(function: Any, *arguments: Any) -> Any:
    """Run what takes a while next to the loop; what cannot be read is one kind of problem.

    Raises:
        Unreadable: with the reason.
    """
    try:
        return await asyncio.to_thread(function, *arguments)
    except TunerError as error:
        raise Unreadable(str(error)) from error
    except OSError as error:
        raise Unreadable(f"{error.filename}: cannot be read: {error.strerror}") from error
