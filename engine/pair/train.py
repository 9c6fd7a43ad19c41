"""Train a pair: ``python -m engine.pair.train --out DIR``.

The corpus is read and cut into tokens first (most of a minute for the full one); then come the stages target
-> generations -> drafter -> joint, each bounded by wall clock (at most 8 minutes), one after the other; last,
accept length and loop share on the held-out prompts.  State between stages lies in the work folder, so one
can be run again on its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.pair.acceptance import CHAIN
from engine.pair.checkpoint import load_drafter, load_target, save_drafter, save_target
from engine.pair.corpus import Corpus, build_corpus, installed_sources, standard_library
from engine.pair.data import (
    chat_frame,
    chat_prompts,
    encode_stream,
    held_out_prompts,
    load_arrays,
    save_arrays,
    windows,
)
from engine.pair.evaluate import Plan, measure
from engine.pair.generate import Sampler, looping
from engine.pair.modules import Target
from engine.pair.optim import Clock
from engine.pair.recipe import RECIPES, Recipe, Shape
from engine.pair.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from engine.pair.train_drafter import train_drafter
from engine.pair.train_joint import JointTrainer
from engine.pair.train_target import held_out_loss, train_target
from engine.pair.workload import load_workload, save_workload

STAGES = ("corpus", "target", "generations", "drafter", "joint", "evaluation")
TOKENIZER_BYTES = 60_000_000  # text the BPE merges are learnt from
CHAT_ROWS = 0.1  # of the generations' prompts are chat turns
SAMPLING_TEMPERATURES = (0.6, 1.0)  # sampled generations draw theirs between these


class Run:
    """One training run's folders, device and record."""

    def __init__(self, recipe: Recipe, out: Path, work: Path, seed: int, device: torch.device) -> None:
        self.recipe, self.out, self.work, self.seed, self.device = recipe, out, work, seed, device
        self.began = time.monotonic()

    def log(self, text: str) -> None:
        """One line of progress, with seconds since the start."""
        print(f"[{time.monotonic() - self.began:6.1f}s] {text}", flush=True)

    def record(self, stage: str, facts: dict[str, Any]) -> None:
        """Add a stage's facts to training.json."""
        path = self.out / "training.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        known[stage] = {**facts, "seed": self.seed, "machine": machine(self.device)}
        path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def machine(device: torch.device) -> dict[str, str]:
    """What a stage ran on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokenizers": version("tokenizers"),
    }


def stage_corpus(run: Run) -> None:
    """Corpus, tokenizer, token streams and the evaluation prompts: bounded by their size, not by the clock."""
    recipe, began = run.recipe, time.monotonic()
    if recipe.stdlib_only:
        corpus = stdlib_corpus(recipe)
    else:
        corpus = build_corpus(installed_sources(), recipe.held_out, workers=min(16, os.cpu_count() or 1))
    missing = set(recipe.held_out) - {document.package for document in corpus.held_out}
    if missing:
        raise ValueError(f"held-out packages not found on this machine: {', '.join(sorted(missing))}")
    run.log(f"corpus {len(corpus.train)} files, {sum(len(d.text) for d in corpus.train) / 1e6:.1f} MB, "
            f"dropped {corpus.dropped}")  # fmt: skip
    stride = 1 + sum(len(d.text) for d in corpus.train) // TOKENIZER_BYTES
    texts = [document.text for document in corpus.train[::stride]]
    tokenizer = train_tokenizer(texts, recipe.target.vocab_size)
    save_tokenizer(tokenizer, run.out / "target", recipe.target.max_position_embeddings)
    run.log(f"tokenizer {tokenizer.get_vocab_size()} from {len(texts)} files")
    train = encode_stream(tokenizer, corpus.train, run.seed, chat=True)
    held_out = encode_stream(tokenizer, corpus.held_out, run.seed, chat=False)
    save_arrays(run.work / "tokens.safetensors", train=train, held_out=held_out)
    prompts = held_out_prompts(tokenizer, corpus.held_out, recipe.prompts, run.seed)
    save_workload(prompts, run.out / recipe.workload)
    run.log(f"tokens: train {len(train) / 1e6:.1f} M, held out {len(held_out) / 1e6:.2f} M")
    facts = _corpus_facts(corpus, train, held_out)
    if recipe.compared_vocab:
        other = encode_stream(train_tokenizer(texts, recipe.compared_vocab), corpus.held_out, run.seed, chat=False)
        facts["bytes_per_token_at_8k"] = facts["held_out_bytes"] / len(other)
    run.record("corpus", {**facts, "seconds": round(time.monotonic() - began, 1)})


def stdlib_corpus(recipe: Recipe) -> Corpus:
    """The standard library alone, its own top-level packages in the role of packages."""
    source = standard_library()
    root = min((path for path in source.files), key=lambda path: len(path.parts)).parent
    by_package: dict[str, list[Path]] = {}
    for path in source.files:
        by_package.setdefault(path.relative_to(root).parts[0].removesuffix(".py"), []).append(path)
    parts = [type(source)(name, source.licence, tuple(files)) for name, files in sorted(by_package.items())]
    corpus = build_corpus(parts, recipe.held_out)
    kept, size = [], 0
    for document in corpus.train:
        size += len(document.text)
        if size <= recipe.corpus_bytes:
            kept.append(document)
    corpus.train = kept
    return corpus


def _corpus_facts(corpus: Corpus, train: np.ndarray, held_out: np.ndarray) -> dict[str, Any]:
    sizes: dict[str, int] = {}
    for document in [*corpus.train, *corpus.held_out]:
        sizes[document.package] = sizes.get(document.package, 0) + len(document.text.encode("utf-8"))
    held = sorted({document.package for document in corpus.held_out})
    packages = {name: {"licence": corpus.licences[name], "bytes": size} for name, size in sorted(sizes.items())}
    held_bytes = sum(sizes[name] for name in held)
    return {
        "packages": packages,
        "held_out": held,
        "train_files": len(corpus.train),
        "held_out_files": len(corpus.held_out),
        "train_bytes": sum(sizes.values()) - held_bytes,
        "held_out_bytes": held_bytes,
        "train_tokens": len(train),
        "held_out_tokens": len(held_out),
        "dropped_files": corpus.dropped,
    }


def stage_target(run: Run, seconds: float) -> None:
    """The target: next-token training, then its loops trained away."""
    began = time.monotonic()
    arrays = load_arrays(run.work / "tokens.safetensors")
    stream = torch.from_numpy(arrays["train"].astype(np.int32)).to(run.device)
    left = seconds - (time.monotonic() - began)
    target, spent = train_target(run.recipe, stream, left, run.seed, run.log)
    save_target(target, run.out / "target")
    facts = {**spent, **held_out_facts(run, arrays["held_out"])}
    run.log(f"target step {facts['steps']}; {loss_line(facts)}")
    run.record("target", {**facts, "recipe": asdict(run.recipe), "seconds": round(time.monotonic() - began, 1)})


def loss_line(facts: dict[str, Any]) -> str:
    """Held-out loss in words."""
    nats, bits = facts["held_out_nats_per_token"], facts["held_out_bits_per_byte"]
    return f"held-out loss {nats:.4f} nats/token, {bits:.4f} bits/byte"


def held_out_facts(run: Run, held_out: np.ndarray) -> dict[str, Any]:
    """Loss of the saved (bfloat16) weights on the held-out packages, per token and per byte."""
    target = load_target(run.out / "target", _inference_dtype(run.device), run.device)
    stream = torch.from_numpy(held_out[: run.recipe.scored_tokens].astype(np.int32)).to(run.device)
    nats = held_out_loss(target, stream, run.recipe.window)
    tokenizer = load_tokenizer(run.out / "target")
    text = tokenizer.decode(held_out[: len(stream)].tolist(), skip_special_tokens=True)
    tokens_per_byte = len(stream) / len(text.encode("utf-8"))
    return {
        "held_out_nats_per_token": nats,
        "held_out_bits_per_byte": nats / float(np.log(2)) * tokens_per_byte,
        "held_out_scored_tokens": len(stream),
        "bytes_per_token": 1 / tokens_per_byte,
    }


def stage_generations(run: Run, seconds: float) -> None:
    """The target's own continuations of training text: what the drafter learns from."""
    began = time.monotonic()
    stream = torch.from_numpy(load_arrays(run.work / "tokens.safetensors")["train"].astype(np.int32))
    stream = stream.to(run.device)
    target = load_target(run.out / "target", _inference_dtype(run.device), run.device)
    tokenizer = load_tokenizer(run.out / "target")
    torch.manual_seed(run.seed)
    facts: dict[str, Any] = {}
    for number, shape in enumerate(run.recipe.shapes):
        rows, seen = _generate(run, target, tokenizer, stream, shape, seconds * shape.share)
        save_arrays(run.work / f"generations_{number}.safetensors", rows=rows)
        facts[f"{shape.prompt}+{shape.new}"] = {
            "sequences": len(rows),
            "loops_dropped": seen - len(rows),
            "new_tokens": seen * shape.new,
        }
        run.log(f"generations {shape.prompt}+{shape.new}: {len(rows)} kept of {seen}, the others loop")
    run.record("generations", {**facts, "seconds": round(time.monotonic() - began, 1)})


