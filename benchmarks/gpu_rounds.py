"""Rounds on a GPU, in one command: are they right, how long do they take, what does a client get.

    python -m benchmarks.gpu_rounds --json OUT [--parts correct,rounds_none,rounds_dflash,pair,…]

Every part is a process of its own with a time limit: one that fails is reported and the next one runs. `correct`:
the bundled pair in float32, captured against eager rounds and against the CPU engine, greedy and sampled;
`near_ties`: the same in bfloat16, where correct engines differ at near-ties, and only there.
`rounds_none`, `rounds_dflash`: the shape of Qwen3-8B (random weights, forced acceptance), a round split into draft,
verify, commit and host; `rounds_long`: over 32 k cached tokens. `pair`: the split of the bundled pair. `http`,
`http8b`: both served over HTTP to one client. `cancel`: requests that leave while a round of theirs runs. `ready`:
seconds to ready without and with what an earlier start compiled and measured. `memory`: what a server says on a GPU
that others fill.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.common import RESULTS, ROOT, bundled_prompts, write

SHAPES = ROOT / "benchmarks" / "shapes" / "qwen3-8b"
PROMPT_TOKENS, OUTPUT_TOKENS = 96, 256
LONG = 32_000
REGRET = 0.25  # two units in the last place of bfloat16 at a logit of 16
OCCUPIED, KV_BYTES = 16.0, 147_456  # of the 8B shape: GiB of weights and CUDA, bytes of a cached token
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "dflash 8": {"kind": "dflash", "block_size": 8},
    "dflash 16": {"kind": "dflash", "block_size": 16},
}


def config(draft: dict[str, Any], captured: bool, running: int, sizes: Sequence[int], **model: Any) -> dict[str, Any]:
    """Return an EngineConfig of the bundled pair."""
    graphs = {"kind": "captured", "batch_sizes": list(sizes)} if captured else {"kind": "eager"}
    shared = {"model": {"target": "bundled"} | model, "memory": {"max_running": running}}
    return shared | {"draft": draft, "graphs": graphs}


def correct() -> dict[str, Any]:
    """Compare texts of 20 prompts: captured with eager rounds (equal), both with the CPU engine (near-ties apart)."""
    import torch

    from engine.config import EngineConfig
    from engine.device.build import build_device
    from engine.device.loop import DeviceLoop
    from engine.loop import Loop
    from engine.request import GREEDY, Request, Sampling
    from engine.runtime import build, resolve

    prompts = [prompt[: 24 + 7 * number] for number, prompt in enumerate(bundled_prompts()[:20])]
    styles = {"greedy": [GREEDY], "sampled": [Sampling(0.8, seed=1), Sampling(1.0, 20, 0.9, 2), GREEDY]}

    def texts(loop: Loop | DeviceLoop, style: str) -> list[list[int]]:
        made: list[list[int]] = [[] for _ in prompts]
        for number, prompt in enumerate(prompts):
            reason = loop.submit(Request(number, prompt, 64, (), styles[style][number % len(styles[style])]))
            assert reason is None, reason
        while not loop.idle:
            for progress in loop.advance():
                made[progress.id] += progress.tokens
        return made

    rows: list[dict[str, Any]] = []
    reference: dict[str, list[list[int]]] = {}
    for name, draft in DRAFTS.items():
        for running in (1, 16):
            sizes = [1] if running == 1 else [1, 2, 4, 8, 16]  # what eager rounds are padded to
            plans = {
                captured: resolve(
                    EngineConfig.model_validate(config(draft, captured, running, sizes, dtype="float32", max_len=512))
                )
                for captured in (False, True)
            }
            loops = {captured: DeviceLoop(build_device(plan)) for captured, plan in plans.items()}
            for style in styles:
                if style not in reference:
                    on_cpu = replace(plans[False], device=torch.device("cpu"), threads=4)
                    reference[style] = texts(Loop(build(on_cpu)), style)
                eager, captured = texts(loops[False], style), texts(loops[True], style)
                equal = sum(a == b for a, b in zip(captured, reference[style], strict=True))
                row = {"draft": name, "running": running, "style": style, "captured_is_eager": captured == eager}
                rows.append(row | {"equal_to_cpu": equal, "of": len(prompts)})
                print(json.dumps(rows[-1]), flush=True)
            graph_rounds = loops[True].stats().rounds["graph_rounds"]
            assert graph_rounds == loops[True].stats().rounds["rounds"] > 0, "captured rounds were not replayed"
    return {"rows": rows, "captured_is_eager": all(row["captured_is_eager"] for row in rows)}


def near_ties() -> dict[str, Any]:
    """Compare greedy texts in bfloat16, as they are served: captured with eager rounds, and by their regret.

    Regret: by how much the float32 CPU engine finds a token less likely than its best one, in logits. The CPU engine's
    own bfloat16 texts say how much rounding alone does.
    """
    import torch

    from engine.bench import run_requests
    from engine.config import EngineConfig
    from engine.device.build import build_device
    from engine.device.loop import DeviceLoop
    from engine.loop import Loop
    from engine.request import Request
    from engine.runtime import build, resolve

    prompts = [prompt[: 24 + 7 * number] for number, prompt in enumerate(bundled_prompts()[:20])]

    def plan_of(dtype: str, draft: dict[str, Any], captured: bool, running: int) -> Any:
        sizes = [size for size in (1, 2, 4, 8, 16) if size <= running]
        return resolve(EngineConfig.model_validate(config(draft, captured, running, sizes, dtype=dtype, max_len=512)))

    def on_cpu(dtype: str) -> Loop:
        return Loop(build(replace(plan_of(dtype, DRAFTS["none"], False, 4), device=torch.device("cpu"), threads=4)))

    def regret(texts: Sequence[Sequence[int]]) -> float:
        """Return the largest regret of any token of these texts."""
        worst = 0.0
        for prompt, text in zip(prompts, texts, strict=True):
            assert judge.submit(Request(0, (*prompt, *text), 1, logprobs=1, echo=True)) is None
            scores = []
            while not judge.idle:
                scores += [score for progress in judge.advance() for score in progress.prompt_scores]
            worst = max(worst, *(score.top[0][1] - score.logprob for score in scores[-len(text) :]))
        return worst

    judge = on_cpu("float32")
    expected = run_requests(on_cpu("bfloat16"), prompts, 64).outputs
    found: dict[str, Any] = {"cpu_regret": regret(expected), "rows": []}
    for name, draft in DRAFTS.items():
        for running in (1, 16):
            eager, captured = (
                run_requests(DeviceLoop(build_device(plan_of("bfloat16", draft, how, running))), prompts, 64).outputs
                for how in (False, True)
            )
            row = {"draft": name, "running": running, "captured_is_eager": captured == eager, "of": len(prompts)}
            row |= {"equal_to_cpu": sum(a == b for a, b in zip(captured, expected, strict=True))}
            found["rows"].append(row | {"regret": regret(captured)})
            print(json.dumps(found["rows"][-1]), flush=True)
    bound = max(2 * found["cpu_regret"], REGRET)
    return found | {"bound": bound, "within": all(row["regret"] <= bound for row in found["rows"])}


def _bench(*arguments: str) -> dict[str, Any]:
    """Run `engine bench --gpu` in this process."""
    from engine.__main__ import main

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        status = main(["bench", "--gpu", *arguments, "--json", str(out)])
        assert status == 0, f"exit status {status}"
        result: dict[str, Any] = json.loads(out.read_text())
    for name, described in result["configs"].items():
        print(name, f"load {described['seconds_load']:.1f} s, prefill ms {described['prefill_ms']}", flush=True)
        print(json.dumps(described["memory_check"]), flush=True)
    return result


def rounds_none() -> dict[str, Any]:
    """Split the rounds of the 8B shape without speculation."""
    return _bench(str(SHAPES / "none.yaml"), "--concurrency", "1", "8", "48", "--output-tokens", "128")


def rounds_dflash() -> dict[str, Any]:
    """Split the rounds of the 8B shape with blocks of 16 (1 and 8 requests) and 8 (48 requests)."""
    return _bench(str(SHAPES / "dflash.yaml"), "--concurrency", "1", "8", "48", "--output-tokens", "256")


def pair() -> dict[str, Any]:
    """Split the rounds of the bundled pair."""
    return _bench("--concurrency", "1", "16", "48", "--output-tokens", "192")


def rounds_long() -> dict[str, Any]:
    """Split one request's round of the 8B shape over 32 k cached tokens: 1 row, and 16 rows."""
    import torch

    from engine.config import EngineConfig, load_launch
    from engine.device.bench import copy_bandwidth, split_of
    from engine.device.build import build_device
    from engine.estimate import detect_machine, draft_at, round_time
    from engine.runtime import resolve

    found: dict[str, Any] = {}
    for name in ("none", "dflash"):
        document = load_launch(SHAPES / f"{name}.yaml").entries[0].config.model_dump(mode="json")
        document["model"]["max_len"] = LONG + 1024
        document["memory"] |= {"max_running": 1, "prefill_chunk": 128}
        document["graphs"]["batch_sizes"] = [1]
        plan = resolve(EngineConfig.model_validate(document))
        runtime, draft = build_device(plan), draft_at(plan.config, 1)
        with torch.inference_mode():
            split = split_of(runtime, draft, 1, LONG)
        work = round_time(plan.config, plan.shape, plan.draft_shape, detect_machine(), 1, LONG, 1.0)
        share = work.verify.bytes / split.verify_ms * 1000 / copy_bandwidth(plan.device)
        found[name] = asdict(split) | {"bytes_of_verify": work.verify.bytes, "verify_share_of_copy": share}
        print(name, json.dumps(found[name]), flush=True)
        del runtime
    return found | {"verify_16_rows_over_1": found["dflash"]["verify_ms"] / found["none"]["verify_ms"]}


