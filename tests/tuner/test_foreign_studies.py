"""A study's folder may come from elsewhere: whatever its files hold, reading it ends in a result or one message."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.make import level, record
from tests.tuner.spaces import SPACE
from tuner import session
from tuner.errors import TunerError
from tuner.store import StudyFolder
from tuner.tables import ending, trial_view

VALUES: list[Any] = [
    None, True, -1, 0, 1e300, 2**70, "", "x" * 5000, "<script>", "\x1b[2J", "../../etc", [], {}, [[]], {"kind": "none"},
    {"a": {"b": 1}}, "none", 3.5, ["a", 1],
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every part of a JSON value."""
    found = [path] if path else []
    if isinstance(value, dict):
        items: list[tuple[Any, Any]] = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list) else []
    for key, child in items:
        found += places(child, (*path, key))
    return found


def changed(value: Any, rng: random.Random) -> Any:
    """Return a copy with one part replaced or removed."""
    copy = json.loads(json.dumps(value))
    *parents, last = rng.choice(places(copy))
    part = copy
    for key in parents:
        part = part[key]
    if rng.random() < 0.3:
        del part[last]
    else:
        part[last] = rng.choice(VALUES)
    return copy


@pytest.mark.parametrize("seed", range(2))
def test_changed_records_and_provenance_end_in_no_traceback(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder = StudyFolder(tmp_path / "study")
    provenance = {
        "schema": 1,
        "time": 1.7e9,
        "machine": {"cpu": "x", "cores": 2, "gpus": [{"name": "G"}]},
        "argv": ["a"],
    }
    folder.create(SPACE, provenance)
    records = [
        record(0, [level(1, 8.0, 120), level(8, 16.0, 480)]),
        record(1, [level(1, 4.0, 240), level(8, 15.0, 510)], headroom={"share": 0.5}),
        record(2),
    ]
    lines = [json.loads(one.model_dump_json()) for one in records]
    outcomes = set()
    for _ in range(80):
        mine = [changed(line, rng) if rng.random() < 0.6 else line for line in lines]
        folder.trials.write_text("".join(json.dumps(line) + "\n" for line in mine))
        folder.provenance.write_text(json.dumps(changed(provenance, rng)))
        try:
            space, outcome = session.load_outcome(folder)
            session.write_derived(folder, space)
            ending(outcome, space, folder)
            for one in outcome.records:
                trial_view(one, space)
        except TunerError as error:
            outcomes.add(str(error)[:40])
        else:
            outcomes.add("read")
    assert "read" in outcomes
    assert "" not in outcomes
    assert len(outcomes) > 2
