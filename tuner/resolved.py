"""What a server says it runs, beside what it was asked to run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Names and folders: a server may spell them otherwise and still serve the same.
NAMES = frozenset({"model.target", "model.revision", "draft.model", "backend.kind", "backend.version"})
OPEN = (None, "auto")


def silent_changes(asked: Mapping[str, Any], resolved: Mapping[str, Any]) -> list[str]:
    """Return one line per value that was asked for, or pinned by the backend, and is not what runs.

    `auto` and null leave the choice to the server; what it does not report cannot be judged. `resolved.pins` holds
    the pins that did not hold.
    """
    return [*_changes(asked, resolved, ""), *_pins(resolved.get("pins"))]


def _pins(broken: Any) -> Iterator[str]:
    if not isinstance(broken, Mapping):
        return
    for name, pin in broken.items():
        if isinstance(pin, Mapping):
            yield f"{name}: pinned to {pin.get('pinned')!r}, runs {pin.get('runs')!r}"


def _changes(asked: Any, runs: Any, path: str) -> Iterator[str]:
    if asked in OPEN or path in NAMES:
        return
    if isinstance(asked, Mapping) and isinstance(runs, Mapping):
        if asked.get("kind") != runs.get("kind", asked.get("kind")):
            yield f"{path}.kind: asked {asked['kind']!r}, runs {runs['kind']!r}"
            return  # the fields of another kind are not comparable
        for key, value in asked.items():
            if key in runs:
                yield from _changes(value, runs[key], f"{path}.{key}" if path else key)
    elif isinstance(asked, list | tuple) and isinstance(runs, list | tuple) and len(asked) == len(runs):
        for index, (one, other) in enumerate(zip(asked, runs, strict=True)):
            yield from _changes(one, other, f"{path}.{index}")
    elif asked != runs:
        yield f"{path}: asked {asked!r}, runs {runs!r}"
