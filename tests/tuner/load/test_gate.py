from __future__ import annotations

import math
import random

from tuner.load.gate import Gate, Quota, Rule, Window

RULE = Rule(window=1.0, longest=3.0, width=0.1, enough=6, flying=1)


def level(rule: Rule = RULE) -> tuple[Window, Gate]:
    gate = Gate()
    window = Window(rule, [gate])
    gate.steering = window
    return window, gate


def requests(gate: Gate, lengths: list[float], start: float = 0.0) -> float:
    """Claim and finish requests one after another; return when the last is over."""
    now = start
    for length in lengths:
        _, counts = gate.claim(now)
        gate.finish(now, now + length, counts)
        now += length
    return now


def test_nothing_counts_before_the_window_opens() -> None:
    window, gate = level()
    assert gate.claim(0.0) == (0, False)
    window.warm(1.0)
    assert gate.claim(0.5) == (1, False)  # it was due before
    assert gate.claim(1.0) == (2, True)


def test_equal_requests_close_it_after_the_window() -> None:
    window, gate = level()
    window.warm(0.0)
    requests(gate, [0.1] * 40)
    assert window.steady
    assert 1.0 <= window.closed < 1.2
    assert gate.over.is_set()


def test_a_wide_interval_keeps_it_open_up_to_the_longest() -> None:
    window, gate = level()
    window.warm(0.0)
    requests(gate, [0.05, 0.5] * 20)
    assert 3.0 <= window.closed < 3.6


def test_too_few_requests_keep_it_open_beyond_the_longest() -> None:
    window, gate = level()
    window.warm(0.0)
    requests(gate, [2.0] * 8)
    assert gate.counted >= RULE.enough - RULE.flying
    assert window.closed >= 2.0 * (RULE.enough - RULE.flying)


def test_a_transient_is_taken_for_warm_up() -> None:
    """The server is three times slower in the first half second: the window moves past it."""
    rng = random.Random(1)
    window, gate = level()
    window.warm(0.0)
    requests(gate, [rng.gauss(0.06, 0.003) for _ in range(8)] + [rng.gauss(0.02, 0.001) for _ in range(200)])
    assert window.opened >= 0.4
    assert window.steady
    assert window.closed >= window.opened + 1.0


def test_what_never_settles_is_called_so() -> None:
    """Every request takes longer than the one before."""
    window, gate = level()
    window.warm(0.0)
    requests(gate, [0.02 * 1.02**i for i in range(120)])
    assert not window.steady
    assert window.closed >= 3.0


def test_it_is_over_when_the_last_that_counts_is() -> None:
    window, gate = level()
    window.warm(0.0)
    _, counts = gate.claim(0.0)
    assert counts
    requests(gate, [0.1] * 40)
    assert window.closed < math.inf
    assert not gate.over.is_set()
    gate.finish(0.0, 9.0, True)
    assert gate.over.is_set()


def test_a_quota_closes_itself() -> None:
    gates = [Gate(quota=2), Gate(quota=1, first=1, step=2)]
    quota = Quota(3, gates)
    for gate in gates:
        gate.steering = quota
    for _ in range(3):
        assert not any(gate.opened < math.inf for gate in gates)
        quota.warm(1.0)
    assert requests(gates[0], [1.0, 1.0, 1.0], 1.0) == 4.0
    assert not gates[0].over.is_set()
    assert gates[1].claim(1.0) == (1, True)
    assert gates[1].claim(1.0) == (3, False)
    gates[1].finish(1.0, 7.0, True)
    assert all(gate.over.is_set() for gate in gates)
    assert (quota.done, quota.closed) == (3, 7.0)
