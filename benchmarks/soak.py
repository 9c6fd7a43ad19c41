"""Mixed load for minutes: no page and no memory leaks, and no text changes.

    python -m benchmarks.soak --seconds 540 [--captured] --json OUT

Requests of random lengths, temperatures and limits come and go, some are cancelled at random moments, and the draft is
swapped between rounds. Every wave ends with an idle engine: all pages must be free, and once the process is warm it
and the device may hold no more memory than a margin above what they held then. Warm means: all of the cache has been
written once (a host's pages come when they are first touched), and every kind of wave has come twice. A few kinds
take turns because a CPU's libraries keep kernels for every new number of rows: under ever new lengths the process
grows for many minutes without a leak, under known ones it stays as it is. A greedy prompt is served alone after every
wave: its text never changes. The record is written with every wave that is shown, so whoever ends this keeps it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.common import RESULTS, bundled_prompts, write
from engine.bench import run_requests
from engine.config import DFlashDraft, Draft, EngineConfig, NoDraft
from engine.device.build import DeviceRuntime
from engine.request import Request, Sampling
from engine.runtime import resolve
from engine.start import AnyLoop, AnyRuntime, build_any, loop_of

WAVE = 60  # requests
KINDS = 3  # of waves, which take turns
MARGIN = 64 * 2**20  # bytes that memory may grow by once it is warm


def config(captured: bool, running: int) -> EngineConfig:
    """Return the bundled pair with a policy."""
    policy = {"kind": "policy", "by_running": [[1, 4, {"kind": "dflash"}], [5, None, {"kind": "none"}]]}
    sizes = sorted({1, 4, running})
    graphs: dict[str, Any] = {"kind": "captured", "batch_sizes": sizes} if captured else {"kind": "eager"}
    document = {"model": {"target": "bundled", "max_len": 1024}, "draft": policy, "graphs": graphs}
    return EngineConfig.model_validate(document | {"memory": {"max_running": running}})


def request(number: int, dice: random.Random, prompts: list[tuple[int, ...]]) -> Request:
    """Return one request at random."""
    prompt = dice.choice(prompts)
    prompt = (prompt * 8)[: dice.choice((1, len(prompt), dice.randint(1, 600)))]
    styles = (
        Sampling(),
        Sampling(dice.uniform(0.1, 1.5), seed=dice.getrandbits(60)),
        Sampling(dice.uniform(0.1, 1.5), dice.randint(1, 50), dice.uniform(0.5, 1.0), dice.getrandbits(60)),
    )
    scores = 3 if dice.random() < 0.05 else None
    return Request(number, prompt, dice.randint(1, 120), (0,), dice.choice(styles), scores, scores is not None)


def wave(loop: AnyLoop, dice: random.Random, prompts: list[tuple[int, ...]], drafts: list[Draft]) -> dict[str, int]:
    """Send `WAVE` requests at random moments, cancel some, swap drafts, and run until nothing is left."""
    sent = cancelled = tokens = steps = 0
    while sent < WAVE or not loop.idle:
        if sent < WAVE and dice.random() < 0.3:
            reason = loop.submit(request(sent, dice, prompts))
            assert reason is None, reason
            sent += 1
        if sent and dice.random() < 0.03:
            loop.cancel(dice.randrange(sent))
            cancelled += 1
        if dice.random() < 0.005:
            loop.set_draft(dice.choice(drafts))
        tokens += sum(len(progress.tokens) for progress in loop.advance())
        steps += 1
    return {"requests": sent, "cancels": cancelled, "tokens": tokens, "steps": steps}


def free_share(runtime: AnyRuntime) -> tuple[int, int]:
    """Return free pages, and all pages."""
    if isinstance(runtime, DeviceRuntime):
        return runtime.pages.free, runtime.pages.pages
    return runtime.engine.cache.free_pages, runtime.engine.cache.pages


@torch.inference_mode()
def touch(runtime: AnyRuntime) -> None:
    """Write all of the cache once."""
    owner = runtime.rounds.state if isinstance(runtime, DeviceRuntime) else runtime.engine.cache
    for pool in (owner.target, owner.draft):
        if pool is not None:
            pool.zero_()


def memory() -> dict[str, int]:
    """Return the bytes held by the process and on the device."""
    held = {"process": psutil.Process().memory_info().rss}
    return held | ({"device": torch.cuda.memory_reserved()} if torch.cuda.is_available() else {})


def main() -> int:
    """Run waves for so long, and write what was held when, or what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--captured", action="store_true", help="captured graphs (a GPU)")
    parser.add_argument("--running", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="show and keep each so many-th wave")
    parser.add_argument("--json", type=Path, default=RESULTS / "soak.json")
    arguments = parser.parse_args()
    asked = config(arguments.captured, arguments.running)
    runtime = build_any(resolve(asked))
    touch(runtime)
    loop, prompts = loop_of(runtime), bundled_prompts()
    drafts: list[Draft] = [asked.draft, NoDraft(), DFlashDraft(block_size=8), DFlashDraft(block_size=4, layers=1)]
    alone = run_requests(loop, prompts[:1], 48).outputs
    described = {"config": runtime.describe()["config"]}
    waves: list[dict[str, Any]] = []
    failure: str | None = None
    began = time.monotonic()
    try:
        while time.monotonic() - began < arguments.seconds or len(waves) < 3 * KINDS:
            dice = random.Random(arguments.seed + len(waves) % KINDS)
            made = wave(loop, dice, prompts, drafts)
            free, pages = free_share(runtime)
            assert free == pages, f"{pages - free} of {pages} pages are held by nobody after wave {len(waves)}"
            loop.set_draft(asked.draft)
            assert run_requests(loop, prompts[:1], 48).outputs == alone, f"a text changed after wave {len(waves)}"
            waves.append(made | {"seconds": time.monotonic() - began, "held": memory()})
            if len(waves) % arguments.every == 0:
                print(json.dumps(waves[-1]), flush=True)
                keep(arguments, described, waves, "ended before its time")
        assert all(bytes_ <= MARGIN for bytes_ in grown(waves).values()), f"memory grew: {grown(waves)}"
    except Exception as error:
        traceback.print_exc()
        failure = f"{type(error).__name__}: {error}"
    keep(arguments, described, waves, failure)
    return 1 if failure else 0


def grown(waves: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return by how many bytes memory grew since every kind of wave had come twice."""
    warm = waves[2 * KINDS - 1 :]
    return {name: warm[-1]["held"][name] - bytes_ for name, bytes_ in warm[0]["held"].items()} if warm else {}


def keep(
    arguments: argparse.Namespace, described: dict[str, Any], waves: Sequence[dict[str, Any]], failure: str | None
) -> None:
    """Write what is known by now."""
    record = described | {"failure": failure, "grown_when_warm": grown(waves), "waves_run": len(waves)}
    totals = {name: sum(each[name] for each in waves) for name in ("requests", "cancels", "tokens", "steps")}
    seconds = waves[-1]["seconds"] if waves else 0.0
    every = arguments.every
    shown = [each for number, each in enumerate(waves, 1) if number % every == 0 or number in (2 * KINDS, len(waves))]
    write(arguments.json, record | {"totals": totals, "seconds": seconds, "waves": shown})


if __name__ == "__main__":
    sys.exit(main())
