"""Sizes and settings of a training run: the shipped pair's, and the smoke pair's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.pair.corpus import HELD_OUT
from engine.pair.modules import DraftConfig, TargetConfig
from engine.pair.tokenizer import MASK_ID


@dataclass(frozen=True)
class Shape:
    """Sequences of the generations stage: prompt and new tokens, rows at once, share of the time, how many."""

    prompt: int
    new: int
    batch: int
    share: float
    most: int  # sequences are enough

    @property
    def length(self) -> int:
        """Tokens in a whole sequence."""
        return self.prompt + self.new


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run but its time, folders and seed."""

    target: TargetConfig
    draft: DraftConfig
    held_out: tuple[str, ...]
    stdlib_only: bool  # the smoke pair: no dependence on what else is installed
    corpus_bytes: int  # at most so much training text
    compared_vocab: int  # bytes per token are also given for a vocabulary of this size; 0 for none
    workload: str  # the evaluation prompts' file
    prompts: int
    minutes: tuple[float, ...]  # wall clock of each training stage, in their order
    scored_tokens: int  # of the held-out packages, at most
    window: int  # tokens of a target training window
    batch: int  # windows a step
    warmup: int  # steps in which the rates rise, in the target's stage and in the drafter's
    target_lr: tuple[float, float]  # matrices (Muon), the rest (AdamW)
    antiloop_share: float  # of the target stage's time
    antiloop_batch: int  # windows a step while loops are trained away
    antiloop_rows: int  # looping rows beside them
    shapes: tuple[Shape, ...]
    sampled_share: float  # of the generations; the rest is greedy
    # blocks in a sequence by block size: each anchor's place is random, the sizes are stratified
    blocks: tuple[tuple[int, int], ...]
    draft_rows: int  # sequences of the first shape a drafter step
    draft_lr: tuple[float, float]
    gamma: float  # a position's weight falls as exp(-(k-1)/gamma)
    layer_weights: tuple[float, ...]
    prefix_floor: float  # weight, relative, of a position behind a wrong one
    joint_target_lr: float  # the joint stage's rates, as shares of the stages' own
    joint_draft_lr: float
    joint_draft: float  # weight of the drafter's loss beside the next-token loss
    joint_pull: float  # weight of the target's pull toward the drafter's guesses
    joint_merge: float  # share of the joint stage's weights in the result


def _target(**sizes: int) -> TargetConfig:
    return TargetConfig(**sizes)


FULL_TARGET = _target(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=7,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)
SMOKE_TARGET = _target(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
)


def draft_config(
    target: TargetConfig, layers: int, intermediate: int, taps: tuple[int, ...], block: int
) -> DraftConfig:
    """A drafter with ``target``'s widths, heads, eps and rope."""
    return DraftConfig(
        **{
            **target.__dict__,
            "num_hidden_layers": layers,
            "intermediate_size": intermediate,
        },
        block_size=block,
        mask_token_id=MASK_ID,
        num_target_layers=target.num_hidden_layers,
        target_layer_ids=taps,
    )


FULL = Recipe(
    target=FULL_TARGET,
    draft=draft_config(FULL_TARGET, layers=4, intermediate=768, taps=(1, 3, 4, 5), block=16),
    held_out=HELD_OUT,
    stdlib_only=False,
    corpus_bytes=400_000_000,
    compared_vocab=8192,
    workload="workload.jsonl",
    prompts=200,
    minutes=(7.0, 4.5, 7.0, 2.0),
    scored_tokens=2_000_000,
    window=1024,
    batch=128,
    warmup=100,
    target_lr=(0.02, 0.004),
    antiloop_share=0.2,
    antiloop_batch=64,
    antiloop_rows=512,
    shapes=(Shape(96, 160, 4096, 0.8, 1_500_000), Shape(544, 224, 1024, 0.2, 200_000)),
    sampled_share=0.3,
    blocks=((4, 2), (8, 4), (12, 4), (16, 8)),
    draft_rows=256,
    draft_lr=(0.02, 0.002),
    gamma=7.0,
    layer_weights=(0.2, 0.3, 0.5, 1.0),
    prefix_floor=0.3,
    joint_target_lr=0.3,
    joint_draft_lr=0.6,
    joint_draft=0.5,
    joint_pull=0.1,
    joint_merge=0.55,
)
SMOKE = replace(
    FULL,
    target=SMOKE_TARGET,
    draft=draft_config(SMOKE_TARGET, layers=2, intermediate=160, taps=(0, 1, 2), block=16),
    held_out=("asyncio", "email"),
    stdlib_only=True,
    corpus_bytes=1_500_000,
    compared_vocab=0,
    workload="prompts.json",
    prompts=20,
    minutes=(0.29, 0.1, 0.34, 0.11),
    scored_tokens=20_000,
    window=192,
    batch=2,  # small steps, many of them: a minute is short of steps, not of text
    warmup=20,
    antiloop_share=0.0,  # a target of this size loops whatever is done
    antiloop_batch=4,
    antiloop_rows=8,
    shapes=(Shape(96, 96, 64, 1.0, 2000),),
    draft_rows=2,
    blocks=((4, 4), (8, 4), (16, 2)),
    gamma=4.0,
    layer_weights=(0.5, 1.0),
)
RECIPES = {"full": FULL, "smoke": SMOKE}
