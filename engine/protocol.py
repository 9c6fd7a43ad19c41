"""What crosses HTTP: request bodies, `/server_info`, and the error shape.

Shared by the server and by every client of it (tuner, tests). No torch here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr

SERVER_INFO_SCHEMA = 1
MAX_BODY_BYTES = 8 * 2**20
MAX_STOPS = 16
# Lists are bounded and fail fast, so that one bad body cannot make a million objects or errors.
MAX_MESSAGES = 4096
MAX_PARTS = 4096


def _real_number(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number is meant here")
    return value


Real = Annotated[float, BeforeValidator(_real_number), Field(allow_inf_nan=False)]
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class Generation(BaseModel):
    """The fields that completions and chat completions share.

    Unknown fields are accepted and ignored when they change nothing the caller could notice; a field that would
    change the output and is not implemented is refused by the server with 400.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: StrictStr
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    stop: StrictStr | Annotated[list[StrictStr], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: Annotated[Real, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Real, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, lt=2**31)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=1)] | None = None
    ignore_eos: StrictBool = False
    return_token_ids: StrictBool = False
    return_tokens_as_token_ids: StrictBool = False

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, empty ones dropped."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in given if text)


class CompletionBody(Generation):
    """Body of POST /v1/completions. `prompt`: text or token ids, one prompt."""

    prompt: (
        StrictStr
        | Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
        | Annotated[
            list[StrictStr | Annotated[list[TokenId], Field(fail_fast=True)]],
            Field(min_length=1, max_length=1),
        ]
    )
    max_tokens: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = None
    echo: StrictBool = False
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None


class ContentPart(BaseModel):
    """One part of a message's content; text is the only kind a text model takes."""

    type: Literal["text"]
    text: StrictStr


class Message(BaseModel):
    """One chat message."""

    model_config = ConfigDict(extra="allow")

    role: StrictStr
    content: StrictStr | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None


class ChatBody(Generation):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None


class Rounds(BaseModel):
    """Work counted since start, over decode rounds and prefill chunks apart.

    Every figure is a count of what was really computed, so that a recomputed cache cannot hide: rows are forward
    rows (tokens × one model pass), KV rows are positions written in all layers of that model, KV bytes are what
    attention read, padding included.
    """

    model_config = ConfigDict(frozen=True)

    rounds: int = 0
    requests: int = 0  # sum over rounds of the requests in it
    target_rows: int = 0
    draft_rows: int = 0
    context_rows: int = 0  # committed tokens whose features became draft context KV
    target_kv_rows_written: int = 0
    draft_kv_rows_written: int = 0
    target_kv_bytes_read: int = 0
    draft_kv_bytes_read: int = 0
    prefill_steps: int = 0
    prefill_rows: int = 0
    tokens: int = 0  # generated
    seconds_propose: float = 0.0
    seconds_forward: float = 0.0
    seconds_accept: float = 0.0
    seconds_commit: float = 0.0
    seconds_prefill: float = 0.0
    graph_rounds: int = 0


class Acceptance(BaseModel):
    """How speculation went, over finished and running requests since start.

    `accept_length` = generated tokens / verify rounds (accepted drafts + the bonus token), so a request weighs by
    its rounds. `by_position[i]` = share of rounds whose draft i+1 was accepted.
    """

    model_config = ConfigDict(frozen=True)

    accept_length: float | None = None
    accept_rate: float | None = None
    verify_count: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: tuple[float, ...] = ()


class Versions(BaseModel):
    """What runs."""

    model_config = ConfigDict(frozen=True)

    engine: str
    python: str
    torch: str
    device: str  # "cpu: <model name>" or "cuda: <GPU name>"
    threads: int


class MemoryInfo(BaseModel):
    """Bytes and tokens the server holds."""

    model_config = ConfigDict(frozen=True)

    weight_bytes: int
    draft_weight_bytes: int
    kv_tokens: int
    kv_bytes_per_token: int
    page_size: int


class ServerInfo(BaseModel):
    """GET /server_info: what really runs, beside what it has done."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    schema_: Literal[1] = Field(1, alias="schema")
    model: str
    ready: bool
    synthetic: bool
    config: dict[str, Any]  # the resolved EngineConfig: no auto, no null where a value was chosen
    versions: Versions | None = None
    memory: MemoryInfo | None = None
    costs: dict[str, Any] | None = None  # measured at start-up for `nodes: auto`: an `engine.cost.CostTable`
    policy_entry: int | None = None  # range of the policy in force
    rounds: Rounds = Rounds()
    acceptance: Acceptance = Acceptance()
    running: int = 0
    waiting: int = 0
    seconds_to_ready: float | None = None


def error_body(
    message: str, kind: str = "invalid_request_error", code: int = 400, param: str | None = None
) -> dict[str, Any]:
    """Return OpenAI's error shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
