"""What the benchmarks share: prompts, provenance, writing results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuner.provenance import collect

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def bundled_prompts() -> list[tuple[int, ...]]:
    """Return the bundled workload as token ids."""
    from engine.pair.workload import load_workload

    return [tuple(prompt.token_ids) for prompt in load_workload()]


def greedy_by_transformers(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """Return what Transformers' `generate` appends: exactly `tokens` tokens, no end of text before."""
    import torch

    inputs = torch.tensor([list(prompt)])
    with torch.inference_mode():
        text: list[int] = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )[0].tolist()
    return text[len(prompt) :]


def passing_tests(*targets: str) -> dict[str, Any]:
    """Run tests: a proof's step.

    Raises:
        AssertionError: one of them fails.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *targets]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-200:]
    assert done.returncode == 0, last
    return {"pytest": last}


def command_line() -> list[str]:
    """Return this run's arguments, paths below the repository without where it lies."""
    return [word.removeprefix(f"{ROOT}/") for word in sys.argv]


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result beside what it was measured with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"schema": 1, "provenance": collect(command_line(), seed=0)} | result
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
