"""From cells to figures and claims."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.search.studies import PEERS
from benchmarks.search.surfaces import LARGE, SURFACES
from tuner.load.intervals import student

Cells = Mapping[str, Mapping[str, Any]]
QUIET = ("dflash12k", "rough12k", "eight_gpus")  # 3 % noise
AT = (15, 25, 40, 60, 100, 150, 200)


def of(cells: Cells, part: str, surface: str | None, sampler: str, trials: int) -> list[Mapping[str, Any]]:
    """Return the cells of one kind, in the order of their seeds."""
    found = []
    for key, figures in cells.items():
        one, where, who, seed, count = key.split("/")
        if (one, who, int(count)) == (part, sampler, trials) and surface in (None, where):
            found.append((int(seed), figures))
    return [figures for _, figures in sorted(found, key=lambda pair: pair[0])]


def at(curve: list[float], number: int) -> float:
    """Return a curve's value after so many launches; one that ended earlier stays where it was."""
    return curve[min(number, len(curve)) - 1]


def lower_bound(values: list[float]) -> float:
    """Return the lower end of the 95 % interval of the mean (two-sided Student)."""
    n = len(values)
    if n < 2:
        return float("-inf")
    return statistics.mean(values) - student(n - 1) * statistics.stdev(values) / math.sqrt(n)


