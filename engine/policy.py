"""Which draft serves how many running requests. Pure.

Speculation pays while the machine has compute to spare; under load its extra rows cost more than they save. A policy
is a table of ranges of running requests. Between two ranges the load flickers, and every switch changes the work of
a round, so a new range must hold for some rounds before it takes over.
"""

from __future__ import annotations

from dataclasses import dataclass

HOLD_ROUNDS = 4


@dataclass(frozen=True)
class Switch:
    """The entry in force, and the one that would replace it if it held long enough."""

    entry: int = 0
    candidate: int = 0
    rounds: int = 0

    def after(self, wanted: int, hold: int = HOLD_ROUNDS) -> Switch:
        """Return the state after a round whose load wants entry `wanted`."""
        if wanted == self.entry:
            return Switch(self.entry, self.entry, 0)
        rounds = self.rounds + 1 if wanted == self.candidate else 1
        return Switch(wanted, wanted, 0) if rounds >= hold else Switch(self.entry, wanted, rounds)


def entry_for(running: int, lasts: tuple[int | None, ...]) -> int:
    """Return the index of the range that holds `running`; `lasts` are the ranges' inclusive ends, None for the last."""
    for index, last in enumerate(lasts):
        if last is None or running <= last:
            return index
    return len(lasts) - 1
