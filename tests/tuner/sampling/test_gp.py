"""The Gaussian process and its acquisition against what is known in closed form or by brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.sampling.acquisition import expected_improvement, hypervolume
from tuner.sampling.gp import Knobs, Prior, _objective, _Pairs, fit, members, rows_of


def data(n: int = 40, noise: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.random((n, 3))
    return x, np.sin(3 * x[:, 0]) + x[:, 1] + noise * rng.standard_normal(n)


def test_the_gradient_is_the_slope_of_the_objective() -> None:
    x, y = data()
    x[:, 0] = np.round(x[:, 0], 1)
    knobs = Knobs(minor=(False, True, False), shapes=(True, False, False))
    pairs, priors = _Pairs.of(x, members(range(3)), knobs), Prior().of(knobs.minor)
    assert 0 < pairs.alike.sum() < len(pairs.alike) / 2
    theta = np.array([0.1, -0.2, 0.5, 0.3, -0.4, -1.2, -3.0])

    def objective(at: np.ndarray) -> tuple[float, np.ndarray]:
        return _objective(at, pairs, y, np.ones(len(y)), priors)

    _, gradient = objective(theta)
    for index in range(len(theta)):
        step = np.zeros(len(theta))
        step[index] = 1e-5
        (above, _), (below, _) = objective(theta + step), objective(theta - step)
        assert gradient[index] == pytest.approx((above - below) / 2e-5, rel=1e-3, abs=1e-4)


def test_it_learns_the_function_the_noise_and_what_does_not_matter() -> None:
    x, y = data(60)
    model = fit(x, y, range(3))
    fresh = np.random.default_rng(1).random((200, 3))
    mean, sd = model.predict(fresh)
    error = mean - (np.sin(3 * fresh[:, 0]) + fresh[:, 1])
    assert np.sqrt(np.mean(error**2)) < 0.06
    assert np.mean(np.abs(error) <= 2 * sd + 0.02) > 0.9
    assert 0.02 < model.noise_sd < 0.1
    assert model.lengths[2] > 2 * model.lengths[0]


def test_a_sum_of_effects_is_known_where_its_parts_never_met() -> None:
    effects = np.array([0.0, 1.0, -0.7, 0.4])
    words = np.eye(4) * np.sqrt(0.5)
    pairs = [(i, j) for i in range(4) for j in range(4)]
    x, y = np.array([[*words[i], *words[j]] for i, j in pairs]), np.array([effects[i] - effects[j] for i, j in pairs])
    met = [row for row, (i, j) in enumerate(pairs) if i == 0 or j == 0]
    mean, _ = fit(x[met], y[met], [0] * 4 + [1] * 4).predict(x)
    assert np.abs(mean - y).max() < 0.35 * np.ptp(y)  # a product of kernels alone misses by half


def test_factored_rows_are_the_rows() -> None:
    x, y = data()
    model = fit(x, y, range(3))
    rows = rows_of(x, model.groups)
    some = np.array([7, 3, 3, 20])
    assert len(rows[some]) == 4
    for told, factored in zip(model.predict(x[some]), model.predict(rows[some]), strict=True):
        assert told == pytest.approx(factored, abs=1e-9)


def test_how_far_a_point_may_be_from_what_was_observed() -> None:
    """Against the joint posterior of one new point and one observed one, from the covariance of them all."""
    x, y = data(12)
    x[:, 0] = np.round(x[:, 0], 1)
    knobs = Knobs(minor=(False, False, True), shapes=(True, False, False))
    model = fit(x, y, range(3), scatter=np.linspace(0.02, 0.3, 12), knobs=knobs)
    fresh = np.vstack([np.random.default_rng(2).random((5, 3)), x[:2]])
    everywhere = np.vstack([x, fresh])
    prior = model._cross(rows_of(everywhere, model.groups))  # with the observed; the fresh follow one by one
    mean, sd, apart = model.compare(fresh)
    assert np.allclose(model.predict(fresh), (mean, sd))
    gained = np.linalg.inv(prior[:12] + np.diag(model.noises))
    most = model.signal + 3 * model.own + model.shape
    assert model.shape > 0
    for row, near in enumerate(prior[12:]):
        own = most - near @ gained @ near
        theirs = most - np.einsum("ij,jk,ki->i", prior[:12], gained, prior[:12])
        both = near - near @ gained @ prior[:12]
        expected = model.spread * np.sqrt(np.maximum((own + theirs - 2 * both).min(), 0))
        assert apart[row] == pytest.approx(expected, abs=2e-5 * model.spread)
    assert (apart[5:] < 1e-3 * model.spread).all()
    assert (apart[:5] <= 2.5 * sd[:5]).all()


def test_a_point_that_differs_in_what_does_not_matter_is_no_news() -> None:
    x, y = data(14)
    model = fit(x, y, range(3))
    twin, other = x[:1].copy(), x[:1].copy()
    twin[0, 2], other[0, 0] = 1 - twin[0, 2], 1 - other[0, 0]
    _, _, (same, different) = model.compare(np.vstack([twin, other]))
    assert same < 0.5 * different


def test_a_shape_that_a_kernel_likes_is_no_news_of_its_neighbours() -> None:
    rng = np.random.default_rng(3)
    sizes = np.linspace(0, 1, 8)
    liking = np.array([0.0, 0.3, -0.3, 0.3, 0.0, -0.3, 0.3, 0.0])
    x = np.array([[size, other] for size in sizes[:-1] for other in (0.0, 0.5, 1.0)])
    y = 2 * x[:, 0] + np.repeat(liking[:-1], 3) + 0.02 * rng.standard_normal(len(x))
    knobs = Knobs(minor=(False, True), shapes=(True, False))
    shaped, smooth = fit(x, y, range(2), knobs=knobs), fit(x, y, range(2))
    new, known = np.array([[sizes[-1], 0.25]]), np.array([[sizes[2], 0.25]])
    assert shaped.shape > 0
    assert smooth.shape == 0
    assert shaped.predict(new)[1] > 3 * shaped.predict(known)[1]
    assert shaped.compare(known)[2] < 0.1 * shaped.compare(new)[2]
    assert shaped.predict(known)[0] == pytest.approx(2 * sizes[2] + liking[2], abs=0.05)


def test_the_order_of_observations_does_not_matter() -> None:
    x, y = data()
    there, _ = fit(x, y, range(3)).predict(x[:5])
    back, _ = fit(x[::-1], y[::-1], range(3)).predict(x[:5])
    assert there == pytest.approx(back, abs=1e-3)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12))
def test_the_hypervolume_is_the_share_of_a_lattice_that_is_dominated(points: list[tuple[float, float]]) -> None:
    front, reference = np.array(points), np.array([1.0, 1.0])
    steps = (np.arange(60) + 0.5) / 60
    lattice = np.array([(a, b) for a in steps for b in steps])
    beaten = (front[None] <= lattice[:, None]).all(-1).any(1).mean()
    assert hypervolume(front, reference) == pytest.approx(beaten, abs=0.04)


def test_the_expected_gain_is_the_mean_gain_of_draws() -> None:
    front, reference = np.array([[0.2, 0.8], [0.5, 0.4], [0.9, 0.1]]), np.array([1.0, 1.0])
    mean, sd = np.array([[0.4, 0.5], [0.1, 0.9], [0.6, 0.2]]), np.array([[0.1, 0.2], [0.3, 0.1], [0.2, 0.2]])
    exact = expected_improvement(front, reference, mean, sd)
    rng, before = np.random.default_rng(0), hypervolume(front, reference)
    for row in range(3):
        draws = mean[row] + sd[row] * rng.standard_normal((4000, 2))
        gains = [hypervolume(np.vstack([front, draw]), reference) - before for draw in draws]
        assert exact[row] == pytest.approx(np.mean(gains), rel=0.1)
