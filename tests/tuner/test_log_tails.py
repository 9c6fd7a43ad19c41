"""The scoring of log tails, on cases made up here and on the forty that somebody else wrote."""

from __future__ import annotations

from pathlib import Path

from tests.tuner.log_tails import OPEN, SEALED, score

CASES = {
    "right": ("kind: oom_start", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB."),
    "either": ("kind: [port, distributed_init]", "OSError: [Errno 98] Address already in use"),
    "wrong": ("kind: gated_model", "Segmentation fault (core dumped)"),
}


def test_cases_are_scored(tmp_path: Path) -> None:
    for name, (kind, tail) in CASES.items():
        text = f"source: here\nstage: launch\nexit: {{signal: 9}}\n{kind}\ntail: |\n  {tail}\n"
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    result = score(tmp_path)
    assert (result.cases, result.right) == (3, 2)
    assert result.wrong == ("wrong: crashed instead of gated_model",)


def test_publicly_described_failures_are_told_right() -> None:
    opened, sealed = score(OPEN), score(SEALED)
    assert (opened.cases, sealed.cases) == (20, 20)
    assert opened.right + sealed.right >= 38, (*opened.wrong, *sealed.wrong)
