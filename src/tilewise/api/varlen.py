"""`attention_varlen`: sequences of different lengths packed one after another, (T, H, D), without padding."""

from __future__ import annotations

from typing import Literal, Unpack, overload

from torch import Tensor

from tilewise.api.attention import run
from tilewise.api.bias import Alibi
from tilewise.api.describe import Options, Request, autocast, check_dense, check_range, check_tensors, describe
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
    precision: str = "default",
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each sequence of a packed batch with itself (or with its own keys, if `cu_seqlens_k` is given).

    q is (Tq, Hq, D), k (Tk, Hk, D), v (Tk, Hk, Dv); sequence b owns the rows from cu_seqlens[b] up to cu_seqlens[b + 1].
    Masks, bias positions and dropout count within the sequence; ids of `documents` are packed like the tokens. No maximum
    length is needed, and on a GPU nothing waits for the lengths.

    Returns out (Tq, Hq, Dv); with `return_lse` also the log-sum-exp (Hq, Tq).
    """
    check_tensors(q, k, v, 3, "(tokens, heads, dim)")
    cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    check_cumulative("cu_seqlens_q", cu_seqlens_q, q)
    check_cumulative("cu_seqlens_k", cu_k, k)
    if cu_k.shape != cu_seqlens_q.shape:
        raise LayoutError(
            f"cu_seqlens_k: {cu_k.shape[0] - 1} sequences, but cu_seqlens_q has {cu_seqlens_q.shape[0] - 1}"
        )
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in autocast((q, k, v)))
    request = Request(mask, scale, bias, softcap, sinks, dropout_p, seed, precision, deterministic, bool(return_lse))
    problem, inputs = describe((q, k, v), request, (cu_seqlens_q.int(), cu_k.int()))
    out, lse = run(problem, inputs, backend)
    out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (out, lse) if return_lse else out


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
