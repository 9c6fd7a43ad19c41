"""One-line JSON events on stderr: what a supervisor reads of a server's life."""

from __future__ import annotations

import json
import sys


def emit(event: str, **fields: object) -> None:
    """Write `{"event": event, …}` as one line; fields that are None are left out."""
    document = {"event": event} | {name: value for name, value in fields.items() if value is not None}
    sys.stderr.write(json.dumps(document, default=str) + "\n")
    sys.stderr.flush()
