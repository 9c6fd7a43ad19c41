"""The one rule for degenerate text: a generation *loops* when its last 48 tokens have a period <= 16.

The pair's evaluation, the tuner's parity gate and the report all call :func:`loops`, so a looping
generation means the same thing everywhere.  No imports beyond the standard library.
"""

from __future__ import annotations

from collections.abc import Sequence

WINDOW = 48
MAX_PERIOD = 16


def loops(tokens: Sequence[int]) -> bool:
    """Whether the last 48 of the *generated* ``tokens`` (prompt excluded) repeat with a period of 1 to 16.

    A window has period p when every token equals the one p places before it inside the window.  Fewer
    than 48 tokens never loop: too little was seen to tell a loop from ordinary repetition.
    """
    if len(tokens) < WINDOW:
        return False
    tail = tokens[len(tokens) - WINDOW :]
    return any(all(tail[i] == tail[i - p] for i in range(p, WINDOW)) for p in range(1, MAX_PERIOD + 1))


def recurs(tokens: Sequence[int], max_period: int = 80) -> bool:
    """Whether the last 48 generated ``tokens`` stood in the text before, at most ``max_period`` earlier.

    Weaker than :func:`loops` and no gate: it also sees whole lines that come back word for word, which
    real code has too, and reports beside accept length how much of it such text carries.
    """
    size = len(tokens)
    return any(
        list(tokens[size - WINDOW :]) == list(tokens[size - WINDOW - p : size - p])
        for p in range(1, min(max_period, size - WINDOW) + 1)
    )


def loop_share(generations: Sequence[Sequence[int]]) -> float:
    """Share of ``generations`` that loop, 0..1; 0 for none."""
    return sum(map(loops, generations)) / len(generations) if generations else 0.0
