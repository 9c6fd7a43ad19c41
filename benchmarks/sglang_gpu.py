"""A real `tuner search` over SGLang with DFLASH on a GPU: the committed space, the machine's own command, the records.

Parts, each a command that may be stopped and called again; `record` joins what they left in `--folder`:

    search    the space; ends between two trials when `--seconds` are over, and resumes when called again
    chaos     servers and a worker killed under load, strangers on the GPU (`sglang_chaos.py`)
    contract  the contract suite against SGLang on this GPU
    record    one JSON file of everything

GPU memory is sampled beside every part, so that each trial shows it before, at its most, and after.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import RESULTS, ROOT, write
from benchmarks.sglang_cpu import contract as run_contract
from benchmarks.sglang_cpu import launch_text, without_paths
from engine.backends import commands_file, find_command
from tuner.machine import Gpus, look_at_gpus
from tuner.space import load_space

SPACE = ROOT / "search_spaces" / "bundled_sglang_gpu.yaml"
FOLDER = ROOT / ".build" / "sglang-gpu"
SAMPLE_SECONDS = 1.0
POLL_SECONDS = 0.5
SPARE_SECONDS = 10.0  # beyond the longest trial so far: a trial that cannot end in time is not begun
ENDING_SECONDS = 90.0  # an interrupted search ends its server, and proves the GPU's memory back
SHOWN = ("output_tok_s", "tpot_ms_p50", "ttft_ms_p90", "accept_length")
JUDGED = ("verdict", "why", "ties", "beyond", "regret", "bound")
LOG_LINES = 40  # of a failed trial's server


# --------------------------------------------------------------------------------------------- memory beside it


def sample(look: Gpus) -> dict[str, Any]:
    """Return one line of memory.jsonl: MiB and pids by GPU index."""
    index = {gpu.uuid: str(gpu.index) for gpu in look.gpus}
    pids: dict[str, list[int | None]] = {name: [] for name in index.values()}
    for process in look.processes:
        pids[index[process.gpu]].append(process.pid)
    return {"time": time.time(), "used": {str(gpu.index): gpu.memory_used for gpu in look.gpus}, "pids": pids}


@contextlib.contextmanager
def watched(path: Path) -> Iterator[None]:
    """Append a sample of the GPUs' memory to `path` about every second while the block runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    over = threading.Event()

    def run() -> None:
        with path.open("a", encoding="utf-8") as file:
            while not over.is_set():
                file.write(json.dumps(sample(look_at_gpus())) + "\n")
                file.flush()
                over.wait(SAMPLE_SECONDS)

    thread = threading.Thread(target=run, name="memory")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@dataclass(frozen=True)
class Span:
    """One trial: Unix times of its launch and its record."""

    trial: int
    launch: float
    end: float


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the documents of a JSONL file, none where it is absent. A last line cut short is left out."""
    if not path.is_file():
        return []
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines() if line]


def spans(study: Path) -> list[Span]:
    """Return when each recorded trial was launched and ended."""
    recorded = {record["trial"] for record in lines(study / "trials.jsonl")}
    launched, ended = {}, {}
    for event in lines(study / "events.jsonl"):
        if event["trial"] not in recorded:
            continue
        if event["kind"] == "begin" and event["stage"] == "launch":
            launched[event["trial"]] = event["time"]  # the last: an earlier one was interrupted and not recorded
        ended[event["trial"]] = event["time"]
    return [Span(trial, begin, ended[trial]) for trial, begin in sorted(launched.items())]


def memory_of(span: Span, samples: list[dict[str, Any]]) -> dict[str, dict[str, int | None]]:
    """Return MiB by GPU: before the launch, the most meanwhile, and in the first sample after the record."""
    found: dict[str, dict[str, int | None]] = {}
    for gpu in sorted({name for each in samples for name in each["used"]}):
        series = [(each["time"], each["used"][gpu]) for each in samples if gpu in each["used"]]
        before = [used for at, used in series if at <= span.launch]
        during = [used for at, used in series if span.launch < at <= span.end]
        after = [used for at, used in series if at > span.end]
        found[gpu] = {
            "before_mib": before[-1] if before else None,
            "most_mib": max(during, default=None),
            "after_mib": after[0] if after else None,
        }
    return found


# -------------------------------------------------------------------------------------------------- the search


def side_by_side(space: Path, folder: Path) -> Path:
    """Write the space with trials side by side, each on a GPU of its own, and return where."""
    document: dict[str, Any] = yaml.safe_load(space.read_text(encoding="utf-8"))
    document["executor"] |= {"kind": "packed"}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / space.name
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return path


def study_folder(folder: Path, space: Path) -> Path:
    """Return where the search of `space` is kept."""
    return folder / "results" / load_space(space).file.study.name


def search(folder: Path, space: Path, seconds: float) -> int:
    """Begin the search, or go on with it, for at most `seconds`; return its status, 130 when there is more to do."""
    study, calls = study_folder(folder, space), folder / "calls.jsonl"
    if any(call["status"] == 0 for call in lines(calls)):
        print("the search is complete")
        return 0
    words = ["search", str(space), "--results", str(study.parent), "--yes"]
    if (study / "provenance.json").is_file():
        words = ["resume", str(study)]
    command = [sys.executable, "-m", "tuner", *words]
    folder.mkdir(parents=True, exist_ok=True)
    began, wall = time.monotonic(), time.time()
    with watched(folder / "memory.jsonl"), (folder / "search.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            status = until(process, study, began + seconds)
        finally:
            end(process)
    call = {"command": words, "time": wall, "seconds": round(time.monotonic() - began, 1), "status": status}
    with calls.open("a", encoding="utf-8") as file:
        file.write(json.dumps(call) + "\n")
    print("\n".join((folder / "search.log").read_text(encoding="utf-8", errors="replace").splitlines()[-60:]))
    return status


def until(process: subprocess.Popen[bytes], study: Path, deadline: float) -> int:
    """Wait for the end of the search; interrupt it between two trials when another could not end in time."""
    while (status := process.poll()) is None:
        records = lines(study / "trials.jsonl")
        longest = max((sum(record["seconds"].values()) for record in records), default=0.0)
        left = deadline - time.monotonic()
        enough = left >= longest + SPARE_SECONDS or under_way(study, time.time())
        if not enough or left < ENDING_SECONDS / 3:
            return end(process)
        time.sleep(POLL_SECONDS)
    return status


def under_way(study: Path, now: float) -> bool:
    """Whether a trial that has no record yet was launched so long ago that it is worth waiting for."""
    recorded = {record["trial"] for record in lines(study / "trials.jsonl")}
    launched = {
        event["trial"]: event["time"]
        for event in lines(study / "events.jsonl")
        if event["kind"] == "begin" and event["stage"] == "launch"
    }
    return any(now - at > SPARE_SECONDS for trial, at in launched.items() if trial not in recorded)


def end(process: subprocess.Popen[bytes]) -> int:
    """Interrupt a search, as Ctrl-C does, and return its status."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


