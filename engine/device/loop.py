"""The engine loop on a device: launch the next step, then read the one before it.

While the device runs a round the host reads the previous one, streams it, admits and retires. The interface is that
of `engine.loop.Loop`, and so are the texts; results come one step later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.config import Draft, PolicyDraft
from engine.device.build import DeviceRuntime
from engine.device.ring import Ring, Ticket
from engine.device.rounds import Drafted, chains, rows_of
from engine.device.schedule import Launch
from engine.device.scores import Scores, score, score_prompt
from engine.device.state import Style, upload
from engine.drafters.base import DraftWork
from engine.errors import ConfigError, GraphCaptureError, OutOfMemory
from engine.loop import Stats
from engine.policy import Switch, entry_for
from engine.request import Request, Scored
from engine.runtime import traffic_errors
from engine.scheduler import Progress
from engine.speculate import StepOutput, Work
from engine.tally import Tally


@dataclass
class Table:
    """The drafts of a server by load, and which is in force."""

    drafts: tuple[Drafted, ...]
    lasts: tuple[int | None, ...]
    switch: Switch | None = None

    def pick(self, running: int) -> Drafted:
        """Return the draft of a round with so many requests."""
        wanted = entry_for(running, self.lasts)
        self.switch = Switch(wanted) if self.switch is None else self.switch.after(wanted)
        return self.drafts[self.switch.entry]


@dataclass(frozen=True)
class Pending:
    """A launched step whose results are not read."""

    launch: Launch
    draft: Drafted
    ticket: Ticket
    round_scores: Scores | None = None
    first_scores: Scores | None = None
    prompt_scores: dict[int, Scores] = field(default_factory=dict)


class DeviceLoop:
    """Requests in, progress out; see `engine.loop.Loop`."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime, self._rounds, self._pages = runtime, runtime.rounds, runtime.pages
        self._state = runtime.rounds.state
        self._scheduler = runtime.scheduler()
        self._draft = runtime.plan.config.draft
        self._table = _table(self._draft)
        largest = max(self._rounds.sizes)
        self._ring = Ring(largest * (1 + self._scheduler.verify_rows) + self._state.nobody, self._state.device)
        self._pending: deque[Pending] = deque()
        self._mark = time.perf_counter()
        self._tally = Tally(runtime.target_token_bytes, runtime.draft_token_bytes)

    def submit(self, request: Request) -> str | None:
        """Queue a request; return why it can never run, if so."""
        needed = self._scheduler.tokens_for(request)
        capacity = min(self._pages.pages * self._pages.page_size, self._state.longest)
        if needed > capacity:
            return (
                f"the request may need {needed} cached tokens, the server has {capacity}; "
                "lower max_tokens or raise memory.kv_tokens or model.max_len"
            )
        self._scheduler.submit(request)
        return None

    def cancel(self, request: int) -> None:
        """Forget a request, running or waiting or already over; rounds in flight finish for nobody."""
        if self._scheduler.cancel(request):
            self._pages.release(request)

    @torch.inference_mode()
    def set_draft(self, draft: Draft) -> Draft:
        """Use another draft from the next round on; running requests keep their text and their cache.

        Returns:
            The draft with every choice made.

        Raises:
            ConfigError: the draft needs more than this server was started with, or cannot be captured.
        """
        draft = self._runtime.judge(draft)
        table = _table(draft)
        try:
            self._rounds.extend(table.drafts)
        except (GraphCaptureError, OutOfMemory) as error:
            raise ConfigError(str(error)) from error
        self._table, self._draft = table, draft
        return draft

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do: what may still be in flight is nobody's."""
        return self._scheduler.running == 0 and self._scheduler.waiting == 0

    def advance(self) -> tuple[Progress, ...]:
        """Launch the next step, and return what the step before it meant for each request.

        Raises:
            OutOfMemoryInTraffic: the step's tensors do not fit.
        """
        with traffic_errors(self._runtime.plan):
            return self._advance()

    @torch.inference_mode()
    def _advance(self) -> tuple[Progress, ...]:
        launch = self._scheduler.launch(self._pages.free)
        if not self._pending:
            self._mark = time.perf_counter()
        if launch:
            self._pending.append(self._enqueue(launch))
        if not self._pending or (launch and len(self._pending) == 1):
            return ()
        return self._read(self._pending.popleft())

    def stats(self) -> Stats:
        """Return counters and acceptance so far."""
        entry = 0 if self._table.switch is None else self._table.switch.entry
        return Stats(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            tokens_used=self._scheduler.tokens_used,
            rounds=self._tally.rounds.model_dump(),
            acceptance=self._tally.acceptance.model_dump(),
            policy_entry=entry if isinstance(self._draft, PolicyDraft) else None,
        )

    def _enqueue(self, launch: Launch) -> Pending:
        """Launch a step: new rows, prompts, then the round."""
        for request, tokens in launch.admitted:
            place = self._pages.admit(request.id, tokens)
            self._state.enter(place.row, place.pages, request.sampling)
        results: list[Tensor] = []
        first_scores, prompt_scores = self._prompts(launch, results) if launch.prefill else (None, {})
        draft, round_scores = self._table.drafts[0], None
        if launch.decode:
            draft = self._table.pick(len(launch.decode))
            round_scores = self._round(launch.decode, draft, results)
        return Pending(launch, draft, self._ring.send(*results), round_scores, first_scores, prompt_scores)

    def _prompts(self, launch: Launch, results: list[Tensor]) -> tuple[Scores | None, dict[int, Scores]]:
        """Launch the chunks' forward; first tokens go to the results."""
        chunks = launch.prefill
        work = self._rounds.prompts(sum(len(chunk.tokens) for chunk in chunks))
        rows = [self._pages.place(chunk.id).row for chunk in chunks]
        work.forward.load(chunks, list(zip(rows, launch.starts, strict=True)))
        outcome = work.run()
        prompt_scores, row = {}, 0
        for chunk in chunks:
            following = [*chunk.tokens[1:], *([] if chunk.after is None else [chunk.after])]
            if chunk.request.echo and chunk.request.logprobs is not None and following:
                head, hidden = self._rounds.models.target.logits, outcome.hidden[row : row + len(following)]
                tokens = upload(following, torch.int64, self._state.device)
                prompt_scores[chunk.id] = score_prompt(hidden, head, tokens, chunk.request.logprobs)
            row += len(chunk.tokens)
        if not launch.ending:
            return None, prompt_scores
        first = work.forward.first(outcome, Style.of([request.sampling for request in launch.ending]))
        results.append(first)
        return _scores(launch.ending, outcome.logits, first[:, None]), prompt_scores

    def _round(self, requests: Sequence[Request], draft: Drafted, results: list[Tensor]) -> Scores | None:
        """Launch the round; its tokens go to the results. A round that is scored is not replayed: it keeps logits."""
        lanes = [self._pages.place(request.id).row for request in requests]
        style = Style.of([request.sampling for request in requests])
        if all(request.logprobs is None for request in requests):
            results.append(self._rounds.run(lanes, draft, style))
            return None
        outcome = self._rounds.run_eagerly(lanes, draft, style)
        results.append(outcome.packed)
        return _scores(requests, outcome.logits, outcome.packed[:, 1:])

    def _read(self, pending: Pending) -> tuple[Progress, ...]:
        """Wait for a step and tell the scheduler."""
        launch, parts = pending.launch, list(pending.ticket.read())
        produced: dict[int, tuple[int, ...]] = {}
        scores: dict[int, tuple[Scored, ...]] = {}
        if launch.ending:
            first = parts.pop(0).tolist()
            for index, chunk in enumerate(launch.prefill):
                if chunk.last:
                    produced[chunk.id] = (first[index],)
                    _keep(scores, chunk.request, pending.first_scores, index, 1)
        rows = parts[0].tolist() if launch.decode else []
        for index, request in enumerate(launch.decode):
            count, *tokens = rows[index]
            produced[request.id] = tuple(tokens[:count])
            _keep(scores, request, pending.round_scores, index, count)
        prompt_scores = {
            chunk.id: made.of(0, made.own.shape[1], chunk.request.logprobs or 0)
            for chunk in launch.prefill
            if (made := pending.prompt_scores.get(chunk.id)) is not None
        }
        work = self._work(pending, produced)
        progress = self._scheduler.read(launch, produced, scores, prompt_scores)
        for done in progress:
            if done.finish is not None:
                self._pages.release(done.id)
        if self.idle:
            self._pending.clear()  # rounds of requests that are over
        self._tally.add(StepOutput(produced, work), sum(len(each.tokens) for each in progress))
        return progress

    def _work(self, pending: Pending, produced: dict[int, tuple[int, ...]]) -> Work:
        """Count what a step computed, rows that only fill it up included; acceptance of those still running."""
        launch, rows = pending.launch, rows_of(pending.draft)
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        prefill_rows = sum(len(chunk.tokens) for chunk in launch.prefill)
        chunk_rows = self._rounds.prompts(prefill_rows).forward.rows if prefill_rows else 0
        live = [request for request in launch.decode if self._scheduler.runs(request)]
        if not live:
            return Work(prefill_rows=chunk_rows, seconds=(seconds, 0.0, 0.0, 0.0, 0.0))
        computed = self._rounds.size_of(len(launch.decode)) * rows
        read = sum(self._scheduler.cached(request.id) + rows for request in live)
        return Work(
            requests=len(live),
            depth=rows - 1,
            target_rows=computed,
            draft=DraftWork(computed, read) if rows > 1 else DraftWork(),
            context_rows=computed if self._rounds.models.draft is not None else 0,
            target_kv_rows_read=read,
            prefill_rows=chunk_rows,
            accepted=tuple(len(produced[request.id]) - 1 for request in live),
            seconds=(0.0, 0.0, seconds, 0.0, 0.0),
            captured=self._rounds.captured and pending.round_scores is None,
        )


def _table(draft: Draft) -> Table:
    ranges = draft.by_running if isinstance(draft, PolicyDraft) else ((1, None, draft),)
    return Table(chains([each for _, _, each in ranges]), tuple(last for _, last, _ in ranges))


def _scores(requests: Sequence[Request], logits: Tensor, tokens: Tensor) -> Scores | None:
    """Score tokens for the request that asks for the most alternatives; None when nobody asks."""
    asked = [request.logprobs for request in requests if request.logprobs is not None]
    return score(logits, tokens, max(asked)) if asked else None


def _keep(scores: dict[int, tuple[Scored, ...]], request: Request, made: Scores | None, index: int, rows: int) -> None:
    """Read a request's scores, where it asked for them."""
    if made is not None and request.logprobs is not None:
        scores[request.id] = made.of(index, rows, request.logprobs)