def cancel() -> dict[str, Any]:
    """Cancel requests while a round of theirs runs: the others' texts stay, theirs end early, every page comes back."""
    from engine.config import EngineConfig
    from engine.device.build import build_device
    from engine.device.loop import DeviceLoop
    from engine.request import Request, Sampling
    from engine.runtime import resolve

    prompts = [prompt[:64] for prompt in bundled_prompts()[:24]]
    found: dict[str, Any] = {}
    for name, draft in DRAFTS.items():
        asked = config(draft, True, 8, [1, 2, 4, 8], dtype="float32", max_len=512)
        runtime = build_device(resolve(EngineConfig.model_validate(asked)))
        expected: list[list[int]] = []
        for every in (0, 3):  # nobody; then one of three, after its first tokens: the next round is under way
            loop, made = DeviceLoop(runtime), list[list[int]]([] for _ in prompts)
            for number, prompt in enumerate(prompts):
                sampling = Sampling(0.8, seed=number) if number % 2 else Sampling()
                assert loop.submit(Request(number, prompt, 64, (), sampling)) is None
            left: set[int] = set()
            while not loop.idle:
                for progress in loop.advance():
                    assert progress.id not in left, "tokens of a request that had been cancelled"
                    made[progress.id] += progress.tokens
                    if every and progress.id % every == 0 and progress.finish is None:
                        loop.cancel(progress.id)
                        left.add(progress.id)
            assert runtime.pages.free == runtime.pages.pages, "pages are held by nobody"
            if not every:
                expected = made
        stayed = [number for number in range(len(prompts)) if number not in left]
        assert all(made[number] == expected[number] for number in stayed), "a cancel changed another text"
        early = [number for number in left if len(made[number]) < len(expected[number])]
        assert all(expected[number][: len(made[number])] == made[number] for number in left)
        found[name] = {"requests": len(prompts), "cancelled": len(left), "ended_early": len(early)}
        print(name, found[name], flush=True)
    return found


