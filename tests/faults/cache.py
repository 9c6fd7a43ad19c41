"""Mistakes in the KV cache: lengths, pages, slots."""

from __future__ import annotations

from typing import Any

from tests.faults.fault import DRAFTED, EVERY, TREE, Need, Patches, Shows, fault


@fault("after a rejection the first rejected row stays in the cache", DRAFTED, Shows.TEXT)
def rejected_row_kept(patch: Patches) -> None:
    spare: dict[int, int] = {}

    @patch("engine.kv_cache:KVCache.admit")
    def admit(original: Any, cache: Any, request: int, tokens: int) -> None:
        original(cache, request, tokens)
        spare[request] = cache._entries[request].capacity - tokens

    @patch("engine.speculate:commit")
    def commit(original: Any, verdict: Any, features: Any, places: Any, engine: Any) -> None:
        original(verdict, features, places, engine)
        for request, rows in zip(places.ids, verdict.rows, strict=True):
            # Only into spare slots of the last page: past them the engine stops with an error, not quietly.
            if len(rows) < places.rows and spare[request]:
                spare[request] -= 1
                engine.cache._entries[request].length += 1


@fault("the last accepted token's row is dropped: the next round's root takes its place", DRAFTED, Shows.TEXT)
def commit_one_short(patch: Patches) -> None:
    @patch("engine.speculate:commit")
    def commit(original: Any, verdict: Any, features: Any, places: Any, engine: Any) -> None:
        original(verdict, features, places, engine)
        for request, rows in zip(places.ids, verdict.rows, strict=True):
            engine.cache._entries[request].length -= len(rows) > 1


@fault("compaction leaves out the accepted path's last row: the cache keeps another branch's", TREE, Shows.TEXT)
def compaction_stale_row(patch: Patches) -> None:
    @patch("engine.kv_cache:KVCache.compact")
    def compact(original: Any, cache: Any, places: Any, kept: Any) -> None:
        original(cache, places, [rows[:-1] for rows in kept])


@fault("a round's root does not overwrite the KV of the draft rejected at its place", DRAFTED, Shows.TEXT)
def stale_root_row(patch: Patches) -> None:
    rejected: set[int] = set()

    @patch("engine.speculate:forward")
    def forward(original: Any, proposal: Any, places: Any, engine: Any) -> Any:
        roots = places.write.view(proposal.tokens.shape)[:, 0]
        before = engine.cache.target[:, roots].clone()
        scored = original(proposal, places, engine)
        for index, request in enumerate(places.ids):
            if request in rejected:
                engine.cache.target[:, roots[index]] = before[:, index]
        return scored

    @patch("engine.speculate:commit")
    def commit(original: Any, verdict: Any, features: Any, places: Any, engine: Any) -> None:
        original(verdict, features, places, engine)
        for request, rows in zip(places.ids, verdict.rows, strict=True):
            (rejected.add if len(rows) < places.rows else rejected.discard)(request)

    @patch("engine.kv_cache:KVCache.admit")
    def admit(original: Any, cache: Any, request: int, tokens: int) -> None:
        original(cache, request, tokens)
        rejected.discard(request)


@fault("a new request's second page is also a running request's", EVERY, Shows.TEXT, (Need.BATCH, Need.PAGE))
def page_shared(patch: Patches) -> None:
    @patch("engine.kv_cache:KVCache.admit")
    def admit(original: Any, cache: Any, request: int, tokens: int) -> None:
        others = [entry for entry in cache._entries.values() if len(entry.pages) > 1]
        original(cache, request, tokens)
        entry = cache._entries[request]
        if others and len(entry.pages) > 1:
            page = slice(cache.page_size, 2 * cache.page_size)
            cache._table[entry.row, page] = cache._table[others[0].row, page]
            entry.first_slot = None  # its slots are no plain slice any more


@fault("a forward that begins at a page's first token writes it to the page before", EVERY, Shows.TEXT, (Need.PAGE,))
def page_boundary(patch: Patches) -> None:
    @patch("engine.kv_cache:KVCache.reserve")
    def reserve(original: Any, cache: Any, requests: Any, rows: int) -> Any:
        places = original(cache, requests, rows)
        for index, start in enumerate(places.starts):
            if start and start % cache.page_size == 0:
                places.write[index * rows] = places.slots[index, start - 1]
        return places


@fault(
    "a cancelled request frees the newest request's pages, not its own, and the next one gets them",
    EVERY,
    Shows.TEXT,
    (Need.CANCELLED,),
)
def cancel_frees_neighbour(patch: Patches) -> None:
    @patch("engine.loop:Loop.cancel")
    def cancel(original: Any, loop: Any, request: int) -> None:
        cache = loop._engine.cache
        own = cache._entries.get(request)
        original(loop, request)
        if own is not None and cache._entries:
            newest = list(cache._entries.values())[-1]
            others = [page for page in cache._free if page not in own.pages]
            cache._free = [*newest.pages, *others]  # what was freed last is given first
