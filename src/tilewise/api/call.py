"""The arguments of a call that is looked at rather than run: the same names and meaning as in `attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.api.describe import LAYOUTS, Arguments, Request, autocast, check_tensors, describe
from tilewise.api.keywords import refuse
from tilewise.api.names import Layout
from tilewise.api.varlen import check_cumulative
from tilewise.backends.base import Inputs
from tilewise.errors import ArgumentError, LayoutError
from tilewise.problem import Problem


class Options(Arguments, total=False):
    """What `attention` takes beside q, k and v; with `cu_seqlens_q` the call is that of `attention_varlen`."""

    layout: Layout
    return_lse: bool
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None


def understand(q: Tensor, k: Tensor, v: Tensor, options: Options, *, needs_seed: bool = True) -> tuple[Problem, Inputs]:
    """The problem and its inputs in the inside layout; results of an earlier call need that call's dropout seed."""
    given = {name: value for name, value in options.items() if name in Request._fields}
    request = Request(**given, needs_lse=bool(options.get("return_lse", False)))  # type: ignore[arg-type]
    if needs_seed and request.dropout_p and request.seed is None:
        raise ArgumentError("seed: dropout_p is set and seed is not; pass the seed that the call used")
    cu_q, cu_k, layout = options.get("cu_seqlens_q"), options.get("cu_seqlens_k"), options.get("layout", "bhsd")
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        refuse("attention", unknown, Options.__annotations__)
    q, k, v = autocast((q, k, v))
    if cu_q is not None:
        check_tensors(q, k, v, 3, "(tokens, heads, dim)")
        cu_k = cu_q if cu_k is None else cu_k
        check_cumulative("cu_seqlens_q", cu_q, q)
        check_cumulative("cu_seqlens_k", cu_k, k)
        packed = tuple(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        return describe((packed[0], packed[1], packed[2]), request, (cu_q.int(), cu_k.int()))
    if layout not in LAYOUTS:
        raise LayoutError(f"layout: got {layout!r}, need 'bhsd' (batch, heads, sequence, dim) or 'bshd'")
    order = "(batch, heads, sequence, dim)" if layout == "bhsd" else "(batch, sequence, heads, dim)"
    check_tensors(q, k, v, 4, order)
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return describe((q, k, v), request)


def result_inside(name: str, x: Tensor, problem: Problem, layout: str, columns: tuple[int, ...]) -> Tensor:
    """An output (`columns` = (Dv,)) or LSE (()) of the call, brought to (B, Hq, M, …); raises where it cannot be one."""
    want: tuple[int, ...] = (1 if problem.varlen else problem.batch, problem.heads, problem.seqlen_q, *columns)
    inner = x
    if problem.varlen and columns and x.ndim == 3:
        inner = x.transpose(0, 1).unsqueeze(0)
    elif problem.varlen and x.ndim == 2:
        inner = x.unsqueeze(0)
    elif columns and layout == "bshd" and x.ndim == 4:
        inner = x.transpose(1, 2)
    if tuple(inner.shape) != want or not torch.is_floating_point(x):
        raise LayoutError(
            f"{name}: shape {tuple(x.shape)} and dtype {x.dtype}; the result of this call is floating-point and, "
            f"as (batch, heads, queries, …), of shape {want}"
        )
    return inner.detach()
