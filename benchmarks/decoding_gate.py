"""The parity gate against engines with a planted fault, and against healthy ones.

    python -m benchmarks.decoding_gate [faults | tests | healthy] [--seconds 500]

Every fault of `tests/faults` is served with the bundled pair in bfloat16 under the drafts where it can show, and put
through the gate as a search would do it, with the reference of a healthy server. Where the gate sees nothing, the
exactness tests run inside the faulty engine. Healthy servers of many shapes are judged by the texts of eight sets of
prompts. What is done is kept in `.build/decoding_gate.json`, so that a run of bounded length goes on where the last
one stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.server import Running, serving
from engine.backends import Native
from engine.config import EngineConfig
from tests.faults.catalogue import FAULTS
from tests.faults.fault import VARIABLE, Fault, Need, Setting
from tuner.load.client import Endpoint
from tuner.load.workload import make_requests
from tuner.parity import Server, Unanswered, judge, take_reference
from tuner.provenance import git_state
from tuner.records import Workload
from tuner.reference import Parity, Reference
from tuner.store import write_atomic

STATE = ROOT / ".build" / "decoding_gate.json"
NAME = "bundled"
DTYPE = "bfloat16"
PROMPT_SETS = 8
HEALTHY = "no fault"  # what the exactness tests say of an engine without one
CHAIN = {"kind": "dflash", "block_size": 8}
TREE = {"kind": "ddtree", "block_size": 8, "nodes": 15}
DRAFTS: dict[Setting, dict[str, Any]] = {
    Setting.DFLASH: CHAIN,
    Setting.DDTREE: TREE,
    Setting.POLICY: {"kind": "policy", "by_running": [[1, 3, CHAIN], [4, 5, {"kind": "none"}], [6, None, TREE]]},
    Setting.NONE: {"kind": "none"},
}
TESTS = (
    "tests/engine/test_verify.py",
    "tests/engine/test_tree.py",
    "tests/engine/test_kv_cache.py",
    "tests/engine/test_drafting.py",
    "tests/engine/test_scoring.py",
    "tests/engine/test_model.py",
    "tests/engine/test_speculate.py",
    "tests/engine/test_policy.py",
    "tests/engine/test_stops.py",
    "tests/engine/test_exactness.py",
    "tests/engine/test_sampling.py",
    "tests/engine/test_text.py",
    "tests/engine/test_server_real.py",
)

State = dict[str, dict[str, Any]]


def config_of(draft: dict[str, Any], **memory: Any) -> dict[str, Any]:
    """Return a config of the bundled pair."""
    return {"model": {"target": NAME, "dtype": DTYPE}, "draft": draft, "memory": {"max_running": 16} | memory}


def server_of(running: Running) -> Server:
    """Return a running server as the gate asks it."""
    return Server(Endpoint("127.0.0.1", running.port), Native(), NAME, 120.0)


@functools.cache
def reference(prompts: int) -> Reference:
    """Return the reference of a healthy server on a set of prompts."""
    return references((prompts,))[0]


def references(sets: Sequence[int], program: Sequence[str] = ("engine",)) -> list[Reference]:
    """Return what the server without speculation says to these sets of prompts.

    Raises:
        AssertionError: it contradicts itself.
    """
    found = []
    with serving(config_of({"kind": "none"}), program) as running:
        for number in sets:
            requests = make_requests(Workload(), NAME, seed=number)
            taken = asyncio.run(take_reference(server_of(running), requests, DTYPE))
            assert isinstance(taken, Reference), taken.why
            found.append(taken)
    return found


def judged(running: Running, config: dict[str, Any], by: Reference) -> dict[str, Any]:
    """Return what the gate says of a running server."""
    began = time.monotonic()
    try:
        parity, kind = asyncio.run(judge(server_of(running), by, EngineConfig.model_validate(config), DTYPE))
    except Unanswered as error:
        parity, kind = Parity(verdict="failed", why=(str(error),)), error.kind or "crashed"
    figures = parity.model_dump(exclude={"own"})
    return {"kind": kind, "seconds": round(time.monotonic() - began, 2)} | figures


# ------------------------------------------------------------------------------------------------- faults


def fault_by_gate(fault: Fault) -> dict[str, Any]:
    """Serve a fault under every draft where it can show; return what the gate says of each."""
    found = {}
    for setting in fault.settings:
        draft = DRAFTS[setting]
        if Need.DRAWN_DRAFTS in fault.needs and "block_size" in draft:
            draft = draft | {"sample": "probabilistic"}
        config = config_of(draft, prefill_chunk=64 if Need.CHUNKED in fault.needs else None)
        with serving(config, ("tests.faults", fault.name)) as running:
            found[setting.value] = judged(running, config, reference(0))
    return {"caught": any(each["kind"] for each in found.values()), "by_draft": found}


def fault_by_tests(fault: Fault | None) -> dict[str, Any]:
    """Run the exactness tests inside a faulty engine, or a healthy one; return the first that fails."""
    plugin, named = ([], {}) if fault is None else (["-p", "benchmarks.faulty"], {VARIABLE: fault.name})
    command = [sys.executable, "-m", "pytest", "-x", "-q", *plugin, "-p", "no:cacheprovider", *TESTS]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=os.environ | named, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
    by = failed[0].split(" - ")[0].removeprefix("FAILED ") if failed else None
    return {"caught": done.returncode == 1, "by": by, "seconds": round(time.monotonic() - began, 1)}


# ------------------------------------------------------------------------------------------------- healthy runs


def healthy_configs() -> list[dict[str, Any]]:
    """Return 25 servers: every kind of draft, blocks, depths, nodes, widths; batch shapes, chunks and pages."""
    drafts: list[dict[str, Any]] = [{"kind": "none"}] * 3
    drafts += [
        {"kind": "dflash", "block_size": block, "layers": layers}
        for block, layers in ((2, 4), (4, 1), (4, 4), (6, 2), (8, 3), (8, 4), (12, 2), (12, 4), (16, 1), (16, 4))
    ]
    drafts += [
        {"kind": "ddtree", "block_size": block, "nodes": nodes, "layers": layers, "width": width}
        for block, nodes, layers, width in (
            (4, 7, 4, None),
            (8, 7, 2, None),
            (8, 15, 4, 2),
            (8, 31, 3, None),
            (12, 31, 4, 4),
            (16, 15, 4, 1),
            (16, 31, 1, None),
            (16, 63, 4, None),
        )
    ]
    drafts += [{"kind": "ddtree", "block_size": 16, "nodes": "auto"}, DRAFTS[Setting.POLICY]]
    drafts += [{"kind": "policy", "by_running": [[1, 8, {"kind": "none"}], [9, None, CHAIN]]}, CHAIN]
    shapes = itertools.cycle(
        [
            {},
            {"prefill_chunk": 64},
            {"max_running": 5},
            {"prefill_chunk": 200, "page_size": 16},
            {"max_running": 32, "page_size": 64},
            {"prefill_chunk": 2048, "max_running": 9},
            {"prefill_chunk": 33, "max_running": 3},
        ]
    )
    return [config_of(draft, **shape) for draft, shape in zip(drafts, shapes, strict=False)]


def healthy_run(config: dict[str, Any]) -> dict[str, Any]:
    """Judge one healthy server by every set of prompts."""
    by = _every_reference()
    with serving(config) as running:
        return {"config": config, "runs": [judged(running, config, each) for each in by]}


@functools.cache
def _every_reference() -> list[Reference]:
    return references(range(PROMPT_SETS))


# ------------------------------------------------------------------------------------------------- bookkeeping


def work(state: State) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """Yield what is not done yet: part, name, and how to do it."""
    for fault in FAULTS.values():
        if fault.name not in state["faults"]:
            yield "faults", fault.name, functools.partial(fault_by_gate, fault)
    for fault in FAULTS.values():
        if fault.name not in state["tests"] and not state["faults"].get(fault.name, {"caught": True})["caught"]:
            yield "tests", fault.name, functools.partial(fault_by_tests, fault)
    if HEALTHY not in state["tests"]:
        yield "tests", HEALTHY, functools.partial(fault_by_tests, None)
    for number, config in enumerate(healthy_configs()):
        if str(number) not in state["healthy"]:
            yield "healthy", str(number), functools.partial(healthy_run, config)


def advance(part: str | None, seconds: float, path: Path = STATE) -> State:
    """Do what is left of a part, or of all, for so long; return all that is known.

    The parts may be worked at by several processes at once, one a part.
    """
    end = time.monotonic() + seconds
    state = known(path)
    for kind, name, do in work(state):
        if part not in (None, kind):
            continue
        if time.monotonic() > end:
            break
        found = do() | {"commit": (git_state(ROOT) or {}).get("commit")}
        print(f"{kind} {name}: {summary(kind, found)}", flush=True)
        state[kind][name] = found
        current = known(path)
        current[kind][name] = found
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(current, indent=1) + "\n")
    return known(path)


def known(path: Path) -> State:
    """Return what is known so far."""
    empty: State = {"faults": {}, "tests": {}, "healthy": {}}
    return empty | json.loads(path.read_text()) if path.is_file() else empty


def summary(part: str, found: dict[str, Any]) -> str:
    """Return one line about a finding."""
    if part == "healthy":
        return ", ".join(str(run["kind"] or f"{run['regret']:.3g}/{run['ties']}") for run in found["runs"])
    if part == "faults":
        return ", ".join(f"{draft} {each['kind']}" for draft, each in found["by_draft"].items())
    return str(found["by"])


def gate_step() -> dict[str, Any]:
    """Gate and exactness tests against every fault, and the gate against healthy bfloat16 servers: a proof's step."""
    state = advance(None, 4 * 3600)
    by_gate = [name for name, found in state["faults"].items() if found["caught"]]
    control = state["tests"].pop(HEALTHY)
    by_tests = {name: found["by"] for name, found in state["tests"].items() if found["caught"]}
    missed = sorted(set(FAULTS) - {*by_gate, *by_tests})
    runs = [run for found in state["healthy"].values() for run in found["runs"]]
    alarms = [run["why"] for run in runs if run["kind"] is not None]
    assert not control["caught"], f"without a fault {control['by']} fails"
    assert len(FAULTS) >= 30, f"{len(FAULTS)} faults"
    assert not missed, f"neither gate nor tests catch {', '.join(missed)}"
    assert len(runs) >= 200, f"{len(runs)} healthy runs"
    assert not alarms, f"{len(alarms)} of {len(runs)} healthy runs raise an alarm: {alarms[:3]}"
    return {
        "faults": len(FAULTS),
        "caught": len(FAULTS) - len(missed),
        "by_gate": {name: _kinds(state["faults"][name]) for name in by_gate},
        "by_tests": by_tests,
        "healthy_runs": len(runs),
        "alarms": len(alarms),
        "worst_healthy_regret": max(run["regret"] for run in runs),
        "ties": sum(run["ties"] for run in runs),
        "positions": sum(run["positions"] for run in runs),
        "bound": max(run["bound"] for run in runs),
        "mean_gate_seconds": round(sum(run["seconds"] for run in runs) / len(runs), 2),
        "commits": sorted({str(found.get("commit", "not kept")) for part in state.values() for found in part.values()}),
    }


def _kinds(found: dict[str, Any]) -> dict[str, str | None]:
    return {draft: each["kind"] for draft, each in found["by_draft"].items()}


def main() -> int:
    """Do a bounded piece of the work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["faults", "tests", "healthy"])
    parser.add_argument("--seconds", type=float, default=500.0, help="begin nothing after so long")
    arguments = parser.parse_args()
    advance(arguments.part, arguments.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
