"""One trial: with a lease, with a server, wait until it is ready, load it, measure.

A trial always comes to a TrialRecord. That the server fails is a result with a stage; only what breaks in our own
code is an exception, and it is caught here, at the trial's boundary, with its traceback as evidence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from engine import backends
from engine.backends import Backend
from engine.errors import EngineError
from tuner.curve import Bench, measure_curve
from tuner.errors import TunerError
from tuner.executors.base import Lease
from tuner.failures import ADVICE, Remains, classify, from_error, from_trace
from tuner.headroom import headroom
from tuner.journal import Journal
from tuner.leases import NotLeased, await_turn, fresh_port, lease, runtime_folder
from tuner.load.client import Endpoint
from tuner.load.workload import Requests, make_requests
from tuner.machine import free_bytes, look_at_gpus
from tuner.parity import parity_of
from tuner.quarantine import HeldBack, prove_back
from tuner.ready import NotReady, await_ready
from tuner.records import Event, Failure, Level, Raced, Stage, State, TrialRecord, TrialSpec, config_dict
from tuner.reference import Parity
from tuner.resolved import silent_changes
from tuner.supervise import Stopped, Supervised, SuperviseError, supervise
from tuner.windows import measuring

HOST = "127.0.0.1"
LEAST_DISK = 256 * 2**20


@dataclass
class Server:
    """A started server. Set when its block has been left: `stopped`, and the GPUs whose memory is not back."""

    process: Supervised
    endpoint: Endpoint
    stopped: Stopped | None = None
    held_back: tuple[HeldBack, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a started server came to: levels measured, and why there are no more, if so; how its text was judged."""

    levels: tuple[Level, ...] = ()
    resolved: dict[str, Any] | None = None
    remains: Remains | None = None
    parity: Parity | None = None
    raced: Raced | None = None


async def run_trial(spec: TrialSpec, emit: Callable[[Event], None], backend: Backend | None = None) -> TrialRecord:
    """Run one trial on this machine and return what it came to.

    Args:
        emit: takes every event as it happens; the last carries the record that is also returned.
        backend: runs the config; None is the one that the config names.
    """
    journal = Journal(spec, emit)
    try:
        chosen = backends.get(spec.config) if backend is None else backend
        requests = make_requests(spec.workload, spec.served_name, spec.seed)
        async with leased(spec, journal) as held:
            with served(spec, held, chosen, journal) as server:
                outcome = await _try(spec, server, held, chosen, requests, journal)
        return journal.close(_record(spec, outcome, server))
    except NotLeased as error:
        return journal.close(_failed(spec, from_error(journal.working, error, error.kind, error.evidence)))
    except EngineError as error:
        return journal.close(_failed(spec, from_error(journal.working, error, error.kind)))
    except SuperviseError as error:
        return journal.close(_failed(spec, from_error(journal.working, error, "crashed")))
    except TunerError as error:
        return journal.close(_failed(spec, from_error(journal.working, error, "config")))
    except Exception:  # noqa: BLE001  # the trial's boundary: the study goes on, and the evidence is kept
        return journal.close(_failed(spec, from_trace(journal.working, traceback.format_exc())))


async def _try(
    spec: TrialSpec,
    server: Server,
    held: Lease,
    backend: Backend,
    requests: Requests,
    journal: Journal,
) -> Outcome:
    """Bring a started server to readiness and measure every level, until something fails."""
    resolved, remains = await made_ready(spec, server, held, backend, requests, journal.waiting)
    if remains is not None:
        return Outcome(resolved=resolved, remains=remains)
    parity, remains = await parity_of(spec, server.process, server.endpoint, backend, requests, resolved, journal)
    if remains is not None:  # what changes the text is not worth measuring
        return Outcome((), resolved, remains, parity)
    bench = Bench(spec, server.process, server.endpoint, backend, requests, len(held.gpus))
    async with measuring(spec, journal):
        curve = await measure_curve(bench, journal)
    return Outcome(curve.levels, resolved, curve.remains, parity, curve.raced)


async def made_ready(
    spec: TrialSpec,
    server: Server,
    held: Lease,
    backend: Backend,
    requests: Requests,
    tell: Callable[[str, Stage], None] = lambda *_: None,
) -> tuple[dict[str, Any] | None, Remains | None]:
    """Wait until a started server has answered, with the config that was asked for.

    Returns:
        The config that it says it runs, None where its backend says nothing; and what is left of it if it is not ready.
    """
    ready = await await_ready(
        server.process,
        server.endpoint,
        backend.probes,
        requests,
        timeout=spec.limits.ready_s,
        synthetic=spec.config.synthetic,
        gpu_memory=(lambda: _gpu_memory(held)) if held.gpus else None,
        tell=tell,
    )
    if isinstance(ready, NotReady):
        exit_ = server.process.poll()
        return None, Remains(ready.stage, ready.reason, ready.seen, exit_, advice=ready.advice)
    resolved = backend.resolved(ready.info) if ready.info is not None else None
    if changed := silent_changes(config_dict(spec.config), resolved or {}):
        return resolved, Remains("ready", f"the server runs another config: {'; '.join(changed)}", "config")
    return resolved, None


