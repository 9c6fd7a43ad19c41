"""`python -m benchmarks.search.record NAME STUDY...`: make finished studies that measured every point a surface.

Writes NAME.yaml and NAME.jsonl beside this file. Several studies of one space are several launches of each point: the
table has their geometric means, and a metric scatters as the launches of a point do, in the mean over points. Of a
single study it scatters as its own intervals tell.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.search.surfaces import HERE, recorded
from tuner.records import TrialRecord, canonical

KEPT = ("ttft_ms_p50", "ttft_ms_p90", "tpot_ms_p50", "output_tok_s", "accept_length")
DIGITS = 5


def main() -> int:
    """Copy the space, put the launches together; check that they make a surface."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of the surface")
    parser.add_argument("studies", type=Path, nargs="+", help="folders with space.yaml and trials.jsonl")
    arguments = parser.parse_args()
    launches: dict[str, list[TrialRecord]] = defaultdict(list)
    for study in arguments.studies:
        for record in kept(study):
            launches[canonical(record.config)].append(record)
    noise = between([each for each in launches.values() if len(each) > 1])
    shutil.copyfile(arguments.studies[0] / "space.yaml", HERE / f"{arguments.name}.yaml")
    with (HERE / f"{arguments.name}.jsonl").open("w", encoding="utf-8") as file:
        for each in launches.values():
            file.write(json.dumps(table_line(each, noise)) + "\n")
    made = recorded(arguments.name)
    failed = sum(row.record.state == "failed" for row in made.table.rows)
    print(f"{arguments.name}: {len(made.table.rows)} of {made.space.size()} points, {failed} of them failed")
    print(f"launches of a point: {sorted({len(each) for each in launches.values()})}, they scatter by {noise}")
    return 0


def kept(study: Path) -> list[TrialRecord]:
    """Return the launches of a study's search that tell of their configuration."""
    lines = (study / "trials.jsonl").read_text(encoding="utf-8").splitlines()
    records = [TrialRecord.model_validate_json(line) for line in lines]
    return [record for record in records if record.role in ("baseline", "search") and not record.blameless]


def table_line(launches: Sequence[TrialRecord], noise: dict[str, float]) -> dict[str, Any]:
    """Return the launches of a point as a line of a table: what searches look at, with its noise, without where logs
    lie. A point that failed once is one that fails."""
    record = next((each for each in launches if each.state == "failed"), launches[0])
    fields = {"schema_", "trial", "role", "state", "config", "seconds"}
    document = record.model_dump(mode="json", by_alias=True, include=fields)
    document["seconds"] = {stage: round(seconds, 1) for stage, seconds in record.seconds.items()}
    failure = record.failure
    document["failure"] = None if failure is None else {"kind": failure.kind, "stage": failure.stage}
    document["levels"] = [
        {
            "concurrency": level.concurrency,
            "metrics": {name: typical(launches, level.concurrency, name) for name in KEPT},
            "n": level.n,
        }
        for level in record.levels
    ]
    document["noise"] = {name: cv for name, cv in (noise or noise_of(record)).items() if name in KEPT}
    return document


def values(launches: Sequence[TrialRecord], concurrency: int, metric: str) -> list[float]:
    """Return what the launches of a point measured, without those that could not tell."""
    levels = [launch.level(concurrency) for launch in launches if launch.state == "measured"]
    found = [level.metrics.get(metric) for level in levels if level is not None]
    return [value for value in found if value is not None]


def typical(launches: Sequence[TrialRecord], concurrency: int, metric: str) -> float | None:
    """Return the geometric mean of what the launches of a point measured, with five significant digits."""
    found = values(launches, concurrency, metric)
    return float(f"{statistics.geometric_mean(found):.{DIGITS}g}") if found else None


def between(points: Sequence[Sequence[TrialRecord]]) -> dict[str, float]:
    """Return how much each metric scatters between launches of the same point: the root of the mean variance of its
    logarithm over all points and loads. Empty where no point has two launches."""
    found: dict[str, float] = {}
    for metric in KEPT:
        of_points = [values(each, level.concurrency, metric) for each in points for level in each[0].levels]
        variances = [statistics.variance(map(math.log, each)) for each in of_points if len(each) > 1]
        if variances and any(variances):
            found[metric] = round(math.sqrt(statistics.mean(variances)), 4)
    return found


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
