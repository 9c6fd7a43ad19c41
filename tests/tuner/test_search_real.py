"""The main job on the real engine with the smoke pair: search, front, and the printed command serves the winner."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from engine.config import load_launch
from tests.tuner.running import family
from tests.tuner.spaces import PAIR
from tuner.space import load_space

ROOT = Path(__file__).parents[2]
LIMIT = 240.0

SPACE = """\
schema: 1
study: {{name: real, budget: {{trials: 2}}}}
engine:
  model: {{target: {target}, dtype: float32}}
  draft: {{model: {draft}}}
  memory: {{max_running: 4}}
search:
  draft.kind: [none, dflash]
  draft.block_size: {{choices: [4], when: {{draft.kind: [dflash]}}}}
workload: {{prompts: {prompts}, output_tokens: 16, concurrency: [1, 2], window: 200ms, client_lag: 1000}}
objectives:
  - {{metric: tpot_ms_p50, goal: min}}
  - {{metric: output_tok_s, goal: max}}
pick: {{load: 1}}
"""


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder in which a real search has run, and what it printed."""
    folder = tmp_path_factory.mktemp("real")
    prompts = json.loads((PAIR / "prompts.json").read_text())
    lines = [json.dumps({"prompt": prompt["text"]}) for prompt in prompts[:12]]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    paths = {"target": PAIR / "target", "draft": PAIR / "draft", "prompts": folder / "prompts.jsonl"}
    (folder / "space.yaml").write_text(SPACE.format(**paths))
    done = subprocess.run(
        [sys.executable, "-m", "tuner", "search", "space.yaml"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_every_configuration_is_measured_at_every_load(searched: tuple[Path, str]) -> None:
    folder, _ = searched
    lines = (folder / "results/real/trials.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [r["config"]["draft"]["kind"] for r in records[:2]] == ["none", "dflash"]
    for record in records:
        assert record["state"] == "measured", record["failure"]
        assert [level["concurrency"] for level in record["levels"]] == [1, 2]
        assert record["resolved"]["draft"]["kind"] == record["config"]["draft"]["kind"]
        for level in record["levels"]:
            assert level["n"] >= 6
            assert level["metrics"]["error_rate"] == 0
            assert level["metrics"]["output_tok_s"] > 0
            accepted = level["metrics"]["accept_length"]
            assert accepted == 1 if record["config"]["draft"]["kind"] == "none" else 1 <= accepted <= 4
    assert family(str(folder)) == []
    roles = {record["role"] for record in records}
    # Where the baseline beat the other point at every load, nothing was left to confirm.
    assert {"baseline", "search"} <= roles <= {"baseline", "search", "confirm", "policy"}


def test_front_and_report_are_there(searched: tuple[Path, str]) -> None:
    folder, said = searched
    front = json.loads((folder / "results/real/front.json").read_text())
    assert front
    assert all(entry["intervals"]["output_tok_s"] for entry in front)
    assert (folder / "results/real/report.html").stat().st_size > 5000
    assert load_space(folder / "results/real/space.yaml").file.study.name == "real"
    assert "Front" in said


def test_the_printed_command_serves_the_winner_and_its_text_is_the_baselines(searched: tuple[Path, str]) -> None:
    folder, said = searched
    (command,) = [line.removeprefix("Serve:").strip() for line in said.splitlines() if line.startswith("Serve:")]
    launch = load_launch(folder / "results/real/launch.yaml")
    drafted = next(r for r in records(folder) if r["config"]["draft"]["kind"] == "dflash")["config"]
    baseline = records(folder)[0]["config"]
    (folder / "dflash.yaml").write_text(yaml.safe_dump(drafted))
    (folder / "baseline.yaml").write_text(yaml.safe_dump(baseline))
    prompt = json.loads((folder / "prompts.jsonl").read_text().splitlines()[0])["prompt"]
    words = shlex.split(command)
    texts = []
    for path in ("results/real/launch.yaml", "dflash.yaml", "baseline.yaml"):
        assert words[:4] == [words[0], "-m", "engine", "serve"]
        with served([*words[:4], path, "--port"], folder) as url:
            body = {"model": launch.entries[0].config.model.target, "prompt": prompt, "max_tokens": 24}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["choices"][0]["text"])
    assert words[4] == "results/real/launch.yaml"
    assert texts[0]
    assert texts[0] == texts[1] == texts[2]


def records(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "results/real/trials.jsonl").read_text().splitlines()]


@contextmanager
def served(command: list[str], folder: Path) -> Iterator[str]:
    """Run a server until the block is left."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = subprocess.Popen([*command, str(port)], cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        assert running.stderr is not None
        said = []
        for line in running.stderr:  # ends with the server, should it die
            said.append(line)
            if json.loads(line).get("event") == "ready":
                break
        else:
            raise AssertionError("".join(said))
        yield f"http://127.0.0.1:{port}"
    finally:
        running.terminate()
        running.communicate(timeout=LIMIT)
