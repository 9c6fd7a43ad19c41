"""What is known without a launch: what is dropped, why, what it would cost; and the spaces `init` writes."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from engine.config import EngineConfig
from engine.estimate import cpu_machine, gpu
from tests.tuner.spaces import PAIR, SMOKE
from tuner.dryrun import cost, view
from tuner.errors import UsageError
from tuner.feasible import StaticChecks, prune
from tuner.init import Plan, space_text, write_space
from tuner.space import Choices, Infeasible, IntRange, Space, parse_space

CPU = StaticChecks(cpu_machine())


def space(text: str = SMOKE) -> Space:
    return parse_space(text.encode())


def test_choices_and_ends_of_ranges_that_can_never_run_are_dropped_with_their_reason() -> None:
    pruning = prune(space(), CPU)
    kept = {domain.path: domain for domain in pruning.space.domains}
    assert isinstance(kept["graphs"], Choices)
    assert kept["graphs"].values == ({"kind": "eager"},)
    assert isinstance(kept["draft.layers"], IntRange)
    assert (kept["draft.layers"].low, kept["draft.layers"].high) == (1, 2)
    assert (pruning.points, pruning.feasible) == (50, 13)
    assert {(d.path, str(d.value)) for d in pruning.dropped} == {
        ("draft.layers", "3"),
        ("draft.layers", "4"),
        ("graphs", "{'kind': 'captured', 'batch_sizes': [1, 4]}"),
    }
    assert all(dropped.reason for dropped in pruning.dropped)
    assert len(pruning.impossible) == 50 - 13
    assert all(isinstance(space().judge(point, CPU), Infeasible) for point in pruning.impossible)
    assert sum(isinstance(pruning.space.judge(p, CPU), Infeasible) for p in pruning.space.points()) == 0


def test_a_kind_that_this_version_cannot_run_is_dropped() -> None:
    text = SMOKE.replace("draft.kind: [none, dflash]", "draft.kind: [none, dflash, policy]")
    pruning = prune(space(text), CPU)
    assert ("draft.kind", "policy") in [(d.path, d.value) for d in pruning.dropped]


def test_memory_that_does_not_fit_is_seen_before_a_launch() -> None:
    text = SMOKE.replace("{max_running: 16}", "{max_running: 16, kv_tokens: 100000000000}")
    config = space(text).baseline(lambda config: ())
    assert not isinstance(config, Infeasible)
    (reason,) = CPU(config[0])
    assert "memory.kv_tokens: short by" in reason
    assert "lower kv_tokens to" in reason


def test_backends_without_a_version_or_a_command_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_BACKENDS", "/nowhere/backends.yaml")
    config = EngineConfig.model_validate({"model": {"target": "some/model"}, "backend": {"kind": "vllm"}})
    (reason,) = CPU(config)
    assert "backend vllm needs a command" in reason


def test_a_missing_model_is_a_reason_not_an_error() -> None:
    config = EngineConfig.model_validate({"model": {"target": "/nowhere/at/all"}})
    assert "/nowhere/at/all" in CPU(config)[0]
    assert CPU.memory(config) is None


def test_a_space_without_any_point_keeps_its_domains() -> None:
    text = SMOKE.replace("smoke_pair/target", "no_such_pair/target")
    pruning = prune(space(text), CPU)
    assert pruning.feasible == 0
    assert [len(d.values) for d in pruning.space.domains if isinstance(d, Choices)] == [2, 6, 2]


def test_large_spaces_are_not_judged_point_by_point() -> None:
    text = SMOKE.replace("  graphs:", "  memory.page_size: {int: [1, 4096]}\n  graphs:")
    pruning = prune(space(text), CPU)
    assert pruning.points == 50 * 4096
    assert pruning.feasible is None
    said = render(text)
    assert "too many to judge one by one" in said
    assert "by 200 random points" in said


def render(text: str = SMOKE, checks: StaticChecks = CPU) -> str:
    asked = space(text)
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(view(asked, prune(asked, checks), checks))
    return console.export_text()


def test_cost_of_a_cpu_study() -> None:
    asked = space()
    estimate = cost(asked, prune(asked, CPU), CPU)
    assert estimate.launches == 14
    assert estimate.seconds == 150
    assert estimate.gpu_hours is None
    unlimited = space(SMOKE.replace("trials: 16, wall: 150s", "gpu_hours: 1"))
    assert cost(unlimited, prune(unlimited, CPU), CPU).seconds is not None


def test_cost_of_a_gpu_study_counts_gpu_hours() -> None:
    machine = StaticChecks(gpu("H200", devices=8))
    asked = space(SMOKE.replace("trials: 16, wall: 150s", "trials: 40"))
    estimate = cost(asked, prune(asked, machine), machine)
    assert estimate.gpu_hours is not None
    assert estimate.seconds is not None
    assert estimate.gpu_hours == pytest.approx(estimate.seconds / 3600)
    assert "GPU-hours: at most about" in render(checks=machine)
    budget = space(SMOKE.replace("trials: 16, wall: 150s", "gpu_hours: 0.01"))
    assert cost(budget, prune(budget, machine), machine).seconds == pytest.approx(36)


@pytest.mark.parametrize("machine", [cpu_machine(), gpu("H200", devices=8), gpu("L4")], ids=lambda m: m.name)
def test_init_writes_spaces_that_load_with_a_baseline(machine: object) -> None:
    checks = StaticChecks(machine)  # type: ignore[arg-type]
    text = space_text(Plan("mine.yaml", "mine", str(PAIR / "target"), str(PAIR / "draft")), checks.machine)
    written = parse_space(text.encode())
    assert not isinstance(written.baseline(checks), Infeasible)
    pruning = prune(written, checks)
    assert pruning.feasible is None or pruning.feasible >= 5
    assert "# " in text


def test_init_without_a_drafter_says_so(tmp_path: Path) -> None:
    shutil.copytree(PAIR / "target", tmp_path / "off", dirs_exist_ok=True)  # a name that YAML would misread
    text = space_text(Plan("a.yaml", "a", str(tmp_path / "off")), CPU.machine)
    assert "only no speculation can run" in text
    assert parse_space(text.encode()).size() == 1


def test_init_quotes_what_yaml_would_misread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(PAIR / "target", tmp_path / "no")
    monkeypatch.chdir(tmp_path)
    text = space_text(Plan("a.yaml", "a", "no"), CPU.machine)
    assert parse_space(text.encode()).file.engine["model"]["target"] == "no"


def test_init_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--target"):
        space_text(Plan("a.yaml", "a", str(tmp_path / "absent")), CPU.machine)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Nonesuch"]}))
    with pytest.raises(UsageError, match="--target"):
        space_text(Plan("a.yaml", "a", str(tmp_path)), CPU.machine)
    out = tmp_path / "space.yaml"
    out.write_text("mine")
    with pytest.raises(UsageError, match="--force"):
        write_space(out, str(PAIR / "target"), None, CPU.machine, force=False)
    assert out.read_text() == "mine"
