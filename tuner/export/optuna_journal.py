"""The study as an Optuna journal file, rebuilt from the records, for optuna-dashboard and Optuna's own plots."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

from tuner.brain import Brain
from tuner.records import TrialRecord
from tuner.space import Space


def write_journal(path: Path, space: Space, records: Iterable[TrialRecord]) -> int:
    """Write a journal that `optuna-dashboard PATH` opens; an earlier one is replaced. Return its trials.

    Failed trials are infeasible in it: by Optuna 5's named constraints, and by the older attribute, without which
    the dashboard (0.21) would show them as optimal. Repeats and confirmations are not in it.

    Raises:
        OSError: the file cannot be written.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    partial = path.with_name(f".{path.name}.partial")
    _remove(partial)
    partial.touch()
    try:
        brain = Brain(space, lambda _: (), storage=JournalStorage(JournalFileBackend(str(partial))))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # metric names are experimental in Optuna
            brain.study.set_metric_names([f"{o.metric} at {o.level(space.levels)}" for o in space.file.objectives])
        for record in records:
            brain.tell(record)
        count = len(brain.study.trials)
        partial.replace(path)
    finally:
        _remove(partial)
    return count


def _remove(partial: Path) -> None:
    """Remove an unfinished journal, and the lock that Optuna lays beside it."""
    for path in (partial, partial.with_name(f"{partial.name}.lock")):
        path.unlink(missing_ok=True)
