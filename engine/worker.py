"""The engine process: `python -m engine.worker --fd N`, started by the HTTP front, speaking `engine.wire`.

It reads its config as the first line of the socket, loads, says `Ready`, then turns `Submit`s into `Tokens`. Reads
never block while requests run, and writes never block at all: what the front has not taken yet waits here, so a
slow front cannot stall decoding. It ends when the front is gone.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import select
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from engine.config import Draft, EngineConfig
from engine.errors import ConfigError, EngineError, Exit, OutOfMemory
from engine.request import Request, Sampling
from engine.runtime import end_with_parent
from engine.scheduler import Progress
from engine.wire import (
    Ask,
    Cancel,
    DraftSet,
    Drain,
    Fatal,
    Frame,
    Info,
    LineBuffer,
    Ready,
    SetDraft,
    Submit,
    Tokens,
    encode,
)

if TYPE_CHECKING:
    from engine.start import AnyLoop

DRAFT: TypeAdapter[Draft] = TypeAdapter(Draft)
CHUNK = 1 << 20
LAST_WORDS_SECONDS = 30.0  # how long last words may take to be read


class Channel:
    """Frames over a non-blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket, self._buffer, self._unsent = sock, LineBuffer(), bytearray()
        self.closed = False

    def receive(self, timeout: float | None) -> list[Frame]:
        """Return the frames that have come, waiting up to `timeout` seconds (None: for ever) for the first bytes."""
        readable, _, _ = select.select([self._socket], [self._socket] if self._unsent else [], [], timeout)
        self.flush()
        if not readable:
            return []
        try:
            data = self._socket.recv(CHUNK)
        except BlockingIOError:
            return []
        except ConnectionError:
            data = b""
        if not data:
            self.closed = True
        return list(self._buffer.feed(data))

    def send(self, *frames: Frame) -> None:
        """Queue frames and write what the socket takes."""
        for frame in frames:
            self._unsent += encode(frame)
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes now."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except ConnectionError:
                self.closed = True
                self._unsent.clear()
                return
            del self._unsent[:sent]

    def finish(self) -> None:
        """Write everything that is queued, within a bound."""
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while self._unsent and not self.closed and (left := deadline - time.monotonic()) > 0:
            select.select([], [self._socket], [], left)
            self.flush()


def run(channel: Channel, config: EngineConfig) -> None:
    """Load, then serve until the front drains or is gone.

    Raises:
        EngineError: a known cause, while loading.
    """
    # torch is imported only here: the config is judged, and a bad one reported, without it where possible.
    from engine.runtime import resolve
    from engine.start import build_any, loop_of

    began = time.perf_counter()
    runtime = build_any(resolve(config))
    warm_up(loop_of(runtime))
    loop = loop_of(runtime)  # counts from zero
    channel.send(Ready(runtime.describe() | {"seconds_load": time.perf_counter() - began}))
    draining = False
    while not channel.closed:
        if loop.idle and draining:
            return
        for frame in channel.receive(None if loop.idle else 0):
            match frame:
                case Submit():
                    reason = loop.submit(_request(frame))
                    if reason is not None:
                        channel.send(Tokens(frame.id, (), "error", error=reason))
                case Cancel(number):
                    loop.cancel(number)
                case Ask(number):
                    channel.send(Info(number, dataclasses.asdict(loop.stats())))
                case SetDraft():
                    channel.send(_set_draft(loop, config, frame))
                case Drain():
                    draining = True
                case _:
                    raise ValueError(f"unexpected frame {type(frame).__name__}")
        if not loop.idle:
            channel.send(*map(_tokens, loop.advance()))


def _request(frame: Submit) -> Request:
    sampling = Sampling(frame.temperature, frame.top_k, frame.top_p, frame.seed)
    return Request(frame.id, frame.prompt, frame.max_tokens, frame.eos, sampling, frame.logprobs, frame.echo)


def _set_draft(loop: AnyLoop, config: EngineConfig, frame: SetDraft) -> DraftSet:
    try:
        draft = DRAFT.validate_python(frame.draft)
        if config.model_copy(update={"draft": draft}).synthetic and not config.synthetic:
            raise ConfigError("simulate_accept makes up text, and this server's is real; start one with it")
        return DraftSet(frame.id, loop.set_draft(draft).model_dump(mode="json"))
    except ConfigError as error:
        return DraftSet(frame.id, frame.draft, str(error))


def _tokens(progress: Progress) -> Tokens:
    return Tokens(
        progress.id,
        progress.tokens,
        progress.finish,
        progress.verify_count,
        logprobs=tuple((scored.logprob, scored.top) for scored in progress.scores),
        prompt_logprobs=tuple((scored.logprob, scored.top) for scored in progress.prompt_scores),
    )


def warm_up(loop: AnyLoop) -> None:
    """Run one short request through every path, so that the first client does not pay for first calls."""
    reason = loop.submit(Request(id=-1, prompt=(0, 0, 0, 0), max_tokens=4))
    if reason is not None:
        raise OutOfMemory(f"not even a request of four tokens fits: {reason}")
    while not loop.idle:
        loop.advance()


def main() -> int:
    """Run the process and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m engine.worker")
    parser.add_argument("--fd", type=int, required=True)
    arguments = parser.parse_args()
    end_with_parent()
    with socket.socket(fileno=arguments.fd) as sock:
        config = EngineConfig.model_validate_json(_first_line(sock))
        channel = Channel(sock)
        try:
            run(channel, config)
        except EngineError as error:
            channel.send(Fatal(int(error.exit), error.kind, str(error)))
            channel.finish()
            return int(error.exit)
        except MemoryError as error:
            channel.send(Fatal(int(Exit.MEMORY), "oom_load", f"out of memory: {error}"))
            channel.finish()
            return int(Exit.MEMORY)
        except Exception:  # noqa: BLE001 - the process boundary: report, then end
            text = traceback.format_exc()
            print(text, file=sys.stderr)
            channel.send(Fatal(int(Exit.INTERNAL), "crashed", text.strip().splitlines()[-1]))
            channel.finish()
            return int(Exit.INTERNAL)
        channel.finish()
    return int(Exit.OK)


def _first_line(sock: socket.socket) -> bytes:
    """Read up to the first newline, byte for byte: what follows belongs to the frames."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = sock.recv(1)
        if not byte:
            os._exit(int(Exit.INTERNAL))
        line += byte
    return bytes(line)


if __name__ == "__main__":
    sys.exit(main())
