"""Rounds on a device, on a CPU with the reference kernels: the texts of the engine's own loop, whatever happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.bench import run_requests
from engine.config import DFlashDraft, Draft, EngineConfig, NoDraft
from engine.device.build import DeviceRuntime, build_device
from engine.device.loop import DeviceLoop
from engine.errors import ConfigError, OutOfMemoryInTraffic
from engine.loop import Loop
from engine.request import Request, Sampling, Scored
from engine.runtime import build, resolve
from tests.engine.test_speculate import SMOKE, smoke_prompts
from tests.engine.tiny import make_draft, make_target, prompts

DRAFT = {"model": str(SMOKE / "draft")}
CHAIN: dict[str, Any] = {"kind": "dflash", "block_size": 8, **DRAFT}
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "dflash": CHAIN,
    "drawn": CHAIN | {"block_size": 4, "sample": "probabilistic"},
    "policy": {
        "kind": "policy",
        "by_running": [[1, 2, CHAIN], [3, 3, {"kind": "none"}], [4, None, CHAIN | {"block_size": 4, "layers": 1}]],
    },
}
SAMPLED = [Sampling(), Sampling(0.9, seed=7), Sampling(0.7, 12, 0.9, 8), Sampling(1.2, 0, 0.8, 9)]


def config(draft: dict[str, Any], **memory: Any) -> EngineConfig:
    limits = {"max_running": 5, "prefill_chunk": 48, "page_size": 8} | memory
    model = {"target": str(SMOKE / "target"), "dtype": "float32", "max_len": 160}
    return EngineConfig.model_validate({"model": model, "draft": draft, "memory": limits})


def device(asked: EngineConfig) -> DeviceRuntime:
    return build_device(resolve(asked))


def mixed(count: int, tokens: int, styles: Sequence[Sampling] = SAMPLED) -> list[Request]:
    """Requests of mixed lengths and samplings; the first prompts are longer than a chunk."""
    texts = sorted(smoke_prompts(count), key=len, reverse=True)
    return [
        Request(
            number, (text * 4)[: 70 if number < 2 else len(text)], tokens - 3 * number, (), styles[number % len(styles)]
        )
        for number, text in enumerate(texts)
    ]


def texts_of(loop: Loop | DeviceLoop, requests: Sequence[Request]) -> dict[int, list[int]]:
    made: dict[int, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        assert loop.submit(request) is None
    while not loop.idle:
        for progress in loop.advance():
            made[progress.id] += progress.tokens
    return made


@pytest.mark.parametrize("name", DRAFTS)
def test_texts_are_those_of_the_loop(name: str) -> None:
    """More requests than run at once, prompts longer than a chunk, greedy, drawn and limited ones together."""
    asked = config(DRAFTS[name])
    requests = mixed(9, 44)
    runtime = device(asked)
    loop = DeviceLoop(runtime)
    expected = Loop(build(resolve(asked)))
    assert texts_of(loop, requests) == texts_of(expected, requests)
    assert runtime.pages.free == runtime.pages.pages
    if name != "policy":
        mine, its = loop.stats(), expected.stats()
        assert (mine.acceptance, mine.rounds["tokens"]) == (its.acceptance, its.rounds["tokens"])


@pytest.mark.parametrize("name", ["none", "dflash"])
def test_an_end_inside_a_block_ends_the_text_there(name: str) -> None:
    """Each token of a text as its end-of-text token, and each length."""
    loop = DeviceLoop(device(config(DRAFTS[name])))
    prompt = smoke_prompts(1)[0]
    [whole] = run_requests(loop, [prompt], 24).outputs
    requests = [Request(n, prompt, 24, (token,)) for n, token in enumerate(whole)]
    for number, text in texts_of(loop, requests).items():
        assert tuple(text) == whole[: whole.index(whole[number]) + 1]
    requests = [Request(length, prompt, length) for length in range(1, 25)]
    assert {n: tuple(text) for n, text in texts_of(loop, requests).items()} == {n: whole[:n] for n in range(1, 25)}


def test_a_layout_with_biases_taps_and_an_own_head(tmp_path: Path) -> None:
    make_target(tmp_path, "llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    make_draft(tmp_path / "draft", tmp_path, own_head=40)
    draft = {"kind": "dflash", "model": str(tmp_path / "draft"), "block_size": 6, "layers": 2}
    model = {"target": str(tmp_path), "dtype": "float32", "max_len": 160}
    plan = resolve(EngineConfig.model_validate({"model": model, "draft": draft}))
    chosen = prompts(7, 3)
    expected = run_requests(Loop(build(plan)), chosen, 24).outputs
    assert run_requests(DeviceLoop(build_device(plan)), chosen, 24).outputs == expected


@pytest.mark.parametrize("name", ["none", "dflash"])
def test_scores_are_those_of_the_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Echoed prompts longer than a chunk, in several slices, beside requests that ask for nothing."""
    monkeypatch.setattr("engine.device.scores.SCORED_ROWS", 5)
    requests = [
        replace(request, logprobs=None if request.id == 1 else request.id, echo=True) for request in mixed(4, 20)
    ]
    asked = config(DRAFTS[name])
    found: list[dict[int, list[Scored]]] = []
    for loop in (DeviceLoop(device(asked)), Loop(build(resolve(asked)))):
        made: dict[int, list[Scored]] = {request.id: [] for request in requests}
        for request in requests:
            assert loop.submit(request) is None
        while not loop.idle:
            for progress in loop.advance():
                made[progress.id] += [*progress.prompt_scores, *progress.scores]
        found.append(made)
    mine, its = found
    for request in requests:
        count = 0 if request.logprobs is None else len(request.prompt) - 1 + request.max_tokens
        assert len(mine[request.id]) == len(its[request.id]) == count
        for own, other in zip(mine[request.id], its[request.id], strict=True):
            assert own.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert len(own.top) == request.logprobs
            assert [value for _, value in own.top] == pytest.approx([value for _, value in other.top], abs=1e-4)


