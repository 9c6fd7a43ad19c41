"""The machine-local file that says which command runs a backend version.

    sglang:
      "0.5.17": {command: [bash, serve-gpu.sh, site.tar.xz], env: {}}

It lies at `$TUNER_BACKENDS` or `~/.config/tuner/backends.yaml`, never in a study: a file from a stranger must
not run programs. The server's options are appended to the command.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from engine.config import expanded, read_yaml
from engine.errors import ConfigError


def _word(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError(f'a word is meant here, so quote it: "{value}"')
    return value


Word = Annotated[str, BeforeValidator(_word), Field(min_length=1)]


class Command(BaseModel):
    """How to start a server: arguments (its options follow) and what is added to the environment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: tuple[Word, ...] = Field(min_length=1)
    env: dict[Word, Annotated[str, BeforeValidator(_word)]] = Field(default_factory=dict)


Commands = dict[str, dict[str, Command]]
_COMMANDS: TypeAdapter[Commands] = TypeAdapter(dict[Word, dict[Word, Command]])


def commands_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the file lies, whether or not it exists."""
    named = environ.get("TUNER_BACKENDS")
    return expanded(named) if named else Path("~/.config/tuner/backends.yaml").expanduser()


def load_commands(path: Path) -> Commands:
    """Read the file as {backend kind: {version: Command}}.

    Raises:
        ConfigError: unreadable, writable by everybody, not YAML, or not of that form.
    """
    document: Any = read_yaml(path)
    if path.stat().st_mode & stat.S_IWOTH:
        raise ConfigError(f"{path}: everybody can write it, and it runs programs; chmod o-w it")
    try:
        return _COMMANDS.validate_python({} if document is None else document)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"] if part != "[key]")
            lines.append(f"{where or 'file'}: {problem['msg'].removeprefix('Value error, ')}")
        raise ConfigError(f"{path}: " + "; ".join(lines)) from error


def find_command(kind: str, version: str | None, environ: Mapping[str, str] = os.environ) -> tuple[str, Command]:
    """Return (version, command) of a backend; `version` None means the only one that is listed.

    Raises:
        ConfigError: no file, no such backend or version, or several versions and none asked for.
    """
    path = commands_file(environ)
    if not path.is_file():
        raise ConfigError(
            f"backend {kind} needs a command: write {path} (or the file named by TUNER_BACKENDS) with "
            f'`{kind}: {{"VERSION": {{command: [PROGRAM, ARGUMENT, …], env: {{}}}}}}`'
        )
    versions = load_commands(path).get(kind, {})
    if not versions:
        raise ConfigError(f"{path}: no command for backend {kind}; add one")
    listed = ", ".join(sorted(versions))
    if version is None and len(versions) > 1:
        raise ConfigError(f"{path}: several versions of {kind} ({listed}); set backend.version to one of them")
    chosen = next(iter(versions)) if version is None else version
    if chosen not in versions:
        raise ConfigError(f"{path}: no command for {kind} {chosen}; listed: {listed}")
    return chosen, versions[chosen]
