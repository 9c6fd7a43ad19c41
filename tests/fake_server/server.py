"""The fake server's process. Standard library only, so that it starts in milliseconds.

    python -I -S server.py PLAN.json MODEL --host H --port P

The plan says how it behaves; see `Plan` in `tests/fake_server/plan.py` for the words.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

WORD = "tok "


class Server:
    def __init__(self, plan: dict[str, Any], model: str, port: int) -> None:
        self.plan = plan
        self.model = plan["serve_as"] or model
        self.port = port
        self.began = time.monotonic()
        self.completions = 0
        self.streaming = 0
        self.leaked: list[bytes] = []
        self.asked = asyncio.Event()

    def is_bad(self) -> bool:
        """Whether the current completion is to break."""
        late = self.completions - self.plan["good_completions"]
        if late % self.plan["bad_every"]:
            return False
        return late > 0 and (self.plan["bad_completions"] is None or late <= self.plan["bad_completions"])

    async def run(self, host: str) -> None:
        if self.plan["ignore_sigterm"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.drain)
        server = await asyncio.start_server(self.serve, host, self.port, limit=2**24)
        async with server:
            self.fault("listening")
            if self.plan["listen"] == "close":
                await self.asked.wait()
                server.close()
                await asyncio.sleep(3600)
            await server.serve_forever()

    def drain(self) -> None:
        if self.plan["suicide_on_term"]:
            os.kill(os.getpid(), signal.SIGKILL)
        sys.stderr.write("drained\n")
        os._exit(self.plan["exit_on_term"])

    def fault(self, stage: str) -> None:
        """Die here if the plan says so."""
        if self.plan["die_at"] != stage:
            return
        for line in self.plan["last_words"]:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()
        if self.plan["die_signal"]:
            os.kill(os.getpid(), self.plan["die_signal"])
        os._exit(self.plan["die_code"])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, path = head.split(b" ", 2)[:2]
                length = 0
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                body = await reader.readexactly(length)
                if not await self.answer(writer, method.decode(), path.decode(), body):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, writer: asyncio.StreamWriter, method: str, path: str, body: bytes) -> bool:
        """Answer one request; return whether the connection stays open."""
        self.asked.set()
        if path in self.plan["hang_on"]:
            await asyncio.sleep(3600)
        if path in self.plan["redirects"]:
            return self.say(writer, 307, {})
        if path in self.plan["statuses"]:
            return self.say(writer, self.plan["statuses"][path], {})
        if path == "/v1/models" and self.plan["models"] is not None:
            return self.say(writer, 200, self.plan["models"])
        if path == "/v1/models":
            return self.say(writer, 200, {"object": "list", "data": [{"id": self.model}]})
        if path == "/health":
            return self.say(writer, 200, {})
        if path == "/ready":
            late = time.monotonic() - self.began < self.plan["ready_s"]
            return self.say(writer, 503 if late else 200, {})
        if path == "/server_info":
            return self.say(writer, 200, {"model": self.model, "config": self.plan["resolved"]})
        if path in ("/v1/completions", "/v1/chat/completions") and method == "POST":
            return await self.complete(writer, json.loads(body), "chat" in path)
        return self.say(writer, 404, {"error": {"message": f"no {path}"}})

    def say(self, writer: asyncio.StreamWriter, status: int, document: object) -> bool:
        raw = json.dumps(document).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        return True

    async def complete(self, writer: asyncio.StreamWriter, asked: dict[str, Any], chat: bool) -> bool:
        self.completions += 1
        plan = self.plan
        self.leaked.append(os.urandom(plan["leak_kib"] * 1024))
        os.write(2, b"x" * plan["spam_bytes"])
        if time.monotonic() - self.began < plan["warm_s"]:
            return self.say(writer, 503, {"error": {"message": "warming up", "type": "x"}})
        if self.is_bad():
            self.fault("completion")
            if plan["answer"] == "error":
                return self.say(writer, plan["status"], {"error": {"message": plan["message"], "type": "x"}})
            if plan["answer"] == "html":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 13\r\n\r\n<html></html>")
                return True
            if plan["answer"] == "hang":
                await asyncio.sleep(3600)
        if asked["model"] != self.model:
            return self.say(writer, 404, {"error": {"message": f"no model {asked['model']}"}})
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await Stream(self, writer, asked, chat).run()
        return bool(plan["keep_alive"])


class Stream:
    """One streamed completion, paced exactly: chunk i is written at start + first_ms + i · chunk_ms."""

    def __init__(self, server: Server, writer: asyncio.StreamWriter, asked: dict[str, Any], chat: bool) -> None:
        self.server = server
        self.plan = server.plan
        self.writer = writer
        self.chat = chat
        self.total = min(asked["max_tokens"], self.plan["stop_after"] or 10**9) + self.plan["overshoot"]
        self.continuous = (
            bool(asked.get("stream_options", {}).get("continuous_usage_stats")) and self.plan["continuous"]
        )
        self.bad = server.is_bad()
        self.held = b""

    async def run(self) -> None:
        plan, start, sent, index = self.plan, time.monotonic(), 0, 0
        self.server.streaming += 1
        if self.server.streaming > plan["most_at_once"]:
            self.server.fault("crowd")
        while sent < self.total:
            due = start + (plan["first_ms"] + index * plan["chunk_ms"]) / 1e3
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if self.bad and index == plan["break_at"]:
                await self.misbehave()
            count = min(plan["tokens_per_chunk"], self.total - sent)
            sent += count
            index += 1
            self.event(self.choice(self.words(count), plan["finish"] if sent == self.total else None, sent))
        self.server.streaming -= 1  # before the client knows, who then sends the next one
        self.finish(index)
        await self.writer.drain()

    def words(self, count: int) -> str:
        return str(self.plan["text"] or WORD) * count

    async def misbehave(self) -> None:
        match self.plan["answer"]:
            case "reset":
                self.writer.transport.abort()  # type: ignore[attr-defined]
                raise ConnectionError
            case "stall":
                await asyncio.sleep(3600)
            case "die":
                self.server.fault("stream")
            case "not_json":
                self.chunk(b"data: {oops\n\n")
            case "error_event":
                self.event({"error": {"message": "planned", "type": "x"}})

    def choice(self, text: str, finish: str | None, sent: int) -> dict[str, Any]:
        content = {"delta": {"content": text}} if self.chat else {"text": text}
        if finish is not None and self.bad and self.plan["answer"] == "no_finish":
            finish = None
        document: dict[str, Any] = {"choices": [{"index": 0, "finish_reason": finish, **content}]}
        if self.continuous:
            document["usage"] = {"prompt_tokens": 3, "completion_tokens": sent}
        return document

    def finish(self, rounds: int) -> None:
        if not (self.bad and self.plan["answer"] == "no_usage"):
            last: dict[str, Any] = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": self.total}}
            if self.plan["accept_length"] is not None:
                last["spec"] = {"accept_length": self.plan["accept_length"], "verify_count": rounds}
            self.event(last)
        if not (self.bad and self.plan["answer"] == "no_done"):
            self.chunk(b"data: [DONE]\n\n")
        self.writer.write(self.held + b"0\r\n\r\n")

    def event(self, document: dict[str, Any]) -> None:
        self.chunk(b"data: " + json.dumps(document).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        framed = b"%x\r\n%b\r\n" % (len(data), data)
        if self.plan["buffered"]:
            self.held += framed
        else:
            self.writer.write(framed)


def spawn_children(plan: dict[str, Any], mark: str) -> None:
    """Leave processes that a careless stop would miss: in a new session without environment, and a double fork's."""
    if plan["children"]:
        sleeper = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)", mark]
        subprocess.Popen(sleeper, start_new_session=True, env={})
        if os.fork() == 0:
            subprocess.Popen(sleeper, start_new_session=True)
            os._exit(0)
        os.wait()


