"""DFlash is lossless and frugal: the target's own text, and no committed position computed twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.bench import run_requests
from engine.config import EngineConfig
from engine.loop import Loop
from engine.request import Request
from engine.runtime import build, resolve
from tests.engine.tiny import make_draft, make_target, prompts

SMOKE = Path(__file__).parent.parent / "data" / "smoke_pair"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    make_target(folder)
    make_draft(folder / "draft", folder)
    return folder


def loop_of(target: Path, draft: dict[str, object], **extra: object) -> Loop:
    config = {"model": {"target": str(target), "dtype": "float32"}, "draft": draft} | extra
    return Loop(build(resolve(EngineConfig.model_validate(config))))


def smoke_prompts(count: int) -> list[tuple[int, ...]]:
    import json

    texts = json.loads((SMOKE / "prompts.json").read_text())
    return [tuple(prompt["token_ids"])[: 20 + 5 * i] for i, prompt in enumerate(texts[:count])]


@pytest.mark.parametrize("own_head", [None, 40])
def test_random_drafter_is_lossless(own_head: int | None, pair: Path, tmp_path: Path) -> None:
    make_draft(tmp_path, pair, own_head=own_head)
    chosen = prompts(9, 2)
    expected = run_requests(loop_of(pair, {"kind": "none"}), chosen, 30).outputs
    loop = loop_of(pair, {"kind": "dflash", "model": str(tmp_path), "block_size": 8})
    assert run_requests(loop, chosen, 30).outputs == expected


def test_speculators_layout_taps_and_maps_like_zlab(pair: Path, tmp_path: Path) -> None:
    """The same weights in both layouts propose the same, when the draft vocabulary maps onto the target's head."""
    from safetensors.torch import load_file, save_file

    make_draft(tmp_path / "zlab", pair)
    make_draft(tmp_path / "spec", pair, own_head=96)
    weights = load_file(tmp_path / "zlab" / "model.safetensors")
    head = load_file(pair / "model.safetensors")["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": head.clone()}, tmp_path / "spec" / "model.safetensors")
    made = []
    for name in ("zlab", "spec"):
        loop = loop_of(pair, {"kind": "dflash", "model": str(tmp_path / name), "block_size": 8})
        run_requests(loop, prompts(4, 5), 40)
        made.append((loop.stats().rounds["rounds"], loop.stats().acceptance))
    assert made[0] == made[1]


def test_every_round_computes_its_block_and_nothing_committed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """B rows a request in target and draft, one context row a committed token, positions strictly forward."""
    block = 8
    draft = {"kind": "dflash", "model": str(SMOKE / "draft"), "block_size": block}
    loop = loop_of(SMOKE / "target", draft, memory={"prefill_chunk": 16})
    chosen = smoke_prompts(5)
    engine = loop._engine
    committed: dict[int, int] = {}
    original_reserve, original_commit = engine.cache.reserve, engine.cache.commit

    def reserve(requests: list[int], rows: int) -> object:
        places = original_reserve(requests, rows)
        starts = places.positions.view(len(requests), rows)[:, 0].tolist()
        for request, start in zip(requests, starts, strict=True):
            assert start == committed.get(request, 0), "a committed position is computed again, or one is skipped"
        return places

    def commit(requests: list[int], counts: list[int]) -> None:
        original_commit(requests, counts)
        for request, count in zip(requests, counts, strict=True):
            committed[request] = committed.get(request, 0) + count

    monkeypatch.setattr(engine.cache, "reserve", reserve)
    monkeypatch.setattr(engine.cache, "commit", commit)
    made = run_requests(loop, chosen, 40)
    rounds = loop.stats().rounds
    assert rounds["prefill_rows"] == sum(map(len, chosen))
    assert rounds["target_rows"] == block * rounds["requests"] == rounds["target_kv_rows_written"]
    assert rounds["draft_rows"] == block * rounds["requests"]
    decoded = sum(committed.values()) - sum(map(len, chosen))
    assert rounds["context_rows"] == decoded
    assert rounds["draft_kv_rows_written"] == rounds["draft_rows"] + decoded
    assert rounds["tokens"] == made.tokens
    # Attention reads each request's cache once a round for all its rows: bounded by the longest in the batch.
    longest = max(map(len, chosen)) + 40 + block
    kv_bytes = engine.cache.target[:, 0].numel() * 4
    assert 0 < rounds["target_kv_bytes_read"] <= rounds["requests"] * longest * kv_bytes


def test_simulated_acceptance_hits_its_mean(pair: Path) -> None:
    draft = {"kind": "dflash", "model": str(pair / "draft"), "block_size": 8, "simulate_accept": 3.4}
    loop = loop_of(pair, draft)
    run_requests(loop, prompts(12, 7), 120)
    assert loop.stats().acceptance["accept_length"] == pytest.approx(3.4, abs=0.15)


def test_dummy_weights_serve_any_shape(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((pair / "config.json").read_text())
    config = EngineConfig.model_validate({"model": {"target": str(tmp_path), "load": "dummy", "dtype": "float32"}})
    runs = [run_requests(Loop(build(resolve(config))), prompts(2), 10).outputs for _ in range(2)]
    assert runs[0] == runs[1]
    assert config.synthetic


def test_cancel_frees_the_cache_and_leaves_others_alone(pair: Path) -> None:
    loop = loop_of(pair, {"kind": "dflash", "block_size": 4})
    chosen = prompts(3, 9)
    alone = run_requests(loop, chosen[:1], 50).outputs[0]
    free = loop._engine.cache.free_pages
    for number, prompt in enumerate(chosen):
        assert loop.submit(Request(number, prompt, 50)) is None
    made: list[int] = []
    for turn in range(200):
        if loop.idle:
            break
        for progress in loop.advance():
            if progress.id == 0:
                made += progress.tokens
        if turn == 3:
            loop.cancel(1)
            loop.cancel(2)
            loop.cancel(2)
    assert tuple(made) == alone
    assert loop._engine.cache.free_pages == free


def test_context_end_is_a_length_stop(pair: Path) -> None:
    model = {"target": str(pair), "dtype": "float32", "max_len": 64}
    loop = loop_of(pair, {"kind": "dflash", "block_size": 8}, model=model)
    assert loop.submit(Request(0, prompts(1, 1, 50, 51)[0], 14)) is None
    made: list[int] = []
    finish = None
    while not loop.idle:
        for progress in loop.advance():
            made += progress.tokens
            finish = progress.finish
    assert len(made) == 14
    assert finish == "length"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_runs_on_cuda(pair: Path) -> None:
    chosen = prompts(4, 2)
    loop = loop_of(pair, {"kind": "dflash", "block_size": 8})
    assert loop._engine.device.type == "cuda"
    assert run_requests(loop, chosen, 30).outputs == run_requests(loop_of(pair, {"kind": "none"}), chosen, 30).outputs
