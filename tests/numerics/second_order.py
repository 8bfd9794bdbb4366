"""How far JVP and double backward may be from the oracle: the formulas of docs/derivatives.md with an error beside each number.

Inputs and tangents are exact. An `Uncertain` is a number and a bound on its error; sums and products of such take the errors of
both sides, to second order, and their own rounding. P and its errors come from `propagation`, and as there a 16-bit dtype rounds
what it multiplies, here P, P ∘ S_t, P_t, dZ and dZ_t, and each result. The double backward reads lse_t and out_t as they were
stored. Sums are charged as in `bounds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.numerics.bounds import Reduction
from tilewise.numerics.merge import finite
from tilewise.numerics.oracle import Gradients, Inputs, Piece, bias_index, pieces
from tilewise.numerics.propagation import BackwardErrors, ForwardErrors, factor_error, stored
from tilewise.numerics.rounding import Arithmetic, growth
from tilewise.problem import Problem


class Uncertain(NamedTuple):
    """A number and how far off it may be."""

    x: Tensor
    e: Tensor

    def times(self, other: Uncertain, u: float) -> Uncertain:
        error = self.x.abs() * other.e + other.x.abs() * self.e + self.e * other.e
        return Uncertain(self.x * other.x, error + 2 * u * (self.x * other.x).abs())

    def plus(self, other: Uncertain, u: float) -> Uncertain:
        return Uncertain(self.x + other.x, self.e + other.e + 2 * u * (self.x.abs() + other.x.abs()))

    def minus(self, other: Uncertain, u: float) -> Uncertain:
        return self.plus(Uncertain(-other.x, other.e), u)

    def column(self) -> Uncertain:
        return Uncertain(self.x[..., None], self.e[..., None])


class SecondBounds(NamedTuple):
    out_t: Tensor
    lse_t: Tensor
    grads: Gradients


@torch.no_grad()
def second_order(
    problem: Problem,
    inputs: Inputs,
    dout: Tensor,
    dlse: Tensor | None,
    tangents: Sequence[Tensor | None],
    arithmetic: Arithmetic | None = None,
) -> SecondBounds:
    """Bounds on the errors of out_t, lse_t and the derivative of the gradients: float64, in the shapes of each."""
    rounding = arithmetic or Arithmetic.of(problem)
    q_t, k_t, v_t, bias_t, sinks_t = tangents
    moved = [torch.zeros_like(x) if t is None else t for x, t in zip(inputs[:3], (q_t, k_t, v_t), strict=True)]
    moving = inputs._replace(q=moved[0], k=moved[1], v=moved[2])
    out_t = torch.zeros_like(dout, dtype=torch.float64)
    lse_t = torch.zeros_like(out_t[..., 0])
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in inputs[:3])
    dbias = None if inputs.bias is None else Reduction(inputs.bias)
    dsinks = None if inputs.sinks is None else Reduction(inputs.sinks)
    for piece, along in zip(pieces(problem, inputs), pieces(problem, moving), strict=True):
        do = torch.where(piece.seen.any(-1)[..., None], dout[piece.rows].double(), 0.0)
        dl = torch.zeros_like(piece.q[..., 0]) if dlse is None else dlse[piece.rows].double()
        at = None if inputs.bias is None else _at(inputs.bias, piece)
        b_t = None if bias_t is None or at is None else bias_t[at].double()
        z_t = None if sinks_t is None else sinks_t[piece.heads].double()
        errors = SecondErrors(BackwardErrors(ForwardErrors(problem, piece, rounding), do, dl), along, b_t, z_t, dl)
        out_t[piece.rows], lse_t[piece.rows] = errors.out_t.e, errors.lse_t.e
        dq[piece.rows], dk[piece.cols], dv[piece.cols] = errors.dq(), errors.dk(), errors.dv()
        if dbias is not None and at is not None:
            dbias.add(errors.ds_t.x, errors.ds_t.e + rounding.weight * errors.ds_t.x.abs(), piece.seen, at)
        if dsinks is not None:
            value, error = errors.dsink()
            dsinks.add(value, error, torch.ones_like(value, dtype=torch.bool), (piece.heads,))
    f = rounding.oracle_factor
    grads = Gradients(
        f * dq,
        f * dk,
        f * dv,
        None if dbias is None else f * dbias.error(rounding.u),
        None if dsinks is None else f * dsinks.error(rounding.u),
    )
    return SecondBounds(f * out_t, f * lse_t, grads)


def _at(bias: Tensor, piece: Piece) -> tuple[int | slice | Tensor, ...]:
    rows, cols = (slice(length) for length in piece.seen.shape[1:])
    return bias_index(bias, piece.sequence, piece.heads, rows, cols)


class SecondErrors:
    """The second derivatives of a piece and bounds on their errors; [H, M, N] unless said otherwise."""

    def __init__(
        self, behind: BackwardErrors, along: Piece, bias_t: Tensor | None, sinks_t: Tensor | None, dlse: Tensor
    ) -> None:
        ahead, piece, r = behind.ahead, behind.piece, behind.rounding
        self.behind, self.piece, self.along, self.r = behind, piece, along, r
        u, problem, exact = r.u, ahead.problem, ahead.exact
        each = growth(problem.head_dim).item() * u + 2 * r.operand + 4 * u
        size = along.q.abs() @ piece.k.abs().mT + piece.q.abs() @ along.k.abs().mT
        z_t = problem.scale * (along.q @ piece.k.mT + piece.q @ along.k.mT)
        self.z_t = self._seen(Uncertain(z_t, abs(problem.scale) * each * size))
        self.slope, self.bend = self._cap()
        s_t = self.z_t if self.slope is None else self.z_t.times(self.slope, u)
        if bias_t is not None:
            b_t = bias_t.expand_as(s_t.x)
            s_t = self._seen(s_t.plus(Uncertain(b_t, torch.zeros_like(b_t)), u))
        # P of the forward, or recomputed from the stored lse: the sum of both errors
        loose = behind.p_exponent + (ahead.denominator + ahead.summing + 4 * u)[..., None]
        floor_ = r.p_floor * piece.seen.double()
        self.p = Uncertain(exact.p, factor_error(exact.p, loose) + floor_)
        self.keep = 1.0 if piece.keep is None else piece.keep
        self.sink_t = None if sinks_t is None else sinks_t[:, None].expand(exact.lse.shape)
        self.lse_t = self._lse_t(s_t)
        self.out_t = self._out_t(s_t)
        self._backward(s_t, dlse)

    def _seen(self, a: Uncertain) -> Uncertain:
        return Uncertain(torch.where(self.piece.seen, a.x, 0.0), torch.where(self.piece.seen, a.e, 0.0))

    def _cap(self) -> tuple[Uncertain | None, Uncertain | None]:
        """cap' and cap''; None without softcap."""
        ahead, u = self.behind.ahead, self.r.u
        cap = ahead.problem.softcap
        if not cap:
            return None, None
        tanh, moved = ahead.exact.capped / cap, ahead.capped / cap
        slope = 1 - tanh**2
        bend_error = (4 * moved + 6 * moved**2) / cap + 16 * u / cap  # |d(-2t + 2t³)/dt| ≤ 4
        return Uncertain(slope, 2 * tanh.abs() * moved + moved**2 + 4 * u), Uncertain(-2 * tanh * slope / cap, bend_error)

    def _sink(self) -> Uncertain:
        """The sink's weight [H, M]."""
        ahead, u = self.behind.ahead, self.r.u
        sink, lse = ahead.exact.sink, finite(ahead.exact.lse).abs()
        assert sink is not None
        loose = ahead.sink_exponent + ahead.lse_error + ahead.denominator + (4 * lse + 4) * u
        return Uncertain(sink, factor_error(sink, loose) + self.r.p_floor)

    def _lse_t(self, s_t: Uncertain) -> Uncertain:
        """[H, M], as it is stored."""
        u, weighed = self.r.u, self.p.times(s_t, self.r.u)
        error = weighed.e.sum(-1) + (self.behind.ahead.summing + 4 * u) * (weighed.x.abs() + weighed.e).sum(-1)
        total = Uncertain(weighed.x.sum(-1), error)
        if self.sink_t is not None:
            total = total.plus(self._sink().times(Uncertain(self.sink_t, torch.zeros_like(self.sink_t)), u), u)
        return Uncertain(total.x, total.e + 2 * u * total.x.abs())

    def _out_t(self, s_t: Uncertain) -> Uncertain:
        """[H, M, Dv], as it is stored."""
        r, ahead, v, v_t = self.r, self.behind.ahead, self.piece.v, self.along.v
        w = Uncertain(self.p.x * self.keep, self.p.e * self.keep + 2 * r.u * self.p.x * self.keep)
        ws = w.times(s_t, r.u)
        charged = ahead.summing + 2 * r.weight + 2 * r.operand + 6 * r.u  # [H, M]
        size = (ws.x.abs() + ws.e) @ v.abs() + (w.x + w.e) @ v_t.abs()
        error = ws.e @ v.abs() + w.e @ v_t.abs() + charged[..., None] * size
        rescaled = (1 + factor_error(1.0, ahead.denominator))[..., None]
        floor_ = ahead.kept * r.weight_floor * (self.piece.seen.double() @ (v.abs() + v_t.abs()))
        moved = Uncertain(ws.x @ v + w.x @ v_t, error * rescaled + floor_)
        out_t = moved.minus(self.lse_t.column().times(Uncertain(ahead.out, ahead.out_error), r.u), r.u)
        return Uncertain(out_t.x, stored(out_t.e, out_t.x, r))

    def _backward(self, s_t: Uncertain, dlse: Tensor) -> None:
        behind, r, u = self.behind, self.r, self.r.u
        dout, v_t = behind.dout, self.along.v
        self.p_t = self.p.times(self._seen(s_t.minus(self.lse_t.column(), u)), u)
        each = growth(dout.shape[-1]).item() * u + 2 * r.operand + 2 * u
        dp = Uncertain(self.keep * behind.dw, self.keep * behind.dw_error)
        dp_t = self._seen(Uncertain(self.keep * (dout @ v_t.mT), self.keep * each * (dout.abs() @ v_t.abs().mT)))
        error = (dout.abs() * self.out_t.e).sum(-1) + each * (dout.abs() * self.out_t.x.abs()).sum(-1)
        # summed from the stored O_t, or from P_t and P in a pass of its own, whichever is less exact
        apart = self.p_t.times(dp, u).plus(self.p.times(dp_t, u), u)
        by_sum = apart.e.sum(-1) + (behind.ahead.summing + 4 * u) * (apart.x.abs() + apart.e).sum(-1)
        self.delta_t = Uncertain((dout * self.out_t.x).sum(-1), torch.maximum(error, by_sum) if not r.stored_out else error)
        delta = Uncertain(behind.delta - dlse, behind.delta_error + 3 * u * (behind.delta.abs() + dlse.abs()))
        self.delta = delta
        gap = dp.minus(delta.column(), u)
        self.ds = self.p.times(gap, u)
        self.ds_t = self.p_t.times(gap, u).plus(self.p.times(dp_t.minus(self.delta_t.column(), u), u), u)
        dz, dz_t = self.ds, self.ds_t
        if self.slope is not None and self.bend is not None:
            dz_t = dz_t.times(self.slope, u).plus(dz.times(self.bend, u).times(self.z_t, u), u)
            dz = dz.times(self.slope, u)
        self.dz, self.dz_t = dz, dz_t

    def dq(self) -> Tensor:
        scale, keys = self.behind.ahead.problem.scale, self.piece.seen.sum(-1)[..., None]
        terms = ((self.dz_t, self.piece.k), (self.dz, self.along.k))
        return sum(self.behind.product_error(a, self.piece.seen, rows, keys, scale, 1) for a, rows in terms)  # type: ignore[return-value]

    def dk(self) -> Tensor:
        scale = self.behind.ahead.problem.scale
        terms = ((self.dz_t, self.piece.q), (self.dz, self.along.q))
        return sum(self.behind.from_queries(a.x.mT, a.e.mT, rows, scale) for a, rows in terms)  # type: ignore[return-value]

    def dv(self) -> Tensor:
        value, error = self.p_t.x * self.keep, self.p_t.e * self.keep + 2 * self.r.u * (self.p_t.x * self.keep).abs()
        return self.behind.from_queries(value.mT, error.mT, self.behind.dout, 1.0)

    def dsink(self) -> tuple[Tensor, Tensor]:
        """The derivative of the sink's gradient, row by row [H, M]."""
        u, zero = self.r.u, torch.zeros_like(self.lse_t.x)
        moved = Uncertain(zero if self.sink_t is None else self.sink_t, zero).minus(self.lse_t, u)
        total = self._sink().times(moved.times(self.delta, u).plus(self.delta_t, u), u)
        return -total.x, total.e