def ready() -> dict[str, Any]:
    """Measure the bundled pair's seconds to ready: caches of kernels empty, then as the first start left them."""
    from benchmarks.server import serving

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"XDG_CACHE_HOME": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        for name in ("cold", "warm", "warm again"):
            with serving(config(DRAFTS["dflash 8"], True, 48, [1, 2, 4, 8, 16, 32, 48])) as server:
                found[name] = server.seconds_to_ready
            print(name, found[name], flush=True)
    return found


def memory() -> dict[str, Any]:
    """Serve the 8B shape on a GPU that is almost full: every server ends with status 4 and advice, none hangs.

    Weights do not fit; then the cache; then, with little room beside both, a graph, or the logits of a long prompt
    that is to be scored. Each runs while this process holds the rest of the GPU.
    """
    import torch

    found: dict[str, Any] = {}
    # name: GiB that are free, GiB of them that weights and cache leave
    rooms = {"weights": (8, 1.0), "cache": (24, -4.0)} | {f"room {room}": (36, room) for room in (0.2, 0.6, 1.0)}
    document = yaml.safe_load((SHAPES / "none.yaml").read_text())
    document["model"]["target"] = str(SHAPES / "target")
    for name, (free, room) in rooms.items():
        tokens = (free - OCCUPIED - room) * 2**30 / KV_BYTES if free > OCCUPIED + room else 48 * 2048
        document["memory"]["kv_tokens"] = int(tokens)
        taken = torch.empty(max(0, torch.cuda.mem_get_info()[0] - free * 2**30), dtype=torch.uint8, device="cuda")
        began = time.monotonic()
        found[name] = _end_of(document) | {"free_gib": free, "seconds": time.monotonic() - began}
        print(name, found[name], flush=True)
        del taken
        torch.cuda.empty_cache()
    return found


