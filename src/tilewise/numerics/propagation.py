"""How rounding errors travel through attention, for one piece of a problem. `bounds` derives the formulas used here."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.numerics.merge import NEG_INF, finite
from tilewise.numerics.oracle import Piece, softmax
from tilewise.numerics.rounding import Arithmetic, growth
from tilewise.problem import Problem

MAX_EXPONENT = 60.0
"""A number uncertain by more than the factor exp(60) is not known at all; the limit keeps float64 finite."""

RESCALE_EVERY = 16
"""The fewest keys in a tile, that is, between two rescalings of the running sums."""


class ForwardErrors:
    """The exact forward of a piece, and bounds on the errors of each step; [H, M, N] unless said otherwise."""

    def __init__(self, problem: Problem, piece: Piece, rounding: Arithmetic) -> None:
        self.problem, self.piece, self.rounding = problem, piece, rounding
        self.exact = softmax(problem, piece)
        self.out = self.exact.w @ piece.v  # [H, M, Dv]
        self.kept = 1.0 / (1.0 - problem.dropout_p)

    @cached_property
    def score(self) -> Tensor:
        u, magnitude = self.rounding.u, self.piece.q.abs() @ self.piece.k.abs().transpose(-1, -2)
        each = growth(self.problem.head_dim).item() * u + 2 * self.rounding.operand
        return abs(self.problem.scale) * each * magnitude + 3 * u * self.exact.score.abs()

    @cached_property
    def capped(self) -> Tensor:
        cap, u = self.problem.softcap, self.rounding.u
        if not cap:
            return self.score
        x = self.exact.score / cap
        tanh = self.exact.capped / cap
        moved = self.score / cap + 2 * u * x.abs()
        # |tanh''| ≤ 0.77; tanh itself is in [−1, 1] and may be made of exponentials, with an absolute error of some u
        error = ((1 - tanh**2) * moved + 0.4 * moved**2).clamp(max=2.0)
        return cap * error + (4 * cap + 2 * self.exact.capped.abs()) * u

    @cached_property
    def top(self) -> Tensor:
        """|m|, the magnitude of the row maximum [H, M]; a maximum on the way lies between m and the logit it serves."""
        logit = self.exact.logit.masked_fill(~self.piece.seen, NEG_INF)
        if self.piece.sinks is not None:
            logit = torch.cat([logit, self.piece.sinks[:, None, None].expand(*logit.shape[:2], 1)], dim=-1)
        return finite(logit.amax(-1)).abs() if logit.shape[-1] else torch.zeros_like(self.exact.lse)

    @cached_property
    def logit(self) -> Tensor:
        u, summed = self.rounding.u, self.exact.capped.abs()
        if self.piece.bias is None and self.piece.alibi is None:
            return self.capped
        for term in (self.piece.bias, self.piece.alibi):
            if term is not None:
                summed = summed + torch.where(self.piece.seen, term.abs(), 0.0)
        return self.capped + 3 * u * summed

    @cached_property
    def exponent(self) -> Tensor:
        """ε: a weight before normalisation is off by a factor in exp(±ε)."""
        u = self.rounding.u
        argument = self.logit + 4 * u * (self.exact.logit.abs() + self.top[..., None]) + 8 * u
        return torch.where(self.piece.seen, argument, 0.0)

    @cached_property
    def sink_exponent(self) -> Tensor:
        """ε of the sink's weight [H, M]."""
        assert self.piece.sinks is not None
        return 4 * self.rounding.u * (finite(self.piece.sinks)[:, None].abs() + self.top + 2)

    @cached_property
    def summing(self) -> Tensor:
        """A: summing the visible keys and rescaling the sums on the way [H, M]."""
        return summing_error(self.piece.seen.sum(-1).double(), self.rounding)

    @cached_property
    def denominator(self) -> Tensor:
        """ln F + A: the denominator is off by at most the factor exp of this [H, M]."""
        lse = finite(self.exact.lse)
        uncertain = (self.exact.logit - lse[..., None] + self.exponent).masked_fill(~self.piece.seen, NEG_INF)
        if self.piece.sinks is not None:
            sink = self.piece.sinks[:, None] - lse + self.sink_exponent
            uncertain = torch.cat([uncertain, sink[..., None]], dim=-1)
        return torch.logsumexp(uncertain, dim=-1).clamp(min=0.0) + self.summing  # without keys and sink, 0

    @cached_property
    def lse_error(self) -> Tensor:
        return lse_error(self.exact.lse, self.top, self.denominator, self.rounding)

    @cached_property
    def weight_error(self) -> Tensor:
        """Of each weight in the output's sum, before the division."""
        r = self.rounding
        return factor_error(self.exact.w, self.exponent + (self.summing + r.weight + 2 * r.operand + 4 * r.u)[..., None])

    @cached_property
    def out_error(self) -> Tensor:
        """[H, M, Dv]."""
        v = self.piece.v.abs()
        most = v.amax(-2, keepdim=True) if v.shape[-2] else torch.zeros_like(self.out[:, :1])
        sums = OutputSums(self.out, self.weight_error @ v, self.piece.seen.double() @ v, most)
        return out_error(sums, self.denominator, self.kept, self.rounding)


