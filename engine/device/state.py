"""What the device knows of every request: page table, lengths, newest tokens, sampling, and the KV pools.

One row a request, and a last row that belongs to nobody: lanes that only fill a batch up to a captured size work
there, on pages of their own, so that a round needs no masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from engine import sampling
from engine.errors import OutOfMemory, is_full
from engine.kernels.base import Ops, Paged, Standing
from engine.kv_cache import PoolShape
from engine.request import Sampling


class Style(IntEnum):
    """How the requests of a step choose tokens, the simplest that fits all of them."""

    GREEDY = 0
    SAMPLED = 1
    LIMITED = 2  # by top-k or top-p: needs a sorted vocabulary

    @classmethod
    def of(cls, requests: Sequence[Sampling]) -> Style:
        """Return the style that serves these requests together."""
        if all(each.greedy for each in requests):
            return cls.GREEDY
        return cls.LIMITED if any(each.limited and not each.greedy for each in requests) else cls.SAMPLED


@dataclass(frozen=True)
class Rows:
    """The rows of one forward: `rows` a lane, directly after its cached tokens.

    `roots` [b] int64: the newest token of every lane, the first row's; `positions`, `write` [b × rows] int32: position
    and KV slot of every row.
    """

    paged: Paged
    rows: int
    roots: Tensor
    positions: Tensor
    write: Tensor


class State:
    """Device tensors of `max_running` requests and of the row that belongs to nobody."""

    def __init__(
        self,
        target: PoolShape,
        draft: PoolShape | None,
        pages: int,
        page_size: int,
        max_running: int,
        max_tokens: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate.

        Args:
            pages: those that requests share; `page_size` tokens each.
            max_tokens: most tokens one request may ever hold, reserved rows included.
            rows: most rows of one lane in a round: what the row of nobody needs pages for.

        Raises:
            OutOfMemory: the pools do not fit.
        """
        self.device, self.page_size, self.nobody, self.longest = device, page_size, max_running, max_tokens
        spare = -(-rows // page_size)
        slots = (pages + spare) * page_size
        self.target = _pool(target, slots, dtype, device)
        self.draft = None if draft is None else _pool(draft, slots, dtype, device)
        self._columns = -(-max_tokens // page_size)
        self._steps = torch.arange(max(rows, page_size), dtype=torch.int32, device=device)
        # A column behind a request's pages points at a page of nobody, never at another request's.
        self._blank = [pages + min(column, spare - 1) for column in range(self._columns)]
        blank = torch.tensor(self._blank, dtype=torch.int32)
        self.table = blank.expand(max_running + 1, -1).contiguous().to(device)
        # The table position by position: a round looks a row's slot up in one operation.
        self.standing = Standing(
            lengths=torch.zeros(max_running + 1, dtype=torch.int32, device=device),
            roots=torch.zeros(max_running + 1, dtype=torch.int64, device=device),
            slots=self._slots_of(self.table).flatten(1),
        )
        self._whole = torch.zeros(max_running + 1, 2, dtype=torch.int64, device=device)  # top_k, seed
        self._real = torch.zeros(max_running + 1, 2, dtype=torch.float64, device=device)  # temperature, top_p

    @property
    def lengths(self) -> Tensor:
        """Cached tokens of every row [max_running + 1] int32."""
        return self.standing.lengths

    @property
    def roots(self) -> Tensor:
        """Newest token of every row [max_running + 1] int64."""
        return self.standing.roots

    @property
    def max_tokens(self) -> int:
        """Most tokens the table has places for: `longest`, in whole pages."""
        return self._columns * self.page_size

    def enter(self, row: int, pages: Sequence[int], how: Sampling) -> None:
        """Give a row to a request whose prompt comes next."""
        table = upload([*pages, *self._blank[len(pages) :]], torch.int32, self.device)
        self.table[row].copy_(table)
        self.standing.slots[row].copy_(self._slots_of(table).flatten())
        self.lengths[row].zero_()
        whole = [how.top_k, sampling.signed(how.seed)]
        self._whole[row].copy_(upload(whole, torch.int64, self.device))
        self._real[row].copy_(upload([how.temperature, how.top_p], torch.float64, self.device))

    def rows(self, lanes: Tensor, rows: int, ops: Ops) -> Rows:
        """Return places for `rows` rows after the cached tokens of `lanes` [b] int32; lengths do not change."""
        places = ops.places(self.standing, lanes, rows)
        paged = Paged(self.table, lanes, places.cached, self.page_size)
        return Rows(paged, rows, places.roots, places.positions, places.write)

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the KV slots, int32, of positions of requests in `rows` int64, which broadcast."""
        return self.standing.slots[rows, positions]

    def grow(self, lanes: Tensor, counts: Tensor) -> None:
        """Keep `counts` [b] more rows of `lanes` [b] int64; nobody's length stays 0."""
        self.lengths.index_add_(0, lanes, counts.to(torch.int32))
        self.lengths[self.nobody].zero_()

    def draws(self, lanes: Tensor, style: Style) -> sampling.Batch | None:
        """Return how `lanes` [b] sample, None when all are greedy."""
        if style is Style.GREEDY:
            return None
        lanes = lanes.long()
        whole, real = self._whole[lanes], self._real[lanes]
        return sampling.Batch(
            temperature=real[:, 0],
            top_k=whole[:, 0],
            top_p=real[:, 1],
            seed=whole[:, 1],
            all_greedy=False,
            any_greedy=True,  # the row of nobody is
            any_limited=style is Style.LIMITED,
        )

    def _slots_of(self, pages: Tensor) -> Tensor:
        return pages[..., None] * self.page_size + self._steps[: self.page_size]


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return values as a tensor, on its way to the device: the host does not wait for the rounds before it.

    The copy reads pinned memory, which torch's allocator keeps until the copy is done.
    """
    host = torch.tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _pool(shape: PoolShape, slots: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros [layers, slots, 2 × kv_heads, head_dim]."""
    size = (shape.layers, slots, 2 * shape.kv_heads, shape.head_dim)
    try:
        return torch.zeros(size, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        if not is_full(error):
            raise
        needed = torch.Size(size).numel() * dtype.itemsize
        raise OutOfMemory(
            f"a KV pool of {slots} tokens ({needed / 2**30:.1f} GiB) does not fit; "
            "lower memory.kv_tokens or memory.max_running"
        ) from error
