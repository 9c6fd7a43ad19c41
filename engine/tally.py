"""Sums of what the steps did: the counters of /server_info. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.protocol import Acceptance, Rounds
from engine.speculate import StepOutput


@dataclass
class Tally:
    """Adds up `speculate.Work`.

    `target_kv_bytes`, `draft_kv_bytes`: bytes of one cached token, all layers.
    """

    target_kv_bytes: int
    draft_kv_bytes: int
    _drafted: int = 0
    _depth: int = 0
    _sums: dict[str, float] = field(default_factory=dict)
    _by_position: list[int] = field(default_factory=list)

    def add(self, output: StepOutput, tokens: int) -> None:
        """Count one step that gave clients `tokens` new tokens."""
        work = output.work
        context = work.context_rows if self.draft_kv_bytes else 0
        for name, value in {
            "rounds": int(work.requests > 0),
            "graph_rounds": int(work.captured and work.requests > 0),
            "requests": work.requests,
            "target_rows": work.target_rows,
            "draft_rows": work.draft.rows,
            "context_rows": context,
            "target_kv_rows_written": work.target_rows,
            "draft_kv_rows_written": work.draft.rows + context,
            "target_kv_bytes_read": work.target_kv_rows_read * self.target_kv_bytes,
            "draft_kv_bytes_read": work.draft.kv_rows_read * self.draft_kv_bytes,
            "prefill_steps": int(work.prefill_rows > 0),
            "prefill_rows": work.prefill_rows,
            "tokens": tokens,
            "seconds_prefill": work.seconds[0] if work.prefill_rows else 0.0,
            "seconds_propose": work.seconds[1],
            "seconds_forward": work.seconds[2],
            "seconds_accept": work.seconds[3],
            "seconds_commit": work.seconds[4],
        }.items():
            self._sums[name] = self._sums.get(name, 0) + value
        self._drafted += work.depth * work.requests
        self._depth = max(self._depth, work.depth)
        for accepted in work.accepted:
            if accepted >= len(self._by_position):
                self._by_position += [0] * (accepted + 1 - len(self._by_position))
            self._by_position[accepted] += 1

    @property
    def rounds(self) -> Rounds:
        """Counters so far."""
        return Rounds.model_validate(self._sums)

    @property
    def acceptance(self) -> Acceptance:
        """Acceptance so far; its lengths are null before the first round and without speculation."""
        verified = sum(self._by_position)
        if not self._drafted:
            return Acceptance(verify_count=verified)
        accepted = sum(count * length for length, count in enumerate(self._by_position))
        reached = [sum(self._by_position[position:]) / verified for position in range(1, self._depth + 1)]
        return Acceptance(
            accept_length=1 + accepted / verified,
            accept_rate=accepted / self._drafted,
            verify_count=verified,
            drafted=self._drafted,
            accepted=accepted,
            by_position=tuple(reached),
        )
