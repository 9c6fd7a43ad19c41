"""The scheduler against an obvious model: every request gets all its tokens once, in order, within the limits."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Request
from engine.scheduler import Scheduler, cut

PAGE = 4
ROWS = 3


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 16),
    st.data(),
)
def test_every_request_is_served_completely(
    sizes: list[tuple[int, int]], max_running: int, chunk: int, data: st.DataObject
) -> None:
    scheduler = Scheduler(max_running, chunk, ROWS, PAGE)
    requests = [Request(i, tuple(range(p)), n) for i, (p, n) in enumerate(sizes)]
    for request in requests:
        scheduler.submit(request)
    pages = {r.id: -(-scheduler.tokens_for(r) // PAGE) for r in requests}
    total = max(pages.values()) + data.draw(st.integers(0, 20))
    held: dict[int, int] = {}
    prompts: dict[int, list[int]] = {r.id: [] for r in requests}
    made: dict[int, list[int]] = {r.id: [] for r in requests}
    finished: list[int] = []
    for _ in range(2000):
        batch = scheduler.schedule(total - sum(held.values()))
        if not batch:
            break
        for admission in batch.admitted:
            held[admission.id] = -(-admission.tokens // PAGE)
        assert sum(held.values()) <= total
        assert len(held) <= max_running
        assert sum(len(c.tokens) for c in batch.prefill) <= chunk
        produced = {}
        for part in batch.prefill:
            prompts[part.id] += part.tokens
            if part.last:
                produced[part.id] = (100,)
        for decode in batch.decode:
            assert decode.root == made[decode.id][-1]
            last = decode.root
            produced[decode.id] = tuple(last + 1 + i for i in range(data.draw(st.integers(1, ROWS))))
        for progress in scheduler.apply(batch, produced):
            made[progress.id] += progress.tokens
            if progress.finish:
                finished.append(progress.id)
                del held[progress.id]
    assert sorted(finished) == [r.id for r in requests]
    for request in requests:
        assert tuple(prompts[request.id]) == request.prompt
        assert made[request.id] == list(range(100, 100 + request.max_tokens))
    assert scheduler.running == scheduler.waiting == 0


def test_first_come_first_served_when_memory_is_short() -> None:
    scheduler = Scheduler(max_running=8, prefill_chunk=64, verify_rows=1, page_size=PAGE)
    for number in range(3):
        scheduler.submit(Request(number, (1,) * 10, 5))
    assert [a.id for a in scheduler.schedule(free_pages=8).admitted] == [0, 1]
    assert scheduler.waiting == 1


def test_cancel_waiting_running_and_unknown() -> None:
    scheduler = Scheduler(max_running=1, prefill_chunk=64, verify_rows=1, page_size=PAGE)
    scheduler.submit(Request(0, (1, 2), 5))
    scheduler.submit(Request(1, (1, 2), 5))
    batch = scheduler.schedule(100)
    assert not scheduler.cancel(1)
    assert scheduler.waiting == 0
    assert scheduler.cancel(0)
    assert scheduler.apply(batch, {0: (5,)}) == ()
    assert not scheduler.cancel(0)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=10), st.integers(1, 12), st.sets(st.integers(0, 5), max_size=2))
def test_cut_equals_taking_tokens_one_by_one(tokens: list[int], room: int, eos: set[int]) -> None:
    expected, finish = [], None
    for token in tokens:
        expected.append(token)
        if token in eos:
            finish = "stop"
            break
        if len(expected) == room:
            finish = "length"
            break
    assert cut(tuple(tokens), room, tuple(eos)) == (tuple(expected), finish)
