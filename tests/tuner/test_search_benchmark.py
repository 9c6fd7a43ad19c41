"""`python -m benchmarks.search --smoke`: it runs, goes on where it stopped, and its claims hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.search.__main__ import bare, version

ROOT = Path(__file__).parents[2]


def test_the_smoke_run_holds_its_claims_and_resumes(tmp_path: Path) -> None:
    out = tmp_path / "search.json"
    command = [sys.executable, "-m", "benchmarks.search", "--smoke", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    assert document["cells"]["done"] == document["cells"]["wanted"] == 36
    assert all(claim["holds"] for claim in document["claims"].values())
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert again.returncode == 0
    assert " in " not in again.stdout.split("holds")[0]  # no study was played again


def test_a_study_is_told_by_the_code_that_it_runs_and_not_by_its_comments() -> None:
    code = 'def f():\n    """Say."""\n    return "#"  # a sign\n'
    assert bare(code) == 'def f():\n    return "#"'
    ours, theirs = version("search", "eight_gpus", "surrogate"), version("search", "eight_gpus", "random")
    assert ours != theirs
    assert version("search", "eight_gpus", "tpe") == theirs
    assert version("racing", "eight_gpus", "surrogate") != ours
