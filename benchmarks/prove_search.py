"""The search's proof: 20 seeds on every surface against what others use, and what the search itself costs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, passing_tests
from benchmarks.packed_search import packing

OUT = RESULTS / "search.json"
CONTROLLER_MB = 200


def studies() -> dict[str, Any]:
    """`python -m benchmarks.search --full`, resumable: every claim of it."""
    command = [sys.executable, "-m", "benchmarks.search", "--full", "--json", str(OUT)]
    done = subprocess.run(command, cwd=ROOT, check=False)
    # Any other status is a run that broke down, and the file an earlier one's.
    assert done.returncode in (0, 1), f"the benchmark ended with status {done.returncode}"
    document = json.loads(OUT.read_text())
    cells = document["cells"]
    assert cells["done"] == cells["wanted"], f"{cells['done']} of {cells['wanted']} studies are done"
    failing = {name: claim["figure"] for name, claim in document["claims"].items() if not claim["holds"]}
    assert not failing, f"short of what is claimed: {failing}"
    return {name: claim["figure"] for name, claim in document["claims"].items()}


def unit_tests() -> dict[str, Any]:
    """The tests of samplers, races, packing, policies and explanations."""
    files = ("sampling", "test_suggest.py", "test_simulate.py", "test_racing.py", "test_packing.py")
    more = ("test_policy_fit.py", "test_explain.py", "test_optuna_journal.py", "test_races.py", "test_search_brain.py")
    return passing_tests(*(f"tests/tuner/{name}" for name in (*files, *more)))


def long_tests() -> dict[str, Any]:
    """What takes too long for every run: trials side by side that overlap, a batch cut by a death, a right guess."""
    return passing_tests("-m", "proof", "tests/tuner/sampling", "tests/tuner/test_packed_search.py")


def controller() -> dict[str, Any]:
    """A real search: the controller's memory at its highest, and whether it ever held torch."""
    most, torch = 0, False
    with tempfile.TemporaryDirectory() as folder:
        words = ["search", "search_spaces/bundled.yaml", "--results", folder, "--trials", "3", "--yes"]
        with subprocess.Popen([sys.executable, "-m", "tuner", *words], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
            here = Path(f"/proc/{process.pid}")
            while process.poll() is None:
                most = max(most, high_water(here))
                torch |= "libtorch" in (here / "maps").read_text()
                time.sleep(0.2)
    assert process.returncode == 0, f"the search ended with status {process.returncode}"
    assert not torch, "the controller loaded torch"
    assert 0 < most <= CONTROLLER_MB * 1024, f"the controller took {most / 1024:.0f} MB"
    return {"controller_mb": round(most / 1024)}


def high_water(process: Path) -> int:
    """Return the most memory that a process has held, KiB; 0 when it has just ended."""
    lines = (process / "status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


STEPS = {
    "unit tests": unit_tests,
    "long tests": long_tests,
    "controller": controller,
    "packing": packing,
    "studies": studies,
}
