"""Trials on this machine: one worker process each, which takes its lease where it measures."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from tuner.failures import Remains, classify
from tuner.quarantine import PROOF_SECONDS
from tuner.records import Event, Limits, Stage, TrialRecord, TrialSpec, config_dict
from tuner.supervise import PORT_SECONDS, STOP_SECONDS, Supervised, SuperviseError, supervise

WORKER = (sys.executable, "-m", "tuner.worker")
WORKER_LOG_CAP = 2**20  # it says next to nothing
LEAVE_SECONDS = 10.0  # to notice a signal, and to leave


class LocalExecutor:
    """Runs trials on this machine, one after another (see `base.Executor`).

    `worker` is the command that reads a TrialSpec from its
    standard input and writes events to its standard output.
    """

    def __init__(self, worker: Sequence[str] = WORKER) -> None:
        self._worker = tuple(worker)
        self._running: list[Supervised] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in list(self._running):
            process.stop()

    @property
    def gpus(self) -> tuple[str, ...]:
        """See `base.Executor.gpus`."""
        return ()

    @contextlib.contextmanager
    def run_all(self, specs: Sequence[TrialSpec]) -> Iterator[Iterator[Event]]:
        """Run trials one after another; see `base.Executor.run_all`."""

        def one_by_one() -> Generator[Event, None, None]:
            for spec in specs:
                with self.run(spec) as events:
                    yield from events

        with contextlib.closing(one_by_one()) as events:
            yield events

    @contextlib.contextmanager
    def run(self, spec: TrialSpec) -> Iterator[Iterator[Event]]:
        """Start one trial and yield its events; see `base.Executor.run`."""
        logs = Path(spec.study) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            asked = stack.enter_context(tempfile.TemporaryFile())
            asked.write(spec.model_dump_json().encode())
            asked.seek(0)
            read_end, write_end = os.pipe()
            stack.callback(os.close, read_end)
            try:
                process = stack.enter_context(
                    supervise(
                        self._worker,
                        env=os.environ | _confined(spec),
                        log=logs / f"trial-{spec.trial:04d}.worker.log",
                        stdin=asked.fileno(),
                        stdout=write_end,
                        grace=worker_grace(spec.limits),
                        log_cap=WORKER_LOG_CAP,
                    )
                )
            except SuperviseError as error:
                yield iter([_lost(spec, Remains("lease", str(error), "crashed"))])
                return
            finally:
                os.close(write_end)
            self._running.append(process)
            stack.callback(self._running.remove, process)
            yield _events(read_end, process, spec)


def worker_grace(limits: Limits) -> float:
    """Return the seconds that a worker may need to end: to stop its server, and to prove port and GPUs free."""
    return limits.stop_s + STOP_SECONDS + PORT_SECONDS + PROOF_SECONDS + LEAVE_SECONDS


def _confined(spec: TrialSpec) -> dict[str, str]:
    """Return what shows a worker the GPUs of its trial alone."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(spec.lease.devices)} if spec.lease.devices else {}


def _events(fd: int, process: Supervised, spec: TrialSpec) -> Iterator[Event]:
    """Yield the worker's events; when it ends without a record, one that says so."""
    stage: Stage = "lease"
    problem = "the worker ended without a record"
    with open(fd, "rb", closefd=False) as stream:
        for line in stream:
            try:
                event = Event.model_validate_json(line)
            except ValidationError:
                problem = f"the worker wrote what is no event: {line[:200].decode('utf-8', 'replace').strip()}"
                break
            stage = event.stage
            yield event
            if event.kind == "record":
                return
    ended = process.stop(worker_grace(spec.limits))
    reason = f"{problem} ({ended.exit or 'it was stopped'})"
    yield _lost(spec, Remains(stage, reason, "crashed", None, process.tail()))


def _lost(spec: TrialSpec, remains: Remains) -> Event:
    """Return the last event of a trial whose worker could not send one."""
    record = TrialRecord(
        trial=spec.trial,
        role=spec.role,
        state="failed",
        config=config_dict(spec.config),
        failure=classify(remains),
        synthetic=spec.config.synthetic,
        gpus=spec.lease.gpus,
    )
    return Event(
        kind="record",
        trial=spec.trial,
        stage=remains.stage,
        time=time.time(),
        text=remains.reason,
        record=record,
    )
