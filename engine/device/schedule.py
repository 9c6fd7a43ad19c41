"""Which requests run, when results are one step late: what is launched is decided before the last step is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from engine.parameters import ROUNDS_BEHIND
from engine.request import Request, Scored
from engine.scheduler import Chunk, Progress, Scheduler, cut


@dataclass(frozen=True)
class Launch:
    """The work of one step. Roots are on the device, so `decode` are the requests alone.

    `admitted`: requests that enter, and the tokens the cache must hold for each; `starts`: tokens before each chunk.
    """

    admitted: tuple[tuple[Request, int], ...] = ()
    prefill: tuple[Chunk, ...] = ()
    starts: tuple[int, ...] = ()
    decode: tuple[Request, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)

    @property
    def ending(self) -> tuple[Request, ...]:
        """Requests whose prompt ends in this step: it gives their first token."""
        return tuple(chunk.request for chunk in self.prefill if chunk.last)


@dataclass
class LateScheduler(Scheduler):
    """A scheduler that may be one step ahead of the results.

    A request that turns out to have ended is in one round more, whose result nobody reads: it reserves rows for it.
    """

    _flying: dict[int, int] = field(default_factory=dict)  # steps launched and not applied that give it tokens

    def tokens_for(self, request: Request) -> int:
        """Most tokens the cache ever holds for a request: its text, and the rows of its last round and one more."""
        return super().tokens_for(request) + self.verify_rows * (ROUNDS_BEHIND - 1)

    def cached(self, request: int) -> int:
        """Return the tokens that the steps applied so far have cached for a running request."""
        running = self._running[request]
        return running.prefilled + max(0, running.generated - 1)

    def runs(self, request: Request) -> bool:
        """Whether this very request is still running."""
        running = self._running.get(request.id)
        return running is not None and running.request is request

    @property
    def tokens_used(self) -> int:
        """Tokens cached for all requests."""
        return sum(map(self.cached, self._running))

    def launch(self, free_pages: int) -> Launch:
        """Choose the next step's work, given the pages no request holds; it counts as launched."""
        admitted = tuple((self._running[each.id].request, each.tokens) for each in self._admit(free_pages))
        # Every round gives a token: one whose launched rounds reach its end needs no more.
        decode = tuple(
            running.request
            for number, running in self._running.items()
            if running.prefilled == len(running.request.prompt)
            and running.generated + self._flying.get(number, 0) < running.request.max_tokens
        )
        chunks = self._chunks()
        launch = Launch(admitted, chunks, tuple(self._running[chunk.id].prefilled for chunk in chunks), decode)
        for chunk in launch.prefill:
            self._running[chunk.id].prefilled += len(chunk.tokens)
        for request in (*launch.decode, *launch.ending):
            self._flying[request.id] = self._flying.get(request.id, 0) + 1
        return launch

    def read(
        self,
        launch: Launch,
        produced: Mapping[int, tuple[int, ...]],
        scores: Mapping[int, tuple[Scored, ...]] = MappingProxyType({}),
        prompt_scores: Mapping[int, tuple[Scored, ...]] = MappingProxyType({}),
    ) -> tuple[Progress, ...]:
        """Apply a launched step's tokens; see `Scheduler.apply`. Requests that have left since are passed over."""
        decoded = {request.id for request in launch.decode}
        progress = []
        for request in (*(chunk.request for chunk in launch.prefill), *launch.decode):
            number = request.id
            if not self.runs(request):
                continue
            running = self._running[number]
            kept: tuple[int, ...] = ()
            finish: str | None = None
            if number in produced:
                self._flying[number] -= 1
                kept, finish = cut(produced[number], request.max_tokens - running.generated, request.eos)
                running.verify_count += number in decoded
                running.generated += len(kept)
            elif number not in prompt_scores:
                continue
            own = scores.get(number, ())[: len(kept)]
            progress.append(Progress(number, kept, finish, running.verify_count, own, prompt_scores.get(number, ())))
            if finish is not None:
                self._forget(number)
        return tuple(progress)

    def cancel(self, request: int) -> bool:
        """See `Scheduler.cancel`."""
        self._flying.pop(request, None)
        return super().cancel(request)

    def _forget(self, number: int) -> None:
        del self._running[number]
        self._flying.pop(number, None)
