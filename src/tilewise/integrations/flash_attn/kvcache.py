"""Attention over a cache that the call may extend: what 2.x's and FlashAttention-3's functions share, and that of 2.x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.api.bias import alibi
from tilewise.api.cache import KVCache
from tilewise.api.lengths import readable
from tilewise.api.rotary import RotaryTable, rotary
from tilewise.backends.pages import positions_of
from tilewise.errors import ArgumentError, LayoutError
from tilewise.integrations.flash_attn.options import Window, plain, shape_of, sides, steps
from tilewise.integrations.flash_attn.over_pages import Queries, Store, attend_pages


class CacheError(ArgumentError, RuntimeError):
    """A cache that is too small; a RuntimeError, as flash_attn raises."""


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of queries to a cache, which the new keys and values join first. No gradient.

    q: queries (B, Sq, Hq, D).
    k_cache: keys (rows, S, Hk, D), or with `block_table` pages (pages, page, Hk, D) of any page size.
    v_cache: values, the same with Dv.
    k: new keys (B, n, Hk, D), written behind the tokens that `cache_seqlens` counts; None for none.
    v: new values.
    rotary_cos: (positions, r / 2), with `rotary_sin`; turns q and the new keys. New keys stand at `cache_seqlens` and on, and
        so do queries under a causal mask or a window; without either all queries stand at `cache_seqlens`.
    rotary_sin: the sines.
    cache_seqlens: (B,) or an integer, the tokens that are in the cache before the new ones; None for a full cache.
    cache_batch_idx: (B,), the row of the cache of each sequence; None for row b.
    cache_leftpad: (B,), the places at the start of a row that hold nothing; not with `block_table`.
    block_table: (B, most) int32, the pages of each sequence.
    softmax_scale: what scores are multiplied by; 1/√D if None.
    causal: hide the keys after a query, the last query being the last token.
    window_size: how many keys before and after its own a query sees; −1 is no limit.
    softcap: scores become softcap · tanh(score / softcap); 0 for none.
    rotary_interleaved: pairs are neighbouring features; else features of the two halves.
    alibi_slopes: (Hq,) or (B, Hq), subtracted times the distance of query and key.
    num_splits: a hint, which is not needed.
    return_softmax_lse: also return the log-sum-exp (B, Hq, Sq).

    Returns out (B, Sq, Hq, Dv).

    >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
    """
    if block_table is not None and (cache_batch_idx is not None or cache_leftpad is not None):
        raise ArgumentError("block_table: goes with neither cache_batch_idx nor cache_leftpad; the table says it all")
    out, lse = CachedCall(
        q, k_cache, v_cache, k, v,
        window=sides(window_size, causal),
        rotary=rotary_table(rotary_cos, rotary_sin, rotary_interleaved),
        before=cache_seqlens,
        rows=cache_batch_idx,
        leftpad=cache_leftpad,
        table=block_table,
        scale=softmax_scale,
        softcap=softcap,
        slopes=alibi_slopes,
    ).run()  # fmt: skip
    return (out, lse) if return_softmax_lse else out


