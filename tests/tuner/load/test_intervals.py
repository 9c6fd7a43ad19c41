from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tuner.load.intervals import LEAST_FOR_DRIFT, hall, mean, ratio, relative_width, student, unsettled


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.001, 1e6), min_size=3, max_size=60))
def test_an_interval_encloses_its_value_and_is_not_negative(values: list[float]) -> None:
    found = mean(values)
    assert found.value == pytest.approx(float(np.mean(values)))
    assert found.interval is not None
    low, high = found.interval
    assert 0 <= low <= found.value * (1 + 1e-9)
    assert high >= found.value * (1 - 1e-9)


@pytest.mark.parametrize("n", [5, 20, 200])
def test_without_skewness_it_is_students(n: int) -> None:
    below, above = hall(0.0, n)
    assert (below, above) == (-student(n - 1), student(n - 1))


@settings(max_examples=60, deadline=None)
@given(st.floats(-3, 3), st.integers(5, 500))
@example(6.1e-05, 5)
def test_halls_transformation_is_turned_back(skewness: float, n: int) -> None:
    """Putting a bound into T + γT²/3√n + γ²T³/27n + γ/6√n gives Student's quantile."""
    root = math.sqrt(n)
    for sign, bound in zip((-1, 1), hall(skewness, n), strict=True):
        turned = bound + skewness * bound**2 / (3 * root) + skewness**2 * bound**3 / (27 * n) + skewness / (6 * root)
        assert turned == pytest.approx(sign * student(n - 1), rel=1e-6, abs=1e-6)


def test_a_ratio_of_equal_pairs_is_exact() -> None:
    found = ratio([64.0] * 9, [2.0] * 9)
    assert found.value == 32
    assert found.interval == (32, 32)


def test_widths() -> None:
    assert relative_width([1.0, 2.0]) == math.inf
    assert relative_width([2.0] * 5) == 0
    assert relative_width([1.0, 3.0] * 8) > relative_width([1.9, 2.1] * 8) > 0


def test_steady_series_are_steady_and_transients_are_found() -> None:
    rng = random.Random(2)
    alarms = sum(unsettled([rng.gammavariate(20, 0.05) for _ in range(80)]) > 0 for _ in range(400))
    assert alarms <= 0.05 * 400  # 1 % by design, more for small quarters
    slow_start = [rng.gauss(3, 0.1) for _ in range(20)] + [rng.gauss(1, 0.03) for _ in range(80)]
    assert 20 <= unsettled(slow_start) <= 60
    assert unsettled([1.02**i for i in range(100)]) == 100
    assert unsettled([5.0] * (LEAST_FOR_DRIFT - 1)) == 0
