"""Does the drafter still draft? Accept lengths that no draft config explains. Pure.

A fault that breaks the drafter leaves the text exact and takes away what speculation was for. Three signs, none of
which a healthy drafter shows: next to no draft is accepted at all; the same text takes far more rounds beside other
requests than alone; another trial of the study did far better with the same drafter and a smaller draft. What counts
is accepted drafts per verify round, the accept length less the token that every round gives anyway. Each sign needs
rounds enough for three standard errors, so a short text never fails.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.config import DDTreeDraft, DFlashDraft, Draft, EngineConfig, NoDraft, PolicyDraft
from tuner.records import TrialRecord
from tuner.reference import Peer

NEXT_TO_NONE = 0.25  # accepted drafts a round, below which no drafter pays for itself
LEAST_ROUNDS = 32
SHARE = 0.5  # of what was seen elsewhere; less is far below
SIGMAS = 3.0


@dataclass(frozen=True)
class Rounds:
    """Verify rounds of some generations, and the drafts accepted in them."""

    count: int = 0
    accepted: float = 0.0

    @staticmethod
    def of(accept_length: float | None, verify_count: int | None) -> Rounds:
        """Return the rounds of one request; none when the server does not say."""
        if accept_length is None or not verify_count:
            return Rounds()
        return Rounds(verify_count, max(0.0, (accept_length - 1) * verify_count))

    def __add__(self, other: Rounds) -> Rounds:
        return Rounds(self.count + other.count, self.accepted + other.accepted)

    @property
    def rate(self) -> float:
        """Accepted drafts a round."""
        return self.accepted / self.count if self.count else 0.0

    @property
    def highest_rate(self) -> float:
        """The rate that is three standard errors above, an accepted draft being a rare event."""
        return (self.accepted + SIGMAS * math.sqrt(self.accepted + 1)) / self.count if self.count else math.inf


def total(rounds: Iterable[Rounds]) -> Rounds:
    """Return all rounds together."""
    return sum(rounds, Rounds())


@dataclass(frozen=True)
class Seen:
    """What the gate saw: the request that ran alone, all requests, and of the text that ran both ways its rounds
    alone and in the batch (None when the texts differ)."""

    alone: Rounds
    every: Rounds
    twice: tuple[Rounds, Rounds] | None = None


def collapse(config: EngineConfig, seen: Seen, peer: Peer | None = None) -> str:
    """Return why the acceptance is that of a broken drafter, or nothing."""
    judged = seen.every if all(speculates(draft) for draft in config.drafts) else Rounds()
    if not judged.count and speculates(_alone(config.draft)):
        judged = seen.alone  # a policy that stops speculating under load
    if judged.count >= LEAST_ROUNDS and judged.highest_rate < NEXT_TO_NONE:
        return f"{judged.accepted:.0f} drafted tokens were accepted in {judged.count} verify rounds"
    if seen.twice is not None and not isinstance(config.draft, PolicyDraft):
        alone, together = seen.twice
        if min(alone.count, together.count) >= LEAST_ROUNDS / 2 and _far_below(together, alone.rate):
            return (
                f"the same text has {together.rate:.2f} accepted drafts a round beside other requests "
                f"and {alone.rate:.2f} alone"
            )
    if peer is not None and judged.count >= LEAST_ROUNDS and _far_below(judged, peer.accept_length - 1):
        return (
            f"accept length {1 + judged.rate:.2f}, where trial {peer.trial} has {peer.accept_length:.2f} "
            "with the same drafter and a smaller draft"
        )
    return ""


def _far_below(rounds: Rounds, rate: float) -> bool:
    return rounds.highest_rate < rate * SHARE


def speculates(draft: Draft) -> bool:
    """Whether a draft proposes tokens in every round; `nodes: auto` may choose none."""
    return isinstance(draft, DFlashDraft) and not (isinstance(draft, DDTreeDraft) and draft.nodes == "auto")


def _alone(draft: Draft) -> Draft:
    """Return the draft that serves one request."""
    return draft.by_running[0][2] if isinstance(draft, PolicyDraft) else draft


def peer_of(records: Sequence[TrialRecord], config: EngineConfig) -> Peer | None:
    """Return the trial that `config` must not fall far below: the best of those with the same drafter and no more of
    anything, judged by the same texts.
    """
    found = []
    for record in records:
        parity = record.parity
        if parity is None or parity.verdict != "passed" or parity.accept_length is None:
            continue
        smaller = EngineConfig.model_validate(record.config)
        same = smaller.model == config.model and smaller.backend.kind == config.backend.kind
        if same and no_more(smaller.draft, config.draft):
            found.append(Peer(trial=record.trial, accept_length=parity.accept_length))
    return max(found, key=lambda peer: peer.accept_length, default=None)


def no_more(smaller: Draft, draft: Draft) -> bool:
    """Whether a draft has the same drafter as another, and no more block, layers, nodes or width."""
    if not (speculates(smaller) and speculates(draft)):
        return False
    if isinstance(smaller, NoDraft | PolicyDraft) or isinstance(draft, NoDraft | PolicyDraft):
        return False
    if (smaller.model, smaller.window) != (draft.model, draft.window) or smaller.block_size > draft.block_size:
        return False
    if (smaller.layers or math.inf) > (draft.layers or math.inf):
        return False
    if not isinstance(draft, DDTreeDraft):
        return not isinstance(smaller, DDTreeDraft)
    nodes = draft.nodes if isinstance(draft.nodes, int) else 0
    if not isinstance(smaller, DDTreeDraft):
        return nodes >= smaller.block_size - 1
    return (
        isinstance(smaller.nodes, int)
        and smaller.nodes <= nodes
        and (smaller.width or math.inf) <= (draft.width or math.inf)
    )
