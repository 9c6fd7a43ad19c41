"""The default sampler's parts: order of the first launches, crashes, words, priors, batches, stop rule."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.search.priors import guessed
from benchmarks.search.surfaces import Machine, build, cluster, cluster_space, dflash, dflash_space, quiet
from engine.config import EngineConfig
from engine.estimate import gpu
from tests.tuner.spaces import SPACE
from tuner.brain import Brain
from tuner.prior import Roofline, with_guesses
from tuner.sampling import Pool, key_of
from tuner.sampling.base import Costs
from tuner.sampling.design import first_points, sobol_points
from tuner.sampling.encode import Encoder
from tuner.sampling.guesses import calibrate
from tuner.sampling.surrogate import Promise, Surrogate, Trusted, _settling, believe, reference_of, untested
from tuner.simulate import Game, measured_again, value_at
from tuner.space import parse_space
from tuner.stop_rule import outlook, should_stop

SPACE_ = parse_space(SPACE.encode())


@pytest.fixture(scope="module")
def boxes() -> Game:
    made = build("eight_gpus", cluster_space(), cluster, quiet)
    return Game.of(made.space, made.table)


def told(game: Game, count: int, sampler: Surrogate | None = None) -> Brain:
    """Return a brain that was told of so many of its own suggestions."""
    brain = Brain(game.space, game.table.refusals, sampler=sampler or Surrogate(), pool=game.pool)
    rows = {key_of(row.assignment): row for row in game.table.rows}
    rng = np.random.default_rng(0)
    for number in range(count):
        suggestion = brain.ask(number)
        assert suggestion is not None
        brain.tell(measured_again(rows[key_of(suggestion.assignment)], number, rng))
    return brain


def test_defaults_and_corners_come_first() -> None:
    first = list(first_points(SPACE_))
    assert first[0]["draft.kind"] == "dflash"
    assert first[0]["graphs"] == {"kind": "eager"}  # the field's default
    assert [point["draft.block_size"] for point in first] == [8, 4, 8]
    assert [point["draft.layers"] for point in first] == [3, 1, 4]


def test_sobol_points_differ_by_seed_and_cover_every_value() -> None:
    points = sobol_points(SPACE_, 1, 64)
    assert points == sobol_points(SPACE_, 1, 64)
    assert points != sobol_points(SPACE_, 2, 64)
    for domain in SPACE_.domains:
        assert {repr(p[domain.path]) for p in points if domain.path in p} == {repr(v) for v in domain.values}


def test_inactive_domains_sit_in_the_middle_and_words_apart() -> None:
    points = list(SPACE_.points())
    encoder = Encoder(SPACE_.domains)
    matrix = encoder.matrix(points)
    assert matrix.shape == (len(points), len(encoder.groups))
    off = [i for i, point in enumerate(points) if point["draft.kind"] == "none"]
    block = list(encoder.groups).index([d.path for d in SPACE_.domains].index("draft.block_size"))
    assert set(matrix[off, block]) == {0.5}
    assert len({tuple(row) for row in matrix}) == len(points)


def test_a_batch_is_of_different_points(boxes: Game) -> None:
    brain = told(boxes, 12)
    batch = [brain.ask(12 + slot) for slot in range(4)]
    assert len({key_of(s.assignment) for s in batch if s is not None}) == 4


def test_a_word_is_not_given_up_after_one_crash(boxes: Game) -> None:
    brain = Brain(boxes.space, boxes.table.refusals, pool=boxes.pool)
    assert untested(brain.view(0)) is None  # nothing ran yet
    rng = np.random.default_rng(0)
    of_kind = {kind: [r for r in boxes.table.rows if r.assignment["draft.kind"] == kind] for kind in ("none", "dflash")}
    crashing = [row for row in of_kind["dflash"] if row.record.state == "failed"]
    running = [row for row in of_kind["none"] if row.record.state == "measured"]
    for number, row in enumerate([running[0], *crashing[:2]]):
        brain.tell(measured_again(row, number, rng))
    assert untested(brain.view(3)) == {"draft.kind": '"dflash"'}
    brain.tell(measured_again(crashing[2], 3, rng))
    assert untested(brain.view(4)) is None


def test_guesses_outlive_a_first_launch_that_crashes(boxes: Game) -> None:
    guessed = Pool(boxes.space, boxes.pool.assignments, np.zeros((len(boxes.pool.assignments), 3)))
    brain = Brain(boxes.space, boxes.table.refusals, pool=guessed)
    crashing = next(row for row in boxes.table.rows if row.record.state == "failed")
    brain.tell(measured_again(crashing, 0, np.random.default_rng(0)))
    assert brain.prior(1) == "believed"
    assert brain.ask(1) is not None


def test_gains_are_counted_from_behind_the_front() -> None:
    front = np.array([[0.0, 1.0], [1.0, 0.0]])
    worst = np.array([[5.0, 5.0]])
    assert reference_of(np.vstack([front, worst])) == pytest.approx([1.1, 1.1])
    assert (reference_of(np.array([[0.0, 0.0], [2.0, 3.0]])) > [2.0, 3.0]).all()


def test_a_guess_is_believed_as_a_shape_and_dropped_when_it_errs() -> None:
    rng = np.random.default_rng(0)
    cost = rng.standard_normal(20)
    assert calibrate(cost + np.log(4.6), cost).slope == pytest.approx(1.0)  # wrong by a factor everywhere: no matter
    assert calibrate(cost + 0.2 * rng.standard_normal(20), cost).kept
    assert not calibrate(-1.5 * cost, cost).kept
    assert not calibrate(rng.standard_normal(20), cost).kept
    assert not calibrate(np.full(20, np.nan), cost).kept
    assert calibrate(cost[:2], cost[:2]).slope == 1.0


def test_the_roofline_guesses_what_it_can() -> None:
    config = next(c for p in SPACE_.points() if isinstance(c := SPACE_.assemble(p), EngineConfig) and c.drafts)
    drafted = EngineConfig.model_validate(config.model_dump() | {"draft": {"kind": "dflash", "block_size": 8}})
    roofline = Roofline.of(config, drafted, gpu("H200"))
    pool = with_guesses(Pool.of(SPACE_), roofline, SPACE_.file.objectives)
    assert pool.guesses is not None
    assert pool.guesses.shape == (len(pool.assignments), 3)
    assert np.isfinite(pool.guesses).all()
    by_block = {p.get("draft.block_size"): g[0] for p, g in zip(pool.assignments, pool.guesses, strict=True)}
    assert by_block[8] < by_block[None]  # lower cost: a memory-bound target is faster with a draft
    lengths = {p.get("draft.block_size"): g[-1] for p, g in zip(pool.assignments, pool.guesses, strict=True)}
    assert lengths[None] == 0
    assert lengths[8] > 0


@pytest.mark.proof
def test_a_right_guess_is_followed_at_once(boxes: Game) -> None:
    aims = [(o, o.level(boxes.space.levels)) for o in boxes.space.file.objectives]
    values = [[value_at(row.record, o, level) for o, level in aims] for row in boxes.table.rows]
    logs = np.array([[1.0 if v is None else np.log(v) for v in row] for row in values])
    costs = logs * [1.0 if o.goal == "min" else -1.0 for o, _ in aims]
    lengths = [row.record.levels[0].metrics["accept_length"] if row.record.levels else 1.0 for row in boxes.table.rows]
    guesses = np.column_stack([costs, np.log(lengths)])
    guided = boxes.__class__(boxes.space, boxes.table, boxes.truth, Pool(boxes.space, boxes.pool.assignments, guesses))
    with_it = [guided.play(Surrogate(), seed, 16).hypervolume[-1] for seed in range(3)]
    without = [boxes.play(Surrogate(), seed, 16).hypervolume[-1] for seed in range(3)]
    assert sum(with_it) > sum(without)


def test_a_prior_leads_only_once_a_launch_holds_the_limits(boxes: Game) -> None:
    sampler, blind = Surrogate(), told(boxes, 5).view(5)
    led = replace(blind, pool=replace(boxes.pool, guesses=np.zeros((len(boxes.pool.keys), 3))))
    broken = tuple(replace(each, broken=(1.0,)) for each in led.observations)
    held = (*broken[:-1], replace(broken[-1], broken=(-1.0,), values=(1.0, 1.0)))
    assert sampler.spread(blind) == sampler.spread(replace(led, observations=broken)) == sampler.startup
    assert sampler.spread(replace(led, observations=held)) == sampler.guided


def test_a_launch_that_dares_does_not_do_without_the_prior(boxes: Game) -> None:
    sampler, blind = Surrogate(), told(boxes, 3).view(14)
    led = replace(blind, pool=replace(boxes.pool, guesses=np.zeros((len(boxes.pool.keys), 3))))
    assert sampler.dares(led)
    assert not sampler.explores(led)
    assert sampler.dares(blind)
    assert sampler.explores(blind)
    assert sampler.explores(replace(led, number=12))


def test_the_turn_of_the_recommended_end_settles_who_is_best_there(boxes: Game) -> None:
    good = np.array([[1.0, 0.0], [0.0, 1.0]])
    faster_alone = np.array([[-1.0, 0.5]])  # better than all on the first axis, worse than the best on the last
    small, ones = np.full((1, 2), 0.01), np.ones(1)
    promise = Promise(faster_alone, small, good, np.full(2, 0.01), reference_of(good), ones, ones)
    blind = told(boxes, 3).view(15)
    assert Surrogate().gain(blind, promise, explores=False) is None
    for number in (11, 13):  # of the first end, of the whole front
        assert Surrogate().gain(replace(blind, number=number), promise, explores=False) is not None


def test_what_settles_who_is_best_is_likely_to_be_the_best_and_to_run(boxes: Game) -> None:
    view, sampler = told(boxes, 30).view(30), Surrogate()
    allowed = sampler.allowed(view)
    records = {key_of(row.assignment): row.record for row in boxes.table.rows}
    regrets = np.array([boxes.truth.regret(records[view.pool.keys[position]]) for position in allowed])
    sure = _settling(view, allowed, np.ones(len(allowed)))
    assert np.median(regrets[np.argsort(-sure)[:5]]) < np.median(regrets) / 2
    best = sure.argmax()
    risky = np.where(np.arange(len(allowed)) == best, 0.01, 1.0)
    assert _settling(view, allowed, risky).argmax() != best


@pytest.mark.proof
def test_the_search_ends_when_nothing_more_is_expected(boxes: Game) -> None:
    assert outlook(told(boxes, 3).view(3), Surrogate()) is None
    early = outlook(told(boxes, 16).view(16), Surrogate())
    late = outlook(told(boxes, 45).view(45), Surrogate())
    assert early is not None
    assert late is not None
    assert late.gain < early.gain
    assert should_stop([0.001] * 5)
    assert should_stop([0.001] * 4) is None
    assert should_stop([*itertools.repeat(0.001, 4), 0.1]) is None


def test_what_runs_is_believed_to_come_out_as_the_prior_and_the_launches_say(boxes: Game) -> None:
    made = build("small", dflash_space(), lambda config: dflash(config, Machine()), quiet)
    game = Game.of(made.space, made.table)
    guided = replace(game, pool=replace(game.pool, guesses=guessed(game, Machine())))
    for played_on in (game, guided, boxes):
        brain = told(played_on, 10)
        batch = [brain.ask(10 + slot) for slot in range(3)]
        assert len({key_of(s.assignment) for s in batch if s is not None}) == 3
        view = brain.view(13)
        before = Costs.of(view)
        costs = believe(view, before)
        assert len(costs.values) == len(before.values) + 3
        assert costs.accept is not None
        assert len(costs.accept) == len(costs.values)
        row = {key_of(r.assignment): r.record for r in played_on.table.rows}
        for assignment, values in zip(view.pending, costs.values[-3:], strict=True):
            record = row[key_of(assignment)]
            if played_on is guided and record.state == "measured":
                true = value_at(record, played_on.truth.objectives[0], 1)
                assert true is not None
                assert values[0] == pytest.approx(np.log(true), abs=0.25)
        assert np.any(Trusted.of(view, costs, view.pool.keys[:1]).behind != 0) == (played_on is guided)
