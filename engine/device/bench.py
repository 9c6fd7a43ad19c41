"""Where the time of a round goes: draft, verify, commit, host; and what the device could do at best.

The parts are measured as graphs of their own (or eagerly, as the config says), replayed one after the other between
device events; the host's share is what a served round takes longer than the round's graph alone.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from engine import estimate
from engine.config import DDTreeDraft, EngineConfig
from engine.device.build import DeviceRuntime, build_device
from engine.device.loop import DeviceLoop
from engine.device.round import Round
from engine.device.rounds import Drafted
from engine.device.state import Style, upload
from engine.errors import ConfigError
from engine.request import GREEDY, Request
from engine.runtime import resolve
from engine.scheduler import Chunk

COPIED_BYTES = {"cuda": 2**31, "cpu": 2**25}
WARM_UP, ROUNDS = 3, 30


@dataclass(frozen=True)
class Split:
    """Milliseconds on the device: medians of the parts of a round, and of the round as it is served."""

    draft_ms: float
    verify_ms: float
    commit_ms: float
    round_ms: float


@dataclass(frozen=True)
class Served:
    """Rounds of the loop while every request decodes: wall milliseconds of one, tokens a second, accept length."""

    wall_ms: float
    tok_s: float
    tokens_per_round: float
    rounds: int


def bench_gpu(
    configs: dict[str, EngineConfig],
    concurrencies: Sequence[int],
    prompt_tokens: int = 96,
    output_tokens: int = 256,
    tell: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Measure rounds of every config at every concurrency that it admits, with the draft it uses there.

    Args:
        tell: is given every row as soon as it is measured.

    Returns:
        JSON: the machine's copy bandwidth, the resolved configs, and `rows`.

    Raises:
        ConfigError: a config whose rounds do not run on a device.
    """
    rows: list[dict[str, Any]] = []
    described, copy = {}, 0.0
    for name, config in configs.items():
        plan = resolve(config)
        if plan.config.attention.backend != "triton":
            raise ConfigError(f"{name}: bench --gpu needs rounds on a GPU; attention.backend here is torch's")
        began = time.perf_counter()
        with _empty_device(plan.device):
            runtime = build_device(plan)
            described[name] = runtime.describe() | {"seconds_load": time.perf_counter() - began}
            copy = copy or copy_bandwidth(plan.device)
            for concurrency in (count for count in concurrencies if count <= config.memory.max_running):
                row = {"config": name} | measure(runtime, concurrency, prompt_tokens, output_tokens, copy)
                rows.append(row)
                tell(row)
            described[name] |= {"prefill_ms": prefill_of(runtime), "memory_check": memory_check(runtime)}
            del runtime
    return {"schema": 1, "copy_bytes_s": copy, "configs": described, "rows": rows}


TITLES = (
    f"{'':24} {'c':>3} {'draft':6} {'draft ms':>8} {'verify':>7} {'commit':>7} {'round':>7} {'host gap':>8} "
    f"{'tok/s':>7} {'length':>6} {'GB/s':>6} {'of copy':>7}"
)


def line(row: dict[str, Any]) -> str:
    """Return a row as a line under `TITLES`."""
    draft = row["draft"]
    name = f"B={draft['block_size']}" if draft["kind"] == "dflash" else draft["kind"]
    return (
        f"{row['config'][-24:]:24} {row['requests']:3} {name:6} {row['draft_ms']:8.3f} {row['verify_ms']:7.3f} "
        f"{row['commit_ms']:7.3f} {row['round_ms']:7.3f} {row['host_gap_ms']:8.3f} {row['tok_s']:7.0f} "
        f"{row['tokens_per_round']:6.2f} {row['bytes_s'] / 1e9:6.0f} {row['share_of_copy']:7.2f}"
    )


@torch.inference_mode()
def measure(
    runtime: DeviceRuntime, requests: int, prompt_tokens: int, output_tokens: int, copy_bytes_s: float
) -> dict[str, Any]:
    """Return one row: the split of a round, the loop's rounds, and the bytes a second beside the measured copy's."""
    plan, machine = runtime.plan, estimate.detect_machine()
    draft = estimate.draft_at(plan.config, requests)
    if isinstance(draft, DDTreeDraft):
        raise ConfigError("device rounds cannot verify trees yet; use dflash or none")
    context = prompt_tokens + output_tokens // 2
    split = split_of(runtime, draft, requests, context)
    served = served_of(runtime, requests, prompt_tokens, output_tokens)
    work = estimate.round_time(plan.config, plan.shape, plan.draft_shape, machine, requests, context, 1.0)
    read = work.verify.bytes + (work.propose.bytes if work.propose else 0.0)
    rate = read / split.round_ms * 1000
    return {
        "requests": requests,
        "draft": draft.model_dump(mode="json"),
        "context": context,
        **asdict(split),
        **asdict(served),
        "host_gap_ms": served.wall_ms - split.round_ms,
        "bytes_read": read,
        "bytes_s": rate,
        "share_of_copy": rate / copy_bytes_s,
    }


def split_of(runtime: DeviceRuntime, draft: Drafted, requests: int, context: int) -> Split:
    """Measure a round's parts and the whole, with so many cached tokens a request."""
    rounds, state = runtime.rounds, runtime.rounds.state
    with _occupied(runtime, requests, context) as (lanes, lengths):
        size = rounds.size_of(requests)
        given = upload([*lanes, *[state.nobody] * (size - requests)], torch.int32, state.device)
        place = upload(lanes, torch.int64, state.device)

        def rewind() -> None:
            state.lengths.index_copy_(0, place, lengths)

        rewind()
        parts = _parts(runtime, Round(draft, Style.GREEDY, rounds.models, state), given)
        draft_ms, verify_ms, commit_ms = _timed(parts, rewind, state.device)
        [round_ms] = _timed([lambda: rounds.run(lanes, draft, Style.GREEDY)], rewind, state.device)
    return Split(draft_ms, verify_ms, commit_ms, round_ms)


