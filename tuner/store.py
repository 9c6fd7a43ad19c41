"""The study's folder: one writer, appended and synced, readable after a death at any moment.

space.yaml        what was asked, a copy
provenance.json   on what machine, with which versions
events.jsonl      what happened, for live views
trials.jsonl      the truth: one record per launch or refused point, the last of a number counts
reference.json    the baseline's own texts, by which all others are judged
batch.json        launches that were decided together, until all of them are recorded
search.json       why the search ended, and what it saved on the way
front.json        derived, rewritten whole
policy.json       derived: the table of drafts by load, and whether it was accepted
launch.yaml, report.html, logs/
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tuner.errors import StudyError
from tuner.records import Event, Planned, TrialRecord
from tuner.reference import Reference

MAX_LINE = 8 * 2**20
BATCH = TypeAdapter(tuple[Planned, ...])


@dataclass(frozen=True)
class StudyFolder:
    """Paths and files of one study."""

    path: Path

    @property
    def space(self) -> Path:
        """The copy of the search-space file."""
        return self.path / "space.yaml"

    @property
    def provenance(self) -> Path:
        """Machine and versions."""
        return self.path / "provenance.json"

    @property
    def events(self) -> Path:
        """What happened."""
        return self.path / "events.jsonl"

    @property
    def trials(self) -> Path:
        """The truth."""
        return self.path / "trials.jsonl"

    @property
    def reference(self) -> Path:
        """The baseline's own texts."""
        return self.path / "reference.json"

    @property
    def batch(self) -> Path:
        """Launches under way together."""
        return self.path / "batch.json"

    @property
    def search(self) -> Path:
        """What the search says of itself."""
        return self.path / "search.json"

    @property
    def policy(self) -> Path:
        """The fitted policy, derived."""
        return self.path / "policy.json"

    @property
    def front(self) -> Path:
        """The front, derived."""
        return self.path / "front.json"

    @property
    def launch(self) -> Path:
        """What to serve, derived."""
        return self.path / "launch.yaml"

    @property
    def report(self) -> Path:
        """The report, derived."""
        return self.path / "report.html"

    @property
    def logs(self) -> Path:
        """What servers printed."""
        return self.path / "logs"

    def create(self, space_text: str, provenance: dict[str, Any]) -> None:
        """Write what must exist before the first launch.

        Raises:
            StudyError: the folder cannot be written.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            write_atomic(self.space, space_text)
            write_atomic(self.provenance, json.dumps(provenance, indent=1, ensure_ascii=False) + "\n")
            for path in (self.events, self.trials):
                path.touch()
            _sync_folder(self.path)
        except OSError as error:
            raise StudyError(f"{self.path}: cannot be written: {error.strerror or error}") from error

    def is_complete(self) -> bool:
        """Whether `create` got through, so that the study can be resumed."""
        return all(path.is_file() for path in (self.space, self.provenance, self.events, self.trials))

    def read_provenance(self) -> dict[str, Any]:
        """Return what was recorded when the study began.

        Raises:
            StudyError: unreadable.
        """
        try:
            document = json.loads(self.provenance.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise StudyError(f"{self.provenance}: cannot be read: {error}") from error
        if not isinstance(document, dict):
            raise StudyError(f"{self.provenance}: expected an object")
        return document

    def read_trials(self) -> list[TrialRecord]:
        """Return every record, by number: trials that ran side by side end in any order. Of two with one number the
        later counts: its text was judged again. A last line that a death left torn does not count.

        Raises:
            StudyError: no such file, or a broken line that is not the last.
        """
        try:
            data = self.trials.read_bytes()
        except OSError as error:
            raise StudyError(f"{self.trials}: cannot be read: {error.strerror or error}") from error
        records = []
        *lines, _torn = data.split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                records.append(TrialRecord.model_validate_json(line))
            except ValidationError as error:
                detail = error.errors(include_url=False)[0]
                where = ".".join(str(part) for part in detail["loc"])
                message = f"{self.trials}:{number}: not a trial record: {where + ': ' if where else ''}{detail['msg']}"
                remedy = "read it with the version that wrote it" if where == "schema" else "repair or remove that line"
                raise StudyError(f"{message}; {remedy}") from error
        latest = {record.trial: record for record in records}
        return [latest[trial] for trial in sorted(latest)]

    def read_reference(self) -> Reference | None:
        """Return the texts by which candidates are judged, None when the baseline left none.

        Raises:
            StudyError: the file cannot be read or is no reference.
        """
        if not self.reference.is_file():
            return None
        try:
            return Reference.model_validate_json(self.reference.read_bytes())
        except (OSError, ValidationError) as error:
            detail = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else error
            raise StudyError(f"{self.reference}: not a reference: {detail}; restore it, or start anew") from error

    def write_reference(self, reference: Reference) -> None:
        """Keep the texts by which candidates are judged.

        Raises:
            StudyError: the file cannot be written.
        """
        try:
            write_atomic(self.reference, reference.model_dump_json() + "\n")
        except OSError as error:
            message = f"{self.reference}: cannot be written: {error.strerror or error}; free some disk and resume"
            raise StudyError(message) from error

    def read_batch(self) -> tuple[Planned, ...]:
        """Return the launches that were decided together and may not all be recorded.

        Raises:
            StudyError: the file cannot be read.
        """
        if not self.batch.is_file():
            return ()
        try:
            return BATCH.validate_json(self.batch.read_bytes())
        except (OSError, ValidationError) as error:
            detail = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else error
            raise StudyError(f"{self.batch}: not a batch: {detail}; remove it to go on without") from error

    def write_batch(self, planned: tuple[Planned, ...]) -> None:
        """Keep the launches that begin now; none removes the file.

        Raises:
            StudyError: the file cannot be written.
        """
        try:
            if planned:
                write_atomic(self.batch, BATCH.dump_json(planned).decode() + "\n")
            else:
                self.batch.unlink(missing_ok=True)
        except OSError as error:
            message = f"{self.batch}: cannot be written: {error.strerror or error}; free some disk and resume"
            raise StudyError(message) from error

    def read_search(self) -> dict[str, Any]:
        """Return what the search said of itself when it ended, nothing before."""
        try:
            document = json.loads(self.search.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the study: one controller at a time, freed by the kernel when it dies.

        Raises:
            StudyError: another process holds it.
        """
        try:
            fd = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StudyError(f"{self.path}: cannot be locked: {error.strerror or error}") from error
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                named = f"process {holder}" if holder.isdigit() else "another process"
                message = f"{self.path}: {named} is running this study; wait for it, or end it with Ctrl-C"
                raise StudyError(message) from None
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(fd)


