from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tuner.smi import FakeSmi


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSmi:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("tuner.leases.FOREIGN_SECONDS", 0.2)
    return FakeSmi(tmp_path)


@pytest.fixture(autouse=True)
def _own_leases(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Keep the leases of tests apart from those of tuners that run on this machine."""
    folder = tmp_path_factory.mktemp("runtime")
    monkeypatch.setenv("TUNER_LEASES", str(folder))
    return folder
