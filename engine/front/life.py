"""The running server: loads, serves, drains, ends. One event loop; the engine process does the work."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import uvicorn

from engine.config import EngineConfig, target_folder
from engine.errors import Exit, ModelError
from engine.events import emit
from engine.front.api import Api, in_thread
from engine.front.guard import guarded
from engine.front.limits import Limits
from engine.front.link import Engine
from engine.front.metrics import Meters
from engine.front.process import STOP_SIGNALS, End, EngineProcess
from engine.text import load_text

LAST_SECONDS = 1  # for answers on their way when the server closes
FILES_BESIDE = 256


class Server(uvicorn.Server):
    """uvicorn's server, with signals left to `live`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install nothing (uvicorn)."""
        yield


@dataclass(frozen=True)
class Start:
    """A bound port and a started engine process, from which `live` goes on.

    Attributes:
        name: the served model's name.
        began: `time.monotonic()` of the start, for the ready event.
    """

    config: EngineConfig
    name: str
    listener: socket.socket
    process: EngineProcess
    limits: Limits
    began: float
    admin_key: str | None = None


def live(start: Start) -> End:
    """Serve until a signal or the engine process's end; return how it came."""
    files = allow_files(start.limits.connections + FILES_BESIDE)
    connections = max(1, min(start.limits.connections, files - FILES_BESIDE))
    start = replace(start, limits=replace(start.limits, connections=connections))
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_live(start))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's when it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def allow_files(wanted: int) -> int:
    """Raise this process's limit of open files towards `wanted`; return what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    granted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))
    return granted


async def _live(start: Start) -> End:
    meters = Meters()
    stop = _catch_signals()
    engine = await Engine.connect(start.process, meters)
    api = Api(engine, start.config, start.name, start.limits, meters, start.admin_key)
    parser, protocol = guarded(start.limits)
    server = Server(
        uvicorn.Config(
            api,
            http=protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=start.limits.keep_alive_seconds,
            timeout_graceful_shutdown=LAST_SECONDS,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[start.listener]))
    loading = asyncio.create_task(_load(start, api, parser))
    sampling = asyncio.create_task(_sample(meters))
    try:
        return await _until_the_end(start, api, stop, serving, loading)
    except ModelError as error:
        return End(error.exit, error.kind, str(error))
    finally:
        engine.fail("the server is shutting down")
        loading.cancel()
        sampling.cancel()
        server.should_exit = True
        await serving


def _catch_signals() -> asyncio.Queue[signal.Signals]:
    """Return a queue of the stop signals that come, and of those that have waited since the start."""
    caught: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, caught.put_nowait, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return caught


async def _sample(meters: Meters) -> None:
    while True:
        meters.sample(time.monotonic())
        await asyncio.sleep(1)


async def _until_the_end(
    start: Start,
    api: Api,
    stop: asyncio.Queue[signal.Signals],
    serving: asyncio.Task[None],
    loading: asyncio.Task[None],
) -> End:
    """Become ready, then wait for a signal or the engine process's end.

    Raises:
        ModelError: the target's text files are missing or unusable.
    """
    signalled = asyncio.create_task(stop.get())
    died = asyncio.create_task(_death(api.engine, start.process))
    try:
        await asyncio.wait({loading, signalled, died, serving}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            await asyncio.wait({signalled, died, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()  # raises why
        if signalled.done():
            return await _drain(start, api, signalled.result(), stop, died)
        return died.result()
    finally:
        signalled.cancel()
        died.cancel()


async def _load(start: Start, api: Api, parser: str) -> None:
    text = await in_thread(lambda: load_text(target_folder(start.config)))
    info = await asyncio.shield(api.engine.info)
    seconds = round(time.monotonic() - start.began, 3)
    api.open_for_business(text, info, seconds)
    emit("ready", seconds=seconds, http=parser, loop=type(asyncio.get_running_loop()).__module__)


async def _death(engine: Engine, process: EngineProcess) -> End:
    fatal = await asyncio.shield(engine.closed)
    if engine.broken:
        process.kill()
    return await in_thread(lambda: process.end(fatal))


async def _drain(
    start: Start,
    api: Api,
    number: signal.Signals,
    stop: asyncio.Queue[signal.Signals],
    died: asyncio.Task[End],
) -> End:
    """Let open requests finish, for a while; a second signal ends the wait."""
    api.draining = True
    emit("draining", signal=number.name, requests=api.engine.open_requests)
    api.engine.drain()
    idle = asyncio.create_task(api.engine.idle())
    again = asyncio.create_task(stop.get())
    try:
        await asyncio.wait({idle, again, died}, timeout=start.limits.drain_seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        again.cancel()
        idle.cancel()
    left = api.engine.open_requests
    if api.engine.closed.done():
        end = await died
        if not await in_thread(start.process.clean):
            return end  # it did not stop, it broke
    api.engine.fail("the server is shutting down")
    start.process.kill()
    done = "all requests finished" if not left else f"{left} open requests were ended"
    return End(Exit.OK, "stopped", f"{number.name}: {done}")
