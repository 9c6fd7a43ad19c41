"""What the dashboard reads: files that grow, are cut, replaced or hostile; states; hypervolume; importance."""

from __future__ import annotations

import itertools
import json
import os
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tuner.dashboard.synthetic import append, make_study, records, trial, write_results
from tuner.dashboard.hypervolume import costs_in_order, progress
from tuner.dashboard.payload import Payload
from tuner.dashboard.policy import policy_of
from tuner.dashboard.state import running
from tuner.dashboard.study import StudyReader
from tuner.dashboard.tail import Tail, read_piece
from tuner.dashboard.timeline import Timeline, busy_seconds, lanes
from tuner.importance import importance
from tuner.records import Event
from tuner.store import Journal, StudyFolder
from tuner.study import outcome_of
from tuner.tables import paths_of


@given(st.lists(st.binary(max_size=30).filter(lambda b: b"\n" not in b), max_size=12), st.data())
@settings(max_examples=40)
def test_a_tail_yields_every_whole_line_once(lines: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        tail, found = Tail(path, longest=25), []
        for start, end in itertools.pairwise([0, *cuts, len(whole)]):
            with path.open("ab") as file:
                file.write(whole[start:end])
            found += tail.read().lines
    assert found == [line for line in lines if line.strip() and len(line) <= 25]
    assert tail.too_long == sum(len(line) > 25 for line in lines)


def test_a_file_that_is_replaced_or_cut_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "file"
    tail = Tail(path)
    assert tail.read().lines == ()
    path.write_bytes(b"one\ntwo\n")
    assert tail.read().lines == (b"one", b"two")
    path.write_bytes(b"new\n")
    assert (tail.read().lines, tail.read().lines) == ((b"new",), ())
    (tmp_path / "other").write_bytes(b"other\nfile\nlonger\n")
    (tmp_path / "other").replace(path)
    found = tail.read()
    assert found.restarted
    assert found.lines == (b"other", b"file", b"longer")


def test_links_and_pipes_in_a_strangers_study_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret\n")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match=r"plain file|symbolic links"):
            Tail(tmp_path / name).read()
        with pytest.raises(OSError, match=r"plain file|symbolic links"):
            read_piece(tmp_path / name, None, 10)


def test_a_piece_of_a_log_is_its_end_or_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"0123456789")
    assert read_piece(path, None, 4) == (b"6789", 6, 10)
    assert read_piece(path, 8, 4) == (b"89", 8, 10)
    assert read_piece(path, 99, 4) == (b"6789", 6, 10)  # it was cut: begin anew


