"""The ends of a round: places and what is kept, equal to plain torch's."""

from __future__ import annotations

import pytest
import torch

from tests.engine.kernels.cases import DEVICE, WIDE, ints

pytest.importorskip("triton", reason="a CPU-only torch comes without Triton")

from engine.kernels.base import Places, Standing
from engine.kernels.triton_ops import TritonOps

OPS = TritonOps(DEVICE)
REQUESTS, POSITIONS = 5, 40


def standing() -> Standing:
    """Return requests at random places; the last row is nobody's."""
    lengths = torch.randint(0, POSITIONS - 16, (REQUESTS,)).int()
    roots = torch.randint(0, 9, (REQUESTS,))
    lengths[-1] = roots[-1] = 0
    slots = torch.randperm(REQUESTS * POSITIONS).view(REQUESTS, POSITIONS).int()
    return Standing(lengths.to(DEVICE), roots.to(DEVICE), slots.to(DEVICE))


def copy(of: Standing) -> Standing:
    return Standing(of.lengths.clone(), of.roots.clone(), of.slots.clone())


def parts(places: Places) -> list[torch.Tensor]:
    return [places.cached, places.roots, places.positions, places.write]


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("lanes", [[2], [3, 0, 4, 4]], ids=["one", "padded"])
def test_places(rows: int, lanes: list[int]) -> None:
    made = standing()
    for ours, theirs in zip(
        parts(OPS.places(made, ints(*lanes), rows)), parts(WIDE.places(made, ints(*lanes), rows)), strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("given", [True, False], ids=["given", "counted"])
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("lanes", [[2], [3, 0, 4, 4, 1]], ids=["one", "padded"])
def test_what_a_round_leaves(rows: int, lanes: list[int], given: bool) -> None:
    ours = standing()
    theirs, before = copy(ours), copy(ours)
    drafted = torch.randint(0, 3, (len(lanes), rows), device=DEVICE)
    tokens = torch.randint(0, 3, (len(lanes), rows), device=DEVICE)
    tokens[0, :-1] = drafted[0, 1:]  # a lane whose draft is all accepted
    if len(lanes) > 1 and rows > 1:
        tokens[1, 0] = drafted[1, 1] + 1  # and one where nothing is
    kept = torch.randint(1, rows + 1, (len(lanes),), device=DEVICE) if given else None
    packed = OPS.settle(ours, ints(*lanes), drafted, tokens, kept)
    assert packed.tolist() == WIDE.settle(theirs, ints(*lanes), drafted, tokens, kept).tolist()
    assert packed.dtype == torch.int64
    assert ours.lengths.tolist() == theirs.lengths.tolist()
    assert ours.roots.tolist() == theirs.roots.tolist()
    assert int(ours.lengths[-1]) == int(ours.roots[-1]) == 0
    if not given:
        assert int(packed[0, 0]) == rows
        assert int(ours.lengths[lanes[0]] - before.lengths[lanes[0]]) == rows
    untouched = sorted(set(range(REQUESTS)) - set(lanes))
    assert ours.lengths[untouched].tolist() == before.lengths[untouched].tolist()
