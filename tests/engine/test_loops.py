"""The shared loop rule against brute force."""

from __future__ import annotations

import subprocess
import sys

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.loops import loop_share, loops
from engine.pair.generate import looping


def brute_force(tokens: list[int]) -> bool:
    """Some block of 1..16 tokens, repeated, fills the last 48 exactly (its last copy may be cut)."""
    tail = tokens[-48:]
    if len(tail) < 48:
        return False
    for period in range(1, 17):
        block = tail[:period]
        if (block * 48)[:48] == tail:
            return True
    return False


@st.composite
def generations(draw: st.DrawFn) -> list[int]:
    """Random beginnings followed by a repeated block, sometimes with one token spoilt."""
    head = draw(st.lists(st.integers(0, 3), max_size=60))
    block = draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))
    tokens = head + block * draw(st.integers(0, 60))
    if tokens and draw(st.booleans()):
        tokens[draw(st.integers(0, len(tokens) - 1))] = 9
    return tokens


@settings(max_examples=400, deadline=None)
@given(generations())
def test_loops_is_brute_force(tokens: list[int]) -> None:
    assert loops(tokens) == brute_force(tokens)
    assert looping(torch.tensor([tokens], dtype=torch.long)).tolist() == [brute_force(tokens)]


def test_edges() -> None:
    assert not loops([])
    assert not loops([1] * 47)
    assert loops([1] * 48)
    assert loops([*range(100), *[5, 6] * 24])
    assert loops(list(range(16)) * 3)
    assert not loops(list(range(17)) * 3)
    assert not loops([*[1] * 47, 2])
    assert loop_share([[1] * 48, list(range(48))]) == 0.5
    assert loop_share([]) == 0.0


def test_no_torch_is_imported() -> None:
    code = "import sys, engine.loops, engine.pair.workload, engine.pair.paths; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
