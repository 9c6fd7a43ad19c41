"""Two configurations compared: the paired interval, and the whole command on servers that are known to differ."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

import tuner.compare
from tests.fake_server.plan import FakeBackend, Plan
from tests.tuner.make import level
from tests.tuner.running import family, prompts
from tuner.compare import Asked, CompareFailed, compare, config_of, paired
from tuner.errors import UsageError
from tuner.records import Level, config_dict


def windows(values: list[float]) -> list[Level]:
    return [level(1, value, 1000 / value) for value in values]


def test_what_both_windows_of_a_pair_share_drops_out() -> None:
    """The machine drifts by a factor of three; B takes 0.8 of A's time in every pair."""
    drift = [5.0, 7.0, 15.0, 9.0]
    a, b = windows(drift), windows([0.8 * value for value in drift])
    found = paired("tpot_ms_p50", a, b, (a[0], b[0]))
    assert found.ratio == pytest.approx(0.8)
    assert found.interval == pytest.approx((0.8, 0.8))
    assert found.verdict == "B"
    assert paired("output_tok_s", a, b, (a[0], b[0])).verdict == "B"
    assert paired("tpot_ms_p50", b, a, (b[0], a[0])).verdict == "A"


def test_noise_alone_is_a_tie_nearly_always() -> None:
    rng = random.Random(5)
    ties = 0
    for _ in range(400):
        a, b = (windows([rng.lognormvariate(2, 0.1) for _ in range(6)]) for _ in range(2))
        ties += paired("tpot_ms_p50", a, b, (a[0], b[0])).verdict == "tie"
    assert 0.92 <= ties / 400 <= 0.98


def test_a_window_without_the_metric_leaves_no_ratio() -> None:
    a, b = windows([5.0, 6.0]), [level(1, 5.0, 100.0), level(1, None, 100.0)]
    found = paired("tpot_ms_p50", a, b, (a[0], b[0]))
    assert (found.ratio, found.interval, found.verdict) == (None, None, "tie")


def write(folder: Path, name: str, plan: Plan) -> str:
    place = folder / name
    place.mkdir()
    path = place / "config.yaml"
    named = dataclasses.replace(plan, serve_as=str(place / "plan.json"))  # what `model.target` will be
    path.write_text(yaml.safe_dump(config_dict(named.config(place))))
    return str(path)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner.compare.backends, "get", lambda _: FakeBackend())


def asked(folder: Path, a: Plan, b: Plan, **more: Any) -> Asked:
    workload: Mapping[str, Any] = {
        "prompts": str(prompts(folder)),
        "output_tokens": 16,
        "window": 0.1,
        "concurrency": [2],
    }
    return Asked(write(folder, "a", a), write(folder, "b", b), workload, pairs=3, ready=60.0, **more)


@pytest.mark.parametrize("relaunch", [False, True])
def test_the_slower_server_loses(tmp_path: Path, relaunch: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Sixteen tokens in chunks of two: B waits 20 ms between them where A waits 2."""
    out = tmp_path / "out.json"
    quick, slow = Plan(tokens_per_chunk=2), Plan(tokens_per_chunk=2, chunk_ms=20.0)
    compare(asked(tmp_path, quick, slow, relaunch=relaunch, json_path=out), Console(width=200))
    document = json.loads(out.read_text())
    assert [entry["concurrency"] for entry in document["levels"]] == [2]
    for entry in document["levels"]:
        found = {each["metric"]: each for each in entry["metrics"]}
        assert found["tpot_ms_p50"]["verdict"] == "A"
        assert found["tpot_ms_p50"]["ratio"] > 1
        assert found["output_tok_s"]["verdict"] == "A"
        low, high = found["tpot_ms_p50"]["interval"]
        assert 1 < low < found["tpot_ms_p50"]["ratio"] < high < math.inf
        assert entry["A"]["n"] >= 3 * 5
    assert "A is better" in capsys.readouterr().out
    assert family(str(tmp_path)) == []


def test_a_server_that_dies_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(CompareFailed, match=r"^B: crashed at launch: "):
        compare(asked(tmp_path, Plan(), Plan(die_at="loaded", die_code=70)), Console())
    assert family(str(tmp_path)) == []


def test_a_server_that_runs_another_config_is_not_compared(tmp_path: Path) -> None:
    with pytest.raises(CompareFailed, match=r"^A: config at ready: the server runs another config: draft\.kind"):
        compare(asked(tmp_path, Plan(resolved={"draft": {"kind": "dflash"}}), Plan()), Console())
    assert family(str(tmp_path)) == []


def test_too_few_pairs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--pairs"):
        compare(Asked("a", "b", {}, pairs=2), Console())


def test_a_file_that_is_no_configuration_is_one_line() -> None:
    command = [sys.executable, "-m", "tuner", "compare", "nowhere.yaml", "nowhere.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("tuner: nowhere.yaml: cannot be read")


def test_a_trial_of_a_study_can_be_named() -> None:
    folder = Path(__file__).resolve().parents[2] / "results" / "example"
    assert config_of(f"{folder}:0").draft.kind == "none"
    with pytest.raises(UsageError, match="no trial 9999"):
        config_of(f"{folder}:9999")
