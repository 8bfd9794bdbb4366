"""`flash_attn_with_kvcache` of flash_attn 2.x: attention over a cache that the call may extend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.api.bias import alibi
from tilewise.api.cache import KVCache
from tilewise.api.cached import attention_cached
from tilewise.api.rotary import RotaryTable, rotary
from tilewise.errors import ArgumentError, LayoutError
from tilewise.integrations.flash_attn.options import plain, window_mask


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
    if not isinstance(q, Tensor) or q.ndim != 4:
        raise LayoutError(f"q: got {_form(q)}, need (batch, queries, heads, dim)")
    if (k is None) != (v is None):
        raise ArgumentError("k and v: one is None; new keys and new values come together")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ArgumentError("rotary_cos and rotary_sin: one is None; they come together")
    before = _lengths(cache_seqlens, q, k_cache, block_table)
    after = before if k is None else before + k.shape[1]
    mask = window_mask(window_size, causal)
    if rotary_cos is not None:
        assert rotary_sin is not None
        if k is None:
            raise ArgumentError("rotary_cos: goes with new keys k and v; turn q yourself where there are none")
        table = rotary(rotary_cos, rotary_sin, interleaved=rotary_interleaved)
        local = causal or any(int(plain(side)) >= 0 for side in window_size)
        q = _turned(table, q, before, step=int(local))
        k = _turned(table, k, before, step=1)
    cache = _cache(k_cache, v_cache, after, cache_batch_idx, cache_leftpad, block_table)
    return attention_cached(
        q,
        cache,
        new=None if k is None or v is None else (k, v),
        mask=mask,
        scale=plain(softmax_scale),
        bias=None if alibi_slopes is None else alibi(alibi_slopes.detach().float()),
        softcap=plain(softcap),
        return_lse=bool(return_softmax_lse),
    )


def _lengths(given: Any, q: Tensor, k_cache: Tensor, block_table: Tensor | None) -> Tensor:
    if given is None:
        if block_table is not None:
            raise ArgumentError("cache_seqlens: None, but pages tell nobody how many tokens they hold; pass it")
        given = k_cache.shape[1]
    if isinstance(given, Tensor):
        return given
    return torch.full((q.shape[0],), int(plain(given)), dtype=torch.int32, device=q.device)


def _turned(table: RotaryTable, x: Tensor, start: Tensor, step: int) -> Tensor:
    """x (B, n, H, D), row i of sequence b turned to position start[b] + i · step."""
    positions = start[:, None] + torch.arange(x.shape[1], device=x.device) * step
    return table.apply(x.flatten(0, 1), positions.flatten(), x.dtype).view(x.shape)


def _cache(
    k: Tensor, v: Tensor, lengths: Tensor, rows: Tensor | None, leftpad: Tensor | None, block_table: Tensor | None
) -> KVCache:
    if block_table is not None:
        if rows is not None or leftpad is not None:
            raise ArgumentError("block_table: goes with neither cache_batch_idx nor cache_leftpad; the table says it all")
        return KVCache.paged(k, v, block_table, lengths)
    if not isinstance(k, Tensor) or k.ndim != 4:
        raise LayoutError(f"k_cache: got {_form(k)}, need (rows, sequence, heads, dim)")
    own = torch.arange(lengths.shape[0], device=k.device) if rows is None else rows
    if leftpad is None:
        return KVCache.paged(k, v, own[:, None], lengths)
    # pages of one token, which start where a row does: no memory moves
    size = k.shape[1]
    places = leftpad[:, None] + torch.arange(size, device=k.device)
    table = torch.where(places < size, own[:, None] * size + places, -1)
    k, v = (x.view(-1, 1, *x.shape[2:]) for x in (k, v))
    return KVCache.paged(k, v, table, lengths - leftpad)


def _form(x: Any) -> Any:
    return tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
