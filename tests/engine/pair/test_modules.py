"""Both models against the float64 reference, and the target against Transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.pair.acceptance import CHAIN, trajectories, verify_rounds
from engine.pair.acceptance import draft_everywhere as drafts_of
from engine.pair.checkpoint import load_drafter, load_target, load_weights, save_target, save_weights
from engine.pair.generate import Sampler
from engine.pair.modules import Drafter, Target
from engine.pair.paths import DRAFT, TARGET, WORKLOAD
from engine.pair.proof import own_greedy, transformers_greedy
from engine.pair.tokenizer import STOP_IDS, load_tokenizer
from engine.pair.workload import Prompt, load_workload
from tests.engine.pair import reference

SMOKE = Path(__file__).parents[2] / "data" / "smoke_pair"


def wide(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """A folder's weights in float64, and its config."""
    weights = {name: tensor.double().numpy() for name, tensor in load_weights(folder).items()}
    return weights, json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("block", [4, 16])
def test_drafter_is_the_reference(prompts: list[Prompt], block: int) -> None:
    """Every depth, several anchors at once, against one straight-line block each."""
    target = load_target(SMOKE / "target", torch.float64)
    drafter = load_drafter(SMOKE / "draft", torch.float64)
    weights, config = wide(SMOKE / "target")
    draft, draft_config = wide(SMOKE / "draft")
    ids = list(prompts[0].token_ids[:30])
    logits, after = reference.target_forward(weights, config, ids)
    taps = drafter.config.target_layer_ids
    hidden, features = target(torch.tensor([ids]), taps)
    assert features is not None
    np.testing.assert_allclose(target.logits(hidden)[0].numpy(), logits, rtol=1e-9, atol=1e-9)
    side_by_side = [np.concatenate([after[tap][i] for tap in taps]) for i in range(len(ids))]
    np.testing.assert_allclose(features[0].numpy(), np.stack(side_by_side), rtol=1e-9, atol=1e-9)

    anchors = torch.tensor([11, 29])
    offset, anchor = torch.arange(block).repeat(2), anchors.repeat_interleave(block)
    tokens = torch.where(offset == 0, torch.tensor(ids)[anchor], drafter.config.mask_token_id)
    before = torch.arange(len(ids)) < anchor[:, None]
    mask = torch.cat([before, anchor[:, None] == anchor], dim=1)[None, None]
    outputs = drafter(target.embed(tokens[None]), features, (anchor + offset)[None], torch.arange(len(ids))[None], mask)
    for depth, output in enumerate(outputs, start=1):
        got = target.logits(output)[0].view(2, block, -1)[:, 1:].numpy()
        for row, place in enumerate((11, 29)):
            expected = reference.draft_logits(
                draft, draft_config, weights["model.embed_tokens.weight"], side_by_side, place, ids[place],
                drafter.config.mask_token_id, block, depth,
            )  # fmt: skip
            np.testing.assert_allclose(got[row], expected, rtol=1e-9, atol=1e-9)


def chain_length(target: Target, drafter: Drafter, prompts: list[Prompt], new: int = 64) -> float:
    """Accept length of the full-depth chain at block 16, loops included."""
    ids = torch.tensor([prompt.token_ids for prompt in prompts])
    known = trajectories(target, drafter.config.target_layer_ids, ids, new, 0.0, STOP_IDS)
    depth = drafter.config.num_hidden_layers
    rounds = [count for drafts in drafts_of(target, drafter, known, 16, (depth,), 1)
              for count in verify_rounds(drafts, known, (CHAIN,))[0]]  # fmt: skip
    return sum(length - 1 for length in known.lengths) / sum(rounds)


def test_a_tap_one_layer_off_lowers_acceptance() -> None:
    """The shipped pair with features from one layer earlier: the silent mistake to guard against."""
    target, drafter = load_target(TARGET, torch.float32), load_drafter(DRAFT, torch.float32)
    few = load_workload(WORKLOAD)[::25]
    right = chain_length(target, drafter, few)
    taps = drafter.config.target_layer_ids
    drafter.config = replace(drafter.config, target_layer_ids=tuple(tap - 1 for tap in taps))
    assert chain_length(target, drafter, few) < 0.8 * right


def test_smoke_pair_accepts(target: Target, drafter: Drafter, prompts: list[Prompt]) -> None:
    assert chain_length(target, drafter, prompts) > 1.8


