"""On one GPU, over HTTP: this engine beside SGLang, at the shape of Qwen3-8B or (`--pair`) with the bundled pair.

    TUNER_BACKENDS=… python -m benchmarks.gpu_peer [--pair] --json OUT

The shape is synthetic: random weights, forced acceptance; the pair is real, and accepts what it accepts. SGLang's
servers (no speculation, DFLASH blocks of 16 and of 8) start together and stay; ours start one at a time beside them,
and each cell is measured in turns, peer and ours, with the same client and prompts. With the shape, SGLang's
acceptance is forced to 6.0 and 4.5; ours is then set to what SGLang reported in this run. Every cell is quoted twice:
over HTTP (tokens of a level over its time) and decode-only (a request's time per token after its first chunk), since
a prompt costs SGLang much more. An idle server computes nothing on the GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import RESULTS, bundled_prompts, write
from benchmarks.server import serving
from engine import backends
from engine.config import EngineConfig
from tuner.load.client import Client, Endpoint, RequestError
from tuner.load.streams import Completion, read_completion

SHAPES = Path(__file__).parent / "shapes" / "qwen3-8b"
PEER = "SGLang 0.5.17, Triton attention, no FA3, prefill graph off"
SIZES = [1, 2, 4, 8, 16, 32, 48]
KV_TOKENS = 24576
PROMPT_TOKENS, OUTPUT_TOKENS, LONG_PROMPT = 96, 256, 2048
READY_SECONDS = 240.0
STOP_SECONDS = 10.0
SAME = 0.01  # how far our acceptance may be from what the peer reported
TRIES = 4
VERIFY_CALLS = re.compile(r"^sglang:spec_verify_calls_total\S* (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Draft:
    """What both serve: a block size, 0 for none, the acceptance SGLang is forced to, 0 for the draft's own, and the
    loads to measure."""

    block: int
    forced: float
    levels: tuple[int, ...]

    @property
    def name(self) -> str:
        """How the cell is called."""
        return f"block {self.block}" if self.block else "none"


DRAFTS = (Draft(0, 0.0, (1, 48)), Draft(16, 6.0, (1, 8)), Draft(8, 4.5, (48,)))
PAIR_DRAFTS = (Draft(0, 0.0, (1, 48)), Draft(16, 0.0, (1, 48)), Draft(8, 0.0, (1, 48)))


@dataclass(frozen=True)
class Level:
    """One measurement: tokens a second over HTTP, ms a token of a request after its first chunk, tokens a round."""

    tok_s: float
    decode_ms: float
    accept_length: float | None


def config(folder: Path | None, draft: Draft, backend: dict[str, Any], accept: float) -> EngineConfig:
    """Return what both servers are asked for: the shape in `folder`, or the bundled pair."""
    speculation: dict[str, Any] = {"kind": "none"}
    model: dict[str, Any] = {"target": "bundled", "max_len": 1024}
    if draft.block:
        speculation = {"kind": "dflash", "block_size": draft.block}
    if folder is not None:
        model = {"target": str(folder / "target"), "load": "dummy", "max_len": 4096}
        if draft.block:
            speculation |= {"model": str(folder / "draft"), "simulate_accept": accept}
    triton = {"attention": {"backend": "triton"}} if backend["kind"] == "sglang" else {}
    document = {
        "model": model,
        "draft": speculation,
        "graphs": {"kind": "captured", "batch_sizes": SIZES},
        "memory": {"max_running": 48, "kv_tokens": KV_TOKENS, "prefix_cache": False},
        "backend": backend,
    }
    return EngineConfig.model_validate(document | triton)


# ------------------------------------------------------------------------------------------------------- the servers


@contextmanager
def peer(asked: EngineConfig, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start SGLang by the machine's own command; on leaving, SIGTERM, then an end to all of its process group."""
    launch = backends.get(asked).command(asked, Path(os.devnull), "127.0.0.1", port)
    environment = os.environ | dict(launch.env)
    with log.open("wb") as file:
        process = subprocess.Popen(
            launch.argv, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_SECONDS)
        with suppress(ProcessLookupError):  # its own processes would hold the GPU's memory
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def await_health(process: subprocess.Popen[bytes], port: int, log: Path) -> float:
    """Return the seconds until a server answers 200 to /health.

    Raises:
        RuntimeError: it ended first, or took too long; the message holds the end of its log.
    """
    began = time.monotonic()
    while time.monotonic() - began < READY_SECONDS and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=30).status_code == 200:
                return time.monotonic() - began
        except httpx.HTTPError:
            time.sleep(0.5)
    raise RuntimeError(f"SGLang is not ready (exit status {process.poll()}): {log.read_text(errors='replace')[-3000:]}")


