"""Policy by load: several drafters in one server, chosen by the number of running requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine import sampling
from engine.drafters.base import Drafter, Proposal
from engine.kv_cache import KVCache, Reservation
from engine.policy import Switch, entry_for

BACKLOG_ROWS = 512


class PolicyDrafter:
    """Delegates each round to the entry in force.

    While speculation is off nobody needs the drafter's context, so the features of committed tokens pile up and
    become context KV in one product: before speculation returns, when a cache slot may change its owner, or when
    there are many. The entries share one draft model, so one learner takes the features in for all.
    """

    def __init__(self, entries: Sequence[Drafter], lasts: Sequence[int | None], learner: Drafter | None) -> None:
        """Delegate to `entries`.

        Args:
            lasts: inclusive end of each entry's range of running requests, None for the last.
            learner: writes the context KV; None where no entry has a use for it.
        """
        self._entries, self._lasts = tuple(entries), tuple(lasts)
        self._learner = learner
        self.rows = max(entry.rows for entry in self._entries)
        self.depth = max(entry.depth for entry in self._entries)
        self.taps = self._learner.taps if self._learner is not None else ()
        self._switch: Switch | None = None
        self._backlog: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def entry(self) -> int:
        """The entry in force."""
        return 0 if self._switch is None else self._switch.entry

    def propose(self, roots: Tensor, places: Reservation, draws: sampling.Batch | None, cache: KVCache) -> Proposal:
        """Return the proposal of the entry in force; see `base.Drafter`."""
        wanted = entry_for(roots.shape[0], self._lasts)
        self._switch = Switch(wanted) if self._switch is None else self._switch.after(wanted)
        entry = self._entries[self.entry]
        if entry.taps:
            self.settle(cache)
        return entry.propose(roots, places, draws, cache)

    def observe(self, features: Tensor | None, positions: Tensor, write: Tensor, cache: KVCache) -> None:
        """Take in committed tokens, now or later."""
        if self._learner is None:
            return
        if features is None:
            raise ValueError("a policy with a drafter needs the target's features")
        self._backlog.append((features, positions, write))
        if self._entries[self.entry].taps or sum(len(part[1]) for part in self._backlog) >= BACKLOG_ROWS:
            self.settle(cache)

    def settle(self, cache: KVCache) -> None:
        """Turn what has piled up into context KV."""
        if self._learner is not None and self._backlog:
            features, positions, write = (torch.cat(parts) for parts in zip(*self._backlog, strict=True))
            self._backlog.clear()
            self._learner.observe(features, positions, write, cache)
