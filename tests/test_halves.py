"""The runner of the suite: both halves count, and Ctrl-C ends them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.__main__ import HALVES, ROOT, Half, run
from tests.waiting import alive, wait_until


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start pytest without plugins: faster."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def folder_of(tmp_path: Path, **texts: str) -> tuple[Half, ...]:
    """Write one test file per half."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name, text in texts.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    return tuple(Half(name, (f"test_{name}.py",)) for name in texts)


def test_a_failure_in_either_half_is_shown_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    halves = folder_of(
        tmp_path, one="def test_one(): pass\n", other="def test_other(): assert 1 == 2, 'what went wrong'\n"
    )
    assert run(halves, ["-q"], tmp_path) == 1
    said = capsys.readouterr().out
    assert re.search(r"^ +one \. +\[100%\]$", said, re.MULTILINE)
    assert "what went wrong" in said
    assert said.index("= one =") != said.index("= other =")
    assert run(halves, ["-q", "-k", "one"], tmp_path) == 0  # of the other half, nothing was asked for


def test_ctrl_c_ends_both_halves(tmp_path: Path) -> None:
    hangs = "import os, pathlib, signal\n\ndef test_hangs():\n    pathlib.Path({!r}).write_text(str(os.getpid()))\n"
    texts = {name: hangs.format(name) + "    signal.pause()\n" for name in ("one", "other")}
    halves = folder_of(tmp_path, **texts)
    code = (
        f"import sys; from pathlib import Path; from tests.__main__ import *; sys.exit(run({halves}, [], Path.cwd()))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment) as runner:
        files = [tmp_path / name for name in texts]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), "both hang", 120)
        runner.send_signal(signal.SIGINT)
        assert runner.wait(120) == 130
    assert not any(alive(int(file.read_text())) for file in files)


def test_the_halves_are_the_whole_suite() -> None:
    (tuner, others) = HALVES
    assert others.arguments == ("tests", *(f"--ignore={path}" for path in tuner.arguments))
