"""Log tails of failures that are publicly described, and how many of them the classifier tells right.

`tests/data/log_tails/` is open to whoever works on the classifier; `tests/data/log_tails_sealed/` is written by
somebody who has not seen it and read by its author only when it is finished. One YAML file a case:

    source: https://…            where the failure is described
    stage: launch                of the trial, see tuner.records.Stage
    exit: {code: 1}              or {signal: 9}, or null while the server lives
    kind: oom_start              or a list, where the same log may be told in two ways
    tail: |                      the end of the log
      …
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tuner.failures import Remains, classify
from tuner.supervise import Exit

DATA = Path(__file__).resolve().parents[1] / "data"
OPEN, SEALED = DATA / "log_tails", DATA / "log_tails_sealed"


@dataclass(frozen=True)
class Score:
    """How a folder of cases was told; `wrong` says what each wrong one was told as."""

    cases: int
    wrong: tuple[str, ...]

    @property
    def right(self) -> int:
        """Cases told right."""
        return self.cases - len(self.wrong)


def score(folder: Path) -> Score:
    """Classify every case of a folder."""
    paths = sorted(folder.glob("*.yaml"))
    told = [(path.stem, *_told(yaml.safe_load(path.read_text(encoding="utf-8")))) for path in paths]
    wrong = [
        f"{name}: {kind} instead of {' or '.join(expected)}" for name, kind, expected in told if kind not in expected
    ]
    return Score(len(paths), tuple(wrong))


def _told(case: dict[str, Any]) -> tuple[str, list[str]]:
    ended = case.get("exit")
    exit_ = None if ended is None else Exit(ended.get("code"), ended.get("signal"))
    kind = classify(Remains(case["stage"], exit=exit_, tail=case["tail"])).kind
    expected = case["kind"]
    return kind, [expected] if isinstance(expected, str) else list(expected)
