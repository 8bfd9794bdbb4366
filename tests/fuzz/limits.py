"""How far from the float64 result a backend may be: the bounds that `tilewise.numerics.bounds` derives, on this fuzz's own masks.

The derivation is the library's (see that module): dtype, reduction lengths, and Azuma's inequality for long sums. What goes in
is not: each sequence's scores are masked by the booleans of `masks`, and dropout is this fuzz's Philox. Two things are added for
numbers that the library's bounds give up on.

Faded keys. A logit that lies more than 1000 below its row's maximum, whatever the roundings of both, has a weight of exp(−1000)
at most: 0 in every dtype. Such a key is taken as unseen, so that its own uncertainty, which may be large, counts for nothing.

Swallowed scores. A bias beyond 2⁶⁰ swallows the score it is added to: the sum is the bias, in float32 as in the oracle's float64.
Two such logits are equal or one of them fades, so those that are left subtract to exactly 0 and their weights are as good as
exp(0). Their log-sum-exp is that bias; log n is lost in it, hence so is the P that a backward recomputes: its bound stays as
loose as it is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from tests.fuzz.case import Case
from tests.fuzz.oracle import Exact, Sequence, leaves_of, sequence, upstream
from tests.fuzz.tensors import SATURATED, Tensors, bias_part, place
from tilewise.masks import full
from tilewise.numerics.oracle import Piece
from tilewise.numerics.propagation import BackwardErrors, ForwardErrors
from tilewise.numerics.rounding import Arithmetic, floor, growth, unit_roundoff
from tilewise.problem import Problem

INF = float("inf")
GONE = 1000.0


class Errors(ForwardErrors):
    """The library's; rows of swallowed scores are taken as rows of equal logits, here 0, but for their log-sum-exp."""

    def __init__(self, problem: Problem, piece: Piece, rounding: Arithmetic) -> None:
        super().__init__(problem, piece, rounding)
        self.far = self.exact.lse
        large = torch.zeros_like(piece.seen) if piece.bias is None else piece.seen & (piece.bias.abs() >= SATURATED)
        self.swallowed = large.any(-1, keepdim=True)  # [H, M, 1]
        count = piece.seen.sum(-1, keepdim=True).double()
        p = torch.where(self.swallowed, piece.seen / count.clamp(min=1), self.exact.p)
        self.exact = self.exact._replace(
            logit=torch.where(self.swallowed, 0.0, self.exact.logit),
            lse=torch.where(self.swallowed[..., 0], count.clamp(min=1).log()[..., 0], self.exact.lse),
            p=p,
            w=p if piece.keep is None else p * piece.keep,
            sink=None if self.exact.sink is None else torch.where(self.swallowed[..., 0], 0.0, self.exact.sink),
        )
        self.out = self.exact.w @ piece.v

    @cached_property
    def top(self) -> Tensor:
        return torch.where(self.swallowed[..., 0], 0.0, super().top)

    @cached_property
    def exponent(self) -> Tensor:
        return torch.where(self.swallowed, 8 * self.rounding.u * self.piece.seen.double(), super().exponent)

    @cached_property
    def lse_error(self) -> Tensor:
        return torch.where(self.swallowed[..., 0], 8 * self.rounding.u * self.far.abs(), super().lse_error)


def problem_of(case: Case) -> Problem:
    """What the bounds read of a problem: sizes, dtype and numbers; its mask is not among them."""
    total_q, total_k = case.totals
    return Problem(
        batch=case.batch,
        heads=case.heads,
        kv_heads=case.kv_heads,
        seqlen_q=total_q,
        seqlen_k=total_k,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v,
        dtype=case.dtype,
        mask=full(),
        scale=case.head_dim**-0.5 if case.scale is None else case.scale,
        softcap=case.softcap,
        dropout_p=0.0 if case.dropout is None else case.dropout[0],
        precision=case.precision,
    )