class OutputSums(NamedTuple):
    """What the bound of the output is made of: sums over the keys [H, M, Dv], which may be taken piece by piece."""

    out: Tensor  # Σ w·v, exact
    errors: Tensor  # Σ weight_error·|v|
    seen: Tensor  # Σ |v| over visible keys
    most: Tensor  # max |v| [H, 1, Dv]


def summing_error(keys: Tensor, rounding: Arithmetic) -> Tensor:
    """A: summing so many visible keys, and rescaling the sums on the way."""
    return rounding.u * (growth(keys) + 6 * growth((keys / RESCALE_EVERY).ceil()))


def lse_error(lse: Tensor, top: Tensor, denominator: Tensor, rounding: Arithmetic) -> Tensor:
    """The bound of |Δlse|; `top` and `denominator` are those of ForwardErrors."""
    error = denominator + rounding.u * (4 * (finite(lse).abs() + top) + 8)
    return torch.where(lse == NEG_INF, 0.0, error)


def out_error(sums: OutputSums, denominator: Tensor, kept: float, rounding: Arithmetic) -> Tensor:
    """The bound of |Δout| [H, M, Dv]; `denominator` is ForwardErrors.denominator."""
    error = sums.errors * (1 + factor_error(1.0, denominator))[..., None]
    error = error + factor_error(sums.out.abs(), denominator[..., None])
    error = error + kept * rounding.weight_floor * sums.seen
    furthest = sums.out.abs() + 1.02 * kept * sums.most
    return stored(torch.minimum(error, furthest), sums.out, rounding)


