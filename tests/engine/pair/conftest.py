"""The smoke pair, loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.pair.checkpoint import load_drafter, load_target
from engine.pair.modules import Drafter, Target
from engine.pair.workload import Prompt, load_workload

SMOKE = Path(__file__).parents[2] / "data" / "smoke_pair"


@pytest.fixture(scope="session")
def target() -> Target:
    return load_target(SMOKE / "target", torch.float32)


@pytest.fixture(scope="session")
def drafter() -> Drafter:
    return load_drafter(SMOKE / "draft", torch.float32)


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    return load_workload(SMOKE / "prompts.json")
