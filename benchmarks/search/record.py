"""`python -m benchmarks.search.record STUDY NAME`: make a finished study that measured every point a surface.

Writes NAME.yaml and NAME.jsonl beside this file. What a metric scatters is taken from the study's own intervals.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.search.surfaces import HERE, recorded
from tuner.records import TrialRecord

KEPT = ("ttft_ms_p50", "ttft_ms_p90", "tpot_ms_p50", "output_tok_s", "accept_length")


def main() -> int:
    """Copy the space and the launches; check that they make a surface."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", type=Path, help="folder with space.yaml and trials.jsonl")
    parser.add_argument("name", help="of the surface")
    arguments = parser.parse_args()
    lines = (arguments.study / "trials.jsonl").read_text(encoding="utf-8").splitlines()
    records = [TrialRecord.model_validate_json(line) for line in lines]
    kept = [record for record in records if record.role in ("baseline", "search") and not record.blameless]
    shutil.copyfile(arguments.study / "space.yaml", HERE / f"{arguments.name}.yaml")
    with (HERE / f"{arguments.name}.jsonl").open("w", encoding="utf-8") as file:
        for record in kept:
            file.write(json.dumps(table_line(record)) + "\n")
    made = recorded(arguments.name)
    failed = sum(row.record.state == "failed" for row in made.table.rows)
    print(f"{arguments.name}: {len(made.table.rows)} of {made.space.size()} points, {failed} of them failed")
    return 0


def table_line(record: TrialRecord) -> dict[str, Any]:
    """Return a record as a line of a table: what searches look at, with its noise, without where its logs lie."""
    kept = {"schema_", "trial", "role", "state", "config", "seconds"}
    document = record.model_dump(mode="json", by_alias=True, include=kept)
    document["seconds"] = {stage: round(seconds, 1) for stage, seconds in record.seconds.items()}
    failure = record.failure
    document["failure"] = None if failure is None else {"kind": failure.kind, "stage": failure.stage}
    document["levels"] = [
        {
            "concurrency": level.concurrency,
            "metrics": {name: rounded(level.metrics.get(name)) for name in KEPT},
            "intervals": {k: [rounded(end) for end in v] for k, v in level.intervals.items() if k in KEPT},
            "n": level.n,
        }
        for level in record.levels
    ]
    document["noise"] = {name: cv for name, cv in noise_of(record).items() if name in KEPT}
    return document


def rounded(value: float | None) -> float | None:
    """Return a value with five significant digits."""
    return None if value is None else float(f"{value:.5g}")


def noise_of(record: TrialRecord) -> dict[str, float]:
    """Return the coefficient of variation of every metric that has intervals, the median over the levels."""
    found: dict[str, list[float]] = {}
    for level in record.levels:
        for name in level.intervals:
            value = level.metrics.get(name)
            if value:
                found.setdefault(name, []).append(level.deviation(name) / abs(value))
    return {name: round(statistics.median(each), 4) for name, each in found.items() if statistics.median(each) > 0}


if __name__ == "__main__":
    sys.exit(main())
