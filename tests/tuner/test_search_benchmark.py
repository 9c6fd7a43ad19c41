"""`python -m benchmarks.search --smoke`: it runs, goes on where it stopped, and its claims hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_smoke_run_holds_its_claims_and_resumes(tmp_path: Path) -> None:
    out = tmp_path / "search.json"
    command = [sys.executable, "-m", "benchmarks.search", "--smoke", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    assert document["cells"]["done"] == document["cells"]["wanted"] == 6
    assert all(claim["holds"] for claim in document["claims"].values())
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert again.returncode == 0
    assert " in " not in again.stdout.split("holds")[0]  # no study was played again