def _end_of(document: dict[str, Any]) -> dict[str, Any]:
    """Serve, have a long prompt scored when the server is ready, and return how it ended."""
    from benchmarks.server import serving

    ready, status = False, None
    try:
        with serving(document) as server:
            ready, said = True, server.said
            body = {"model": document["model"]["target"], "prompt": [7] * 2048, "max_tokens": 1}
            with suppress(httpx.HTTPError):
                url = f"http://127.0.0.1:{server.port}/v1/completions"
                status = httpx.post(url, json=body | {"echo": True, "logprobs": 3}, timeout=30).status_code
            with suppress(subprocess.TimeoutExpired):
                server.process.wait(timeout=5)
            time.sleep(0.5)  # its last words
            lines = [*said]
    except RuntimeError as error:
        lines = str(error).splitlines()
    last = next((line[line.index("{") :] for line in reversed(lines) if '"event": "exit"' in line), None)
    ended = json.loads(last) if last else {"code": None, "message": "it did not end"}
    return {"was_ready": ready, "http_status": status, "exit": ended}


def serve_and_load(document: dict[str, Any], levels: Sequence[int], requests: int) -> dict[str, Any]:
    """Serve a config, and return seconds to ready, tokens a second by concurrency, and what the server counted."""
    from benchmarks.http_decode import load
    from benchmarks.server import serving

    texts = [(prompt * 8)[:PROMPT_TOKENS] for prompt in bundled_prompts()]
    target = document["model"]["target"]
    with serving(document) as server:
        found: dict[str, Any] = {"seconds_to_ready": server.seconds_to_ready, "tok_s": {}}
        asyncio.run(load(server.port, target, max(levels), 1, 16, texts))
        for level in levels:
            speed = asyncio.run(load(server.port, target, level, requests, OUTPUT_TOKENS, texts))
            found["tok_s"][level] = speed
            print(f"  c={level}: {speed:.0f} tok/s", flush=True)
        info = httpx.get(f"http://127.0.0.1:{server.port}/server_info", timeout=30).json()
        found |= {"acceptance": info["acceptance"], "rounds": info["rounds"], "graphs": info["config"]["graphs"]}
    return found


