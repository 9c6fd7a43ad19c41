"""What is kept of a request once its answer is read: times, tokens and errors, small enough to cross a pipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tuner.load.arrivals import Exchange
from tuner.load.client import RequestError
from tuner.load.streams import Arrival, read_completion


@dataclass(frozen=True)
class Trace:
    """One counted request. Times in seconds of one clock; `arrivals` empty when it failed.

    `due`: when it was to be sent. `lag`: how late the client sent it. `accept_length` and `verify_count`: tokens a
    verify round and rounds, where the server says. `slice`: the prompt's category.
    """

    due: float
    ended: float
    arrivals: tuple[Arrival, ...] = ()
    output_tokens: int = 0
    accept_length: float | None = None
    verify_count: int | None = None
    error: str | None = None
    detail: str = ""
    slice: str = ""
    lag: float = 0.0
    index: int = 0


class Stats(Protocol):
    """How speculation went for one request."""

    @property
    def accept_length(self) -> float | None:
        """Tokens a verify round."""
        ...

    @property
    def verify_count(self) -> int | None:
        """Verify rounds."""
        ...


@dataclass(frozen=True)
class Unsaid:
    """A server that does not say how speculation went."""

    accept_length: float | None = None
    verify_count: int | None = None


Statistics = Callable[[Mapping[str, Any]], Stats]  # from the event with the final usage


def unsaid(last: Mapping[str, Any]) -> Stats:
    """Return nothing, whatever the server says."""
    return Unsaid()


def read_trace(exchange: Exchange, statistics: Statistics = unsaid) -> Trace:
    """Read what one request said."""
    reply, request = exchange.reply, exchange.request
    answer = read_completion(reply, request.most)
    lag = max(0.0, exchange.lag)
    if isinstance(answer, RequestError):
        return Trace(
            exchange.due,
            reply.done,
            error=answer.kind,
            detail=answer.detail,
            slice=request.slice,
            lag=lag,
            index=exchange.index,
        )
    stats = statistics(answer.last)
    return Trace(
        due=exchange.due,
        ended=reply.done,
        arrivals=answer.arrivals,
        output_tokens=answer.output_tokens,
        accept_length=stats.accept_length,
        verify_count=stats.verify_count,
        slice=request.slice,
        lag=lag,
        index=exchange.index,
    )
