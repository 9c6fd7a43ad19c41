"""The load generator's proof: its error against an exact server, its CPU, other clients, and what intervals hold."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, write
from benchmarks.load_error import TOKENS, Case, errors_of_averages, measure, row
from benchmarks.load_simulation import MEANS, ORDERED, POOLED, RATIOS, WORLDS, World, coverage, shares, truths
from engine.backends import find_command
from engine.errors import EngineError
from tests.exact_server.run import Schedule, exact

COMMITTED_SEED = 20261129
TRUTH_SEED = 7
RUNS = 4000
TOK_S, TPOT, TTFT_MS, TOK_S_AT_128 = 0.01, 0.01, 1.0, 0.02
CPU_SHARE = 0.5
PEER_SECONDS = 200
WORST = ("token_error", "tok_s", "tpot", "ttft_ms", "stamp_ms_p99")  # the largest of each goes into the proof


def _ours(streams: tuple[int, ...], bound: float, name: str) -> dict[str, Any]:
    """Measure ours at every chunk size, write the rows, and check them."""
    rows, misses = [], []
    for count in streams:
        for lo, hi in TOKENS:
            found = measure(Case("ours", count, lo, hi))
            assert found is not None
            rows.append(found)
            print("  " + row(found), flush=True)
            cell = f"{count} streams, {found['tokens_per_chunk']} tokens a chunk"
            if found["token_error"] or found["missing"]:
                misses.append(f"{cell}: {found['token_error']:+d} tokens, {found['missing']} requests missing")
            if abs(found["tok_s"]) > bound:
                misses.append(f"{cell}: tok/s {found['tok_s']:+.2%}")
            if abs(found["tpot"]) > bound:
                misses.append(f"{cell}: TPOT {found['tpot']:+.2%}")
            if count < 128 and abs(found["ttft_ms"]) > TTFT_MS:
                misses.append(f"{cell}: TTFT {found['ttft_ms']:+.2f} ms")
    write(RESULTS / f"{name}.json", {"rows": rows})
    assert not misses, "; ".join(misses)
    return {"cells": len(rows), **{key: max(abs(found[key]) for found in rows) for key in WORST}}


def error() -> dict[str, Any]:
    """1, 16 and 64 streams: tokens exact, tok/s and TPOT within 1 %, TTFT within 1 ms."""
    return _ours((1, 16, 64), TOK_S, "load_error")


def error_at_128() -> dict[str, Any]:
    """128 streams, 12,800 chunks a second: within 2 %."""
    return _ours((128,), TOK_S_AT_128, "load_error_128")


def peers() -> dict[str, Any]:
    """httpx and aiohttp under the same load, for the table; no claim."""
    rows, absent = [], []
    for client in ("aiohttp", "aiohttp+uvloop", "httpx"):
        for count in (1, 16, 64, 128):
            found = measure(Case(client, count, 1, 16, 2))
            if found is None:
                absent.append(client)
                break
            rows.append(found)
            print("  " + row(found), flush=True)
    write(RESULTS / "load_peers.json", {"rows": rows})
    return {"rows": rows, "absent": absent}


def cpu() -> dict[str, Any]:
    """CPU seconds per million tokens, answers read: at most half of aiohttp's, runs interleaved."""
    cases = [(16, 1, 16), (64, 1, 1), (64, 1, 16), (128, 1, 16)]
    figures: dict[str, Any] = {}
    ratios = []
    for count, lo, hi in cases:
        spent: dict[str, list[float]] = {}
        for _ in range(3):
            for client in ("ours", "aiohttp", "aiohttp+uvloop"):
                found = measure(Case(client, count, lo, hi, 2))
                assert found is not None, "aiohttp is not listed in the backends file"
                spent.setdefault(client, []).append(found["cpu_s_per_mtok"])
        least = {client: round(min(values), 2) for client, values in spent.items()}
        ratio = least["ours"] / least["aiohttp"]
        ratios.append(ratio)
        figures[f"{count} streams, {lo}-{hi} tokens a chunk"] = least | {
            "of_aiohttp": round(ratio, 3),
            "of_aiohttp_on_uvloop": round(least["ours"] / least["aiohttp+uvloop"], 3),
        }
        print(f"  {count} streams, {lo}-{hi}: {least}", flush=True)
    assert max(ratios) <= CPU_SHARE, f"{max(ratios):.2f} of aiohttp's: {json.dumps(figures)}"
    return figures


# ------------------------------------------------------------------------------------------------------- programs


def _program(name: str) -> tuple[str, list[str]] | None:
    try:
        version, command = find_command(name, None)
    except EngineError:
        return None
    return version, list(command.command)


def programs() -> dict[str, Any]:
    """AIPerf and GuideLLM, where they are installed: what they report against the averages of the server's log."""
    figures: dict[str, Any] = {}
    for name, run in (("aiperf", _aiperf), ("guidellm", _guidellm)):
        found = _program(name)
        if found is None:
            figures[name] = "not listed in the backends file"
            continue
        version, command = found
        for streams in (16, 64):
            with exact(Schedule(4, 4)) as server, tempfile.TemporaryDirectory() as folder:
                began = time.monotonic()
                said = run(command, server.port, streams, Path(folder))
                outcome = said if isinstance(said, str) else errors_of_averages(said, streams, server.log())
                figures[f"{name} {version}, {streams} streams"] = outcome
                print(f"  {name} {streams}: {outcome} in {time.monotonic() - began:.0f} s", flush=True)
    return figures


