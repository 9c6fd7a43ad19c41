"""A short search on a GPU in which things are killed and a stranger takes memory: what is left, and what is refused.

Trial 0 loses its server under load (kill -9), trial 1 its worker; while trial 2 is measured a process that is not
ours takes GPU memory and keeps it. Each must be told as what it is; processes, port and memory must come back where
they can, and the GPU must stay shut, by quarantine and to leases, until the stranger is gone.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.common import ROOT
from benchmarks.sglang_gpu import lines
from tests.waiting import alive as lives
from tuner.leases import NotLeased, held_locks, lease, runtime_folder
from tuner.machine import look_at_gpus
from tuner.quarantine import SLACK_MIB, shut_gpus
from tuner.records import LeaseRequest
from tuner.supervise import is_watchdog, marked, port_free

TRIALS = 3
WINDOW = "15s"
CONCURRENCY = 4
INTO_LOAD = 4.0  # seconds after a level began: requests are under way
EVENT_SECONDS = 400.0  # a first launch compiles kernels
GONE_SECONDS = 60.0
END_SECONDS = 500.0
LEASE_SECONDS = 40.0  # beyond the patience with strangers
STRANGER = (
    sys.executable,
    "-c",
    "import sys, torch\n"
    "held = torch.ones(2 * 2**30, dtype=torch.uint8, device='cuda')\n"
    "torch.cuda.synchronize()\n"
    "print('held', flush=True)\n"
    "sys.stdin.read()\n",
)


@dataclass(frozen=True)
class Tree:
    """What one trial runs: its worker, its server's first process, that server's port, and every pid below."""

    worker: int
    server: int
    port: int
    pids: tuple[int, ...]


def chaos(folder: Path, space: Path, stranger: Sequence[str] | None = None) -> int:
    """Run it all and write chaos.json; return 0 when everything held."""
    work = folder / "chaos"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    path = work / "space.yaml"
    path.write_text(yaml.safe_dump(shortened(space), sort_keys=False), encoding="utf-8")
    study = work / "results" / "chaos"
    command = [sys.executable, "-m", "tuner", "search", str(path), "--results", str(study.parent), "--yes"]
    idle = used()
    found: dict[str, Any] = {"before_mib": idle, "kills": []}
    with (work / "search.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            for trial, victim in enumerate(("server", "worker")):
                found["kills"].append(killed(process.pid, study, trial, victim, idle))
            found["stranger"] = with_stranger(process, study, stranger or STRANGER)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.wait(END_SECONDS)
    found["orphans"] = sorted(pid for pid, mark in marked().items() if mark.startswith(f"/{process.pid}-"))
    found["locks_held"] = [lock.name for lock in held_locks() if "chaos" in lock.holder]
    found["after_mib"] = used()
    found["trials"] = [
        {"trial": record["trial"], "state": record["state"], "failure": record["failure"], "seconds": record["seconds"]}
        for record in lines(study / "trials.jsonl")
    ]
    found["broken"] = broken(found)
    (folder / "chaos.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(json.dumps(found, indent=1))
    return 1 if found["broken"] else 0


def shortened(space: Path) -> dict[str, Any]:
    """Return the space as a search of a few trials with one long level each."""
    document: dict[str, Any] = yaml.safe_load(space.read_text(encoding="utf-8"))
    document["study"] = {"name": "chaos", "seed": 0, "budget": {"trials": TRIALS}}
    document["workload"] |= {"concurrency": [CONCURRENCY], "window": WINDOW}
    document["objectives"] = [
        {"metric": "tpot_ms_p50", "goal": "min", "at": CONCURRENCY},
        {"metric": "output_tok_s", "goal": "max", "at": CONCURRENCY},
    ]
    document["pick"] = {"load": CONCURRENCY}
    document["executor"] |= {"kind": "local"}
    document.pop("constraints", None)
    return document


# ----------------------------------------------------------------------------------------------------- the kills


def killed(tuner: int, study: Path, trial: int, victim: str, idle: dict[str, int]) -> dict[str, Any]:
    """Kill a trial's server or worker under load with SIGKILL; return what came of it."""
    under_load(study, trial)
    tree = tree_of(tuner)
    memory = used()
    began = time.monotonic()
    os.kill(tree.server if victim == "server" else tree.worker, signal.SIGKILL)
    gone_s = seconds_until(lambda: not alive(tree.pids), began)
    back_s = seconds_until(lambda: not_above(used(), idle), began)
    record = awaited(lambda: record_of(study, trial), EVENT_SECONDS, f"the record of trial {trial}")
    return {
        "victim": victim,
        "trial": trial,
        "processes": len(tree.pids),
        "gone_s": gone_s,
        "left": alive(tree.pids),
        "port_free": port_free(tree.port),
        "memory_under_load_mib": memory,
        "memory_back_s": back_s,
        "failure": record["failure"] and {key: record["failure"][key] for key in ("kind", "stage", "evidence")},
    }


def under_load(study: Path, trial: int) -> None:
    """Wait until a trial's level has been under way for a few seconds."""

    def loading() -> bool:
        return any(
            event["trial"] == trial and event["kind"] == "begin" and event.get("level") is not None
            for event in lines(study / "events.jsonl")
        )

    awaited(loading, EVENT_SECONDS, f"load on trial {trial}")
    time.sleep(INTO_LOAD)


