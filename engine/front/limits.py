"""What one client, and all of them, may take of the server."""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol import MAX_BODY_BYTES


@dataclass(frozen=True)
class Limits:
    """What one client may take. Seconds and bytes; tests set their own."""

    body_bytes: int = MAX_BODY_BYTES
    held_bytes: int = 8 * MAX_BODY_BYTES  # of all bodies being read at once
    body_seconds: float = 30.0  # from the headers to the body's end
    discard_seconds: float = 2.0  # for reading on after an early refusal, so that the client sees it
    header_seconds: float = 15.0
    header_bytes: int = 65536
    keep_alive_seconds: int = 60
    stall_seconds: float = 300.0  # a reader that takes nothing for so long is dropped
    connections: int = 2048
    requests: int = 1024  # generations open at once, waiting ones included
    drain_seconds: float = 8.0  # of the ten that a stop may take, for open requests to finish
