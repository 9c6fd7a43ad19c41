"""The matrix of every fault and setting is a proof: `pytest -m proof tests/faults`; without -m a subset runs."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave this folder's proof tests to whoever asks for them, and say how many there are (pytest's "deselected")."""
    if config.option.markexpr:
        return
    left = [item for item in items if item.path.parent == Path(__file__).parent and item.get_closest_marker("proof")]
    items[:] = [item for item in items if item not in set(left)]
    config.hook.pytest_deselected(items=left)
