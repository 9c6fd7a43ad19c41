"""The pure parts of the GPU benchmark: what it reads of a study and of memory samples, and its short search."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import yaml

from benchmarks.sglang_chaos import CONCURRENCY, STRANGER, broken, not_above, shortened, tree_of, words_of
from benchmarks.sglang_gpu import SPACE, SPARE_SECONDS, Span, lines, memory_of, sample, spans, under_way
from tests.waiting import wait_until
from tuner.executors.base import Gpu
from tuner.machine import GpuProcess, Gpus
from tuner.space import load_space
from tuner.supervise import supervise


def event(trial: int, kind: str, stage: str, time: float) -> str:
    return json.dumps({"trial": trial, "kind": kind, "stage": stage, "time": time}) + "\n"


def test_a_trial_that_was_interrupted_counts_from_its_second_launch(tmp_path: Path) -> None:
    (tmp_path / "trials.jsonl").write_text('{"trial": 0}\n{"trial": 1}\n{"trial": 2', encoding="utf-8")
    told = [
        event(0, "begin", "launch", 1.0),
        event(0, "record", "stop", 2.0),
        event(1, "begin", "launch", 3.0),
        event(1, "begin", "launch", 10.0),
        event(1, "record", "stop", 12.0),
        event(2, "begin", "launch", 13.0),
    ]
    (tmp_path / "events.jsonl").write_text("".join(told), encoding="utf-8")
    assert [record["trial"] for record in lines(tmp_path / "trials.jsonl")] == [0, 1]
    assert spans(tmp_path) == [Span(0, 1.0, 2.0), Span(1, 10.0, 12.0)]
    assert spans(tmp_path / "absent") == []
    assert under_way(tmp_path, 13.0 + SPARE_SECONDS + 1)
    assert not under_way(tmp_path, 13.0 + SPARE_SECONDS - 1)
    assert not under_way(tmp_path / "absent", 99.0)


def test_memory_before_at_its_most_and_after_by_gpu() -> None:
    gpus = tuple(Gpu(index, f"GPU-{index}", "H200", 143771, 10 * index) for index in (0, 1))
    line = sample(Gpus(gpus, (GpuProcess("GPU-1", 7, "python", 5),), "580"))
    assert (line["used"], line["pids"]) == ({"0": 0, "1": 10}, {"0": [], "1": [7]})
    samples = [{"time": float(at), "used": {"0": used}} for at, used in enumerate((4, 5, 9000, 12000, 6, 7))]
    assert memory_of(Span(0, 1.5, 3.5), samples) == {"0": {"before_mib": 5, "most_mib": 12000, "after_mib": 6}}
    assert memory_of(Span(0, -1.0, -0.5), samples[:0]) == {}
    assert memory_of(Span(0, 9.0, 9.5), samples)["0"] == {"before_mib": 7, "most_mib": None, "after_mib": None}


def test_the_short_search_is_a_search(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(yaml.safe_dump(shortened(SPACE)), encoding="utf-8")
    file = load_space(path).file
    assert file.workload.concurrency == (CONCURRENCY,)
    assert file.executor.kind == "local"


def test_the_processes_of_a_trial_are_found_below_the_search(tmp_path: Path) -> None:
    serve = [sys.executable, "-c", "import time\nwhile True: time.sleep(9)", "--served-model-name", "x", "--port", "31"]
    inner = f"import os, sys, tuner.supervise as s, pathlib\nwith s.supervise({serve!r}, env=os.environ, "
    inner += f"log=pathlib.Path({str(tmp_path / 'log')!r})): sys.stdin.read()"
    outer = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {inner!r}, 'tuner.worker'], "
    outer += "stdin=subprocess.PIPE).wait()"
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    with supervise([sys.executable, "-c", outer], env=path, log=tmp_path / "outer") as search:

        def server() -> bool:
            below = psutil.Process(search.pid).children(recursive=True)
            return any(words[-1:] == ["31"] and words[1] == "-c" for words in map(words_of, below))

        wait_until(server, "the server runs", 60.0)
        tree = tree_of(search.pid)
    assert tree.port == 31
    assert {tree.worker, tree.server} < set(tree.pids)
    assert len(tree.pids) == 3  # worker, watchdog, server


def test_what_did_not_hold_is_named() -> None:
    assert not_above({"0": 300}, {"0": 100})
    assert not not_above({"0": 400}, {"0": 100})
    failure = {"kind": "crashed", "stage": "load"}
    kill = {"victim": "server", "failure": failure, "left": [], "gone_s": 0.1, "port_free": True, "memory_back_s": 1.0}
    refused, granted = {"leased": 0, "kind": "foreign_gpu_process"}, {"leased": 1}
    stranger = {
        "quarantine_notes": ["x"],
        "lease_while_shut": refused,
        "lease_beside_a_stranger": refused,
        "notes_when_it_had_gone": [],
        "lease_when_it_had_gone": granted,
        "lease_after_all": granted,
    }
    found = {
        "kills": [kill],
        "stranger": stranger,
        "trials": [{"failure": failure}, {"failure": failure}, {"failure": {"stage": "stop"}}],
        "orphans": [],
        "locks_held": [],
    }
    assert broken(found) == []
    found["kills"] = [kill | {"left": [3], "failure": None, "port_free": False}]
    found["stranger"] = stranger | {"quarantine_notes": [], "lease_after_all": refused, "lease_while_shut": granted}
    found["orphans"] = [4]
    assert len(broken(found)) == 7
    assert "cuda" in STRANGER[2]
