"""Is this server ready? Not before it has given a real answer.

Alive, its port open and owned by our own process, the model the one we asked for, and one streamed completion with
sane text: only then `Ready`. Everything else is a reason, and a `NotReady` when time is up, when nothing moves any
more, or at once when it can never become ready.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psutil

from engine.backends import Probes
from tuner.load.client import Client, Endpoint, Reply, RequestError
from tuner.load.streams import Completion, read_completion
from tuner.load.workload import Requests
from tuner.records import FailureKind, Stage
from tuner.supervise import Supervised, listens

POLL_SECONDS = 0.05
PROBE_SECONDS = 5.0
PROBE_TOKENS = 16
PROMPTS_TRIED = 3
LOOK_SECONDS = 1.0  # between two looks at the log and the CPU time
LEAST_STALL = 60.0  # without either growing for this long, or this share of the deadline, nothing will come
STALL_SHARE = 1 / 3

T = TypeVar("T")


class ServerDied(Exception):
    """The server ended while we waited for something else."""


@dataclass(frozen=True)
class Ready:
    """A server that has answered. `info` is its /server_info, empty where it has none."""

    info: dict[str, Any]
    seconds: dict[str, float]


@dataclass(frozen=True)
class NotReady:
    """Why not: at which stage, what was seen, and the failure it is when we know better than its log."""

    stage: Stage
    reason: str
    seen: FailureKind | None
    seconds: dict[str, float] = field(default_factory=dict)


class _Never(Exception):
    """This server cannot become ready any more."""

    def __init__(self, seen: FailureKind, reason: str) -> None:
        super().__init__(reason)
        self.seen: FailureKind = seen


async def unless_dead(server: Supervised, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, but no longer than the server lives.

    Raises:
        ServerDied: it ended first; noticed at once, whatever `work` waits for.
    """
    doing = asyncio.ensure_future(work)
    death = asyncio.ensure_future(server.wait())
    try:
        await asyncio.wait({doing, death}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ServerDied(str(death.result()))
    finally:
        for task in (doing, death):
            task.cancel()
        await asyncio.gather(doing, death, return_exceptions=True)


async def await_ready(
    server: Supervised,
    endpoint: Endpoint,
    probes: Probes,
    requests: Requests,
    *,
    timeout: float,
    synthetic: bool = False,
    tell: Callable[[str, Stage], None] = lambda *_: None,
) -> Ready | NotReady:
    """Wait until a server has given a real answer.

    Args:
        requests: where the trial completion comes from, and the model name asked for.
        timeout: seconds from now to the end of that completion.
        synthetic: the text means nothing (dummy weights): only its form is checked.
        tell: called with a line and the stage when the reason for waiting changes.
    """
    wait = _Wait(server, endpoint, probes, requests, synthetic, tell, timeout)
    try:
        info = await unless_dead(server, wait.run())
    except ServerDied:
        return NotReady(
            wait.stage,
            f"the server ended before it was ready: {wait.reason}",
            None,
            wait.seconds(),
        )
    except _Never as never:
        return NotReady(wait.stage, str(never), never.seen, wait.seconds())
    return Ready(info, wait.seconds())


class _Wait:
    """The steps, each repeated until it holds, within one deadline."""

    def __init__(
        self,
        server: Supervised,
        endpoint: Endpoint,
        probes: Probes,
        requests: Requests,
        synthetic: bool,
        tell: Callable[[str, Stage], None],
        timeout: float,
    ) -> None:
        self._server = server
        self._endpoint = endpoint
        self._probes = probes
        self._requests = requests
        self._synthetic = synthetic
        self._tell = tell
        self._began = time.monotonic()
        self._deadline = self._began + timeout
        self._stall = max(LEAST_STALL, timeout * STALL_SHARE)
        self._looked = self._began
        self._listening: float | None = None
        self._moved = (self._began, self._sign_of_life())
        self.stage: Stage = "launch"
        self.reason = "it did not listen yet"

    def seconds(self) -> dict[str, float]:
        """Return the time of each stage so far."""
        now = time.monotonic()
        if self._listening is None:
            return {"launch": now - self._began}
        return {"launch": self._listening - self._began, "ready": now - self._listening}

    async def run(self) -> dict[str, Any]:
        """Go through the steps and return /server_info."""
        await self._until(self._port_is_ours)
        self._listening = time.monotonic()
        self.stage = "ready"
        self.reason = ""
        self._tell("", "ready")
        await self._until(self._model_is_right)
        await self._until(self._says_ready)
        await self._until(self._answers)
        return await self._server_info()

    async def _until(self, step: Callable[[], Coroutine[Any, Any, str]]) -> None:
        """Repeat a step until it gives no reason to wait.

        Raises:
            _Never: the deadline is over, nothing moves, or the step says that it is pointless.
        """
        while True:
            left = self._deadline - time.monotonic()
            try:
                async with asyncio.timeout(left):
                    reason = await step()
            except TimeoutError:
                reason = self.reason or f"{_sentence(step)} brought no answer"
            if not reason:
                return
            if reason != self.reason:
                self.reason = reason
                self._tell(reason, self.stage)
            now = time.monotonic()
            if now >= self._deadline:
                raise _Never(
                    "no_progress",
                    f"not ready after {now - self._began:.0f} s: {reason}",
                )
            self._check_moving(now)
            await asyncio.sleep(min(POLL_SECONDS, max(0.0, self._deadline - now)))

    def _check_moving(self, now: float) -> None:
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        sign = self._sign_of_life()
        if sign != self._moved[1]:
            self._moved = (now, sign)
        elif now - self._moved[0] > self._stall:
            raise _Never(
                "no_progress",
                f"no output and no work for {now - self._moved[0]:.0f} s: {self.reason}",
            )

    def _sign_of_life(self) -> tuple[int, int]:
        """Return what changes while a server loads: the log's size and tenths of a second of CPU."""
        spent = 0.0
        for pid in self._server.tree():
            try:
                times = psutil.Process(pid).cpu_times()
            except psutil.Error:
                continue  # it ended meanwhile
            spent += times.user + times.system
        return self._server.log_size(), int(spent * 10)

    async def _port_is_ours(self) -> str:
        async with Client(self._endpoint) as client:
            async with asyncio.timeout(PROBE_SECONDS):
                if await client.connect() is not None:
                    return "it does not listen yet"
        match listens(self._server.tree(), self._endpoint.port):
            case True:
                return ""
            case False:
                raise _Never("port", f"another process listens on {self._endpoint}")
            case None:
                return "nobody listens any more"

    async def _get(self, path: str) -> Reply:
        async with Client(self._endpoint) as client:
            return await client.get(path, PROBE_SECONDS)

    async def _model_is_right(self) -> str:
        reply = await self._get(self._probes.models)
        if reply.error is not None:
            return f"GET {self._probes.models}: {reply.error}"
        if reply.status != 200:
            return f"GET {self._probes.models}: HTTP {reply.status}"
        names = _model_names(reply.body)
        if names is None:
            return f"GET {self._probes.models}: not a list of models"
        if self._requests.served_name not in names:
            raise _Never(
                "wrong_model",
                f"the server offers {', '.join(names) or 'no model'}, not {self._requests.served_name}",
            )
        return ""

    async def _says_ready(self) -> str:
        reply = await self._get(self._probes.ready)
        if reply.error is not None:
            return f"GET {self._probes.ready}: {reply.error}"
        return "" if reply.status in (200, 404) else f"GET {self._probes.ready}: HTTP {reply.status}"

    async def _answers(self) -> str:
        """Ask for real completions; one that is sane is enough."""
        complaint = ""
        for index in range(PROMPTS_TRIED):
            request = self._requests.make(index, PROBE_TOKENS)
            async with Client(self._endpoint) as client:
                stall = self._deadline - time.monotonic()
                reply = await client.request("POST", request.path, request.body, max(stall, 0.01))
            answer = read_completion(reply)
            if isinstance(answer, RequestError):
                if reply.status == 404 and answer.kind == "status":
                    raise _Never("wrong_model", f"a completion was refused: {answer}")
                if reply.status in (400, 422):
                    raise _Never("config", f"a completion was refused: {answer}")
                if answer.kind in ("malformed", "incomplete", "no_usage"):
                    raise _Never("garbage_output", f"a completion cannot be read: {answer}")
                return f"a completion failed: {answer}"
            complaint = self._complaint(answer)
            if not complaint:
                return ""
        raise _Never(
            "garbage_output",
            f"{PROMPTS_TRIED} completions made no sense; the last: {complaint}",
        )

    def _complaint(self, answer: Completion) -> str:
        if answer.finish not in ("stop", "length"):
            return f"finish reason {answer.finish}"
        if answer.output_tokens < 1 or answer.output_tokens > PROBE_TOKENS:
            return f"{answer.output_tokens} tokens where at most {PROBE_TOKENS} were asked for"
        return "" if self._synthetic else insane(answer.text)

    async def _server_info(self) -> dict[str, Any]:
        reply = await self._get(self._probes.server_info)
        if reply.error is not None or reply.status != 200:
            return {}
        try:
            document = json.loads(reply.body)
        except ValueError:
            return {}
        return document if isinstance(document, dict) else {}


def insane(text: str) -> str:
    """Return why a text cannot be a language model's, or nothing.

    Broken numerics show as no text, as unprintable characters, or as one character for ever.
    """
    if not text.strip():
        return "the text is empty"
    odd = sum(character == "�" or not (character.isprintable() or character.isspace()) for character in text)
    if 2 * odd > len(text):
        return f"the text is unprintable: {text[:40]!r}"
    solid = "".join(text.split())
    if len(solid) >= 8 and len(set(solid)) == 1:
        return f"the text is one character for ever: {text[:40]!r}"
    return ""


def _sentence(step: Callable[..., object]) -> str:
    """Return what a step does, in words: its name."""
    return step.__name__.strip("_").replace("_", " ")


def _model_names(body: bytes) -> list[str] | None:
    try:
        entries = json.loads(body)["data"]
        return [str(entry["id"]) for entry in entries]
    except (ValueError, TypeError, KeyError):
        return None