@torch.no_grad()
def limits(case: Case, given: Tensors) -> Exact:
    """A bound for each element of `oracle.exact`."""
    problem, leaves = problem_of(case), leaves_of(case, given)
    rounding = Arithmetic.of(problem)
    first = 1 if case.packed else case.batch
    out = torch.zeros((first, case.heads, case.totals[0], case.head_dim_v), dtype=torch.float64)
    lse = torch.zeros(out.shape[:3], dtype=torch.float64)
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64) for x in leaves[:3])
    dbias = None if leaves.bias is None or given.bias is None else _Sum(leaves.bias, given.bias.dtype)
    dsinks = None if leaves.sinks is None or given.sinks is None else _Sum(leaves.sinks, given.sinks.dtype)
    dout, dlse = upstream(case, given)
    for b, (m, n) in enumerate(case.lengths):
        own = _without_endless(sequence(case, given, leaves, b))
        ahead = _ahead(problem, own, rounding)
        rows, cols = place(case, b, 0), place(case, b, 1)
        out[rows], lse[rows] = ahead.out_error, ahead.lse_error
        sees = own.seen.any(-1)
        known = sees
        if own.sinks is not None and leaves.sinks is not None:
            known = torch.where((leaves.sinks == INF)[:, None], False, sees | (own.sinks > -INF)[:, None])
        behind = BackwardErrors(
            ahead, torch.where(sees[..., None], dout[rows], 0.0), torch.where(known, dlse[rows], 0.0)
        )
        dq[rows], dk[cols], dv[cols] = behind.dq(), behind.dk(), behind.dv()
        if dbias is not None and leaves.bias is not None:
            error = behind.ds_error + rounding.weight * behind.ds.abs()
            dbias.add(behind.ds, error, own.seen, bias_part(leaves.bias, m, n, b))
        if dsinks is not None:
            value, error = behind.dsink()
            whole = slice(None)
            dsinks.add(value, error, torch.ones_like(value, dtype=torch.bool), (whole,))
    bounds = (out, lse, dq, dk, dv, *(None if s is None else s.error(rounding.u) for s in (dbias, dsinks)))
    return Exact(*(None if x is None else rounding.oracle_factor * x for x in bounds))  # type: ignore[arg-type]


def _without_endless(own: Sequence) -> Sequence:
    """A sink of +inf takes all, exactly: as good as seeing no key beside a sink of 0."""
    if own.sinks is None:
        return own
    endless = own.sinks == INF
    return own._replace(seen=own.seen & ~endless[:, None, None], sinks=torch.where(endless, 0.0, own.sinks))


def _ahead(problem: Problem, own: Sequence, rounding: Arithmetic) -> Errors:
    every = slice(None)
    piece = Piece(0, every, (0, every, every), (0, every, every), *own)  # type: ignore[arg-type]
    ahead = ForwardErrors(problem, piece, rounding)
    logit = ahead.exact.logit.masked_fill(~own.seen, -INF)
    top = logit.amax(-1, keepdim=True) if logit.shape[-1] else logit.new_full((*logit.shape[:2], 1), -INF)
    if own.sinks is not None:
        top = torch.maximum(top, own.sinks[:, None, None])
    error = ahead.logit
    at_top = torch.where(logit == top, error, 0.0).amax(-1, keepdim=True) if logit.shape[-1] else error
    margin = GONE + 2 * (error + at_top) + logit.abs() / 256 + top.abs() / 256
    return Errors(problem, replace(piece, seen=own.seen & ~(top - logit > margin)), rounding)


class _Sum:
    """A gradient summed over what broadcasts: its value, its magnitude, its terms and their errors."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.parts = torch.zeros((4, *like.shape), dtype=torch.float64)

    def add(self, value: Tensor, error: Tensor, seen: Tensor, at: tuple[int | slice, ...]) -> None:
        for total, x in zip(self.parts, (value, value.abs(), error, seen.double()), strict=True):
            shape = total[at].shape
            total[at] += x.sum_to_size(shape) if len(shape) == x.ndim else x.sum(1)

    def error(self, u: float) -> Tensor:
        value, magnitude, errors, terms = self.parts
        error = errors + growth(terms) * u * (magnitude + errors)
        return error + unit_roundoff(self.dtype) * (value.abs() + error) + floor(self.dtype)
