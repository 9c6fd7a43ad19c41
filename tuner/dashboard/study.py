"""A study as it lies on disk, read along while somebody writes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tuner.dashboard.tail import Tail, open_plain
from tuner.dashboard.timeline import Timeline, follow
from tuner.records import Event, TrialRecord
from tuner.space import Space, parse_space
from tuner.store import StudyFolder

LARGEST_FILE = 2**20  # of space.yaml, launch.yaml, policy.json


@dataclass(frozen=True)
class Change:
    """What a look at the files brought. `anew`: the study was begun anew, all of it is new."""

    trials: frozenset[int] = frozenset()
    events: bool = False
    anew: bool = False

    def __bool__(self) -> bool:
        return bool(self.trials) or self.events or self.anew


class StudyReader:
    """Keeps records, timelines and space of one study up to date; nothing is written, no lock is taken."""

    def __init__(self, folder: StudyFolder) -> None:
        self.folder = folder
        self._clear()

    def _clear(self) -> None:
        self._trials = Tail(self.folder.trials)
        self._events = Tail(self.folder.events)
        self._space: Space | None = None
        self.records: dict[int, TrialRecord] = {}
        self.timelines: dict[int, Timeline] = {}
        self.unreadable = 0  # lines that are no record or event

    def refresh(self) -> Change:
        """Read what is new.

        Raises:
            OSError: a file cannot be read.
        """
        lines = self._trials.read()
        events = self._events.read()
        anew = lines.restarted or events.restarted
        if anew:
            self._clear()
            lines, events = self._trials.read(), self._events.read()
        touched = {record.trial for line in lines.lines if (record := self._record(line)) is not None}
        for line in events.lines:
            event = self._event(line)
            if event is not None and event.kind == "record" and event.trial in self.records:
                touched.add(event.trial)
        return Change(frozenset(touched), bool(events.lines), anew)

    def _record(self, line: bytes) -> TrialRecord | None:
        try:
            record = TrialRecord.model_validate_json(line)
        except ValidationError:
            self.unreadable += 1
            return None
        self.records[record.trial] = record
        return record

    def _event(self, line: bytes) -> Event | None:
        try:
            event = Event.model_validate_json(line)
            follow(self.timelines, event)
        except ValidationError:
            self.unreadable += 1
            return None
        return event

    @property
    def too_long(self) -> int:
        """Lines that were passed over because of their length."""
        return self._trials.too_long + self._events.too_long

    @property
    def space(self) -> Space:
        """The study's search space, read once.

        Raises:
            SpaceError: invalid in this version.
            OSError: it cannot be read.
        """
        if self._space is None:
            self._space = parse_space(self.folder.space.read_bytes(), str(self.folder.space))
        return self._space

    def asked(self, trial: int) -> dict[str, Any] | None:
        """Return the configuration that a running trial's server was given, if it was written already."""
        return read_mapping(self.folder.logs / f"trial-{trial:04d}.yaml")


def read_mapping(path: Path) -> dict[str, Any] | None:
    """Return a small YAML or JSON file's mapping, None where there is none."""
    try:
        with open_plain(path) as file:
            document = yaml.safe_load(file.read(LARGEST_FILE))
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
