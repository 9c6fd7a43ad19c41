"""One simulated study each: as it is, with a prior, raced. A `Cell` names it, so that finished ones can be skipped."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from benchmarks.search.priors import guessing
from benchmarks.search.races import raced
from benchmarks.search.surfaces import SURFACES
from tuner.points import front_of, points_of
from tuner.records import canonical
from tuner.sampling import SAMPLERS
from tuner.simulate import Game

PEERS = ("random", "sobol", "nsga2", "tpe_fail", "grid", "hill")


@dataclass(frozen=True)
class Cell:
    """One study: what is shown (`part`), on which surface, by whom, with which seed, of how many launches."""

    part: str
    surface: str
    sampler: str
    seed: int
    trials: int

    @property
    def key(self) -> str:
        """Its name in the results."""
        return "/".join(str(value) for value in asdict(self).values())


@cache
def game(surface: str) -> Game:
    """Return a surface, prepared."""
    made = SURFACES[surface]()
    return Game.of(made.space, made.table)


def run(cell: Cell) -> dict[str, Any]:
    """Return a cell's figures."""
    if cell.part.startswith("racing"):
        return raced(game(cell.surface), cell.seed, cell.trials, race=cell.part == "racing")
    played_on = game(cell.surface)
    if cell.part in ("prior_right", "prior_wrong"):
        played_on = replace(played_on, pool=guessing(played_on, wrong=cell.part == "prior_wrong", seed=cell.seed))
    played = played_on.play(SAMPLERS[cell.sampler], cell.seed, cell.trials)
    failed = {canonical(record.config) for record in played.records if record.state == "failed"}
    file = played_on.space.file
    front = front_of(points_of(played.records, file.constraints), file.objectives)
    return {
        "hypervolume": [round(share, 4) for share in played.hypervolume],
        "crashes": list(played.crashes),
        "crash_repeats": played.crash_repeats,
        "regret": round(played.regret, 5),
        "covered": played.covered,
        "recommended_failed": played.chosen is not None and played.chosen.record.state == "failed",
        "failed_on_front": sum(canonical(point.config) in failed for point in front),
    }
