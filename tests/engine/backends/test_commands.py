"""The machine-local file of commands: found, validated, and never trusted when others can write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.backends import Command, commands_file, find_command, load_commands
from engine.errors import ConfigError

GOOD = """
sglang:
  "0.5.17": {command: [bash, serve-gpu.sh, site.tar.xz], env: {A: "1"}}
  "0.5.23": {command: [sglang, serve]}
vllm:
  "0.33.0": {command: [vllm, serve]}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "backends.yaml"
    path.write_text(GOOD)
    return path


def test_reads_commands(file: Path) -> None:
    found = load_commands(file)
    assert found["sglang"]["0.5.17"] == Command(command=("bash", "serve-gpu.sh", "site.tar.xz"), env={"A": "1"})
    assert found["vllm"]["0.33.0"].env == {}


def test_the_environment_says_where_it_lies(file: Path) -> None:
    assert commands_file({"TUNER_BACKENDS": str(file)}) == file
    assert commands_file({}) == Path.home() / ".config" / "tuner" / "backends.yaml"


def test_finds_the_version(file: Path) -> None:
    environ = {"TUNER_BACKENDS": str(file)}
    assert find_command("vllm", None, environ)[0] == "0.33.0"
    assert find_command("sglang", "0.5.23", environ)[1].command == ("sglang", "serve")


@pytest.mark.parametrize(
    ("kind", "version", "words"),
    [
        ("sglang", None, r"several versions of sglang \(0.5.17, 0.5.23\)"),
        ("sglang", "0.4", "no command for sglang 0.4; listed: 0.5.17, 0.5.23"),
        ("other", None, "no command for backend other"),
    ],
)
def test_says_what_is_missing(file: Path, kind: str, version: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_command(kind, version, {"TUNER_BACKENDS": str(file)})


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"write .*absent.yaml"):
        find_command("sglang", None, {"TUNER_BACKENDS": str(tmp_path / "absent.yaml")})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sglang: [", "not YAML"),
        ("- 1", "file: "),
        ("sglang: {0.5: {command: [a]}}", 'sglang.0.5: a word is meant here, so quote it: "0.5"'),
        ('sglang: {"1": {command: []}}', "sglang.1.command"),
        ('sglang: {"1": {}}', "sglang.1.command"),
        ('sglang: {"1": {command: a b}}', "sglang.1.command"),
        ('sglang: {"1": {command: [a], cwd: /}}', "sglang.1.cwd"),
        ('sglang: {"1": {command: [a], env: {B: 1}}}', "sglang.1.env.B: a word is meant"),
        ('sglang: {"1": {command: [a, off]}}', "sglang.1.command.1: a word is meant"),
        ("sglang: off", "sglang"),
    ],
)
def test_a_bad_file_names_the_place(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "backends.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_commands(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_file_holds_no_commands(tmp_path: Path) -> None:
    path = tmp_path / "backends.yaml"
    path.write_text("# nothing yet\n")
    assert load_commands(path) == {}


def test_a_file_that_everybody_can_write_runs_nothing(file: Path) -> None:
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="chmod o-w"):
        load_commands(file)
