"""The pair's proof: every threshold at full counts, and Transformers' own greedy text (a test dependency)."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from engine.pair.acceptance import CHAIN, trajectories
from engine.pair.checkpoint import load_target
from engine.pair.evaluate import NEW_TOKENS, Cell, as_json, read_training
from engine.pair.tokenizer import STOP_IDS
from engine.pair.workload import Prompt

TEXT_PROMPTS = 20
MAX_WEIGHT_BYTES = 20_000_000
MAX_LOOP_SHARE = 0.10
MAX_NATS_AT_8K = 2.3


def accept_at(cells: Sequence[Cell], block: int, depth: int, nodes: int = CHAIN, temperature: float = 0.0) -> float:
    """Accept length of one measured setting over all packages."""
    for cell in cells:
        key = (cell.block, cell.depth, cell.nodes, cell.temperature, cell.package)
        if key == (block, depth, nodes, temperature, None):
            return cell.accept.weighted
    raise ValueError(f"not measured: block {block}, depth {depth}, nodes {nodes}, temperature {temperature}")


def checks(result: dict[str, Any], training: dict[str, Any], weight_bytes: int) -> list[dict[str, Any]]:
    """Each threshold: what was measured, the bound, and whether it holds."""
    cells: list[Cell] = result["cells"]
    deep = max(cell.depth for cell in cells)
    block_16 = accept_at(cells, 16, deep)
    rows: list[tuple[str, float, str, float]] = [
        ("accept length, block 16, greedy", block_16, ">=", 4.0),
        ("accept length, block 8, greedy", accept_at(cells, 8, deep), ">=", 3.7),
        ("accept length, block 16, temperature 0.8", accept_at(cells, 16, deep, temperature=0.8), ">=", 2.0),
        ("gain of depth 1 to full, block 16", block_16 - accept_at(cells, 16, 1), ">=", 1.5),
        ("gain of a 32-node tree, block 16", accept_at(cells, 16, deep, 32) - block_16, ">=", 0.6),
        ("loop share, greedy", result["loop_share"]["0.0"], "<=", MAX_LOOP_SHARE),
        ("weights, bytes", float(weight_bytes), "<=", MAX_WEIGHT_BYTES),
    ]
    if "target" in training:
        rows.append(("held-out loss, nats per 8k-vocabulary token", nats_at_8k(training), "<=", MAX_NATS_AT_8K))
    return [
        {"check": name, "measured": value, "bound": f"{sign} {bound:g}",
         "holds": value >= bound if sign == ">=" else value <= bound}
        for name, value, sign, bound in rows
    ]  # fmt: skip


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


def prove(
    path: Path, target: Path, draft: Path, result: dict[str, Any], prompts: Sequence[Prompt], argv: list[str]
) -> int:
    """Write the proof; 0 when every check holds, 1 otherwise."""
    chosen = prompts[:: max(1, len(prompts) // TEXT_PROMPTS)][:TEXT_PROMPTS]
    theirs = transformers_greedy(target, chosen, NEW_TOKENS)
    equal = sum(a == b for a, b in zip(theirs, own_greedy(target, chosen, NEW_TOKENS), strict=True))
    size = sum(file.stat().st_size for folder in (target, draft) for file in folder.glob("*.safetensors"))
    verdicts = checks(result, read_training(target), size)
    verdicts.append({
        "check": f"greedy text of Transformers in float32, {len(chosen)} prompts",
        "measured": equal,
        "bound": f"= {len(chosen)}",
        "holds": equal == len(chosen),
    })  # fmt: skip
    proof = {"machine": machine(), "commit": commit(), "command": argv, "checks": verdicts, **as_json(result)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(proof, indent=1) + "\n", encoding="utf-8")
    for verdict in verdicts:
        mark = "holds" if verdict["holds"] else "MISSES"
        print(f"{mark:7} {verdict['check']}: {verdict['measured']:.4g} (bound {verdict['bound']})")
    return 0 if all(verdict["holds"] for verdict in verdicts) else 1


def machine() -> dict[str, Any]:
    """Processor and library versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = {name: version(name) for name in ("torch", "transformers", "tokenizers", "safetensors")}
    return {
        "cpu": names[0] if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **versions,
    }


def commit() -> str | None:
    """The checkout's commit id, None outside a git checkout."""
    root = Path(__file__).resolve().parent
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"],  # noqa: S607 - whichever git the user has
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or None