def _gpu_memory(held: Lease) -> int:
    """Return the bytes in use on the leased GPUs."""
    leased = {gpu.uuid for gpu in held.gpus}
    return sum(gpu.memory_used for gpu in look_at_gpus().gpus if gpu.uuid in leased) * 2**20


@contextlib.asynccontextmanager
async def leased(spec: TrialSpec, journal: Journal) -> AsyncIterator[Lease]:
    """Hold the lease of a trial."""
    journal.begin("lease")
    async with lease(spec.lease, _holder(spec), spec.limits.lease_s, journal.tell) as held:
        if held.gpus:
            journal.tell("GPU " + ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in held.gpus))
            await await_turn(tell=journal.tell)
        yield held


@contextlib.contextmanager
def served(spec: TrialSpec, held: Lease, backend: Backend, journal: Journal) -> Iterator[Server]:
    """Run the trial's server on a fresh port; leaving the block stops it and proves it gone, from the GPUs too.

    Raises:
        NotLeased: no free port, or too little disk for its files.
        EngineError: the backend refuses the config.
    """
    journal.begin("launch")
    folder = Path(spec.study) / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    if (free := free_bytes(folder)) < LEAST_DISK:
        raise NotLeased(
            "disk_full",
            f"{free // 2**20} MiB free in {folder}, {LEAST_DISK // 2**20} are needed",
        )
    config_path = folder / f"trial-{spec.trial:04d}.yaml"
    config_path.write_text(yaml.safe_dump(config_dict(spec.config), sort_keys=False), encoding="utf-8")
    with fresh_port(_holder(spec), HOST) as port:
        launch = backend.command(spec.config, config_path, HOST, port)
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            **launch.env,
            **held.environment,
        }
        with supervise(
            launch.argv,
            env=environment,
            log=folder / spec.log_name,
            keep=held.fds,
            grace=spec.limits.stop_s,
            adopt=True,
            port=port,
        ) as process:
            server = Server(process, Endpoint(HOST, port))
            try:
                yield server
            finally:
                journal.begin("stop")
                server.stopped = process.stop(spec.limits.stop_s)
                server.held_back = prove_back(held.gpus, runtime_folder())


def _holder(spec: TrialSpec) -> str:
    return f"{Path(spec.study).name} trial {spec.trial}"


def _record(spec: TrialSpec, outcome: Outcome, server: Server) -> TrialRecord:
    """Join what was measured, what went wrong, and whether the server is gone."""
    tail = server.process.tail()
    failure = None
    state: State = "pruned" if outcome.raced is not None and outcome.raced.out else "measured"
    if outcome.remains is not None:
        failure = classify(dataclasses.replace(outcome.remains, tail=tail, config=spec.config))
    elif (left := not_gone(server.stopped, server.held_back)) is not None:
        failure = left
    return TrialRecord(
        trial=spec.trial,
        role=spec.role,
        state=state if failure is None else "failed",
        config=config_dict(spec.config),
        resolved=outcome.resolved,
        levels=outcome.levels,
        failure=failure,
        parity=outcome.parity,
        raced=outcome.raced,
        headroom=headroom(spec.config, outcome.levels) if outcome.levels else None,
        synthetic=spec.config.synthetic,
        gpus=spec.lease.gpus,
    )


def not_gone(stopped: Stopped | None, held_back: tuple[HeldBack, ...] = ()) -> Failure | None:
    """Return the failure of a server that could not be ended: what it holds is not free for the next trial.

    When all of ours is gone, a process that the driver names on every GPU held back is a stranger's.
    """
    evidence = tuple(held.line for held in held_back)
    if stopped is not None and not stopped.gone:
        pids = ", ".join(map(str, stopped.survivors)) or "unknown processes"
        evidence = (f"still alive after SIGKILL: {pids}", *evidence)
    elif stopped is not None and stopped.port_free is False:
        evidence = ("its processes are gone, but its port is still taken", *evidence)
    elif held_back and all(held.used for held in held_back):
        advice = ADVICE["foreign_gpu_process"]
        return Failure(kind="foreign_gpu_process", stage="stop", evidence=evidence, advice=advice)
    if not evidence:
        return None
    advice = "a process that SIGKILL does not end hangs in the kernel or a driver: reset the GPU or reboot"
    return Failure(kind="crashed", stage="stop", evidence=evidence, told=evidence[0], advice=advice)


def _failed(spec: TrialSpec, failure: Failure) -> TrialRecord:
    """Return the record of a trial that has nothing but a failure."""
    return TrialRecord(
        trial=spec.trial,
        role=spec.role,
        state="failed",
        config=config_dict(spec.config),
        failure=failure,
        synthetic=spec.config.synthetic,
        gpus=spec.lease.gpus,
    )
