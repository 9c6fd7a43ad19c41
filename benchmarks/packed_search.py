"""`python -m benchmarks.packed_search`: a study on eight pretended GPUs, and how well it used them.

Leases, placement, exclusive windows and records are the real ones; `nvidia-smi` is a script and workers wait instead
of serving (`tests/tuner/packed.py`), so that two cores can be a box of eight GPUs.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.tuner import packed
from tuner.store import StudyFolder

TRIALS = 16
SCALE = 8.0  # seconds of a worker's unit of time: a load of 18 to 56 s, still short beside a real one
LONGEST = 1.10  # of the least possible, over all batches


def measure(trials: int = TRIALS, scale: float = SCALE, text: str = packed.SPACE) -> dict[str, Any]:
    """Run the study of a space file and return its figures."""
    with tempfile.TemporaryDirectory(prefix="packed-search-") as name:
        folder = Path(name) / "study"
        packed.begin(folder, trials, scale, text)
        with packed.pretended(Path(name) / "smi"):
            packed.search(folder, packed.Silent())
        study, held = StudyFolder(folder), packed.held_in(folder)
        records, state = study.read_trials(), json.loads(study.search.read_text())
        batches, exclusive = state["packing"], (state.get("calibration") or {"exclusive": True})["exclusive"]
    makespan, bound = (sum(batch[key] for batch in batches) for key in ("makespan", "bound"))
    return {
        "trials": len(records),
        "in_order": [record.trial for record in records] == list(range(len(records))),
        "exclusive_windows": exclusive,
        "clashes": len(packed.clashes(held, exclusive=exclusive)),
        "batches": [batch["trials"] for batch in batches],
        "makespan_s": round(makespan, 1),
        "lower_bound_s": round(bound, 1),
        "ratio": round(makespan / bound, 3),
        "one_by_one_s": round(sum(each.end - each.begin for each in held), 1),
    }


def packing() -> dict[str, Any]:
    """Leases never overlap, windows neither, records are in order, and batches take ≤ 1.10 × the least possible."""
    figures = measure()
    assert figures["clashes"] == 0, f"two trials held a GPU or a window at once: {figures}"
    assert figures["in_order"], f"a record is missing: {figures}"
    assert figures["ratio"] <= LONGEST, f"makespan {figures['ratio']} × the lower bound: {figures}"
    return figures


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