@dataclass
class CachedCall:
    """One call over a cache."""

    q: Tensor  # (B, Sq, Hq, D), or (T, Hq, D) with cu_q
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None  # (B, n, Hk, D), or packed with cu_new
    v: Tensor | None
    window: Window
    rotary: RotaryTable | None = None
    before: Any = None  # tokens in the cache before the new ones
    rows: Tensor | None = None
    leftpad: Tensor | None = None
    table: Tensor | None = None
    scale: float | None = None
    softcap: float = 0.0
    slopes: Tensor | None = None
    cu_q: Tensor | None = None
    cu_new: Tensor | None = None
    most_q: int | None = None
    turned_at: Tensor | None = None  # where rotary positions begin; None: at `before`
    qv: Tensor | None = None
    chunk: int = 0

    def run(self) -> tuple[Tensor, Tensor]:
        """out and lse, (B, Hq, Sq) or (Hq, T)."""
        self._check()
        packed = self.cu_q is not None
        cu_q = steps(self.q) if self.cu_q is None else self.cu_q
        store = Store(self.k_cache, self.v_cache, self._table(cu_q.shape[0] - 1))
        before = self._before(store.table)
        cu_new, after = None, before
        if self.k is not None:
            cu_new = steps(self.k) if self.cu_new is None else self.cu_new
            after = before + cu_new.diff()
        self._check_room(after, store.table)
        q = self.q if packed else self.q.flatten(0, 1)
        if self.rotary is not None:
            q = self._turned(q, cu_q, before, step=int(self.window.limited))
        if cu_new is not None:
            self._append(store.cache(after), cu_new, before)
        q, store, scale = self._with_latent(q, store)
        most = int(plain(self.most_q)) if self.most_q is not None else q.shape[0] if packed else self.q.shape[1]
        queries = Queries(cu_q, most, after, first=self.leftpad, chunk=int(plain(self.chunk)))
        options = {"scale": scale, "softcap": plain(self.softcap), "bias": None}
        if self.slopes is not None:
            options["bias"] = alibi(self.slopes.detach().float())
        out, lse = attend_pages(q, store, queries, self.window, options)
        if not packed:
            shape = self.q.shape[:2]
            out, lse = out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1)
        return out, lse

    def _check(self) -> None:
        rank, need = (4, "(batch, queries, heads, dim)") if self.cu_q is None else (3, "(tokens, heads, dim)")
        if not isinstance(self.q, Tensor) or self.q.ndim != rank:
            raise LayoutError(f"q: got {shape_of(self.q)}, need {need}")
        for name, x in (("k_cache", self.k_cache), ("v_cache", self.v_cache)):
            if not isinstance(x, Tensor) or x.ndim != 4:
                raise LayoutError(f"{name}: got {shape_of(x)}, need (rows, sequence, heads, dim), or pages beside a table")
        if (self.k is None) != (self.v is None):
            raise ArgumentError("k and v: one is None; new keys and new values come together")
        if self.rotary is not None and self.k is None:
            raise ArgumentError("rotary_cos: goes with new keys k and v; turn q yourself where there are none")
        if self.qv is not None and shape_of(self.qv) != (*self.q.shape[:-1], self.v_cache.shape[-1]):
            raise LayoutError(f"qv: got {shape_of(self.qv)}, need q's shape with the {self.v_cache.shape[-1]} columns of v_cache")

    def _table(self, batch: int) -> Tensor:
        if self.table is not None:
            return self.table if self.rows is None else self.table[self.rows.long()]
        rows = torch.arange(batch, dtype=torch.int32, device=self.q.device) if self.rows is None else self.rows
        return rows[:, None]

    def _before(self, table: Tensor) -> Tensor:
        given = self.before
        if given is None:
            if self.table is not None:
                raise ArgumentError("cache_seqlens: None, but pages tell nobody how many tokens they hold; pass it")
            given = self.k_cache.shape[1]
        if isinstance(given, Tensor) and given.ndim:
            return given
        return torch.full((table.shape[0],), int(plain(given)), dtype=torch.int32, device=self.q.device)

    def _check_room(self, after: Tensor, table: Tensor) -> None:
        room = table.shape[1] * self.k_cache.shape[1]
        if readable(after) and bool((after > room).any()):
            where = "k_cache" if self.table is None else "block_table"
            raise CacheError(
                f"{where}: holds {room} tokens of a sequence, but cache_seqlens and the new tokens are {int(after.max())}"
            )

    def _turned(self, x: Tensor, cu: Tensor, before: Tensor, step: int) -> Tensor:
        """x (T, H, D), token i of sequence b turned to position start[b] + i · step."""
        assert self.rotary is not None
        start = before if self.turned_at is None else self.turned_at
        sequence, place = positions_of(cu, cu.diff(), x.shape[0])
        return self.rotary.apply(x, start[sequence] + place * step, x.dtype)

    def _append(self, cache: KVCache, cu: Tensor, before: Tensor) -> None:
        k, v = self.k, self.v
        assert k is not None and v is not None
        if self.cu_new is None:
            if k.ndim != 4 or v.ndim != 4:
                raise LayoutError(f"k and v: got {shape_of(k)} and {shape_of(v)}, need (batch, tokens, heads, dim)")
            k, v = k.flatten(0, 1), v.flatten(0, 1)
        if self.rotary is not None:
            k = self._turned(k, cu, before, step=1)
        cache.append(k, v, cu_seqlens=cu)

    def _with_latent(self, q: Tensor, store: Store) -> tuple[Tensor, Store, float | None]:
        """With qv, scores are q · k + qv · v: keys are values and keys side by side, which is a view where memory has them so."""
        scale = plain(self.scale)
        if self.qv is None:
            return q, store, scale
        assert store.v is not None
        qv = self.qv if self.cu_q is not None else self.qv.flatten(0, 1)
        joined = torch.cat([qv, q], -1)
        scale = joined.shape[-1] ** -0.5 if scale is None else scale
        return joined, Store(side_by_side(store.v, store.k), None, store.table, qv.shape[-1]), scale


def rotary_table(cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> RotaryTable | None:
    if (cos is None) != (sin is None):
        raise ArgumentError("rotary_cos and rotary_sin: one is None; they come together")
    return None if cos is None or sin is None else rotary(cos, sin, interleaved=bool(interleaved))


def side_by_side(a: Tensor, b: Tensor) -> Tensor:
    """The columns of a and of b: a view if b's follow a's in memory, as in a cache of latents; else a copy."""
    adjacent = b.data_ptr() == a.data_ptr() + a.shape[-1] * a.element_size() and a.stride() == b.stride()
    if adjacent and a.stride(-1) == 1 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr():
        return a.as_strided((*a.shape[:-1], a.shape[-1] + b.shape[-1]), a.stride())
    return torch.cat([a, b], -1)

