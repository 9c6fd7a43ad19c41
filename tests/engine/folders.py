"""Folders that hold only a config.json, of well-known and of made-up models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.shape import DraftShape, ModelShape, read_draft_shape, read_shape

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "sliding_window": None,
    "eos_token_id": 151645,
}
QWEN3_06B = QWEN3_8B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B = QWEN3_8B | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
LLAMA_31_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "torch_dtype": "bfloat16",
    "eos_token_id": [128001, 128008, 128009],
}
DRAFT_8B: dict[str, Any] = QWEN3_8B | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "layer_types": ["full_attention"] * 5,
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}


def write(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    """Write config.json and return the folder; a change to None removes the key."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = {key: value for key, value in (config | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(merged), encoding="utf-8")
    return folder


def shape(folder: Path, config: dict[str, Any], **changes: Any) -> ModelShape:
    """Write and read a target."""
    return read_shape(write(folder, config, **changes))


def draft(folder: Path, config: dict[str, Any] = DRAFT_8B, **changes: Any) -> DraftShape:
    """Write and read a drafter."""
    return read_draft_shape(write(folder, config, **changes))
