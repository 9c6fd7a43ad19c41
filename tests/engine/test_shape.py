"""What config.json says is what the shape says, in every spelling; what it cannot say ends in one line of advice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ModelError, UnsupportedModel
from engine.shape import (
    DefaultRope,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    YarnRope,
    build_target_layer_ids,
    read_draft_shape,
    read_shape,
)
from tests.engine.folders import DRAFT_8B, LLAMA_31_8B, QWEN3_8B, QWEN3_30B_A3B, draft, shape, write


def test_qwen3(tmp_path: Path) -> None:
    found = shape(tmp_path, QWEN3_8B)
    assert (found.hidden, found.layers, found.heads, found.kv_heads, found.head_dim) == (4096, 36, 32, 8, 128)
    assert (found.intermediate, found.vocab, found.tied, found.dtype) == (12288, 151936, False, "bfloat16")
    assert found.rope == DefaultRope(1e6)
    assert found.qk_norm
    assert found.eos == (151645,)
    assert found.experts is None
    assert set(found.windows) == {None}
    assert found.longest == 40960


def test_llama_derives_what_its_config_leaves_out(tmp_path: Path) -> None:
    found = shape(tmp_path, LLAMA_31_8B)
    assert found.head_dim == 128
    assert not found.qk_norm
    assert found.rope == Llama3Rope(500000.0, 8.0, 1.0, 4.0, 8192)
    assert found.eos == (128001, 128008, 128009)
    assert shape(tmp_path, LLAMA_31_8B, num_key_value_heads=None).kv_heads == 32


def test_experts(tmp_path: Path) -> None:
    experts = shape(tmp_path, QWEN3_30B_A3B).experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.intermediate, experts.layers) == (128, 8, 768, 48)
    some = shape(tmp_path, QWEN3_30B_A3B, mlp_only_layers=[1, 3], decoder_sparse_step=2).experts
    assert some is not None
    assert some.layers == 22  # every second of 48, without two


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": None}, DefaultRope(5e5)),
        ({"rope_theta": None}, DefaultRope(1e4)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, LinearRope(1e6, 2.0)),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, DynamicRope(1e6, 2.0, 40960)),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}},
            YarnRope(1e6, 4.0, 32768),
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 7.0,
                    "factor": 4,
                    "beta_fast": 16,
                    "truncate": False,
                }
            },
            YarnRope(7.0, 4.0, 40960, beta_fast=16.0, truncate=False),
        ),
    ],
)
def test_rope_spellings(tmp_path: Path, changes: dict[str, Any], expected: object) -> None:
    assert shape(tmp_path, QWEN3_8B, **changes).rope == expected


def test_yarn_lengthens_the_longest_text(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}
    assert shape(tmp_path, QWEN3_8B, rope_scaling=scaling).longest == 131072


def test_sliding_windows(tmp_path: Path) -> None:
    sliding = shape(tmp_path, QWEN3_8B, use_sliding_window=True, sliding_window=64, max_window_layers=30)
    assert sliding.windows == (None,) * 30 + (64,) * 6
    typed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64, "num_hidden_layers": 2}
    assert shape(tmp_path, QWEN3_8B, **typed).windows == (64, None)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"model_type": "mamba"}, UnsupportedModel, "qwen3, llama"),
        ({"model_type": None}, UnsupportedModel, "model_type None"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "supported: silu"),
        ({"torch_dtype": "int8"}, UnsupportedModel, "bfloat16, float16"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, UnsupportedModel, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, ModelError, "needs `factor`"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, ModelError, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModel, "partial_rotary_factor"),
        ({"hidden_size": None}, ModelError, "hidden_size: Field required"),
        ({"hidden_size": -1}, ModelError, "hidden_size"),
        ({"num_hidden_layers": True}, ModelError, "an integer is meant"),
        ({"vocab_size": 1.5}, ModelError, "an integer is meant"),
        ({"num_key_value_heads": 5}, ModelError, "not a multiple"),
        ({"head_dim": 33}, ModelError, "must be even"),
        ({"layer_types": ["full_attention"]}, UnsupportedModel, "36 layers"),
        ({"layer_types": ["sliding_attention"] * 36}, ModelError, "sliding_window is missing"),
        ({"dflash_config": {}}, ModelError, "this is a drafter"),
    ],
)
def test_a_bad_config_is_one_line_that_says_what_to_do(
    tmp_path: Path, changes: dict[str, Any], kind: type[ModelError], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        shape(tmp_path, QWEN3_8B, **changes)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "words"), [("{", "not JSON"), ("[]", "JSON object"), ("[" * 100000, "not JSON")])
def test_a_broken_file(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=words):
        read_shape(tmp_path)


def test_a_missing_folder_and_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        read_shape(tmp_path / "absent")
    with pytest.raises(ModelError, match="missing; copy"):
        read_draft_shape(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=st.sampled_from(sorted({*DRAFT_8B, *QWEN3_30B_A3B, "rope_parameters", "speculators_model_type"})), value=JSON
)
def test_any_value_in_any_key_is_read_or_refused(tmp_path: Path, key: str, value: object) -> None:
    for read, config in ((read_shape, QWEN3_30B_A3B), (read_draft_shape, DRAFT_8B)):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        assert "\n" not in _refusal(read, tmp_path)


def _refusal(read: Callable[[Path], object], folder: Path) -> str:
    """Return why the folder cannot be read, empty when it can; anything but a ModelError is a failure."""
    try:
        read(folder)
    except ModelError as error:
        return str(error)
    return ""


# --- drafters ---


def test_draft(tmp_path: Path) -> None:
    found = draft(tmp_path)
    assert (found.block_size, found.layers, found.taps) == (16, 5, (1, 9, 17, 25, 33))
    assert (found.mask_token_id, found.target_layers, found.head_rows) == (151669, 36, None)
    assert found.causal == (False,) * 5
    assert found.extras == ()


def test_dflash_config_goes_before_the_top_level(tmp_path: Path) -> None:
    inner = {"mask_token_id": 7, "target_layer_ids": [2, 4], "block_size": 8, "num_target_layers": 12}
    found = draft(tmp_path, dflash_config=inner, mask_token_id=1, target_layer_ids=[0], block_size=16)
    assert (found.mask_token_id, found.taps, found.block_size, found.target_layers) == (7, (2, 4), 8, 12)
    top = draft(tmp_path, dflash_config={}, mask_token_id=1, target_layer_ids=[3])
    assert (top.mask_token_id, top.taps) == (1, (3,))


def test_default_taps(tmp_path: Path) -> None:
    assert build_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert build_target_layer_ids(8, 4) == (1, 2, 4, 5)
    assert build_target_layer_ids(36, 1) == (18,)
    assert draft(tmp_path, dflash_config={"mask_token_id": 1}).taps == (1, 9, 17, 25, 33)


def test_speculators_layout_has_its_own_head_and_counts_layers_from_their_input(tmp_path: Path) -> None:
    config = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": {k: v for k, v in QWEN3_8B.items() if k != "architectures"}
        | {"num_hidden_layers": 2},
        "block_size": 8,
        "mask_token_id": 9,
        "draft_vocab_size": 32000,
        "aux_hidden_state_layer_ids": [2, 18, 34],
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 2048,
    }
    found = draft(tmp_path, config)
    assert (found.taps, found.head_rows, found.layers) == ((1, 17, 33), 32000, 2)
    assert found.core.windows == (2048, None)
    assert found.causal == (True, False)


def test_extras_are_named(tmp_path: Path) -> None:
    inner = DRAFT_8B["dflash_config"]
    assert draft(tmp_path, dflash_config=inner | {"selector_rank": 4}).extras == ("selector_rank",)
    assert draft(tmp_path, dflash_config=inner | {"attention_sink_bias": True}).extras == ("attention_sink_bias",)
    assert draft(tmp_path, dflash_config=inner | {"output_multiplier": 1.0, "selector_rank": 0}).extras == ()
    assert draft(tmp_path, is_causal=True).causal == (True,) * 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id is missing"),
        ({"block_size": None}, "block_size is missing"),
        ({"dflash_config": {"mask_token_id": 1}, "num_target_layers": None}, "num_target_layers are missing"),
        ({"dflash_config": {"mask_token_id": 1}, "num_target_layers": 2}, "too small"),
        ({"dflash_config": None, "block_size": None}, "no DFlash drafter"),
        ({"speculators_model_type": "eagle3"}, "supported: dflash"),
        ({"speculators_model_type": "dflash"}, "transformer_layer_config is missing"),
    ],
)
def test_a_bad_drafter(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        draft(tmp_path, **changes)


@pytest.mark.parametrize(
    ("target", "drafter", "words"),
    [
        ({}, {}, None),
        ({"hidden_size": 2048}, {}, "hidden size 4096"),
        ({}, {"target_hidden_size": 2048}, "reads hidden size 2048"),
        ({"vocab_size": 1000}, {}, "vocabulary"),
        ({"num_hidden_layers": 28}, {}, "36 target layers"),
        ({"num_hidden_layers": 28}, {"num_target_layers": None}, "target layer 33, the last one is 27"),
        ({}, {"dflash_config": {"mask_token_id": 151936, "target_layer_ids": [1]}}, "mask token"),
    ],
)
def test_mismatch(tmp_path: Path, target: dict[str, Any], drafter: dict[str, Any], words: str | None) -> None:
    found = draft(tmp_path / "draft", **drafter).mismatch(shape(tmp_path / "target", QWEN3_8B, **target))
    assert (found is None) == (words is None)
    assert words is None or words in str(found)


def test_writing_a_folder_again_replaces_it(tmp_path: Path) -> None:
    """Guards the helper: a stale config.json would make every test above pass."""
    write(tmp_path, QWEN3_8B)
    assert shape(tmp_path, QWEN3_8B, vocab_size=11).vocab == 11