def summary(cells: Cells) -> dict[str, Any]:
    """Return means by part, surface, sampler and length."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for key, figures in cells.items():
        part, surface, sampler, _, trials = key.split("/")
        groups.setdefault(f"{part}/{surface}/{sampler}/{trials}", []).append(figures)
    return {name: _means(rows, int(name.rsplit("/", 1)[1])) for name, rows in groups.items()}


def _means(rows: list[Mapping[str, Any]], trials: int) -> dict[str, Any]:
    made: dict[str, Any] = {"seeds": len(rows)}
    if "seconds" in rows[0]:
        made["hypervolume"] = _mean([row["hypervolume"][-1] for row in rows])
        made["seconds"] = _mean([row["seconds"] for row in rows])
        made["regret"] = _mean([row["regret"] for row in rows])
        return made
    made["hypervolume"] = {str(n): _mean([at(row["hypervolume"], n) for row in rows]) for n in AT if n <= trials}
    made["lower_bound"] = round(lower_bound([row["hypervolume"][-1] for row in rows]), 4) if len(rows) > 1 else None
    made["crashes"] = _mean([row["crashes"][-1] for row in rows])
    made["crash_repeats"] = sum(row["crash_repeats"] for row in rows)
    made["regret"] = {"mean": _mean([row["regret"] for row in rows]), "max": max(row["regret"] for row in rows)}
    made["covered"] = _mean([float(row["covered"]) for row in rows])
    return made


def _mean(values: list[float]) -> float:
    return round(statistics.mean(values), 4)


def verdicts(cells: Cells, costs: Mapping[str, Any], *, strict: bool) -> dict[str, dict[str, Any]]:
    """Return {claim: {figure, wanted, holds}}; without `strict` only what a few seeds can show."""
    claims: dict[str, dict[str, Any]] = {}

    def claim(name: str, figure: float, wanted: str, holds: bool) -> None:
        claims[name] = {"figure": round(float(figure), 4), "wanted": wanted, "holds": bool(holds)}

    ours = [f for key, f in cells.items() if key.split("/")[0] == "search" and key.split("/")[2] == "surrogate"]
    claim(
        "repeats of a known crash",
        sum(f["crash_repeats"] for f in ours),
        "0",
        not any(f["crash_repeats"] for f in ours),
    )
    failed = sum(f["recommended_failed"] for f in ours)
    claim("crashes recommended", failed, "0", failed == 0)
    failed = sum(f["failed_on_front"] for f in ours)
    claim("crashes on a front", failed, "0", failed == 0)
    if not strict:
        for surface in ("native_cpu", "eight_gpus"):
            mine, random = (
                statistics.mean(row["hypervolume"][-1] for row in of(cells, "search", surface, who, 24))
                for who in ("surrogate", "random")
            )
            claim(f"{surface}: at least random's hypervolume", mine - random, "≥ −0.02", mine >= random - 0.02)
        return claims
    for surface in SURFACES:
        _reached(cells, surface, claim)
    _long(cells, claim)
    _guided(cells, claim)
    _raced(cells, claim)
    _costs(costs, claim)
    return claims


def _reached(cells: Cells, surface: str, claim: Any) -> None:
    """Hypervolume and crashes of 60 launches. 0.97 is claimed of large spaces; of each, that nobody does better."""
    rows = of(cells, "search", surface, "surrogate", 60)
    if not rows:
        return
    shares = [row["hypervolume"][-1] for row in rows]
    if surface in LARGE:
        bound = lower_bound(shares)
        claim(f"{surface}: hypervolume at 60, lower bound", bound, "≥ 0.97", bound >= 0.97)
    theirs = [[row["hypervolume"][-1] for row in of(cells, "search", surface, peer, 60)] for peer in PEERS]
    best = max((statistics.mean(peer) for peer in theirs if peer), default=0.0)
    lead = statistics.mean(shares) - best
    claim(f"{surface}: hypervolume at 60 ahead of the best peer's", lead, "≥ 0", lead >= 0)
    crashes = statistics.mean(row["crashes"][-1] for row in rows) / 60
    claim(f"{surface}: crashes of the first 60", crashes, "≤ 0.10", crashes <= 0.10)


def _long(cells: Cells, claim: Any) -> None:
    for surface in QUIET:
        for trials, limit in ((60, 0.03), (200, 0.01)):
            rows = of(cells, "search", surface, "surrogate", trials)
            if rows:
                share = statistics.mean(float(row["regret"] <= limit) for row in rows)
                claim(f"{surface}: regret ≤ {limit:.0%} at {trials}", share, "≥ 0.95 of studies", share >= 0.95)
    rows = [row for n in (60, 200) for row in of(cells, "search", "dflash12k_loud", "surrogate", n)]
    if rows:
        share = statistics.mean(float(row["covered"]) for row in rows)
        claim("dflash12k_loud: interval covers", share, "≥ 0.93 of studies", share >= 0.93)
    rows = of(cells, "search", "dflash12k", "surrogate", 200)
    if rows:
        share = statistics.mean(at(row["crashes"], 150) / 150 for row in rows)
        claim("dflash12k: crashes by 150", share, "≤ 0.06", share <= 0.06)


def first_reach(curve: list[float], share: float = 0.97) -> int:
    """Return after how many launches a share was reached; one more than there were where it was not."""
    return next((number for number, value in enumerate(curve, 1) if value >= share), len(curve) + 1)


def _guided(cells: Cells, claim: Any) -> None:
    plain = [first_reach(row["hypervolume"]) for row in of(cells, "search", "dflash12k", "surrogate", 60)]
    right = [first_reach(row["hypervolume"]) for row in of(cells, "prior_right", "dflash12k", "surrogate", 60)]
    wrong = [row["hypervolume"][-1] for row in of(cells, "prior_wrong", "dflash12k", "surrogate", 60)]
    shares = [row["hypervolume"][-1] for row in of(cells, "search", "dflash12k", "surrogate", 60)]
    if plain and right:
        saved = 1 - float(np.mean(right)) / float(np.mean(plain))
        claim("a right prior saves trials to 0.97", saved, "≥ 0.30", saved >= 0.30)
    if wrong and shares:
        lost = 1 - statistics.mean(wrong) / statistics.mean(shares)
        claim("a prior wrong by 4.6× costs hypervolume at 60", lost, "≤ 0.05", lost <= 0.05)


def _raced(cells: Cells, claim: Any) -> None:
    raced, plain = (of(cells, part, "dflash12k", "surrogate", 60) for part in ("racing", "racing_off"))
    if raced and plain:
        saved = 1 - sum(row["seconds"] for row in raced) / sum(row["seconds"] for row in plain)
        lost = statistics.mean(row["hypervolume"][-1] for row in plain) - statistics.mean(
            row["hypervolume"][-1] for row in raced
        )
        claim("racing saves measured seconds", saved, "≥ 0.60", saved >= 0.60)
        claim("racing costs hypervolume", lost, "≤ 0.01", lost <= 0.01)


def _costs(costs: Mapping[str, Any], claim: Any) -> None:
    for name, limit in (("surrogate", 2.0), ("gp", 2.0), ("tpe", 0.05)):
        if name in costs:
            seconds = costs[name]["median_s"]
            claim(f"{name}: ask and tell at 200, s", seconds, f"< {limit}", seconds < limit)
    if "surrogate" in costs:
        claim("sampler process MB", costs["surrogate"]["rss_mb"], "≤ 600", costs["surrogate"]["rss_mb"] <= 600)
    if "packing" in costs:
        worst = max(figures["max"] for figures in costs["packing"].values())
        claim("packing: longest makespan over the bound", worst, "≤ 1.10", worst <= 1.10)
        broken = sum(figures["conflicts"] for figures in costs["packing"].values())
        claim("packing: GPUs or windows held twice", broken, "0", broken == 0)
