"""The engine loop: schedule, step, apply. One iteration serves every running request by one round."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from engine.config import Draft, PolicyDraft
from engine.drafters.policy import PolicyDrafter
from engine.request import Request
from engine.runtime import Runtime, resolve_draft, traffic_errors
from engine.scheduler import Progress
from engine.speculate import step
from engine.tally import Tally


@dataclass(frozen=True)
class Stats:
    """What `wire.Info` carries."""

    running: int
    waiting: int
    tokens_used: int
    rounds: dict[str, float]
    acceptance: dict[str, object]
    policy_entry: int | None


class Loop:
    """Requests in, progress out; owns the scheduler and keeps the cache in step with it."""

    def __init__(self, runtime: Runtime) -> None:
        self._engine, self._kit, self._plan = runtime.engine, runtime.kit, runtime.plan
        self._draft = runtime.plan.config.draft
        self._scheduler = runtime.scheduler()
        longest = self._plan.longest + self._plan.config.reserved_rows
        self._capacity = min(self._engine.cache.pages * self._engine.cache.page_size, longest)
        self._tally = Tally(
            target_kv_bytes=_pool_bytes(self._engine.cache.target),
            draft_kv_bytes=_pool_bytes(self._engine.cache.draft),
        )

    def submit(self, request: Request) -> str | None:
        """Queue a request; return why it can never run, if so."""
        needed = self._scheduler.tokens_for(request)
        if needed > self._capacity:
            return (
                f"the request may need {needed} cached tokens, the server has {self._capacity}; "
                "lower max_tokens or raise memory.kv_tokens or model.max_len"
            )
        self._scheduler.submit(request)
        return None

    def cancel(self, request: int) -> None:
        """Forget a request, running or waiting or already over."""
        if self._scheduler.cancel(request):
            self._engine.cache.release(request)

    def set_draft(self, draft: Draft) -> Draft:
        """Use another draft from the next round on; running requests keep their text and their cache.

        Returns:
            The draft with every choice made.

        Raises:
            ConfigError: the draft needs more than this server was started with.
        """
        draft = resolve_draft(draft, self._kit.layers)
        drafter = self._kit.make(draft)
        self._engine.drafter.settle(self._engine.cache)
        self._engine, self._draft = replace(self._engine, drafter=drafter), draft
        return draft

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self._scheduler.running == 0 and self._scheduler.waiting == 0

    def advance(self) -> tuple[Progress, ...]:
        """Run one step and return what it meant for each request.

        Raises:
            OutOfMemoryInTraffic: the step's tensors do not fit.
        """
        cache = self._engine.cache
        batch = self._scheduler.schedule(cache.free_pages)
        if batch.admitted:
            self._engine.drafter.settle(cache)
        for admission in batch.admitted:
            cache.admit(admission.id, admission.tokens)
        with traffic_errors(self._plan):
            output = step(batch, self._engine)
        progress = self._scheduler.apply(batch, output.tokens, output.scores, output.prompt_scores)
        for done in progress:
            if done.finish is not None:
                cache.release(done.id)
        self._tally.add(output, sum(len(each.tokens) for each in progress))
        return progress

    def stats(self) -> Stats:
        """Return counters and acceptance so far."""
        drafter = self._engine.drafter
        entry = drafter.entry if isinstance(drafter, PolicyDrafter) else None
        return Stats(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            tokens_used=self._engine.cache.tokens_used,
            rounds=self._tally.rounds.model_dump(),
            acceptance=self._tally.acceptance.model_dump(),
            policy_entry=entry if isinstance(self._draft, PolicyDraft) else None,
        )


def _pool_bytes(pool: Tensor | None) -> int:
    """Bytes of one cached token in all layers of a pool [layers, slots, heads, head_dim]."""
    return 0 if pool is None else pool[:, 0].numel() * pool.element_size()
