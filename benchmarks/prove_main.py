"""The main job's proof: the README's two commands on a clean clone, the winner served, garbage survived."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.server import serving
from engine.config import load_launch

ROOT = Path(__file__).parent.parent
CLONE = Path(tempfile.gettempdir()) / f"dflash-tuner-proof-{os.getuid()}" / "clone"
DEMO_SECONDS = 180.0
LEAST_CONFIGS = 13  # the baseline and twelve others
LEAST_SPEEDUP = 1.3  # of the best point at concurrency 1 against the baseline there
MUTATED = 2000
PROMPTS = ("def main():\n", "import os\n\n\nclass Reader:\n    def __init__(self", "for index in range(")


def demo() -> dict[str, Any]:
    """`make demo` on a clean clone: at most three minutes after installing, ≥ 13 configs, a front, ≥ 1.3×."""
    subprocess.run(["rm", "-rf", str(CLONE)], check=True)
    CLONE.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(CLONE)], check=True)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    began = time.monotonic()
    subprocess.run(["make", "install"], cwd=CLONE, env=environment, check=True, stdout=subprocess.DEVNULL)
    installed = time.monotonic()
    done = subprocess.run(["make", "demo"], cwd=CLONE, env=environment, check=False, capture_output=True, text=True)
    seconds = time.monotonic() - installed
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    study = CLONE / "results" / "bundled"
    (study / "demo.txt").write_text(done.stdout)
    records = [json.loads(line) for line in (study / "trials.jsonl").read_text().splitlines()]
    measured = [r for r in records if r["state"] == "measured" and r["role"] in ("baseline", "search")]
    configs = {json.dumps(r["config"], sort_keys=True) for r in measured}
    front = json.loads((study / "front.json").read_text())
    points = front if isinstance(front, list) else front["points"]
    on_front = {json.dumps(point["config"], sort_keys=True) for point in points}
    speedup = min(_speedup_alone(measured), _throughput_alone(measured))  # both ways to say "faster" must hold
    for name in ("report.html", "launch.yaml", "provenance.json", "events.jsonl", "space.yaml"):
        assert (study / name).stat().st_size > 0, f"{name} is missing"
    figures = {
        "seconds_install": round(installed - began, 1),
        "seconds_demo": round(seconds, 1),
        "configs_measured": len(configs),
        "front_points": len(points),
        "front_configs": len(on_front),
        "speedup_at_1": round(speedup, 2),
        "failed": sum(r["state"] == "failed" for r in records),
    }
    assert seconds <= DEMO_SECONDS, f"the demo took {seconds:.0f} s: {figures}"
    assert len(configs) >= LEAST_CONFIGS, f"only {len(configs)} configs were measured: {figures}"
    assert len(on_front) >= 2, f"the front has {len(on_front)} config: {figures}"
    assert speedup >= LEAST_SPEEDUP, f"{speedup:.2f}× the baseline at concurrency 1: {figures}"
    return figures


def _speedup_alone(records: list[dict[str, Any]]) -> float:
    """Best time per token at concurrency 1, as a ratio to the baseline's."""
    alone = {
        r["role"] + str(r["trial"]): level["metrics"]["tpot_ms_p50"]
        for r in records
        for level in r["levels"]
        if level["concurrency"] == 1
    }
    return float(alone["baseline0"]) / min(float(value) for value in alone.values())


def winner() -> dict[str, Any]:
    """The command that the demo printed serves the winner; in float32 its text is the baseline's."""
    at_head()
    study = CLONE / "results" / "bundled"
    printed = (study / "demo.txt").read_text()
    found = re.search(r"^\s*Serve:\s+(.+)$", printed, re.MULTILINE)
    assert found is not None, "the demo printed no serve command"
    command = shlex.split(found.group(1))
    with _running(command) as port:
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/completions",
            json={"model": "bundled", "prompt": PROMPTS[0], "max_tokens": 32},
            timeout=60,
        )
    assert answer.status_code == 200, answer.text
    config = load_launch(study / "launch.yaml").entries[0].config.model_dump(mode="json")
    config["model"]["dtype"] = config["model"]["kv_dtype"] = "float32"
    texts = []
    for document in (config, {"model": {"target": "bundled", "dtype": "float32"}}):
        with serving(yaml.safe_load(yaml.safe_dump(document))) as server:
            texts.append([_complete(server.port, prompt) for prompt in PROMPTS])
    assert texts[0] == texts[1], "in float32 the winner's text differs from the baseline's"
    return {"command": found.group(1), "draft": config["draft"], "prompts": len(PROMPTS), "tokens": 96}


def _complete(port: int, prompt: str) -> str:
    body = {"model": "bundled", "prompt": prompt, "max_tokens": 96, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120)
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["text"]
    return text


def _throughput_alone(records: list[dict[str, Any]]) -> float:
    """Best output tokens a second at concurrency 1, as a ratio to the baseline's."""
    alone = {
        r["role"] + str(r["trial"]): float(level["metrics"]["output_tok_s"])
        for r in records
        for level in r["levels"]
        if level["concurrency"] == 1
    }
    return max(alone.values()) / alone["baseline0"]


@contextmanager
def _running(command: list[str]) -> Iterator[int]:
    """Run a printed command in the clone until the block ends; yield its port once it is ready."""
    process = subprocess.Popen(command, cwd=CLONE, stderr=subprocess.PIPE, text=True)
    try:
        port = None
        for line in process.stderr or ():
            event = json.loads(line) if line.startswith("{") else {}
            port = event.get("port", port)
            if event.get("event") == "ready":
                break
        assert port is not None, f"the printed command ended with {process.wait()}"
        yield port
    finally:
        process.terminate()
        assert process.wait(timeout=30) == 0, "SIGTERM did not end it with 0"


def garbage() -> dict[str, Any]:
    """2,000 mutated space files end in no traceback."""
    from tests.tuner.space.mutate import survive

    outcome = survive(MUTATED)
    return {"files": MUTATED, "outcome": str(outcome)}


def at_head() -> None:
    """The clone that `demo` made must be of the commit that is proved."""
    of, wanted = (
        subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True).stdout
        for folder in (CLONE, ROOT)
    )
    assert of == wanted, f"the clean clone is of {of[:7]}: run the step `demo` first"


def tests() -> dict[str, Any]:
    """`make check` and `make test` on the clean clone."""
    at_head()
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    figures: dict[str, Any] = {}
    for target in ("check", "test"):
        began = time.monotonic()
        done = subprocess.run(["make", target], cwd=CLONE, env=environment, check=False, capture_output=True, text=True)
        lines = (done.stdout + done.stderr).strip().splitlines()
        told = [line for line in lines if line.startswith(("FAILED", "ERROR", "make:")) or " passed" in line]
        assert done.returncode == 0, "; ".join(told or lines[-5:])  # tracebacks name folders of this machine
        figures[f"seconds_{target}"] = round(time.monotonic() - began, 1)
        figures[target] = done.stdout.strip().splitlines()[-1]
    return figures


STEPS = {"demo": demo, "winner": winner, "garbage": garbage, "tests": tests}
