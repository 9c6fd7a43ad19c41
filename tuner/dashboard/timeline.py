"""One trial's course, from its events: stages and levels with their times, lines said, levels measured so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tuner.budget import covered
from tuner.records import Event, Level, Stage, TrialRecord

MOST_LINES = 200
LONGEST_TEXT = 500


@dataclass
class Segment:
    """A stage, or a level of the load. Unix times; `end` is None while it goes on."""

    stage: Stage
    level: int | None
    begin: float
    end: float | None = None


@dataclass
class Timeline:
    """The course of one trial. `begin`, `end`: Unix times; `end` is None until its record came."""

    trial: int
    begin: float
    last: float
    end: float | None = None
    segments: list[Segment] = field(default_factory=list)
    lines: list[tuple[float, str, str]] = field(default_factory=list)  # (time, stage, text)
    levels: list[Level] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Take in the next event of this trial.

        Raises:
            ValidationError: its data is no level.
        """
        self.last = max(self.last, event.time)
        match event.kind:
            case "begin":
                self.segments.append(Segment(event.stage, event.level, event.time))
            case "end":
                self._close(event)
                if event.level is not None and event.data is not None:
                    level = Level.model_validate(event.data)
                    self.levels = [each for each in self.levels if each.concurrency != level.concurrency]
                    self.levels.append(level)  # measured longer, it takes the place of its short window
            case "record":
                self.end = event.time
                self._close_all(event.time)
        if event.text and event.kind != "end":
            self.lines.append((event.time, event.stage, event.text[:LONGEST_TEXT]))
            del self.lines[:-MOST_LINES]

    @property
    def now(self) -> Segment | None:
        """The innermost segment that goes on."""
        return next((segment for segment in reversed(self.segments) if segment.end is None), None)

    def _close(self, event: Event) -> None:
        for segment in reversed(self.segments):
            if segment.end is None and (segment.stage, segment.level) == (event.stage, event.level):
                segment.end = event.time
                return

    def _close_all(self, time: float) -> None:
        for segment in self.segments:
            if segment.end is None:
                segment.end = time


def follow(timelines: dict[int, Timeline], event: Event) -> None:
    """Add an event to its trial's timeline. A trial that begins again, after a death, has a new one.

    Raises:
        ValidationError: its data is no level.
    """
    known = timelines.get(event.trial)
    again = known is not None and event.kind == "begin" and event.stage == "lease"
    if known is None or again:
        known = timelines[event.trial] = Timeline(event.trial, event.time, event.time)
    known.add(event)


def from_record(record: TrialRecord) -> Timeline | None:
    """Return the timeline of a record without events: its stages one after another."""
    if record.started is None:
        return None
    at = record.started
    timeline = Timeline(record.trial, at, at)
    for stage, seconds in record.seconds.items():
        timeline.segments.append(Segment(stage, None, at, at + seconds))  # type: ignore[arg-type]
        at += seconds
    timeline.last = timeline.end = at
    return timeline


def lanes(timelines: Iterable[Timeline]) -> dict[int, int]:
    """Return {trial: lane}: the fewest lanes in which no two trials overlap, the earliest free one first."""
    free: list[float] = []
    found = {}
    for timeline in sorted(timelines, key=lambda t: (t.begin, t.trial)):
        end = timeline.end if timeline.end is not None else float("inf")
        lane = next((i for i, until in enumerate(free) if until <= timeline.begin), len(free))
        if lane == len(free):
            free.append(end)
        free[lane] = end
        found[timeline.trial] = lane
    return found


def busy_seconds(timelines: Iterable[Timeline], now: float | None) -> float:
    """Return how long at least one trial ran; `now` ends what still runs, None ends it with its last event."""
    return covered((t.begin, t.end if t.end is not None else now if now is not None else t.last) for t in timelines)
