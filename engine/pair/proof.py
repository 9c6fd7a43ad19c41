"""What the shipped pair must reach, and Transformers' own greedy text (a test dependency) to hold it against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.pair.acceptance import CHAIN, trajectories
from engine.pair.checkpoint import load_target
from engine.pair.evaluate import Cell
from engine.pair.tokenizer import STOP_IDS
from engine.pair.workload import Prompt

MAX_WEIGHT_BYTES = 20_000_000
MAX_NATS_AT_8K = 2.3


@dataclass(frozen=True)
class Check:
    """A measured value against a bound on one side."""

    name: str
    measured: float
    limit: float
    at_most: bool = False

    @property
    def bound(self) -> str:
        """The bound in signs."""
        return f"{'<=' if self.at_most else '>='} {self.limit:g}"

    @property
    def holds(self) -> bool:
        """Whether the bound is kept."""
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit


def accept_at(cells: Sequence[Cell], block: int, depth: int, nodes: int = CHAIN, temperature: float = 0.0) -> float:
    """Accept length of one measured setting over all packages."""
    for cell in cells:
        key = (cell.block, cell.depth, cell.nodes, cell.temperature, cell.package)
        if key == (block, depth, nodes, temperature, None):
            return cell.accept.weighted
    raise ValueError(f"not measured: block {block}, depth {depth}, nodes {nodes}, temperature {temperature}")


def acceptance_checks(result: dict[str, Any], block: int, temperature: float) -> list[Check]:
    """The thresholds on an evaluation's cells of one block size and temperature; most settings have none."""
    cells: list[Cell] = result["cells"]
    deep = max(cell.depth for cell in cells)
    full = accept_at(cells, block, deep, temperature=temperature)
    match block, temperature:
        case 8, 0.0:
            return [Check("accept length, block 8, greedy", full, 3.7)]
        case 16, 0.0:
            return [
                Check("accept length, block 16, greedy", full, 4.0),
                Check("gain of depth 1 to full, block 16", full - accept_at(cells, 16, 1), 1.5),
                Check("gain of a 32-node tree, block 16", accept_at(cells, 16, deep, 32) - full, 0.6),
                Check("loop share, greedy", result["loop_share"]["0.0"], 0.1, at_most=True),
            ]
        case 16, 0.8:
            return [Check("accept length, block 16, temperature 0.8", full, 2.0)]
    return []


def file_checks(training: dict[str, Any], weight_bytes: int) -> list[Check]:
    """The thresholds on what is shipped and on the loss in training.json, where there is one."""
    size = Check("weights, bytes", float(weight_bytes), MAX_WEIGHT_BYTES, at_most=True)
    if "target" not in training:
        return [size]
    return [size, Check("held-out loss, nats per 8k-vocabulary token", nats_at_8k(training), MAX_NATS_AT_8K, True)]


def checks(result: dict[str, Any], training: dict[str, Any], weight_bytes: int) -> list[Check]:
    """Every threshold, from a whole evaluation."""
    settings = ((16, 0.0), (8, 0.0), (16, 0.8))
    reached = [check for setting in settings for check in acceptance_checks(result, *setting)]
    return [*reached, *file_checks(training, weight_bytes)]


def nats_at_8k(training: dict[str, Any]) -> float:
    """Held-out loss per token of an 8192-entry vocabulary trained on the same corpus.

    Loss per byte does not depend on how bytes are cut into tokens, so it is carried over by the measured
    bytes per token of each vocabulary; for an 8192-entry vocabulary it is the loss itself.
    """
    facts = training.get("joint") or training["target"]
    at_8k: float = training["corpus"].get("bytes_per_token_at_8k", facts["bytes_per_token"])
    return at_8k / float(facts["bytes_per_token"]) * float(facts["held_out_nats_per_token"])


def transformers_greedy(folder: Path, prompts: Sequence[Prompt], new: int) -> list[list[int]]:
    """Transformers' greedy continuations in float32, one prompt at a time, stop tokens included."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt.token_ids])
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        texts.append([int(token) for token in out[0, ids.shape[1] :]])
    return texts


def own_greedy(folder: Path, prompts: Sequence[Prompt], new: int) -> list[list[int]]:
    """The same continuations by the pair's own modules, in float32."""
    target = load_target(folder, torch.float32)
    ids = torch.tensor([prompt.token_ids for prompt in prompts])
    known = trajectories(target, (0,), ids, new, 0.0, STOP_IDS)
    return [known.generated(i) for i in range(len(prompts))]
