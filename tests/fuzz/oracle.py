"""Standard attention in float64, for the fuzz alone: the whole score matrix, booleans from `masks`, gradients by autograd.

It shares nothing with `tilewise.numerics.oracle`. What nobody may look at is replaced by 0 before it meets anything.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tests.fuzz import philox
from tests.fuzz.case import Case
from tests.fuzz.tensors import Tensors, bias_part, inside, place

INF = float("inf")


class Exact(NamedTuple):
    """float64: out and its like in the inside layout, dbias of rank 4."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsinks: Tensor | None


class Sequence(NamedTuple):
    """One sequence of a case, in float64, k and v repeated to the query heads."""

    q: Tensor  # [H, M, D]
    k: Tensor  # [H, N, D]
    v: Tensor  # [H, N, Dv]
    seen: Tensor  # [H, M, N]
    bias: Tensor | None  # broadcasts to [H, M, N]
    alibi: Tensor | None  # [H, M, N]
    sinks: Tensor | None  # [H]
    keep: Tensor | None  # [H, M, N]: 0 or 1 / (1 − p)


class Leaves(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None


def leaves_of(case: Case, given: Tensors) -> Leaves:
    bias = given.bias
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]
    wide = [inside(case, x) for x in (given.q, given.k, given.v)]
    return Leaves(*(None if x is None else x.double() for x in (*wide, bias, given.sinks)))  # type: ignore[arg-type]


def sequence(case: Case, given: Tensors, leaves: Leaves, b: int) -> Sequence:
    """What sequence b computes with."""
    m, n = case.lengths[b]
    seen = given.seen[b]
    q, k, v = leaves.q[place(case, b, 0)], leaves.k[place(case, b, 1)], leaves.v[place(case, b, 1)]
    by_group = seen.reshape(case.kv_heads, case.group * m, n).any(1)[..., None]  # [Hk, N, 1]
    k, v = (torch.where(by_group, x, 0.0).repeat_interleave(case.group, dim=0) for x in (k, v))
    bias = alibi = keep = None
    if leaves.bias is not None:
        bias = leaves.bias[bias_part(leaves.bias, m, n, b)]
        bias = torch.where(seen, bias.expand(seen.shape), 0.0)
    if given.alibi is not None:
        slopes = (given.alibi[b] if given.alibi.ndim == 2 else given.alibi).double()
        distance = (torch.arange(m)[:, None] + (n - m) - torch.arange(n)[None, :]).abs()
        alibi = -slopes[:, None, None] * distance
    if case.dropout is not None:
        p, seed = case.dropout
        keep = torch.from_numpy(philox.kept(seed, p, b, (case.heads, m, n))).double() / (1.0 - p)
    q = torch.where(seen.any(-1)[..., None], q, 0.0)
    return Sequence(q, k, v, seen, bias, alibi, leaves.sinks, keep)


def attend(case: Case, s: Sequence) -> tuple[Tensor, Tensor]:
    """out [H, M, Dv] and lse [H, M]."""
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    x = scale * (s.q @ s.k.mT)
    if case.softcap:
        x = case.softcap * torch.tanh(x / case.softcap)
    if s.bias is not None:
        x = x + s.bias
    if s.alibi is not None:
        x = x + s.alibi
    x = torch.where(s.seen, x, -INF)
    sinks = x.new_full((case.heads,), -INF) if s.sinks is None else s.sinks
    endless = (sinks == INF)[:, None]  # a sink of +inf takes all: a limit, in which nothing has a gradient
    x = torch.cat([x, torch.where(endless[..., None], 0.0, sinks[:, None, None]).expand(*x.shape[:2], 1)], dim=-1)
    top = x.detach().amax(-1, keepdim=True)
    none = top == -INF
    weights = torch.where(x == -INF, 0.0, torch.exp(x - torch.where(none, 0.0, top)))
    total = torch.where(none, 1.0, weights.sum(-1, keepdim=True))
    p = (weights / total)[..., :-1]
    w = p if s.keep is None else p * s.keep
    lse = torch.where(none, -INF, torch.where(none, 0.0, top) + total.log())[..., 0]
    return torch.where(endless[..., None], 0.0, w @ s.v), torch.where(endless, INF, lse)


def exact(case: Case, given: Tensors) -> Exact:
    """out, lse and all gradients of Σ dout · out + Σ dlse · lse."""
    plain = leaves_of(case, given)
    leaves = Leaves(*(None if x is None else x.requires_grad_() for x in plain))  # type: ignore[arg-type]
    first = 1 if case.packed else case.batch
    out = torch.zeros((first, case.heads, case.totals[0], case.head_dim_v), dtype=torch.float64)
    lse = torch.zeros(out.shape[:3], dtype=torch.float64)
    dout, dlse = upstream(case, given)
    total = torch.zeros((), dtype=torch.float64)
    for b in range(case.batch):
        s = sequence(case, given, leaves, b)
        own_out, own_lse = attend(case, s)
        at = place(case, b, 0)
        out[at], lse[at] = own_out.detach(), own_lse.detach()
        sees = s.seen.any(-1)
        total = total + (own_out * torch.where(sees[..., None], dout[at], 0.0)).sum()
        known = own_lse.isfinite()
        total = total + (torch.where(known, own_lse, 0.0) * torch.where(known, dlse[at], 0.0)).sum()
    wanted = [x for x in leaves if x is not None]
    grads = torch.autograd.grad(total, wanted, allow_unused=True) if total.requires_grad else [None] * len(wanted)
    found = iter(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True))
    return Exact(out, lse, *(None if x is None else next(found) for x in leaves))  # type: ignore[arg-type]


def upstream(case: Case, given: Tensors) -> tuple[Tensor, Tensor]:
    """dout and dlse as (B, H, M, Dv) and (B, H, M) in float64; no gradient of lse counts as 0."""
    dlse = given.dlse.double()
    dlse = dlse[None] if case.packed else dlse
    return inside(case, given.dout).double(), dlse if case.lse == "grad" else torch.zeros_like(dlse)
