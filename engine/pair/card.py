"""Write the model card: ``python -m engine.pair.card --json EVALUATION [--out CARD.md]``.

``EVALUATION`` is what ``python -m engine.pair.evaluate --json`` or ``make proof-pair`` wrote for the shipped weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from engine.pair.acceptance import AcceptLength
from engine.pair.evaluate import Cell, report
from engine.pair.paths import ROOT, TARGET, TRAINING
from engine.pair.proof import checks, nats_at_8k

INTRO = """\
# The bundled model pair

A small Qwen3-layout target and its DFlash drafter, trained from scratch on Python source, shipped so that
every part of this project can be run and measured without downloading a model. It completes Python-like
text; it is not useful as an assistant.

| | target (`target/`) | drafter (`draft/`) |
| --- | --- | --- |
| layout | `Qwen3ForCausalLM`, tied embeddings | z-lab DFlash: `fc`, `hidden_norm`, `layers.N`, `norm` |
| parameters | {target_parameters:,} | {draft_parameters:,} |
| layers, width, feed-forward | {layers}, {hidden}, {wide} | {draft_layers}, {hidden}, {draft_wide} |
| heads (KV heads) x size | {heads} ({kv}) x {size} | the same |
| vocabulary | {vocab} byte-level BPE | the target's embedding and head |
| taps | | after target layers {taps} (numbered from 0) |
| dtype, bytes | bfloat16, {target_bytes:,} | bfloat16, {draft_bytes:,} |

Chat template: `<|im_start|>role`, newline, text, `<|im_end|>`; a tenth of the training documents was wrapped
in it. Generation stops at `<|endoftext|>` or `<|im_end|>`; greedy unless asked otherwise. Trained on windows
of 1024 tokens (target) and 256 or 768 tokens (drafter; its last stage 256 only).
"""
EVALUATION = """\
## Evaluation

