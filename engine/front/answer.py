"""What a generation's answer looks like: OpenAI's objects, whole and in chunks. Pure.

Beyond OpenAI: `token_ids` in a choice and `prompt_token_ids` once (as vLLM gives them) when `return_token_ids` is
asked for, and `spec` beside `usage`: `accept_length` = tokens per verify round, null before the first, and
`verify_count` = verify rounds. A stream's last chunk carries `spec`: the usage chunk, or without one the chunk with
the finish reason.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.front.exchange import encode
from engine.front.job import Job
from engine.front.logprobs import ChatScores, CompletionScores, Score, Scores, by_id
from engine.text import Piece, Text


@dataclass(frozen=True)
class Part:
    """What the answer grows by. `scored`: the tokens that get log-probabilities, with an echoed prompt's first."""

    piece: Piece
    scored: tuple[tuple[int, Score | None], ...] = ()


@dataclass
class Tally:
    """Counts of one request so far."""

    prompt_tokens: int
    completion_tokens: int = 0
    decode_tokens: int = 0  # those that verify rounds yielded: all but what the prefill gave
    verify_count: int = 0

    def add(self, tokens: int, verify_count: int) -> None:
        """Count a round's tokens; `verify_count` is the engine's running count."""
        self.completion_tokens += tokens
        if verify_count > 0:
            self.decode_tokens += tokens
        self.verify_count = verify_count

    def usage(self) -> dict[str, int]:
        """Return OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def spec(self) -> dict[str, float | int | None]:
        """Return how speculation went."""
        length = self.decode_tokens / self.verify_count if self.verify_count else None
        return {"accept_length": length, "verify_count": self.verify_count}


class Completion:
    """Shapes of /v1/completions."""

    prefix = "cmpl"
    whole = "text_completion"
    part = "text_completion"
    prompt_ids_in_choice = True
    scores = CompletionScores

    @staticmethod
    def delta(text: str, first: bool) -> str:
        """Return a chunk's text, as the inside of a choice."""
        return f'"text":{json.dumps(text)}'

    @staticmethod
    def content(text: str) -> dict[str, Any]:
        """Return a whole answer's text, as fields of a choice."""
        return {"text": text}


class Chat:
    """Shapes of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    part = "chat.completion.chunk"
    prompt_ids_in_choice = False
    scores = ChatScores

    @staticmethod
    def delta(text: str, first: bool) -> str:
        """Return a chunk's text, as the inside of a choice."""
        role = '"role":"assistant",' if first else ""
        return f'"delta":{{{role}"content":{json.dumps(text)}}}'

    @staticmethod
    def content(text: str) -> dict[str, Any]:
        """Return a whole answer's text, as fields of a choice."""
        return {"message": {"role": "assistant", "content": text}}


Shape = type[Completion] | type[Chat]


class Writer:
    """Builds one request's answer. Chunks are put together as text: there are thousands of them a second."""

    def __init__(self, shape: Shape, model: str, job: Job, text: Text) -> None:
        self._shape = shape
        self._prompt = list(job.prompt) if job.token_ids else None
        name = by_id if job.names_by_id else text.token
        self._scores: Scores | None = None if job.logprobs is None else shape.scores(name, text.token)
        self._constant = {
            "id": f"{shape.prefix}-{secrets.token_hex(12)}",
            "object": shape.part,
            "created": int(time.time()),
            "model": model,
        }
        self._head = json.dumps(self._constant, separators=(",", ":"))[:-1]
        self._first = True

    def _logprobs(self, scored: Sequence[tuple[int, Score | None]]) -> dict[str, Any] | None:
        if self._scores is None:
            return None
        return self._scores.of([token for token, _ in scored], [score for _, score in scored])

    def chunk(self, part: Part, tally: Tally, with_usage: bool, with_spec: bool) -> bytes:
        """Return one server-sent event with a round's text."""
        piece = part.piece
        finish = f'"{piece.finish}"' if piece.finish else "null"
        scores = "null" if self._scores is None else json.dumps(self._logprobs(part.scored))
        choice = f'"index":0,{self._shape.delta(piece.text, self._first)},"logprobs":{scores},"finish_reason":{finish}'
        tail = ""
        if self._prompt is not None:
            choice += f',"token_ids":{list(piece.tokens)}'
            if self._first and self._shape.prompt_ids_in_choice:
                choice += f',"prompt_token_ids":{self._prompt}'
            elif self._first:
                tail += f',"prompt_token_ids":{self._prompt}'
        if with_usage:
            tail += f',"usage":{json.dumps(tally.usage())}'
        if with_spec:
            tail += f',"spec":{json.dumps(tally.spec())}'
        self._first = False
        return f'data: {self._head},"choices":[{{{choice}}}]{tail}}}\n\n'.encode()

    def usage_chunk(self, tally: Tally) -> bytes:
        """Return the event that follows the last one when usage was asked for."""
        document = {**self._constant, "choices": [], "usage": tally.usage(), "spec": tally.spec()}
        return b"data: " + encode(document) + b"\n\n"

    def whole(self, parts: Sequence[Part], tally: Tally) -> bytes:
        """Return the answer to a request that does not stream."""
        text = "".join(part.piece.text for part in parts)
        tokens = [token for part in parts for token in part.piece.tokens]
        scores = self._logprobs([pair for part in parts for pair in part.scored])
        finish = parts[-1].piece.finish
        choice = {"index": 0, **self._shape.content(text), "logprobs": scores, "finish_reason": finish}
        document: dict[str, Any] = {**self._constant, "object": self._shape.whole, "choices": [choice]}
        if self._prompt is not None:
            choice["token_ids"] = tokens
            (choice if self._shape.prompt_ids_in_choice else document)["prompt_token_ids"] = self._prompt
        return encode({**document, "usage": tally.usage(), "spec": tally.spec()})
