"""An HTTP server with a tiny language of its own, whose next token and its alternatives are known: by a rule, not by a
model. It answers completions by token ids as the engine does, and misspeaks where a test wants it to.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from engine.backends import Native
from tuner.load.client import Endpoint
from tuner.parity import Server

VOCABULARY = 997
STEP = 0.125  # nats between two alternatives: the unit of bfloat16 at logits between 16 and 32

Misspeak = Callable[[tuple[int, ...], int, int], int]
"""(prompt, index of the token, requests in flight) -> which alternative is said; 0 is the best."""


def best(context: Sequence[int]) -> int:
    """Return the best next token."""
    return (31 * context[-1] + 17 * context[-2] + 7 * len(context)) % VOCABULARY


def alternatives(context: Sequence[int]) -> list[tuple[int, float]]:
    """Return the twenty likeliest tokens, best first."""
    return [((best(context) + 11 * rank) % VOCABULARY, -0.1 - STEP * rank) for rank in range(20)]


def well(prompt: tuple[int, ...], index: int, flying: int) -> int:
    """Say the best token, always."""
    return 0


@dataclass
class Speaker:
    """The server. `end`: tokens are cut to so many fewer, or more, than asked for. `accept`: accept length by the
    requests in flight. `circle`: from this context length on it repeats a token. `status`: of every answer.
    """

    misspeak: Misspeak = well
    end: int = 0
    accept: Callable[[int], float | None] = lambda flying: 3.0
    circle: int | None = None
    status: int = 200
    scores: bool = True
    asked: list[dict[str, Any]] = field(default_factory=list)
    flying: int = 0

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Server]:
        """Serve on a free port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            yield Server(Endpoint("127.0.0.1", port), Native(), "speaker", 30.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            self.asked.append(body)
            self.flying += 1
            await asyncio.sleep(0)  # those that came together are in flight together
            raw = json.dumps(self.answer(body)).encode()
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (self.status, len(raw)) + raw)
            await writer.drain()
            self.flying -= 1
        finally:
            writer.close()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the completion."""
        prompt = body["prompt"] if isinstance(body["prompt"], list) else [ord(c) % VOCABULARY for c in body["prompt"]]
        context, count = list(prompt), body["max_tokens"] + (self.end if body["max_tokens"] > 1 else 0)
        tops = [alternatives(context[:i]) if i > 1 else [(context[i], 0.0)] for i in range(1, len(context))]
        for index in range(count):
            likely = alternatives(context)
            tops.append(likely)
            if self.circle is not None and len(context) >= self.circle:
                context.append(5)
                continue
            rank = self.misspeak(tuple(prompt), index, self.flying)
            context.append(likely[rank][0] if rank < 20 else VOCABULARY + 1)
        choice: dict[str, Any] = {"token_ids": context[len(prompt) :], "prompt_token_ids": prompt, "text": ""}
        if body.get("logprobs") and self.scores:
            first = 0 if body.get("echo") else len(prompt)
            choice["logprobs"] = self._logprobs(context, [None, *tops], first)
        accept = self.accept(self.flying)
        rounds = 0 if accept is None else round(count / accept)
        return {"choices": [choice], "spec": {"accept_length": accept, "verify_count": rounds}}

    def _logprobs(self, context: list[int], tops: list[Any], first: int) -> dict[str, Any]:
        scored = list(zip(context, tops, strict=True))[first:]
        return {
            "tokens": [f"token_id:{token}" for token, _ in scored],
            "token_logprobs": [None if top is None else dict(top).get(token, -9.0) for token, top in scored],
            "top_logprobs": [None if top is None else {f"token_id:{t}": v for t, v in top} for _, top in scored],
        }
