"""Malformed HTTP requests, seeded and bounded, against any server of the engine's API.

    python -m tests.engine.fuzz_http --port 8000 --model bundled --count 10000 --json out.json

`attacks` makes them, `attack` sends them over raw sockets and judges the answers: every one of them is either an
HTTP answer whose error, if any, is OpenAI's JSON with the same code, or a closed connection; never a 5xx without a
cause (503 says that there is too much at once).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

SECONDS = 30.0  # for one exchange; the server's own limits are shorter
CAUSED = {503}
PATHS = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True)
class Attack:
    """Bytes to send: parts with pauses between them.

    Attributes:
        leave: close without reading the answer; `read` bytes of it first.
        expect: the status that must come back, None for any that `judge` lets pass.
    """

    kind: str
    parts: tuple[bytes, ...]
    pause: float = 0.0
    leave: bool = False
    read: int = 0
    expect: int | None = None


@dataclass
class Report:
    """What came of it."""

    sent: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


WEIRD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 10**400, -(2**63), 2**31, "", "x", "\x00", "é" * 50, [], {}, [[]], [None], [True],
    ["a", 1], [1, "a"], [-1], [2**40], {"a": {"b": []}}, [[[[[[1]]]]]], "null", [1.5], ["a"] * 40, {"type": "text"},
)  # fmt: skip
FIELDS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "stream", "stream_options", "stop", "seed",
    "temperature", "top_p", "top_k", "n", "ignore_eos", "return_token_ids", "echo", "logprobs", "top_logprobs",
    "best_of", "suffix", "tools", "logit_bias", "response_format", "presence_penalty", "chat_template_kwargs", "user",
    "chat_template", "min_tokens", "unheard_of",
)  # fmt: skip
TOKENS = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b'"\\ud800"',
    b'"\\udc00\\ud800"',
    b"0x10",
    b"01",
    b"'a'",
    b"nul",
)


class Maker:
    """Draws attacks of every kind."""

    def __init__(self, model: str, seed: int) -> None:
        self._model = model
        self._random = random.Random(seed)
        self._kinds: list[tuple[int, Callable[[], Attack]]] = [
            (2, self.valid),
            (10, self.wrong_values),
            (4, self.broken_json),
            (4, self.odd_tokens),
            (2, self.deep),
            (2, self.huge_field),
            (1, self.huge_body),
            (3, self.half_body),
            (3, self.half_headers),
            (2, self.slow),
            (4, self.bad_http),
            (3, self.bad_framing),
            (2, self.chunked),
            (2, self.bad_route),
            (1, self.huge_headers),
            (2, self.leaves),
            (1, self.pipelined),
        ]

    def draw(self) -> Attack:
        """Return the next attack."""
        weights, makers = zip(*self._kinds, strict=True)
        maker: Callable[[], Attack] = self._random.choices(makers, weights)[0]
        return maker()

    def _body(self, path: str) -> dict[str, Any]:
        text = self._random.choice(["hello", "the the", "é漢字", "a b c"])
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": self._random.randint(1, 4),
            "temperature": self._random.choice([0, 0.7]),
        }
        if path == PATHS[0]:
            return body | {"prompt": text}
        return body | {"messages": [{"role": "user", "content": text}]}

    def _path(self) -> str:
        return self._random.choice(PATHS)

    def _request(self, body: bytes, path: str | None = None, method: str = "POST", **headers: str) -> bytes:
        fields = {"host": "x", "content-type": "application/json", "content-length": str(len(body))}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        fields["connection"] = "close"
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"{method} {path or self._path()} HTTP/1.1\r\n{lines}\r\n".encode("utf-8", "surrogatepass") + body

    def valid(self) -> Attack:
        """A request that must succeed in the middle of all this."""
        body = self._body(PATHS[0]) | {"stream": self._random.random() < 0.5}
        return Attack("valid", (self._request(json.dumps(body).encode(), PATHS[0]),), expect=200)

    def wrong_values(self) -> Attack:
        """A body with some fields of the wrong type, out of range, missing or unknown."""
        path = self._path()
        body = self._body(path)
        for name in self._random.sample(FIELDS, self._random.randint(1, 4)):
            body[name] = self._random.choice(WEIRD)
        if self._random.random() < 0.2:
            body.pop(self._random.choice(list(body)))
        if "messages" in body and self._random.random() < 0.4:
            body["messages"] = [{"role": self._random.choice(WEIRD), "content": self._random.choice(WEIRD)}]
        document: Any = body if self._random.random() < 0.95 else self._random.choice(WEIRD)
        return Attack("wrong_values", (self._request(json.dumps(document).encode(), path),))

    def broken_json(self) -> Attack:
        """Cut short, with bytes changed, or random."""
        path = self._path()
        data = bytearray(json.dumps(self._body(path)).encode())
        choice = self._random.randrange(3)
        if choice == 0:
            data = data[: self._random.randrange(len(data))]
        elif choice == 1:
            for _ in range(self._random.randint(1, 8)):
                data[self._random.randrange(len(data))] = self._random.randrange(256)
        else:
            data = bytearray(self._random.randbytes(self._random.randrange(200)))
        return Attack("broken_json", (self._request(bytes(data), path),))

    def odd_tokens(self) -> Attack:
        """Values that JSON does not have, or that are no text."""
        path = self._path()
        body = self._body(path)
        marker = "@@marker@@"
        body[self._random.choice(FIELDS)] = marker
        data = json.dumps(body).encode().replace(f'"{marker}"'.encode(), self._random.choice(TOKENS))
        return Attack("odd_tokens", (self._request(data, path),))

    def deep(self) -> Attack:
        """Nesting far past any recursion limit."""
        depth = self._random.choice([100, 1000, 100_000])
        opening, closing = self._random.choice([(b"[", b"]"), (b'{"a":', b"}")])
        value = opening * depth + (b"1" + closing * depth if self._random.random() < 0.5 else b"")
        return Attack("deep", (self._request(b'{"model":"x","prompt":' + value + b"}"),))

    def huge_field(self) -> Attack:
        """A field of up to half a megabyte."""
        path = self._path()
        size = self._random.choice([10_000, 100_000, 500_000])
        value = self._random.choice(
            ["a" * size, "é" * (size // 2), [1] * (size // 2), [[]] * (size // 4), ["a"] * (size // 5)]
        )
        body = self._body(path) | {self._random.choice(FIELDS): value}
        return Attack("huge_field", (self._request(json.dumps(body).encode(), path),))

    def huge_body(self) -> Attack:
        """More than the limit: announced, or sent."""
        if self._random.random() < 0.7:
            return Attack("huge_body", (self._request(b"{", content_length=str(10**9)),), expect=413)
        data = b'{"model":"' + b"a" * (9 * 2**20)
        return Attack("huge_body", (self._request(data),), expect=413)

    def half_body(self) -> Attack:
        """Less body than announced, then gone."""
        data = self._request(json.dumps(self._body(PATHS[0])).encode(), PATHS[0])
        return Attack("half_body", (data[: len(data) - self._random.randint(1, 30)],), leave=True)

    def half_headers(self) -> Attack:
        """Not even all headers, then gone."""
        data = self._request(b"{}")
        return Attack("half_headers", (data[: self._random.randrange(60)],), leave=True)

    def slow(self) -> Attack:
        """Drop by drop."""
        data = self._request(json.dumps(self._body(PATHS[0])).encode(), PATHS[0])
        cut = sorted(self._random.sample(range(1, len(data)), 5))
        parts = tuple(data[a:b] for a, b in zip([0, *cut], [*cut, len(data)], strict=True))
        return Attack("slow", parts, pause=0.02, expect=200)

    def bad_http(self) -> Attack:
        """What is no HTTP request."""
        lines = [
            b"\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
            b"GET /health HTTP/1.1\r\nhost: \x00\r\n\r\n", b"\x00" * 50, b"GET http://[ HTTP/1.1\r\n\r\n",
            b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", b"OPTIONS * HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
            b"GET /%ff%fe HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
            b"POST /v1/completions HTTP/1.0\r\n\r\n", self._random.randbytes(100) + b"\r\n\r\n",
        ]  # fmt: skip
        return Attack("bad_http", (self._random.choice(lines),), leave=self._random.random() < 0.5)

    def bad_framing(self) -> Attack:
        """Lengths and encodings that contradict each other or the data."""
        body = json.dumps(self._body(PATHS[0])).encode()
        length, *extra = self._random.choice(
            [
                ("-1",),
                ("abc",),
                ("1e3",),
                ("9" * 40,),
                (str(len(body)), "chunked"),
                ("0",),
                ("3",),
                ("+5",),
                ("", "gzip"),
            ]
        )
        headers = {"content_length": length} | ({"transfer_encoding": extra[0]} if extra else {})
        return Attack("bad_framing", (self._request(body, PATHS[0], **headers),))

    def chunked(self) -> Attack:
        """A chunked body, sound or not."""
        body = json.dumps(self._body(PATHS[0])).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        head += b"transfer-encoding: chunked\r\n\r\n"
        middle = len(body) // 2
        sound = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:middle], body[middle:])) + b"0\r\n\r\n"
        if self._random.random() < 0.4:
            return Attack("chunked", (head + sound,), expect=200)
        broken = [b"zz\r\n" + sound, b"-5\r\n" + sound, b"fffffffffffffffff\r\n" + sound, b"\r\n" * 50, sound[:-10]]
        return Attack("chunked", (head + self._random.choice(broken),), leave=self._random.random() < 0.8, pause=0.01)

    def bad_route(self) -> Attack:
        """Wrong path, method, type or model."""
        body = json.dumps(self._body(PATHS[0])).encode()
        request, status = self._random.choice(
            [
                (self._request(body, "/nowhere"), 404),
                (self._request(body, "/v1/completions", "PUT"), 405),
                (self._request(body, "/health", "DELETE"), 405),
                (self._request(b"", "/v1/completions", "GET"), 405),
                (self._request(body, PATHS[0], content_type="text/plain"), 415),
                (self._request(body, PATHS[0], content_type=""), 415),
                (self._request(body.replace(b'"model": ', b'"model": "no-', 1).replace(b'-"', b"-"), PATHS[0]), 404),
                (self._request(body, "/policy"), 400),
                (self._request(b"", "/v1/models/" + "x" * 5000, "GET"), 404),
            ]
        )
        return Attack("bad_route", (request,), expect=status)

    def huge_headers(self) -> Attack:
        """One huge header, many of them, or a huge path."""
        size = self._random.choice([100_000, 400_000])
        data = self._random.choice(
            [
                self._request(b"{}", x_big="a" * size),
                b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * (size // 6) + b"\r\n",
                b"GET /" + b"a" * size + b" HTTP/1.1\r\nhost: x\r\n\r\n",
                b"GET /" + b"a" * size,
            ]
        )
        return Attack("huge_headers", (data,))

    def leaves(self) -> Attack:
        """A fair request for a long answer, and gone after its first bytes, or before."""
        body = self._body(PATHS[0]) | {"stream": self._random.random() < 0.7, "max_tokens": 200, "ignore_eos": True}
        data = self._request(json.dumps(body).encode(), PATHS[0])
        return Attack(
            "leaves", (data,), leave=True, read=self._random.choice([0, 1, 200, 1000]) if body["stream"] else 0
        )

    def pipelined(self) -> Attack:
        """The next request before the answer to this one."""
        data = self._request(json.dumps(self._body(PATHS[0])).encode(), PATHS[0]).replace(b"connection: close\r\n", b"")
        count = self._random.randint(2, 20)
        return Attack("pipelined", (data * count,), leave=self._random.random() < 0.5, read=100)


def attacks(count: int, model: str, seed: int) -> Iterator[Attack]:
    """Yield `count` attacks; the same ones for the same seed."""
    maker = Maker(model, seed)
    for _ in range(count):
        yield maker.draw()


async def _exchange(port: int, attack: Attack) -> bytes | None:
    """Send an attack and return the answer, None when it was not waited for."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    try:
        for part in attack.parts:
            writer.write(part)
            await writer.drain()
            if attack.pause:
                await asyncio.sleep(attack.pause)
        if attack.leave:
            if attack.read:
                await reader.read(attack.read)
            return None
        if attack.expect is None:
            writer.write_eof()  # the server may rightly wait for more; this is all there is
        return await reader.read()
    except OSError:
        return b""
    finally:
        writer.close()


