"""Pages and lengths: nothing is given twice, nothing is lost, slots follow positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import OutOfMemory
from engine.kv_cache import KVCache, PoolShape, _adjacent

PAGE = 4


def cache_of(pages: int = 12, max_running: int = 4, max_tokens: int = 24) -> KVCache:
    pool = PoolShape(layers=1, kv_heads=1, head_dim=2)
    return KVCache(pool, pool, pages, PAGE, max_running, max_tokens, torch.float32, torch.device("cpu"))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_requests_never_share_a_slot(data: st.DataObject) -> None:
    cache = cache_of()
    capacity: dict[int, int] = {}
    length: dict[int, int] = {}
    for number in range(data.draw(st.integers(1, 25))):
        if capacity and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(capacity)))
            cache.release(gone)
            del capacity[gone], length[gone]
        tokens = data.draw(st.integers(1, 24))
        if cache.pages_for(tokens) <= cache.free_pages and len(capacity) < 4:
            cache.admit(number, tokens)
            capacity[number], length[number] = cache.pages_for(tokens) * PAGE, 0
        elif len(capacity) < 4:
            with pytest.raises(OutOfMemory):
                cache.admit(number, tokens)
        ready = [n for n in capacity if capacity[n] - length[n] >= 2]
        if ready:
            chosen = data.draw(st.lists(st.sampled_from(ready), unique=True, min_size=1))
            places = cache.reserve(chosen, 2)
            positions = places.positions.view(len(chosen), 2).tolist()
            assert positions == [[length[n], length[n] + 1] for n in chosen]
            kept = [data.draw(st.integers(0, 2)) for _ in chosen]
            cache.commit(chosen, kept)
            for n, count in zip(chosen, kept, strict=True):
                length[n] += count
        assert all(cache.length(n) == length[n] for n in capacity)
        held: list[int] = []
        for n, room in capacity.items():
            slots = cache.reserve([n], 1).slots[0, :room] if length[n] < room else None
            held += slots.tolist() if slots is not None else []
        assert len(held) == len(set(held))
        assert cache.free_pages * PAGE + sum(capacity.values()) == 12 * PAGE


def test_single_request_is_a_slice_and_slots_agree_with_the_table() -> None:
    cache = cache_of()
    cache.admit(7, 20)
    places = cache.reserve([7], 3)
    assert places.contiguous is not None
    assert places.write.tolist() == places.slots[0, :3].tolist()


def test_fragmented_pages_are_still_usable() -> None:
    cache = cache_of(pages=6)
    for number in range(3):
        cache.admit(number, 2 * PAGE)
    cache.release(0)
    cache.release(2)
    cache.admit(3, 4 * PAGE)
    cache.commit([3], [2 * PAGE])
    places = cache.reserve([3], 1)
    assert places.contiguous is None
    assert places.write.tolist() == [4 * PAGE]


def test_rows_beyond_the_admitted_size_are_refused() -> None:
    cache = cache_of()
    cache.admit(1, PAGE)
    with pytest.raises(ValueError, match="exceed"):
        cache.reserve([1], PAGE + 1)
    with pytest.raises(ValueError, match="exceed"):
        cache.commit([1], [PAGE + 1])


@given(st.sets(st.integers(0, 30)), st.integers(1, 6))
def test_adjacent_finds_the_first_run(free: set[int], needed: int) -> None:
    runs = [list(range(s, s + needed)) for s in sorted(free) if set(range(s, s + needed)) <= free]
    assert _adjacent(sorted(free), needed) == (runs[0] if runs else None)
