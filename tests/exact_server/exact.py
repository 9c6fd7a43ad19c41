"""The exact server, in Python: see __init__.py for what it does. Raw sockets, one thread, standard library only.

    python -I -S exact.py LO HI INTERVAL_US JITTER_US FIRST_US SEED

Prints "port N" and ends when its standard input does.
"""

from __future__ import annotations

import heapq
import os
import re
import selectors
import socket
import sys
import time

MASK = 2**64 - 1
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MODELS = b'{"object":"list","data":[{"id":"exact","object":"model"}]}'
WORD = b" tok"
now = time.monotonic_ns


class Random:
    """splitmix64 (Steele, Lea & Flood 2014)."""

    def __init__(self, state: int) -> None:
        self.state = state & MASK

    def next(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)


class Schedule:
    """What chunks carry and when they are due."""

    def __init__(self, lo: int, hi: int, interval: int, jitter: int, first: int, seed: int) -> None:
        self.lo, self.hi, self.seed = lo, hi, seed
        self.interval, self.jitter, self.first = 1000 * interval, 1000 * jitter, 1000 * first

    def random(self, number: int) -> Random:
        return Random(self.seed ^ ((number * 0xD1342543DE82EF95) & MASK))

    def chunk(self, random: Random, received: int, index: int) -> tuple[int, int]:
        """Return (when chunk `index` is due, its tokens)."""
        r = random.next()
        tokens = self.lo + (r & 0xFFFFFFFF) % (self.hi - self.lo + 1)
        return received + self.first + index * self.interval + (r >> 32) % (self.jitter + 1), tokens


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


class Stream:
    """One answer under way."""

    def __init__(self, number: int, body: bytes, chat: bool, received: int, schedule: Schedule) -> None:
        self.number, self.received, self.schedule = number, received, schedule
        self.total = field(body, b"max_tokens", field(body, b"max_completion_tokens", 16))
        self.continuous = field(body, b"continuous_usage_stats", 0) == 1
        self.object = b"chat.completion.chunk" if chat else b"text_completion"
        self.form = b'"delta":{"content":"%b"}' if chat else b'"text":"%b"'
        self.random = schedule.random(number)
        self.index = self.sent = 0
        self.log: list[tuple[int, int]] = []
        self.plan()

    def plan(self) -> None:
        self.due, tokens = self.schedule.chunk(self.random, self.received, self.index)
        self.tokens = min(tokens, self.total - self.sent)

    def render(self) -> bytes:
        """Return the next chunk, with the end of the answer where it is the last."""
        self.sent += self.tokens
        self.index += 1
        usage = b'"usage":{"prompt_tokens":3,"completion_tokens":%d}' % self.sent
        start = b'data: {"id":"%d","object":"%b","created":0,"model":"exact","choices":[' % (self.number, self.object)
        finish = b'"length"' if self.over else b"null"
        choice = b'{"index":0,%b,"finish_reason":%b}]' % (self.form % (WORD * min(self.tokens, 40)), finish)
        data = chunked(start + choice + (b"," + usage if self.continuous else b"") + b"}\n\n")
        if self.over:
            data += chunked(start + b"]," + usage + b"}\n\n") + chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        return data

    @property
    def over(self) -> bool:
        return self.sent >= self.total

    def line(self) -> bytes:
        return b"%d %d" % (self.number, self.received) + b"".join(b" %d:%d" % write for write in self.log) + b"\n"


def field(body: bytes, name: bytes, missing: int) -> int:
    found = re.search(rb'"%b"\s*:\s*(true|\d+)' % name, body)
    if found is None:
        return missing
    return 1 if found[1] == b"true" else int(found[1])


class Server:
    """Accepts, reads, and writes what is due."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.selector = selectors.DefaultSelector()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.listener.setblocking(False)
        self.read: dict[socket.socket, bytearray] = {}
        self.unsent: dict[socket.socket, bytearray] = {}
        self.due: list[tuple[int, int, Stream, socket.socket]] = []
        self.entries: list[Stream] = []
        self.order = 0

    def run(self) -> None:
        print("port", self.listener.getsockname()[1], flush=True)
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(0, selectors.EVENT_READ)
        while True:
            wait = None if not self.due else max(0.0, (self.due[0][0] - now()) / 1e9 - 1e-3)
            ready = self.selector.select(wait)  # wakes up to a millisecond early: epoll counts in milliseconds
            while self.due and not ready and 0 < self.due[0][0] - now() <= 1_000_000:
                time.sleep((self.due[0][0] - now()) / 2e9 if self.due[0][0] - now() > 60_000 else 0)
            self.write_due()
            for key, events in ready:
                if key.fileobj is self.listener:
                    self.accept()
                elif key.fd == 0:
                    if not os.read(0, 64):
                        return
                elif isinstance(key.fileobj, socket.socket):
                    if events & selectors.EVENT_WRITE:
                        self.say(key.fileobj, b"")
                    if events & selectors.EVENT_READ:
                        self.take(key.fileobj)

    def accept(self) -> None:
        connection, _ = self.listener.accept()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.read[connection] = bytearray()
        self.selector.register(connection, selectors.EVENT_READ)

    def drop(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        del self.read[connection]
        self.unsent.pop(connection, None)
        self.due = [item for item in self.due if item[3] is not connection]
        heapq.heapify(self.due)
        connection.close()

    def write_due(self) -> None:
        while self.due and self.due[0][0] <= now():
            _, order, stream, connection = self.due[0]
            data = stream.render()
            stream.log.append((now(), stream.tokens))
            self.say(connection, data)
            if stream.over:
                heapq.heappop(self.due)
            else:
                stream.plan()
                heapq.heapreplace(self.due, (stream.due, order, stream, connection))

    def say(self, connection: socket.socket, data: bytes) -> None:
        pending = self.unsent.pop(connection, bytearray()) + data
        try:
            del pending[: connection.send(pending)]
        except BlockingIOError:
            pass
        except OSError:
            return  # the reader is gone; reading tells
        if pending:
            self.unsent[connection] = pending
        self.selector.modify(connection, selectors.EVENT_READ | (selectors.EVENT_WRITE if pending else 0))

    def take(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(2**20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        received = now()
        if not data:
            self.drop(connection)
            return
        buffer = self.read[connection]
        buffer += data
        while (end := buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(buffer[:end])
            length = re.search(rb"content-length:\s*(\d+)", head, re.IGNORECASE)
            total = end + 4 + (int(length[1]) if length else 0)
            if len(buffer) < total:
                return
            body = bytes(buffer[end + 4 : total])
            del buffer[:total]
            self.answer(connection, head, body, received)

    def answer(self, connection: socket.socket, head: bytes, body: bytes, received: int) -> None:
        if head.startswith(b"POST"):
            self.order += 1
            number = field(body, b"seed", 10**9 + self.order)
            stream = Stream(number, body, b"chat" in head.split(b"\r\n")[0], received, self.schedule)
            self.entries.append(stream)
            self.say(connection, HEAD)
            heapq.heappush(self.due, (stream.due, self.order, stream, connection))
            return
        data = MODELS
        if b" /log " in head:
            data = b"".join(stream.line() for stream in self.entries)
            self.entries = self.entries if self.due else []
        self.say(connection, b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data) + data)


if __name__ == "__main__":
    Server(Schedule(*map(int, sys.argv[1:]))).run()
