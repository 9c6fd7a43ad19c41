"""The search's proof: 20 seeds on every surface against what others use, and what the search itself costs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.common import RESULTS, ROOT, passing_tests

OUT = RESULTS / "search.json"


def studies() -> dict[str, Any]:
    """`python -m benchmarks.search --full`, resumable: every claim of it."""
    OUT.unlink(missing_ok=True)  # a run that breaks down must not leave an earlier one's claims
    subprocess.run([sys.executable, "-m", "benchmarks.search", "--full", "--json", str(OUT)], cwd=ROOT, check=False)
    document = json.loads(OUT.read_text())
    cells = document["cells"]
    assert cells["done"] == cells["wanted"], f"{cells['done']} of {cells['wanted']} studies are done"
    failing = {name: claim["figure"] for name, claim in document["claims"].items() if not claim["holds"]}
    assert not failing, f"short of what is claimed: {failing}"
    return {name: claim["figure"] for name, claim in document["claims"].items()}


def unit_tests() -> dict[str, Any]:
    """The tests of samplers, races, packing, policies and explanations."""
    files = ("sampling", "test_suggest.py", "test_simulate.py", "test_racing.py", "test_packing.py")
    more = ("test_policy_fit.py", "test_explain.py", "test_optuna_journal.py")
    return passing_tests(*(f"tests/tuner/{name}" for name in (*files, *more)))


STEPS = {"unit tests": unit_tests, "studies": studies}
