"""`tuner init`: a commented search space for this machine and a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from string import Template

import yaml

from engine.config import BUNDLED, DFlashDraft, EngineConfig, Model, draft_folder, target_folder
from engine.errors import EngineError
from engine.estimate import GIB, DraftShape, Machine, ModelShape, read_draft_shape, read_shape
from tuner.errors import UsageError
from tuner.output import writing

_TEMPLATE = Template("""\
# What may vary and what matters, for $model on $machine.
# Check it:   tuner search $path --dry-run
# Search:     tuner search $path
schema: 1

study:
  name: $name                # the folder below the results
  seed: 0
  budget: {trials: $trials, wall: $wall}   # the first reached ends the search; gpu_hours is a third kind

engine:                      # what is fixed: fields of an EngineConfig, see docs/config.md
  model: {target: $target}
  memory: {max_running: $running}   # the same for every candidate, with speculation and without

search:                      # what varies: dotted EngineConfig paths
$search
workload:                    # the same prompts in the same order for every candidate
  prompts: $prompts            # or a JSONL file with one `prompt` or `messages` a line: your own traffic is best
  output_tokens: $output
  concurrency: $levels       # requests in flight; one launch measures them all
  window: $window                # measured time per load
$lag
objectives:                  # the axes of the front
  - {metric: tpot_ms_p50, goal: min, at: $low}
  - {metric: output_tok_s, goal: max, at: $high}

constraints:                 # what a candidate must meet
  - {metric: ttft_ms_p90, max: 2000, at: $high}

pick: {load: $high}$pad          # the load to recommend for; slo: "ttft_ms_p90<500, tpot_ms_p50<20" adds limits

executor: {kind: local}
""")


@dataclass(frozen=True)
class Plan:
    """What a template is filled with."""

    path: str
    name: str
    target: str
    draft: str | None = None


def write_space(out: Path, target: str, draft: str | None, machine: Machine, *, force: bool) -> None:
    """Write a search space to `out`.

    Raises:
        UsageError: the model cannot be read, the file exists, or it cannot be written.
    """
    if out.exists() and not force:
        raise UsageError(f"{out}: exists; choose another --out, or --force to replace it")
    text = space_text(Plan(str(out), _name(out), target, draft), machine)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")


def _name(out: Path) -> str:
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in out.stem)
    return kept.lstrip("._-")[:64] or "study"


def space_text(plan: Plan, machine: Machine) -> str:
    """Return the text of a search space for a model on a machine.

    Raises:
        UsageError: the model's or drafter's folder cannot be read.
    """
    config = EngineConfig(model=Model(target=plan.target))
    try:
        shape = read_shape(target_folder(config))
        drafter = _drafter(config, plan.draft)
    except EngineError as error:
        raise UsageError(f"--target {plan.target}: {error}") from error
    gpu = machine.kind == "cuda"
    running = 48 if gpu else 16
    levels = [1, 4, 16, 48] if gpu else [1, 4, 8]
    name = f"{machine.devices} × {machine.name}" if gpu else f"{machine.name}, {machine.cores} cores"
    return _TEMPLATE.substitute(
        model=plan.target,
        machine=f"{name}, {machine.memory / GIB:.0f} GiB",
        path=plan.path,
        name=plan.name,
        target=_scalar(plan.target),
        trials=40 if gpu else 16,
        wall="8h" if gpu else "10m",
        running=running,
        search=_search(plan, shape, drafter, machine, running),
        prompts="bundled",
        output=256 if gpu else 64,
        levels=levels,
        window="20s" if gpu else "2s",
        lag="" if gpu else "  client_lag: 0.1            # the load generator shares the cores with the server\n",
        low=levels[0],
        high=levels[-1],
        pad=" " * (2 - len(str(levels[-1]))),
    )


def _drafter(config: EngineConfig, draft: str | None) -> DraftShape | None:
    """Return the drafter's shape; None when none is named and none comes with the target."""
    folder = draft_folder(config, DFlashDraft(model=draft))
    if draft is None and not folder.is_dir() and config.model.target != BUNDLED:
        return None
    return read_draft_shape(folder)


def _search(plan: Plan, shape: ModelShape, draft: DraftShape | None, machine: Machine, running: int) -> str:
    lines = []
    if draft is None:
        lines += [
            "  # No drafter was named (--draft), and none lies in the target's folder: only no speculation can run.",
            "  draft.kind: [none]",
        ]
    else:
        when = "when: {draft.kind: [dflash]}"
        blocks = [size for size in (2, 4, 6, 8, 12, 16, 24, 32) if size <= draft.block_size] or [draft.block_size]
        lines.append("  draft.kind: [none, dflash]       # none is trial 0 in any case")
        if plan.draft is not None:
            lines.append(f"  draft.model: {{choices: [{_scalar(plan.draft)}], {when}}}")
        lines.append(
            f"  draft.block_size: {{choices: {blocks}, {when}}}   # the root counts: size − 1 tokens are drafted"
        )
        if draft.layers > 1:
            lines.append(f"  draft.layers: {{int: [1, {draft.layers}], {when}}}   # the first k layers of the drafter")
    if machine.kind == "cuda":
        sizes = [size for size in (1, 2, 4, 8, 16, 32, 48) if size <= running]
        lines.append("  # A graph is captured per batch size; what cannot be captured fails as a trial of its own.")
        lines.append(f"  graphs: {{choices: [{{kind: eager}}, {{kind: captured, batch_sizes: {sizes}}}]}}")
        ranks = [r for r in (1, 2, 4, 8) if r <= machine.devices and shape.heads % r == 0 and shape.kv_heads % r == 0]
        if len(ranks) > 1:
            lines.append(f"  parallel.tensor: {ranks}   # GPUs of one server")
    return "".join(f"{line}\n" for line in lines)


def _scalar(text: str) -> str:
    """Return a string as YAML writes it in a flow mapping, quoted where it must be."""
    return yaml.safe_dump([text], default_flow_style=True, width=10_000, allow_unicode=True).strip()[1:-1]
