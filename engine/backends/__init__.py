"""Backends: one EngineConfig, several servers. Each turns it into a command, and says what it cannot do."""

from __future__ import annotations

from engine.backends import native, sglang_versions, vllm
from engine.backends.base import (
    Answer,
    Ask,
    Backend,
    Launch,
    MetricNames,
    Probes,
    RequestStats,
    RoundCounts,
    Score,
)
from engine.backends.commands import Command, commands_file, find_command, load_commands
from engine.backends.native import Native
from engine.backends.sglang import SGLang
from engine.backends.vllm import VLLM
from engine.config import EngineConfig, draft_folder, target_folder
from engine.estimate import DraftShape, Machine, Refusal, check, draft_paths, read_draft_shape, read_shape

__all__ = [
    "VLLM",
    "Answer",
    "Ask",
    "Backend",
    "Command",
    "Launch",
    "MetricNames",
    "Native",
    "Probes",
    "RequestStats",
    "RoundCounts",
    "SGLang",
    "Score",
    "commands_file",
    "find_command",
    "get",
    "known_versions",
    "load_commands",
    "verdict",
]


def get(config: EngineConfig) -> Backend:
    """Return the backend that a config names. `backend.version` null is the one version that the machine lists.

    Raises:
        ConfigError: no version is named, and the machine's file does not tell one.
    """
    kind, version = config.backend.kind, config.backend.version
    if kind == "native":
        return Native()
    if version is None:
        version, _ = find_command(kind, None)
    if kind == "sglang":
        return SGLang(version, sglang_versions.VERSIONS.get(version))
    return VLLM(version)


def known_versions() -> dict[str, tuple[str, ...]]:
    """Return, by backend, the versions that a table describes; others are asked with `--help`."""
    return {"native": (native.VERSION,), "sglang": tuple(sglang_versions.VERSIONS), "vllm": vllm.VERSIONS}


def verdict(config: EngineConfig, machine: Machine) -> tuple[Refusal, ...]:
    """Return every reason not to launch `config` on `machine`: the backend's, the models' and the arithmetic's.

    Model folders are read only when the backend itself has nothing against the config. A policy's drafts may
    name several drafters; each is judged.

    Raises:
        ConfigError: see `get`.
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
