"""Suggestions: new points only, taught by failures, the same again after a restart."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import EngineConfig
from tests.tuner.make import measure
from tests.tuner.spaces import SPACE
from tuner.brain import Brain
from tuner.records import Failure, TrialRecord, canonical, config_dict
from tuner.space import Infeasible, Space, load_space, parse_space
from tuner.suggest import parameters, suggest

WIDE = SPACE.replace("choices: [4, 8]", "choices: [2, 4, 6, 8, 10, 12, 14, 16]").replace(
    "  graphs: {choices: [{kind: eager}, {kind: captured, batch_sizes: [1, 4]}]}\n", ""
)


def nothing(config: EngineConfig) -> tuple[str, ...]:
    return ()


def play(space: Space, brain: Brain, count: int, crash: set[int] | None = None) -> list[TrialRecord]:
    """Let a brain suggest, and answer it as the tiny worker would; blocks in `crash` fail."""
    records: list[TrialRecord] = []
    found = space.baseline(nothing)
    assert not isinstance(found, Infeasible)
    config: EngineConfig | None = found[0]
    while config is not None and len(records) < count:
        block = getattr(config.draft, "block_size", None)
        failed = block is not None and block in (crash or set())
        record = TrialRecord(
            trial=len(records),
            role="search" if records else "baseline",
            state="failed" if failed else "measured",
            config=config_dict(config),
            levels=() if failed else tuple(measure(config, level) for level in space.levels),
            failure=Failure(kind="oom_load", stage="load") if failed else None,
        )
        records.append(record)
        brain.tell(record)
        suggestion = brain.ask(len(records))
        config = suggestion.judged if suggestion and isinstance(suggestion.judged, EngineConfig) else None
    return records


def test_no_point_is_suggested_twice_and_a_small_space_is_exhausted() -> None:
    space = parse_space(WIDE.encode())
    records = play(space, Brain(space, nothing), 100)
    assert len(records) == 33
    assert len({canonical(record.config) for record in records}) == 33


@pytest.mark.parametrize("cut", [1, 5, 13])
def test_a_restarted_study_goes_on_with_the_same_points(cut: int) -> None:
    space = parse_space(WIDE.encode())
    whole = play(space, Brain(space, nothing), 16, crash={16})
    again = Brain(space, nothing)
    for record in whole[:cut]:
        again.tell(record)
    suggestion = again.ask(cut)
    assert suggestion is not None
    assert isinstance(suggestion.judged, EngineConfig)
    assert config_dict(suggestion.judged) == whole[cut].config


def test_another_seed_leads_elsewhere() -> None:
    one = parse_space(WIDE.encode())
    two = parse_space(WIDE.replace("seed: 0", "seed: 1").encode())
    runs = [[r.config for r in play(s, Brain(s, nothing), 8)] for s in (one, two)]
    assert runs[0] != runs[1]


def test_a_crash_is_told_as_a_violated_constraint_with_the_worst_values_seen() -> None:
    space = parse_space(WIDE.encode())
    brain = Brain(space, nothing)
    records = play(space, brain, 24, crash={12, 14, 16})
    told = [trial for trial in brain.study.trials if trial.state.name == "COMPLETE"]
    assert len(told) == len(records)
    worst = None
    for trial, record in zip(told, records, strict=True):
        assert all(value == value and abs(value) < 1e9 for value in trial.values)
        assert trial.constraints["launch"] == (0.0 if record.state == "measured" else 1.0)
        if record.state == "measured":
            values = tuple(trial.values)
            worst = values if worst is None else (max(worst[0], values[0]), min(worst[1], values[1]))
        else:
            assert tuple(trial.values) == worst
    assert any(record.state == "failed" for record in records)


def test_failures_before_anything_was_measured_wait_for_a_worst_value() -> None:
    space = parse_space(WIDE.encode())
    brain = Brain(space, nothing)
    points = list(space.points())
    configs = [space.assemble(point) for point in points]
    assert all(isinstance(config, EngineConfig) for config in configs)
    for number, config in enumerate(configs[:3]):
        assert isinstance(config, EngineConfig)
        failure = Failure(kind="crashed", stage="launch")
        role = "search" if number else "baseline"
        brain.tell(TrialRecord(trial=number, role=role, state="failed", config=config_dict(config), failure=failure))
    assert [t for t in brain.study.trials if t.state.name == "COMPLETE"] == []
    config = configs[3]
    assert isinstance(config, EngineConfig)
    levels = tuple(measure(config, level) for level in space.levels)
    brain.tell(TrialRecord(trial=3, role="search", state="measured", config=config_dict(config), levels=levels))
    told = [trial for trial in brain.study.trials if trial.state.name == "COMPLETE"]
    assert len(told) == 4
    assert len({tuple(trial.values) for trial in told}) == 1


def test_points_that_cannot_run_are_suggested_with_their_reason_and_teach() -> None:
    space = parse_space(WIDE.encode())

    def refuse(config: EngineConfig) -> tuple[str, ...]:
        block = getattr(config.draft, "block_size", 0)
        return (f"block {block} is too much",) if block > 8 else ()

    brain = Brain(space, refuse)
    seen = []
    for number in range(200):
        suggestion = brain.ask(number)
        if suggestion is None:
            break
        judged = suggestion.judged
        seen.append(judged)
        failure = Failure(kind="config", stage="lease") if isinstance(judged, Infeasible) else None
        config = space.raw_config(suggestion.assignment) if isinstance(judged, Infeasible) else config_dict(judged)
        levels = () if isinstance(judged, Infeasible) else tuple(measure(judged, c) for c in space.levels)
        state = "measured" if failure is None else "infeasible"
        brain.tell(TrialRecord(trial=number, role="search", state=state, config=config, levels=levels, failure=failure))
    feasible = [judged for judged in seen if isinstance(judged, EngineConfig)]
    assert len(feasible) == 17
    assert len(seen) <= 33
    assert brain.ask(300, careful=True) is None


def test_parameters_are_the_inverse_of_suggest() -> None:
    space = parse_space(SPACE.encode())
    brain = Brain(space, nothing)
    rng = random.Random(4)
    for _ in range(30):
        assignment = space.draw(rng)
        brain.study.enqueue_trial(parameters(space, assignment))
        trial = brain.study.ask()
        assert suggest(trial, space) == assignment


def test_the_tuner_does_not_load_torch() -> None:
    code = (
        "import sys, tuner.cli, tuner.study, tuner.session\n"
        "from tuner.space import parse_space\nfrom tuner.brain import Brain\n"
        f"space = parse_space({WIDE!r}.encode())\n"
        "brain = Brain(space, lambda config: ())\nbrain.ask(1)\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_bundled_space_with_trees_and_policies_is_searched_and_resumed() -> None:
    """Policies are choices like any other: suggested, taught, found again in the records."""
    space = load_space(Path(__file__).parents[2] / "search_spaces" / "bundled.yaml")
    records = play(space, Brain(space, nothing), 24)
    assert len(records) == 24
    kinds = {record.config["draft"]["kind"] for record in records}
    assert kinds == {"none", "dflash", "ddtree", "policy"}
    assert all(space.assignment_of(record.config) is not None for record in records)
