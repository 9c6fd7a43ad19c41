"""What is asked of a server: prompts, in one order for every candidate, and the request bodies made of them."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError, model_validator

from engine.config import PAIR, expanded
from tuner.errors import TunerError, UsageError
from tuner.load.sources import BundledPrompts, JsonlPrompts, Kinds, RandomPrompts, ShareGptPrompts
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

    @property
    def text(self) -> str:
        """All of it as text; token ids have none."""
        if self.messages is not None:
            return "\n".join(str(message["content"]) for message in self.messages)
        return self.prompt if isinstance(self.prompt, str) else ""

    def after(self, words: str) -> Prompt:
        """Return this prompt behind a text; token ids cannot be."""
        if self.messages is not None:
            return replace(self, messages=({"role": "system", "content": words}, *self.messages))
        return replace(self, prompt=words + self.prompt) if isinstance(self.prompt, str) else self


def load_prompts(source: Kinds, seed: int = 0) -> tuple[Prompt, ...]:
    """Return the prompts of a source; `seed` is for random ones.

    Raises:
        WorkloadError: no such file, not of its format, an entry that is no prompt, or none at all; names file and
            line or entry.
    """
    match source:
        case BundledPrompts():
            return _jsonl(BUNDLED_PROMPTS)
        case JsonlPrompts(path=path):
            return _jsonl(expanded(path))
        case ShareGptPrompts(path=path, chat=chat):
            return _sharegpt(expanded(path), chat)
        case RandomPrompts():
            rng = random.Random(seed)
            low, high = source.input_tokens
            return tuple(
                Prompt(tuple(rng.randrange(source.vocabulary) for _ in range(rng.randint(low, high))), None)
                for _ in range(source.count)
            )


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise WorkloadError(f"{path}: larger than {MAX_BYTES // 2**20} MiB; give fewer prompts")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise WorkloadError(f"there is no file {path}") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise WorkloadError(f"{path}: cannot be read: {reason}") from error


def _jsonl(path: Path) -> tuple[Prompt, ...]:
    lines = enumerate(_read(path).splitlines(), 1)
    prompts = [_prompt(path, number, line) for number, line in lines if line.strip()]
    if not prompts:
        raise WorkloadError(f"{path}: no prompts; write one JSON object with `prompt` or `messages` a line")
    return tuple(prompts)


class Turn(BaseModel):
    """One turn of a ShareGPT-style conversation; `role` and `content` are another spelling."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    speaker: StrictStr = Field(validation_alias=AliasChoices("from", "role"))
    text: StrictStr = Field(validation_alias=AliasChoices("value", "content"))


