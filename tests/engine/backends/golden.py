"""Golden command lines: a file for each backend version and configuration, an option with its values a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import backends
from engine.backends import shallow
from engine.config import PAIR, EngineConfig

FOLDER = Path(__file__).parents[2] / "data" / "golden"
FLAGS = Path(__file__).parents[2] / "data" / "flags"
BACKENDS = """
sglang:
  "0.5.17": {command: [sglang, serve]}
  "0.5.23": {command: [sglang, serve]}
vllm:
  "0.33.0": {command: [vllm, serve]}
"""


@pytest.fixture
def machine_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Name a backends file that lists every known version, and keep generated drafters in the test's folder."""
    path = tmp_path / "backends.yaml"
    path.write_text(BACKENDS, encoding="utf-8")
    monkeypatch.setenv("TUNER_BACKENDS", str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


def argv_text(config: EngineConfig) -> str:
    """Return a config's command, environment first, with this machine's folders replaced by words."""
    launch = backends.get(config).command(config, Path("config.yaml"), "127.0.0.1", 31000)
    lines = [f"{name}={value}" for name, value in sorted(launch.env.items())] + [launch.argv[0]]
    for word in launch.argv[1:]:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    text = "\n".join(lines) + "\n"
    return text.replace(str(shallow.cache_folder()), "CACHE").replace(str(PAIR), "PAIR")


def options_used(config: EngineConfig) -> list[str]:
    """Return the option names of a config's command."""
    launch = backends.get(config).command(config, Path("config.yaml"), "127.0.0.1", 31000)
    return [word for word in launch.argv if word.startswith("--")]


def known_options(name: str) -> frozenset[str]:
    """Return the options that a version's own parser has, as recorded."""
    return frozenset((FLAGS / f"{name}.txt").read_text(encoding="utf-8").split())
