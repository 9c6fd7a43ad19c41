"""The KV cache: pages, and the one owner of sequence lengths.

Target and drafter have a pool each and share the page table, so a token has one slot for both. A request gets all
the pages it can ever need when it is admitted (nothing is evicted while it runs), next to each other when there is
such a gap: a single request's cache is then a plain slice. Every forward first `reserve`s rows after the cached
tokens, and `commit` moves the length over those that stay; the rest is overwritten by the next round. So verifying
a block extends the cache, and only the rejected tail is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.errors import OutOfMemory, is_full
from engine.model.attention.base import Span


@dataclass(frozen=True)
class PoolShape:
    """KV of one stack: layers × slots × (keys, then values)."""

    layers: int
    kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one cached token takes."""
        return self.layers * 2 * self.kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True)
class Reservation:
    """Rows for the next forward of some requests, `rows` each, directly after their cached tokens.

    `positions`, `write`: [requests × rows], position and KV slot of every row.
    """

    ids: tuple[int, ...]
    rows: int
    starts: tuple[int, ...]
    positions: Tensor
    write: Tensor
    slots: Tensor
    contiguous: int | None

    def first(self, rows: int) -> Reservation:
        """Return the first `rows` of every request's rows."""
        if rows == self.rows:
            return self
        requests = len(self.ids)
        positions = self.positions.view(requests, self.rows)[:, :rows].reshape(-1)
        write = self.write.view(requests, self.rows)[:, :rows].reshape(-1)
        return replace(self, rows=rows, positions=positions, write=write)

    def at(self, depths: Tensor) -> Reservation:
        """Return the same rows and slots, each at the position `depths` [requests, rows] after the cached tokens."""
        starts = self.positions.view(depths.shape)[:, :1]
        return replace(self, positions=(starts + depths).flatten())

    def span(self, causal: bool, tree: Tensor | None = None) -> Span:
        """Describe the rows to an attention kernel; `tree` [requests, rows, rows]: which rows a row sees."""
        return Span(self.slots, self.starts, self.rows, self.contiguous, causal, tree)


@dataclass
class _Entry:
    row: int
    pages: list[int]
    length: int
    capacity: int
    first_slot: int | None


