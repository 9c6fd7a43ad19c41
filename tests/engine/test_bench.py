"""`python -m engine bench`: what it reports, level by level."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.__main__ import main
from engine.bench import bench, decode_configs
from engine.config import EngineConfig
from tests.engine.test_speculate import SMOKE, smoke_prompts


def configs() -> dict[str, EngineConfig]:
    chain = {"kind": "dflash", "model": str(SMOKE / "draft"), "block_size": 4}
    drafts = {"none": {"kind": "none"}, "chain": chain, "policy": {"kind": "policy", "by_running": [[1, None, chain]]}}
    target = {"target": str(SMOKE / "target"), "dtype": "float32"}
    return {name: EngineConfig.model_validate({"model": target, "draft": draft}) for name, draft in drafts.items()}


def test_every_level_is_counted_by_itself() -> None:
    result = bench(configs(), smoke_prompts(4), [1, 3], output_tokens=12, repeats=2)
    for name, report in result["configs"].items():
        for level, requests in zip(report["levels"], (1, 3), strict=True):
            assert level["concurrency"] == requests
            assert len(level["tok_s"]) == 2
            assert level["ms_per_round"] == pytest.approx(sum(level["ms_by_phase"].values()))
            if name == "none":
                assert (level["accept_length"], level["rows_per_request"]) == (None, 1)
                assert level["rounds"] == 2 * 11
            else:
                assert 1 <= level["accept_length"] <= 4
                assert level["rows_per_request"] == 4
    chain, policy = (result["configs"][name]["levels"] for name in ("chain", "policy"))
    assert [level["accept_length"] for level in chain] == [level["accept_length"] for level in policy]


def test_decode_compares_four_ways_on_the_bundled_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [config.draft.kind for config in decode_configs().values()] == ["none", "dflash", "ddtree", "policy"]
    monkeypatch.setattr("engine.bench.decode_configs", configs)  # the smoke pair decodes faster
    (tmp_path / "prompts.json").write_text(json.dumps(smoke_prompts(2)))
    out = tmp_path / "out.json"
    options = [
        "--prompts",
        str(tmp_path / "prompts.json"),
        "--output-tokens",
        "4",
        "--repeats",
        "1",
        "--json",
        str(out),
    ]
    assert main(["bench", "--decode", "--concurrency", "1", "2", *options]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        name for name in configs() for _ in range(2)
    ]
    assert set(json.loads(out.read_text())["configs"]) == set(configs())
    assert main(["bench", "--decode", str(tmp_path / "prompts.json")]) == 2
