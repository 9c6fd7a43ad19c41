"""Every fault really changes what the engine does: where it says, as it says, and nothing once it is taken out."""

from __future__ import annotations

import functools
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.text import load_text
from tests.engine.serving import DEADLINE, started
from tests.faults.catalogue import FAULTS, GROUPS, table
from tests.faults.fault import Fault, Need, Setting, Shows
from tests.faults.workload import SMOKE, Seen, loop_for, run

ENGINE = [fault for fault in FAULTS.values() if not fault.front]
FRONT = [fault for fault in FAULTS.values() if fault.front]
# One setting a fault, spread over all of them; `proof` tries every one.
SOME = [(fault, fault.settings[number % len(fault.settings)]) for number, fault in enumerate(ENGINE)]
ALL = [(fault, setting) for fault in ENGINE for setting in Setting if (fault, setting) not in SOME]


def named(value: object) -> str:
    return value.name if isinstance(value, Fault) else str(value)


@functools.cache
def healthy(setting: Setting, sample: str) -> Seen:
    return run(loop_for(setting, sample))


def sample_of(fault: Fault) -> str:
    return "probabilistic" if Need.DRAWN_DRAFTS in fault.needs else "greedy"


def check(fault: Fault, setting: Setting) -> None:
    """Compare the workload's run with the fault and without."""
    sample = sample_of(fault)
    right = healthy(setting, sample)
    with fault.applied():
        wrong = run(loop_for(setting, sample))
    if setting not in fault.settings:
        assert wrong == right
        return
    match fault.shows:
        case Shows.TEXT:
            assert wrong.tokens != right.tokens
            assert wrong.greedy() == right.greedy() or Need.SAMPLED not in fault.needs
        case Shows.DISTRIBUTION:
            assert wrong.greedy() == right.greedy()
            assert wrong.tokens != right.tokens
        case Shows.ACCEPTANCE:
            assert wrong.tokens == right.tokens
            assert wrong.verify_counts != right.verify_counts
        case Shows.ANSWER:
            assert (wrong.scores, wrong.finishes) != (right.scores, right.finishes)


@pytest.mark.parametrize(("fault", "setting"), SOME, ids=named)
def test_fault_shows_as_it_says(fault: Fault, setting: Setting) -> None:
    check(fault, setting)


@pytest.mark.proof
@pytest.mark.parametrize(("fault", "setting"), ALL, ids=named)
def test_fault_shows_wherever_it_says_and_nowhere_else(fault: Fault, setting: Setting) -> None:
    check(fault, setting)


def test_a_fault_that_is_taken_out_leaves_nothing() -> None:
    before = healthy(Setting.POLICY, "greedy")
    for fault in ENGINE:
        with fault.applied():
            pass
    assert run(loop_for(Setting.POLICY)) == before


@pytest.mark.parametrize("fault", FRONT, ids=named)
def test_front_fault_changes_the_text_at_a_stop_string(fault: Fault) -> None:
    text = load_text(SMOKE / "target")
    tokens = text.encode("the answer is here and there")
    pieces = [text.decode([token]) for token in tokens]
    # begins and ends inside a token
    stop = next(one[1:] + two[:-1] for one, two in pairwise(pieces) if min(len(one), len(two)) > 1)

    def answer() -> tuple[str, str | None]:
        decoder, shown = text.decoder([stop]), ""
        for token in tokens:
            piece = decoder.feed((token,), None)
            shown += piece.text
            if piece.finish:
                return shown, piece.finish
        return shown, None

    right = answer()
    assert right[1] == "stop"
    with fault.applied():
        assert answer() != right
    assert answer() == right


def test_the_catalogue_is_whole() -> None:
    assert len(FAULTS) >= 30
    assert sum(map(len, GROUPS.values())) == len(FAULTS)
    assert all(fault.settings for fault in FAULTS.values())
    assert {setting for fault in FAULTS.values() for setting in fault.settings} == set(Setting)
    assert {fault.shows for fault in FAULTS.values()} == set(Shows)
    shown = table()
    assert all(fault.wrong in shown for fault in FAULTS.values())


def test_server_with_a_fault(tmp_path: Path) -> None:
    """The front, the engine process and the config are the real ones; only the answer is wrong."""
    config: dict[str, Any] = {
        "model": {"target": str(SMOKE / "target"), "dtype": "float32"},
        "draft": {"kind": "ddtree", "model": str(SMOKE / "draft"), "block_size": 8, "nodes": 15},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "tests.faults", "max_tokens_overshot", "serve", str(path), "--port", "0"]
    with started(command) as served:
        served.url = served.event("listening")["url"]
        served.event("ready", 5 * DEADLINE)
        with served.client() as client:
            body = {"model": config["model"]["target"], "prompt": [5, 6, 7] * 8, "ignore_eos": True}
            used = [
                client.post("/v1/completions", json={**body, "max_tokens": most}).json()["usage"]["completion_tokens"]
                for most in range(20, 30)
            ]
    assert all(got >= most for got, most in zip(used, range(20, 30), strict=True))
    assert used != list(range(20, 30))
