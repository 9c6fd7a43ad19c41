"""What a streamed completion said, read after it is over: text, tokens and when they came."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from pydantic_core import from_json

from tuner.load.client import Reply, RequestError


class Arrival(NamedTuple):
    """Tokens that came with one event. `time` in seconds of the client's clock; `tokens` may be a fraction."""

    time: float
    tokens: float


@dataclass(frozen=True)
class Completion:
    """One streamed completion.

    `arrivals` hold only events that brought tokens. `exact`: the tokens of each are the server's own count
    (continuous usage or token ids); otherwise the total is its count, spread evenly over the events.
    `last`: the event with the final usage, for what a backend adds there.
    """

    arrivals: tuple[Arrival, ...]
    output_tokens: int
    prompt_tokens: int | None
    exact: bool
    text: str
    token_ids: tuple[int, ...]
    finish: str | None
    last: Mapping[str, Any]


def events(reply: Reply) -> Iterator[tuple[float, str]]:
    """Yield (time its last byte came, data) of every server-sent event.

    Lines end with LF or CRLF; several `data:` lines of an event are joined; comments and other fields are left out.
    """
    pending = b""
    lines: list[str] = []
    for time, piece in reply.pieces:
        if not pending and not lines and _SINGLE(piece):
            yield time, piece[6:-2].decode("utf-8", "replace")
            continue
        *complete, pending = (pending + piece).split(b"\n")
        for raw in complete:
            line = raw.removesuffix(b"\r").decode("utf-8", "replace")
            if line.startswith("data:"):
                lines.append(line[5:].removeprefix(" "))
            elif not line and lines:
                yield time, "\n".join(lines)
                lines = []


_SINGLE = re.compile(rb"data: [^\r\n]*\n\n").fullmatch  # as nearly every piece is


def read_completion(reply: Reply, most: int | None = None) -> Completion | RequestError:
    """Read the stream of /v1/completions or /v1/chat/completions.

    An answer that is an error, breaks off, is no event stream, ends without a finish reason, or gives no usage or an
    impossible one is a RequestError: its tokens cannot be counted, and chunks are no substitute.

    Args:
        most: tokens that were asked for; a server that claims more has not counted them.
    """
    if reply.error is not None:
        return reply.error
    if reply.status != 200:
        return _refusal(reply)
    if "text/event-stream" not in reply.headers.get("content-type", ""):
        return RequestError("not_a_stream", f"not an event stream: {_words(reply.body)}")
    reader = _Reader()
    for time, data in events(reply):
        if data == "[DONE]":
            return reader.result(most)
        try:
            document = from_json(data)  # a third of what json.loads takes
        except ValueError:
            return RequestError("malformed", f"an event is not JSON: {data[:120]}")
        if (error := reader.take(time, document)) is not None:
            return error
    return RequestError("incomplete", "the stream ended without [DONE]")


def _refusal(reply: Reply) -> RequestError:
    """Return the error of an answer that is no success; redirects are not followed: the URL is to be corrected."""
    said = f"HTTP {reply.status}: {_words(reply.body)}"
    if 300 <= reply.status < 400:
        return RequestError("redirect", f"HTTP {reply.status} to {reply.headers.get('location', 'nowhere')[:120]}")
    if reply.status in (429, 503):
        wait = reply.headers.get("retry-after")
        return RequestError("throttled", said + (f" (retry after {wait[:40]})" if wait else ""))
    return RequestError("status", said)


class _Reader:
    """Collects the events of one stream."""

    def __init__(self) -> None:
        self._stamps: list[tuple[float, int | None]] = []  # (time, tokens so far if the server says)
        self._text: list[str] = []
        self._ids: list[int] = []
        self._finish: str | None = None
        self._usage: Mapping[str, Any] | None = None
        self._last: Mapping[str, Any] = {}
        self._counted = 0

    def take(self, time: float, document: object) -> RequestError | None:
        if not isinstance(document, dict):
            return RequestError("malformed", "an event is not a JSON object")
        if document.get("error"):
            return RequestError("status", f"error in the stream: {_words(json.dumps(document['error']).encode())}")
        total = None
        usage = document.get("usage")
        if isinstance(usage, dict):
            total = _count(usage.get("completion_tokens"))
            self._usage, self._last = usage, document
        choices = document.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return None
        text = choice.get("text")
        if not isinstance(text, str):
            text = _delta(choice)
        if text:
            self._text.append(text)
        ids = choice.get("token_ids")
        if isinstance(ids, list) and ids:
            self._ids += [i for i in ids if isinstance(i, int)]
            total = len(self._ids) if total is None else total
        else:
            ids = None
        finish = choice.get("finish_reason")
        if isinstance(finish, str):
            self._finish = finish
        if text or ids or (total is not None and total > self._counted):
            self._stamps.append((time, total))
        if total:
            self._counted = total
        return None

    def result(self, most: int | None) -> Completion | RequestError:
        if self._finish is None:
            return RequestError("incomplete", "the stream ended without a finish reason")
        said = (self._usage or {}).get("completion_tokens")
        total = _count(said)
        if said is None:
            return RequestError("no_usage", "the server reports no usage.completion_tokens")
        if total is None:
            return RequestError("wrong_usage", f"usage.completion_tokens is {said!r:.40}")
        if not self._stamps:
            return RequestError("incomplete", "the stream brought no token")
        if (wrong := self._impossible(total, most)) is not None:
            return RequestError("wrong_usage", wrong)
        arrivals, exact = _arrivals(self._stamps, total)
        return Completion(
            arrivals=arrivals,
            output_tokens=total,
            prompt_tokens=_count((self._usage or {}).get("prompt_tokens")),
            exact=exact,
            text="".join(self._text),
            token_ids=tuple(self._ids),
            finish=self._finish,
            last=self._last,
        )

    def _impossible(self, total: int, most: int | None) -> str | None:
        """Return why the server's counts cannot be true, None when they can."""
        counts = [count for _, count in self._stamps if count is not None]
        if total == 0:
            return "usage says 0 tokens, but some came"
        if most is not None and total > most:
            return f"usage says {total} tokens, but at most {most} were asked for"
        if any(after < before for before, after in pairwise(counts)):
            return "usage counts down"
        if counts and counts[-1] > total:
            return f"usage says {total} tokens at the end, but {counts[-1]} before"
        if len(self._ids) > total:
            return f"usage says {total} tokens, but {len(self._ids)} ids came"
        return None


def _arrivals(stamps: list[tuple[float, int | None]], total: int) -> tuple[tuple[Arrival, ...], bool]:
    """Turn running totals into tokens per event; without them, spread the total evenly."""
    counts = [count for _, count in stamps if count is not None]
    if len(counts) == len(stamps) and counts[-1] == total:
        steps = [after - before for before, after in pairwise([0, *counts])]
        pairs = zip(stamps, steps, strict=True)
        return tuple(Arrival(time, step) for (time, _), step in pairs if step > 0), True
    return tuple(Arrival(time, total / len(stamps)) for time, _ in stamps), False


def _delta(choice: Mapping[str, Any]) -> str:
    """Return the text of a chat's choice."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return ""
    return "".join(part for key in ("reasoning_content", "content") if isinstance(part := delta.get(key), str))


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None  # True is no count


def _words(body: bytes) -> str:
    return " ".join(body[:400].decode("utf-8", "replace").split())[:200]
