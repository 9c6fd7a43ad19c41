"""Files that a command line names for its results."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuner.errors import UsageError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say on one line what keeps a file from being written.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document.

    Raises:
        UsageError: the file cannot be written.
        ValueError: a number is not finite.
    """
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    with writing(path):
        path.write_text(text, encoding="utf-8")
