"""The evaluation prompts: held-out source text, as text and as token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.pair.paths import WORKLOAD


@dataclass(frozen=True)
class Prompt:
    """One prompt; ``package`` (held out from training as a whole) is also its slice in reports."""

    id: int
    package: str
    text: str
    token_ids: tuple[int, ...]


def parse_prompt(record: dict[str, object]) -> Prompt:
    """A prompt from its JSON object; a missing or ill-typed field is a ValueError naming it."""
    ids = record.get("token_ids")
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise ValueError(f"prompt token_ids must be a list of integers, got {ids!r:.80}")
    number, package, text = record.get("id"), record.get("package"), record.get("text")
    if not isinstance(number, int) or not isinstance(package, str) or not isinstance(text, str):
        raise ValueError(f"prompt needs id (int), package (str) and text (str), got {record!r:.120}")
    return Prompt(number, package, text, tuple(ids))


def load_workload(path: Path = WORKLOAD) -> list[Prompt]:
    """Prompts from ``path``: one JSON object per line (``.jsonl``), or one JSON list (``.json``)."""
    text = path.read_text(encoding="utf-8")
    records = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    return [parse_prompt(record) for record in records]


def save_workload(prompts: Iterable[Prompt], path: Path) -> None:
    """Write ``prompts`` in the form that :func:`load_workload` reads back."""
    records = [asdict(prompt) for prompt in prompts]
    if path.suffix == ".json":
        path.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
