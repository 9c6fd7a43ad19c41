"""Backends: one EngineConfig, several servers. Each turns it into a command, and says what it cannot do."""

from __future__ import annotations

from engine.backends.base import Answer, Ask, Backend, Launch, MetricNames, Probes, RequestStats, Score
from engine.backends.commands import Command, commands_file, find_command, load_commands
from engine.backends.native import Native
from engine.config import EngineConfig, draft_folder, target_folder
from engine.errors import NotYet
from engine.estimate import DraftShape, Machine, Refusal, check, draft_paths, read_draft_shape, read_shape

__all__ = [
    "Answer",
    "Ask",
    "Backend",
    "Command",
    "Launch",
    "MetricNames",
    "Native",
    "Probes",
    "RequestStats",
    "Score",
    "commands_file",
    "find_command",
    "get",
    "load_commands",
    "verdict",
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


def verdict(config: EngineConfig, machine: Machine) -> tuple[Refusal, ...]:
    """Return every reason not to launch `config` on `machine`: the backend's, the models' and the arithmetic's.

    Model folders are read only when the backend itself has nothing against the config. A policy's drafts may
    name several drafters; each is judged.

    Raises:
        NotYet: the backend is unknown.
        ModelError: a model folder is missing or unusable.
    """
    backend = get(config)
    found = backend.refusals(config, machine)
    if found:
        return found
    shape = read_shape(target_folder(config))
    folders = {draft_folder(config, draft): None for _, draft in draft_paths(config)}
    drafts: list[DraftShape | None] = [read_draft_shape(folder) for folder in folders]
    reasons = (
        refusal
        for draft in drafts or [None]
        for refusal in (*backend.model_refusals(shape, draft), *check(config, shape, draft, machine))
    )
    return tuple(dict.fromkeys(reasons))
