"""`python -m benchmarks.search --smoke | --quick | --full --json OUT`: the default sampler against what others use.

Studies are cells of (part, surface, sampler, seed, trials), most telling seeds first, played by `--jobs` processes of
one thread each. Each finished one is kept in OUT's neighbour `.cells.jsonl`, so a run that was stopped goes on where
it was, on another machine too; such files can be put together with `cat`. Exit status 1 when a claim that was judged
does not hold.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import sys
import time
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, command_line
from benchmarks.search.costs import COSTS
from benchmarks.search.pool import play_all
from benchmarks.search.studies import PEERS, Cell
from benchmarks.search.surfaces import HERE, LARGE, RECORDED, SURFACES
from benchmarks.search.verdict import summary, verdicts
from tuner.provenance import collect
from tuner.records import digest

JUDGES = ("brain", "confirm", "outcome", "pick", "points", "simulate")  # what plays and judges, of the tuner
OURS = ("guesses.py", "surrogate.py")  # what only the default sampler runs, of its package
UNUSED = ("process.py",)  # what none runs: a simulated study's brain is in the player's process
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
SMOKED = 6  # seeds: a single study of a surface as noisy as `native_cpu` is luck
COMPARED = 3  # seeds of Optuna's samplers with crashes as constraints, which take long


def smoke() -> Iterator[Cell]:
    """A minute on a loaded machine: a few seeds, two small surfaces, a few samplers."""
    for sampler in ("surrogate", "random", "tpe_fail"):
        for surface in ("native_cpu", "eight_gpus"):
            for seed in range(SMOKED):
                yield Cell("search", surface, sampler, seed, 24)


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
    """Every seed of everything, twice as many where a mean's lower bound is claimed; last Optuna's slow samplers."""
    for seed in range(seeds, 2 * seeds):
        for surface in LARGE:
            yield Cell("search", surface, "surrogate", seed, 60)
    for seed in range(seeds):
        for surface in ("dflash12k", "dflash12k_loud"):
            yield Cell("search", surface, "surrogate", seed, 200)
        for surface in SURFACES:
            for sampler in ("surrogate", *PEERS):
                yield Cell("search", surface, sampler, seed, 60)
        yield from extras(seed)
    for seed in range(min(seeds, COMPARED)):
        for surface in SURFACES:
            for sampler in ("gp", "tpe"):
                yield Cell("search", surface, sampler, seed, 60)


@cache
def version(part: str, surface: str, sampler: str) -> str:
    """Return the identity of what such studies are: those of another search, simulation or table do not count.

    Comments and docstrings are no part of it, nor is code that they do not run.
    """
    files = [ROOT / "tuner" / f"{name}.py" for name in JUDGES]
    files += [HERE / "studies.py", HERE / "surfaces.py"]
    files += [path for path in sorted((ROOT / "tuner" / "sampling").glob("*.py")) if path.name not in (*OURS, *UNUSED)]
    if sampler == "surrogate":
        files += [ROOT / "tuner" / "sampling" / name for name in OURS]
    if part.startswith("racing"):
        files += [ROOT / "tuner" / "racing.py", HERE / "races.py"]
    if part.startswith("prior"):
        files.append(HERE / "priors.py")
    table = [(HERE / f"{surface}.{kind}").read_text() for kind in ("yaml", "jsonl")] if surface in RECORDED else None
    return digest([[bare(path.read_text(encoding="utf-8")) for path in files], table])


def bare(source: str) -> str:
    """Return Python source without comments, docstrings and blank lines: the same text for every version of Python."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        first = node.body[0] if isinstance(node, DOCUMENTED) and node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            for row in range(first.lineno, (first.end_lineno or first.lineno) + 1):
                lines[row - 1] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


def read_cells(path: Path) -> dict[str, dict[str, Any]]:
    """Return finished cells of this code; a torn last line does not count."""
    done: dict[str, dict[str, Any]] = {}
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        document = json.loads(line)
        cell = str(document.pop("cell"))
        part, surface, sampler, *_ = cell.split("/")
        if surface in SURFACES and document.pop("version") == version(part, surface, sampler):
            done[cell] = document
    return done


def free_cores() -> int:
    """Return how many cores nothing runs on just now, at least one."""
    return max(1, len(os.sched_getaffinity(0)) - round(os.getloadavg()[0]))


def main() -> int:
    """Run the cells that are missing, judge, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    for name in ("smoke", "quick", "full"):
        which.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--seeds", type=int, default=20, help="of --full")
    parser.add_argument("--minutes", type=float, default=None, help="stop starting studies after so long")
    parser.add_argument("--no-costs", action="store_true", help="leave out what the search itself costs")
    parser.add_argument("--jobs", type=int, default=free_cores(), help="processes; default: the cores that are free")
    arguments = parser.parse_args()
    mode = "smoke" if arguments.smoke else "quick" if arguments.quick else "full"
    cells = list({"smoke": smoke, "quick": quick, "full": lambda: full(arguments.seeds)}[mode]())
    partial = arguments.json.with_suffix(".cells.jsonl")
    done = read_cells(partial)
    deadline = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    missing = [cell for cell in cells if cell.key not in done]
    with partial.open("a", encoding="utf-8") as file:
        for cell, figures in play_all(missing, max(1, arguments.jobs), deadline):
            done[cell.key] = figures
            made_by = version(cell.part, cell.surface, cell.sampler)
            file.write(json.dumps({"cell": cell.key, "version": made_by} | figures) + "\n")
            file.flush()
            print(f"{cell.key}: {figures['hypervolume'][-1]:.3f} in {figures['cpu_s']} CPU s", flush=True)
    wanted = {cell.key: done[cell.key] for cell in cells if cell.key in done}
    costs = {} if mode == "smoke" or arguments.no_costs else {name: measure() for name, measure in COSTS.items()}
    claims = verdicts(wanted, costs, strict=mode != "smoke")
    document = {
        "schema": 1,
        "provenance": collect(command_line(), seed=0),
        "mode": mode,
        "cells": {
            "wanted": len(cells),
            "done": len(wanted),
            "cpu_minutes": round(sum(figures["cpu_s"] for figures in wanted.values()) / 60, 1),
        },
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