def become_daemon() -> None:
    """Leave the started process behind, as daemons do."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)


def load(plan: dict[str, Any]) -> None:
    """Take `start_s` to load, as noisily and greedily as planned."""
    taken = []
    end = time.monotonic() + plan["start_s"]
    while (left := end - time.monotonic()) > 0:
        if plan["start_log"]:
            os.write(2, plan["start_log"].encode() + b"\n")
        taken.append(os.urandom(plan["start_mib"] * 2**20))
        time.sleep(min(0.05, left))


def main() -> None:
    path, model, _, host, _, port = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        plan = json.load(file)
    spawn_children(plan, path)
    if plan["daemon"]:
        become_daemon()
    for _ in range(0, plan["chatter_bytes"], 2**20):
        sys.stderr.write("x" * min(2**20, plan["chatter_bytes"]) + "\n")
    sys.stderr.write("loading\n")
    sys.stderr.flush()
    server = Server(plan, model, int(port))
    server.fault("start")
    while plan["listen"] == "spin":
        pass
    if plan["listen"] == "never":
        time.sleep(3600)
    load(plan)
    server.fault("loaded")
    if plan["listen"] == "deaf":
        with socket.create_server((host, int(port)), backlog=0):
            time.sleep(3600)
    asyncio.run(server.run(host))


if __name__ == "__main__":
    main()