`python -m engine.pair.evaluate` on `workload.jsonl`: 200 prompts of 96 tokens, 40 from each of the held-out
packages {held_out}; 128 new tokens; weights as shipped, in bfloat16 on a CPU. Accept length = committed tokens
/ verify rounds = accepted drafts + 1, the first generated token (the prefill's) not counted; each request
weighs by its number of verify rounds; a last round cut short by the end of the request counts in full.
Generations that loop (last 48 tokens with a period of at most 16) are left out. dN = the first N draft layers;
"n nodes" = a DDTree (arXiv 2604.12989) of n nodes beside the root.
"""


def card(result: dict[str, Any], training: dict[str, Any], folder: Path = ROOT) -> str:
    """The whole card as Markdown."""
    facts = training["joint"]
    sections = [
        INTRO.format(**_shape(folder)),
        EVALUATION.format(held_out=", ".join(training["corpus"]["held_out"])),
        report(result, training),
        _thresholds(result, training, folder),
        _loss(facts, training),
        _training(training),
        _corpus(training["corpus"]),
    ]
    return "\n".join(section.rstrip() + "\n" for section in sections)


def _shape(folder: Path) -> dict[str, Any]:
    target, draft = (json.loads((folder / n / "config.json").read_text()) for n in ("target", "draft"))
    sizes = {n: sum(f.stat().st_size for f in (folder / n).glob("*.safetensors")) for n in ("target", "draft")}
    return {
        "target_parameters": _parameters(folder / "target"),
        "draft_parameters": _parameters(folder / "draft"),
        "layers": target["num_hidden_layers"],
        "draft_layers": draft["num_hidden_layers"],
        "hidden": target["hidden_size"],
        "wide": target["intermediate_size"],
        "draft_wide": draft["intermediate_size"],
        "heads": target["num_attention_heads"],
        "kv": target["num_key_value_heads"],
        "size": target["head_dim"],
        "vocab": target["vocab_size"],
        "taps": ", ".join(map(str, draft["dflash_config"]["target_layer_ids"])),
        "target_bytes": sizes["target"],
        "draft_bytes": sizes["draft"],
    }


def _parameters(folder: Path) -> int:
    from engine.pair.checkpoint import load_weights

    return sum(tensor.numel() for tensor in load_weights(folder).values())


def _thresholds(result: dict[str, Any], training: dict[str, Any], folder: Path) -> str:
    size = sum(file.stat().st_size for n in ("target", "draft") for file in (folder / n).glob("*.safetensors"))
    lines = ["### Against the project's bounds", "", "| check | measured | bound | holds |", "|" + " --- |" * 4]
    for check in checks(result, training, size):
        lines.append(f"| {check.name} | {check.measured:.4g} | {check.bound} | {'yes' if check.holds else 'NO'} |")
    return "\n".join(lines) + "\n"


def _loss(facts: dict[str, Any], training: dict[str, Any]) -> str:
    return (
        "### Held-out loss\n\n"
        f"{facts['held_out_nats_per_token']:.3f} nats per token, {facts['held_out_bits_per_byte']:.3f} bits per "
        f"byte, on {facts['held_out_scored_tokens']:,} tokens of the held-out packages in windows of 1024, measured "
        "when the weights were made (the text is not shipped). Per token of an 8192-entry vocabulary trained on "
        f"the same corpus that is {nats_at_8k(training):.3f} nats "
        f"({training['corpus']['bytes_per_token_at_8k']:.3f} bytes per token instead of "
        f"{facts['bytes_per_token']:.3f}).\n"
    )


def _training(training: dict[str, Any]) -> str:
    lines = ["## Training", "", training["notes"], "", "| stage | seconds | device | what |", "|" + " --- |" * 4]
    for stage in ("target", "generations", "drafter", "joint"):
        facts = training[stage]
        what = {k: v for k, v in facts.items() if k in ("steps", "tokens", "blocks", "96+160", "544+224")}
        text = json.dumps(what).replace("|", "/")
        lines.append(f"| {stage} | {facts['seconds']} | {facts['machine']['device']} | `{text}` |")
    return "\n".join(lines) + "\n"


def _corpus(corpus: dict[str, Any]) -> str:
    held_out = set(corpus["held_out"])
    lines = [
        "## Corpus",
        "",
        f"{corpus['train_files']:,} Python files, {corpus['train_bytes'] / 1e6:.0f} MB, {corpus['train_tokens']:,} "
        f"tokens, of the permissively licensed packages below (by their own licence metadata) and the standard "
        f"library; {corpus['held_out_files']} files of the held-out packages. Dropped files by reason: "
        + ", ".join(f"{reason} {count}" for reason, count in sorted(corpus["dropped_files"].items()))
        + ".",
        "",
        "| package | licence | kB | |",
        "|" + " --- |" * 4,
    ]
    for name, facts in corpus["packages"].items():
        mark = "held out" if name in held_out else ""
        lines.append(f"| {name} | {facts['licence']} | {facts['bytes'] // 1000} | {mark} |")
    return "\n".join(lines) + "\n"


def read_result(path: Path) -> dict[str, Any]:
    """An evaluation's JSON, or what the pair's proof recorded of all its parts, with its cells as objects again."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    parts = [step["figures"] for step in document["steps"].values()] if "steps" in document else [document]
    parts = [part for part in parts if "cells" in part]
    result: dict[str, Any] = {"prompt_loss": parts[0]["prompt_loss"]}
    for name in ("loop_share", "recurrence_share"):
        result[name] = {key: value for part in parts for key, value in part[name].items()}
    result["cells"] = [_cell(cell) for part in parts for cell in part["cells"]]
    return result


def _cell(cell: dict[str, Any]) -> Cell:
    lengths = {name: cell[name] and AcceptLength(**cell[name]) for name in ("accept", "with_loops", "no_recurrence")}
    return Cell(**cell | lengths)


def main(argv: list[str] | None = None) -> int:
    """Parse and write."""
    parser = argparse.ArgumentParser(prog="python -m engine.pair.card", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="an evaluation of the shipped weights")
    parser.add_argument("--out", type=Path, default=ROOT / "CARD.md")
    args = parser.parse_args(argv)
    training = json.loads((TARGET.parent / TRAINING.name).read_text(encoding="utf-8"))
    args.out.write_text(card(read_result(args.json), training), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
