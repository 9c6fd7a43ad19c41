"""Trials side by side on eight pretended GPUs: leases never overlap, and a death loses nothing that was recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.config import Backend, EngineConfig
from tests.tuner import packed
from tests.waiting import wait_until
from tuner.executors.packed import Board, PackedExecutor
from tuner.launches import SECONDS, Launcher
from tuner.leases import held_locks
from tuner.records import TrialRecord, canonical, config_dict
from tuner.space import Infeasible, parse_space
from tuner.store import StudyFolder

LIMIT = 240.0


def test_trials_share_the_gpus_out_and_measure_one_after_another(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    packed.begin(folder, trials=7, scale=0.2)
    with packed.pretended(tmp_path / "smi"):
        packed.search(folder, packed.Silent())
    study, held = StudyFolder(folder), packed.held_in(folder)
    records = study.read_trials()
    assert [record.trial for record in records] == list(range(len(records)))
    assert sum(record.role in ("baseline", "search") for record in records) == 7
    assert all(record.state == "measured" for record in records)
    assert {each.trial for each in held} == {record.trial for record in records}
    assert packed.clashes(held, exclusive=True) == []
    assert any(a.begin < b.end and b.begin < a.end for a in held for b in held if a.trial < b.trial)
    for each in held:
        record = records[each.trial]
        assert len(each.gpus) == record.gpus == record.config["parallel"]["tensor"]
    batches = json.loads(study.search.read_text())["packing"]
    assert all(batch["makespan"] >= batch["bound"] > 0 for batch in batches)
    assert not study.batch.exists()
    assert held_locks() == ()


def test_a_waiting_trial_takes_what_is_free_and_nobody_waits_for() -> None:
    board = Board("abcd", [("a", "b"), ("c",), ("d",), ("c",), ("a",), ("a", "b")])
    assert board.take(0) == ("a", "b")
    assert board.take(1) == ("c",)
    assert board.take(2) == ("d",)
    third = threading.Thread(target=lambda: taken.append(board.take(3)))
    taken: list[tuple[str, ...] | None] = []
    third.start()
    board.give_back(2)  # nobody is planned on d any more
    third.join(60)
    assert taken == [("d",)]
    board.give_back(0)
    assert board.take(4) == ("a",)
    wide = threading.Thread(target=lambda: taken.append(board.take(5)))
    wide.start()
    board.give_back(1)  # c alone is no block of two
    board.give_back(3)
    wide.join(60)
    assert taken[1:] == [("c", "d")]
    board.close()
    assert board.take(4) is None


def test_a_trial_without_gpus_of_its_own_runs_alone() -> None:
    board = Board("ab", [("a",), (), ("b",)])
    order: list[int] = []
    threads = [
        threading.Thread(target=lambda index=index: (board.take(index), order.append(index))) for index in (1, 2)
    ]
    assert board.take(0) == ("a",)
    for thread in threads:
        thread.start()
    board.give_back(0)
    threads[0].join(60)
    assert order == [1]
    board.give_back(1)
    threads[1].join(60)
    assert order == [1, 2]


@pytest.mark.proof
def test_neighbours_that_do_not_disturb_each_other_measure_at_the_same_time(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    packed.begin(folder, trials=2, scale=0.2, text=packed.SPACE.replace("windows: exclusive", "windows: calibrate"))
    with packed.pretended(tmp_path / "smi"):
        packed.search(folder, packed.Silent())
    study = StudyFolder(folder)
    records = study.read_trials()
    assert [record.role for record in records][:3] == ["baseline", "calibration", "calibration"]
    said = json.loads(study.search.read_text())["calibration"]
    assert (said["loss"], said["exclusive"]) == (0.0, False)  # what the workers compute depends on nobody
    one, other = (each for each in packed.held_in(folder) if records[each.trial].role == "calibration")
    assert one.begin < other.end
    assert other.begin < one.end
    assert packed.clashes(packed.held_in(folder), exclusive=False) == []


@pytest.mark.proof
def test_a_batch_that_a_death_cut_is_finished_and_nothing_is_measured_twice(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    packed.begin(folder, trials=7, scale=0.3)
    study = StudyFolder(folder)
    with packed.pretended(tmp_path / "smi"):
        command = [sys.executable, packed.__file__, str(folder)]
        with subprocess.Popen(command, env={**os.environ}, stdout=subprocess.DEVNULL) as controller:
            wait_until(lambda: len(study.read_trials()) >= 3 or controller.poll() is not None, deadline=LIMIT)
            controller.kill()
        before = study.read_trials()
        planned = study.read_batch()
        assert len(before) >= 3
        assert planned
        wait_until(lambda: held_locks() == (), deadline=LIMIT)
        packed.search(folder, packed.Silent())
    records = study.read_trials()
    assert [record.trial for record in records] == list(range(len(records)))
    assert [r for r in records if r.trial in {b.trial for b in before}] == before
    wanted = {each.trial: canonical(each.config.model_dump(mode="json")) for each in planned}
    assert {r.trial: canonical(r.config) for r in records if r.trial in wanted} == wanted
    searched = [canonical(r.config) for r in records if r.role in ("baseline", "search")]
    assert len(searched) == len(set(searched)) == 7
    assert packed.clashes(packed.held_in(folder), exclusive=True) == []


@pytest.mark.parametrize(("lengthens", "batches"), [(True, 0), (False, 1)])
def test_a_launch_that_would_end_too_late_is_left_for_a_later_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengthens: bool, batches: int
) -> None:
    """One that does not lengthen its batch is never too late."""

    def seconds(self: Launcher, configs: Sequence[EngineConfig], *_: object) -> float:
        return 1000.0 * (len(configs) if lengthens else 1)

    monkeypatch.setattr(Launcher, "seconds", seconds)
    packed.begin(tmp_path / "study", trials=4, scale=0.05, wall="20m")
    with packed.pretended(tmp_path / "smi"):
        packed.search(tmp_path / "study", packed.Silent())
    study = StudyFolder(tmp_path / "study")
    searched = [record for record in study.read_trials() if record.role == "search"]
    assert len(json.loads(study.search.read_text()).get("packing", [])) == batches  # one at a time is no batch
    assert sorted(record.trial for record in searched) == [1, 2, 3]  # what was too late is launched next
    assert len({canonical(record.config) for record in searched}) == 3


def test_a_launch_takes_what_the_last_one_of_its_backend_and_size_took(tmp_path: Path) -> None:
    space = parse_space(packed.SPACE.encode())
    found = space.baseline(packed.nothing)
    assert not isinstance(found, Infeasible)
    native = found[0]
    sglang = native.model_copy(update={"backend": Backend(kind="sglang", version="0.5.17")})
    launcher = Launcher(StudyFolder(tmp_path), space, PackedExecutor(packed.GPUS, packed.WORKER), gpu=True)
    assert launcher.seconds([native], []) == sum(SECONDS)
    took = [(native, 10.0), (sglang, 90.0), (native, 20.0)]
    records = [
        TrialRecord(
            trial=trial,
            role="search",
            state="measured",
            config=config_dict(config),
            gpus=1,
            seconds={"lease": 7.0, "ready": ready, "load": 5.0},
        )
        for trial, (config, ready) in enumerate(took)
    ]
    assert launcher.seconds([native], records) == 25.0
    assert launcher.seconds([sglang], records) == 95.0
    assert launcher.seconds([native, sglang], records) == 95.0  # side by side
    whole = records[0].model_copy(update={"role": "confirm", "seconds": {"ready": 30.0, "load": 40.0}})
    assert launcher.seconds([native], [whole, *records]) == 25.0  # its window is a search's, which races
    assert launcher.seconds([native], [whole, *records], "confirm") == 70.0
    assert launcher.seconds([sglang], records[:1]) == 15.0  # of another backend, where its own never ran