def _generate(
    run: Run, target: Target, tokenizer: Tokenizer, stream: Tensor, shape: Shape, seconds: float
) -> tuple[np.ndarray, int]:
    """Sequences (uint16 [N, length]) that do not loop, and how many were made."""
    generator = torch.Generator(run.device).manual_seed(run.seed + shape.length)
    sampler = Sampler(target, shape.batch, shape.length, sampled=True)
    frames = [chat_frame(tokenizer, system) for system in (False, True)]
    low, high = SAMPLING_TEMPERATURES
    warm_rows, chat_rows = int(shape.batch * run.recipe.sampled_share), int(shape.batch * CHAT_ROWS)
    kept: list[Tensor] = []
    seen, clock = 0, Clock(seconds)
    while not kept or (clock.fraction() < 1 and sum(map(len, kept)) < shape.most):
        prompts = windows(stream, shape.batch, shape.prompt, generator)
        if chat_rows:
            prompts[:chat_rows] = chat_prompts(prompts[:chat_rows], frames[seen // shape.batch % 2], shape.prompt)
        prompts = prompts[torch.randperm(shape.batch, generator=generator, device=run.device)]
        temperature = torch.empty(shape.batch, device=run.device).uniform_(low, high, generator=generator)
        temperature[warm_rows:] = 0
        rows = sampler.run(prompts, temperature)
        kept.append(rows[~looping(rows[:, shape.prompt :])].to("cpu", torch.int32))
        seen += shape.batch
    if not sum(map(len, kept)):
        raise ValueError(f"all {seen} generations loop: give the target more minutes")
    return torch.cat(kept).numpy().astype(np.uint16), seen


def stage_drafter(run: Run, seconds: float) -> None:
    """The drafter, from the generations in the work folder."""
    began = time.monotonic()
    target = load_target(run.out / "target", _inference_dtype(run.device), run.device)
    generations = []
    for number in range(len(run.recipe.shapes)):
        rows = load_arrays(run.work / f"generations_{number}.safetensors")["rows"]
        generations.append(torch.from_numpy(rows.astype(np.int32)).to(run.device))
    left = seconds - (time.monotonic() - began)
    drafter, spent = train_drafter(run.recipe, target, generations, left, run.seed, run.log)
    save_drafter(drafter, run.out / "draft")
    run.log(f"drafter step {spent['steps']} accept@16 {spent['train_accept_length']:.3f}")
    run.record("drafter", {**spent, "seconds": round(time.monotonic() - began, 1)})


def stage_joint(run: Run, seconds: float) -> None:
    """Fit target and drafter to each other, then average with what they were before.

    The average of fine-tuned and original weights keeps most of what fine-tuning won and undoes much of
    what it cost (Wortsman et al. 2022, arXiv 2109.01903): here accept length against varied text.
    """
    began = time.monotonic()
    arrays = load_arrays(run.work / "tokens.safetensors")
    stream = torch.from_numpy(arrays["train"].astype(np.int32)).to(run.device)
    target = load_target(run.out / "target", torch.float32, run.device).requires_grad_(True)
    drafter = load_drafter(run.out / "draft", torch.float32, run.device).requires_grad_(True)
    before = [{k: v.clone() for k, v in model.state_dict().items()} for model in (target, drafter)]
    left = seconds - (time.monotonic() - began)
    spent = JointTrainer(run.recipe, target, drafter, stream, left, run.seed).run(run.log)
    share = run.recipe.joint_merge
    for model, old in zip((target, drafter), before, strict=True):
        model.load_state_dict({k: old[k].lerp(v, share) for k, v in model.state_dict().items()})
    save_target(target, run.out / "target")
    save_drafter(drafter, run.out / "draft")
    facts = {**spent, **held_out_facts(run, arrays["held_out"])}
    run.log(f"joint accept@16 {facts['train_accept_length']:.3f} loops {facts['loop_share']:.3f}; {loss_line(facts)}")
    run.record("joint", {**facts, "seconds": round(time.monotonic() - began, 1)})


def stage_evaluation(run: Run) -> None:
    """Accept length of the chain at full depth and loop share, greedy, on the held-out prompts."""
    began, dtype = time.monotonic(), _inference_dtype(run.device)
    target = load_target(run.out / "target", dtype, run.device)
    drafter = load_drafter(run.out / "draft", dtype, run.device)
    plan = Plan(depths=(run.recipe.draft.num_hidden_layers,), nodes=(CHAIN,), temperatures=(0.0,))
    result = measure(target, drafter, load_workload(run.out / run.recipe.workload), plan)
    accept = {cell.block: cell.accept.weighted for cell in result["cells"] if cell.package is None}
    share = result["loop_share"]["0.0"]
    lengths = ", ".join(f"{length:.2f} at block {block}" for block, length in accept.items())
    run.log(f"held-out prompts, greedy: loop share {share:.3f}; accept length without loops {lengths}")
    facts = {"loop_share": share, "accept_length": {str(block): length for block, length in accept.items()}}
    run.record("evaluation", {**facts, "seconds": round(time.monotonic() - began, 1)})


def run_stage(run: Run, stage: str, minutes: float | None) -> None:
    """One of ``STAGES``; those that train, for ``minutes`` or the recipe's own."""
    if stage == "corpus":
        stage_corpus(run)
    elif stage == "evaluation":
        stage_evaluation(run)
    else:
        trainers = (stage_target, stage_generations, stage_drafter, stage_joint)
        number = STAGES.index(stage) - 1
        trainers[number](run, 60 * (minutes or run.recipe.minutes[number]))


def _inference_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def main(argv: list[str] | None = None) -> int:
    """Parse, run the stages asked for."""
    parser = argparse.ArgumentParser(prog="python -m engine.pair.train", description=__doc__)
    parser.add_argument("--stage", choices=("all", *STAGES), default="all")
    parser.add_argument(
        "--minutes", type=float, help="each training stage's, at most 8 (default: the recipe's; a minute with --smoke)"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for target/, draft/ and training.json")
    parser.add_argument("--work", type=Path, default=Path(".build/pair"), help="token streams, generations")
    parser.add_argument("--smoke", action="store_true", help="the tests' tiny pair: CPU, a minute, stdlib only")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.minutes is not None and not 0 < args.minutes <= 8:
        parser.error("--minutes must be over 0 and at most 8")
    if not args.smoke and not torch.cuda.is_available():
        parser.error("the full pair needs a CUDA GPU; --smoke trains on a CPU")
    device = torch.device("cpu" if args.smoke else "cuda")
    recipe = RECIPES["smoke" if args.smoke else "full"]
    if args.smoke:
        torch.set_num_threads(1)  # matrices this small gain little from more, and collapse beside a busy process
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(recipe, args.out, args.work, args.seed, device)
    for stage in STAGES if args.stage == "all" else (args.stage,):
        run_stage(run, stage, args.minutes)
        run.log(f"{stage} done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
