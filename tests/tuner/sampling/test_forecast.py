"""Times of rounds and accept lengths, modelled apart: what that is worth, and where there are none to tell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.config import EngineConfig
from tests.tuner.make import record
from tuner.brain import Brain
from tuner.records import Level, TrialRecord, config_dict
from tuner.sampling import Pool
from tuner.sampling.base import Costs
from tuner.sampling.forecast import accepted, forecast
from tuner.sampling.gp import Knobs
from tuner.space import Assignment, Space, parse_space

TEXT = """\
schema: 1
study: {name: made-up, seed: 0, budget: {trials: 60}}
engine: {model: {target: made-up}, backend: {kind: sglang}}
search:
  draft.kind: [none, dflash]
  draft.block_size: {choices: [4, 6, 8, 12, 16], when: {draft.kind: [dflash]}}
  draft.layers: {int: [1, 4], when: {draft.kind: [dflash]}}
  memory.max_running: [32, 64, 96]
  attention.backend: [triton, fa3]
workload: {prompts: bundled, output_tokens: 128, concurrency: [1, 32]}
objectives:
  - {metric: tpot_ms_p50, goal: min, at: 1}
  - {metric: output_tok_s, goal: max, at: 32}
"""
SPACE = parse_space(TEXT.encode())
POOL = Pool.of(SPACE)


def accept_length(point: Assignment) -> float:
    """A draft's: it grows with block and layers."""
    rate = 0.6 + 0.05 * float(point.get("draft.layers", 0))
    return float((1 - rate ** point["draft.block_size"]) / (1 - rate)) if "draft.block_size" in point else 1.0


def round_ms(point: Assignment, rows: float) -> float:
    """A round's time at so many rows of each request."""
    verify = (4**3 + (0.02 * rows * point.get("draft.block_size", 1)) ** 3) ** (1 / 3)
    return float((verify + 0.3 * point.get("draft.layers", 0)) * (0.9 if point["attention.backend"] == "fa3" else 1))


def launched(number: int, point: Assignment, *, tells: bool = True) -> TrialRecord:
    """One launch of a point; `tells`: whether its server tells accept lengths."""
    length = accept_length(point)
    told = {"accept_length": length if tells else None}
    one = {"tpot_ms_p50": round_ms(point, 1) / length, "ttft_ms_p90": 50.0 + number % 3}
    many = {"output_tok_s": 32e3 * length / round_ms(point, 32)}
    config = SPACE.assemble(point)
    assert isinstance(config, EngineConfig)
    levels = [Level(concurrency=at, metrics=values | told, n=20) for at, values in ((1, one), (32, many))]
    return record(number, levels, config=config_dict(config))


def costs_of(points: list[Assignment], *, tells: bool = True, space: Space = SPACE) -> Costs:
    """Return what a sampler is shown of launches."""
    brain = Brain(space, lambda config: (), pool=POOL)
    for number, point in enumerate(points):
        brain.tell(launched(number, point, tells=tells))
    return Costs.of(brain.view(len(points)))


def drawn(count: int, seed: int = 0) -> list[Assignment]:
    """Return so many points, the first without a draft."""
    chosen = np.random.default_rng(seed).choice(len(POOL.assignments), count, replace=False)
    plain = next(point for point in POOL.assignments if point["draft.kind"] == "none")
    return [plain, *(POOL.assignments[i] for i in chosen if POOL.assignments[i] != plain)]


def test_a_server_without_drafts_gains_one_token_a_round_though_it_does_not_say_so() -> None:
    costs = costs_of([point for point in POOL.assignments if point["draft.kind"] == "none"][:2], tells=False)
    assert costs.accept is None  # no launch was sped up: nothing to model
    points = drawn(6)
    costs = costs_of(points)
    assert costs.accept == pytest.approx(np.log([accept_length(point) for point in points]))
    assert costs.accept is not None
    assert costs.accept[0] == 0
    assert costs_of(points, tells=False).accept is None
    assert costs.per_token.tolist() == [True, True]
    waits = parse_space(TEXT.replace("tpot_ms_p50", "ttft_ms_p90").encode())
    assert costs_of(points, space=waits).per_token.tolist() == [False, True]


def test_speeds_are_learnt_from_fewer_launches_as_rounds_and_accept_lengths() -> None:
    true = costs_of(list(POOL.assignments)).values
    errors: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(4):
        costs = costs_of(drawn(14, seed))
        for apart, of in errors.items():
            found = forecast(POOL.encoder, costs if apart else replace(costs, accept=None), POOL.rows)
            assert found.means.shape == found.sds.shape == found.apart.shape == (len(POOL.assignments), 2)
            assert found.told == pytest.approx(costs.values, abs=0.1)
            of.append(float(np.sqrt(np.mean((found.means - true) ** 2))))
    assert np.mean(errors[True]) < 0.7 * np.mean(errors[False])


def test_accept_length_is_the_drafts_alone() -> None:
    points = drawn(20)
    costs = costs_of(points)
    assert costs.accept is not None
    found = accepted(POOL.encoder, costs.x, costs.accept, POOL.rows)
    of = {str({k: v for k, v in point.items() if k.startswith("draft.")}) for point in POOL.assignments}
    assert len(np.unique(found.means)) <= len(of) < len(POOL.assignments)
    for point, mean in zip(POOL.assignments, found.means[:, 0], strict=True):
        assert mean == pytest.approx(np.log(accept_length(point)), abs=0.3)


def test_a_space_without_drafts_to_choose_from_has_costs_alone() -> None:
    draft = "draft: {kind: dflash, block_size: 8, layers: 2}"
    drafts = [line for line in TEXT.splitlines(keepends=True) if line.startswith("  draft.")]
    text = TEXT.replace("backend: {kind: sglang}}", f"backend: {{kind: sglang}}, {draft}}}")
    for line in drafts:
        text = text.replace(line, "")
    space = parse_space(text.encode())
    pool = Pool.of(space)
    assert pool.encoder.drafts == ()
    assert POOL.encoder.drafts == (0, 1, 2)
    brain = Brain(space, lambda config: (), pool=pool)
    fixed = {"draft.kind": "dflash", "draft.block_size": 8, "draft.layers": 2}
    for number, point in enumerate(pool.assignments):
        brain.tell(launched(number, fixed | point))
    costs = Costs.of(brain.view(len(pool.assignments)))
    assert len(costs.values) == len(pool.assignments) == 6
    assert costs.accept is None  # all of them gain as many tokens a round
    found = forecast(pool.encoder, costs, pool.rows)
    assert found.means == pytest.approx(costs.values, abs=0.1)


def test_limits_are_minor_and_a_deeper_draft_runs_the_same_shapes() -> None:
    assert POOL.encoder.knobs == Knobs(
        minor=(False, False, False, True, False), shapes=(True, True, False, False, True)
    )
