"""The functions of FlashAttention-3's module `flash_attn_interface`, by the same names and signatures, on CPU and GPU.

>>> from tilewise.integrations.flash_attn_interface import flash_attn_func, flash_attn_with_kvcache

Hints (`num_splits`, `pack_gqa`, `sm_margin`, `scheduler_metadata`, `max_seqlen_q`) are accepted and not needed. Tensors of
float8 become bfloat16 numbers first, except those of a cache, which stay as they are. A parameter that cannot be honoured raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.errors import ArgumentError, LayoutError
from tilewise.integrations.flash_attn.in_use import Batch, attend_in_use
from tilewise.integrations.flash_attn.kvcache import CachedCall, rotary_table
from tilewise.integrations.flash_attn.options import plain, shape_of, sides

Result = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of a padded batch.

    q: queries (B, Sq, Hq, D).
    k: keys (B, Sk, Hk, D), Hq a multiple of Hk.
    v: values (B, Sk, Hk, Dv).
    softmax_scale: what scores are multiplied by; 1/√D if None, D with qv's columns.
    causal: hide the keys after a query, which stands at key i + Sk − Sq: aligned to the bottom right.
    qv: (B, Sq, Hq, Dv), queries of the values: scores are q · k + qv · v.
    q_descale: (B, Hk), what q, k and v stand for is multiplied by; for float8.
    k_descale: the same for k.
    v_descale: the same for v.
    window_size: how many keys before and after its own a query sees; −1 is no limit.
    attention_chunk: a query sees the keys of its own chunk of so many keys; 0 for all.
    softcap: scores become softcap · tanh(score / softcap); 0 for none.
    deterministic: the same bits in every run, gradients too.
    return_attn_probs: also return the log-sum-exp (B, Hq, Sq).

    Returns out (B, Sq, Hq, Dv).

    >>> out = flash_attn_func(q, k, v, causal=True, attention_chunk=8192)
    """
    parts = _parts(q, k, v, qv, softmax_scale, (q_descale, k_descale, v_descale))
    options = {"scale": parts[3], "softcap": plain(softcap), "deterministic": True if deterministic else None}
    window, chunk = sides(window_size, causal), _chunk(attention_chunk)
    out, lse = attend_in_use(Batch(*parts[:3]), window, options, chunk=chunk)
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of q, k and v in one tensor.

    qkv: (B, S, 3, H, D), or (B, S, Hq + 2 · Hk, D) with `num_heads_q`. All else as in `flash_attn_func`.

    >>> out = flash_attn_qkvpacked_func(torch.stack([q, k, v], dim=2), causal=True)
    """
    if not isinstance(qkv, Tensor) or qkv.ndim != (5 if num_heads_q is None else 4):
        raise LayoutError(f"qkv: got {shape_of(qkv)}, need (batch, sequence, 3, heads, dim), or four sides with num_heads_q")
    if num_heads_q is None:
        q, k, v = qkv.unbind(2)
    else:
        heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads, heads], dim=2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of sequences packed one after another.

    q: queries (Tq, Hq, D), the tokens of all sequences.
    k: keys (Tk, Hk, D).
    v: values (Tk, Hk, Dv).
    cu_seqlens_q: int32 (B + 1,), where the queries of each sequence begin, and Tq.
    cu_seqlens_k: the same for keys, ending in Tk.
    max_seqlen_q: a hint, and so is max_seqlen_k.
    seqused_q: (B,), how many of each sequence's queries count, the first ones; the others give 0. None: all.
    seqused_k: the same for keys.

    The other options are those of `flash_attn_func`. Returns out (Tq, Hq, Dv), and with `return_attn_probs` the LSE (Hq, Tq).

    >>> out = flash_attn_varlen_func(q, k, v, bounds, bounds, 700, 700, seqused_k=lengths, causal=True)
    """
    parts = _parts(q, k, v, qv, softmax_scale, (q_descale, k_descale, v_descale), (cu_seqlens_q, cu_seqlens_k))
    options = {"scale": parts[3], "softcap": plain(softcap), "deterministic": True if deterministic else None}
    batch = Batch(*parts[:3], cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    out, lse = attend_in_use(batch, sides(window_size, causal), options, chunk=_chunk(attention_chunk))
    return (out, lse) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Attention of queries to a cache, which the new keys and values join first. No gradient.

    q: queries (B, Sq, Hq, D), or packed (T, Hq, D) with `cu_seqlens_q`.
    k_cache: keys (rows, S, Hk, D), or with `page_table` pages (pages, page, Hk, D) of any page size.
    v_cache: values, the same with Dv.
    k: new keys (B, n, Hk, D), or packed with `cu_seqlens_k_new`, written behind the tokens that `cache_seqlens` counts.
    v: new values.
    qv: like q with Dv columns: scores are q · k + qv · v. Where keys follow values in one tensor nothing is copied.
    rotary_cos: (positions, r / 2), with `rotary_sin`; turns q and the new keys. New keys stand at `rotary_seqlens` and on, and
        so do queries under a causal mask or a window; without either all queries stand at `rotary_seqlens`.
    rotary_sin: the sines.
    cache_seqlens: (B,) or an integer, the tokens that are in the cache before the new ones; None for a full cache.
    cache_batch_idx: (B,), the row of the cache, or of `page_table`, of each sequence; None for row b.
    cache_leftpad: (B,), the places at the start of a sequence that hold nothing.
    page_table: (B, most) int32, the pages of each sequence.
    cu_seqlens_q: (B + 1,), where the queries of each sequence begin in a packed q.
    cu_seqlens_k_new: the same for new keys.
    max_seqlen_q: queries of a sequence at most; with `attention_chunk` it saves work.
    rotary_seqlens: (B,), where rotary positions begin; None: at `cache_seqlens`.
    q_descale: (B, Hk), what q, k_cache and v_cache stand for is multiplied by; for float8.
    k_descale: the same for k_cache.
    v_descale: the same for v_cache.
    softmax_scale: what scores are multiplied by; 1/√D if None, D with qv's columns.
    causal: hide the keys after a query, the last query being the last token.
    window_size: how many keys before and after its own a query sees; −1 is no limit.
    attention_chunk: a query sees the keys of its own chunk of so many keys, counted from the first; 0 for all.
    softcap: scores become softcap · tanh(score / softcap); 0 for none.
    rotary_interleaved: pairs are neighbouring features; else features of the two halves.
    return_softmax_lse: also return the log-sum-exp, (B, Hq, Sq) or (Hq, T).

    Returns out like q with Dv columns.

    >>> out = flash_attn_with_kvcache(q, k_pages, v_pages, k, v, cache_seqlens=lengths, page_table=table, causal=True)
    """
    dtype = q.dtype
    if isinstance(v_cache, Tensor) and _is_float8(v_cache):
        if qv is not None:
            raise ArgumentError("qv: goes with no float8 cache; keep the cache in bfloat16")
        q, k, v = q.float(), k if k is None else k.float(), v if v is None else v.float()
        dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
    for descale in (q_descale, k_descale):
        q = _scaled(q, descale, cu_seqlens_q)
    out, lse = CachedCall(
        q, k_cache, v_cache, k, v,
        window=sides(window_size, causal),
        rotary=rotary_table(rotary_cos, rotary_sin, rotary_interleaved),
        before=cache_seqlens,
        rows=cache_batch_idx,
        leftpad=cache_leftpad,
        table=page_table,
        scale=softmax_scale,
        softcap=softcap,
        cu_q=cu_seqlens_q,
        cu_new=cu_seqlens_k_new,
        most_q=max_seqlen_q,
        turned_at=rotary_seqlens,
        qv=qv,
        chunk=_chunk(attention_chunk),
    ).run()  # fmt: skip
    out = _scaled(out, v_descale, cu_seqlens_q).to(dtype)
    return (out, lse) if return_softmax_lse else out


def get_scheduler_metadata(*arguments: Any, **named: Any) -> None:
    """What other kernels prepare for a call. Nothing is needed here.

    >>> flash_attn_with_kvcache(q, k_cache, v_cache, scheduler_metadata=get_scheduler_metadata(8, 1, 4096, 32, 8, 128, lengths))
    """


def _parts(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, scale: Any, descale: tuple[Tensor | None, ...], cu: Any = (None, None)
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """q, k and v as numbers of one dtype, qv and v in q and k, and the scale."""
    q, k, v = (_scaled(x, s, c) for x, s, c in zip((q, k, v), descale, (*cu, cu[1]), strict=True))
    scale = plain(scale)
    if qv is None:
        return q, k, v, scale
    qv = _scaled(qv, descale[0], cu[0])
    q, k = torch.cat([qv, q], -1), torch.cat([v, k], -1)
    return q, k, v, q.shape[-1] ** -0.5 if scale is None else scale


def _scaled(x: Tensor, scale: Tensor | None, cu: Tensor | None) -> Tensor:
    """x (B, S, H, D), or (T, H, D) with `cu`, times a scale (B, Hk); float8 becomes bfloat16."""
    wide = torch.bfloat16 if _is_float8(x) else x.dtype
    if scale is None:
        return x if x.dtype == wide else x.to(wide)
    each = scale.repeat_interleave(x.shape[-2] // scale.shape[-1], -1)
    each = each[:, None] if cu is None else each.repeat_interleave(cu.diff().long(), 0, output_size=x.shape[0])
    return (x.float() * each[..., None]).to(wide)


def _is_float8(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype.itemsize == 1


def _chunk(chunk: Any) -> int:
    size = plain(chunk)
    if not isinstance(size, int) or size < 0:
        raise ArgumentError(f"attention_chunk: got {chunk!r}, need an integer of at least 0, 0 for no chunks")
    return size


__all__ = [
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]