# -------------------------------------------------------------------------------------------------------- the client


async def level(port: int, model: str, concurrency: int, requests: int, tokens: int, prompt: int) -> list[Completion]:
    """Return the completions of `concurrency` clients that send `requests` each, one after the other."""
    texts = [(ids * (1 + prompt // len(ids)))[:prompt] for ids in bundled_prompts()]

    async def slot(number: int) -> list[Completion]:
        found = []
        async with Client(Endpoint("127.0.0.1", port)) as client:
            for index in range(requests):
                body = {
                    "model": model,
                    "prompt": texts[(number * requests + index) % len(texts)],
                    "max_tokens": tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                }
                reply = await client.request("POST", "/v1/completions", json.dumps(body).encode())
                completion = read_completion(reply)
                if isinstance(completion, RequestError):
                    raise RuntimeError(str(completion))
                found.append(completion)
        return found

    return [each for slots in await asyncio.gather(*map(slot, range(concurrency))) for each in slots]


def warm_up(port: int, model: str, concurrency: int) -> None:
    """Run a few rounds at a load."""
    asyncio.run(level(port, model, concurrency, 1, 32, PROMPT_TOKENS))


def measure(port: int, model: str, concurrency: int) -> Level:
    """Measure one level, and what the server says it accepted meanwhile."""
    before, began = verify_calls(port), time.perf_counter()
    done = asyncio.run(level(port, model, concurrency, 4 if concurrency == 1 else 2, OUTPUT_TOKENS, PROMPT_TOKENS))
    seconds, after = time.perf_counter() - began, verify_calls(port)
    tokens = sum(each.output_tokens for each in done)
    own = sum(each.last["spec"]["verify_count"] for each in done if "spec" in each.last)
    rounds = after - before if after is not None and before is not None else own
    gaps = [
        (each.arrivals[-1].time - each.arrivals[0].time) / (each.output_tokens - each.arrivals[0].tokens)
        for each in done
        if each.output_tokens > each.arrivals[0].tokens  # else all of it came in one chunk: a busy client reads late
    ]
    return Level(
        tok_s=tokens / seconds,
        decode_ms=1000 * statistics.median(gaps),
        accept_length=tokens / rounds if rounds else None,
    )


def ttft(port: int, model: str, prompt: int) -> float:
    """Return the seconds of a request of one token, alone: its prefill."""
    began = time.perf_counter()
    asyncio.run(level(port, model, 1, 1, 1, prompt))
    return time.perf_counter() - began


def verify_calls(port: int) -> float | None:
    """Return SGLang's count of verify calls, None where there is none."""
    found = VERIFY_CALLS.findall(httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text)
    return sum(map(float, found)) if found else None


# ------------------------------------------------------------------------------------------------------------ a cell


def compare(
    draft: Draft, concurrency: int, theirs: tuple[int, str], folder: Path | None, rounds: int
) -> dict[str, Any]:
    """Measure one cell in turns; ours is started for it with the acceptance that the peer reports first.

    Raises:
        RuntimeError: ours does not come within `SAME` of the peer's acceptance.
    """
    port, model = theirs
    warm_up(port, model, concurrency)
    reported = measure(port, model, concurrency).accept_length if draft.forced else None
    accept = draft.forced  # what the peer was told gives about what it reports; a text has a whole number of rounds
    for _ in range(TRIES):
        asked = config(folder, draft, {"kind": "native"}, accept)
        with serving(asked.model_dump(mode="json", exclude_unset=True)) as server:
            own = server.port, asked.model.target
            warm_up(*own, concurrency)
            got = measure(*own, concurrency).accept_length if reported else None
            if reported and got and abs(got / reported - 1) > SAME:
                accept *= (reported / got) ** 0.5
                print(f"  ours accepts {got:.3f}, the peer {reported:.3f}: again with {accept:.3f}", flush=True)
                continue
            pairs = [(measure(*theirs, concurrency), measure(*own, concurrency)) for _ in range(rounds)]
            prefill = None
            if folder is not None and not draft.block and concurrency == 1:
                for each in (theirs, own):
                    ttft(*each, LONG_PROMPT)
                prefill = [{"peer": ttft(*theirs, LONG_PROMPT), "ours": ttft(*own, LONG_PROMPT)} for _ in range(9)]
            return {
                "draft": draft.name,
                "concurrency": concurrency,
                "ratio_http": statistics.median(mine.tok_s / other.tok_s for other, mine in pairs),
                "ratio_decode_only": statistics.median(other.decode_ms / mine.decode_ms for other, mine in pairs),
                "tok_s": {
                    "ours": statistics.median(mine.tok_s for _, mine in pairs),
                    "peer": statistics.median(other.tok_s for other, _ in pairs),
                },
                "peer_reported_accept": reported,
                "simulate_accept": accept or None,
                "seconds_to_ready": server.seconds_to_ready,
                "peer": [asdict(other) for other, _ in pairs],
                "ours": [asdict(mine) for _, mine in pairs],
                "prefill_2k_seconds": prefill,
            }
    raise RuntimeError(f"ours does not accept what the peer does: {reported:.3f}")


def best_of(cells: Sequence[dict[str, Any]], concurrency: int) -> dict[str, Any]:
    """Return the best draft of each server at a load, and how many times the peer's ours is."""
    level = [cell for cell in cells if cell["concurrency"] == concurrency]
    ours = max(level, key=lambda cell: cell["tok_s"]["ours"])
    theirs = max(level, key=lambda cell: cell["tok_s"]["peer"])
    decode = {
        who: min(statistics.median(each["decode_ms"] for each in cell[who]) for cell in level)
        for who in ("ours", "peer")
    }
    return {
        "ours": {"draft": ours["draft"], "tok_s": ours["tok_s"]["ours"], "decode_ms": decode["ours"]},
        "peer": {"draft": theirs["draft"], "tok_s": theirs["tok_s"]["peer"], "decode_ms": decode["peer"]},
        "ratio_http": ours["tok_s"]["ours"] / theirs["tok_s"]["peer"],
        "ratio_decode_only": decode["peer"] / decode["ours"],
    }


def measure_all(drafts: Sequence[Draft], folder: Path | None, logs: Path, arguments: argparse.Namespace) -> bool:
    """Start the peers, measure every cell, and write the record after each; return whether all were measured."""
    version, _ = backends.find_command("sglang", None)
    began = time.monotonic()
    cells: list[dict[str, Any]] = []
    missed: dict[str, str] = {}

    def keep() -> None:
        record: dict[str, Any] = {"synthetic": folder is not None, "peer": PEER, "prompt_tokens": PROMPT_TOKENS}
        record |= {"output_tokens": OUTPUT_TOKENS, "cells": cells, "not_measured": missed}
        if folder is None:
            record["best"] = {c: best_of(cells, c) for c in sorted({cell["concurrency"] for cell in cells})}
        write(arguments.json, record)

    keep()
    with ExitStack() as running:
        servers = []
        for index, draft in enumerate(drafts):
            asked = config(folder, draft, {"kind": "sglang", "version": version}, draft.forced)
            log, port = logs / f"peer-{index}.log", 31000 + 300 * index
            servers.append((draft, running.enter_context(peer(asked, port, log)), (port, asked.model.target), log))
        for draft, process, theirs, log in servers:
            down: str | None = None
            for concurrency in draft.levels:
                name = f"{draft.name}, {concurrency} at once"
                try:
                    if down or time.monotonic() - began > arguments.seconds:
                        raise RuntimeError(down or "no time left")
                    seconds = await_health(process, theirs[0], log)
                    cell = compare(draft, concurrency, theirs, folder, arguments.rounds)
                except Exception as error:
                    missed[name] = f"{type(error).__name__}: {error}"[-2000:]
                    down = missed[name] if process.poll() is not None or "not ready" in missed[name] else None
                    print(f"{name}: not measured: {missed[name]}", flush=True)
                    keep()
                    continue
                cells.append(cell)
                print(
                    f"{name}: ready after {seconds:.0f} s more; {cell['tok_s']}, {cell['ratio_http']:.2f}× over HTTP, "
                    f"{cell['ratio_decode_only']:.2f}× decode-only; accept {cell['peer_reported_accept']}",
                    flush=True,
                )
                keep()
    return not missed


def main() -> int:
    """Measure every cell that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", action="store_true", help="the bundled pair instead of the shape of Qwen3-8B")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, nargs="+", default=[0, 16, 8], help="cells to measure; 0 is none")
    parser.add_argument("--seconds", type=float, default=480.0, help="no cell begins after so long")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu_peer.json")
    arguments = parser.parse_args()
    for stop in (signal.SIGINT, signal.SIGTERM):  # the peers are to end with us, however the shell started us
        signal.signal(stop, signal.default_int_handler)
    drafts = [each for each in (PAIR_DRAFTS if arguments.pair else DRAFTS) if each.block in arguments.blocks]
    with tempfile.TemporaryDirectory() as logs:
        return 0 if measure_all(drafts, None if arguments.pair else SHAPES, Path(logs), arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
