"""The running server: loads, serves, drains, ends. One event loop; the engine process does the work."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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


def live(
    config: EngineConfig,
    name: str,
    listener: socket.socket,
    process: EngineProcess,
    started: float,
    limits: Limits,
) -> End:
    """Serve on `listener` until a signal or the engine process's end.

    Args:
        started: `time.monotonic()` of the start, for the ready event.
    """
    allow_files(limits.connections + FILES_BESIDE)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_live(config, name, listener, process, started, limits))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's when it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def allow_files(wanted: int) -> None:
    """Raise this process's limit of open files to `wanted`, as far as the system lets it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


async def _live(
    config: EngineConfig,
    name: str,
    listener: socket.socket,
    process: EngineProcess,
    started: float,
    limits: Limits,
) -> End:
    meters = Meters()
    stop = _catch_signals()
    engine = await Engine.connect(process, meters)
    api = Api(engine, config, name, limits, meters)
    _, protocol = guarded(limits)
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
            timeout_keep_alive=limits.keep_alive_seconds,
            timeout_graceful_shutdown=LAST_SECONDS,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    sampling = asyncio.create_task(_sample(meters))
    try:
        return await _until_the_end(config, api, process, stop, serving, started, limits)
    except ModelError as error:
        return End(error.exit, error.kind, str(error))
    finally:
        engine.fail("the server is shutting down")
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
    config: EngineConfig,
    api: Api,
    process: EngineProcess,
    stop: asyncio.Queue[signal.Signals],
    serving: asyncio.Task[None],
    started: float,
    limits: Limits,
) -> End:
    """Become ready, then wait for a signal or the engine process's end.

    Raises:
        ModelError: the target's text files are missing or unusable.
    """
    loading = asyncio.create_task(_load(target_folder(config), api, started))
    signalled = asyncio.create_task(stop.get())
    died = asyncio.create_task(_death(api.engine, process))
    try:
        await asyncio.wait({loading, signalled, died, serving}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            await asyncio.wait({signalled, died, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()  # raises why
        if signalled.done():
            return await _drain(api, process, signalled.result(), stop, died, limits.drain_seconds)
        return died.result()
    finally:
        for task in (loading, signalled, died):
            task.cancel()


async def _load(folder: Path, api: Api, started: float) -> None:
    text = await in_thread(lambda: load_text(folder))
    info = await asyncio.shield(api.engine.info)
    seconds = round(time.monotonic() - started, 3)
    api.open_for_business(text, info, seconds)
    emit("ready", seconds=seconds)


async def _death(engine: Engine, process: EngineProcess) -> End:
    fatal = await asyncio.shield(engine.closed)
    if engine.broken:
        process.kill()
    return await in_thread(lambda: process.end(fatal))


async def _drain(
    api: Api,
    process: EngineProcess,
    number: signal.Signals,
    stop: asyncio.Queue[signal.Signals],
    died: asyncio.Task[End],
    seconds: float,
) -> End:
    """Let open requests finish, for a while; a second signal ends the wait."""
    api.draining = True
    emit("draining", signal=number.name, requests=api.engine.open_requests)
    api.engine.drain()
    idle = asyncio.create_task(api.engine.idle())
    again = asyncio.create_task(stop.get())
    try:
        await asyncio.wait({idle, again, died}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        again.cancel()
        idle.cancel()
    left = api.engine.open_requests
    if api.engine.closed.done():
        end = await died
        if not await in_thread(process.clean):
            return end  # it did not stop, it broke
    api.engine.fail("the server is shutting down")
    process.kill()
    done = "all requests finished" if not left else f"{left} open requests were ended"
    return End(Exit.OK, "stopped", f"{number.name}: {done}")