def tree_of(tuner: int) -> Tree:
    """Return the processes of the trial that the search now runs."""
    below = psutil.Process(tuner).children(recursive=True)
    worker = next(process for process in below if "tuner.worker" in words_of(process) and not is_watchdog(process.pid))
    servers = [
        process
        for process in worker.children(recursive=True)
        if "--served-model-name" in words_of(process) and not is_watchdog(process.pid)
    ]
    server = min(servers, key=lambda process: process.create_time())
    words = words_of(server)
    pids = [worker.pid, *(process.pid for process in worker.children(recursive=True))]
    return Tree(worker.pid, server.pid, int(words[words.index("--port") + 1]), tuple(pids))


def words_of(process: psutil.Process) -> list[str]:
    """Return a process's arguments, none when it has just ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


# --------------------------------------------------------------------------------------------------- a stranger


def with_stranger(search: subprocess.Popen[bytes], study: Path, command: Sequence[str]) -> dict[str, Any]:
    """Let a stranger take memory while the last trial is measured; return how the GPU was shut and opened."""
    under_load(study, TRIALS - 1)
    stranger = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        said = stranger.stdout.readline().strip() if stranger.stdout else ""
        memory = used()
        status = search.wait(END_SECONDS)
        notes = [note.reason for note in shut_gpus(runtime_folder())]
        shut = asked_for_lease()
    finally:
        stranger.kill()
        stranger.wait()
    opened = asked_for_lease()
    left = [note.reason for note in shut_gpus(runtime_folder())]
    again = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        if again.stdout:
            again.stdout.readline()
        unquarantined = asked_for_lease()
    finally:
        again.kill()
        again.wait()
    return {
        "said": said,
        "memory_beside_the_trial_mib": memory,
        "search_status": status,
        "quarantine_notes": notes,
        "lease_while_shut": shut,
        "lease_when_it_had_gone": opened,
        "notes_when_it_had_gone": left,
        "lease_beside_a_stranger": unquarantined,
        "lease_after_all": asked_for_lease(),
    }


def asked_for_lease() -> dict[str, Any]:
    """Ask for a lease of every visible GPU; return what came of it, and after how many seconds."""

    async def ask() -> dict[str, Any]:
        async with lease(LeaseRequest(gpus=len(look_at_gpus().gpus)), "chaos probe", LEASE_SECONDS) as held:
            return {"leased": len(held.gpus)}

    began = time.monotonic()
    try:
        found = asyncio.run(ask())
    except NotLeased as error:
        found = {"leased": 0, "kind": error.kind, "why": str(error), "evidence": list(error.evidence)}
    return found | {"seconds": round(time.monotonic() - began, 1)}


def broken(found: dict[str, Any]) -> list[str]:
    """Return what did not hold."""
    wrong = []
    for kill in found["kills"]:
        failure = kill["failure"] or {}
        if (failure.get("kind"), failure.get("stage")) != ("crashed", "load"):
            wrong.append(f"{kill['victim']}: told as {failure}")
        if kill["left"] or kill["gone_s"] is None:
            wrong.append(f"{kill['victim']}: still alive {kill['left']}")
        if not kill["port_free"] or kill["memory_back_s"] is None:
            wrong.append(f"{kill['victim']}: port or memory did not come back")
    stranger = found["stranger"]
    last = found["trials"][TRIALS - 1] if len(found["trials"]) >= TRIALS else {"failure": None}
    if not stranger["quarantine_notes"] or (last["failure"] or {}).get("stage") != "stop":
        wrong.append("the GPU was not quarantined")
    for name in ("lease_while_shut", "lease_beside_a_stranger"):
        if stranger[name].get("kind") != "foreign_gpu_process":
            wrong.append(f"{name}: {stranger[name]}")
    if stranger["notes_when_it_had_gone"]:
        wrong.append("the quarantine outlived its cause")
    wrong += [name for name in ("lease_when_it_had_gone", "lease_after_all") if not stranger[name]["leased"]]
    if found["orphans"] or found["locks_held"]:
        wrong.append(f"left: processes {found['orphans']}, locks {found['locks_held']}")
    return wrong


# ------------------------------------------------------------------------------------------------------- looking


def awaited(look: Callable[[], Any], seconds: float, what: str) -> Any:
    """Look until there is something, and return it.

    Raises:
        TimeoutError: there is nothing in time.
    """
    deadline = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.1)
    return found


def seconds_until(look: Callable[[], bool], began: float) -> float | None:
    """Return the seconds since `began` at which something holds; None when it does not."""
    try:
        awaited(look, GONE_SECONDS, "")
    except TimeoutError:
        return None
    return round(time.monotonic() - began, 2)


def record_of(study: Path, trial: int) -> dict[str, Any] | None:
    """Return a trial's record once it is written."""
    return next((record for record in lines(study / "trials.jsonl") if record["trial"] == trial), None)


def used() -> dict[str, int]:
    """Return the MiB in use by GPU index."""
    return {str(gpu.index): gpu.memory_used for gpu in look_at_gpus().gpus}


def not_above(now: dict[str, int], before: dict[str, int]) -> bool:
    """Whether memory is back at what it was, but for the driver's own share."""
    return all(mib <= before[gpu] + SLACK_MIB for gpu, mib in now.items())


def alive(pids: Sequence[int]) -> list[int]:
    """Return the processes that still live; a zombie does not."""
    return [pid for pid in pids if lives(pid)]
