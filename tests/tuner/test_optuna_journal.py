"""The journal that optuna-dashboard opens: every trial, failures infeasible by both kinds of constraint."""

from __future__ import annotations

from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from engine.config import EngineConfig
from tests.tuner.make import measure, record
from tests.tuner.spaces import SPACE
from tuner.export.optuna_journal import write_journal
from tuner.records import TrialRecord, config_dict
from tuner.space import parse_space


def test_failures_are_infeasible_and_never_best(tmp_path: Path) -> None:
    space = parse_space(SPACE.encode())
    records: list[TrialRecord] = []
    for number, point in enumerate(space.points()):
        made = space.assemble(point)
        assert isinstance(made, EngineConfig)
        levels = [measure(made, c) for c in space.levels] if number % 3 != 1 else None
        records.append(record(number, levels, config=config_dict(made), role="search"))
    path = tmp_path / "optuna.journal"
    assert write_journal(path, space, records) == len(records)
    assert write_journal(path, space, records) == len(records)  # again replaces it
    study = optuna.load_study(study_name="small", storage=JournalStorage(JournalFileBackend(str(path))))
    failed = {r.trial for r in records if r.state == "failed"}
    assert failed
    for trial in study.trials:
        legacy = trial.system_attrs["constraints"]
        assert (trial.number in failed) == (legacy[0] > 0) == (trial.constraints["launch"] > 0)
        assert trial.state.name == "COMPLETE"
    assert not failed & {trial.number for trial in study.best_trials}
    assert study.metric_names == ["tpot_ms_p50 at 1", "output_tok_s at 8"]