def test_lanes_that_fill_a_batch_up_touch_nobodys_cache() -> None:
    """What no request holds is poisoned with NaN, and must neither be written nor seen."""
    runtime = device(config(CHAIN))
    loop, state = DeviceLoop(runtime), runtime.rounds.state
    requests = mixed(3, 30)  # rounds of three requests are padded to four, and to prompts of 128 rows
    expected = texts_of(loop, requests)
    slots = runtime.pages.pages * 8
    for pool in (state.target, state.draft):
        assert pool is not None
        with torch.inference_mode():
            pool[:, :slots] = float("nan")
    assert texts_of(loop, requests) == expected
    most = sum(-(-(len(r.prompt) + r.max_tokens + 16) // 8) for r in requests) * 8
    for pool in (state.target, state.draft):
        assert pool is not None
        assert int(pool[:, :slots].isfinite().all(dim=(0, 2, 3)).sum()) <= most
        assert pool[:, slots:].isfinite().all()
    assert int(state.lengths[state.nobody]) == 0


def test_set_draft_between_rounds_keeps_the_text_and_refuses_what_does_not_fit() -> None:
    asked = config(CHAIN)
    expected = texts_of(Loop(build(resolve(asked))), mixed(3, 60))
    loop = DeviceLoop(device(asked))
    drafts: list[Draft] = [NoDraft(), DFlashDraft(block_size=4, layers=1), DFlashDraft(block_size=8)]
    made: dict[int, list[int]] = {request.id: [] for request in mixed(3, 60)}
    for request in mixed(3, 60):
        loop.submit(request)
    steps = 0
    while not loop.idle:
        steps += 1
        if steps % 5 == 0:
            loop.set_draft(drafts[steps // 5 % 3])
        for progress in loop.advance():
            made[progress.id] += progress.tokens
    assert made == expected
    with pytest.raises(ConfigError, match="rows a round"):
        loop.set_draft(DFlashDraft(block_size=16))
    with pytest.raises(ConfigError, match="without a drafter"):
        DeviceLoop(device(config(DRAFTS["none"]))).set_draft(DFlashDraft(block_size=8))


def test_forced_acceptance_has_the_mean_that_was_asked_for() -> None:
    loop = DeviceLoop(device(config(CHAIN | {"simulate_accept": 3.3})))
    run_requests(loop, smoke_prompts(9) * 3, 100)
    acceptance = loop.stats().acceptance
    assert acceptance["accept_length"] == pytest.approx(3.3, abs=0.1)
    assert set(acceptance["by_position"][:2]) == {1.0}  # type: ignore[index]
    assert not any(acceptance["by_position"][3:])  # type: ignore[index]


def test_what_can_never_run_is_said_at_once() -> None:
    loop = DeviceLoop(device(config(CHAIN, kv_tokens=128)))
    assert "lower max_tokens" in (loop.submit(Request(0, (1,) * 100, 60)) or "")
    assert loop.idle
    asked = config(CHAIN, page_size=32)  # the last page reaches beyond max_len
    for each in (DeviceLoop(device(asked)), Loop(build(resolve(asked)))):
        assert "model.max_len" in (each.submit(Request(0, (1,) * 120, 41)) or "")
        assert each.submit(Request(0, (1,) * 120, 40)) is None


def test_memory_that_runs_out_in_traffic_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = device(config(DRAFTS["none"]))
    loop = DeviceLoop(runtime)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runtime.rounds, "run", fail)
    assert loop.submit(Request(0, (1, 2, 3), 8)) is None
    assert loop.advance() == ()  # the prompt
    with pytest.raises(OutOfMemoryInTraffic, match=r"lower memory\.kv_tokens"):
        loop.advance()
    assert OutOfMemoryInTraffic.kind == "oom_load"


@dataclass(frozen=True)
class Arrival:
    """A request that comes after so many steps, and is cancelled so many steps later, if it still runs."""

    step: int
    prompt: int
    tokens: int
    style: int
    cancelled: int | None


arrivals = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 12),
        prompt=st.integers(0, 8),
        tokens=st.integers(1, 20),
        style=st.integers(0, 3),
        cancelled=st.none() | st.integers(0, 10),
    ),
    min_size=1,
    max_size=9,
)