class Journal:
    """Appends records and events; use as a context, with the study's lock held."""

    def __init__(self, folder: StudyFolder) -> None:
        self._folder = folder
        self._open: list[int] = []
        self._trials = -1
        self._events = -1

    def __enter__(self) -> Journal:
        try:
            self._trials = self._append_only(self._folder.trials)
            self._events = self._append_only(self._folder.events)
        except OSError as error:
            self.__exit__()
            raise StudyError(f"{self._folder.path}: cannot be written: {error.strerror or error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open:
            os.close(fd)
        self._open = []

    def _append_only(self, path: Path) -> int:
        """Open for appending, after cutting off what a death left torn."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._open.append(fd)
        size = os.fstat(fd).st_size
        end = size
        while end > 0:
            start = max(0, end - 65536)
            newline = os.pread(fd, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(fd, end)
            os.fsync(fd)
        return fd

    def record(self, record: TrialRecord) -> None:
        """Append to trials.jsonl; on disk when this returns.

        Raises:
            StudyError: the disk is full, or the folder is gone.
        """
        self._write(self._trials, record.model_dump_json().encode() + b"\n", sync=True)

    def event(self, event: Event) -> None:
        """Append to events.jsonl, without the record that it may carry."""
        line = event.model_copy(update={"record": None}).model_dump_json(exclude_none=True)
        self._write(self._events, line.encode() + b"\n", sync=False)

    def _write(self, fd: int, line: bytes, *, sync: bool) -> None:
        if len(line) > MAX_LINE:
            raise StudyError(f"{self._folder.path}: a record of {len(line)} bytes is too large to keep")
        try:
            before = os.fstat(fd).st_size
            rest = line
            try:
                while rest:
                    rest = rest[os.write(fd, rest) :]
                if sync:
                    os.fsync(fd)
            except OSError:
                os.ftruncate(fd, before)  # no half line before the next one
                raise
        except OSError as error:
            message = f"{self._folder.path}: cannot be written: {error.strerror or error}; free some disk and resume"
            raise StudyError(message) from error


def write_atomic(path: Path, text: str) -> None:
    """Replace a file whole: a reader sees the old one or the new one, also after a power cut.

    Raises:
        OSError: it cannot be written, or is no plain file: a device such as /dev/stdout must not be replaced.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is no plain file", str(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_events(folder: StudyFolder, offset: int = 0) -> tuple[list[Event], int]:
    """Return the events after a byte offset, and the offset to go on from; a torn last line waits.

    Raises:
        StudyError: the file cannot be read.
    """
    try:
        with folder.events.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except OSError as error:
        raise StudyError(f"{folder.events}: cannot be read: {error.strerror or error}") from error
    end = data.rfind(b"\n") + 1
    return [Event.model_validate_json(line) for line in data[:end].split(b"\n") if line.strip()], offset + end


def keep_aside(folder: StudyFolder) -> Path:
    """Rename a study's folder to the first free of name.1, name.2 …; return where it is now.

    Raises:
        StudyError: it is no study's folder, or cannot be renamed.
    """
    if not folder.space.is_file():
        raise StudyError(f"{folder.path}: holds no study, so it is not moved")
    number = 1
    while (aside := folder.path.with_name(f"{folder.path.name}.{number}")).exists():
        number += 1
    try:
        folder.path.rename(aside)
    except OSError as error:
        raise StudyError(f"{folder.path}: cannot be moved to {aside}: {error.strerror or error}") from error
    return aside
