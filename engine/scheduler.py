"""Which requests run: first come, first served; prompts in chunks beside the decoding ones. Pure: no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from engine.request import Request, Scored


@dataclass(frozen=True)
class Admission:
    """A request that enters; the cache must hold `tokens` for it."""

    id: int
    tokens: int


@dataclass(frozen=True)
class Chunk:
    """The next tokens of a prompt; `last` when its end is reached and a first token comes out."""

    request: Request
    tokens: tuple[int, ...]
    last: bool
    after: int | None = None  # the prompt token behind them, for scoring

    @property
    def id(self) -> int:
        """The request's id."""
        return self.request.id


@dataclass(frozen=True)
class Decode:
    """A request in its decode phase; `root` is its newest token, not yet in the cache."""

    request: Request
    root: int

    @property
    def id(self) -> int:
        """The request's id."""
        return self.request.id


@dataclass(frozen=True)
class Batch:
    """The work of one step."""

    admitted: tuple[Admission, ...] = ()
    prefill: tuple[Chunk, ...] = ()
    decode: tuple[Decode, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)


@dataclass(frozen=True)
class Progress:
    """What a step meant for one request: its new tokens, cut at its end; `finish` when it is over."""

    id: int
    tokens: tuple[int, ...]
    finish: str | None
    verify_count: int
    scores: tuple[Scored, ...] = ()  # of the tokens, when the request asked
    prompt_scores: tuple[Scored, ...] = ()  # of the prompt tokens that this step computed, likewise


@dataclass
class _Running:
    request: Request
    prefilled: int = 0
    root: int | None = None
    generated: int = 0
    verify_count: int = 0


@dataclass
class Scheduler:
    """Waiting and running requests.

    `verify_rows`: most rows one request reserves in a round; `prefill_chunk`: most prompt tokens of one step;
    `pages_for`: cache pages that hold so many tokens are `ceil(tokens / page_size)`.
    """

    max_running: int
    prefill_chunk: int
    verify_rows: int
    page_size: int
    _waiting: deque[Request] = field(default_factory=deque)
    _running: dict[int, _Running] = field(default_factory=dict)

    @property
    def running(self) -> int:
        """Requests that hold a cache."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def cancel(self, request: int) -> bool:
        """Forget a request; True when it held a cache, which the caller must release."""
        if self._running.pop(request, None) is not None:
            return True
        self._waiting = deque(waiting for waiting in self._waiting if waiting.id != request)
        return False

    def tokens_for(self, request: Request) -> int:
        """Most tokens the cache ever holds for a request: its text, and the rows of its last round."""
        return len(request.prompt) + request.max_tokens + self.verify_rows

    def schedule(self, free_pages: int) -> Batch:
        """Choose the next step's work, given the pages no request holds."""
        admitted = self._admit(free_pages)
        return Batch(
            admitted=admitted,
            prefill=self._chunks(),
            decode=tuple(
                Decode(running.request, running.root) for running in self._running.values() if running.root is not None
            ),
        )

    def apply(
        self,
        batch: Batch,
        produced: Mapping[int, tuple[int, ...]],
        scores: Mapping[int, tuple[Scored, ...]] = MappingProxyType({}),
        prompt_scores: Mapping[int, tuple[Scored, ...]] = MappingProxyType({}),
    ) -> tuple[Progress, ...]:
        """Advance by one step's tokens; finished requests leave, and the caller must release their cache.

        `scores` has one entry a token of a request that asked for them, `prompt_scores` one a scored prompt token.
        """
        for chunk in batch.prefill:
            if chunk.id in self._running:
                self._running[chunk.id].prefilled += len(chunk.tokens)
        decoded = {decode.id for decode in batch.decode}
        progress = []
        for number in {**produced, **prompt_scores}:
            running = self._running.get(number)
            if running is None:
                continue  # cancelled while the step ran
            running.verify_count += number in decoded
            kept: tuple[int, ...] = ()
            finish: str | None = None
            if number in produced:
                kept, finish = cut(
                    produced[number], running.request.max_tokens - running.generated, running.request.eos
                )
                running.generated += len(kept)
                running.root = kept[-1]
            own = scores.get(number, ())[: len(kept)]
            progress.append(Progress(number, kept, finish, running.verify_count, own, prompt_scores.get(number, ())))
            if finish is not None:
                del self._running[number]
        return tuple(progress)

    def _admit(self, free_pages: int) -> tuple[Admission, ...]:
        admitted = []
        while self._waiting and len(self._running) < self.max_running:
            tokens = self.tokens_for(self._waiting[0])
            pages = -(-tokens // self.page_size)
            if pages > free_pages:
                break
            free_pages -= pages
            request = self._waiting.popleft()
            self._running[request.id] = _Running(request)
            admitted.append(Admission(request.id, tokens))
        return tuple(admitted)

    def _chunks(self) -> tuple[Chunk, ...]:
        budget, chunks = self.prefill_chunk, []
        for running in self._running.values():
            prompt = running.request.prompt
            if budget == 0:
                break
            if running.prefilled < len(prompt):
                end = min(len(prompt), running.prefilled + budget)
                budget -= end - running.prefilled
                last = end == len(prompt)
                after = None if last else prompt[end]
                chunks.append(Chunk(running.request, prompt[running.prefilled : end], last, after))
        return tuple(chunks)


def cut(tokens: tuple[int, ...], room: int, eos: tuple[int, ...]) -> tuple[tuple[int, ...], str | None]:
    """Return the tokens up to the request's end, and why it ends there: "stop" at an eos, "length" without room."""
    for index, token in enumerate(tokens[:room]):
        if token in eos:
            return tokens[: index + 1], "stop"
    return (tokens[:room], "length") if len(tokens) >= room else (tokens, None)