def judge(attack: Attack, answer: bytes) -> tuple[str, str | None]:
    """Return (status or "closed", what is wrong with the answer)."""
    if not answer:
        wrong = None if attack.expect is None else f"{attack.kind}: closed, expected {attack.expect}"
        return "closed", wrong
    head, _, rest = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    body = rest[: int(length[1])] if length else rest  # what follows answers what the server took for a next request
    try:
        status = int(head.split(b" ")[1])
    except (ValueError, IndexError):
        return "no HTTP", f"{attack.kind}: no HTTP answer: {answer[:80]!r}"
    if attack.expect is not None and status != attack.expect:
        return str(status), f"{attack.kind}: {status}, expected {attack.expect}: {body[:200]!r}"
    if status >= 500 and status not in CAUSED:
        return str(status), f"{attack.kind}: {status}: {body[:200]!r} to {attack.parts[0][-200:]!r}"
    if status >= 400:
        try:
            error = json.loads(body)["error"]
            sound = error["code"] == status and isinstance(error["message"], str) and error["type"]
        except (ValueError, KeyError, TypeError):
            sound = False
        if not sound or b"\n" in body:
            return str(status), f"{attack.kind}: {status} without an error object: {body[:200]!r}"
    return str(status), None


async def run(port: int, made: Iterable[Attack], concurrency: int = 8) -> Report:
    """Send every attack, `concurrency` at a time."""
    report = Report()
    source = iter(made)

    async def worker() -> None:
        for attack in source:
            report.sent += 1
            report.kinds[attack.kind] += 1
            try:
                async with asyncio.timeout(SECONDS):
                    answer = await _exchange(port, attack)
            except TimeoutError:
                report.violations.append(f"{attack.kind}: no end after {SECONDS:g} s: {attack.parts[0][:200]!r}")
                continue
            if answer is not None:
                status, wrong = judge(attack, answer)
                report.statuses[status] += 1
                if wrong:
                    report.violations.append(wrong)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return report


def main() -> int:
    """Attack a running server; status 1 when an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=8)
    options = parser.parse_args()
    report = asyncio.run(run(options.port, attacks(options.count, options.model, options.seed), options.concurrency))
    print(
        json.dumps(
            {"sent": report.sent, "kinds": report.kinds, "statuses": report.statuses, "violations": report.violations},
            indent=1,
        )
    )
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
