"""Small models on disk, random but of real layouts, for the engine's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.model.draft import draft_shapes
from engine.shape import read_draft_shape

VOCAB = 96


def make_target(folder: Path, family: str = "qwen3", seed: int = 0, **changes: Any) -> Any:
    """Save a random Transformers model and return it (float32, eval)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    settings |= changes
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() == 1:  # norms and biases: not the neutral values they start with
                tensor.copy_((1.0 if "norm" in name else 0.0) + 0.2 * torch.randn_like(tensor))
    model = model.float().eval()
    model.save_pretrained(folder, max_shard_size=changes.get("shard", "1GB"))
    _tokenizer().save(str(folder / "tokenizer.json"))
    return model


def _tokenizer() -> Any:
    """One token a character: printable ASCII, as many as the vocabulary has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {chr(32 + i): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def make_draft(folder: Path, target: Path, layers: int = 3, seed: int = 1, own_head: int | None = None) -> None:
    """Save a random DFlash drafter for a target, in the z-lab layout, or speculators' with `own_head` draft tokens."""
    base = json.loads((target / "config.json").read_text())
    core = {k: base[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    core |= {k: base[k] for k in ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")}
    core |= {"model_type": "qwen3", "num_hidden_layers": layers, "rope_theta": 10000.0}
    core["layer_types"] = ["full_attention"] * layers
    if own_head is None:
        config: dict[str, Any] = core | {
            "architectures": ["DFlashDraftModel"],
            "block_size": 8,
            "num_target_layers": base["num_hidden_layers"],
            "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 2]},
        }
    else:
        config = {
            "speculators_model_type": "dflash",
            "architectures": ["DFlashSpeculator"],
            "transformer_layer_config": core,
            "draft_vocab_size": own_head,
            "block_size": 8,
            "aux_hidden_state_layer_ids": [1, 3],
            "mask_token_id": 1,
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in draft_shapes(read_draft_shape(folder)).items():
        if name == "d2t":
            tensors[name] = torch.arange(shape[0], dtype=torch.int64) % 3
        elif len(shape) == 1:
            tensors[name] = 1.0 + 0.2 * torch.randn(shape, generator=generator)
        else:
            tensors[name] = 0.3 * torch.randn(shape, generator=generator)
    save_file(tensors, folder / "model.safetensors")


def prompts(count: int, seed: int = 0, low: int = 3, high: int = 70) -> list[tuple[int, ...]]:
    """Return random prompts of mixed lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return [tuple(torch.randint(2, VOCAB, (n,), generator=generator).tolist()) for n in lengths]
