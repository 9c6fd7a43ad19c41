"""Backends: one EngineConfig, several servers. Each turns it into a command, and says what it cannot do."""

from __future__ import annotations

from engine.backends.base import Backend, Launch, MetricNames, Probes, RequestStats
from engine.backends.commands import Command, commands_file, find_command, load_commands
from engine.backends.native import Native
from engine.config import EngineConfig
from engine.errors import NotYet

__all__ = [
    "Backend",
    "Command",
    "Launch",
    "MetricNames",
    "Native",
    "Probes",
    "RequestStats",
    "commands_file",
    "find_command",
    "get",
    "load_commands",
]


def get(config: EngineConfig) -> Backend:
    """Return the backend that a config names.

    Raises:
        NotYet: this version has no code for that backend.
    """
    match config.backend.kind:
        case "native":
            return Native()
        case kind:
            raise NotYet(f"backend {kind} is not supported yet; set backend.kind: native")
