"""A pytest plugin: the tests run inside an engine with the fault that the environment names.

Servers that a test starts are other processes: the fault is in the tests' own process alone.
"""

from __future__ import annotations

import contextlib
import os

import pytest

from tests.faults.catalogue import FAULTS
from tests.faults.fault import VARIABLE


def pytest_configure(config: pytest.Config) -> None:
    """Put the fault in until the session ends."""
    stack = contextlib.ExitStack()
    stack.enter_context(FAULTS[os.environ[VARIABLE]].applied())
    config.add_cleanup(stack.close)