class Conversation(BaseModel):
    """One entry of a ShareGPT-style file."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    turns: tuple[Turn, ...] = Field(validation_alias=AliasChoices("conversations", "conversation", "messages"))
    category: StrictStr | None = None


ROLES = {"human": "user", "user": "user", "system": "system"}  # anybody else is the model


def _sharegpt(path: Path, chat: bool) -> tuple[Prompt, ...]:
    """Read a list of conversations; one that does not begin with a question is left out, as its makers do."""
    try:
        document = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, list):
        raise WorkloadError(f"{path}: not a list of conversations")
    prompts = []
    for number, entry in enumerate(document):
        try:
            conversation = Conversation.model_validate(entry)
        except ValidationError as error:
            raise WorkloadError(f"{path}: conversation {number}: {_first(error)}") from error
        asked = list(itertools.takewhile(lambda turn: turn.speaker.lower() in ROLES, conversation.turns))
        messages = tuple({"role": ROLES[t.speaker.lower()], "content": t.text} for t in asked if t.text.strip())
        if not any(message["role"] == "user" for message in messages):
            continue
        label = conversation.category or ""
        text = "\n\n".join(message["content"] for message in messages)
        prompts.append(Prompt(None, messages, label) if chat else Prompt(text, None, label))
    if not prompts:
        raise WorkloadError(f"{path}: no conversation begins with a question")
    return tuple(prompts)


def _prompt(path: Path, number: int, text: str) -> Prompt:
    try:
        line = Line.model_validate_json(text)
    except ValidationError as error:
        raise WorkloadError(f"{path}:{number}: {_first(error)}") from error
    label = line.category or ""
    if line.messages is not None:
        return Prompt(None, tuple(message.model_dump() for message in line.messages), label)
    return Prompt(line.token_ids or line.prompt or line.text, None, label)


def _first(error: ValidationError) -> str:
    """Return the first problem of a validation, with its place."""
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def with_shared_prefix(prompts: Sequence[Prompt], share: float) -> tuple[Prompt, ...]:
    """Return prompts of which about `share` is a prefix common to all, taken from the prompts themselves.

    Its length is share / (1 − share) of the median prompt, in token ids where all prompts are ids, else in
    characters; chats get it as a system message.
    """
    if not share:
        return tuple(prompts)
    if all(isinstance(prompt.prompt, tuple) for prompt in prompts):
        ids = [prompt.prompt for prompt in prompts if isinstance(prompt.prompt, tuple)]
        length = round(statistics.median(map(len, ids)) * share / (1 - share))
        common = tuple(itertools.islice(itertools.cycle(itertools.chain.from_iterable(ids)), length))
        return tuple(replace(prompt, prompt=common + own) for prompt, own in zip(prompts, ids, strict=True))
    texts = [prompt.text for prompt in prompts]
    length = round(statistics.median(map(len, texts)) * share / (1 - share))
    words = "".join(itertools.islice(itertools.cycle("\n".join(texts) + "\n"), length))
    return tuple(prompt.after(words) for prompt in prompts)


def parse_workload(given: Mapping[str, Any]) -> Workload:
    """Return the workload that a command line describes; what is None was not said.

    Raises:
        UsageError: it makes no sense; names the first problem and its place.
    """
    try:
        return Workload.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise UsageError(_first(error)) from error


@dataclass(frozen=True)
class Request:
    """One request as it is sent; `most` tokens are asked for."""

    path: str
    body: bytes
    slice: str = ""
    most: int | None = None


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
    _heads: dict[int, bytes] = field(default_factory=dict, compare=False, repr=False)

    def make(self, index: int, output_tokens: int | None = None) -> Request:
        """Return request `index`; `output_tokens` None means the workload's."""
        number = self.order[index % len(self.order)]
        prompt = self.prompts[number]
        most = self.workload.output_tokens if output_tokens is None else output_tokens
        head = self._heads.get(number)
        if head is None:  # a long prompt takes long to encode: once is enough
            head = self._heads[number] = self._head(prompt)
        ignore = b',"ignore_eos":true' if self.workload.ignore_eos else b""
        body = b'%b,"max_tokens":%d,"seed":%d%b}' % (head, most, self.seed + index, ignore)
        return Request(prompt.path, body, prompt.slice, most)

    def prepare(self, first: int, count: int) -> None:
        """Encode the prompts of these requests now, so that under load nothing but sending is left to do."""
        for index in range(first, first + min(count, len(self.order))):
            number = self.order[index % len(self.order)]
            self._heads.setdefault(number, self._head(self.prompts[number]))

    def _head(self, prompt: Prompt) -> bytes:
        asked = {"prompt": prompt.prompt} if prompt.messages is None else {"messages": prompt.messages}
        body = {
            "model": self.served_name,
            **asked,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        return json.dumps(body, separators=(",", ":")).encode()[:-1]


def make_requests(workload: Workload, served_name: str, seed: int) -> Requests:
    """Load the prompts and fix their order by `seed`.

    Raises:
        WorkloadError: see `load_prompts`; or no prompt is of the categories asked for.
    """
    prompts = load_prompts(workload.prompts, seed)
    if workload.categories:
        known = sorted({prompt.slice for prompt in prompts})
        prompts = tuple(prompt for prompt in prompts if prompt.slice in workload.categories)
        if missing := [name for name in workload.categories if name not in known]:
            raise WorkloadError(f"no prompt has category {', '.join(missing)}; there are {', '.join(known) or 'none'}")
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    return Requests(with_shared_prefix(prompts, workload.shared_prefix), tuple(order), served_name, workload, seed)
