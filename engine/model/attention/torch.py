"""Attention by the framework's scaled-dot-product kernel, on any device and in any precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.attention.base import Span


@dataclass(frozen=True)
class _Group:
    """One span, ready: R requests × Q rows against L cached positions."""

    requests: int
    queries: int
    length: int
    start: int | None  # first slot of a contiguous single request
    slots: Tensor | None  # [R × L] otherwise
    mask: Tensor | None  # additive, broadcastable to [R, kv_heads, Q × groups, L]


Plan = tuple[_Group, ...]


class TorchAttention:
    """Gathers each request's KV once a layer, for all its rows and all heads that share it."""

    name = "torch"

    def __init__(self, kv_heads: int, groups: int, dtype: torch.dtype, device: torch.device) -> None:
        self._kv_heads, self._groups, self._dtype, self._device = kv_heads, groups, dtype, device

    def plan(self, spans: Sequence[Span]) -> Plan:
        """Prepare slots and masks; see `base.Attention.plan`."""
        return tuple(self._group(span) for span in spans)

    def kv_rows_read(self, plan: Plan) -> int:
        """KV positions one layer reads, padding included."""
        return sum(group.requests * group.length for group in plan)

    def __call__(self, query: Tensor, pool: Tensor, plan: Plan) -> Tensor:
        """Attend; see `base.Attention`."""
        if len(plan) == 1:
            return self._attend(query, pool, plan[0])
        parts, first = [], 0
        for group in plan:
            rows = group.requests * group.queries
            parts.append(self._attend(query[first : first + rows], pool, group))
            first += rows
        return torch.cat(parts)

    def _group(self, span: Span) -> _Group:
        requests, length = len(span.starts), span.longest
        start = span.contiguous if requests == 1 else None
        return _Group(
            requests=requests,
            queries=span.queries,
            length=length,
            start=start,
            slots=span.slots[:, :length].reshape(-1) if start is None else None,
            mask=self._mask(span, length),
        )

    def _mask(self, span: Span, length: int) -> Tensor | None:
        """Return what is hidden as -inf, [R, 1, rows, L] where rows is 1 or Q × groups; None when nothing is."""
        ragged = len(set(span.starts)) > 1
        if span.tree is None and not ragged and not (span.causal and span.queries > 1):
            return None
        hidden = self._hidden(span, length)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(hidden, float("-inf"))
        if mask.shape[1] > 1:
            mask = mask.repeat_interleave(self._groups, dim=1)
        return mask[:, None]

    def _hidden(self, span: Span, length: int) -> Tensor:
        """Return which of L positions each row must not see, [R, Q or 1, L] bool."""
        starts = torch.tensor(span.starts, device=self._device)[:, None, None]
        place = torch.arange(length, device=self._device)
        if span.tree is not None:
            # Cached tokens are seen by all; a row of the block by its descendants; what lies behind by none.
            own = (place - starts).expand(-1, span.queries, -1)
            inside = span.tree.gather(2, own.clamp(0, span.queries - 1)) & (own < span.queries)
            return ~((own < 0) | inside)
        if not span.causal:
            return place > starts + (span.queries - 1)
        return place > starts + torch.arange(span.queries, device=self._device)[:, None]

    def _attend(self, query: Tensor, pool: Tensor, group: _Group) -> Tensor:
        requests, queries, length = group.requests, group.queries, group.length
        heads, dim = self._kv_heads, query.shape[-1]
        if group.slots is None:
            start = group.start or 0
            cached = pool[start : start + length]
        else:
            cached = pool.index_select(0, group.slots)
        cached = cached.view(requests, length, 2 * heads, dim).transpose(1, 2)
        # Heads that share a KV head become further rows of it, so the cache is read once for all of them.
        grouped = query.view(requests, queries, heads, self._groups, dim).transpose(1, 2)
        grouped = grouped.reshape(requests, heads, queries * self._groups, dim)
        out = F.scaled_dot_product_attention(grouped, cached[:, :heads], cached[:, heads:], attn_mask=group.mask)
        out = out.reshape(requests, heads, queries, self._groups * dim).transpose(1, 2)
        return out.reshape(requests * queries, heads * self._groups * dim)
