"""What is asked of a server: prompts, in one order for every candidate, and the request bodies made of them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from engine.config import BUNDLED, PAIR
from tuner.errors import TunerError
from tuner.records import Workload

BUNDLED_PROMPTS = PAIR / "workload.jsonl"
MAX_BYTES = 512 * 2**20
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class WorkloadError(TunerError):
    """A file of prompts cannot be used."""


class Message(BaseModel):
    """One chat message."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: StrictStr
    content: StrictStr


class Line(BaseModel):
    """One line of a JSONL file: a prompt as text, or messages; `token_ids` and `package` as in the bundled file."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    prompt: Annotated[StrictStr, Field(min_length=1)] | None = None
    text: Annotated[StrictStr, Field(min_length=1)] | None = None
    token_ids: Annotated[tuple[Annotated[StrictInt, Field(ge=0)], ...], Field(min_length=1)] | None = None
    messages: Annotated[tuple[Message, ...], Field(min_length=1)] | None = None
    package: StrictStr | None = None
    category: StrictStr | None = None

    @model_validator(mode="after")
    def _one_of(self) -> Line:
        if self.messages is not None and (self.prompt or self.text or self.token_ids):
            raise ValueError("give either messages or a prompt, not both")
        if not (self.messages or self.prompt or self.text or self.token_ids):
            raise ValueError("a line needs `prompt` (text) or `messages`")
        return self


@dataclass(frozen=True)
class Prompt:
    """One prompt. Exactly one of `messages` and `prompt`; token ids win over text, for they are the same everywhere.

    `slice`: the category that reports may group by.
    """

    prompt: str | tuple[int, ...] | None
    messages: tuple[dict[str, Any], ...] | None
    slice: str = ""

    @property
    def path(self) -> str:
        """The endpoint that takes it."""
        return COMPLETIONS if self.messages is None else CHAT


def load_prompts(name: str) -> tuple[Prompt, ...]:
    """Read `bundled`, or a JSONL file.

    Raises:
        WorkloadError: no such file, not JSONL, a line that is no prompt, or no line at all; names file and line.
    """
    path = BUNDLED_PROMPTS if name == BUNDLED else Path(name).expanduser()
    try:
        if path.stat().st_size > MAX_BYTES:
            raise WorkloadError(f"{path}: larger than {MAX_BYTES // 2**20} MiB; give fewer prompts")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: cannot be read: {error}") from error
    prompts = [_prompt(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not prompts:
        raise WorkloadError(f"{path}: no prompts; write one JSON object with `prompt` or `messages` a line")
    return tuple(prompts)


def _prompt(path: Path, number: int, text: str) -> Prompt:
    try:
        line = Line.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        raise WorkloadError(f"{path}:{number}: {where + ': ' if where else ''}{message}") from error
    label = line.category or line.package or ""
    if line.messages is not None:
        return Prompt(None, tuple(message.model_dump() for message in line.messages), label)
    return Prompt(line.token_ids or line.prompt or line.text, None, label)


@dataclass(frozen=True)
class Request:
    """One request as it is sent."""

    path: str
    body: bytes
    slice: str = ""


@dataclass(frozen=True)
class Requests:
    """The endless sequence of requests of a study: the same for every candidate, whatever its speed.

    Request i carries prompt order[i mod n]; temperature 0 and seed + i, so that two servers that compute the same
    distribution are asked the same thing.
    """

    prompts: tuple[Prompt, ...]
    order: tuple[int, ...]
    served_name: str
    workload: Workload
    seed: int

    def make(self, index: int, output_tokens: int | None = None) -> Request:
        """Return request `index`; `output_tokens` None means the workload's."""
        prompt = self.prompts[self.order[index % len(self.order)]]
        body: dict[str, Any] = {"model": self.served_name}
        if prompt.messages is None:
            body["prompt"] = prompt.prompt
        else:
            body["messages"] = prompt.messages
        body |= {
            "max_tokens": self.workload.output_tokens if output_tokens is None else output_tokens,
            "temperature": 0,
            "seed": self.seed + index,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if self.workload.ignore_eos:
            body["ignore_eos"] = True
        return Request(prompt.path, json.dumps(body, separators=(",", ":")).encode(), prompt.slice)


def make_requests(workload: Workload, served_name: str, seed: int) -> Requests:
    """Load the prompts and fix their order by `seed`.

    Raises:
        WorkloadError: see `load_prompts`.
    """
    prompts = load_prompts(workload.prompts)
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    return Requests(prompts, tuple(order), served_name, workload, seed)
