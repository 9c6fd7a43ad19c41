"""What the benchmarks share: prompts, provenance, writing results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tuner.provenance import collect

RESULTS = Path(__file__).parent / "results"


def bundled_prompts() -> list[tuple[int, ...]]:
    """Return the bundled workload as token ids."""
    from engine.pair.workload import load_workload

    return [tuple(prompt.token_ids) for prompt in load_workload()]


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result beside what it was measured with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"schema": 1, "provenance": collect(sys.argv, seed=0)} | result
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
