"""The model code against Transformers, on random small models of each family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.bench import run_requests
from engine.config import EngineConfig
from engine.loop import Loop
from engine.model.rope import inverse_frequencies, vector_scale
from engine.runtime import Runtime, build, resolve
from engine.shape import read_shape
from engine.speculate import Engine
from tests.engine.tiny import make_target, prompts

LLAMA3 = {
    "rope_theta": 10000.0,
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = {"rope_theta": 5e5, "rope_type": "default"}
LINEAR = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}

FAMILIES = {
    "qwen3 tied": ("qwen3", {}),
    "qwen3 untied, bias": ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
    "qwen3 one KV head": ("qwen3", {"num_key_value_heads": 1}),
    "qwen3 yarn": ("qwen3", {"rope_parameters": YARN}),
    "llama untied": ("llama", {"tie_word_embeddings": False, "rope_parameters": PLAIN}),
    "llama tied, biases, llama3": ("llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "llama linear, no GQA": ("llama", {"rope_parameters": LINEAR, "num_key_value_heads": 6}),
}


def runtime_of(folder: Path, dtype: str = "float32", **extra: object) -> Runtime:
    return build(resolve(EngineConfig.model_validate({"model": {"target": str(folder), "dtype": dtype}} | extra)))


@torch.inference_mode()
def logits_of(engine: Engine, tokens: list[int], chunks: list[int]) -> torch.Tensor:
    """Logits of every position, the prompt computed in the given chunk lengths."""
    from engine.model.layers import Rows

    engine.cache.admit(0, len(tokens) + 1)
    parts, first = [], 0
    for size in chunks:
        chunk = torch.tensor(tokens[first : first + size], device=engine.device)
        first += size
        places = engine.cache.reserve([0], size)
        rows = Rows(
            places.positions,
            places.write,
            engine.target.rotation[places.positions][:, None],
            engine.attention.plan([places.span(causal=True)]),
        )
        hidden, _ = engine.target.forward(chunk, rows, engine.cache.target, ())
        engine.cache.commit([0], [size])
        parts.append(engine.target.head(hidden))
    engine.cache.release(0)
    return torch.cat(parts).cpu()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    family, changes = FAMILIES[name]
    model = make_target(tmp_path, family, **changes)
    engine = runtime_of(tmp_path).engine
    for seed in range(3):
        tokens = list(prompts(1, seed, 40, 70)[0])
        with torch.inference_mode():
            expected = model(torch.tensor([tokens])).logits[0]
        for chunks in ([len(tokens)], [7] * (len(tokens) // 7) + [len(tokens) % 7] * (len(tokens) % 7 > 0)):
            found = logits_of(engine, tokens, chunks)
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["qwen3 untied, bias", "llama tied, biases, llama3"])
def test_float64_agrees_far_closer_than_float32_rounding(name: str, tmp_path: Path) -> None:
    family, changes = FAMILIES[name]
    model = make_target(tmp_path, family, **changes).double()
    engine = runtime_of(tmp_path, "float64").engine
    tokens = list(prompts(1, 5, 40, 70)[0])
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    # Transformers' rotary table is float32, so agreement ends there; far below what a wrong formula would show.
    found = logits_of(engine, tokens, [len(tokens)])
    assert torch.allclose(found, expected, rtol=0, atol=2e-5 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["qwen3 yarn", "llama tied, biases, llama3", "llama linear, no GQA"])
def test_rope_frequencies_equal_transformers(name: str, tmp_path: Path) -> None:
    family, changes = FAMILIES[name]
    model = make_target(tmp_path, family, **changes)
    shape = read_shape(tmp_path)
    rotary = model.model.rotary_emb
    assert torch.allclose(inverse_frequencies(shape.rope, shape.head_dim).float(), rotary.inv_freq, rtol=1e-6)
    assert vector_scale(shape.rope) == pytest.approx(rotary.attention_scaling)


@pytest.mark.parametrize("name", ["qwen3 tied", "llama untied"])
def test_greedy_text_equals_transformers(name: str, tmp_path: Path) -> None:
    family, changes = FAMILIES[name]
    model = make_target(tmp_path, family, **changes)
    loop = Loop(runtime_of(tmp_path))
    chosen = prompts(20, 3)
    together = run_requests(loop, chosen[:16], 24).outputs + run_requests(loop, chosen[16:], 24).outputs
    for prompt, made in zip(chosen, together, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(prompt) :].tolist()
        assert list(made) == expected


def test_sharded_weights_load_alike(tmp_path: Path) -> None:
    make_target(tmp_path / "one")
    make_target(tmp_path / "many", shard="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    tokens = list(prompts(1, 1)[0])
    one, many = (logits_of(runtime_of(tmp_path / name).engine, tokens, [len(tokens)]) for name in ("one", "many"))
    assert torch.equal(one, many)
