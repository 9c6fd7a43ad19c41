"""Servers as real processes for the tests: a tiny model folder, a start, and a stop that leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.waiting import DEADLINE, alive, wait_until

ROOT = Path(__file__).parents[2]
EOS, MASK = 0, 1
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer: two special tokens, 256 bytes, a few merges, one added word."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("t", "he"), ("Ġ", "the"), ("w", "o"), ("Ġ", "w")]
    names = ["<|end|>", "<|mask|>", *alphabet, *(left + right for left, right in pairs)]
    tokenizer = Tokenizer(
        models.BPE({name: index for index, name in enumerate(dict.fromkeys(names))}, pairs[:5] + pairs[6:])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|mask|>"])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("wörd now", "wörd", "漢")])
    return tokenizer


def text_folder(folder: Path, chat: bool = True, **generation: Any) -> Path:
    """Write everything textual of a model, no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300, "eos_token_id": EOS}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS], **generation}))
    options = {"eos_token": "<|end|>", **({"chat_template": TEMPLATE} if chat else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen[bytes]
    reader: threading.Thread = field(init=False)
    lines: list[str] = field(default_factory=list)
    url: str = ""
    port: int = 0
    engine_pid: int = 0

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return the JSON events written so far."""
        return [json.loads(line) for line in list(self.lines) if line.startswith('{"event"')]

    def event(self, name: str, deadline: float = DEADLINE) -> dict[str, Any]:
        """Wait for an event; a server that ends without it fails at once."""

        def seen() -> dict[str, Any] | None:
            over = self.process.poll() is not None and not self.reader.is_alive()
            found = next((each for each in self.events if each["event"] == name), None)
            if over and found is None:
                raise AssertionError(f"no event {name!r} before the end:\n" + "\n".join(self.lines))
            return found

        event: dict[str, Any] = wait_until(seen, name, deadline)
        return event

    def ended(self) -> dict[str, Any]:
        """Wait for the process's end; return its exit event, with the status."""
        status = self.process.wait(timeout=DEADLINE)
        event = self.event("exit")
        assert event["code"] == status
        assert not alive(self.engine_pid), "the engine process outlived the front"
        return event

    def client(self) -> httpx.Client:
        """Return a client of this server."""
        return httpx.Client(base_url=self.url, timeout=DEADLINE, verify=False)  # plain HTTP: load no certificates


@contextmanager
def started(command: Sequence[str]) -> Iterator[Served]:
    """Run a server command in a group of its own; kill the group at the end."""
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True)
    served = Served(process)

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            served.lines.append(line.decode(errors="replace").rstrip("\n"))

    served.reader = threading.Thread(target=read, daemon=True)
    served.reader.start()
    try:
        yield served
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        served.reader.join(DEADLINE)


@contextmanager
def fake(
    folder: Path, *worker: str, limits: dict[str, Any] | None = None, ready: bool = True, plain: bool = False
) -> Iterator[Served]:
    """Serve `folder` with the fake engine process; `worker` are its options, `plain` does without httptools."""
    options = ["--limits", json.dumps(limits or {}), "--worker", json.dumps(worker)]
    command = [sys.executable, "-m", "tests.engine.serve_fake", str(folder), *options, *["--plain"] * plain]
    with started(command) as served:
        event = served.event("listening")
        served.url, served.port, served.engine_pid = event["url"], event["port"], event["engine_pid"]
        if ready:
            served.event("ready")
        yield served


def raw_request(body: bytes | str, path: str = "/v1/completions", method: str = "POST", **headers: str) -> bytes:
    """Return an HTTP request as bytes."""
    data = body.encode() if isinstance(body, str) else body
    fields = {"host": "x", "content-type": "application/json", "content-length": str(len(data))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + data


async def talk(port: int, data: bytes, seconds: float = DEADLINE) -> bytes:
    """Send bytes and return all that comes until the server closes."""
    async with asyncio.timeout(seconds):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            return await reader.read()
        finally:
            writer.close()
