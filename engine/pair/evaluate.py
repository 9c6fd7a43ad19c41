"""Measure a pair: ``python -m engine.pair.evaluate [--target DIR --draft DIR --json OUT]``.

Prints accept length by block x depth x tree nodes x temperature and by held-out package, and the loop
share.  Accept length = committed tokens / verify rounds = accepted drafts + 1; requests are weighted by
their verify count; generations that loop are left out of it (and counted).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.loops import loops, recurs
from engine.pair.acceptance import (
    CHAIN,
    AcceptLength,
    Trajectories,
    accept_length,
    draft_everywhere,
    trajectories,
    verify_rounds,
)
from engine.pair.checkpoint import load_drafter, load_target
from engine.pair.modules import Drafter, Target
from engine.pair.paths import DRAFT, TARGET, TRAINING, WORKLOAD
from engine.pair.tokenizer import STOP_IDS
from engine.pair.workload import Prompt, load_workload

BLOCKS, NODES, TEMPERATURES = (4, 8, 12, 16), (CHAIN, 16, 32, 64), (0.0, 0.8)
NEW_TOKENS = 128
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Cell:
    """One measured setting.  ``nodes`` 0 is the chain; ``package`` None is all of them."""

    temperature: float
    block: int
    depth: int
    nodes: int
    package: str | None
    accept: AcceptLength  # without generations that loop: the number that is meant everywhere
    with_loops: AcceptLength
    no_recurrence: AcceptLength | None  # also without those whose end stood in the text before


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    blocks: Sequence[int] = BLOCKS
    depths: Sequence[int] = (1, 2, 3, 4)
    nodes: Sequence[int] = NODES
    temperatures: Sequence[float] = TEMPERATURES
    new_tokens: int = NEW_TOKENS
    seed: int = 0


def measure(target: Target, drafter: Drafter, prompts: Sequence[Prompt], plan: Plan) -> dict[str, Any]:
    """Every cell of ``plan``, loop shares by temperature, and the prompts' own loss."""
    device = target.model.embed_tokens.weight.device
    ids = torch.tensor([prompt.token_ids for prompt in prompts], device=device)
    cells: list[Cell] = []
    loop_share: dict[str, float] = {}
    recurrence: dict[str, float] = {}
    for temperature in plan.temperatures:
        torch.manual_seed(plan.seed)
        taps = drafter.config.target_layer_ids
        known = trajectories(target, taps, ids, plan.new_tokens, temperature, STOP_IDS)
        looped = [loops(known.generated(i)) for i in range(len(prompts))]
        loop_share[str(temperature)] = sum(looped) / len(looped)
        recurrence[str(temperature)] = sum(recurs(known.generated(i)) for i in range(len(prompts))) / len(prompts)
        for block in plan.blocks:
            cells += _block_cells(target, drafter, prompts, known, looped, block, temperature, plan)
    return {
        "cells": cells,
        "loop_share": loop_share,
        "recurrence_share": recurrence,
        "prompt_loss": prompt_loss(target, ids, prompts),
    }


def _block_cells(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    known: Trajectories,
    looped: Sequence[bool],
    block: int,
    temperature: float,
    plan: Plan,
) -> list[Cell]:
    """The cells of one block size: all depths and trees, over all packages and, in full depth, by package."""
    counts: dict[tuple[int, int], list[int]] = {}
    top = max(1, *plan.nodes)
    for drafts in draft_everywhere(target, drafter, known, block, plan.depths, top):
        for nodes, rounds in zip(plan.nodes, verify_rounds(drafts, known, plan.nodes), strict=True):
            counts.setdefault((drafts.depth, nodes), []).extend(rounds)
    cells = []
    for (depth, nodes), rounds in sorted(counts.items()):
        packages: list[str | None] = [None]
        if depth == max(plan.depths):
            packages += sorted({prompt.package for prompt in prompts})
        for package in packages:
            every = [i for i, prompt in enumerate(prompts) if package in (None, prompt.package)]
            kept = [i for i in every if not looped[i]]
            fresh = [i for i in kept if not recurs(known.generated(i))]
            if any(known.lengths[i] > 1 for i in kept):
                measured = accept_length(rounds, known.lengths, kept)
                with_loops = accept_length(rounds, known.lengths, every)
                strict = accept_length(rounds, known.lengths, fresh) if fresh else None
                cells.append(Cell(temperature, block, depth, nodes, package, measured, with_loops, strict))
    return cells


