"""The dashboard's server: the page, its data as JSON, and what changes as server-sent events. It writes nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from tuner.dashboard.guard import LOCAL_NAMES, Guard, is_loopback
from tuner.dashboard.live import LiveStudy, Unreadable
from tuner.dashboard.state import running
from tuner.dashboard.tail import read_piece
from tuner.errors import TunerError, UsageError
from tuner.store import StudyFolder

LOG_BYTES = 64 * 1024
WARM = 4  # studies
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
LOGS = {"server": "trial-{:04d}.log", "worker": "trial-{:04d}.worker.log"}
FRESH = {"cache-control": "no-store"}


def find_studies(paths: Sequence[Path]) -> dict[str, StudyFolder]:
    """Return studies by the name they have in addresses: those given, and those in folders given.

    Raises:
        UsageError: a path holds no study.
    """
    found: dict[str, StudyFolder] = {}
    for path in paths:
        inside = (
            [path]
            if (path / "space.yaml").is_file()
            else sorted(child for child in _children(path) if (child / "space.yaml").is_file())
        )
        if not inside:
            raise UsageError(f"{path}: holds no study; give a study's folder, or the folder of studies")
        for folder in inside:
            name, number = folder.resolve().name, 1
            while name in found and found[name].path.resolve() != folder.resolve():
                number += 1
                name = f"{folder.resolve().name}-{number}"
            found[name] = StudyFolder(folder)
    return found


def _children(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error


def static_files() -> dict[str, bytes]:
    """Return the page's files by their path in addresses: only these are ever served."""
    root = resources.files("tuner.dashboard").joinpath("static")
    found = {}
    for folder in (root, root.joinpath("vendor")):
        prefix = "" if folder is root else "vendor/"
        for entry in folder.iterdir():
            if entry.is_file() and Path(entry.name).suffix in TYPES:
                found[prefix + entry.name] = entry.read_bytes()
    return found


class Dashboard:
    """What the routes share. `find` is asked again for every list, so that new studies show up."""

    def __init__(self, find: Callable[[], Mapping[str, StudyFolder]]) -> None:
        self._find = find
        self._live: dict[str, LiveStudy] = {}
        self._files = static_files()

    def close(self) -> None:
        """End every stream."""
        for study in self._live.values():
            study.close()

    async def warm(self) -> None:
        """Read the studies that changed last, so that whoever opens one need not wait."""
        changed = {name: _changed(folder) for name, folder in self._find().items()}
        for name in sorted(changed, key=changed.__getitem__, reverse=True)[:WARM]:
            if (live := self._named(name)) is not None:
                with contextlib.suppress(Unreadable):  # said when it is asked for
                    await live.whole()

    def _study(self, request: Request) -> LiveStudy | None:
        return self._named(request.path_params["study"])

    def _named(self, name: str) -> LiveStudy | None:
        folder = self._find().get(name)
        if folder is None:
            return None
        if name not in self._live or self._live[name].folder != folder:
            self._live[name] = LiveStudy(folder, name)
        return self._live[name]

    async def page(self, request: Request) -> Response:
        """The page."""
        return Response(self._files["index.html"], media_type=TYPES[".html"], headers=FRESH)

    async def file(self, request: Request) -> Response:
        """A script, a style, a font: looked up by name in what was read at the start, never in the file system."""
        name = request.path_params["name"]
        content = self._files.get(name)
        if content is None:
            return _nothing("no such file")
        kept = "max-age=86400" if name.startswith("vendor/") else "no-cache"
        return Response(content, media_type=TYPES[Path(name).suffix], headers={"cache-control": kept})

    async def studies(self, request: Request) -> Response:
        """Every study, and whether it is being searched."""
        listed = [{"id": name, "running": running(folder) is not None} for name, folder in self._find().items()]
        return JSONResponse({"studies": listed}, headers=FRESH)

    async def study(self, request: Request) -> Response:
        """One study, whole."""
        live = self._study(request)
        if live is None:
            return _nothing("no such study")
        return Response(await live.whole(), media_type="application/json", headers=FRESH)

    async def changes(self, request: Request) -> Response:
        """What changes in a study from a version on, as server-sent events."""
        live = self._study(request)
        if live is None:
            return _nothing("no such study")
        since = request.headers.get("last-event-id") or request.query_params.get("since", "")
        if not since.isdecimal() or len(since) > 12:
            return _refused("since is the version of the document")
        return StreamingResponse(live.watch(int(since)), media_type="text/event-stream", headers=FRESH)

    async def log(self, request: Request) -> Response:
        """A piece of a trial's log: its end, or what follows an offset. The text is whatever a server printed."""
        live = self._study(request)
        name = LOGS.get(request.path_params["log"])
        if live is None or name is None:
            return _nothing("no such log")
        offset = request.query_params.get("offset")
        if offset is not None and (not offset.isdecimal() or len(offset) > 15):
            return _refused("offset is a number of bytes")
        path = live.folder.logs / name.format(request.path_params["trial"])
        try:
            data, start, size = read_piece(path, None if offset is None else int(offset), LOG_BYTES)
        except OSError as error:
            return _nothing(f"this log cannot be read: {error.strerror}")
        text = data.decode("utf-8", "replace")
        return JSONResponse({"start": start, "end": start + len(data), "size": size, "text": text}, headers=FRESH)


def _changed(folder: StudyFolder) -> float:
    try:
        return folder.trials.stat().st_mtime
    except OSError:
        return 0.0


def make_app(
    find: Callable[[], Mapping[str, StudyFolder]], *, host: str = "127.0.0.1", token: str | None = None
) -> ASGIApp:
    """Return the application for studies that `find` names; `host` is where it will listen.

    Raises:
        UsageError: no token, though others than this machine could ask.
    """
    local = is_loopback(host)
    if not local and not token:
        raise UsageError(f"{host} can be reached from elsewhere: a token is needed")
    dashboard = Dashboard(find)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            warming = group.create_task(dashboard.warm())
            yield
            warming.cancel()
            dashboard.close()

    study = "/api/studies/{study}"
    app = Starlette(
        routes=[
            Route("/", dashboard.page),
            Route("/static/{name:path}", dashboard.file),
            Route("/api/studies", dashboard.studies),
            Route(study, dashboard.study),
            Route(f"{study}/events", dashboard.changes),
            Route(f"{study}/trials/{{trial:int}}/logs/{{log}}", dashboard.log),
        ],
        exception_handlers={TunerError: _unreadable},
        lifespan=lifespan,
    )
    return Guard(app, token=token, names=LOCAL_NAMES | {host} if local else None)


async def _unreadable(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=409, headers=FRESH)


def _nothing(why: str) -> Response:
    return JSONResponse({"error": why}, status_code=404, headers=FRESH)


def _refused(why: str) -> Response:
    return JSONResponse({"error": why}, status_code=400, headers=FRESH)
