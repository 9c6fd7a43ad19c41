"""Exclusive measurement windows: where neighbours disturb each other, one trial of this user measures at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator

from tuner.journal import Journal
from tuner.leases import POLL_SECONDS, NotLeased, try_lock
from tuner.records import TrialSpec

LOCK = "window"


@contextlib.asynccontextmanager
async def measuring(spec: TrialSpec, journal: Journal) -> AsyncIterator[None]:
    """Hold the machine's one window while a trial measures, if its lease asks for that; the wait is no load.

    Raises:
        NotLeased: others measured for longer than the lease may wait.
    """
    if not spec.lease.exclusive:
        yield
        return
    began = time.monotonic()
    while (fd := try_lock(LOCK, f"trial {spec.trial}")) is None:
        if journal.stage != "lease":
            journal.begin("lease")
            journal.tell("waiting: another trial measures")
        if time.monotonic() - began > spec.limits.lease_s:
            raise NotLeased("no_progress", f"other trials measured for {spec.limits.lease_s:.0f} s")
        await asyncio.sleep(POLL_SECONDS * random.uniform(0.5, 1.5))
    try:
        yield
    finally:
        os.close(fd)