@torch.no_grad()
def prompt_loss(target: Target, ids: Tensor, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Loss on the prompts' own text (96-token contexts, so above the loss on long windows)."""
    total = 0.0
    for row in ids:
        hidden, _ = target(row[None, :-1])
        logits = target.logits(hidden)[0].float()
        total += torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum").item()
    scored = ids.shape[0] * (ids.shape[1] - 1)
    share = scored / ids.numel()  # the first token of a prompt is given, and so are its bytes
    size = sum(len(prompt.text.encode("utf-8")) for prompt in prompts) * share
    return {"nats_per_token": total / scored, "bits_per_byte": total / math.log(2) / size}


def table(cells: Sequence[Cell], temperature: float) -> str:
    """Accept length by block (rows), depth and nodes (columns), all packages."""
    chosen = {(c.block, c.depth, c.nodes): c.accept.weighted for c in cells
              if c.temperature == temperature and c.package is None}  # fmt: skip
    columns = sorted({(depth, nodes) for _, depth, nodes in chosen})
    head = "| block | " + " | ".join(f"d{depth} {_nodes(nodes)}" for depth, nodes in columns) + " |"
    lines = [head, "|" + " --- |" * (len(columns) + 1)]
    for block in sorted({block for block, _, _ in chosen}):
        values = (f"{chosen[(block, depth, nodes)]:.2f}" for depth, nodes in columns)
        lines.append(f"| {block} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def slice_table(cells: Sequence[Cell], temperature: float) -> str:
    """Accept length by held-out package (rows) and block (columns), full depth, chain."""
    depth = max(cell.depth for cell in cells)
    chosen = [c for c in cells if (c.temperature, c.depth, c.nodes) == (temperature, depth, CHAIN)]
    blocks = sorted({cell.block for cell in chosen})
    lines = ["| package | requests | " + " | ".join(f"block {b}" for b in blocks) + " |"]
    lines.append("|" + " --- |" * (len(blocks) + 2))
    for package in sorted({cell.package for cell in chosen if cell.package}):
        row = {cell.block: cell.accept for cell in chosen if cell.package == package}
        values = " | ".join(f"{row[block].weighted:.2f}" for block in blocks)
        lines.append(f"| {package} | {row[blocks[0]].requests} | {values} |")
    return "\n".join(lines)


def _recurrence_line(result: dict[str, Any], temperature: float) -> str:
    """What whole-line repetition beyond loops is worth."""
    cells: list[Cell] = result["cells"]
    depth = max(cell.depth for cell in cells)
    values = [f"{cell.no_recurrence.weighted:.2f} at block {cell.block}" for cell in cells
              if (cell.temperature, cell.depth, cell.nodes, cell.package) == (temperature, depth, CHAIN, None)
              and cell.no_recurrence]  # fmt: skip
    share = result["recurrence_share"][str(temperature)]
    return (f"The last 48 tokens stood in the text within 80 tokens before in {share:.1%} of generations; "
            f"without those too, full depth, chain: {', '.join(values)}.")  # fmt: skip


def _nodes(nodes: int) -> str:
    return "chain" if nodes == CHAIN else f"{nodes} nodes"


def report(result: dict[str, Any], training: dict[str, Any]) -> str:
    """The whole evaluation as text; what is quoted from training.json says so."""
    cells: list[Cell] = result["cells"]
    parts = []
    for temperature, share in result["loop_share"].items():
        parts += [f"Temperature {temperature}: {share:.1%} of generations loop and are left out below.",
                  "", table(cells, float(temperature)), "", slice_table(cells, float(temperature)), "",
                  _recurrence_line(result, float(temperature)), ""]  # fmt: skip
    loss = result["prompt_loss"]
    parts.append(f"Recomputed on the prompts (96-token contexts): {loss['nats_per_token']:.3f} nats/token, "
                 f"{loss['bits_per_byte']:.3f} bits/byte.")  # fmt: skip
    facts = training.get("joint") or training.get("target")
    if facts:
        parts.append("Quoted from training.json (held-out packages, 1024-token windows): "
                     f"{facts['held_out_nats_per_token']:.3f} nats/token, "
                     f"{facts['held_out_bits_per_byte']:.3f} bits/byte.")  # fmt: skip
    return "\n".join(parts)


def as_json(result: dict[str, Any]) -> dict[str, Any]:
    """``result`` with its cells as plain objects."""
    return {**result, "cells": [asdict(cell) for cell in result["cells"]]}


def read_training(folder: Path) -> dict[str, Any]:
    """training.json beside a target folder, empty when that pair has none."""
    path = folder.parent / TRAINING.name
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return record


def main(argv: list[str] | None = None) -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m engine.pair.evaluate", description=__doc__)
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--draft", type=Path, default=DRAFT)
    parser.add_argument("--prompts", type=Path, default=WORKLOAD)
    parser.add_argument("--first", type=int, help="only so many of the prompts, spread over all packages")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--chain-only", action="store_true", help="no trees: much quicker")
    parser.add_argument("--json", type=Path, help="write every number here")
    args = parser.parse_args(argv)
    target = load_target(args.target, DTYPES[args.dtype], args.device)
    drafter = load_drafter(args.draft, DTYPES[args.dtype], args.device)
    prompts = load_workload(args.prompts)
    if args.first:
        prompts = prompts[:: max(1, len(prompts) // args.first)][: args.first]
    depths = tuple(range(1, drafter.config.num_hidden_layers + 1))
    began = time.monotonic()
    plan = Plan(depths=depths, nodes=(CHAIN,) if args.chain_only else NODES)
    result = measure(target, drafter, prompts, plan)
    result["seconds"] = round(time.monotonic() - began, 1)
    print(report(result, read_training(args.target)))
    if args.json:
        args.json.write_text(json.dumps(as_json(result), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