def _parts(runtime: DeviceRuntime, work: Round, lanes: Tensor) -> list[Callable[[], object]]:
    """Return draft, verify, and accept with commit, each run the way the config runs rounds."""
    add = runtime.rounds.graphs.add

    def draft() -> Any:
        places, draws = work.begin(lanes)
        return places, draws, work.propose(places, draws)

    first = add("the draft of a round", draft)
    places, draws, block = first()
    second = add("the verification of a round", lambda: work.verify(block, places))
    scored = second()

    def commit() -> None:
        kept, tokens = work.accept(block, scored.logits, places, draws)
        work.commit(block, kept, tokens, scored.features, places)

    return [first, second, add("the commit of a round", commit)]


def served_of(runtime: DeviceRuntime, requests: int, prompt_tokens: int, output_tokens: int) -> Served:
    """Serve equal requests together, and time the rounds between the last first token and the first end."""
    loop, vocab = DeviceLoop(runtime), runtime.plan.shape.vocab
    for number in range(requests):
        prompt = tuple((7919 * (number + 1) * (place + 1)) % vocab for place in range(prompt_tokens))
        reason = loop.submit(Request(number, prompt, output_tokens))
        if reason is not None:
            raise ConfigError(reason)
    begun: set[int] = set()
    marks: list[tuple[float, int, int]] = []  # seconds, tokens, rounds
    tokens = rounds = 0
    while not loop.idle:
        progress = loop.advance()
        if len(begun) == requests and progress:
            rounds += 1
            tokens += sum(len(each.tokens) for each in progress)
        begun |= {each.id for each in progress if each.tokens}
        if len(begun) == requests and not any(each.finish for each in progress) and loop.stats().running == requests:
            marks.append((time.perf_counter(), tokens, rounds))
    if len(marks) < 2 or marks[-1][2] == marks[0][2]:
        raise ConfigError(f"{output_tokens} output tokens leave no round to time; ask for more")
    seconds, made, count = (last - first for first, last in zip(marks[0], marks[-1], strict=True))
    return Served(1000 * seconds / count, made / seconds, made / count / requests, int(count))


@torch.inference_mode()
def prefill_of(runtime: DeviceRuntime) -> dict[int, float]:
    """Return milliseconds of one prompt's first forward, by its tokens: every size that is captured, filled."""
    rounds, found = runtime.rounds, {}
    room = min(rounds.state.max_tokens, runtime.pages.free * runtime.pages.page_size)
    for rows in (size for size in rounds.buckets if size + runtime.plan.config.reserved_rows <= room):
        with _occupied(runtime, 1, rows) as (lanes, _):
            work = rounds.prompts(rows)
            work.forward.load([Chunk(Request(0, (0,) * rows, 1), (0,) * rows, last=False)], [(lanes[0], 0)])
            [found[rows]] = _timed([work.run], lambda: None, rounds.state.device)
    return found


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes a second of a large copy on the device, read and written ones together."""
    source = torch.empty(COPIED_BYTES[device.type] // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    [ms] = _timed([lambda: target.copy_(source)], lambda: None, device)
    return 2 * source.numel() * 4 / ms * 1000


def memory_check(runtime: DeviceRuntime) -> dict[str, Any]:
    """Return the bytes in use on the device, which never shrink while a server runs, beside the estimate's."""
    plan = runtime.plan
    guess = estimate.memory(plan.config, plan.shape, plan.draft_shape, estimate.detect_machine())
    if plan.device.type != "cuda":
        return {"estimate": guess.total}
    free, total = torch.cuda.mem_get_info()
    used = total - free
    return {
        "used": used,
        "reserved": torch.cuda.memory_reserved(),
        "allocated": torch.cuda.memory_allocated(),
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "estimate": guess.total,
        "parts": guess.items(),
        "used_over_estimate": used / guess.total,
    }


@contextmanager
def _occupied(runtime: DeviceRuntime, requests: int, context: int) -> Iterator[tuple[list[int], Tensor]]:
    """Hold rows and pages for requests of `context` tokens; yields the rows, and the lengths [requests] int32."""
    state, room = runtime.rounds.state, runtime.plan.config.reserved_rows
    lanes = []
    try:
        for number in range(requests):
            place = runtime.pages.admit(number, context + room)
            state.enter(place.row, place.pages, GREEDY)
            lanes.append(place.row)
        yield lanes, upload([context] * requests, torch.int32, state.device)
    finally:
        for number in range(len(lanes)):
            runtime.pages.release(number)


def _timed(parts: Sequence[Callable[[], object]], before: Callable[[], None], device: torch.device) -> list[float]:
    """Return the median milliseconds of every part, run one after the other, after `before`."""
    found: list[list[float]] = [[] for _ in parts]
    for number in range(WARM_UP + ROUNDS):
        before()
        marks = [_Mark(device)]
        for part in parts:
            part()
            marks.append(_Mark(device))
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= WARM_UP:
            for times, (first, last) in zip(found, itertools.pairwise(marks), strict=True):
                times.append(first.until(last))
    return [statistics.median(times) for times in found]


class _Mark:
    """A point in the device's work, or in the host's where they are the same."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._seconds = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def until(self, later: _Mark) -> float:
        """Return the milliseconds to a later mark; on a GPU both must be reached."""
        if self._event is None or later._event is None:
            return 1000 * (later._seconds - self._seconds)
        return float(self._event.elapsed_time(later._event))


@contextmanager
def _empty_device(device: torch.device) -> Iterator[None]:
    """Give back, at the end, what an engine took."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        yield
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
