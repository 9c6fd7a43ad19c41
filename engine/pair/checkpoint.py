"""Model folders in the Hugging Face form: config.json, generation_config.json, safetensors in shards."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine.pair.modules import DraftConfig, Drafter, Target, TargetConfig
from engine.pair.tokenizer import END_OF_TEXT_ID, STOP_IDS

MAX_SHARD_BYTES = 15_000_000


def target_json(config: TargetConfig) -> dict[str, Any]:
    """config.json of a Qwen3ForCausalLM with tied embeddings."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **asdict(config),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "initializer_range": 0.02,
    }


def draft_json(config: DraftConfig) -> dict[str, Any]:
    """config.json of a z-lab DFlash drafter."""
    shared = target_json(config)
    taps = list(shared.pop("target_layer_ids"))
    mask = shared.pop("mask_token_id")
    return {
        **shared,
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": taps},
    }


def save_weights(module: nn.Module, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a state dict as one safetensors file, or as shards with an index when it is over 15 MB."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()
    shards: list[dict[str, Tensor]] = [{}]
    room = MAX_SHARD_BYTES
    for name, value in module.state_dict().items():
        tensor = value.detach().to("cpu", dtype).contiguous()
        if shards[-1] and tensor.nbytes + 256 > room:  # 256: the tensor's entry in the shard's header
            shards.append({})
            room = MAX_SHARD_BYTES
        room -= tensor.nbytes + 256
        shards[-1][name] = tensor
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors files, in the dtype stored."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no model*.safetensors in {folder}")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def save_target(target: Target, folder: Path) -> None:
    """A target folder, tokenizer aside."""
    save_weights(target, folder)
    _write_json(folder / "config.json", target_json(target.config))
    generation = {"do_sample": False, "eos_token_id": list(STOP_IDS), "pad_token_id": END_OF_TEXT_ID}
    _write_json(folder / "generation_config.json", generation)


def save_drafter(drafter: Drafter, folder: Path) -> None:
    """A drafter folder; it has no tokenizer, the target's is used."""
    save_weights(drafter, folder)
    _write_json(folder / "config.json", draft_json(drafter.config))


def load_target(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Target:
    """The target in ``folder``, in ``dtype``; a missing or extra tensor raises."""
    target = Target(TargetConfig(**_fields(TargetConfig, _read_json(folder / "config.json"))))
    target.load_state_dict(load_weights(folder))
    return target.to(device, dtype).eval().requires_grad_(False)


def load_drafter(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Drafter:
    """The drafter in ``folder``, in ``dtype``; keys in dflash_config win over top-level ones."""
    record = _read_json(folder / "config.json")
    merged = {**record, **record["dflash_config"]}
    merged["target_layer_ids"] = tuple(merged["target_layer_ids"])
    drafter = Drafter(DraftConfig(**_fields(DraftConfig, merged)))
    drafter.load_state_dict(load_weights(folder))
    return drafter.to(device, dtype).eval().requires_grad_(False)


def _fields(kind: type[TargetConfig], record: dict[str, Any]) -> dict[str, Any]:
    missing = [name for name in kind.__dataclass_fields__ if name not in record]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    return {name: record[name] for name in kind.__dataclass_fields__}


def _read_json(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def _write_json(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
