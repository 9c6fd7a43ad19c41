"""`python -m benchmarks.search --smoke | --quick | --full --json OUT`: the default sampler against what others use.

Studies are cells of (part, surface, sampler, seed, trials), most telling seeds first; each finished one is kept in
OUT's neighbour `.cells.jsonl`, so a run that was stopped goes on where it was. Exit status 1 when a claim that was
judged does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, command_line
from benchmarks.search.costs import COSTS
from benchmarks.search.studies import PEERS, Cell, run
from benchmarks.search.surfaces import SURFACES
from benchmarks.search.verdict import summary, verdicts
from tuner.provenance import collect
from tuner.records import digest


def smoke() -> Iterator[Cell]:
    """A minute on a loaded machine: one seed, two small surfaces, a few samplers."""
    for sampler in ("surrogate", "random", "tpe_fail"):
        yield Cell("search", "native_cpu", sampler, 0, 24)
        yield Cell("search", "eight_gpus", sampler, 0, 24)


def quick() -> Iterator[Cell]:
    """Ten minutes: two seeds of everything short."""
    for seed in range(2):
        for surface in SURFACES:
            for sampler in ("surrogate", *PEERS):
                yield Cell("search", surface, sampler, seed, 60)
        yield from extras(seed)


def extras(seed: int) -> Iterator[Cell]:
    """Priors and racing."""
    for part in ("prior_right", "prior_wrong"):
        yield Cell(part, "dflash12k", "surrogate", seed, 60)
    for part in ("racing", "racing_off"):
        yield Cell(part, "dflash12k", "surrogate", seed, 60)


def full(seeds: int) -> Iterator[Cell]:
    """Every seed of everything; the long studies last of each seed."""
    for seed in range(seeds):
        for surface in SURFACES:
            for sampler in ("surrogate", *PEERS):
                yield Cell("search", surface, sampler, seed, 60)
        yield from extras(seed)
        for surface in ("dflash12k", "dflash12k_loud"):
            yield Cell("search", surface, "surrogate", seed, 200)
        if seed < 5:
            for sampler in ("gp", "tpe"):
                yield Cell("search", "dflash12k", sampler, seed, 60)


def version() -> str:
    """Return the identity of what is measured: studies of another search or other surfaces do not count."""
    files = [
        *sorted((ROOT / "tuner" / "sampling").glob("*.py")),
        *sorted((ROOT / "benchmarks" / "search").glob("s*.py")),
    ]
    files += [ROOT / "tuner" / name for name in ("brain.py", "confirm.py", "racing.py", "simulate.py")]
    return digest([path.read_text(encoding="utf-8") for path in files])


def read_cells(path: Path, current: str) -> dict[str, dict[str, Any]]:
    """Return finished cells of this version; a torn last line does not count."""
    done: dict[str, dict[str, Any]] = {}
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        document = json.loads(line)
        if document.pop("version") == current:
            done[document.pop("cell")] = document
    return done


def main() -> int:
    """Run the cells that are missing, judge, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    for name in ("smoke", "quick", "full"):
        which.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--seeds", type=int, default=20, help="of --full")
    parser.add_argument("--minutes", type=float, default=None, help="stop starting studies after so long")
    arguments = parser.parse_args()
    mode = "smoke" if arguments.smoke else "quick" if arguments.quick else "full"
    cells = list({"smoke": smoke, "quick": quick, "full": lambda: full(arguments.seeds)}[mode]())
    partial = arguments.json.with_suffix(".cells.jsonl")
    current = version()
    done = read_cells(partial, current)
    deadline = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    with partial.open("a", encoding="utf-8") as file:
        for cell in cells:
            if cell.key in done:
                continue
            if deadline is not None and time.monotonic() > deadline:
                break
            began = time.monotonic()
            figures = run(cell) | {"wall_s": round(time.monotonic() - began, 1)}
            done[cell.key] = figures
            file.write(json.dumps({"cell": cell.key, "version": current} | figures) + "\n")
            file.flush()
            print(f"{cell.key}: {figures['hypervolume'][-1]:.3f} in {figures['wall_s']} s", flush=True)
    wanted = {cell.key: done[cell.key] for cell in cells if cell.key in done}
    costs = {} if mode == "smoke" else {name: measure() for name, measure in COSTS.items()}
    claims = verdicts(wanted, costs, strict=mode != "smoke")
    document = {
        "schema": 1,
        "provenance": collect(command_line(), seed=0),
        "mode": mode,
        "cells": {"wanted": len(cells), "done": len(wanted)},
        "summary": summary(wanted),
        "costs": costs,
        "claims": claims,
    }
    arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for name, claim in claims.items():
        print(f"{'holds' if claim['holds'] else 'FAILS'}  {name}: {claim['figure']} (wanted {claim['wanted']})")
    return 0 if all(claim["holds"] for claim in claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
