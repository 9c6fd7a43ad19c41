"""Over HTTP on a CPU: this engine against SGLang's CPU server on the same target, alternating, with one client.

SGLang is found in the machine-local backends file ($TUNER_BACKENDS or ~/.config/tuner/backends.yaml). Only one
server runs at a time (SGLang's idle process keeps a core busy); the servers take turns for several rounds, so a
machine that drifts meets them all. Every request streams; tokens come from `usage`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import RESULTS, bundled_prompts, write
from benchmarks.server import serving
from engine.backends import find_command
from engine.config import EngineConfig, target_folder
from tuner.load.client import Client, Endpoint, RequestError
from tuner.load.streams import read_completion

READY_SECONDS = 180.0
Server = Callable[[], AbstractContextManager[tuple[int, str]]]  # yields port and served model name


@contextmanager
def ours(target: str, draft: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Serve with this engine."""
    with serving({"model": {"target": target}, "draft": draft}) as server:
        yield server.port, target


@contextmanager
def sglang(folder: Path) -> Iterator[tuple[int, str]]:
    """Serve with SGLang, by the machine's own command; its process group is ended on leaving."""
    _, command = find_command("sglang", None)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    argv = [*command.command, "--model-path", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(
        argv, env=os.environ | command.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SGLang did not become ready (exit status {process.poll()})")
            time.sleep(0.5)
        yield port, str(folder)
    finally:
        process.terminate()
        process.wait(timeout=60)


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=30).status_code == 200
    except httpx.HTTPError:
        return False


async def load(
    port: int,
    model: str,
    concurrency: int,
    requests: int,
    output_tokens: int,
    prompts: Sequence[Sequence[int]] | None = None,
) -> float:
    """Return output tokens a second of `concurrency` clients that send `requests` each, one after the other.

    `prompts`: token ids, taken in turn; the bundled ones when None.
    """
    prompts = prompts or bundled_prompts()

    async def one(client: Client, index: int) -> int:
        prompt = list(prompts[index % len(prompts)])
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        completion = read_completion(await client.request("POST", "/v1/completions", json.dumps(body).encode()))
        if isinstance(completion, RequestError):
            raise RuntimeError(str(completion))
        return completion.output_tokens

    async def slot(number: int) -> int:
        async with Client(Endpoint("127.0.0.1", port)) as client:
            return sum([await one(client, number * requests + i) for i in range(requests)])

    began = time.perf_counter()
    tokens = await asyncio.gather(*(slot(number) for number in range(concurrency)))
    return sum(tokens) / (time.perf_counter() - began)


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=6, help="of each client in each round")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=RESULTS / "http_decode.json")
    arguments = parser.parse_args()
    folder = target_folder(EngineConfig.model_validate({"model": {"target": arguments.target}}))
    servers: dict[str, Server] = {"none": lambda: ours(arguments.target, {"kind": "none"})}
    for block in arguments.blocks:
        draft = {"kind": "dflash", "block_size": block, "model": arguments.drafter}
        servers[f"dflash {block}"] = lambda draft=draft: ours(arguments.target, draft)  # type: ignore[misc]
    version, _ = find_command("sglang", None)
    peer = f"sglang {version} cpu"
    servers[peer] = lambda: sglang(folder)
    results: dict[str, dict[int, list[float]]] = {name: {c: [] for c in arguments.concurrency} for name in servers}
    for _ in range(arguments.rounds):
        for name, server in servers.items():
            with server() as (port, model):
                asyncio.run(load(port, model, max(arguments.concurrency), 1, 16))
                for concurrency in arguments.concurrency:
                    speed = asyncio.run(load(port, model, concurrency, arguments.requests, arguments.output_tokens))
                    results[name][concurrency].append(speed)
                    print(f"{name:20} c={concurrency}: {speed:7.0f} tok/s", flush=True)
    medians = {name: {c: statistics.median(runs) for c, runs in levels.items()} for name, levels in results.items()}
    ratios = {}
    for concurrency in arguments.concurrency:
        best = max((name for name in medians if name != peer), key=lambda name: medians[name][concurrency])
        value = medians[best][concurrency] / medians[peer][concurrency]
        ratios[f"c={concurrency}"] = {"best": best, "against": peer, "ratio": value}
        print(f"c={concurrency}: {best} is {value:.2f}× {peer}")
    write(
        arguments.out,
        {"output_tokens": arguments.output_tokens, "tok_s": results, "medians": medians, "ratios": ratios},
    )


if __name__ == "__main__":
    main()