def http() -> dict[str, Any]:
    """Serve the bundled pair without speculation and with blocks of 8 and 16."""
    found = {}
    for name, draft in DRAFTS.items():
        print(name, flush=True)
        document = config(draft, True, 48, [1, 2, 4, 8, 16, 32, 48])
        found[name] = serve_and_load(document, (1, 48), 3)
        print(f"  ready after {found[name]['seconds_to_ready']:.1f} s", flush=True)
    return found


def http8b() -> dict[str, Any]:
    """Serve the 8B shape without speculation and with forced acceptance."""
    found = {}
    for name in ("none", "dflash"):
        print(name, flush=True)
        text = (SHAPES / f"{name}.yaml").read_text().replace("benchmarks/shapes/qwen3-8b", str(SHAPES))
        found[name] = serve_and_load(yaml.safe_load(text), (1, 8, 48), 1)
    return found


@dataclass(frozen=True)
class Part:
    """A measurement, and the seconds it may take."""

    run: Callable[[], dict[str, Any]]
    seconds: float


PARTS = {
    "correct": Part(correct, 150),
    "near_ties": Part(near_ties, 90),
    "rounds_none": Part(rounds_none, 120),  # the first part measures kernels
    "rounds_dflash": Part(rounds_dflash, 120),
    "rounds_long": Part(rounds_long, 90),
    "pair": Part(pair, 60),
    "cancel": Part(cancel, 60),
    "ready": Part(ready, 100),
    "memory": Part(memory, 130),
    "http": Part(http, 110),
    "http8b": Part(http8b, 150),
}
DEFAULT = "correct,rounds_none,rounds_dflash,pair"


def supervise(names: Sequence[str], limit: float, path: Path) -> None:
    """Run parts one after the other, each in its own process; a part's error stands where its result would.

    A part that is named twice runs twice, its second result as "…, again": what the first has compiled and measured is
    known by then. The file holds what is known after every part, so that whoever ends this loses one part.
    """
    results: dict[str, Any] = {}
    began = time.monotonic()
    for name in names:
        left = limit - (time.monotonic() - began)
        seconds = min(PARTS[name].seconds, left)
        key = f"{name}, again" if name in results else name
        print(f"== {key}", flush=True)
        if seconds < 10:
            results[key] = {"error": "no time left for it"}
            write(path, {"parts": results})
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "part.json"
            command = [sys.executable, "-u", "-m", "benchmarks.gpu_rounds", "--part", name, "--json", str(out)]
            started = time.monotonic()
            status = _ended(command, seconds)
            results[key] = json.loads(out.read_text()) if out.exists() else {"error": status}
            results[key]["seconds"] = time.monotonic() - started
        print(f"== {key}: {results[key].get('error', 'done')} in {results[key]['seconds']:.0f} s", flush=True)
        write(path, {"parts": results})


def _ended(command: Sequence[str], seconds: float) -> str:
    """Run a command for at most so long, and say how it ended; nothing that it started stays."""
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        return f"status {process.wait(timeout=seconds)}"
    except subprocess.TimeoutExpired:
        return f"no end after {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    """Run one part, or several."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=DEFAULT, help=f"of {', '.join(PARTS)}")
    parser.add_argument("--part", choices=PARTS, help="run this one here and write its result alone")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of all parts together")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu_rounds.json")
    arguments = parser.parse_args()
    if arguments.part:
        arguments.json.write_text(json.dumps(PARTS[arguments.part].run()), encoding="utf-8")
        return
    supervise(arguments.parts.split(","), arguments.limit, arguments.json)


if __name__ == "__main__":
    main()
