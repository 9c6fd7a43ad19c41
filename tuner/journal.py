"""What a trial tells while it runs: stages that begin and end, levels, lines for people, and how long each took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from tuner.records import Event, EventKind, Level, Stage, TrialRecord, TrialSpec
from tuner.reference import Reference


class Journal:
    """Turns the course of one trial into events, and adds up the seconds of its stages."""

    def __init__(self, spec: TrialSpec, emit: Callable[[Event], None]) -> None:
        self._trial = spec.trial
        self._emit = emit
        self._open: Stage | None = None
        self._since = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._started = time.time()
        self.stage: Stage = "lease"
        self.working: Stage = "lease"  # the last stage but `stop`: where a failure happened

    def begin(self, stage: Stage) -> None:
        """Enter a stage, leaving the one before; entering it twice is entering it once."""
        if stage == self._open:
            return
        self._end()
        self._open = self.stage = stage
        if stage != "stop":
            self.working = stage
        self._since = time.monotonic()
        self._say("begin")

    def tell(self, text: str) -> None:
        """Say a line about the current stage."""
        self._say("progress", text=text)

    def refer(self, reference: Reference) -> None:
        """Hand over the reference of the study."""
        self._say("progress", text=f"{len(reference.texts)} reference texts", reference=reference)

    def waiting(self, text: str, stage: Stage) -> None:
        """Say why a stage still waits; enters it."""
        self.begin(stage)
        if text:
            self.tell(text)

    @contextlib.contextmanager
    def level(self, concurrency: int) -> Iterator[Callable[[Level], None]]:
        """Announce a level of the load; call what is yielded with its result."""
        self.begin("load")
        self._say("begin", level=concurrency)
        yield lambda level: self._say("end", level=concurrency, data=level.model_dump(mode="json"))

    def close(self, record: TrialRecord) -> TrialRecord:
        """End the last stage, send the record with its times, and return it."""
        self._end()
        complete = record.model_copy(update={"seconds": dict(self._seconds), "started": self._started})
        self._say("record", record=complete)
        return complete

    def _end(self) -> None:
        if self._open is None:
            return
        spent = time.monotonic() - self._since
        self._seconds[self._open] = self._seconds.get(self._open, 0.0) + spent
        self._say("end", text=f"{spent:.2f} s")
        self._open = None

    def _say(
        self,
        kind: EventKind,
        *,
        text: str = "",
        level: int | None = None,
        data: dict[str, Any] | None = None,
        reference: Reference | None = None,
        record: TrialRecord | None = None,
    ) -> None:
        self._emit(
            Event(
                kind=kind,
                trial=self._trial,
                stage=self.stage,
                level=level,
                time=time.time(),
                text=text,
                data=data,
                reference=reference,
                record=record,
            )
        )
