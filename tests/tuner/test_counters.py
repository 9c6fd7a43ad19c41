"""Counters of a server: differences of what only grows, and nothing made up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backends import RoundCounts
from engine.protocol import Acceptance, Rounds
from tuner.counters import PARTS, between, with_accept_length
from tuner.records import Level


def info(rounds: int, reached: list[int], seconds: float) -> dict[str, object]:
    """A server that verified `rounds` times; `reached[i]` of them accepted draft i + 1."""
    shares = tuple(count / rounds for count in reached) if rounds else ()
    times = {f"seconds_{part}": seconds * (i + 1) for i, part in enumerate(PARTS)}
    return {
        "rounds": Rounds.model_validate(
            {"rounds": rounds, "requests": rounds, "tokens": 2 * rounds, **times}
        ).model_dump(),
        "acceptance": Acceptance(verify_count=rounds, by_position=shares).model_dump(mode="json"),
    }


@given(st.integers(0, 500), st.integers(1, 500), st.data())
def test_the_difference_is_what_happened_in_between(first: int, more: int, data: st.DataObject) -> None:
    then = sorted((data.draw(st.integers(0, first)) for _ in range(3)), reverse=True)
    new = sorted((data.draw(st.integers(0, more)) for _ in range(3)), reverse=True)
    counted = between(info(first, then, 1.0), info(first + more, [a + b for a, b in zip(then, new, strict=True)], 3.0))
    assert counted is not None
    assert (counted["rounds"], counted["tokens"], counted["verify_count"]) == (more, 2 * more, more)
    assert counted["by_position"] == pytest.approx([n / more for n in new], abs=1e-4)
    assert counted["seconds"] == {part: 2.0 * (i + 1) for i, part in enumerate(PARTS)}


@pytest.mark.parametrize(
    "after", [{}, {"rounds": 3}, {"rounds": {"rounds": "many"}}, {"acceptance": {"by_position": [1]}}]
)
def test_a_server_that_does_not_count_says_nothing(after: dict[str, object]) -> None:
    assert between({}, after) is None


def test_a_server_that_was_not_asked_before_counts_from_zero() -> None:
    counted = between({}, info(4, [4, 2, 0], 1.0))
    assert counted is not None
    assert counted["by_position"] == [1.0, 0.5, 0.0]


def test_a_servers_rounds_give_the_accept_length_that_no_request_told() -> None:
    before, after = RoundCounts(10.0, 5.0), RoundCounts(45.0, 15.0)
    level = Level(concurrency=1, metrics={"accept_length": None, "output_tok_s": 5.0}, n=3)
    assert with_accept_length(level, before, after).metrics == {"accept_length": 3.5, "output_tok_s": 5.0}
    told = Level(concurrency=1, metrics={"accept_length": 2.0}, n=3)
    assert with_accept_length(told, before, after) is told
    assert with_accept_length(level, None, after) is level
    assert with_accept_length(level, after, after).metrics["accept_length"] is None
