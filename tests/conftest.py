"""Tests marked `proof` are full counts: `make proof-<name>` asks for them by `-m proof`, `make test` leaves them."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # a busy machine makes no test fail
settings.load_profile("untimed")


def pytest_configure() -> None:
    """Let Ctrl-C through: a shell starts background jobs with it ignored, which all that tests start would inherit."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the proofs to whoever asks for them, and say how many there are (pytest's "deselected")."""
    if config.option.markexpr:
        return
    left = [item for item in items if item.get_closest_marker("proof")]
    items[:] = [item for item in items if not item.get_closest_marker("proof")]
    config.hook.pytest_deselected(items=left)
