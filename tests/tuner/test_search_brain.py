"""What a study does beside asking and telling: confirm, judge a policy, stop, and bear what is nobody's fault."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from engine.config import EngineConfig, load_launch
from engine.estimate import gpu
from tests.tuner.make import config, level, record
from tests.tuner.spaces import SMOKE, SPACE, write
from tests.tuner.test_study import Notes, begin, misbehave, run
from tests.waiting import alive, wait_until
from tuner import session
from tuner.brain import Brain
from tuner.budget import confirmations, launched
from tuner.confirm import Standing, next_to_confirm
from tuner.errors import StudyError
from tuner.policy_fit import verdict_of
from tuner.records import TrialRecord, canonical, config_dict
from tuner.sampling.process import RemoteBrain
from tuner.space import parse_space
from tuner.study import outcome_of

LIMIT = 120.0
TINY = str(Path(__file__).parent / "tiny_tuner.py")
SPACE_ = parse_space(SPACE.encode())


# ---------------------------------------------------------------------------------------------- confirmation


def order(now: Standing, most: int, doubtful: int | None = None) -> list[int]:
    """Return the trials that would be measured again, one after another."""
    made: list[int] = []
    while (
        trial := next_to_confirm(
            Standing(now.recommended, now.front, now.baseline, tuple(made)), most, lambda: doubtful
        )
    ) is not None:
        made.append(trial)
    return made


def test_the_recommended_one_goes_first_and_the_baseline_comes_again_and_again() -> None:
    standing = Standing(recommended=4, front=(7, 4, 0, 9), baseline=0)
    assert order(standing, 3) == [4, 0, 7]
    assert order(standing, 9, doubtful=7) == [4, 0, 7, 9, 7, 0, 7, 7, 7]
    assert order(standing, 9) == [4, 0, 7, 9]  # nobody is in doubt


def test_a_baseline_that_nothing_beats_is_measured_beside_what_comes_next() -> None:
    assert order(Standing(recommended=0, front=(0, 3), baseline=0), 3) == [0, 3]
    assert order(Standing(recommended=0, front=(0,), baseline=0), 3) == []
    assert [confirmations(launches) for launches in (1, 16, 60, 200)] == [3, 3, 9, 30]


# --------------------------------------------------------------------------------------------------- policy


def with_policy(alone: float, loaded: float) -> list[TrialRecord]:
    """A study whose table of drafts was launched, next to no speculation at 100 and 500 tokens/s."""
    table = {"kind": "policy", "by_running": [[1, 4, {"kind": "dflash", "block_size": 8}], [5, None, {"kind": "none"}]]}
    base = [level(1, 10.0, 100.0, spread=0.01), level(8, 16.0, 500.0, spread=0.01)]
    spec = [level(1, 5.0, 200.0, spread=0.01), level(8, 20.0, 400.0, spread=0.01)]
    launch = [level(1, 1000 / alone, alone, spread=0.01), level(8, 8000 / loaded, loaded, spread=0.01)]
    return [
        record(0, base),
        record(1, spec),
        record(2, base, role="confirm", of=0, config=config()),
        record(3, launch, role="policy", config=config(table)),
    ]


def test_a_table_that_is_never_slower_than_none_is_accepted_and_may_be_recommended() -> None:
    records = with_policy(199.0, 520.0)
    verdict = verdict_of(records)
    assert verdict is not None
    assert verdict.accepted
    assert verdict.why == "it is not slower than no speculation at 1, 8 requests in flight"
    outcome = outcome_of(records, SPACE_)
    assert outcome.recommendation is not None
    assert outcome.recommendation.point.trial == 3


def test_a_table_that_is_slower_at_one_load_is_neither_recommended_nor_on_the_front() -> None:
    records = with_policy(250.0, 480.0)
    verdict = verdict_of(records)
    assert verdict is not None
    assert (verdict.accepted, verdict.slower) == (False, (8,))
    outcome = outcome_of(records, SPACE_)
    assert 3 not in {point.trial for point in (*outcome.points, *outcome.front)}
    assert verdict_of(records[:3]) is None


def test_a_study_fits_its_table_launches_it_and_writes_down_what_came_of_it(tmp_path: Path) -> None:
    opened = begin(tmp_path, trials=9)
    outcome = run(opened)
    (launch,) = [r for r in outcome.records if r.role == "policy"]
    rows = launch.config["draft"]["by_running"]
    assert rows[0][2]["kind"] == "dflash"  # alone this worker's speculation pays, at 8 it does not
    assert rows[-1][2]["kind"] == "none"
    said = json.loads(opened.folder.policy.read_text())
    assert said["by_running"] == rows
    assert said["trial"] == launch.trial
    assert said["accepted"] is True  # to the tiny worker a policy is no speculation, and so not slower
    assert launched(outcome.records) == 9
    assert load_launch(opened.folder.launch).study is not None


# ------------------------------------------------------------------------------------------------- the machine


def test_what_the_machine_is_to_blame_for_teaches_nothing_and_costs_no_trial(tmp_path: Path) -> None:
    opened = begin(tmp_path, trials=4)
    misbehave(opened, {2: "port"})
    outcome = run(opened)
    blamed = outcome.records[2]
    assert blamed.failure is not None
    assert blamed.blameless
    assert launched(outcome.records) == 4
    brain = Brain(opened.space, lambda _: ())
    brain.tell(blamed)
    assert brain.view(3).observations == ()
    again = [r for r in outcome.records if canonical(r.config) == canonical(blamed.config) and r.trial != 2]
    assert all(r.state == "measured" for r in again)


def test_a_machine_that_lets_nothing_begin_stops_the_study_and_says_why(tmp_path: Path) -> None:
    opened = begin(tmp_path)
    misbehave(opened, dict.fromkeys(range(2, 20), "foreign_gpu_process"))
    with pytest.raises(StudyError, match="no configuration is to blame: foreign_gpu_process at ready"):
        run(opened)
    assert len(opened.folder.read_trials()) == 5
    misbehave(opened, {})
    reopened = session.reopen(opened.folder.path, ["tuner"], trials=6, accept_change=False)
    assert launched(run(reopened).records) == 6


def test_a_full_disk_stops_the_study_at_once(tmp_path: Path) -> None:
    opened = begin(tmp_path)
    misbehave(opened, {0: "disk_full"})
    with pytest.raises(StudyError, match="disk_full"):
        run(opened)
    misbehave(opened, {})
    outcome = run(session.reopen(opened.folder.path, ["tuner"], trials=2, accept_change=False))
    assert [r.role for r in outcome.records][:2] == ["baseline", "baseline"]


def test_a_search_from_which_nothing_more_is_expected_ends_and_says_so(tmp_path: Path) -> None:
    notes = Notes()
    outcome = run(begin(tmp_path, SMOKE + "strategy: {least_gain: 0.9}\n"), notes)
    assert any("was expected to add less than 90.0% hypervolume" in text for text in notes.said)
    assert launched(outcome.records) < 13
    known = [r.gain for r in outcome.records if r.role == "search" and r.gain is not None]
    assert len(known) >= 4


# ---------------------------------------------------------------------------------------------- the sampler


def test_a_roofline_prior_leads_where_the_machine_is_known_until_trials_contradict_it() -> None:
    rng = random.Random(0)
    points = [made for point in SPACE_.points() if isinstance(made := SPACE_.assemble(point), EngineConfig)]
    with RemoteBrain(SPACE_, lambda _: (), 4, machine=gpu("H200")) as there:
        assert there.prior == "none"
        there.ask(0)
        assert there.prior == "believed"
        for number, made in enumerate(points[:12]):
            speeds = [10 ** rng.uniform(0, 3) for _ in range(2)]  # of which no roofline knows anything
            levels = [level(1, 1000 / speeds[0], speeds[0]), level(8, 8000 / speeds[1], speeds[1])]
            there.tell(record(number, levels, config=config_dict(made), role="search"))
        there.ask(12)
        assert there.prior == "dropped"
    with RemoteBrain(SPACE_, lambda _: (), 4, machine=replace(gpu("H200"), bandwidth=None)) as there:
        there.ask(0)
        assert there.prior == "none"


def sampler_of(controller: subprocess.Popen[bytes]) -> int | None:
    """Return the sampler's process below a controller."""
    try:
        below = psutil.Process(controller.pid).children(recursive=True)
        return next((p.pid for p in below if "tuner.sampling.process" in p.cmdline()), None)
    except psutil.Error:
        return None


