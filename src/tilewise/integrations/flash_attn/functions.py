"""flash_attn's six functions. The packed ones unpack and call the others, which turn their arguments into one `Settings`."""

from __future__ import annotations

from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.api.attention import attention
from tilewise.api.bias import Alibi, alibi
from tilewise.api.parse import make_seed
from tilewise.api.varlen import attention_varlen
from tilewise.errors import ArgumentError, LayoutError
from tilewise.integrations.weights import attention_weights
from tilewise.masks import UNBOUNDED, Mask, full, window

Result = Tensor | tuple[Tensor, Tensor, Tensor | None]


class Settings(NamedTuple):
    """What the functions share."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool
    return_attn_probs: bool

    def mask(self) -> Mask:
        """Query i stands at key i + Sk − Sq and sees `left` keys before and `right` after it; −1 is no limit."""
        sides = _sides(self.window_size)
        left, right = (UNBOUNDED if side == -1 else min(side, UNBOUNDED) for side in sides)
        right = 0 if self.causal else right
        return full() if left == right == UNBOUNDED else window(left, right)

    def options(self, device: torch.device) -> dict[str, Any]:
        """The arguments of tilewise's own functions."""
        slopes = self.alibi_slopes
        bias: Alibi | None = None if slopes is None else alibi(slopes.detach().float())
        return {
            "mask": self.mask(),
            "scale": _plain(self.softmax_scale),
            "bias": bias,
            "softcap": _plain(self.softcap),
            "dropout_p": _plain(self.dropout_p),
            "seed": make_seed(None, device) if self.dropout_p else None,
            "deterministic": True if self.deterministic else None,
        }


def _sides(window_size: Any) -> list[int]:
    """The two sides of a window as integers, from a pair of whatever counts as one: also a tensor or an array."""
    try:
        left, right = (index(_plain(side)) for side in window_size)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"window_size: got {window_size!r}, need a pair of integers (left, right), −1 meaning no limit"
        ) from error
    if left < -1 or right < -1:
        raise ArgumentError(
            f"window_size: got {window_size!r}, need integers of at least −1 (which means no limit)"
        )
    return [left, right]


def _plain(number: Any) -> Any:
    """A Python number for a scalar of numpy or torch; all else as it is, for the checks to name."""
    return number.item() if isinstance(number, np.generic | Tensor) else number


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
    """q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) → out (B, Sq, Hq, Dv); causal is aligned to the bottom right.

    `return_attn_probs` adds the LSE (B, Hq, Sq) and, for tests, with dropout, the probabilities (B, Hq, Sq, Sk), negative where
    dropped: they take quadratic memory. Without dropout they are None.
    """
    settings = Settings(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return _run(q, k, v, settings)


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
    """`flash_attn_func` of qkv (B, S, 3, H, D)."""
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
    """`flash_attn_func` of q (B, Sq, Hq, D) and kv (B, Sk, 2, Hk, D)."""
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
) -> Result:
    """Packed sequences: q (Tq, Hq, D), k and v (Tk, Hk, D) → out (Tq, Hq, D), and an LSE (Hq, Tq).

    The longest lengths are not needed to compute; they size the probabilities `return_attn_probs` asks for.
    """
    if block_table is not None:
        raise ArgumentError("block_table: paged keys and values are not served; gather them, and pass None")
    settings = Settings(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return _run(q, k, v, settings, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))


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
    """`flash_attn_varlen_func` of qkv (T, 3, H, D)."""
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
    """`flash_attn_varlen_func` of q (Tq, Hq, D) and kv (Tk, 2, Hk, D)."""
    k, v = _split("kv", kv, 4, "(tokens, 2, heads, dim)", 1, 2)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    settings: Settings,
    cumulative: tuple[Tensor, Tensor] | None = None,
    longest: tuple[int, int] = (0, 0),
) -> Result:
    """A padded batch, or with cumulative lengths a packed one."""
    options = settings.options(q.device)
    if cumulative is None:
        options["layout"] = "bshd"
        out, lse = attention(q, k, v, return_lse=True, **options)
    else:
        out, lse = attention_varlen(q, k, v, *cumulative, return_lse=True, **options)
        options |= {"cu_seqlens_q": cumulative[0], "cu_seqlens_k": cumulative[1]}
    if not settings.return_attn_probs:
        return out
    if not settings.dropout_p:
        return out, lse, None
    with torch.no_grad():
        signed = [torch.where(p.after == 0, -p.before, p.before) for p in attention_weights(q, k, options)]
    if cumulative is None:
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
