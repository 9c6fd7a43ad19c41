"""`engine serve`: the HTTP front's life from the bound port to the exit status.

    bind ─▶ start the engine process ─▶ serve HTTP while it loads ─▶ ready ─▶ a signal or the engine's end ─▶ exit

The front stays small and quick to start: it never imports torch. What it imports besides is imported after the
engine process has been started, which takes far longer to load.
"""

from __future__ import annotations

import signal
import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import EngineError, Exit, PortError
from engine.events import emit
from engine.front.limits import Limits
from engine.front.process import STOP_SIGNALS, WORKER, End, EngineProcess

BACKLOG = 2048
HIGHEST_PORT = 65535


@dataclass(frozen=True)
class Service:
    """What to serve, and where. `admin_key` opens POST /policy to other hosts."""

    config: EngineConfig
    host: str
    port: int  # 0: any free one, named by the `listening` event
    name: str
    admin_key: str | None = None


def serve(config: EngineConfig, host: str, port: int, name: str, admin_key: str | None = None) -> int:
    """Serve until a signal or the engine process's end; return the exit status.

    Writes one-line JSON events to stderr: `listening` once the port is bound, `ready` when a generation would start,
    `exit` at the end, with the status, its kind and the cause. SIGTERM and SIGINT drain and end with 0.

    Args:
        name: the served model's name in the API.
    """
    return run(Service(config, host, port, name, admin_key), WORKER, Limits())


def run(service: Service, worker: Sequence[str], limits: Limits) -> int:
    """`serve`, with the engine process's command and the clients' limits given."""
    started = time.monotonic()
    # Until the event loop handles them, signals wait; the engine process inherits the mask and is ended by its socket.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        end = _run(service, worker, limits, started)
    except EngineError as error:
        end = End(error.exit, error.kind, str(error))
    except Exception as error:  # noqa: BLE001 — the process boundary: say why, then end
        emit("error", message=repr(error), traceback=traceback.format_exc())
        end = End(Exit.INTERNAL, "crashed", f"the HTTP front broke: {error!r}")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    emit("exit", code=int(end.code), kind=end.kind, message=end.message)
    return end.code


def _run(service: Service, worker: Sequence[str], limits: Limits, started: float) -> End:
    with bind(service.host, service.port) as listener, EngineProcess(service.config, worker) as process:
        address, port = listener.getsockname()[:2]
        url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
        emit("listening", url=url, host=address, port=port, model=service.name, engine_pid=process.pid)
        from engine.front.life import Start, live  # after the engine process: these imports take a while

        return live(Start(service.config, service.name, listener, process, limits, started, service.admin_key))


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        PortError: the address is taken, not ours, or no address.
    """
    if not 0 <= port <= HIGHEST_PORT:
        raise PortError(f"there is no port {port}: use 1 to {HIGHEST_PORT}, or 0 for any free one")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (socket.gaierror, UnicodeError) as error:
        raise PortError(
            f"host {host!r} cannot be resolved ({error}); use 127.0.0.1 or an address of this machine"
        ) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise PortError(f"{host}:{port} cannot be bound ({reason}); choose another --port or --host") from error
