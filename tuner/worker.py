"""`python -m tuner.worker`: runs one trial on the machine it is started on.

Reads a TrialSpec (JSON) from standard input until its end, writes Events to standard output, one JSON line each;
the last carries the TrialRecord. SIGTERM or SIGINT ends the server and then the worker, without a record.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import IO

from pydantic import ValidationError

from engine.backends import Backend
from tuner.load.loop import run
from tuner.records import Event, TrialSpec
from tuner.trial import run_trial

BAD_SPEC = 2


def event_writer() -> Callable[[Event], None]:
    """Return what writes events to standard output; whatever else is printed goes to standard error from now on."""
    fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(event: Event) -> None:
        line = event.model_dump_json().encode() + b"\n"
        while line:
            line = line[os.write(fd, line) :]

    return write


async def _until_told(spec: TrialSpec, emit: Callable[[Event], None], backend: Backend | None) -> int:
    """Run the trial; a signal cancels it, which leaves every block in order. Return the exit status."""
    task = asyncio.ensure_future(run_trial(spec, emit, backend))
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        return 128 + (received[0] if received else signal.SIGTERM)
    return 0


def main(source: IO[bytes] = sys.stdin.buffer, backend: Backend | None = None) -> int:
    """Run the trial that `source` describes; return the exit status."""
    emit = event_writer()
    try:
        spec = TrialSpec.model_validate_json(source.read())
    except ValidationError as error:
        print(f"not a trial: {error}", file=sys.stderr)
        return BAD_SPEC
    return run(_until_told(spec, emit, backend))


if __name__ == "__main__":
    sys.exit(main())
