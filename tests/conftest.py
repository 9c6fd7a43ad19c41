"""Tests marked `proof` are full counts: `make proof-<name>` asks for them by `-m proof`, `make test` leaves them."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the proofs to whoever asks for them, and say how many there are (pytest's "deselected")."""
    if config.option.markexpr:
        return
    left = [item for item in items if item.get_closest_marker("proof")]
    items[:] = [item for item in items if not item.get_closest_marker("proof")]
    config.hook.pytest_deselected(items=left)
