"""Which options a server really has: its own `--help`, read once."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import lru_cache

from engine.backends.commands import Command, find_command
from engine.backends.names import one_of
from engine.errors import ConfigError
from engine.estimate import Refusal

HELP_SECONDS = 180.0  # importing a server takes a while
_OPTION = re.compile(r"(?<![\w-])--[a-z0-9][a-z0-9-]*")


def options_in(text: str) -> frozenset[str]:
    """Return the long options that a help text declares: those that begin a line, and their other names."""
    lines = (line.strip() for line in text.splitlines())
    heads = (re.split(r" {3,}", line)[0] for line in lines if line.startswith("-"))
    return frozenset(option for head in heads for option in _OPTION.findall(head))


def options_of(command: Command, question: str = "--help") -> frozenset[str]:
    """Return the options of an installed server by asking it with `question`.

    Raises:
        ConfigError: it cannot be started, does not end in time, fails, or prints no options.
    """
    found = _ask((*command.command, question), tuple(sorted(command.env.items())))
    if isinstance(found, str):
        raise ConfigError(found)
    return found


@lru_cache(maxsize=16)
def _ask(command: tuple[str, ...], env: tuple[tuple[str, str], ...]) -> frozenset[str] | str:
    """Return the options, or why there are none: a failure is kept too, or every point of a plan would wait for it."""
    shown = " ".join(command)
    try:
        answer = subprocess.run(
            command,
            env={**os.environ, **dict(env), "COLUMNS": "200"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=HELP_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"`{shown}` did not end within {HELP_SECONDS:.0f} s; run it by hand to see why"
    except OSError as error:
        return f"`{shown}` cannot be started: {error.strerror}; correct the backends file"
    found = options_in(answer.stdout)
    if answer.returncode or not found:
        said = " ".join((answer.stderr or answer.stdout).split())[-200:]
        return f"`{shown}` gave no options (exit status {answer.returncode}): {said}"
    return found


def lacking(wanted: Iterable[str], available: frozenset[str]) -> tuple[str, ...]:
    """Return which of the wanted options do not exist, in order."""
    return tuple(dict.fromkeys(option for option in wanted if option not in available))


def unmapped(
    kind: str, server: str, version: str, known: tuple[str, ...], wanted: Iterable[str], question: str = "--help"
) -> Iterator[Refusal]:
    """Ask a server of a version that no table describes; yield why it cannot be asked, or which options it lacks.

    `server` is its name for people, `wanted` the options that a config needs.
    """
    try:
        _, command = find_command(kind, version)
        available = options_of(command, question)
    except ConfigError as error:
        reason = f"{server} {version} is unknown here (known: {', '.join(known)}), and cannot be asked: {error}"
        yield Refusal("backend.version", reason)
        return
    if missing := lacking(wanted, available):
        reason = f"{server} {version} is unknown here, and its --help lacks {', '.join(missing)}; use {one_of(known)}"
        yield Refusal("backend.version", reason)
