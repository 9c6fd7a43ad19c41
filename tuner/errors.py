"""The tuner's exceptions: one tree, each with the exit status of its cause.

    TunerError
    ├── SpaceError         2   a search-space file is invalid: `Problem`s with file:line:column and a hint
    ├── StudyError         2   a study folder cannot be used: absent, locked, of another machine, unreadable
    ├── UsageError         2   an argument of a command makes no sense
    └── NothingFeasible    3   no measured trial meets the constraints

Errors of one module are defined beside what raises them, and are TunerErrors too.
A trial that fails is no exception: it is a `records.Failure`, kept and shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path


class Exit(IntEnum):
    """Exit status of `tuner`."""

    OK = 0
    BAD_INPUT = 2
    NOTHING_FEASIBLE = 3
    INTERRUPTED = 130


class TunerError(Exception):
    """A problem with a known cause; its message says what to do, on one line."""

    exit = Exit.BAD_INPUT


@dataclass(frozen=True, order=True)
class Problem:
    """One problem of a search-space file; line and column count from 1."""

    line: int
    column: int
    message: str
    hint: str = ""

    def render(self, source: str) -> str:
        """Return `file:line:column: message (hint)`."""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{source}:{self.line}:{self.column}: {self.message}{hint}"


class SpaceError(TunerError):
    """A search-space file is invalid; `problems` are in the order of the file."""

    def __init__(self, source: str | Path, problems: Iterable[Problem]) -> None:
        self.source = str(source)
        self.problems = tuple(sorted(set(problems)))
        super().__init__("\n".join(problem.render(self.source) for problem in self.problems))


class StudyError(TunerError):
    """A study folder cannot be used."""


class UsageError(TunerError):
    """An argument makes no sense."""


class NothingFeasible(TunerError):
    """No measured trial meets what is asked."""

    exit = Exit.NOTHING_FEASIBLE
