"""The HTTP application: routes and handlers. ASGI, without a framework: the hot path is one write a round.

A stream's chunks: one per engine round of the request, with all its new text; rounds that pile up while the client
does not read are joined. A round whose tokens have no printable text yet (part of a character, or of what may
become a stop string) is withheld, unless `return_token_ids` or `continuous_usage_stats` asks to see each: then its
chunk has an empty text.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hmac
import ipaddress
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from engine.chat import ChatError
from engine.config import EngineConfig
from engine.events import emit
from engine.front.answer import Chat, Completion, Part, Shape, Tally, Writer
from engine.front.exchange import Budget, Exchange, Message, Receive, Refused, Send, encode
from engine.front.intake import check_supported, job, parse, parse_draft, too_long
from engine.front.job import Job
from engine.front.limits import Limits
from engine.front.link import ClientGone, Engine, EngineGone, Stream
from engine.front.metrics import CONTENT_TYPE, Meters, exposition
from engine.protocol import ChatBody, CompletionBody, ServerInfo
from engine.text import Decoder, Piece, Text
from engine.wire import Tokens

LONG_TEXT = 4096  # characters; tokenised in a thread from here on, so that streams go on meanwhile
INFO_SECONDS = 5.0
SCRAPE_SECONDS = 1.0
MODELS = "/v1/models"

Result = TypeVar("Result")
Handler = Callable[["Api", Exchange], Awaitable[None]]


async def in_thread(work: Callable[[], Result]) -> Result:
    """Run `work` in a thread that does not keep the process alive, unlike asyncio's own pool."""
    outcome: concurrent.futures.Future[Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 — raised again where it is awaited
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(outcome)


class Api:
    """The application's state: what it answers from."""

    def __init__(
        self,
        engine: Engine,
        config: EngineConfig,
        name: str,
        limits: Limits,
        meters: Meters,
        admin_key: str | None = None,
    ) -> None:
        self.engine = engine
        self.draining = False
        self._config = config
        self._name = name
        self._admin_key = admin_key
        self._limits = limits
        self._meters = meters
        self._budget = Budget(limits.held_bytes)
        self._encoding = asyncio.Lock()
        self._created = int(time.time())
        self._text: Text | None = None
        self._info: dict[str, Any] = {}
        self._context = 0
        self._seconds_to_ready: float | None = None
        self._stats: dict[str, Any] = {}
        self._stats_at: float | None = None

    def open_for_business(self, text: Text, info: dict[str, Any], seconds: float) -> None:
        """Become ready.

        Args:
            text: the target's tokenizer and template.
            info: the engine's `Ready.info`.
            seconds: from the start until now.

        Raises:
            KeyError, TypeError: `info` lacks the resolved model.max_len.
        """
        self._context = int(info["config"]["model"]["max_len"])
        self._text, self._info, self._seconds_to_ready = text, info, seconds

    @property
    def ready(self) -> bool:
        """Whether a generation would start now."""
        return self._text is not None and not self.draining and not self.engine.closed.done()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        exchange = Exchange(scope, receive, send, self._limits)
        try:
            await self._answer(exchange)
        except ClientGone:
            return
        except Exception as error:  # noqa: BLE001 — the request boundary: the server goes on
            emit("error", path=exchange.path, message=repr(error), traceback=traceback.format_exc())
            refusal = Refused(500, "internal error, see the server's log", "internal_error")
            await exchange.refuse(refusal)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._route(exchange)
        except Refused as refusal:
            await exchange.refuse(refusal)
        except EngineGone as error:
            await exchange.refuse(Refused(503, str(error), "unavailable"))

    async def _route(self, exchange: Exchange) -> None:
        routes = ROUTES.get(exchange.path)
        if routes is None and exchange.path.startswith(MODELS + "/"):
            routes = {"GET": Api._model}
        if routes is None:
            raise Refused(404, f"no such path: {exchange.path[:100]}", "not_found")
        method = "GET" if exchange.method == "HEAD" else exchange.method
        handler = routes.get(method)
        if handler is None:
            message = f"{exchange.path} takes {', '.join(routes)}, not {exchange.method}"
            raise Refused(405, message, "method_not_allowed")
        await handler(self, exchange)

    # Small routes

    async def _health(self, exchange: Exchange) -> None:
        await exchange.reply(200, b'{"status":"alive"}')

    async def _ready(self, exchange: Exchange) -> None:
        if not self.ready:
            raise self._not_ready()
        await exchange.reply(200, b'{"status":"ready"}')

    def _not_ready(self) -> Refused:
        state = "the server is shutting down" if self.draining else "the model is still loading"
        return Refused(503, state, "not_ready")

    def _card(self) -> dict[str, Any]:
        context = self._context or None
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "engine",
            "max_model_len": context,
        }

    async def _models(self, exchange: Exchange) -> None:
        await exchange.reply(200, encode({"object": "list", "data": [self._card()]}))

    async def _model(self, exchange: Exchange) -> None:
        self._check_name(exchange.path.removeprefix(MODELS + "/"))
        await exchange.reply(200, encode(self._card()))

    def _check_name(self, asked: str) -> None:
        if asked != self._name:
            message = f"the model {asked[:100]!r} does not exist, this server has {self._name!r}"
            raise Refused(404, message, "model_not_found", "model")

    async def _server_info(self, exchange: Exchange) -> None:
        if self._text is None:
            raise self._not_ready()
        try:
            stats = await self.engine.ask(INFO_SECONDS)
        except TimeoutError:
            message = f"the engine did not answer within {INFO_SECONDS:g} s, try again"
            raise Refused(503, message, "overloaded") from None
        known = {name: value for name, value in {**self._info, **stats}.items() if name in ServerInfo.model_fields}
        info = ServerInfo.model_validate(
            {
                **known,
                "model": self._name,
                "ready": self.ready,
                "synthetic": self._config.synthetic,
                "seconds_to_ready": self._seconds_to_ready,
                "schema": 1,
            }
        )
        await exchange.reply(200, info.model_dump_json(by_alias=True).encode())

    async def _metrics(self, exchange: Exchange) -> None:
        if self._text is not None:
            try:
                self._stats = await self.engine.ask(SCRAPE_SECONDS)
                self._stats_at = time.monotonic()
            except TimeoutError:
                pass  # the last ones are given, with their age
        age = None if self._stats_at is None else time.monotonic() - self._stats_at
        kv_tokens = (self._info.get("memory") or {}).get("kv_tokens")
        text = exposition(self._meters, self._name, self._stats, age, kv_tokens)
        await exchange.reply(200, text, CONTENT_TYPE)

    async def _policy(self, exchange: Exchange) -> None:
        """Swap the draft or policy of the running server, from loopback or with the admin key."""
        self._check_admin(exchange)
        if not self.ready:
            raise self._not_ready()
        with self._budget.account() as take:
            raw = await exchange.body(take)
        draft = parse_draft(raw)
        try:
            swapped = await self.engine.set_draft(draft.model_dump(mode="json"), INFO_SECONDS)
        except TimeoutError:
            raise Refused(503, "the engine did not answer in time, try again", "overloaded") from None
        if swapped.error is not None:
            raise Refused(409, swapped.error, "conflict")
        self._info = {**self._info, "config": {**self._info["config"], "draft": swapped.draft}}
        await exchange.reply(200, encode({"draft": swapped.draft}))

    def _check_admin(self, exchange: Exchange) -> None:
        _need_json(exchange)
        if is_loopback(exchange.peer):
            return
        scheme, _, given = (exchange.header(b"authorization") or b"").partition(b" ")
        right = self._admin_key is not None and hmac.compare_digest(given.strip(), self._admin_key.encode())
        if scheme.lower() != b"bearer" or not right:
            raise Refused(403, "only loopback may do this, or Authorization: Bearer with the --admin-key", "forbidden")

    # Generation

    async def _read(self, exchange: Exchange, kind: type[ChatBody] | type[CompletionBody]) -> Any:
        """Return the parsed and admitted body of a generation request."""
        _need_json(exchange)
        with self._budget.account() as take:
            body = parse(await exchange.body(take), kind)
        self._check_name(body.model)
        if not self.ready:
            raise self._not_ready()
        if self.engine.open_requests >= self._limits.requests:
            raise Refused(429, f"{self._limits.requests} requests are open, try again later", "overloaded")
        return body

    async def _encode(self, text: Text, prompt: str, add_special_tokens: bool) -> list[int]:
        if text.cannot_fit(prompt, self._context):
            raise too_long(f"{len(prompt)} characters", self._context)
        if len(prompt) < LONG_TEXT:
            return text.encode(prompt, add_special_tokens)
        async with self._encoding:  # one at a time: the cores belong to the engine
            return await in_thread(lambda: text.encode(prompt, add_special_tokens))

    async def _completions(self, exchange: Exchange) -> None:
        arrived = time.monotonic()
        body: CompletionBody = await self._read(exchange, CompletionBody)
        text = self._loaded()
        check_supported(body)
        prompt = body.prompt
        if isinstance(prompt, list) and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        ids = await self._encode(text, prompt, True) if isinstance(prompt, str) else prompt
        await self._generate(exchange, Completion, body, ids, arrived)

    async def _chat(self, exchange: Exchange) -> None:
        arrived = time.monotonic()
        body: ChatBody = await self._read(exchange, ChatBody)
        text = self._loaded()
        check_supported(body)
        if text.chat is None:
            raise Refused(400, "this model has no chat template, use /v1/completions", param="messages")
        options = (body.model_extra or {}).get("chat_template_kwargs") or {}
        if not isinstance(options, dict):
            raise Refused(400, "chat_template_kwargs must be an object", param="chat_template_kwargs")
        try:
            prompt = text.chat.render([_plain(message) for message in body.messages], options)
        except ChatError as error:
            raise Refused(400, str(error), param="messages") from None
        ids = await self._encode(text, prompt, False)
        await self._generate(exchange, Chat, body, ids, arrived)

    def _loaded(self) -> Text:
        if self._text is None:
            raise self._not_ready()
        return self._text

    async def _generate(
        self, exchange: Exchange, shape: Shape, body: CompletionBody | ChatBody, ids: list[int], arrived: float
    ) -> None:
        text = self._loaded()
        wanted = job(body, ids, self._context, text)
        writer = Writer(shape, self._name, wanted, text)
        tally = Tally(len(ids))
        with self.engine.submit(wanted, arrived) as stream:
            watch = asyncio.create_task(exchange.gone())
            watch.add_done_callback(lambda _: stream.fail(ClientGone()))
            reason = "aborted"
            try:
                echoed = text.decode(ids, skip_special=False) if wanted.echo else ""
                pieces = _parts(stream, text.decoder(wanted.stops), wanted, echoed, tally)
                send = _stream if wanted.stream else _whole
                reason = await send(exchange, writer, wanted, pieces, tally)
            finally:
                watch.cancel()
                self._meters.finish(reason, time.monotonic() - arrived)


