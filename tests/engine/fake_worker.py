"""A stand-in for `engine.worker`: a real process that speaks `engine.wire` and echoes the prompt, round after round.

Token i of an answer is prompt[i mod length], so a test chooses the text by the prompt. The first round gives one
token (the prefill's), every later one `--rows` of them.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from engine.wire import Ask, Cancel, Drain, Fatal, Frame, Info, LineBuffer, Ready, Submit, Tokens, encode


@dataclass
class Running:
    """One request's progress."""

    submit: Submit
    done: int = 0
    verify_count: int = 0


@dataclass
class Worker:
    """Requests in, rounds out."""

    options: argparse.Namespace
    waiting: list[Submit] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    rounds: int = 0
    tokens: int = 0
    cancelled: int = 0
    draining: bool = False

    def take(self, frame: Frame) -> list[Frame]:
        """Act on a frame; return what to answer."""
        match frame:
            case Submit(number, prompt):
                if self.options.refuse_over and len(prompt) > self.options.refuse_over:
                    return [Tokens(number, (), "error", error="the request can never fit")]
                self.waiting.append(frame)
            case Cancel(number):
                self.cancelled += 1
                self.waiting = [each for each in self.waiting if each.id != number]
                self.running = [each for each in self.running if each.submit.id != number]
            case Ask(number):
                return [Info(number, self.stats())]
            case Drain():
                self.draining = True
        return []

    def stats(self) -> dict[str, Any]:
        """Return what `Info` carries; `graph_rounds` counts cancels, for tests."""
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "tokens_used": 10 * len(self.running),
            "rounds": {"rounds": self.rounds, "tokens": self.tokens, "graph_rounds": self.cancelled},
            "acceptance": {
                "accept_length": 2.5,
                "accept_rate": 0.5,
                "verify_count": self.rounds,
                "by_position": [0.75, 0.5],
            },
        }

    def round(self) -> list[Tokens]:
        """Advance every running request."""
        while self.waiting and len(self.running) < self.options.max_running:
            self.running.append(Running(self.waiting.pop(0)))
        self.rounds += 1
        frames = [self._advance(each) for each in self.running]
        self.running = [each for each, frame in zip(self.running, frames, strict=True) if frame.finish is None]
        return frames

    def _advance(self, each: Running) -> Tokens:
        prompt = each.submit.prompt
        count = 1 if each.done == 0 else self.options.rows
        each.verify_count += each.done > 0
        tokens: list[int] = []
        finish = None
        for _ in range(count):
            tokens.append(prompt[each.done % len(prompt)])
            each.done += 1
            self.tokens += 1
            if tokens[-1] in each.submit.eos:
                finish = "stop"
            elif each.done == each.submit.max_tokens:
                finish = "length"
            if finish:
                break
        if self.options.break_after and each.done >= self.options.break_after:
            return Tokens(each.submit.id, (), "error", each.verify_count, "the cache is full")
        return Tokens(each.submit.id, tuple(tokens), finish, each.verify_count)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds a round takes")
    parser.add_argument("--max-running", type=int, default=16)
    parser.add_argument("--max-len", type=int, default=512)
    parser.add_argument("--ready-after", type=float, default=0.0)
    parser.add_argument("--fatal", default=None, help="JSON of a Fatal frame to send instead of Ready")
    parser.add_argument("--die-when", choices=["waiting", "draining"], help="a request waits, or Drain has come")
    parser.add_argument("--die-by", default="exit:9", help="exit:STATUS | signal:NUMBER | fatal:JSON | garbage")
    parser.add_argument("--break-after", type=int, default=None, help="tokens after which a request fails")
    parser.add_argument("--refuse-over", type=int, default=None, help="longest prompt taken")
    parser.add_argument("--ignore-drain", action="store_true", help="never end by itself")
    return parser.parse_args()


def die(sock: socket.socket, how: str) -> None:
    """Die as told."""
    kind, _, value = how.partition(":")
    print("last words", file=sys.stderr, flush=True)
    if kind == "signal":
        os.kill(os.getpid(), int(value))
    elif kind == "fatal":
        sock.sendall(encode(Fatal(**json.loads(value))))
        sys.exit(json.loads(value)["code"])
    elif kind == "garbage":
        sock.sendall(b"{not a frame}\n")
        select.select([], [], [])
    sys.exit(int(value or 0))


def main() -> None:
    """Serve until the front is gone."""
    options = parse()
    sock = socket.socket(fileno=options.fd)
    reader = sock.makefile("rb")
    config = json.loads(reader.readline())
    if options.fatal:
        die(sock, f"fatal:{options.fatal}")
    # A real engine loads weights meanwhile; the front's death must end this wait too.
    if options.ready_after and select.select([sock], [], [], options.ready_after)[0]:
        sys.exit(0)
    config["model"]["max_len"] = options.max_len
    memory = {
        "weight_bytes": 1,
        "draft_weight_bytes": 0,
        "kv_tokens": 1000,
        "kv_bytes_per_token": 1,
        "page_size": 16,
    }
    versions = {"engine": "0", "python": "3", "torch": "none", "device": "cpu: fake", "threads": 1}
    sock.sendall(encode(Ready({"config": config, "memory": memory, "versions": versions, "seconds_load": 0.0})))
    serve(sock, Worker(options))


def serve(sock: socket.socket, worker: Worker) -> None:
    """Rounds at the given pace, frames in between."""
    options = worker.options
    lines = LineBuffer()
    next_round = time.monotonic()
    while True:
        busy = bool(worker.running or worker.waiting)
        if worker.draining and not busy and not options.ignore_drain:
            return
        wait = max(0.0, next_round - time.monotonic()) if busy else None
        if select.select([sock], [], [], wait)[0]:
            data = sock.recv(1 << 20)
            if not data:
                return
            for frame in lines.feed(data):
                for answer in worker.take(frame):
                    sock.sendall(encode(answer))
            continue
        if (options.die_when == "waiting" and worker.waiting and worker.running) or (
            options.die_when == "draining" and worker.draining
        ):
            die(sock, options.die_by)
        next_round = time.monotonic() + options.delay
        sock.sendall(b"".join(encode(frame) for frame in worker.round()))


if __name__ == "__main__":
    main()
