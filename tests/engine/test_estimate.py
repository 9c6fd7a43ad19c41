"""The arithmetic against figures that are known from elsewhere: model cards, checkpoints, the model code."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.estimate import (
    CEILING,
    TYPICAL,
    DraftShape,
    Machine,
    MemoryEstimate,
    ModelShape,
    Refusal,
    advise,
    check,
    compute_dtype,
    draft_at,
    draft_parameters,
    expected_accept_length,
    gpu,
    headroom,
    kv_bytes_per_token,
    memory,
    parameters,
    round_time,
)
from engine.model.draft import draft_shapes
from engine.model.target import target_shapes
from tests.engine.folders import DRAFT_8B, LLAMA_31_8B, QWEN3_06B, QWEN3_8B, QWEN3_30B_A3B, draft, shape

H200 = gpu("H200")
CPU = Machine("a CPU", "cpu", 16 * 2**30, 40e9, 500e9, cores=2, source="measured")
Pair = tuple[ModelShape, DraftShape]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("qwen3-8b")
    return shape(folder / "target", QWEN3_8B), draft(folder / "draft")


def config(**sections: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model": {"target": "bundled"}, **sections})


def dflash(block: int = 16, **more: Any) -> dict[str, Any]:
    return {"kind": "dflash", "block_size": block, **more}


# --- parameters ---


@pytest.mark.parametrize(
    ("model", "total"),
    [
        (QWEN3_8B, 8_190_735_360),
        (QWEN3_06B, 596_049_920),
        (LLAMA_31_8B, 8_030_261_248),
        (QWEN3_30B_A3B, 30_532_122_624),
    ],
)
def test_parameters_of_known_models(tmp_path: Path, model: dict[str, Any], total: int) -> None:
    assert parameters(shape(tmp_path, model)).total == total


def test_active_parameters_of_a_mixture(tmp_path: Path) -> None:
    count = parameters(shape(tmp_path, QWEN3_30B_A3B))
    assert count.active_body + count.embedding + count.head == pytest.approx(3.35e9, rel=0.01)  # "A3B"
    assert count.touched_body(0) == count.shared_body
    assert count.touched_body(1) == pytest.approx(count.active_body)
    assert count.active_body < count.touched_body(16) < count.body
    assert count.touched_body(10_000) == pytest.approx(count.body)


def test_qwen3_8b_and_its_drafter(pair: Pair) -> None:
    target, drafter = pair
    assert kv_bytes_per_token(target, "bfloat16") == 147_456
    assert kv_bytes_per_token(drafter.core, "bfloat16") == 20_480
    assert draft_parameters(drafter).total == pytest.approx(1.05e9, rel=0.002)
    assert draft_parameters(drafter, 2).total < draft_parameters(drafter).total / 2
    assert kv_bytes_per_token(target, "fp8_e4m3", tensor=16) == 147_456 / 2 / 8  # one head, never less


sizes = st.integers(1, 4)


@settings(max_examples=60, deadline=None)
@given(
    family=st.sampled_from(["qwen3", "llama"]),
    kv_heads=sizes,
    groups=sizes,
    half=sizes,
    layers=sizes,
    hidden=st.integers(8, 40),
    tied=st.booleans(),
    bias=st.booleans(),
    taps=st.integers(1, 3),
    own_head=st.sampled_from([None, 5, 50]),
)
def test_counts_equal_the_tensors_that_the_model_code_loads(
    tmp_path_factory: pytest.TempPathFactory,
    family: str,
    kv_heads: int,
    groups: int,
    half: int,
    layers: int,
    hidden: int,
    tied: bool,
    bias: bool,
    taps: int,
    own_head: int | None,
) -> None:
    core = {
        "model_type": family,
        "vocab_size": 50,
        "hidden_size": hidden,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * groups,
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * half,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "attention_bias": bias,
        "mlp_bias": bias,
    }
    folder = tmp_path_factory.mktemp("counted")
    target = shape(folder / "target", core)
    assert parameters(target).total == _elements(target_shapes(target))
    keys = {"block_size": 4, "mask_token_id": 1, "target_layer_ids": [0] * taps}
    drafter = draft(folder / "draft", core, **keys, dflash_config={})
    assert draft_parameters(drafter).total == _elements(draft_shapes(drafter))
    if own_head is not None:
        spoken = {"speculators_model_type": "dflash", "transformer_layer_config": core, "draft_vocab_size": own_head}
        drafter = draft(folder / "own", spoken, **keys)
        elements = {name: dims for name, dims in draft_shapes(drafter).items() if name != "d2t"}  # ids, no weights
        assert draft_parameters(drafter).total == _elements(elements)


def _elements(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(dims) for dims in shapes.values())


# --- memory ---


def test_memory_is_itemised(pair: Pair) -> None:
    need = memory(config(draft=dflash()), *pair, H200)
    assert need.weights == 2 * 8_190_735_360
    assert need.draft_weights == 2 * draft_parameters(pair[1]).total
    assert need.kv == need.kv_tokens * 147_456
    assert need.draft_kv == need.kv_tokens * 20_480
    assert need.kv_bytes_per_token == 167_936
    assert need.total == sum(need.items().values())
    assert need.fits(H200)
    assert need.graphs == 0


def test_speculation_is_not_counted_where_there_is_none(pair: Pair) -> None:
    need = memory(config(), *pair, H200)
    assert need.draft_weights == need.draft_kv == 0
    shallow = memory(config(draft=dflash(layers=1)), *pair, H200)
    assert shallow.kv_bytes_per_token == 147_456 + 20_480 // 5


def test_kv_size_is_what_was_asked(pair: Pair) -> None:
    assert memory(config(memory={"kv_tokens": 1000, "page_size": 64}), *pair, H200).kv_tokens == 960
    default = memory(config(memory={"max_running": 2}, model={"target": "x", "max_len": 100}), *pair, H200)
    assert default.kv_tokens == 2 * 128  # a token a text may have, one verify row, whole pages of 32
    filled = memory(config(memory={"kv_fraction": 0.5}, backend={"kind": "sglang"}), *pair, H200)
    assert filled.weights + filled.kv == pytest.approx(0.5 * H200.memory, rel=1e-3)


def test_fp8_halves_what_it_covers(pair: Pair) -> None:
    plain = memory(config(memory={"kv_tokens": 1024}), *pair, H200)
    small = memory(
        config(model={"target": "x", "quantization": "fp8", "kv_dtype": "fp8_e4m3"}, memory={"kv_tokens": 1024}),
        *pair,
        H200,
    )
    assert small.kv == plain.kv / 2
    assert small.weights == pytest.approx(6.95e9 + 2 * 1.245e9, rel=0.001)  # embedding and head stay bfloat16
    odd = memory(config(model={"target": "x", "quantization": "zip"}), *pair, H200)
    assert odd.weights == plain.weights
    assert any("zip is unknown" in line for line in odd.guessed)


@settings(max_examples=60, deadline=None)
@given(tensor=st.sampled_from([1, 2, 4, 8]), pipeline=st.sampled_from([1, 2, 3]), running=st.integers(1, 64))
def test_memory_grows_with_load_and_shrinks_with_ranks(pair: Pair, tensor: int, pipeline: int, running: int) -> None:
    def need(tensor: int, pipeline: int, running: int) -> MemoryEstimate:
        limits = {"kv_tokens": 4096, "max_running": running}
        degrees = {"tensor": tensor, "pipeline": pipeline}
        return memory(config(draft=dflash(), parallel=degrees, memory=limits), *pair, H200)

    base = need(tensor, pipeline, running)
    assert need(tensor * 2, pipeline, running).total < base.total
    assert need(tensor, pipeline, running + 8).activations > base.activations
    assert base.weights * tensor * pipeline >= need(1, 1, running).weights  # ranks together hold it all
    if pipeline == 1:
        assert base.weights == pytest.approx(need(1, 1, running).weights / tensor, rel=1e-3)


def test_a_graph_costs_memory(pair: Pair) -> None:
    one = memory(config(graphs={"kind": "captured", "batch_sizes": [1]}), *pair, H200)
    two = memory(config(graphs={"kind": "captured", "batch_sizes": [1, 2]}), *pair, H200)
    assert 0 < one.graphs < two.graphs


def test_auto_dtype_follows_checkpoint_and_machine(tmp_path: Path) -> None:
    half = shape(tmp_path, QWEN3_8B, torch_dtype="float16")
    assert compute_dtype(config(), half, CPU) == "bfloat16"
    old = Machine("old", "cpu", 2**34, None, None, bfloat16=False)
    assert compute_dtype(config(), half, old) == "float32"
    assert compute_dtype(config(model={"target": "x", "dtype": "float64"}), half, old) == "float64"


# --- roofline ---


def test_ceilings_of_one_h200(pair: Pair) -> None:
    plain = round_time(config(), *pair, H200, running=1)
    assert plain.tokens_per_second == pytest.approx(317, abs=0.5)
    assert plain.propose is None
    block = round_time(config(draft=dflash()), *pair, H200, running=1, accept_length=6)
    assert block.tokens_per_second == pytest.approx(1559, abs=1)
    assert block.bound == plain.bound == "memory"
    assert block.seconds == pytest.approx(3.85e-3, rel=0.001)
    assert headroom(616, block) == pytest.approx(0.395, abs=0.001)


@pytest.mark.parametrize(
    ("block", "accept_length", "by_running"),
    [
        (16, 6.0, {1: 4.9, 8: 4.9, 16: 3.0, 32: 1.5, 64: 0.74, 128: 0.37, 256: 0.31}),
        (8, 4.5, {1: 3.7, 8: 3.7, 16: 3.7, 32: 2.2, 64: 1.1, 128: 0.56, 256: 0.46}),
    ],
)
def test_speculation_against_none_by_load(
    pair: Pair, block: int, accept_length: float, by_running: dict[int, float]
) -> None:
    for running, expected in by_running.items():
        speculative = round_time(
            config(draft=dflash(block)), *pair, H200, running, accept_length=accept_length, efficiency=TYPICAL
        )
        plain = round_time(config(), *pair, H200, running, efficiency=TYPICAL)
        ratio = speculative.tokens_per_second / plain.tokens_per_second
        assert ratio == pytest.approx(expected, abs=0.05 if expected > 1 else 0.01), running


def test_the_bound_turns_with_the_load(pair: Pair) -> None:
    assert round_time(config(draft=dflash()), *pair, H200, 128, accept_length=6).bound == "compute"
    assert round_time(config(), *pair, H200, 128).bound == "memory"


def test_context_costs_its_cache(pair: Pair) -> None:
    near = round_time(config(), *pair, H200, 8)
    far = round_time(config(), *pair, H200, 8, context=4096)
    assert far.verify.bytes - near.verify.bytes == 8 * 4096 * 147_456
    window = config(draft=dflash(window=64))
    short, long = (round_time(window, *pair, H200, 8, context=c, accept_length=4) for c in (64, 4096))
    assert short.propose is not None
    assert long.propose is not None
    assert short.propose.bytes == long.propose.bytes


def test_a_policy_is_estimated_by_the_draft_of_the_load(pair: Pair) -> None:
    policy = config(draft={"kind": "policy", "by_running": [[1, 4, dflash()], [5, None, {"kind": "none"}]]})
    alone = config(draft=dflash())
    assert round_time(policy, *pair, H200, 4, accept_length=5) == round_time(alone, *pair, H200, 4, accept_length=5)
    assert round_time(policy, *pair, H200, 5) == round_time(config(), *pair, H200, 5)
    assert draft_at(policy, 10_000).kind == "none"


def test_an_unmeasured_accept_length_is_an_assumption(pair: Pair) -> None:
    assumed = round_time(config(draft=dflash(8)), *pair, H200, 1)
    assert assumed.assumed
    assert assumed.accept_length == pytest.approx(expected_accept_length(8)) == pytest.approx(4.161, abs=0.001)
    forced = round_time(config(draft=dflash(8, simulate_accept=4.5)), *pair, H200, 1)
    assert (forced.assumed, forced.accept_length) == (False, 4.5)
    assert expected_accept_length(8, 1.0) == 8


def test_ranks_share_and_replicas_split(pair: Pair) -> None:
    one = round_time(config(), *pair, H200, 8)
    assert round_time(config(parallel={"tensor": 4}), *pair, H200, 8).seconds == pytest.approx(one.seconds / 4)
    two = round_time(config(parallel={"data": 2}), *pair, H200, 16)
    assert two.tokens_per_second == pytest.approx(2 * one.tokens_per_second)


def test_more_rows_wake_more_experts(tmp_path: Path) -> None:
    target = shape(tmp_path / "t", QWEN3_30B_A3B)
    drafter = draft(tmp_path / "d", hidden_size=2048, num_target_layers=48)
    plain = round_time(config(), target, drafter, H200, 1)
    block = round_time(config(draft=dflash()), target, drafter, H200, 1, accept_length=6)
    assert block.verify.seconds > 4 * plain.verify.seconds  # dense: equal, both read all weights once


def test_what_the_roofline_needs(pair: Pair) -> None:
    target, drafter = pair
    with pytest.raises(ConfigError, match="measure"):
        round_time(config(), target, None, Machine("x", "cpu", 1, None, None), 1)
    with pytest.raises(ConfigError, match="drafter's shape"):
        round_time(config(draft=dflash()), target, None, H200, 1)
    assert round_time(config(), target, drafter, H200, 1, efficiency=CEILING).verify.seconds > 0


# --- static judgement ---

TWO = Machine("two", "cuda", H200.memory, H200.bandwidth, H200.flops, devices=2)


@pytest.mark.parametrize(
    ("sections", "machine", "path", "words"),
    [
        ({"parallel": {"tensor": 3}}, None, "parallel.tensor", "does not divide the target's 32 attention heads"),
        ({"parallel": {"tensor": 3}}, None, "parallel.tensor", "8 KV heads"),
        ({"parallel": {"tensor": 3}}, None, "parallel.tensor", "vocabulary of 151936"),
        ({"parallel": {"tensor": 4}}, TWO, "parallel", "needs 4 GPUs, this machine has 2"),
        ({"parallel": {"tensor": 2, "expert": 2}}, TWO, "parallel.expert", "no experts"),
        ({"parallel": {"pipeline": 40}}, None, "parallel.pipeline", "36 layers"),
        ({"model": {"target": "x", "max_len": 50000}}, None, "model.max_len", "40960 positions"),
        ({"model": {"target": "x", "max_len": 16}, "draft": dflash(16)}, None, "draft", "16 rows"),
        ({"memory": {"kv_tokens": 16}, "draft": dflash(16)}, None, "memory.page_size", "exceeds kv_tokens"),
        ({"memory": {"kv_tokens": 16, "page_size": 8}, "draft": dflash(16)}, None, "memory.kv_tokens", "raise it"),
        ({"draft": dflash(layers=6)}, None, "draft.layers", "has 5 layers, not 6"),
        ({"draft": {"kind": "ddtree", "block_size": 4, "width": 2, "nodes": 15}}, None, "draft.nodes", "at most 14"),
        (
            {"draft": {"kind": "policy", "by_running": [[1, 2, dflash(layers=9)], [3, None, dflash()]]}},
            None,
            "draft.by_running.0.2.layers",
            "not 9",
        ),
        ({"graphs": {"kind": "captured"}}, CPU, "graphs.kind", "need a CUDA GPU"),
        ({"memory": {"kv_fraction": 0.1}}, None, "memory.kv_fraction", "raise it above 0.12"),
        ({"memory": {"kv_tokens": 10**6}}, None, "memory.kv_tokens", "lower kv_tokens to"),
        (
            {"memory": {"kv_fraction": 0.99, "max_running": 256}, "draft": dflash(), "backend": {"kind": "sglang"}},
            None,
            "memory.kv_fraction",
            "lower it to",
        ),
        ({}, gpu("RTX 4080"), "memory", "leave no room for a KV cache; raise parallel.tensor"),
    ],
)
def test_the_impossible_is_refused(
    pair: Pair, sections: dict[str, Any], machine: Machine | None, path: str, words: str
) -> None:
    asked = config(**sections)
    drafter = pair[1] if asked.draft.kind != "none" else None
    found = check(asked, pair[0], drafter, machine or gpu("H200", devices=64))
    assert any(refusal.path == path and words in refusal.reason for refusal in found), found
    assert all("\n" not in str(refusal) for refusal in found)


def test_a_foreign_drafter_is_refused(tmp_path: Path, pair: Pair) -> None:
    foreign = draft(tmp_path, num_target_layers=28)
    found = check(config(draft=dflash()), pair[0], foreign, H200)
    assert [refusal.path for refusal in found] == ["draft.model"]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"draft": dflash(32)},
        {"draft": {"kind": "ddtree", "block_size": 4, "nodes": 31}},
        {"draft": {"kind": "ddtree", "nodes": "auto", "width": 1}},
        {"graphs": {"kind": "captured", "batch_sizes": [1, 4, 16]}, "draft": dflash()},
        {"parallel": {"tensor": 8}},
        {"parallel": {"tensor": 16}},
        {"model": {"target": "x", "max_len": 40960}, "memory": {"kv_fraction": 0.8}},
        {"memory": {"kv_tokens": 2048, "page_size": 1}},
    ],
)
def test_the_possible_is_not(pair: Pair, sections: dict[str, Any]) -> None:
    assert check(config(**sections), *pair, gpu("H200", devices=16)) == ()


@settings(max_examples=60, deadline=None)
@given(
    fraction=st.floats(0.02, 0.99),
    running=st.integers(1, 400),
    block=st.integers(2, 64),
    name=st.sampled_from(["H200", "A100", "L40S", "RTX 4090", "L4"]),
)
@example(fraction=0.875, running=396, block=53, name="RTX 4090")  # no fraction is low enough
def test_the_advised_fraction_is_enough(pair: Pair, fraction: float, running: int, block: int, name: str) -> None:
    def judge(fraction: float) -> list[Refusal]:
        limits = {"kv_fraction": fraction, "max_running": running}
        asked = config(draft=dflash(block), memory=limits, backend={"kind": "sglang"})
        return list(check(asked, *pair, gpu(name)))

    for reason in (refusal.reason for refusal in judge(fraction)):
        _, lowered, number = reason.partition("lower it to ")
        if lowered:
            assert not any("kv_fraction" in again.path for again in judge(float(number)))
        _, raised, number = reason.partition("raise it above ")
        if raised:
            assert not any("raise it" in again.reason for again in judge(float(number) + 0.01))


def test_advice_warns_without_refusing(tmp_path: Path, pair: Pair) -> None:
    asked = config(
        draft=dflash(32),
        graphs={"kind": "captured", "batch_sizes": [1, 2]},
        memory={"kv_tokens": 128, "page_size": 16},
        model={"target": "x"},
    )
    short = draft(tmp_path / "short", max_position_embeddings=4096)
    paths = [advice.path for advice in advise(asked, pair[0], short)]
    assert paths == ["draft.block_size", "model.max_len", "graphs.batch_sizes", "memory.kv_tokens"]
    chain = config(draft={"kind": "ddtree", "block_size": 4, "nodes": 3, "width": 1})
    assert [advice.path for advice in advise(chain, *pair)] == ["draft.width"]
    assert advise(config(draft=dflash()), *pair) == ()
    half = shape(tmp_path / "half", QWEN3_8B, torch_dtype="float16")
    assert [advice.path for advice in advise(config(), half, None)] == ["model.dtype"]


def test_the_drafter_of_the_example_is_read_from_its_own_config(tmp_path: Path) -> None:
    """Guards the fixtures: an estimate must change when the drafter does."""
    small = draft(tmp_path, DRAFT_8B, num_hidden_layers=2, layer_types=["full_attention"] * 2)
    assert draft_parameters(small).layers == 2
