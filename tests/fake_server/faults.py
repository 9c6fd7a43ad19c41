"""The faults that a fake server can have, and what a trial must come to with each.

`GOOD` servers may be odd, but they serve: to call one dead would be false. `BAD` ones do not: to call one ready, or
its numbers good, would be false.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from engine.backends import Launch
from engine.config import EngineConfig
from tests.fake_server.plan import FakeBackend, Plan

SHORT = {"ready_s": 2.0}


def word(code: int, kind: str, message: str = "do this") -> tuple[str, ...]:
    """Return the last words of our own engine."""
    return ("noise before", json.dumps({"event": "exit", "code": code, "kind": kind, "message": message}))


@dataclass(frozen=True)
class Case:
    """A plan, the limits of its trial, and for a bad server the failure expected.

    `stolen`: a stranger listens on the port before the server does.
    """

    plan: Plan
    limits: dict[str, float] = field(default_factory=dict)
    kind: str = ""
    stage: str = ""
    evidence: str = ""
    stolen: bool = False


GOOD: dict[str, Case] = {
    "plain": Case(Plan()),
    "late to listen": Case(Plan(start_s=0.3)),
    "late to be ready": Case(Plan(ready_s=0.4)),
    "late warm-up": Case(Plan(warm_s=0.6)),
    "past the deadline, but its log grows": Case(Plan(start_s=3.0, start_log="Loading shards"), {"ready_s": 1.5}),
    "past the deadline, but its memory grows": Case(Plan(start_s=3.0, start_mib=2), {"ready_s": 1.5}),
    "fails two completions, then serves": Case(Plan(answer="error", bad_completions=2)),
    "compiles in its first completion": Case(Plan(first_ms=250.0, stop_after=4)),
    "closes each connection": Case(Plan(keep_alive=False)),
    "usage only at the end": Case(Plan(continuous=False)),
    "one token a chunk": Case(Plan(tokens_per_chunk=1, chunk_ms=0.5)),
    "a whole answer in one chunk": Case(Plan(tokens_per_chunk=16)),
    "stops early": Case(Plan(stop_after=5)),
    "no acceptance": Case(Plan(accept_length=None)),
    "deaf to SIGTERM": Case(Plan(ignore_sigterm=True), {"stop_s": 0.3}),
    "leaves with an error": Case(Plan(exit_on_term=1)),
    "kills itself on SIGTERM": Case(Plan(suicide_on_term=True)),
    "talks a lot": Case(Plan(chatter_bytes=3_000_000)),
    "fills its pipe under load": Case(Plan(spam_bytes=400_000)),
    "has children": Case(Plan(children=True)),
    "leaks slowly": Case(Plan(leak_kib=256)),
}

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.30 GiB. GPU 0 has a total capacity of 79 GiB"
NONE = "Exception: Capture cuda graph failed: 'NoneType' object has no attribute 'shape'"
BAD: dict[str, Case] = {
    "refuses its config": Case(Plan(die_at="start", die_code=2, last_words=word(2, "config")), {}, "config", "launch"),
    "no weights": Case(
        Plan(die_at="start", die_code=3, last_words=word(3, "missing_file")), {}, "missing_file", "launch"
    ),
    "no memory": Case(Plan(die_at="loaded", die_code=4, last_words=word(4, "oom_start")), {}, "oom_start", "launch"),
    "no graphs": Case(
        Plan(die_at="loaded", die_code=5, last_words=word(5, "graph_capture")), {}, "graph_capture", "launch"
    ),
    "port taken": Case(Plan(die_at="loaded", die_code=6, last_words=word(6, "port")), {}, "port", "launch"),
    "internal": Case(Plan(die_at="start", die_code=70, last_words=word(70, "crashed")), {}, "crashed", "launch"),
    "killed while loading": Case(Plan(die_at="loaded", die_signal=9), {}, "crashed", "launch", "SIGKILL"),
    "foreign OOM": Case(Plan(die_at="loaded", last_words=(OOM, "bye")), {}, "oom_start", "launch"),
    "NoneType error in capture": Case(
        Plan(die_at="loaded", die_signal=9, last_words=(NONE, "Received sigquit from a child process.")),
        {},
        "graph_capture",
        "launch",
    ),
    "leaves with code 0": Case(Plan(die_at="loaded", die_code=0), {}, "crashed", "launch", "exit code 0"),
    "makes itself a daemon": Case(Plan(daemon=True), {}, "crashed", "launch", "exit code 0"),
    "dies once it listens": Case(Plan(die_at="listening"), {}, "crashed", ""),
    "dies at its first request": Case(Plan(die_at="completion"), {}, "crashed", "ready"),
    "never listens": Case(Plan(listen="never"), SHORT, "no_progress", "launch"),
    "spins for ever": Case(Plan(listen="spin"), SHORT, "no_progress", "launch"),
    "accepts nobody": Case(Plan(listen="deaf"), SHORT, "no_progress", "ready"),
    "listens no more": Case(Plan(listen="close", hang_on=("/v1/models",)), SHORT, "no_progress", "ready"),
    "leaks and never listens": Case(Plan(start_s=3600.0, start_mib=1), {"ready_s": 0.5}, "no_progress", "launch"),
    "talks and never listens": Case(
        Plan(start_s=3600.0, start_log="still loading"), {"ready_s": 0.5}, "no_progress", "launch"
    ),
    "never ready": Case(Plan(ready_s=1e6), SHORT, "no_progress", "ready"),
    "never warm": Case(Plan(warm_s=1e6), SHORT, "no_progress", "ready", "warming up"),
    "200 but hangs": Case(Plan(hang_on=("/v1/models",)), SHORT, "no_progress", "ready"),
    "first token never comes": Case(Plan(answer="hang"), SHORT, "no_progress", "ready"),
    "stalls in its first answer": Case(Plan(answer="stall"), SHORT, "no_progress", "ready"),
    "busy for ever": Case(Plan(answer="error", status=503), SHORT, "no_progress", "ready"),
    "500 to every completion": Case(
        Plan(answer="error", message="boom"), {"ready_s": 600.0}, "crashed", "ready", "HTTP 500: {"
    ),
    "500 that names its cause": Case(Plan(answer="error", message=OOM), {"ready_s": 600.0}, "oom_start", "ready"),
    "error events in every stream": Case(Plan(answer="error_event"), {"ready_s": 600.0}, "crashed", "ready", "planned"),
    "resets every completion": Case(Plan(answer="reset"), {"ready_s": 600.0}, "crashed", "ready", "reset"),
    "refuses the request": Case(Plan(answer="error", status=400), {}, "config", "ready"),
    "sends its visitors elsewhere": Case(
        Plan(redirects=("/v1/models",)), {"ready_s": 600.0}, "wrong_model", "ready", "a redirect"
    ),
    "is never there when asked whether it is ready": Case(
        Plan(redirects=("/ready",)), {"ready_s": 600.0}, "wrong_model", "ready", "GET /ready: HTTP 307"
    ),
    "sends its completions elsewhere": Case(
        Plan(redirects=("/v1/completions",)), {"ready_s": 600.0}, "wrong_model", "ready", "a redirect"
    ),
    "another model": Case(Plan(serve_as="other"), {}, "wrong_model", "ready"),
    "a list of models that is none": Case(Plan(models="soon"), SHORT, "no_progress", "ready"),
    "unprintable": Case(Plan(text="�"), {}, "garbage_output", "ready"),
    "one character for ever": Case(Plan(text="!"), {}, "garbage_output", "ready"),
    "NaN for ever": Case(Plan(text="nan "), {}, "garbage_output", "ready"),
    "no text": Case(Plan(text=" "), {}, "garbage_output", "ready"),
    "aborts every answer": Case(Plan(finish="abort"), {}, "garbage_output", "ready", "finish reason abort"),
    "more tokens than asked for": Case(Plan(overshoot=5), {}, "garbage_output", "ready"),
    "not JSON": Case(Plan(answer="not_json"), {}, "garbage_output", "ready"),
    "a web page": Case(Plan(answer="html"), {}, "garbage_output", "ready"),
    "keeps its stream back": Case(Plan(buffered=True, chunk_ms=60.0), {}, "config", "ready", "keeps its stream back"),
    "runs another config": Case(Plan(resolved={"draft": {"kind": "dflash"}}), {}, "config", "ready"),
    "sends who asks what it runs elsewhere": Case(
        Plan(redirects=("/server_info",)), {"ready_s": 600.0}, "wrong_model", "ready", "GET /server_info: HTTP 307"
    ),
    "does not say what it runs": Case(
        Plan(statuses={"/server_info": 500}), SHORT, "no_progress", "ready", "GET /server_info: HTTP 500"
    ),
    "is not known to have a config": Case(
        Plan(statuses={"/server_info": 404}), SHORT, "no_progress", "ready", "GET /server_info: HTTP 404"
    ),
    "never says what it runs": Case(Plan(hang_on=("/server_info",)), SHORT, "no_progress", "ready", "/server_info"),
    "no usage": Case(Plan(answer="no_usage", continuous=False), {}, "garbage_output", "ready"),
    "no end": Case(Plan(answer="no_done"), {}, "garbage_output", "ready"),
    "no finish reason": Case(Plan(answer="no_finish"), {}, "garbage_output", "ready"),
    "stolen port": Case(Plan(listen="never"), {}, "port", "launch", stolen=True),
    "stolen port, and dies of it": Case(Plan(), {}, "port", "launch", stolen=True),
    "dies under load": Case(Plan(good_completions=4, die_at="completion", last_words=("x",)), {}, "crashed", "load"),
    "OOM under load": Case(
        Plan(good_completions=4, die_at="completion", die_code=4, last_words=word(4, "oom_start")),
        {},
        "oom_load",
        "load",
    ),
    "dies in mid-stream": Case(Plan(good_completions=4, answer="die", die_at="stream"), {}, "crashed", "load"),
    "stalls under load": Case(Plan(good_completions=1, answer="stall"), {"request_s": 0.3}, "no_progress", "load"),
    "endless level": Case(Plan(good_completions=1, answer="stall"), {"level_s": 0.5}, "no_progress", "load"),
    "resets every request": Case(Plan(good_completions=1, answer="reset"), {}, "crashed", "load"),
    "errors under load": Case(Plan(good_completions=1, answer="error"), {}, "crashed", "load"),
    "garbage under load": Case(Plan(good_completions=1, answer="not_json"), {}, "garbage_output", "load"),
    "error events under load": Case(Plan(good_completions=1, answer="error_event"), {}, "crashed", "load"),
}


ONLY_IN_PROOF = frozenset(
    {
        "past the deadline, but its log grows",
        "resets every completion",
        "error events in every stream",
        "500 that names its cause",
        "talks and never listens",
        "stalls in its first answer",
        "accepts nobody",
        "listens no more",
        "a list of models that is none",
        "spins for ever",
        "never ready",
        "busy for ever",
        "does not say what it runs",
        "is not known to have a config",
        "never says what it runs",
    }
)
"""Cases that wait for a deadline as others do; `make test` leaves them to `make proof-lifecycle`."""


@dataclass(frozen=True)
class StolenPort(FakeBackend):
    """A stranger takes the port between its choice and the launch."""

    listeners: list[socket.socket] = field(default_factory=list)

    def command(self, config: EngineConfig, config_path: Path, host: str, port: int) -> Launch:
        """Listen first, then return the command."""
        self.listeners.append(socket.create_server((host, port)))
        return super().command(config, config_path, host, port)


@contextlib.contextmanager
def backend_for(case: Case) -> Iterator[FakeBackend]:
    """Return the backend that plays a case; a stranger leaves with the block."""
    backend = StolenPort() if case.stolen else FakeBackend()
    try:
        yield backend
    finally:
        for listener in getattr(backend, "listeners", ()):
            listener.close()
