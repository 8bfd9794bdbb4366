"""Attention of padded and packed batches of which only a part is in use, and in chunks: FlashAttention-3's and -4's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.api.attention import attention
from tilewise.api.varlen import attention_varlen
from tilewise.errors import ArgumentError, LayoutError
from tilewise.integrations.flash_attn.options import Window, plain, shape_of, steps
from tilewise.integrations.flash_attn.over_pages import Queries, Store, attend_pages
from tilewise.masks import Mask, documents, key_padding


@dataclass(frozen=True)
class Batch:
    """Queries and keys, each padded (B, S, H, D), or packed (T, H, D) with where sequences begin."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    used_q: Tensor | None = None  # (B,), tokens in use, the first ones; None: all
    used_k: Tensor | None = None


def attend_in_use(
    batch: Batch,
    window: Window,
    options: dict[str, Any],
    *,
    chunk: int = 0,
    table: Tensor | None = None,
    most_q: Any = None,
    latent: bool = False,
) -> tuple[Tensor, Tensor]:
    """out like q with v's columns, and lse (B, Hq, Sq), or (Hq, T) of packed queries.

    options: those of `attention`. A mask there is replaced by that of the window.
    chunk: queries see the keys of their own chunk, of so many keys; 0 for none.
    table: (B, most), k and v are pages; no gradient then.
    most_q: queries of a sequence at most; None where that is not known.
    latent: v is the first columns of k, in pages.

    Queries that are not in use get 0 and −inf, and have no gradient.
    """
    if table is not None:
        store = Store(batch.k, None if latent else batch.v, table, batch.v.shape[-1] if latent else None)
        return _over_pages(batch, store, window, options, chunk, most_q)
    _check(batch)
    if options.get("bias") is not None and (batch.used_q is not None or batch.used_k is not None):
        raise ArgumentError("alibi_slopes: goes with no seqused, which moves where the distances end; pass the tokens in use")
    options = {**options, "mask": _mask(batch, window, chunk)}
    q, k, v, shape = batch.q, batch.k, batch.v, batch.q.shape
    cu_q, cu_k = batch.cu_q, batch.cu_k
    if (cu_q is None) != (cu_k is None):  # one side is packed: so is the other
        if cu_q is None:
            q, cu_q = q.flatten(0, 1), steps(q)
        else:
            k, v, cu_k = k.flatten(0, 1), v.flatten(0, 1), steps(k)
    spare = None
    if batch.used_q is not None:
        place, sequence = _places(q, cu_q)
        spare = place >= batch.used_q[sequence]
        q = q.masked_fill(spare[..., None, None], 0.0)
    out, lse = _call(q, k, v, (cu_q, cu_k), options)
    if spare is not None:
        out = out.masked_fill(spare[..., None, None], 0.0)
        lse = lse.masked_fill(spare if cu_q is not None else spare[:, None], float("-inf"))
    if cu_q is not None and batch.cu_q is None:
        out = out.unflatten(0, shape[:2])
        lse = lse.unflatten(1, shape[:2]).transpose(0, 1)
    return out, lse


def _mask(batch: Batch, window: Window, chunk: int) -> Mask:
    packed = batch.cu_q is not None or batch.cu_k is not None
    lengths_q = _lengths(batch.q, batch.cu_q, batch.used_q)
    lengths_k = _lengths(batch.k, batch.cu_k, batch.used_k)
    moved, offset = batch.used_q is not None or batch.used_k is not None, lengths_k - lengths_q
    mask = window.mask(offset if moved else None)
    if chunk:
        (q_place, sequence), (k_place, _) = _places(batch.q, batch.cu_q), _places(batch.k, batch.cu_k)
        own = (q_place + offset[sequence]).div(chunk, rounding_mode="floor").int()
        theirs = k_place.div(chunk, rounding_mode="floor").int()
        mask = mask & (documents(theirs.flatten(), q_ids=own.flatten()) if packed else documents(theirs, q_ids=own))
    return mask if batch.used_k is None else mask & key_padding(lengths_k)


