"""What crosses between the HTTP front and the engine process: JSON lines over one socket pair.

The front owns text (tokenizer, chat template, stop strings), the engine process owns tokens. Either side reads
until end of file and treats it as the other's death.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Submit:
    """Front to engine: decode this prompt."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    eos: tuple[int, ...]  # token ids that end the text; empty when the client ignores them
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 does not limit
    top_p: float = 1.0
    seed: int = 0
    logprobs: int | None = None  # alternatives to each token; None asks for no scores
    echo: bool = False  # score the prompt's tokens too


@dataclass(frozen=True)
class Cancel:
    """Front to engine: nobody reads request `id` any more, or its stop string has come."""

    id: int


@dataclass(frozen=True)
class Ask:
    """Front to engine: send an `Info`."""

    id: int


@dataclass(frozen=True)
class SetDraft:
    """Front to engine: use this draft config (a policy, or a single draft) from the next round on."""

    id: int
    draft: dict[str, Any]


@dataclass(frozen=True)
class DraftSet:
    """Engine to front: the answer to `SetDraft`, the draft resolved; `error` says why the old draft stays."""

    id: int
    draft: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True)
class Drain:
    """Front to engine: finish what runs, accept nothing new, then end."""


@dataclass(frozen=True)
class Ready:
    """Engine to front: a generation would start now. `info` = ServerInfo's static part."""

    info: dict[str, Any]


@dataclass(frozen=True)
class Tokens:
    """Engine to front: what one round added to request `id`.

    `finish`: None while it runs, else "stop" (an eos token, which is the last of `tokens`), "length", or "error".
    `verify_count`: decode rounds this request has taken so far. `logprobs`: one entry a token when asked for:
    [logprob, [[id, logprob], …]]; `prompt_logprobs` likewise, for prompt tokens after the first, as chunks are done.
    """

    id: int
    tokens: tuple[int, ...]
    finish: str | None = None
    verify_count: int = 0
    error: str | None = None
    logprobs: tuple[Any, ...] = ()
    prompt_logprobs: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Info:
    """Engine to front: counters and acceptance, the answer to `Ask` with the same id."""

    id: int
    stats: dict[str, Any]


@dataclass(frozen=True)
class Fatal:
    """Engine to front: this process ends now, for this cause; `code` is the exit status to use."""

    code: int
    kind: str
    message: str


Frame = Submit | Cancel | Ask | SetDraft | DraftSet | Drain | Ready | Tokens | Info | Fatal
_KINDS: dict[str, type[Frame]] = {
    kind.__name__: kind for kind in (Submit, Cancel, Ask, SetDraft, DraftSet, Drain, Ready, Tokens, Info, Fatal)
}
_TUPLES = {"prompt", "eos", "tokens", "logprobs", "prompt_logprobs"}


def encode(frame: Frame) -> bytes:
    """Return one line."""
    fields = {field.name: getattr(frame, field.name) for field in dataclasses.fields(frame)}
    return json.dumps([type(frame).__name__, fields], separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Frame:
    """Inverse of `encode`."""
    kind, fields = json.loads(line)
    arguments: dict[str, Any] = {
        name: tuple(v) if name in _TUPLES and isinstance(v, list) else v for name, v in fields.items()
    }
    return _KINDS[kind](**arguments)


class LineBuffer:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield decode(line)