class KVCache:
    """Pages of both pools, handed to requests by id."""

    def __init__(
        self,
        target: PoolShape,
        draft: PoolShape | None,
        pages: int,
        page_size: int,
        max_running: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate.

        Args:
            pages: number of pages; `page_size` tokens each.
            max_tokens: most tokens one request may ever hold, reserved rows included.

        Raises:
            OutOfMemory: the pools do not fit.
        """
        self.page_size, self.pages = page_size, pages
        self._free = list(range(pages))
        self._entries: dict[int, _Entry] = {}
        self._rows = list(range(max_running))
        self._device = device
        self.target = _pool(target, pages * page_size, dtype, device)
        self.draft = None if draft is None else _pool(draft, pages * page_size, dtype, device)
        # Zero, so that a position behind a request's end points at a real slot; masks hide what it holds.
        self._table = torch.zeros(max_running, self.pages_for(max_tokens) * page_size, dtype=torch.int64, device=device)

    @property
    def free_pages(self) -> int:
        """Pages that no request holds."""
        return len(self._free)

    @property
    def longest(self) -> int:
        """Most tokens one request may hold."""
        return min(self._table.shape[1], self.pages * self.page_size)

    @property
    def tokens_used(self) -> int:
        """Tokens cached for all requests."""
        return sum(entry.length for entry in self._entries.values())

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens`."""
        return -(-tokens // self.page_size)

    def length(self, request: int) -> int:
        """Tokens cached for a request."""
        return self._entries[request].length

    def admit(self, request: int, tokens: int) -> None:
        """Give a request the pages for `tokens`, reserved rows included.

        Raises:
            OutOfMemory: fewer pages are free.
        """
        needed = self.pages_for(tokens)
        if needed > len(self._free) or not self._rows:
            raise OutOfMemory(f"request {request} needs {needed} KV pages, {len(self._free)} are free")
        pages = _adjacent(self._free, needed) or self._free[:needed]
        taken = set(pages)
        self._free = [page for page in self._free if page not in taken]
        row = self._rows.pop()
        size = self.page_size
        slots = torch.tensor(pages, device=self._device)[:, None] * size + torch.arange(size, device=self._device)
        self._table[row].zero_()
        self._table[row, : needed * size] = slots.flatten()
        together = pages == list(range(pages[0], pages[0] + needed))
        self._entries[request] = _Entry(row, pages, 0, needed * size, pages[0] * size if together else None)

    def release(self, request: int) -> None:
        """Take a request's pages back."""
        entry = self._entries.pop(request)
        self._rows.append(entry.row)
        self._free = sorted(self._free + entry.pages)

    def reserve(self, requests: Sequence[int], rows: int) -> Reservation:
        """Return places for `rows` rows after the cached tokens of each request; lengths do not change."""
        entries = [self._entries[request] for request in requests]
        for request, entry in zip(requests, entries, strict=True):
            if entry.length + rows > entry.capacity:
                raise ValueError(f"request {request}: {entry.length} + {rows} rows exceed its {entry.capacity} slots")
        starts = tuple(entry.length for entry in entries)
        only = entries[0].first_slot if len(entries) == 1 else None
        offsets = torch.arange(rows, device=self._device)
        if only is not None:
            positions = offsets + starts[0]
            slots = self._table[entries[0].row : entries[0].row + 1]
            return Reservation(tuple(requests), rows, starts, positions, positions + only, slots, only)
        slots = self._table[torch.tensor([entry.row for entry in entries], device=self._device)]
        places = torch.tensor(starts, device=self._device)[:, None] + offsets
        return Reservation(
            tuple(requests), rows, starts, places.flatten(), slots.gather(1, places).flatten(), slots, None
        )

    def compact(self, places: Reservation, kept: Sequence[Sequence[int]]) -> None:
        """Move the target KV of the kept rows of each request to the front of its reserved rows.

        `kept`: rows per request, ascending, the root (row 0) first; their order stays. Only an accepted path of a
        tree moves anything, and only its own rows.
        """
        moves = [
            (request * places.rows + row, request * places.rows + place)
            for request, rows in enumerate(kept)
            for place, row in enumerate(rows)
            if row != place
        ]
        if moves:
            source, target = torch.tensor(moves, device=self._device).T
            # The gather copies before the scatter writes, so overlapping moves are safe.
            self.target.index_copy_(1, places.write[target], self.target.index_select(1, places.write[source]))

    def commit(self, requests: Sequence[int], counts: Sequence[int]) -> None:
        """Keep the first `counts` reserved rows of each request."""
        for request, count in zip(requests, counts, strict=True):
            entry = self._entries[request]
            if entry.length + count > entry.capacity:
                raise ValueError(f"request {request}: {entry.length} + {count} exceed its {entry.capacity} slots")
            entry.length += count


def _pool(shape: PoolShape, slots: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros [layers, slots, 2 × kv_heads, head_dim]: what masks hide must be finite, not left-over bits."""
    size = (shape.layers, slots, 2 * shape.kv_heads, shape.head_dim)
    nbytes = torch.Size(size).numel() * dtype.itemsize
    try:
        if device.type == "cpu":
            # numpy asks the system for zero pages, which take memory only once they are used.
            return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8)).view(dtype).view(size)
        return torch.zeros(size, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        if not is_full(error):
            raise
        raise OutOfMemory(
            f"a KV pool of {slots} tokens ({nbytes / 2**30:.1f} GiB) does not fit; "
            "lower memory.kv_tokens or memory.max_running"
        ) from error


def _adjacent(free: list[int], needed: int) -> list[int] | None:
    """Return the first run of `needed` neighbouring pages of the ascending list `free`."""
    start = 0
    for index in range(1, len(free) + 1):
        if index - start == needed:
            return free[start:index]
        if index < len(free) and free[index] != free[index - 1] + 1:
            start = index
    return None