# ------------------------------------------------------------------------------------------------ the contract


def contract(folder: Path) -> int:
    """Run the contract suite against SGLang, without speculation and with DFLASH; keep what pytest counted."""
    folder.mkdir(parents=True, exist_ok=True)
    with watched(folder / "memory.jsonl"):
        found = run_contract()
    (folder / "contract.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    return int(found["status"])


# -------------------------------------------------------------------------------------------------- the record


def record(folder: Path, space: Path, out: Path, commit: str | None) -> None:
    """Join what the parts left and write it, without this machine's paths."""
    study = study_folder(folder, space)
    records, samples = lines(study / "trials.jsonl"), lines(folder / "memory.jsonl")
    spans_of = {span.trial: span for span in spans(study)}
    version, command = find_command("sglang", None)
    provenance = study / "provenance.json"
    found: dict[str, Any] = {
        "commit": commit,
        "server": f"sglang {version}",
        "options": [word for word in command.command if word.startswith("--")],
        "space": space.name,
        "calls": lines(folder / "calls.jsonl"),
        "study": json.loads(provenance.read_text(encoding="utf-8")) if provenance.is_file() else None,
        "summary": [summary(each, spans_of.get(each["trial"]), samples) for each in records],
        "front": json.loads((study / "front.json").read_text(encoding="utf-8")) if records else None,
        "launch": launch_text(study / "launch.yaml"),
        "logs": {str(each["trial"]): tail(study, each["trial"]) for each in records if each["failure"] is not None},
        "trials": records,
    }
    for part in ("chaos", "contract"):
        path = folder / f"{part}.json"
        found[part] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    write(out, found)
    written = json.loads(out.read_text(encoding="utf-8"))
    names = (str(folder), str(out.parent), str(commands_file().parent), str(ROOT), str(Path.home()), sys.prefix)
    out.write_text(json.dumps(without_paths(written, names), indent=1) + "\n", encoding="utf-8")


def summary(record: dict[str, Any], span: Span | None, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a trial on one line: what it was, seconds by stage, speed by level, memory, what went wrong."""
    draft = record["config"]["draft"]
    return {
        "trial": record["trial"],
        "role": record["role"],
        "draft": f"{draft['kind']} {draft.get('block_size', '')}".strip(),
        "graphs": record["config"]["graphs"]["kind"],
        "state": record["state"],
        "seconds": {stage: round(seconds, 1) for stage, seconds in record["seconds"].items()},
        "levels": {
            str(level["concurrency"]): {
                name: level["metrics"].get(name)
                for name in ("output_tok_s", "tpot_ms_p50", "ttft_ms_p90", "accept_length")
            }
            for level in record["levels"]
        },
        "parity": record["parity"]
        and {k: record["parity"].get(k) for k in ("verdict", "ties", "beyond", "regret", "bound")},
        "memory": memory_of(span, samples) if span is not None else None,
        "failure": record["failure"] and [record["failure"]["kind"], record["failure"]["stage"]],
    }


def tail(study: Path, trial: int) -> list[str]:
    """Return the end of a trial's server log."""
    path = study / "logs" / f"trial-{trial:04d}.log"
    return path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:] if path.is_file() else []


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("search", "chaos", "contract", "record"))
    parser.add_argument("--space", type=Path, default=SPACE)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="what the parts keep between calls")
    parser.add_argument("--seconds", type=float, default=540.0, help="search: stop between two trials before")
    parser.add_argument("--packed", action="store_true", help="search: trials side by side, where there are GPUs")
    parser.add_argument("--out", type=Path, default=RESULTS / "sglang_gpu.json", help="record: the file to write")
    parser.add_argument("--commit", help="record: the commit, where this copy has no git")
    parser.add_argument(
        "--stranger", nargs=argparse.REMAINDER, help="chaos, last: another program than torch to hold GPU memory"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    find_command("sglang", None)  # says which file to write
    folder = arguments.folder.absolute()
    if arguments.part == "search":
        space = side_by_side(arguments.space, folder) if arguments.packed else arguments.space
        status = search(folder, space, arguments.seconds)
    elif arguments.part == "chaos":
        from benchmarks.sglang_chaos import chaos

        with watched(folder / "memory.jsonl"):
            status = chaos(folder, arguments.space, arguments.stranger)
    elif arguments.part == "contract":
        status = contract(folder)
    else:
        record(folder, arguments.space, arguments.out, arguments.commit)
        status = 0
    raise SystemExit(status)


if __name__ == "__main__":
    main()