def test_garbage_in_the_files_is_counted_and_left_out(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study", 6)
    for path in (folder.trials, folder.events):
        with path.open("ab") as file:
            file.write(b'\xff\xfe\x00 binary\n{"half": \n[]\n{"trial": "<script>"}\n')
    reader = StudyReader(folder)
    reader.refresh()
    assert len(reader.records) == 6
    assert reader.unreadable == 8


def test_a_running_trials_level_that_is_none_is_counted_and_left_out(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study", 6)
    event = {"schema": 1, "kind": "end", "trial": 99, "stage": "load", "level": 8, "time": 1.0}
    with folder.events.open("ab") as file:
        file.write(json.dumps(event | {"kind": "begin"}).encode() + b"\n")
        file.write(json.dumps(event | {"data": {"concurrency": "many"}}).encode() + b"\n")
    reader = StudyReader(folder)
    reader.refresh()
    assert reader.unreadable == 1
    assert not reader.timelines[99].levels
    Payload(reader, "study").whole()


def test_what_is_new_is_all_that_is_sent_and_equals_the_whole(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study", 20, finish=False)
    reader = StudyReader(folder)
    reader.refresh()
    payload = Payload(reader, "study")
    known = {each["trial"]: each for each in payload.whole()["trials"]}
    again = trial(random.Random(3), 20, 1.8e9)
    again = again.model_copy(update={"role": "confirm", "of": 3, "config": reader.records[3].config})
    with Journal(folder) as journal:
        append(journal, [again])
    document = payload.changes(reader.refresh())
    assert [each["trial"] for each in document["trials"]] == [3, 20]
    known |= {each["trial"]: each for each in document["trials"]}
    fresh = StudyReader(folder)
    fresh.refresh()
    whole = Payload(fresh, "study").whole()
    assert list(known.values()) == whole["trials"]
    assert document["derived"] == whole["derived"]
    records_ = list(fresh.records.values())
    assert whole["study"]["labels"] == paths_of(outcome_of(records_, fresh.space), fresh.space)


def test_without_a_policy_file_one_is_fitted_to_the_trials(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study", 0)
    alike = {"max_running": 64, "page_size": 32}
    made = [r for r in records(30) if r.state == "measured"]
    with Journal(folder) as journal:
        for r in made:  # a policy is one server: everything but the draft is the same
            append(journal, [r.model_copy(update={"config": r.config | {"memory": r.config["memory"] | alike}})])
    reader = StudyReader(folder)
    reader.refresh()
    found = Payload(reader, "study").whole()["study"]["policy"]
    assert found["source"].startswith("from the trials like #")
    assert found["by_running"][0][0] == 1
    assert found["by_running"][-1][1] is None
    assert set(found["expected"]) <= {"1", "4", "16", "48"}


def test_the_state_says_running_finished_stopped_or_died(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study", 0, finish=False)

    def state() -> str:
        reader = StudyReader(folder)
        reader.refresh()
        return str(Payload(reader, "study").whole()["live"]["state"])

    assert state() == "empty"
    with folder.lock():
        assert running(folder) == os.getpid()
        assert state() == "running"
    with Journal(folder) as journal:
        append(journal, records(8))
    assert state() == "died"  # records, and no front.json
    write_results(folder)
    assert state() == "finished"
    with Journal(folder) as journal:
        journal.event(Event(kind="begin", trial=8, stage="lease", time=1e9))
    assert state() == "stopped"  # front.json was written after that event
    os.utime(folder.front, (1, 1))
    assert state() == "died"


def test_reading_takes_no_lock(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study", 2)
    (folder.path / ".lock").write_text(f"{os.getpid()}\n")
    assert running(folder) is None  # the number alone proves nothing
    with folder.lock():
        pass


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans()), min_size=2, max_size=6))
@settings(max_examples=40, deadline=None)
def test_hypervolume_equals_counting_cells_over_every_order(rows: list[tuple[int, int, bool]]) -> None:
    points = np.array([(a, b) if counts else (np.nan, np.nan) for a, b, counts in rows], dtype=float)
    found = progress(points)
    known = [(a, b) for a, b, counts in rows if counts]
    worst = (max((a for a, _ in known), default=0), max((b for _, b in known), default=0))

    def volume(chosen: tuple[tuple[int, int, bool], ...]) -> int:
        cells = itertools.product(range(7), range(7))
        corners = [(a, b) for a, b, counts in chosen if counts]
        return sum(any(a <= x and b <= y for a, b in corners) for x, y in cells if x < worst[0] and y < worst[1])

    total = volume(tuple(rows))
    if len(known) < 2 or total == 0:
        assert found.ours == ()
        return
    for k in range(1, len(rows) + 1):
        assert found.ours[k - 1] == pytest.approx(volume(tuple(rows[:k])) / total)
        subsets = list(itertools.combinations(rows, k))
        assert found.random[k - 1] == pytest.approx(sum(map(volume, subsets)) / len(subsets) / total)


def test_one_objective_has_a_hypervolume_too() -> None:
    found = progress(costs_in_order([[5.0], None, [9.0], [7.0]], ["max"]))
    assert found.ours == pytest.approx((0, 0, 1, 1))
    assert found.random[-1] == pytest.approx(1)


def test_importance_is_high_where_a_parameter_decides_and_zero_where_it_does_not() -> None:
    rng = random.Random(1)
    values = [rng.choice("abc") for _ in range(300)]
    noise = [rng.gauss(1, 0.05) for _ in values]
    decided = importance(values, [{"a": 1.0, "b": 2.0, "c": 4.0}[v] * n for v, n in zip(values, noise, strict=True)])
    idle = importance(values, noise)
    assert decided.share is not None
    assert decided.share > 0.95
    assert idle.share is not None
    assert idle.share < 0.03
    assert importance(["a", "a"], [1.0, 2.0]).share is None


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=12))
def test_lanes_never_overlap_and_busy_time_counts_once(spans: list[tuple[int, int]]) -> None:
    timelines = [Timeline(i, b, b + d, b + d) for i, (b, d) in enumerate(spans)]
    placed = lanes(timelines)
    for a, b in itertools.combinations(timelines, 2):
        if placed[a.trial] == placed[b.trial]:
            assert (a.end or 0) <= b.begin or (b.end or 0) <= a.begin
    assert busy_seconds(timelines, None) == len({s for b, d in spans for s in range(b, b + d)})


@pytest.mark.parametrize("text", ["[]", "{}", '{"by_running": [[4, 1]]}', '{"by_running": 3}', "\x00"])
def test_a_policy_that_cannot_be_read_is_said_to_be_so(tmp_path: Path, text: str) -> None:
    folder = StudyFolder(tmp_path)
    (tmp_path / "policy.json").write_text(text)
    found = policy_of(folder)
    assert found is not None
    assert found.keys() == {"problem"}
    assert found["problem"].startswith("policy.json ")


def test_a_policy_comes_from_its_file_or_from_a_launch_file_with_several_entries(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    folder.launch.write_text(
        "schema: 1\nentries:\n"
        "- {from: 1, to: 4, config: {draft: {kind: dflash}}}\n- {from: 5, config: {draft: {kind: none}}}\n"
    )
    found = policy_of(folder)
    assert found is not None
    assert [(first, last, draft["kind"]) for first, last, draft in found["by_running"]] == [
        (1, 4, "dflash"),
        (5, None, "none"),
    ]
    (tmp_path / "policy.json").write_text(json.dumps({"by_running": [[1, None, {"kind": "ddtree"}]]}))
    found = policy_of(folder)
    assert found is not None
    assert (found["by_running"], found["source"]) == ([[1, None, {"kind": "ddtree"}]], "policy.json")
    assert found["accepted"] is None
