"""`python -m benchmarks.proof NAME`: the full counts of one part's proof, resumable, written to benchmarks/proofs/.

A proof is a list of named steps. Each finished step is kept with the commit it ran on; a rerun on the same commit
skips what has passed, so an interrupted proof goes on where it stopped. Exit status 1 when a step failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import command_line
from tuner.provenance import collect, git_state

PROOFS = Path(__file__).parent / "proofs"
ROOT = Path(__file__).parent.parent
Step = Callable[[], dict[str, Any]]  # returns its figures; raises AssertionError when the claim does not hold


def run(name: str, steps: dict[str, Step], only: list[str], fresh: bool) -> bool:
    """Run the steps that have not passed on this commit; return whether all have."""
    path = PROOFS / f"{name}.json"
    commit = (git_state(ROOT) or {}).get("commit")
    document: dict[str, Any] = json.loads(path.read_text()) if path.exists() and not fresh else {}
    done: dict[str, Any] = document.get("steps", {})
    for title, step in steps.items():
        if only and title not in only:
            continue
        before = done.get(title, {})
        if before.get("passed") and before.get("commit") == commit and not only:
            print(f"{title}: passed before on this commit")
            continue
        began = time.monotonic()
        try:
            figures: dict[str, Any] = step()
            outcome: dict[str, Any] = {"passed": True, "figures": figures}
        except AssertionError as error:
            outcome = {"passed": False, "reason": str(error)}
        outcome |= {"commit": commit, "seconds": round(time.monotonic() - began, 1)}
        done[title] = outcome
        print(
            f"{title}: {'passed' if outcome['passed'] else 'FAILED'} in {outcome['seconds']} s: "
            + json.dumps(outcome.get("figures", outcome.get("reason")))
        )
        _write(path, name, done)
    return all(done.get(title, {}).get("passed") for title in steps)


def _write(path: Path, name: str, steps: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    document = {
        "schema": 1,
        "proof": name,
        "command": f"make proof-{name}",
        "provenance": collect(command_line(), seed=0),
        "passed": all(step["passed"] for step in steps.values()),
        "steps": steps,
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def main() -> int:
    """Run one proof by name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--only", nargs="*", default=[], help="run just these steps")
    parser.add_argument("--fresh", action="store_true", help="forget earlier runs")
    arguments = parser.parse_args()
    module = importlib.import_module(f"benchmarks.prove_{arguments.name}")
    return 0 if run(arguments.name, module.STEPS, arguments.only, arguments.fresh) else 1


if __name__ == "__main__":
    sys.exit(main())
