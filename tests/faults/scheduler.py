"""Mistakes in batching: right for one short request alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.faults.fault import EVERY, Need, Patches, Shows, fault


@fault(
    "in the round after a request ended, two others get each other's newest token", EVERY, Shows.TEXT, (Need.RETIRED,)
)
def swapped_after_retirement(patch: Patches) -> None:
    retired = False

    @patch("engine.scheduler:Scheduler.apply")
    def apply(original: Any, scheduler: Any, batch: Any, produced: Any, *scores: Any) -> Any:
        nonlocal retired
        ids = [decode.id for decode in batch.decode if decode.id in scheduler._running]
        if retired and len(ids) > 1:
            one, two = ids[:2]
            last, other = produced[one][-1], produced[two][-1]
            produced = {**produced, one: (*produced[one][:-1], other), two: (*produced[two][:-1], last)}
        progress = original(scheduler, batch, produced, *scores)
        retired = any(each.finish for each in progress)
        return progress


@fault("every chunk of a prompt but the last loses its last token", EVERY, Shows.TEXT, (Need.CHUNKED,))
def chunk_loses_last_token(patch: Patches) -> None:
    @patch("engine.speculate:prefill")
    def prefill(original: Any, chunks: Any, engine: Any) -> Any:
        return original(
            [
                chunk if chunk.last or len(chunk.tokens) == 1 else replace(chunk, tokens=chunk.tokens[:-1])
                for chunk in chunks
            ],
            engine,
        )


class _Restarting:
    """A cache whose positions begin at 0 in every forward."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def reserve(self, requests: Any, rows: int) -> Any:
        places = self._cache.reserve(requests, rows)
        return replace(places, positions=places.positions - places.starts[0])


@fault("positions begin again at 0 with every chunk of a prompt", EVERY, Shows.TEXT, (Need.CHUNKED,))
def chunk_restarts_positions(patch: Patches) -> None:
    @patch("engine.speculate:prefill")
    def prefill(original: Any, chunks: Any, engine: Any) -> Any:
        return original(chunks, replace(engine, cache=_Restarting(engine.cache)))


@fault(
    "a batch is masked by its longest request: shorter ones see what lies behind them",
    EVERY,
    Shows.TEXT,
    (Need.RAGGED,),
)
def masked_by_longest(patch: Patches) -> None:
    @patch("engine.model.attention.torch:TorchAttention._hidden")
    def hidden(original: Any, attention: Any, span: Any, length: int) -> Any:
        return original(attention, replace(span, starts=(max(span.starts),) * len(span.starts)), length)
