"""`attention_varlen`: sequences of different lengths packed one after another, (T, H, D), without padding."""

from __future__ import annotations

import inspect
from typing import Any, Literal, Unpack, overload

from torch import Tensor

from tilewise.api.attention import run
from tilewise.api.bias import Alibi
from tilewise.api.describe import Options, Request, autocast, check_dense, check_range, check_tensors, describe
from tilewise.api.keywords import hide, refuse
from tilewise.api.names import BackendName, Precision
from tilewise.errors import ArgumentTypeError, DeviceError, LayoutError
from tilewise.masks import Mask
from tilewise.masks.algebra import INTEGERS


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: bool,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | Alibi | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    precision: Precision = "default",
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: BackendName = "auto",
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each sequence of a packed batch with itself (or with its own keys, if `cu_seqlens_k` is given).

    Masks, bias positions and dropout count within the sequence; ids of `documents` are packed like the tokens. No maximum
    length is needed, and on a GPU nothing waits for the lengths.

    q: queries (Tq, Hq, D) of all sequences, one after another.
    k: keys (Tk, Hk, D); Hq is a multiple of Hk.
    v: values (Tk, Hk, Dv).
    cu_seqlens_q: integers (sequences + 1,), from 0 to Tq: sequence b owns the rows from cu_seqlens_q[b] up to
        cu_seqlens_q[b + 1].
    cu_seqlens_k: the same for keys and values; as for the queries if None.
    mask: as in `attention`, but no boolean tensor: it has no place for sequences of different lengths.
    scale: what scores are multiplied by; 1/√D if None.
    bias: a floating-point tensor (…, queries, keys) as long as the longest sequence, or alibi(slopes).
    softcap: scores become softcap · tanh(score / softcap); 0 for none.
    sinks: (Hq,), one more score for each head, which takes part in the softmax and has no value.
    dropout_p: the probability with which a weight is dropped, in [0, 1).
    seed: an int, or a tensor with one integer, that fixes what is dropped; None draws one.
    precision: "default", "tf32" or "compensated", as in `attention`.
    deterministic: True for the same bits run after run; None follows torch.use_deterministic_algorithms.
    return_lse: also return the log-sum-exp.
    backend: "auto", or one by name, which never falls back.

    Returns out (Tq, Hq, Dv); with `return_lse` also the log-sum-exp (Hq, Tq).

    >>> cu = torch.tensor([0, 100, 350])                                  # sequences of 100 and 250 tokens
    >>> out = tw.attention_varlen(q, k, v, cu, mask=tw.causal())          # q, k, v (350, heads, dim)
    >>> out, lse = tw.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True)
    """
    if unknown:
        refuse("attention_varlen", unknown, inspect.signature(attention_varlen).parameters)
    q, k, v = autocast((q, k, v))
    check_tensors(q, k, v, 3, "(tokens, heads, dim)")
    cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    check_cumulative("cu_seqlens_q", cu_seqlens_q, q)
    check_cumulative("cu_seqlens_k", cu_k, k)
    if cu_k.shape != cu_seqlens_q.shape:
        raise LayoutError(
            f"cu_seqlens_k: {cu_k.shape[0] - 1} sequences, but cu_seqlens_q has {cu_seqlens_q.shape[0] - 1}"
        )
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    request = Request(mask, scale, bias, softcap, sinks, dropout_p, seed, precision, deterministic, bool(return_lse))
    problem, inputs = describe((q, k, v), request, (cu_seqlens_q.int(), cu_k.int()))
    out, lse = run(problem, inputs, backend)
    out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (out, lse) if return_lse else out


hide(attention_varlen)


def check_cumulative(name: str, cu: Tensor, x: Tensor) -> None:
    """The form of cumulative lengths; their values are checked where they are read (`ops.packing`)."""
    if not isinstance(cu, Tensor) or str(cu.dtype).removeprefix("torch.") not in INTEGERS:
        raise ArgumentTypeError(
            f"{name}: got {getattr(cu, 'dtype', type(cu).__name__)}, need an integer tensor of cumulative lengths"
        )
    check_dense(name, cu)
    if cu.ndim != 1 or cu.shape[0] < 1:
        raise LayoutError(f"{name}: shape {tuple(cu.shape)}, need (sequences + 1,), starting with 0")
    if cu.device != x.device:
        raise DeviceError(f"{name}: on {cu.device}, but the tokens are on {x.device}; move it with {name}.to(q.device)")
    check_range(name, cu)