def _call(command: list[str], folder: Path) -> str | None:
    """Run a program; return what is wrong, None when it went well."""
    environment = os.environ | {"COLUMNS": "200"}
    with (folder / "output.txt").open("w+") as out:
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, stdout=out, stderr=out, timeout=PEER_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return f"not over after {PEER_SECONDS} s"
        out.seek(0)
        return None if done.returncode == 0 else f"ended with {done.returncode}: {out.read()[-400:]}"


TOKENIZER = ROOT / "engine" / "pair" / "target"


def _aiperf(command: list[str], port: int, streams: int, folder: Path) -> dict[str, float] | str:
    options = {
        "--model": "exact",
        "--url": f"http://127.0.0.1:{port}",
        "--endpoint-type": "chat",
        "--concurrency": streams,
        "--request-count": 4 * streams,
        "--warmup-request-count": streams,
        "--tokenizer": TOKENIZER,
        "--synthetic-input-tokens-mean": 32,
        "--output-tokens-mean": 400,
        "--extra-inputs": "max_tokens:400",
        "--artifact-dir": folder / "aiperf",
        "--ui": "none",
    }
    words = [str(word) for pair in options.items() for word in pair]
    if (problem := _call([*command, "profile", *words, "--streaming", "--use-server-token-count"], folder)) is not None:
        return problem
    document = json.loads(next((folder / "aiperf").rglob("profile_export_aiperf.json")).read_text())
    return {
        "ttft_ms": document["time_to_first_token"]["avg"],
        "tpot_ms": document["inter_token_latency"]["avg"],
        "tok_s": document["output_token_throughput"]["avg"],
    }


def _guidellm(command: list[str], port: int, streams: int, folder: Path) -> dict[str, float] | str:
    words = [
        *("--backend", f"kind=openai_http,target=http://127.0.0.1:{port},model=exact"),
        *("--profile", f"kind=concurrent,streams={streams}"),
        *("--constraint", f"kind=max_requests,count={4 * streams}"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=400"),
        *("--output", f"kind=json,path={folder / 'guidellm.json'}"),
        "--disable-console-interactive",
    ]
    if (problem := _call([*command, "run", *words], folder)) is not None:
        return problem
    metrics = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["metrics"]
    return {
        "ttft_ms": metrics["time_to_first_token_ms"]["successful"]["mean"],
        "tpot_ms": metrics["inter_token_latency_ms"]["successful"]["mean"],
        "tok_s": metrics["output_tokens_per_second"]["successful"]["mean"],
    }


# ------------------------------------------------------------------------------------------------------- coverage


def _world(seed: int, runs: int, world: World) -> dict[str, Any]:
    """Return the coverage in one world: of each class of intervals, and its extremes among single metrics."""
    counts = coverage(world, truths(world, TRUTH_SEED), runs, seed)
    classes = {"means and ratios": (*MEANS, *RATIOS), "order statistics": (*ORDERED, *POOLED)}
    result: dict[str, Any] = {}
    for name, metrics in classes.items():
        single = shares(metrics, counts)
        held = sum(counts[metric][0] for metric in single)
        made = sum(counts[metric][1] for metric in single)
        result[name] = {
            "covered": round(held / made, 4),
            "intervals": made,
            "metrics": {m: round(s, 4) for m, s in single.items()},
        }
    return result


def _coverage(seed: int, runs: int = RUNS) -> dict[str, Any]:
    with ProcessPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        results = dict(zip((w.name for w in WORLDS), pool.map(partial(_world, seed, runs), WORLDS), strict=True))
    outside, misses = [], []
    for world, classes in results.items():
        for name, found in classes.items():
            low, high = (0.94, 0.96) if name == "means and ratios" else (0.94, 0.99)
            outside += [f"{world}: {m} {s:.2%}" for m, s in found["metrics"].items() if not low <= s <= high]
            if not low <= found["covered"] <= high:
                misses.append(f"{world}: {name} {found['covered']:.2%}")
    figures = {"seed": seed, "runs_per_world": runs, "single_metrics_outside": outside, "worlds": results}
    assert not misses, "; ".join(misses) + f"; {json.dumps(figures)}"
    return figures


def coverage_committed() -> dict[str, Any]:
    """4,000 runs of each world from the committed seed: 94–96 % of means' and ratios', 94–99 % of order statistics'."""
    return _coverage(COMMITTED_SEED)


def coverage_fresh() -> dict[str, Any]:
    """The same from a seed that nobody has seen."""
    return _coverage(secrets.randbits(48))


STEPS: dict[str, Callable[[], dict[str, Any]]] = {
    "error": error,
    "error_at_128": error_at_128,
    "cpu": cpu,
    "peers": peers,
    "programs": programs,
    "coverage_committed": coverage_committed,
    "coverage_fresh": coverage_fresh,
}
