"""What a running search shows: one line per trial, and on a terminal a live line below them."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.text import Text

from tuner.durations import format_duration
from tuner.labels import clean, label, number
from tuner.records import Event, Level, TrialRecord, TrialSpec, metric_of
from tuner.space import FloatRange, Space
from tuner.study import Progress, describe


class Watcher:
    """Prints a search as it runs (see `study.Observer`); live on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, space: Space) -> None:
        self._console = console
        self._space = space
        self._paths = [d.path for d in space.domains if isinstance(d, FloatRange) or len(d) > 1]
        self._live: Live | None = None
        self._spec: TrialSpec | None = None
        self._progress: Progress | None = None
        self._since = 0.0
        self._stage = ""
        self._spinner = Spinner("dots")

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True, get_renderable=self._line)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._spec = None
            self._live.stop()

    # ------------------------------------------------------------------------------------ what is observed

    def trial_begins(self, spec: TrialSpec, progress: Progress) -> None:
        """Show that a trial starts."""
        self._spec, self._progress, self._since, self._stage = spec, progress, time.monotonic(), "starts"
        if self._live is None:
            config = label(spec.config.model_dump(mode="json"), self._paths)
            self._say(f"trial {spec.trial} ({spec.role}): {config} starts; {self._where(progress)}")

    def event(self, event: Event) -> None:
        """Show what the worker does."""
        level = f" c={event.level}" if event.level is not None else ""
        if event.kind == "end" and event.level is not None and event.data is not None:
            text = self._level(Level.model_validate(event.data))
            self._stage = f"{event.stage}{level}: {text}"
            if self._live is None:
                self._say(f"trial {event.trial}: {event.stage}{level}: {text}")
        elif event.kind in ("begin", "progress"):
            self._stage = f"{event.stage}{level}" + (f": {event.text}" if event.text else "")
            if self._live is None and event.kind == "begin" and event.level is None:
                self._say(f"trial {event.trial}: {self._stage}")

    def trial_ends(self, record: TrialRecord, progress: Progress) -> None:
        """Print the trial's line."""
        self._progress = progress
        config = label(record.config, self._paths)
        again = f" of #{record.of}" if record.of is not None else ""
        head = f"#{record.trial:<3d} {record.role + again:<14} {config:<34} "
        if record.failure is not None:
            words = "refused" if record.state == "infeasible" else "failed"
            self._say(f"{head} {words}: {describe(record.failure)}", style="yellow")
            return
        levels = "  ".join(f"c={level.concurrency} {self._level(level)}" for level in record.levels)
        took = format_duration(sum(record.seconds.values()))
        out = "; raced out: beaten whatever its other loads bring" if record.raced and record.raced.out else ""
        self._say(f"{head} {levels}  ({took}{out})")

    def note(self, text: str) -> None:
        """Print a line."""
        self._say(text, style="dim")

    # ----------------------------------------------------------------------------------------- how it looks

    def _level(self, level: Level) -> str:
        names = [objective.metric for objective in self._space.file.objectives]
        return ", ".join(_reading(name, level.metrics.get(name)) for name in names)

    def _where(self, progress: Progress) -> str:
        done = f"{progress.launched} of {progress.trials}" if progress.trials else f"{progress.launched}"
        left = f", about {format_duration(progress.left)} left" if progress.left is not None else ""
        return f"{done} trials done after {format_duration(progress.seconds)}{left}"

    def _line(self) -> Text | Spinner:
        if self._spec is None or self._progress is None:
            return Text("")
        running = time.monotonic() - self._since
        progress = self._progress
        left = (
            f" · about {format_duration(max(0.0, progress.left - running))} left" if progress.left is not None else ""
        )
        total = f"/{progress.trials}" if progress.trials else ""
        config = label(self._spec.config.model_dump(mode="json"), self._paths)
        number_ = f"#{self._spec.trial} {self._spec.role} {config}"
        text = f"{number_} · {self._stage} · {format_duration(running)} · {progress.launched}{total} done{left}"
        self._spinner.update(text=Text(clean(text), no_wrap=True, overflow="ellipsis"))
        return self._spinner

    def _say(self, text: str, style: str = "") -> None:
        text = clean(text)
        if self._console.is_terminal:
            self._console.print(escape(text), style=style, highlight=False)
        else:
            self._console.file.write(text + "\n")
            self._console.file.flush()


def _reading(name: str, value: float | None) -> str:
    """Return a measured value with its unit, and with its name where the unit does not tell: `7.1 ms/tok`."""
    unit = metric_of(name).unit.replace("tokens", "tok").replace("token", "tok")
    return f"{number(value)} {unit}" if "/" in unit else f"{name} {number(value)} {unit}"
