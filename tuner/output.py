"""Files that a command line names for its results."""

from __future__ import annotations

import contextlib
import json
import os
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


def must_be_writable(path: Path) -> None:
    """Refuse a file that could not be written, before minutes of measuring are lost to it.

    Raises:
        UsageError: a folder, in no folder, or not permitted.
    """
    if not path.parent.is_dir():
        raise UsageError(f"{path}: cannot be written: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{path}: cannot be written: a folder, or not permitted; name another file")


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document.

    Raises:
        UsageError: the file cannot be written.
        ValueError: a number is not finite.
    """
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    with writing(path):
        path.write_text(text, encoding="utf-8")
