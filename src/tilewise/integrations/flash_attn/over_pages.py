"""Attention over a cache as flash_attn means it: queries and keys in use, left padding, chunks, and queries beyond the keys.

`attention_cached` has sequences whose queries are their last tokens. Here a sequence becomes several of those, which share its
pages: one for each chunk of keys, and one without keys for the queries that are not in use. No size depends on data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.api.bias import Alibi, alibi
from tilewise.api.cache import KVCache
from tilewise.api.cached import attention_cached
from tilewise.api.lengths import readable
from tilewise.api.varlen import attention_varlen
from tilewise.backends.pages import gathered
from tilewise.integrations.flash_attn.options import Window, cumulative
from tilewise.masks import full, prefix


@dataclass(frozen=True)
class Store:
    """Pages, and those of each sequence."""

    k: Tensor  # (pages, page, Hk, D)
    v: Tensor | None  # None: values are the first `value_dim` columns of k
    table: Tensor  # (B, most)
    value_dim: int | None = None

    def cache(self, lengths: Tensor, times: int = 1) -> KVCache:
        """Of `times` sequences on the pages of each; `lengths` is (B · times,)."""
        table = self.table if times == 1 else self.table.repeat_interleave(times, 0)
        one = None if self.k.dtype.itemsize > 1 else torch.ones((), device=self.k.device)
        return KVCache.paged(
            self.k, self.v, table, lengths, value_dim=self.value_dim, k_scale=one, v_scale=None if self.v is None else one
        )


@dataclass(frozen=True)
class Queries:
    """Packed queries, and which keys they may see."""

    cu: Tensor  # (B + 1,)
    most: int  # of a sequence
    lengths: Tensor  # (B,), keys
    used: Tensor | None = None  # (B,), queries in use, the first ones; None: all
    first: Tensor | None = None  # (B,), keys before it are padding; None: none are
    chunk: int = 0


def attend_pages(q: Tensor, store: Store, queries: Queries, window: Window, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """out (T, Hq, Dv) and lse (Hq, T) of q (T, Hq, D)."""
    rows = queries.cu.diff()
    used = rows if queries.used is None else queries.used
    # a query before the first key may see keys after its own, which `attention_cached` hides
    before = not queries.chunk and window.sees_ahead and queries.most > 1 and _some_before(used, queries.lengths)
    apart = before and store.value_dim is not None
    cu, mask, lengths, times = queries.cu, window.mask(), queries.lengths, 1
    first = torch.zeros_like(rows) if queries.first is None else queries.first
    if apart or queries.chunk or queries.used is not None:
        parts = _rows(used, queries, first, window) if apart else _chunks(used, queries, first)
        counts, ends, starts = (torch.cat([x, x.new_zeros(len(x), 1)], 1) for x in parts)
        counts[:, -1] = rows - used
        ends = ends.clamp(min=0) * (counts > 0)
        cu, lengths, first, times = cumulative(counts.flatten()), ends.flatten(), starts.flatten(), counts.shape[1]
        first = torch.minimum(first, lengths)
        mask = full() if apart else mask
        options = {**options, "bias": _repeated(options.get("bias"), times)}
    if apart or queries.chunk or queries.first is not None:
        mask = mask & ~prefix(first)
    cache = store.cache(lengths, times)
    if before and not apart:
        return _gathered(q, cache, cu, {**options, "mask": mask})
    out, lse = attention_cached(q, cache, cu_seqlens_q=cu, mask=mask, return_lse=True, **options)
    return out, lse


def _gathered(q: Tensor, cache: KVCache, cu: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The call over packed keys, in which no query stands before position 0."""
    pages = cache.pages.now()
    tokens = int(pages.seen.sum()) if readable(pages.lengths) else pages.entries.shape[0] * pages.page
    k, v, cu_k = gathered(pages, tokens, q.dtype)
    k, v = (x[0].transpose(0, 1) for x in (k, v))
    out, lse = attention_varlen(q, k, v, cu, cu_k, return_lse=True, **options)
    return out, lse


def _repeated(bias: Alibi | None, times: int) -> Alibi | None:
    """Slopes of each sequence, for those that it becomes."""
    return bias if bias is None or bias.slopes.ndim == 1 else alibi(bias.slopes.repeat_interleave(times, 0))


def _some_before(used: Tensor, lengths: Tensor) -> bool:
    """Has a sequence more queries than keys, so that some stand before the first? Where that cannot be asked, perhaps."""
    return not readable(lengths) or bool((used > lengths).any())


def _chunks(used: Tensor, queries: Queries, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each sequence and chunk of keys, (B, n): how many queries stand in it, its end and its start."""
    if not queries.chunk:
        return used[:, None], queries.lengths[:, None], first[:, None]
    at = (queries.lengths - used - first)[:, None]  # where query 0 stands, counted from the first key
    most = -(-queries.most // queries.chunk) + 1
    start = (at.div(queries.chunk, rounding_mode="floor") + torch.arange(most, device=at.device)) * queries.chunk
    stop = start + queries.chunk
    counts = (torch.minimum(stop, at + used[:, None]) - torch.maximum(start, at)).clamp(min=0)
    return counts, torch.minimum(stop + first[:, None], queries.lengths[:, None]), start.clamp(min=0) + first[:, None]


def _rows(used: Tensor, queries: Queries, first: Tensor, window: Window) -> tuple[Tensor, Tensor, Tensor]:
    """The same with a sequence for each query, whose window is its range of keys."""
    row = torch.arange(queries.most, device=used.device)
    counts = (row < used[:, None]).to(used.dtype)
    at = (queries.lengths - used)[:, None] + row
    ends, starts = queries.lengths[:, None].expand_as(at), first[:, None].expand_as(at)
    if window.right is not None:
        ends = torch.minimum(ends, at + window.right + 1)
    if window.left is not None:
        starts = torch.maximum(starts, at - window.left)
    return counts, ends, starts