def _need_json(exchange: Exchange) -> None:
    """Refuse other content types: a page in a browser can send those to any address without asking."""
    given = exchange.header(b"content-type") or b""
    if given.split(b";")[0].strip().lower() != b"application/json":
        raise Refused(415, "send the header Content-Type: application/json", "unsupported_media_type")


def is_loopback(host: str) -> bool:
    """Return whether an address is this machine's own loopback."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


def _plain(message: Any) -> dict[str, Any]:
    """Return a message as a template sees it: parts of text joined by line ends."""
    fields: dict[str, Any] = message.model_dump()
    if isinstance(message.content, list):
        fields["content"] = "\n".join(part.text for part in message.content)
    return fields


async def _parts(stream: Stream, decoder: Decoder, wanted: Job, echoed: str, tally: Tally) -> AsyncIterator[Part]:
    """Yield what the rounds add, as they come; several rounds at once when they have piled up.

    `echoed`: the prompt's text, put before the first piece when the request echoes.
    """
    finish = None
    texts, scored = [echoed], [(wanted.prompt[0], None)] if wanted.echo and wanted.logprobs is not None else []
    while finish is None:
        tokens: list[int] = []
        for frame in await stream.rounds():
            if frame.finish == "error":
                raise _engine_error(frame, tally)
            piece = decoder.feed(frame.tokens, frame.finish)
            tally.add(len(piece.tokens), frame.verify_count)
            texts.append(piece.text)
            tokens += piece.tokens
            echo_from = len(scored)
            scored += zip(wanted.prompt[echo_from:], frame.prompt_logprobs, strict=False)
            scored += zip(piece.tokens, frame.logprobs, strict=False)
            finish = piece.finish
            if finish is not None:
                break
        if tokens or finish:
            yield Part(Piece("".join(texts), tuple(tokens), finish), tuple(scored))
            texts, scored = [], []


def _engine_error(frame: Tokens, tally: Tally) -> Refused:
    """Before the first token it is the request that cannot be served, after it the engine that cannot go on."""
    message = frame.error or "the engine gave no reason"
    if tally.completion_tokens == 0:
        return Refused(400, message)
    return Refused(500, message, "engine_error")


async def _whole(exchange: Exchange, writer: Writer, wanted: Job, parts: AsyncIterator[Part], tally: Tally) -> str:
    """Answer with one object; return the finish reason."""
    every = [part async for part in parts]
    await exchange.reply(200, writer.whole(every, tally))
    return every[-1].piece.finish or ""


async def _stream(exchange: Exchange, writer: Writer, wanted: Job, parts: AsyncIterator[Part], tally: Tally) -> str:
    """Answer with server-sent events; return the finish reason."""
    finish = ""
    async for part in parts:
        piece = part.piece
        if not exchange.started:  # errors before the first token still have a status of their own
            await exchange.start_stream()
        if piece.finish is None:
            if piece.text or wanted.token_ids or wanted.continuous_usage or part.scored:
                await exchange.write(writer.chunk(part, tally, wanted.continuous_usage, False))
            continue
        finish = piece.finish
        last = writer.chunk(part, tally, wanted.continuous_usage, not wanted.include_usage)
        if wanted.include_usage:
            last += writer.usage_chunk(tally)
        await exchange.write(last + b"data: [DONE]\n\n")
    await exchange.end_stream()
    return finish


ROUTES: dict[str, dict[str, Handler]] = {
    "/health": {"GET": Api._health},
    "/ready": {"GET": Api._ready},
    "/server_info": {"GET": Api._server_info},
    "/metrics": {"GET": Api._metrics},
    MODELS: {"GET": Api._models},
    "/v1/completions": {"POST": Api._completions},
    "/v1/chat/completions": {"POST": Api._chat},
    "/policy": {"POST": Api._policy},
}
