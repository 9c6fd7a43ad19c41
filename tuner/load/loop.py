"""The event loop that loads run on: uvloop's where it is installed, for its cost per event is a third."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on the fastest loop there is."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.run(main)
    import uvloop

    result: T = uvloop.run(main)
    return result
