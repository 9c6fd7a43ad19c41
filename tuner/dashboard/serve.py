"""`tuner dashboard`: finds studies, listens, and says where."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from tuner.dashboard.app import find_studies, make_app
from tuner.dashboard.guard import is_loopback
from tuner.errors import UsageError

NICE = 10  # measurements on this machine come first


def serve(paths: Sequence[Path], host: str, port: int, token: str | None) -> None:
    """Serve the dashboard until interrupted. Where others could ask, a token is made unless one is given.

    Raises:
        UsageError: no study there, or the address cannot be listened on.
    """
    find_studies(paths)
    if not is_loopback(host) and token is None:
        token = secrets.token_urlsafe(24)
    app = make_app(lambda: find_studies(paths), host=host, token=token)
    with _listen(host, port) as listener:
        bound = listener.getsockname()[1]
        shown = "localhost" if host == "127.0.0.1" else f"[{host.strip('[]')}]" if ":" in host else host
        print(f"Dashboard:  http://{shown}:{bound}/{f'?token={token}' if token else ''}", flush=True)
        os.nice(NICE)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, server_header=False)
        uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=256)
    except OSError as error:
        raise UsageError(f"{host}:{port}: cannot be listened on: {error.strerror or error}; try --port") from error