def test_transformers_gives_the_same_logits(target: Target, prompts: list[Prompt]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(SMOKE / "target", dtype=torch.float32).eval()
    ids = torch.tensor([prompt.token_ids for prompt in prompts])
    with torch.no_grad():
        theirs, (hidden, _) = model(ids).logits, target(ids)
    torch.testing.assert_close(target.logits(hidden), theirs, rtol=1e-4, atol=1e-4)


def test_transformers_gives_the_same_greedy_text(prompts: list[Prompt]) -> None:
    assert own_greedy(SMOKE / "target", prompts[::5], 64) == transformers_greedy(SMOKE / "target", prompts[::5], 64)
    few = load_workload(WORKLOAD)[::67]
    assert own_greedy(TARGET, few, 64) == transformers_greedy(TARGET, few, 64)


@pytest.mark.proof
def test_transformers_gives_the_same_greedy_text_on_20_prompts() -> None:
    chosen = load_workload(WORKLOAD)[::10]
    assert own_greedy(TARGET, chosen, 128) == transformers_greedy(TARGET, chosen, 128)


def test_sampler_is_the_full_forward(target: Target, prompts: list[Prompt]) -> None:
    """Cached decoding picks the arg-max of an uncached forward, rows of one batch untouched by others."""
    ids = torch.tensor([prompt.token_ids for prompt in prompts[:6]])
    out = Sampler(target, 6, 140, sampled=False).run(ids, torch.zeros(6))
    hidden, _ = target(out)
    assert (target.logits(hidden).argmax(dim=-1)[:, 95:-1] == out[:, 96:]).all()
    alone = Sampler(target, 1, 140, sampled=False).run(ids[2:3], torch.zeros(1))
    assert (alone == out[2:3]).all()


def test_sampled_rows_follow_the_distribution(target: Target, prompts: list[Prompt]) -> None:
    """First sampled tokens of one prompt: their frequencies are the softmax at the temperature."""
    rows = 800
    ids = torch.tensor([prompts[0].token_ids]).expand(rows, -1)
    torch.manual_seed(0)
    first = Sampler(target, rows, 97, sampled=True).run(ids, torch.full((rows,), 0.8))[:, 96]
    hidden, _ = target(ids[:1])
    expected = (target.logits(hidden[0, -1]) / 0.8).softmax(dim=-1)
    seen = torch.bincount(first, minlength=len(expected)) / rows
    assert (seen - expected).abs().sum() / 2 < 0.15  # total variation; about 0.08 by chance at 800 rows


def test_checkpoints_round_trip(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharded by size with an index, and read back bit for bit."""
    monkeypatch.setattr("engine.pair.checkpoint.MAX_SHARD_BYTES", 100_000)
    save_target(target, tmp_path)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert all(shard.stat().st_size <= 100_000 for shard in shards)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    again = load_target(tmp_path, torch.float32)
    assert all((a == b).all() for a, b in zip(again.parameters(), target.parameters(), strict=True))
    monkeypatch.undo()
    save_weights(target, tmp_path)
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]


def test_the_shipped_files() -> None:
    """Sizes, names and what serving needs to know."""
    files = [*TARGET.glob("*.safetensors"), *DRAFT.glob("*.safetensors")]
    assert sum(file.stat().st_size for file in files) <= 20_000_000
    assert max(file.stat().st_size for file in files) <= 15_000_000
    target, draft = (json.loads((folder / "config.json").read_text()) for folder in (TARGET, DRAFT))
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta"):
        assert draft[name] == target[name]
    assert draft["num_hidden_layers"] == 4
    assert draft["block_size"] == 16
    assert max(draft["dflash_config"]["target_layer_ids"]) < target["num_hidden_layers"] == draft["num_target_layers"]
    assert {name.split(".")[0] for name in load_weights(DRAFT)} == {"fc", "hidden_norm", "layers", "norm"}
    assert json.loads((TARGET / "generation_config.json").read_text())["do_sample"] is False
    assert sum(parameter.numel() for parameter in load_target(TARGET, torch.float32).parameters()) < 8_000_000


def test_tokenizer_and_workload_round_trip() -> None:
    tokenizer = load_tokenizer(TARGET)
    text = "def f(x):\n\treturn 'naïve \u4f60\u597d' # \x00\r\n   \n\n<|im_start|> é\n"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    prompts = load_workload(WORKLOAD)
    assert len(prompts) == 200
    assert len({prompt.package for prompt in prompts}) == 5
    for prompt in prompts:
        assert len(prompt.token_ids) == 96
        assert tuple(tokenizer.encode(prompt.text).ids) == prompt.token_ids


def test_the_chat_template_renders() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    turns = [{"role": role, "content": role.upper()} for role in ("system", "user", "assistant", "user")]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nSYSTEM<|im_end|>\n<|im_start|>user\nUSER<|im_end|>\n"
        "<|im_start|>assistant\nASSISTANT<|im_end|>\n<|im_start|>user\nUSER<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
