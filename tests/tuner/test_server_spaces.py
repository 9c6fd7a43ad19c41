"""The spaces for foreign servers: they load, plan without GPUs or model files, and give the commands on record."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from engine.config import EngineConfig, LaunchFile
from tests.engine.backends.golden import FOLDER, argv_text, machine_file
from tests.tuner.make import config, level, record
from tuner.dryrun import view
from tuner.errors import NothingFeasible, UsageError
from tuner.export.launch_file import by_load_file, render, serve_command, servers, write_launch
from tuner.outcome import Outcome
from tuner.pick import recommend
from tuner.points import points_of
from tuner.session import described, plan
from tuner.space import Infeasible, Space, load_space
from tuner.space.model import Objective, Pick
from tuner.tables import policy_lines

__all__ = ["machine_file"]

SPACES = Path(__file__).parents[2] / "search_spaces"
KIMI = SPACES / "kimi_k2.6_8gpu.yaml"
BUNDLED_GPU = SPACES / "bundled_sglang_gpu.yaml"


def configs(space: Space, machine: str) -> list[EngineConfig]:
    """Return every configuration of a space that a machine can run."""
    checks, pruning = plan(space, machine)
    judged = [pruning.space.judge(point, checks) for point in pruning.space.points()]
    return [config for config in judged if not isinstance(config, Infeasible)]


@pytest.mark.parametrize("path", sorted(SPACES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_space_loads(path: Path) -> None:
    assert load_space(path).domains


@pytest.mark.usefixtures("machine_file")
def test_kimi_is_planned_without_gpus_and_without_the_models_files() -> None:
    space = load_space(KIMI)
    checks, pruning = plan(space, "8xH200")
    assert (pruning.points, pruning.feasible) == (144, 144)
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(view(space, pruning, checks))
    text = console.export_text()
    assert "Memory: unknown, the model's folder is not here" in text
    assert "8 × H200" in text
    found = configs(space, "8xH200")
    assert {(config.parallel.tensor, config.parallel.expert) for config in found} == {(8, 1), (8, 8)}
    blocks = {draft.block_size for config in found for draft in config.drafts if draft.kind == "dflash"}
    assert blocks == set(range(2, 9))
    assert all(config.model.trust_remote_code for config in found)


@pytest.mark.usefixtures("machine_file")
@pytest.mark.parametrize("machine", ["4xH200", "H100"])
def test_kimi_on_too_few_gpus_says_so(machine: str) -> None:
    checks, pruning = plan(load_space(KIMI), machine)
    assert pruning.feasible == 0
    assert any("needs 8 GPUs" in reason for reason in pruning.reasons)
    assert isinstance(pruning.space.baseline(checks), Infeasible)


@pytest.mark.usefixtures("machine_file")
@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
def test_golden_commands_of_kimi(version: str) -> None:
    """The corners of the space: no speculation with ep 1, and the longest block with ep 8."""
    found = [
        config.model_copy(update={"backend": config.backend.model_copy(update={"version": version})})
        for config in configs(load_space(KIMI), "8xH200")
    ]
    chosen = {"none-ep1": found[0], "dflash8-ep8": found[-1]}
    assert [(c.draft.kind, c.parallel.expert) for c in chosen.values()] == [("none", 1), ("dflash", 8)]
    for name, one in chosen.items():
        golden = FOLDER / f"sglang-{version}-kimi-space-{name}.txt"
        assert argv_text(one) == golden.read_text(encoding="utf-8")


@pytest.mark.usefixtures("machine_file")
def test_golden_commands_of_the_bundled_pair_on_a_gpu() -> None:
    space = load_space(BUNDLED_GPU)
    judged = [space.judge(point, lambda _: ()) for point in space.points()]  # whatever the bundled drafter is
    found = [config for config in judged if not isinstance(config, Infeasible)]
    assert len(found) == 8
    text = "\n".join(argv_text(config) for config in found)
    assert text == (FOLDER / "sglang-0.5.17-bundled-gpu-space.txt").read_text(encoding="utf-8")


@pytest.mark.usefixtures("machine_file")
def test_sglang_on_a_cpu_keeps_what_it_can_run() -> None:
    space = load_space(SPACES / "bundled_sglang_cpu.yaml")
    checks, pruning = plan(space)
    if checks.machine.kind == "cpu":
        assert pruning.feasible == 3
        assert {dropped.value for dropped in pruning.dropped} >= {"dflash"}


@pytest.mark.parametrize(("text", "devices", "name"), [("8xH200", 8, "H200"), ("4 × H100", 4, "H100"), ("L4", 1, "L4")])
def test_machines_by_description(text: str, devices: int, name: str) -> None:
    machine = described(text)
    assert (machine.devices, machine.kind) == (devices, "cuda")
    assert name in machine.name


@pytest.mark.parametrize("text", ["", "8x", "0xH200", "8xH9000"])
def test_machines_that_do_not_exist(text: str) -> None:
    with pytest.raises(UsageError, match="--machine"):
        described(text)


@pytest.mark.usefixtures("machine_file")
@pytest.mark.parametrize(("kind", "version", "entries"), [("sglang", "0.5.17", 2), ("vllm", "0.33.0", 1)])
def test_a_policy_is_launched_as_its_backend_can_switch(kind: str, version: str, entries: int) -> None:
    policy = {"kind": "policy", "by_running": [[1, 4, {"kind": "dflash"}], [5, None, {"kind": "none"}]]}
    raw = {"model": {"target": "bundled"}, "draft": policy, "backend": {"kind": kind, "version": version}}
    found = LaunchFile(entries=servers(EngineConfig.model_validate(raw))).entries
    assert len(found) == entries
    assert (found[0].first, found[-1].last) == (1, None)


def by_load(backend: dict[str, Any], machine_file: Path) -> tuple[LaunchFile, list[str]]:
    """Return the file by load of a study in which DFlash wins alone and loses under load; and what is said of it, at
    the end of the search and on top of the file."""
    machine_file.write_text('sglang: {"0.5.17": {command: [sglang, serve]}}')
    none = config(backend=backend)
    chain = config({"kind": "dflash", "block_size": 8}, backend=backend)
    records = [
        record(0, [level(1, 8.0, 120), level(16, 16.0, 900)], role="baseline", config=none),
        record(1, [level(1, 4.0, 240), level(16, 20.0, 700)], config=chain),
    ]
    points = points_of(records, ())
    best = recommend(points, (Objective(metric="output_tok_s", goal="max"),), Pick(load=16))
    assert best.point.trial == 0
    launch = by_load_file(best, records, "study", "0" * 16)
    said = policy_lines(Outcome(tuple(records), tuple(points), (), best, ""))
    return launch, [*said, *render(launch, Path("launch.yaml")).splitlines()[:3]]


@pytest.mark.usefixtures("machine_file")
def test_drafts_by_load_are_one_server_a_range_where_a_server_cannot_switch(machine_file: Path) -> None:
    launch, lines = by_load({"kind": "sglang", "version": "0.5.17"}, machine_file)
    found = [(entry.first, entry.last, entry.config.draft.kind) for entry in launch.entries]
    assert found == [(1, 4, "dflash"), (5, None, "none")]
    assert launch.expected[1]["output_tok_s"][0] <= 240 <= launch.expected[1]["output_tok_s"][1]
    assert launch.expected[16]["output_tok_s"][0] <= 900 <= launch.expected[16]["output_tok_s"][1]
    said, head, alone, crowd = lines
    assert said.startswith("Fastest by requests in flight: 1–4 dflash 8, 5– none. One server cannot switch")
    assert head.startswith("# One server a range")
    assert alone.startswith("# 1–4 running:  env ")
    assert crowd.startswith("# 5 and more running:  env ")
    assert ("--port 8000" in alone, "--port 8001" in crowd) == (True, True)
    native, (first, *_) = by_load({"kind": "native"}, machine_file)
    assert first.startswith("# Serve it:")
    assert [entry.config.draft.kind for entry in native.entries] == ["policy"]


@pytest.mark.usefixtures("machine_file")
def test_without_drafts_that_differ_by_load_there_is_nothing_to_export(machine_file: Path) -> None:
    records = [record(0, [level(1, 8.0, 120)], role="baseline", config=config())]
    best = recommend(points_of(records, ()), (Objective(metric="output_tok_s", goal="max"),), Pick())
    with pytest.raises(NothingFeasible, match="one draft serves every load best"):
        by_load_file(best, records, "study", "0" * 16)


@pytest.mark.usefixtures("machine_file")
def test_a_foreign_server_is_served_by_its_own_command(tmp_path: Path, machine_file: Path) -> None:
    machine_file.write_text('sglang: {"0.5.17": {command: [sglang, serve], env: {HF_TOKEN: hidden}}}')
    raw = {"model": {"target": "bundled"}, "backend": {"kind": "sglang", "version": "0.5.17"}}
    launch = LaunchFile(entries=servers(EngineConfig.model_validate(raw)))
    path = tmp_path / "launch.yaml"
    first, *_ = render(launch, path).splitlines()
    assert "hidden" not in first
    assert first.startswith("# Serve it:  env SGLANG_SIMULATE_ACC_LEN=-1 sglang serve --model-path")
    write_launch(launch, path)
    assert serve_command(path) in first
    raw["backend"]["version"] = "0.0.1"  # type: ignore[index]
    elsewhere = LaunchFile(entries=servers(EngineConfig.model_validate(raw)))
    assert "sglang cannot be started from here" in serve_command(path, launch=elsewhere)
    assert "-m engine serve" in serve_command(tmp_path / "absent.yaml")
    path.write_text("schema: 1\nentries: 3\n")
    assert serve_command(path).startswith("# cannot be served: ")
