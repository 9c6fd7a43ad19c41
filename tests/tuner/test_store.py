"""The study's folder survives deaths at any byte, and has one writer."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tuner.make import level, record
from tests.tuner.spaces import SPACE
from tuner.errors import StudyError
from tuner.records import Event
from tuner.store import Journal, StudyFolder, keep_aside, read_events, write_atomic


@pytest.fixture
def folder(tmp_path: Path) -> StudyFolder:
    made = StudyFolder(tmp_path / "results" / "small")
    made.create(SPACE, {"schema": 1})
    return made


RECORDS = [record(0, [level(1, 8.0, 120)]), record(1), record(2, [level(1, 4.0, 240)])]


def test_what_must_exist_before_the_first_launch_exists(folder: StudyFolder) -> None:
    assert folder.is_complete()
    assert folder.space.read_text() == SPACE
    assert folder.read_provenance() == {"schema": 1}
    assert folder.read_trials() == []
    assert read_events(folder) == ([], 0)


def test_records_come_back_as_they_were(folder: StudyFolder) -> None:
    with Journal(folder) as journal:
        for one in RECORDS:
            journal.record(one)
    assert folder.read_trials() == RECORDS


def test_a_file_cut_at_any_byte_loses_at_most_the_last_record(folder: StudyFolder) -> None:
    with Journal(folder) as journal:
        for one in RECORDS:
            journal.record(one)
    whole = folder.trials.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        folder.trials.write_bytes(whole[:cut])
        complete = sum(end <= cut for end in ends)
        assert folder.read_trials() == RECORDS[:complete]
        if cut % 97 == 0:  # and what is appended then is read again
            with Journal(folder) as journal:
                journal.record(RECORDS[2])
            assert folder.read_trials() == [*RECORDS[:complete], RECORDS[2]]


def test_a_tail_of_zeros_is_cut_off(folder: StudyFolder) -> None:
    with Journal(folder) as journal:
        journal.record(RECORDS[0])
    with folder.trials.open("ab") as file:
        file.write(b"\0" * 200_000)
    assert folder.read_trials() == RECORDS[:1]
    with Journal(folder) as journal:
        journal.record(RECORDS[1])
    assert folder.read_trials() == RECORDS[:2]


def test_a_broken_line_in_the_middle_is_reported_not_skipped(folder: StudyFolder) -> None:
    lines = [one.model_dump_json() for one in RECORDS]
    folder.trials.write_text("\n".join([lines[0], '{"schema": 1, "trial": "x"}', lines[2]]) + "\n")
    with pytest.raises(StudyError, match=r"trials\.jsonl:2: not a trial record: .*repair or remove"):
        folder.read_trials()


def test_a_record_of_a_later_schema_is_not_to_be_removed(folder: StudyFolder) -> None:
    folder.trials.write_text(RECORDS[0].model_dump_json(by_alias=True).replace('"schema":1', '"schema":2') + "\n")
    with pytest.raises(StudyError, match=r"trials\.jsonl:1: .*schema.*read it with the version that wrote it"):
        folder.read_trials()


def test_unknown_fields_of_a_later_version_are_read_over(folder: StudyFolder) -> None:
    line = RECORDS[0].model_dump_json()[:-1] + ', "later": {"a": 1}}'
    folder.trials.write_text(line + "\n")
    assert folder.read_trials() == RECORDS[:1]
    folder.trials.write_text(line.replace('"schema":1', '"schema":9') + "\n")
    with pytest.raises(StudyError, match="schema"):
        folder.read_trials()


def test_events_are_read_on_from_an_offset_and_without_the_record(folder: StudyFolder) -> None:
    with Journal(folder) as journal:
        journal.event(Event(trial=0, stage="lease", time=1.0, text="a"))
        events, offset = read_events(folder)
        assert [event.text for event in events] == ["a"]
        journal.event(Event(kind="record", trial=0, stage="stop", time=2.0, record=RECORDS[0]))
    with folder.events.open("ab") as file:
        file.write(b'{"trial": 1, "st')
    events, again = read_events(folder, offset)
    assert [(event.kind, event.record) for event in events] == [("record", None)]
    assert read_events(folder, again) == ([], again)


HOLDER = """
import sys, time
from pathlib import Path
from tuner.store import StudyFolder
with StudyFolder(Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_controllers_never_share_a_study(folder: StudyFolder) -> None:
    command = [sys.executable, "-c", HOLDER, str(folder.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(StudyError, match=f"process {other.pid} is running this study"), folder.lock():
            pass
        other.kill()  # the kernel frees the lock: nothing to clean up
        other.wait(30)
    deadline = time.monotonic() + 30
    while True:
        try:
            with folder.lock(), pytest.raises(StudyError, match="is running this study"), folder.lock():
                pass
        except StudyError:
            assert time.monotonic() < deadline
        else:
            break


def test_an_atomic_write_leaves_no_half_file(tmp_path: Path) -> None:
    path = tmp_path / "front.json"
    write_atomic(path, "one")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "two \ud800")
    assert path.read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["front.json"]


def test_a_study_is_kept_aside_under_the_first_free_number(folder: StudyFolder) -> None:
    first = keep_aside(folder)
    folder.create(SPACE, {})
    second = keep_aside(folder)
    assert [first.name, second.name] == ["small.1", "small.2"]
    folder.path.mkdir()
    with pytest.raises(StudyError, match="holds no study"):
        keep_aside(folder)


def test_what_cannot_be_read_or_written_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(StudyError, match="cannot be written"):
        StudyFolder(file / "study").create("", {})
    absent = StudyFolder(tmp_path / "absent")
    for read in (absent.read_trials, absent.read_provenance, lambda: read_events(absent)):
        with pytest.raises(StudyError, match="cannot be read"):
            read()
    with pytest.raises(StudyError, match="cannot be locked"), absent.lock():
        pass