@pytest.fixture(scope="module", params=["dflash", "policy"])
def shared(request: pytest.FixtureRequest) -> tuple[DeviceRuntime, dict[tuple[int, int], list[int]]]:
    """A small server, and the texts of every prompt and style alone."""
    asked = config(DRAFTS[request.param], max_running=3, kv_tokens=480)
    requests = [
        Request(9 * style + number, prompt, 20, (), SAMPLED[style])
        for number, prompt in enumerate(smoke_prompts(9))
        for style in range(4)
    ]
    alone = texts_of(Loop(build(resolve(asked))), requests)
    return device(asked), {(r.id % 9, r.id // 9): alone[r.id] for r in requests}


@settings(max_examples=25, deadline=None)
@given(plan=arrivals)
def test_any_schedule_gives_the_same_texts_and_every_page_back(
    shared: tuple[DeviceRuntime, dict[tuple[int, int], list[int]]], plan: list[Arrival]
) -> None:
    runtime, alone = shared
    loop, chosen = DeviceLoop(runtime), smoke_prompts(9)
    made: dict[int, list[int]] = {}
    finished: set[int] = set()
    steps, last = 0, max(each.step + (each.cancelled or 0) for each in plan)
    while steps <= last or not loop.idle:
        for number, each in enumerate(plan):
            if each.step == steps:
                made[number] = []
                request = Request(number, chosen[each.prompt], each.tokens, (), SAMPLED[each.style])
                assert loop.submit(request) is None
            if each.cancelled is not None and each.step + each.cancelled == steps:
                loop.cancel(number)
        for progress in loop.advance():
            assert progress.id not in finished
            made[progress.id] += progress.tokens
            finished |= {progress.id} if progress.finish else set()
        steps += 1
    assert runtime.pages.free == runtime.pages.pages
    assert loop.stats().running == loop.stats().waiting == loop.stats().tokens_used == 0
    for number, each in enumerate(plan):
        expected = alone[each.prompt, each.style][: each.tokens]
        assert made[number] == expected[: len(made[number])]
        assert each.cancelled is not None or number in finished
        assert len(made[number]) == each.tokens or number not in finished