def hanging(folder: Path) -> subprocess.Popen[bytes]:
    """Start a search whose second trial hangs."""
    path = write(folder)
    study = folder / "results" / "small"
    root = str(Path(__file__).parents[2])
    controller = subprocess.Popen(
        [sys.executable, TINY, "search", str(path)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    wait_until(study.is_dir, deadline=LIMIT)
    (study / "misbehave.json").write_text(json.dumps({"2": "hang"}))
    wait_until((study / "hanging").exists, deadline=LIMIT)
    return controller


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_sampler_is_gone_with_the_search(tmp_path: Path, number: signal.Signals) -> None:
    with hanging(tmp_path) as controller:
        sampler = sampler_of(controller)
        assert sampler is not None
        assert psutil.Process(controller.pid).memory_info().rss < 200 * 2**20
        assert psutil.Process(sampler).memory_info().rss < 600 * 2**20
        controller.send_signal(number)
        controller.wait(LIMIT)
        wait_until(lambda: not alive(sampler), deadline=LIMIT)


def test_a_sampler_that_dies_ends_the_search_with_a_word_and_the_study_goes_on_later(tmp_path: Path) -> None:
    opened = begin(tmp_path, trials=5)

    class Killing(Notes):
        def trial_ends(self, record: TrialRecord, progress: object) -> None:
            if record.trial == 2:
                alive = [c for c in psutil.Process().children() if c.status() != psutil.STATUS_ZOMBIE]
                (child,) = [c for c in alive if "tuner.sampling.process" in c.cmdline()]
                child.kill()
                child.wait(LIMIT)

    with pytest.raises(StudyError, match=r"the sampler's process ended.*resume the study"):
        run(opened, Killing())
    assert len(opened.folder.read_trials()) == 3
    reopened = session.reopen(opened.folder.path, ["tuner"], trials=None, accept_change=False)
    assert launched(run(reopened).records) == 5
