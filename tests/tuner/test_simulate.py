"""Replaying tables: the command's document, resumable seeds, crashes that are not repeated, claims about the answer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.search.surfaces import HERE, build, cluster, cluster_space, quiet
from tuner.cli import app
from tuner.errors import UsageError
from tuner.pareto import non_dominated
from tuner.records import TrialRecord
from tuner.sampling import SAMPLERS
from tuner.simulate import Game, read_table, simulate, value_at
from tuner.space import load_space

SPACE, TABLE = HERE / "native_cpu.yaml", HERE / "native_cpu.jsonl"


@pytest.fixture(scope="module")
def native() -> Game:
    space = load_space(SPACE)
    return Game.of(space, read_table(TABLE, space))


@pytest.fixture(scope="module")
def boxes() -> Game:
    made = build("eight_gpus", cluster_space(), cluster, quiet)
    return Game.of(made.space, made.table)


def test_the_command_writes_what_every_study_found(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["simulate", str(SPACE), "--table", str(TABLE), "--sampler", "random", "--sampler", "surrogate"]
    done = CliRunner().invoke(app, [*arguments, "--seeds", "2", "--trials", "12", "--json", str(out)])
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())
    assert list(document) == ["random", "surrogate"]
    for studies in document.values():
        assert [study["seed"] for study in studies] == [0, 1]
        for study in studies:
            assert set(study) == {"seed", "hypervolume", "crashes", "recommended", "regret", "interval"}
            assert len(study["hypervolume"]) == len(study["crashes"]) == 12
            assert study["hypervolume"] == sorted(study["hypervolume"])
            assert set(study["recommended"]) == {"trial", "concurrency", "config"}
            low, high = study["interval"]
            assert low < high


def test_the_same_seed_plays_the_same_study(native: Game) -> None:
    one, two = (native.play(SAMPLERS["surrogate"], 3, 14) for _ in range(2))
    assert [r.config for r in one.records] == [r.config for r in two.records]
    assert one.to_json(native.truth) == two.to_json(native.truth)
    other = native.play(SAMPLERS["surrogate"], 4, 14)
    assert [r.config for r in other.records] != [r.config for r in one.records]


def test_no_crash_is_launched_twice_and_none_is_recommended(boxes: Game) -> None:
    played = boxes.play(SAMPLERS["surrogate"], 0, 30)
    assert played.crashes[-1] > 0
    assert played.crash_repeats == 0
    assert played.chosen is not None
    assert played.chosen.record.state == "measured"
    assert played.hypervolume[-1] >= boxes.play(SAMPLERS["random"], 0, 30).hypervolume[-1]


@pytest.mark.parametrize("kind", [kind for kind in SAMPLERS if kind != "gp"])
def test_every_sampler_plays(boxes: Game, kind: str) -> None:
    played = boxes.play(SAMPLERS[kind], 0, 14)
    assert len(played.records) == 14
    assert 0 <= played.hypervolume[-1] <= 1
    assert played.regret <= 1


def test_confirmations_belong_to_the_points_they_repeat(native: Game) -> None:
    played = native.play(SAMPLERS["surrogate"], 0, 20)
    assert len(played.records) == len(played.hypervolume) == 20
    assert not any(record.of for record in played.records)
    assert len(played.confirmation) == 3  # 15 % of 20
    for record in played.confirmation:
        assert record.of is not None
        assert played.records[record.of].config == record.config


def test_a_table_of_another_space_and_a_broken_line_are_refused(tmp_path: Path) -> None:
    space = load_space(SPACE)
    broken = tmp_path / "t.jsonl"
    broken.write_text("{}\n")
    with pytest.raises(UsageError, match=r"t\.jsonl:1: not a trial record"):
        read_table(broken, space)
    record = TrialRecord(trial=0, role="search", state="measured", config={"model": {"target": "other"}})
    broken.write_text(record.model_dump_json() + "\n")
    with pytest.raises(UsageError, match="no line is of this space"):
        read_table(broken, space)
    with pytest.raises(UsageError, match="no sampler is called 'magic'"):
        simulate(space, read_table(TABLE, space), ["magic"], 1, 5)


def test_a_table_without_what_is_judged_is_refused_by_name(tmp_path: Path) -> None:
    space = load_space(SPACE)
    row = read_table(TABLE, space).rows[0]
    one, _, eight = row.record.levels
    for levels, missing in (((one,), "output_tok_s at concurrency 8"), ((eight,), "tpot_ms_p50 at concurrency 1")):
        bare = row.record.model_copy(update={"levels": levels})
        table = tmp_path / "t.jsonl"
        table.write_text(
            TrialRecord.model_validate(bare.model_dump(include=set(TrialRecord.model_fields))).model_dump_json()
        )
        with pytest.raises(UsageError, match=missing):
            Game.of(space, read_table(table, space))


def test_known_answers_of_the_simulation_itself(boxes: Game, native: Game) -> None:
    truth = boxes.truth
    everything = [cost for row in boxes.table.rows if (cost := truth.objective_costs(row)) is not None]
    assert truth.share_of(everything) == pytest.approx(1.0)
    front = np.array(everything)[non_dominated(np.array(everything))]
    assert truth.share_of(list(front)) == pytest.approx(1.0)
    assert truth.share_of(list(front[1:2])) < 1.0
    assert truth.share_of([]) == 0.0
    good = [row.record for row in boxes.table.rows if truth.objective_costs(row) is not None]
    by_value = sorted(good, key=lambda record: -(value_at(record, truth.metric, truth.load) or 0.0))
    assert truth.regret(by_value[0]) == 0.0
    assert truth.regret(by_value[-1]) > 0.5
    assert truth.regret(next(row.record for row in boxes.table.rows if row.record.state == "failed")) == 1.0
    played = native.play(SAMPLERS["grid"], 0, len(native.table.rows))
    assert len(played.records) == len(native.table.rows)
    assert played.hypervolume[-1] == pytest.approx(1.0)
