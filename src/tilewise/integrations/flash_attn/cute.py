"""The functions of FlashAttention-4's `flash_attn.cute`, by the same names and signatures, on CPU and GPU.

>>> from tilewise.integrations.flash_attn.cute import flash_attn_func, flash_attn_varlen_func

Both return (out, lse). A side of a window is None for no limit, and may be negative. Hints (`num_splits`, `pack_gqa`,
`scheduler_metadata`, the longest and shortest lengths) are accepted and not needed. Functions of scores and masks, sparse blocks
and gathered keys raise: masks are values here, and go to `tilewise.attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import ArgumentError
from tilewise.integrations.flash_attn.in_use import Batch, attend_in_use
from tilewise.integrations.flash_attn.kvcache import side_by_side
from tilewise.integrations.flash_attn.options import plain, sides


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[Any] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of a padded batch.

    q: queries (B, Sq, Hq, D).
    k: keys (B, Sk, Hk, D), Hq a multiple of Hk.
    v: values (B, Sk, Hk, Dv).
    qv: (B, Sq, Hq, Dv), queries of the values: scores are q · k + qv · v.
    softmax_scale: what scores are multiplied by; 1/√D if None, D with qv's columns.
    causal: hide the keys after a query, which stands at key i + Sk − Sq: aligned to the bottom right.
    window_size: how many keys before and after its own a query sees; None is no limit. One below 0 ends short of its own key.
    learnable_sink: (Hq,), one more score for each head, which takes part in the softmax and has no value.
    softcap: scores become softcap · tanh(score / softcap); 0 for none.
    deterministic: the same bits in every run, gradients too.
    return_lse: the log-sum-exp has a gradient.

    Returns out (B, Sq, Hq, Dv) and the log-sum-exp (B, Hq, Sq).

    >>> out, lse = flash_attn_func(q, k, v, causal=True, window_size=(1023, None), learnable_sink=sinks)
    """
    return flash_attn_varlen_func(
        q, k, v, qv,
        gather_kv_indices=gather_kv_indices,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        learnable_sink=learnable_sink,
        softcap=softcap,
        deterministic=deterministic,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        return_lse=return_lse,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[Any] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of sequences packed one after another, or padded, on either side; or over pages.

    q: queries (Tq, Hq, D) with `cu_seqlens_q`, else (B, Sq, Hq, D).
    k: keys (Tk, Hk, D) with `cu_seqlens_k`, else (B, Sk, Hk, D), or with `page_table` pages (pages, page, Hk, D).
    v: values, the same with Dv.
    qv: like q with Dv columns: scores are q · k + qv · v.
    cu_seqlens_q: int32 (B + 1,), where the queries of each sequence begin, and Tq.
    cu_seqlens_k: the same for keys, ending in Tk.
    seqused_q: (B,), how many of each sequence's queries count, the first ones; the others give 0. None: all.
    seqused_k: the same for keys; over pages, the tokens of each sequence.
    page_table: (B, most), the pages of each sequence; no gradient then.

    The other options are those of `flash_attn_func`. Returns out like q with Dv columns and the log-sum-exp, (Hq, Tq) or
    (B, Hq, Sq).

    >>> out, lse = flash_attn_varlen_func(q, k_pages, v_pages, cu_seqlens_q=cu, seqused_k=lengths, page_table=table, causal=True)
    """
    _refuse(
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        seqlen_k_per_split=seqlen_k_per_split,
    )
    scale = plain(softmax_scale)
    if qv is not None:
        q, k = torch.cat([qv, q], -1), side_by_side(v, k) if page_table is not None else torch.cat([v, k], -1)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
    options = {"scale": scale, "softcap": plain(softcap), "sinks": learnable_sink}
    if page_table is None:
        options["deterministic"] = True if deterministic else None
    batch = Batch(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    window = sides(window_size, causal, negative=True)
    latent = page_table is not None and qv is not None
    out, lse = attend_in_use(batch, window, options, table=page_table, most_q=max_seqlen_q, latent=latent)
    return out, lse if return_lse else lse.detach()


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ArgumentError(
                f"{name}: is not offered here; masks are values in tilewise, see tilewise.attention(mask=…), and "
                "tilewise.selected for chosen keys"
            )


__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
