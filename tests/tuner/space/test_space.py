"""Assignments become configurations and back; inactive paths are absent; points are counted right."""

from __future__ import annotations

import random

import pytest

from engine.config import DFlashDraft, EngineConfig, NoDraft
from tests.tuner.spaces import SPACE
from tuner.records import config_dict
from tuner.space import FloatRange, Infeasible, Space, parse_space


@pytest.fixture
def space() -> Space:
    return parse_space(SPACE.encode())


def test_points_are_counted_and_every_one_is_recovered_from_its_configuration(space: Space) -> None:
    points = list(space.points())
    assert space.size() == len(points) == 2 * (1 + 2 * 4)
    seen = set()
    for assignment in points:
        config = space.assemble(assignment)
        assert isinstance(config, EngineConfig)
        assert space.assignment_of(config_dict(config)) == assignment
        seen.add(config.model_dump_json())
    assert len(seen) == len(points)


def test_inactive_paths_are_absent(space: Space) -> None:
    for assignment in space.points():
        assert ("draft.layers" in assignment) == (assignment["draft.kind"] == "dflash")
        config = space.assemble(assignment)
        assert isinstance(config, EngineConfig)
        assert isinstance(config.draft, DFlashDraft) == (assignment["draft.kind"] == "dflash")


def test_draws_are_points_and_cover_the_space(space: Space) -> None:
    rng = random.Random(1)
    points = list(space.points())
    drawn = [space.draw(rng) for _ in range(400)]
    assert all(d in points for d in drawn)
    assert all(p in drawn for p in points)


def test_conditions_may_come_after_what_they_guard() -> None:
    text = SPACE.replace("  draft.kind: [none, dflash]\n", "").replace(
        "  graphs:", "  draft.kind: [none, dflash]\n  graphs:"
    )
    space = parse_space(text.encode())
    order = [domain.path for domain in space.domains]
    assert order.index("draft.kind") < order.index("draft.block_size")
    assert space.size() == 18


def test_fixed_draft_fields_belong_to_the_kinds_that_have_them() -> None:
    text = SPACE.replace("  memory:", "  draft: {model: bundled}\n  memory:")
    space = parse_space(text.encode())
    none = space.assemble({"draft.kind": "none", "graphs": {"kind": "eager"}})
    assert isinstance(none, EngineConfig)
    assert none.draft == NoDraft()
    dflash = space.assemble(
        {"draft.kind": "dflash", "draft.block_size": 4, "draft.layers": 1, "graphs": {"kind": "eager"}}
    )
    assert isinstance(dflash, EngineConfig)
    assert isinstance(dflash.draft, DFlashDraft)
    assert dflash.draft.model == "bundled"


def test_baseline_is_without_speculation_and_takes_the_first_that_can_run(space: Space) -> None:
    found = space.baseline(lambda config: ())
    assert not isinstance(found, Infeasible)
    config, assignment = found
    assert config.draft == NoDraft()
    assert assignment == {"draft.kind": "none", "graphs": {"kind": "eager"}}
    refused = space.baseline(lambda config: ("no eager here",) if config.graphs.kind == "eager" else ())
    assert not isinstance(refused, Infeasible)
    assert refused[0].graphs.kind == "captured"
    nothing = space.baseline(lambda config: ("nothing runs here",))
    assert nothing == Infeasible(("nothing runs here",))


def test_baseline_takes_a_ranges_default_else_its_lower_end() -> None:
    text = SPACE.replace("  memory: {max_running: 16}\n", "").replace(
        "  graphs:", "  memory.max_running: {int: [8, 64]}\n  memory.page_size: {int: [8, 64], step: 8}\n  graphs:"
    )
    found = parse_space(text.encode()).baseline(lambda config: ())
    assert not isinstance(found, Infeasible)
    assert (found[0].memory.max_running, found[0].memory.page_size) == (16, 8)


def test_contradictions_between_paths_are_infeasible_points() -> None:
    text = SPACE.replace("  memory: {max_running: 16}\n", "").replace(
        "  graphs:", "  memory.max_running: [2, 16]\n  graphs:"
    )
    space = parse_space(text.encode())
    judged = [space.assemble(point) for point in space.points()]
    reasons = {reason for j in judged if isinstance(j, Infeasible) for reason in j.reasons}
    assert len(judged) == 36
    assert sum(isinstance(j, Infeasible) for j in judged) == 9
    assert all("max_running is 2" in reason for reason in reasons)


def test_a_continuous_range_cannot_be_counted() -> None:
    text = SPACE.replace("  graphs:", "  memory.kv_fraction: {float: [0.5, 0.9]}\n  graphs:")
    space = parse_space(text.encode())
    assert space.size() is None
    assert any(isinstance(domain, FloatRange) for domain in space.domains)
    assignment = space.draw(random.Random(3))
    config = space.assemble(assignment)
    assert isinstance(config, EngineConfig)
    assert space.assignment_of(config_dict(config)) == assignment


def test_a_configuration_of_another_space_is_not_mistaken_for_a_point(space: Space) -> None:
    config = config_dict(EngineConfig.model_validate({"model": {"target": "elsewhere"}}))
    assert space.assignment_of(config) is None
    found = space.baseline(lambda config: ())
    assert not isinstance(found, Infeasible)
    foreign = config_dict(found[0]) | {"draft": {"kind": "dflash", "block_size": 5}}
    assert space.assignment_of(foreign) is None


def test_digest_ignores_budget_and_pick_but_not_what_is_searched(space: Space) -> None:
    assert parse_space(SPACE.replace("trials: 16", "trials: 20").encode()).digest == space.digest
    assert parse_space(SPACE.replace("ttft_ms_p90<500", "ttft_ms_p90<400").encode()).digest == space.digest
    assert parse_space(SPACE.replace("[4, 8], when", "[4, 16], when").encode()).digest != space.digest
    assert parse_space(SPACE.replace("output_tokens: 64", "output_tokens: 65").encode()).digest != space.digest