class BackwardErrors:
    """The exact backward of a piece and bounds on its errors."""

    def __init__(self, ahead: ForwardErrors, dout: Tensor, dlse: Tensor) -> None:
        piece, exact, u = ahead.piece, ahead.exact, ahead.rounding.u
        self.ahead, self.piece, self.rounding, self.dout = ahead, piece, ahead.rounding, dout
        keep = 1.0 if piece.keep is None else piece.keep
        self.cross = dout.abs() @ piece.v.abs().transpose(-1, -2)  # [H, M, N], Σ_d |dout| |v|
        self.dw = torch.where(piece.seen, dout @ piece.v.transpose(-1, -2), 0.0)
        self.dw_error = (growth(dout.shape[-1]).item() * u + 2 * ahead.rounding.operand) * self.cross
        self.delta = (dout * ahead.out).sum(-1)  # [H, M]
        dp = keep * self.dw
        inner = dp + (dlse - self.delta)[..., None]
        spread = (self.delta.abs() + dlse.abs())[..., None]
        inner_error = keep * self.dw_error + self.delta_error[..., None] + 3 * u * (dp.abs() + spread)
        p_error = factor_error(exact.p, self.p_exponent + 2 * u) + ahead.rounding.p_floor * piece.seen.double()
        self.ds = exact.p * inner  # the gradient of the logits
        self.ds_error = p_error * (inner.abs() + inner_error) + exact.p * inner_error
        self.sink_inner = dlse - self.delta
        self.sink_inner_error = self.delta_error + 3 * u * spread[..., 0]

    @cached_property
    def p_exponent(self) -> Tensor:
        """ε': P, recomputed from the stored lse, is off by a factor in exp(±ε')."""
        lse = finite(self.ahead.exact.lse).abs()[..., None]
        argument = 4 * self.rounding.u * (self.ahead.exact.logit.abs() + lse)
        return torch.where(self.piece.seen, self.ahead.exponent + self.ahead.lse_error[..., None] + argument, 0.0)

    @cached_property
    def delta_error(self) -> Tensor:
        """Of δ = Σ out · dout [H, M], from the stored out or as Σ w · dw: the smaller of two valid bounds."""
        ahead, r = self.ahead, self.rounding
        growing = growth(self.dout.shape[-1]).item() * r.u + 2 * r.u
        product = growing * (self.dout.abs() * ahead.out.abs()).sum(-1)
        straight = (self.dout.abs() * ahead.out_error).sum(-1)
        w_error = factor_error(ahead.exact.w, ahead.exponent + r.weight + r.operand + 4 * r.u)  # meets all of v_j at once
        apart = (ahead.summing[..., None] + r.operand) * self.cross + self.dw_error
        through = (w_error * self.dw.abs() + (ahead.exact.w + w_error) * apart).sum(-1)
        through = through + ahead.kept * r.weight_floor * self.dw.abs().sum(-1)
        through = through * (1 + factor_error(1.0, ahead.denominator)) + factor_error(self.delta.abs(), ahead.denominator)
        if not r.stored_out:
            return torch.minimum(straight, through) + product
        rounded = (self.dout.abs() * stored(torch.zeros_like(ahead.out), ahead.out.abs() + ahead.out_error, r)).sum(-1)
        return torch.minimum(straight, through + rounded) + product

    @cached_property
    def dscore(self) -> tuple[Tensor, Tensor]:
        """The gradient of scale · q·k and its error: dS through the slope of softcap."""
        cap, exact = self.ahead.problem.softcap, self.ahead.exact
        if not cap:
            return self.ds, self.ds_error
        tanh, moved = exact.capped / cap, self.ahead.capped / cap
        slope = 1 - tanh**2
        slope_error = 2 * tanh.abs() * moved + moved**2 + 4 * self.rounding.u
        return slope * self.ds, slope * self.ds_error + slope_error * (self.ds.abs() + self.ds_error)

    def dq(self) -> Tensor:
        keys = self.piece.seen.sum(-1)[..., None]
        return self.product_error(self.dscore, self.piece.seen, self.piece.k, keys, self.ahead.problem.scale, group=1)

    def dk(self) -> Tensor:
        ds, error = (x.transpose(-1, -2) for x in self.dscore)
        return self.from_queries(ds, error, self.piece.q, self.ahead.problem.scale)

    def dv(self) -> Tensor:
        w = self.ahead.exact.w
        # P may be too small to be normal before dropout's factor joins it
        error = factor_error(w, self.p_exponent + 4 * self.rounding.u) + self.ahead.kept * self.rounding.p_floor
        error = torch.where(self.piece.seen, error, 0.0)
        return self.from_queries(w.transpose(-1, -2), error.transpose(-1, -2), self.dout, 1.0)

    def dsink(self) -> tuple[Tensor, Tensor]:
        """The gradient of the sink's logit, row by row, and its error [H, M]."""
        sink = self.ahead.exact.sink
        assert sink is not None
        lse = finite(self.ahead.exact.lse).abs()
        sink_error = factor_error(sink, self.ahead.sink_exponent + self.ahead.lse_error + (4 * lse + 2) * self.rounding.u)
        sink_error = sink_error + self.rounding.p_floor
        value, error = self.sink_inner, self.sink_inner_error
        return sink * value, sink_error * (value.abs() + error) + sink * error

    def from_queries(self, weight: Tensor, error: Tensor, rows: Tensor, scale: float) -> Tensor:
        """A gradient of keys: sums over the queries of all heads of the group."""
        problem, seen = self.ahead.problem, self.piece.seen.transpose(-1, -2)
        queries = _over_group(seen.sum(-1), problem.group)[..., None]
        return self.product_error((weight, error), seen, rows, queries, scale, problem.group)

    def product_error(
        self, weight: tuple[Tensor, Tensor], seen: Tensor, rows: Tensor, terms: Tensor, scale: float, group: int
    ) -> Tensor:
        """The error of scale · weight @ rows, summed over the heads of a group and stored."""
        r, (value, error), size = self.rounding, weight, rows.abs()
        charged = r.weight + 2 * r.operand + r.u * (growth(terms) + 4)  # [H / group, ·, 1]
        exact = _over_group(value @ rows, group)
        magnitude = _over_group((value.abs() + error) @ size, group)
        total = abs(scale) * (_over_group(error @ size, group) + charged * magnitude)
        total = total + max(1.0, abs(scale)) * r.weight_floor * _over_group(seen.double() @ size, group)
        return stored(total, scale * exact, r)


def factor_error(value: Tensor | float, exponent: Tensor) -> Tensor:
    """The error of a number ≥ 0 that is known up to a factor in exp(±exponent)."""
    limited = exponent.clamp(max=MAX_EXPONENT).expm1()
    return torch.where(exponent > MAX_EXPONENT, limited, value * limited)


def stored(error: Tensor, value: Tensor, rounding: Arithmetic) -> Tensor:
    """The error after rounding to the dtype of the result."""
    return error + rounding.store * (value.abs() + error) + rounding.store_floor


def _over_group(x: Tensor, group: int) -> Tensor:
    """Summed over the query heads that share a key head: [H, ...] → [H / group, ...]."""
    return x.unflatten(0, (-1, group)).sum(1) if group > 1 else x
