"""Acceptance against token-by-token decoding."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import verify


@given(st.integers(1, 4), st.integers(1, 6), st.randoms(use_true_random=False))
def test_chain_equals_walking_it(requests: int, rows: int, random: object) -> None:
    draw = lambda: [[random.randrange(3) for _ in range(rows)] for _ in range(requests)]  # type: ignore[attr-defined]  # noqa: E731
    proposal, choices = draw(), draw()
    verdict = verify.chain(torch.tensor(proposal), torch.tensor(choices))
    for request in range(requests):
        row = 0
        while row + 1 < rows and proposal[request][row + 1] == choices[request][row]:
            row += 1
        assert verdict.accepted[request] == row
        assert verdict.tokens[request] == tuple(choices[request][: row + 1])


def test_forced_acceptance_has_the_asked_mean_and_stays_within_the_block() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.zeros(1000, 4, dtype=torch.int64)
    for wanted in (1.0, 2.25, 4.0):
        verdict = verify.forced(tokens, wanted, 3, generator)
        lengths = [len(made) for made in verdict.tokens]
        assert abs(sum(lengths) / 1000 - wanted) < 0.05
        assert set(lengths) <= {int(wanted), min(4, int(wanted) + 1)}