def _over_pages(
    batch: Batch, store: Store, window: Window, options: dict[str, Any], chunk: int, most_q: Any
) -> tuple[Tensor, Tensor]:
    table = store.table
    if batch.used_k is None and batch.cu_k is None:
        room = batch.k.shape[1] * table.shape[1]
        lengths = torch.full((table.shape[0],), room, dtype=torch.int32, device=batch.k.device)
    else:
        lengths = _lengths(batch.k, batch.cu_k, batch.used_k)
    packed, q = batch.cu_q is not None, batch.q
    if not isinstance(q, Tensor) or q.ndim != (3 if packed else 4):
        raise LayoutError(f"q: got {shape_of(q)}, need (batch, queries, heads, dim), or (tokens, heads, dim) and cu_seqlens_q")
    cu = steps(q) if batch.cu_q is None else batch.cu_q
    most = q.shape[0 if packed else 1] if most_q is None or not packed else int(plain(most_q))
    chosen: dict[str, Any] = {name: options[name] for name in ("scale", "bias", "softcap", "sinks") if name in options}
    rows = Queries(cu, most, lengths, batch.used_q, chunk=chunk)
    out, lse = attend_pages(q if packed else q.flatten(0, 1), store, rows, window, chosen)
    if not packed:
        out, lse = out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return out, lse


def _call(
    q: Tensor, k: Tensor, v: Tensor, cu: tuple[Tensor | None, Tensor | None], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    if cu[0] is None or cu[1] is None:
        out, lse = attention(q, k, v, layout="bshd", return_lse=True, **options)
    else:
        out, lse = attention_varlen(q, k, v, cu[0], cu[1], return_lse=True, **options)
    return out, lse


def _places(x: Tensor, cu: Tensor | None) -> tuple[Tensor, Tensor]:
    """The place of each token in its sequence, and the number of that: (B, S) and (B, 1), or (T,) and (T,)."""
    if cu is None:
        batch = torch.arange(x.shape[0], device=x.device)[:, None]
        return torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1), batch
    token = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu[1:].contiguous(), token, right=True).clamp(max=max(0, cu.shape[0] - 2))
    return token - cu[:-1][sequence], sequence


def _lengths(x: Tensor, cu: Tensor | None, used: Tensor | None) -> Tensor:
    if used is not None:
        return used.int()
    if cu is not None:
        return cu.diff().int()
    return torch.full((x.shape[0],), x.shape[1], dtype=torch.int32, device=x.device)


def _check(batch: Batch) -> None:
    sequences = []
    for name, x, cu, used in (
        ("q", batch.q, batch.cu_q, batch.used_q), ("k", batch.k, batch.cu_k, batch.used_k), ("v", batch.v, batch.cu_k, None),
    ):  # fmt: skip
        need = "(batch, sequence, heads, dim)" if cu is None else "(tokens, heads, dim) beside cu_seqlens"
        if not isinstance(x, Tensor) or x.ndim != (4 if cu is None else 3):
            raise LayoutError(f"{name}: got {shape_of(x)}, need {need}")
        if cu is not None and (not isinstance(cu, Tensor) or cu.ndim != 1 or cu.shape[0] < 1):
            raise LayoutError(f"cu_seqlens of {name}: got {shape_of(cu)}, need integers (batch + 1,)")
        sequences.append(x.shape[0] if cu is None else cu.shape[0] - 1)
        if used is not None and (not isinstance(used, Tensor) or tuple(used.shape) != (sequences[-1],)):
            raise LayoutError(f"seqused_{name}: got {shape_of(used)}, need one integer for each of {sequences[-1]} sequences")
    if len(set(sequences)) > 1:
        raise ArgumentError(f"q, k and v: {', '.join(map(str, sequences))} sequences; need as many in each")
