"""Which draft serves how many running requests. Pure.

Speculation pays while the machine has compute to spare; under load its extra rows cost more than they save. A policy
is a table of ranges of running requests. Between two ranges the load flickers, and every switch changes the work of
a round, so the range in force must be left for some rounds before another takes over.
"""

from __future__ import annotations

from dataclasses import dataclass

HOLD_ROUNDS = 4


@dataclass(frozen=True)
class Switch:
    """The entry in force, and for how many rounds in a row the load has wanted another, whichever."""

    entry: int = 0
    rounds: int = 0

    def after(self, wanted: int, hold: int = HOLD_ROUNDS) -> Switch:
        """Return the state after a round whose load wants entry `wanted`: the last wish is the one that is met."""
        if wanted == self.entry:
            return Switch(self.entry)
        return Switch(wanted) if self.rounds + 1 >= hold else Switch(self.entry, self.rounds + 1)


def entry_for(running: int, lasts: tuple[int | None, ...]) -> int:
    """Return the index of the range that holds `running`; `lasts` are the ranges' inclusive ends, None for the last."""
    for index, last in enumerate(lasts):
        if last is None or running <= last:
            return index
    return len(lasts) - 1
