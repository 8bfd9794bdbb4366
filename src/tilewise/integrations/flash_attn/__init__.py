"""The functions of the flash_attn package (2.x), by the same names and signatures, on CPU and GPU.

>>> from tilewise.integrations.flash_attn import flash_attn_func
>>> from tilewise.integrations.flash_attn.bert_padding import pad_input, unpad_input

A parameter that cannot be honoured raises. What differs is what flash_attn leaves open or refuses: float32 and float64, head
dims up to 512 and value dims of their own work; a row that sees no key has LSE −inf and output 0; dropout draws other numbers.

The functions for packed tensors unpack them and call the other two, which call tilewise's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.api.attention import attention
from tilewise.api.bias import alibi
from tilewise.api.parse import make_seed
from tilewise.api.varlen import attention_varlen
from tilewise.errors import ArgumentError, LayoutError
from tilewise.integrations.flash_attn.in_use import Batch, attend_in_use
from tilewise.integrations.flash_attn.kvcache import flash_attn_with_kvcache
from tilewise.integrations.flash_attn.options import plain, sides
from tilewise.integrations.weights import attention_weights

Result = Tensor | tuple[Tensor, Tensor, Tensor | None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of a padded batch.

    q: queries (B, Sq, Hq, D).
    k: keys (B, Sk, Hk, D), Hq a multiple of Hk.
    v: values (B, Sk, Hk, Dv).
    dropout_p: the probability with which a weight is dropped.
    softmax_scale: what scores are multiplied by; 1/√D if None.
    causal: hide the keys after a query, which stands at key i + Sk − Sq: aligned to the bottom right.
    window_size: how many keys before and after its own a query sees; −1 is no limit.
    softcap: scores become softcap · tanh(score / softcap); 0 for none.
    alibi_slopes: (Hq,) or (B, Hq), subtracted times the distance of query and key.
    deterministic: the same bits in every run, gradients too.
    return_attn_probs: for tests; see below.

    Returns out (B, Sq, Hq, Dv). With `return_attn_probs` the LSE (B, Hq, Sq) and, where there is dropout, the probabilities
    (B, Hq, Sq, Sk), negative where dropped, which take quadratic memory; without dropout None.

    >>> out = flash_attn_func(q, k, v, causal=True, window_size=(1023, 0))
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return _run(q, k, v, options, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of q, k and v in one tensor.

    qkv: (B, S, 3, H, D). All else, and what is returned, as in `flash_attn_func`.

    >>> out = flash_attn_qkvpacked_func(torch.stack([q, k, v], dim=2), causal=True)
    """
    q, k, v = _split("qkv", qkv, 5, "(batch, sequence, 3, heads, dim)", 2, 3)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of k and v in one tensor.

    q: queries (B, Sq, Hq, D).
    kv: (B, Sk, 2, Hk, D). All else, and what is returned, as in `flash_attn_func`.

    >>> out = flash_attn_kvpacked_func(q, torch.stack([k, v], dim=2), causal=True)
    """
    k, v = _split("kv", kv, 5, "(batch, sequence, 2, heads, dim)", 2, 2)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Result:
    """Attention of sequences packed one after another.

    q: queries (Tq, Hq, D), the tokens of all sequences.
    k: keys (Tk, Hk, D).
    v: values (Tk, Hk, Dv).
    cu_seqlens_q: int32 (B + 1,), where the queries of each sequence begin, and Tq.
    cu_seqlens_k: the same for keys, ending in Tk.
    max_seqlen_q: the most queries of a sequence; it only sizes the probabilities of `return_attn_probs`.
    max_seqlen_k: the same for keys.
    block_table: (B, most), the pages of each sequence, k and v being pages (pages, page, Hk, D); for inference.
    seqused_q: (B,), how many of each sequence's queries count, the first ones; the others give 0. None: all.
    seqused_k: the same for keys.

    The other options are those of `flash_attn_func`. Returns out (Tq, Hq, Dv), and with `return_attn_probs` the LSE (Hq, Tq) and,
    where there is dropout, the probabilities (B, Hq, max_seqlen_q, max_seqlen_k).

    >>> bounds = torch.tensor([0, 300, 1000], dtype=torch.int32)
    >>> out = flash_attn_varlen_func(q, k, v, bounds, bounds, 700, 700, causal=True)
    """
    if block_table is not None or seqused_q is not None or seqused_k is not None:
        if dropout_p and (block_table is not None or return_attn_probs):
            raise ArgumentError("dropout_p: goes with no block_table, and with seqused only without return_attn_probs")
        options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        batch = Batch(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        out, lse = attend_in_use(batch, sides(window_size, causal), options, table=block_table, most_q=max_seqlen_q)
        return (out, lse, None) if return_attn_probs else out
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    bounds = (cu_seqlens_q, cu_seqlens_k)
    return _run(q, k, v, options, return_attn_probs, bounds, (max_seqlen_q, max_seqlen_k))


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of q, k and v in one tensor.

    qkv: (T, 3, H, D).
    cu_seqlens: int32 (B + 1,), where each sequence begins, and T.
    max_seqlen: the most tokens of a sequence. All else, and what is returned, as in `flash_attn_varlen_func`.

    >>> out = flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], dim=1), bounds, 700, causal=True)
    """
    q, k, v = _split("qkv", qkv, 4, "(tokens, 3, heads, dim)", 1, 3)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of k and v in one tensor.

    q: queries (Tq, Hq, D).
    kv: (Tk, 2, Hk, D). All else, and what is returned, as in `flash_attn_varlen_func`.

    >>> out = flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], dim=1), bounds, bounds, 700, 700)
    """
    k, v = _split("kv", kv, 4, "(tokens, 2, heads, dim)", 1, 2)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    slopes: Tensor | None,
    deterministic: bool,
) -> dict[str, Any]:
    """The options of tilewise's own functions."""
    return {
        "mask": sides(window_size, causal).mask(),
        "scale": plain(softmax_scale),
        "bias": None if slopes is None else alibi(slopes.detach().float()),
        "softcap": plain(softcap),
        "dropout_p": plain(dropout_p),
        "deterministic": True if deterministic else None,
    }


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any],
    return_attn_probs: bool,
    bounds: tuple[Tensor, Tensor] | None = None,
    longest: tuple[int, int] = (0, 0),
) -> Result:
    """A padded batch; with bounds, a packed one, whose probabilities are padded to the longest lengths."""
    if options["dropout_p"]:
        options["seed"] = make_seed(None, q.device)
    out: Tensor
    if bounds is None:
        options["layout"] = "bshd"
        out, lse = attention(q, k, v, return_lse=True, **options)
    else:
        out, lse = attention_varlen(q, k, v, *bounds, return_lse=True, **options)
        options |= {"cu_seqlens_q": bounds[0], "cu_seqlens_k": bounds[1]}
    if not return_attn_probs:
        return out
    if not options["dropout_p"]:
        return out, lse, None
    with torch.no_grad():
        signed = [torch.where(p.after == 0, -p.before, p.before) for p in attention_weights(q, k, options)]
    if bounds is None:
        return out, lse, torch.cat(signed)
    padded = out.new_zeros((len(signed), q.shape[1], *longest))  # positions beyond a sequence's lengths stay 0
    for b, part in enumerate(signed):
        padded[b, :, : part.shape[2], : part.shape[3]] = part[0]
    return out, lse, padded


def _split(name: str, packed: Tensor, rank: int, shape: str, axis: int, count: int) -> tuple[Tensor, ...]:
    if not isinstance(packed, Tensor) or packed.ndim != rank or packed.shape[axis] != count:
        got = tuple(packed.shape) if isinstance(packed, Tensor) else type(packed).__name__
        raise LayoutError(f"{name}: got {got}, need {shape}")
    return packed.unbind(axis)


__all__ = [
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_kvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_with_kvcache",
]
