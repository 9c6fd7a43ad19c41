"""Hypothesis strategies of valid configurations, every field of every section included."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from engine.config import EngineConfig

words = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_categories=("C", "Z")), min_size=1, max_size=8
)
sizes = st.integers(1, 2**20)


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """None, or a value."""
    return st.none() | strategy


MODELS = st.fixed_dictionaries(
    {"target": words},
    optional={
        "revision": optional(words),
        "dtype": st.sampled_from(["auto", "bfloat16", "float32", "float64"]),
        "quantization": optional(words),
        "kv_dtype": st.sampled_from(["auto", "bfloat16", "float32", "float64", "fp8_e4m3", "fp8_e5m2"]),
        "max_len": optional(sizes),
        "trust_remote_code": st.booleans(),
        "load": st.sampled_from(["weights", "dummy"]),
    },
)


@st.composite
def dflash(draw: st.DrawFn, kind: str = "dflash") -> dict[str, Any]:
    """A valid chain."""
    block = draw(st.integers(2, 64))
    result: dict[str, Any] = {"kind": kind, "block_size": block, "layers": draw(optional(st.integers(1, 8)))}
    result["model"] = draw(optional(words))
    result["window"] = draw(optional(st.integers(block, 4096)))
    result["simulate_accept"] = draw(optional(st.floats(1, block)))
    return result


@st.composite
def ddtree(draw: st.DrawFn) -> dict[str, Any]:
    """A valid tree."""
    result: dict[str, Any] = draw(dflash("ddtree"))
    width = draw(optional(st.integers(1, 8)))
    least = result["block_size"] - 1 if width == 1 else 1
    if draw(st.booleans()):
        return result | {"width": width, "nodes": draw(st.integers(least, 512))}
    return result | {"width": width, "nodes": "auto", "max_nodes": draw(st.integers(least, 512))}


SIMPLE = st.just({"kind": "none"}) | dflash() | ddtree()


@st.composite
def policies(draw: st.DrawFn) -> dict[str, Any]:
    """A valid policy: ranges from 1 on, without gaps, the last one open."""
    ends = draw(st.lists(st.integers(1, 500), unique=True, max_size=4).map(sorted))
    starts = [1, *(end + 1 for end in ends)]
    ranges = [[low, high, draw(SIMPLE)] for low, high in zip(starts, [*ends, None], strict=True)]
    return {"kind": "policy", "by_running": ranges}


@st.composite
def raw_configs(draw: st.DrawFn) -> dict[str, Any]:
    """A valid EngineConfig as a file would hold it."""
    running = draw(st.integers(1, 512))
    batches = st.lists(st.integers(1, running), unique=True, min_size=1, max_size=6).map(sorted)
    expert = draw(st.sampled_from([1, 2, 4]))
    limits = draw(st.sampled_from([{}, {"kv_tokens": draw(sizes)}, {"kv_fraction": draw(st.floats(0.01, 0.99))}]))
    return {
        "model": draw(MODELS),
        "draft": draw(SIMPLE | policies()),
        "graphs": draw(
            st.just({"kind": "eager"}) | batches.map(lambda sizes: {"kind": "captured", "batch_sizes": sizes})
        ),
        "parallel": {
            "tensor": expert * draw(st.sampled_from([1, 2])),
            "data": draw(st.integers(1, 4)),
            "expert": expert,
            "pipeline": draw(st.integers(1, 4)),
        },
        "memory": {
            "max_running": running,
            "page_size": draw(optional(st.sampled_from([1, 16, 64]))),
            "prefill_chunk": draw(optional(sizes)),
            "prefix_cache": draw(st.booleans()),
            **limits,
        },
        "attention": {"backend": draw(words)},
        "backend": {"kind": draw(st.sampled_from(["native", "sglang", "vllm"])), "version": draw(optional(words))},
    }


def engine_configs() -> st.SearchStrategy[EngineConfig]:
    """Valid configurations."""
    return raw_configs().map(EngineConfig.model_validate)
