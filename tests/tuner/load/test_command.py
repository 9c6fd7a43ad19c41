"""`tuner load` as a user runs it, against the exact server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exact_server.run import Schedule, exact

LIMIT = 120


def tuner(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tuner", "load", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.mark.parametrize("processes", [1, 2])
def test_exactly_n_are_measured_and_every_token_is_counted(tmp_path: Path, processes: int) -> None:
    out = tmp_path / "out.json"
    repository = Path(__file__).resolve().parents[3]
    with exact(Schedule(lo=1, hi=16, interval_us=2000, first_us=5000)) as server:
        words = ["--concurrency", "4", "--requests", "12", "--output-tokens", "50", "--json", str(out)]
        url = f"http://127.0.0.1:{server.port}/v1"
        done = tuner(url, "--model", "exact", *words, "--processes", str(processes), cwd=repository)
        log = {served.number: served for served in server.log()}
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["completed"] == found["requests"] == 12
    assert len(log) == 12 + 4
    assert found["output_tokens"] == 600 == sum(log[number].tokens for number in range(4, 16))
    assert found["output_tok_s"] > 0
    for name in ("ttft_ms", "tpot_ms", "chunk_gap_ms"):
        assert found[name]["mean"] > 0
    assert found["ttft_ms"]["p50"] > 0
    assert found["tpot_ms"]["p50"] > 0
    assert found["chunk_gap_ms"]["p50"] >= 0  # a client that is late reads several chunks at one moment
    assert found["ttft_ms"]["p99"] is None
    assert found["few"]["ttft_ms_p99"] == 100
    assert found["errors"] == {}
    assert found["client"]["processes"] == processes
    assert found["client"]["lag_ms_p99"] >= 0
    assert found["client"]["bound"] in (True, False)
    assert "12 requests, 600 tokens" in done.stdout
    assert "n < 100" in done.stdout


def test_a_run_in_which_all_fail_is_a_failure(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["--model", "m", "--requests", "3", "--concurrency", "2", "--json", str(out)]
    done = tuner("http://127.0.0.1:1", *words, cwd=Path(__file__).resolve().parents[3])
    assert done.returncode == 3
    assert "all 3 requests failed; the first: connect" in done.stderr
    assert done.stdout == ""
    assert json.loads(out.read_text())["errors"] == {"connect": 3}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ftp://x"], "no URL of a server"),
        (["http://[::1"], "write http://HOST:PORT"),
        (["http://x:99999"], "write http://HOST:PORT"),
        (["http://x", "--json", "/nowhere/out.json"], "there is no folder /nowhere"),
        (["http://x", "--json", "/"], "a folder, or not permitted"),
        (["http://x", "--arrivals", "poisson"], "rate"),
        (["http://x", "--prompts", "/nowhere.jsonl"], "there is no file /nowhere.jsonl"),
        (["http://x", "--slo", "nonsense"], "no limit"),
        (["http://x", "--api-key-env", "NO_SUCH_VARIABLE"], "holds no key"),
    ],
)
def test_a_bad_argument_is_one_line(words: list[str], said: str) -> None:
    done = tuner(*words, "--model", "m", cwd=Path(__file__).resolve().parents[3])
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
