"""Parts of the device engine alone: pages, lateness, sizes, capture errors, the split of a round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import estimate, loop
from engine.config import EngineConfig
from engine.device.bench import TITLES, copy_bandwidth, line, measure, prefill_of
from engine.device.build import build_device
from engine.device.graphs import CapturedGraphs, EagerGraphs
from engine.device.pages import Pages
from engine.device.prefill import buckets
from engine.device.ring import DEPTH, Ring
from engine.device.rounds import batch_sizes
from engine.device.schedule import LateScheduler
from engine.device.state import State, Style
from engine.errors import (
    Exit,
    GraphCaptureError,
    KernelError,
    OutOfMemory,
    OutOfMemoryInCapture,
    OutOfMemoryInTraffic,
)
from engine.kernels.build import kernel_errors
from engine.kv_cache import PoolShape
from engine.loop import Loop
from engine.request import GREEDY, Request, Sampling
from engine.runtime import build, resolve
from tests.engine.test_speculate import SMOKE

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 40), max_size=20), st.data())
def test_pages_belong_to_one_request_at_a_time(sizes: list[int], data: st.DataObject) -> None:
    pages, held = Pages(pages=16, rows=4, page_size=4), dict[int, tuple[int, ...]]()
    for number, tokens in enumerate(sizes):
        if -(-tokens // 4) > pages.free or len(held) == 4:
            with pytest.raises(OutOfMemory):
                pages.admit(number, tokens)
            if held:
                gone = data.draw(st.sampled_from(sorted(held)))
                pages.release(gone)
                del held[gone]
        else:
            held[number] = pages.admit(number, tokens).pages
            assert len(held[number]) * 4 >= tokens
        every = [page for kept in held.values() for page in kept]
        assert len(every) == len(set(every)) == pages.pages - pages.free
        rows = [pages.place(each).row for each in held]
        assert len(rows) == len(set(rows))


def test_positions_behind_a_requests_pages_are_nobodys() -> None:
    shape = PoolShape(layers=1, kv_heads=1, head_dim=4)
    state = State(shape, None, 6, 4, max_running=2, max_tokens=24, rows=6, dtype=torch.float32, device=CPU)
    state.enter(1, (5, 2), GREEDY)
    places = torch.arange(24)
    slots = state.slots(torch.tensor(1), places)
    assert slots[:8].tolist() == [20, 21, 22, 23, 8, 9, 10, 11]
    assert int(slots[8:].min()) >= 6 * 4
    assert int(state.slots(torch.tensor(state.nobody), places).min()) >= 6 * 4
    assert int(slots.max()) < state.target.shape[1]


def test_a_step_is_launched_before_the_last_one_is_read() -> None:
    scheduler = LateScheduler(max_running=2, prefill_chunk=4, verify_rows=3, page_size=4)
    scheduler.submit(Request(7, (1, 2, 3, 4, 5, 6), 4))
    assert scheduler.tokens_for(Request(7, (1,) * 6, 4)) == 6 + 4 + 2 * 3
    first = scheduler.launch(100)
    assert (first.prefill[0].tokens, first.starts, first.ending, first.decode) == ((1, 2, 3, 4), (0,), (), ())
    second = scheduler.launch(100)
    assert (second.starts, len(second.ending), second.decode) == ((4,), 1, ())
    assert scheduler.read(first, {}) == ()
    third = scheduler.launch(100)
    assert len(third.decode) == 1
    [progress] = scheduler.read(second, {7: (50,)})
    assert (progress.tokens, progress.finish, progress.verify_count) == ((50,), None, 0)
    fourth = scheduler.launch(100)
    assert len(fourth.decode) == 1
    assert scheduler.launch(100).decode  # 1 token and 2 rounds in flight may still leave one to come
    assert not scheduler.launch(100)  # 1 token and 3 rounds in flight reach the length
    [progress] = scheduler.read(third, {7: (51, 52, 53)})
    assert (progress.tokens, progress.finish, progress.verify_count) == ((51, 52, 53), "length", 1)
    assert scheduler.read(fourth, {7: (54,)}) == ()


def test_a_number_used_again_is_another_request() -> None:
    scheduler = LateScheduler(max_running=1, prefill_chunk=8, verify_rows=1, page_size=4)
    scheduler.submit(Request(0, (1, 2), 5))
    launch = scheduler.launch(100)
    assert scheduler.cancel(0)
    scheduler.submit(Request(0, (3, 4), 5))
    scheduler.launch(100)
    assert scheduler.read(launch, {0: (9,)}) == ()


def test_styles_and_sizes() -> None:
    warm, cut = Sampling(0.5), Sampling(0.5, top_k=3)
    assert Style.of([GREEDY, Sampling(0.0, top_k=4)]) is Style.GREEDY
    assert Style.of([GREEDY, warm]) is Style.SAMPLED
    assert Style.of([cut, warm]) is Style.LIMITED
    assert buckets(500) == (128, 256, 512)
    assert buckets(1) == (128,)

    def sizes(running: int, **sections: Any) -> tuple[int, ...]:
        document = {"model": {"target": "bundled"}, "memory": {"max_running": running}} | sections
        return batch_sizes(EngineConfig.model_validate(document))

    assert [sizes(running) for running in (1, 2, 5, 8)] == [(1,), (1, 2), (1, 2, 4, 5), (1, 2, 4, 8)]
    assert sizes(6, graphs={"kind": "captured", "batch_sizes": [3, 6]}) == (3, 6)


def test_results_stay_until_their_slot_comes_round_again() -> None:
    ring = Ring(8, CPU)
    tickets = [ring.send(torch.full((2, 3), number), torch.tensor([number])) for number in range(DEPTH)]
    for number, ticket in enumerate(tickets):
        packed, first = ticket.read()
        assert (packed.tolist(), first.tolist()) == ([[number] * 3] * 2, [number])


class _Graph:
    """Stands for torch.cuda.CUDAGraph where there is no GPU."""

    def capture_begin(self, **_: object) -> None:
        """Begin."""

    def capture_end(self) -> None:
        """End."""
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stand_in in {
        "CUDAGraph": _Graph,
        "graph_pool_handle": lambda: (0, 0),
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda: (2**30, 2**34),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)


def failing(error: Exception, after: int) -> Callable[[], None]:
    """Return work that succeeds so many times: the first run compiles, the second is captured."""
    runs: list[None] = []

    def work() -> None:
        runs.append(None)
        if len(runs) > after:
            raise error

    return work


@pytest.mark.usefixtures("no_gpu")
def test_a_failed_capture_says_of_what_and_why() -> None:
    name = "a round of batch size 8 with 16 rows a request"
    with pytest.raises(GraphCaptureError, match=f"{name}.*not permitted when stream is capturing") as caught:
        CapturedGraphs().add(name, failing(RuntimeError("operation not permitted when stream is capturing\nmore"), 1))
    assert (caught.value.exit, caught.value.kind, "\n" in str(caught.value)) == (Exit.GRAPH, "graph_capture", False)
    for after in (0, 1):
        with pytest.raises(OutOfMemoryInCapture, match=rf"{name}.*1\.0 of 16\.0 GiB.*kv_tokens") as full:
            CapturedGraphs().add(name, failing(torch.OutOfMemoryError("CUDA out of memory"), after))
        assert (full.value.exit, full.value.kind) == (Exit.MEMORY, "oom_capture")
    for error in (
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate",
    ):  # no torch class
        with pytest.raises(OutOfMemoryInCapture, match=name):
            CapturedGraphs().add(name, failing(RuntimeError(error), 0))
    with pytest.raises(OutOfMemoryInCapture, match="measuring kernels"), CapturedGraphs().room_for("measuring kernels"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(OutOfMemory, match="max_running") as full_eager:
        EagerGraphs().add(name, failing(torch.OutOfMemoryError("CUDA out of memory"), 0))
    assert full_eager.value.kind == "oom_start"


@pytest.mark.parametrize("requests", [1, 3])
def test_a_round_is_split(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = {"kind": "dflash", "model": str(SMOKE / "draft"), "block_size": 4, "simulate_accept": 2.0}
    document = {"model": {"target": str(SMOKE / "target"), "dtype": "float32", "max_len": 160}, "draft": draft}
    runtime = build_device(
        resolve(EngineConfig.model_validate(document | {"memory": {"max_running": 3, "prefill_chunk": 200}}))
    )
    monkeypatch.setattr(estimate, "detect_machine", lambda: estimate.gpu("H200"))
    row = measure(runtime, requests, prompt_tokens=20, output_tokens=40, copy_bytes_s=copy_bandwidth(CPU))
    assert runtime.pages.free == runtime.pages.pages
    assert min(row[f"{part}_ms"] for part in ("draft", "verify", "commit", "round", "wall")) > 0
    assert (row["tokens_per_round"], row["requests"], row["context"]) == (2.0, requests, 40)
    assert row["bytes_read"] > runtime.memory.weight_bytes
    assert len(line({"config": "smoke"} | row)) == len(TITLES)
    if requests == 1:
        assert list(prefill_of(runtime)) == [128]
        assert runtime.pages.free == runtime.pages.pages


def test_a_kernel_that_does_not_compile_is_named() -> None:
    triton_errors = pytest.importorskip("triton.errors", reason="a CPU-only torch comes without Triton")
    refusal = pytest.raises(KernelError, match=r"too large; use attention\.backend torch")
    with refusal as refused, kernel_errors(torch.device("cuda")):
        raise triton_errors.TritonError("too large\nat line 3")
    assert (refused.value.exit, refused.value.kind) == (Exit.INTERNAL, "kernel_compile")


def test_a_step_without_room_is_reported_by_the_old_loop_too(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = build(resolve(EngineConfig.model_validate({"model": {"target": str(SMOKE / "target")}})))
    served = Loop(runtime)
    assert served.submit(Request(0, (1, 2, 3), 2)) is None

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loop, "step", full)
    with pytest.raises(OutOfMemoryInTraffic, match=r"lower memory\.kv_tokens.*estimate was 0\.0 GiB for a step, "):
        served.advance()
