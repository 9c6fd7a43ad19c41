"""Is this server ready? Not before it has given a real answer.

Alive, its port open and owned by our own process, the model the one we asked for, and one streamed completion with
sane text: only then `Ready`. Everything else is a reason, and a `NotReady` when time is up and nothing grows, when
nothing moves any more, or at once when it can never become ready.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from engine.backends import Probes
from tuner.counters import json_object
from tuner.life import Life
from tuner.load.client import UNREADABLE, Client, Endpoint, Reply, RequestError
from tuner.load.streams import Completion, read_completion
from tuner.load.workload import Requests
from tuner.records import FailureKind, Stage
from tuner.supervise import Supervised, listens

POLL_SECONDS = 0.05
PROBE_SECONDS = 5.0
PROBE_TOKENS = 16
PROMPTS_TRIED = 3
FAILURES_TOLERATED = 3  # completions that fail for a reason that waiting does not mend
FAILURE_PAUSE = 1.0
LOOK_SECONDS = 1.0  # between two looks at the log, the memory and the CPU time
LEAST_STALL = 60.0  # without any of them moving for this long, or this share of the deadline, nothing will come
STALL_SHARE = 1 / 3
EXTENSION = 4.0  # growth extends the deadline, at most to this multiple
BUFFERED_SILENCE = 0.05  # a stream that is silent for this long, …
BUFFERED_GAP = 0.0002  # … and then brings its events faster than any model computes, was kept back

NUMBERS_LOST = re.compile(r"nan|[-+]?inf", re.IGNORECASE)

T = TypeVar("T")


class ServerDied(Exception):
    """The server ended while we waited for something else."""


@dataclass(frozen=True)
class Ready:
    """A server that has answered. `info` is its /server_info, None where its backend need not have one."""

    info: dict[str, Any] | None
    seconds: dict[str, float]


@dataclass(frozen=True)
class NotReady:
    """Why not: at which stage, what was seen, and the failure it is when we know better than its log."""

    stage: Stage
    reason: str
    seen: FailureKind | None
    seconds: dict[str, float] = field(default_factory=dict)
    advice: str = ""


class _Never(Exception):
    """This server cannot become ready any more; `seen` None leaves the kind to its log."""

    def __init__(self, seen: FailureKind | None, reason: str, advice: str = "") -> None:
        super().__init__(reason)
        self.seen: FailureKind | None = seen
        self.advice = advice


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
    gpu_memory: Callable[[], int] | None = None,
    tell: Callable[[str, Stage], None] = lambda *_: None,
) -> Ready | NotReady:
    """Wait until a server has given a real answer.

    Args:
        requests: where the trial completion comes from, and the model name asked for.
        timeout: seconds from now to the end of that completion; more, up to fourfold, while log or memory grow.
        synthetic: the text means nothing (dummy weights): only its form is checked.
        gpu_memory: bytes in use on the server's GPUs; None without GPUs.
        tell: called with a line and the stage when the reason for waiting changes.
    """
    life = Life(server, gpu_memory)
    wait = _Wait(server, endpoint, probes, requests, synthetic, tell, timeout, life)
    try:
        info = await unless_dead(server, wait.run())
    except ServerDied:
        return NotReady(
            wait.stage,
            "the server ended before it was ready" + (f": {wait.reason}" if wait.reason else ""),
            None,
            wait.seconds(),
        )
    except _Never as never:
        return NotReady(wait.stage, str(never), never.seen, wait.seconds(), never.advice)
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
        life: Life,
    ) -> None:
        self._server = server
        self._endpoint = endpoint
        self._probes = probes
        self._requests = requests
        self._synthetic = synthetic
        self._tell = tell
        self._life = life
        self._timeout = timeout
        self._began = self._looked = time.monotonic()
        self._listening: float | None = None
        self._failed = 0
        self._info: dict[str, Any] | None = None
        self.stage: Stage = "launch"
        self.reason = "it did not listen yet"

    def seconds(self) -> dict[str, float]:
        """Return the time of each stage so far."""
        now = time.monotonic()
        if self._listening is None:
            return {"launch": now - self._began}
        return {"launch": self._listening - self._began, "ready": now - self._listening}

    async def run(self) -> dict[str, Any] | None:
        """Go through the steps and return /server_info, None where there need not be one."""
        await self._until(self._port_is_ours)
        self._listening = time.monotonic()
        self.stage = "ready"
        self.reason = ""
        self._tell("", "ready")
        await self._until(self._model_is_right)
        await self._until(self._says_ready)
        await self._until(self._answers)
        await self._until(self._says_what_runs)
        await self._until(self._port_is_ours)  # whoever answered: it was our own process
        return self._info

    async def _until(self, step: Callable[[], Coroutine[Any, Any, str]]) -> None:
        """Repeat a step until it gives no reason to wait.

        Raises:
            _Never: the deadline is over, nothing moves, or the step says that it is pointless.
        """
        while reason := await self._attended(step):
            if reason != self.reason:
                self.reason = reason
                self._tell(reason, self.stage)
            self._check(time.monotonic())
            await asyncio.sleep(POLL_SECONDS)

    async def _attended(self, step: Callable[[], Coroutine[Any, Any, str]]) -> str:
        """Run a step, looking after the server meanwhile."""
        doing = asyncio.ensure_future(step())
        try:
            while True:
                left = self._began + self._timeout - time.monotonic()
                done, _ = await asyncio.wait({doing}, timeout=min(LOOK_SECONDS, left) if left > 0 else LOOK_SECONDS / 4)
                if done:
                    return doing.result()
                self._check(time.monotonic(), f'the check "{_sentence(step)}" brought no answer')
        finally:
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)

    def _check(self, now: float, meanwhile: str = "") -> None:
        """Raise _Never when the time is over and nothing grows, or when nothing moves."""
        over = now - self._began - self._timeout
        if now - self._looked >= LOOK_SECONDS or over >= 0:
            self._looked = now
            self._life.look()
        reason = meanwhile if not self.reason else self.reason
        still = now - self._life.grew
        if over >= 0 and (still > STALL_SHARE * self._timeout or over > (EXTENSION - 1) * self._timeout):
            raise _Never("no_progress", f"not ready after {now - self._began:.0f} s: {reason}")
        idle = now - self._life.moved
        if idle > max(LEAST_STALL, STALL_SHARE * self._timeout):
            raise _Never("no_progress", f"no output and no work for {idle:.0f} s: {reason}")

    async def _port_is_ours(self) -> str:
        try:
            async with Client(self._endpoint) as client, asyncio.timeout(PROBE_SECONDS):
                if await client.connect() is not None:
                    return "it does not listen yet"
        except TimeoutError:
            return "it accepts no connection"
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
        _must_not_point_elsewhere(f"GET {self._probes.models}", reply)
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
        _must_not_point_elsewhere(f"GET {self._probes.ready}", reply)
        return "" if reply.status in (200, 404) else f"GET {self._probes.ready}: HTTP {reply.status}"

    async def _says_what_runs(self) -> str:
        """Read /server_info: without it nobody can tell whether the config that was asked for runs."""
        asked = f"GET {self._probes.server_info}"
        reply = await self._get(self._probes.server_info)
        if reply.error is not None:
            return f"{asked}: {reply.error}"
        _must_not_point_elsewhere(asked, reply)
        if reply.status == 404 and not self._probes.always_informs:
            return ""
        if reply.status != 200:
            return f"{asked}: HTTP {reply.status}"
        self._info = json_object(reply.body)
        return "" if self._info is not None else f"{asked}: not a JSON object"

    async def _answers(self) -> str:
        """Ask for real completions; one that is sane, and streamed, is enough."""
        complaint, tokens, late = "", PROBE_TOKENS, ""
        for index in range(PROMPTS_TRIED):
            reply = await self._complete(index, tokens)
            answer = read_completion(reply)
            if isinstance(answer, RequestError):
                return await self._refused(reply, answer)
            self._failed = 0
            complaint = self._complaint(answer, tokens)
            late = "" if complaint else buffered(reply, answer)
            if not complaint and not late:
                return ""
            if late:
                tokens = max(tokens, min(4 * tokens, self._requests.workload.output_tokens))
        if late:
            raise _Never(
                "config", late, "switch off whatever keeps the server's stream back (a proxy, a batching flag)"
            )
        raise _Never(
            "garbage_output",
            f"{PROMPTS_TRIED} completions made no sense; the last: {complaint}",
        )

    async def _complete(self, index: int, tokens: int) -> Reply:
        request = self._requests.make(index, tokens)
        async with Client(self._endpoint) as client:
            # The first one may compile kernels, so its silence is bounded as the server's own is.
            return await client.request("POST", request.path, request.body, STALL_SHARE * self._timeout)

    async def _refused(self, reply: Reply, answer: RequestError) -> str:
        """Judge a completion that failed: some failures mean not yet, some never, and some never if they repeat."""
        _must_not_point_elsewhere("a completion", reply)
        if reply.status == 404 and answer.kind == "status":
            raise _Never("wrong_model", f"a completion was refused: {answer}")
        if 400 <= reply.status < 500 and reply.status not in (408, 425, 429):
            raise _Never("config", f"a completion was refused: {answer}")
        if answer.kind in UNREADABLE:
            await asyncio.sleep(FAILURE_PAUSE)  # a server that dies of it shall be called dead
            raise _Never("garbage_output", f"a completion cannot be read: {answer}")
        if answer.kind == "reset" or (answer.kind == "status" and reply.status not in (408, 425, 429, 503)):
            self._failed += 1
            if self._failed == FAILURES_TOLERATED:
                raise _Never(None, f"{self._failed} completions failed; the last: {answer}")
            await asyncio.sleep(FAILURE_PAUSE)
        return f"a completion failed: {answer}"

    def _complaint(self, answer: Completion, tokens: int) -> str:
        if answer.finish not in ("stop", "length"):
            return f"finish reason {answer.finish}"
        if answer.output_tokens < 1 or answer.output_tokens > tokens:
            return f"{answer.output_tokens} tokens where at most {tokens} were asked for"
        return "" if self._synthetic else insane(answer.text)


def _must_not_point_elsewhere(asked: str, reply: Reply) -> None:
    """Raise _Never for a redirect: whoever answers here is no model server, and waiting makes it none."""
    if 300 <= reply.status < 400:
        raise _Never("wrong_model", f"{asked}: HTTP {reply.status}, a redirect: this is not the model's server")


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
    if len(solid) >= 6 and not NUMBERS_LOST.sub("", solid):
        return f"the text is not a number for ever: {text[:40]!r}"
    return ""


def buffered(reply: Reply, answer: Completion) -> str:
    """Return why an answer was no stream, or nothing.

    Its events came all at once after a silence: somebody kept them back, and no time between tokens can be measured.
    One event for the whole answer is no such sign: speculation may bring it in one round.
    """
    first, last = answer.arrivals[0].time, answer.arrivals[-1].time
    events = len(answer.arrivals)
    if events < 4 or first - reply.sent < BUFFERED_SILENCE or last - first > BUFFERED_GAP * (events - 1):
        return ""
    silence = 1000 * (first - reply.sent)
    return f"the server keeps its stream back: {events} events came at once after {silence:.0f} ms"


def _sentence(step: Callable[..., object]) -> str:
    """Return what a step does, in words: its name."""
    return step.__name__.strip("_").replace("_", " ")


def _model_names(body: bytes) -> list[str] | None:
    try:
        entries = json.loads(body)["data"]
        return [str(entry["id"]) for entry in entries]
    except (ValueError, TypeError, KeyError):
        return None
