"""How far a correct attention may be from the float64 oracle: elementwise bounds from dtype and reduction length.

The model. Inputs are exact. Products are summed with unit roundoff u (of fp32; of fp64 for fp64 and with
precision="double" or "compensated"). A 16-bit dtype rounds P and dS to itself before they are multiplied, with unit
roundoff r, and so it does with each result; in double only results are rounded. tf32 cuts both operands of each product
to 11 bits (t = 2⁻¹⁰: hardware may truncate). Softmax goes tile by tile, its sums rescaled as the maximum grows, with
exp, tanh and log good to a few u; the backward recomputes P from the stored lse and takes δ = Σ out·dout from the
stored out, or, in double, from the recomputed P.

Sums. A sum of n terms is charged g(n)·u·Σ|x| with g(n) = min(n, λ√n). n is the worst case of any order of summation,
to first order in u. λ√n is Azuma's inequality for roundings of mean 0 given the past: it fails with probability at most
2·exp(−λ²/2), for λ = 7 that is 5·10⁻¹¹ an element. Rounding P and dS to 16 bits gets no such discount, for equal
weights round alike: it enters by its worst case.

Forward. With Z = |q|·|k| a score errs by e_s = scale·(g(D)·u + 2t)·Z + 3u|s|; softcap multiplies this by its slope and
adds its own rounding; bias and alibi add 3u of the magnitudes summed. After subtracting the maximum m and taking exp, a
weight is off by a factor in exp(±ε), ε = e_x + 4u(|x| + |m|) + 8u, and the denominator by one in exp(±(ln F + A)):
F = Σ p·exp(ε) (by Jensen's inequality it bounds both sides), and A = g(n)·u + 6u·g(n/16) is summing and rescaling. So
    |Δlse| ≤ ln F + A + 4u(|lse| + |m|) + 8u
    |Δout| ≤ exp(ln F + A) · Σ_j w_j·|v_j|·expm1(ε_j + A + r + 2t) + |out|·expm1(ln F + A) + rounding of out
with w = P after dropout. A mean of values is never further off than |out| + max|v|, whatever happened to the scores.

Backward. P is off by a factor in exp(±ε'), ε' = ε + |Δlse| + 4u(|x| + |lse|). An error of w_ij multiplies all of v_j,
so it reaches δ_i through |dw_ij| = |dout_i·v_j| and not through Σ_d |dout||v|, which only the roundings of the sums
meet. dS = P∘(dP − δ + dlse) takes the errors of its factors to second order, softcap's slope those of tanh, and dq,
dk, dv, dbias and dsinks are sums as above.

Numbers too small to be normal are charged absolutely. Where the problem is fp64, the oracle errs as much as what it
measures, and the bounds are doubled.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.numerics.oracle import Gradients, Inputs, bias_index, pieces
from tilewise.numerics.propagation import BackwardErrors, ForwardErrors
from tilewise.numerics.rounding import Arithmetic, floor, growth, unit_roundoff
from tilewise.problem import Problem


class ForwardBounds(NamedTuple):
    out: Tensor
    lse: Tensor


@torch.no_grad()
def forward(problem: Problem, inputs: Inputs, arithmetic: Arithmetic | None = None) -> ForwardBounds:
    """Bounds on |out − exact| and |lse − exact|: float64, in the shapes of out and lse."""
    rounding = arithmetic or Arithmetic.of(problem)
    q = inputs.q
    out = torch.zeros((*q.shape[:3], problem.head_dim_v), dtype=torch.float64, device=q.device)
    lse = torch.zeros(q.shape[:3], dtype=torch.float64, device=q.device)
    for piece in pieces(problem, inputs):
        ahead = ForwardErrors(problem, piece, rounding)
        out[piece.rows] = rounding.oracle_factor * ahead.out_error
        lse[piece.rows] = rounding.oracle_factor * ahead.lse_error
    return ForwardBounds(out, lse)


@torch.no_grad()
def backward(
    problem: Problem, inputs: Inputs, dout: Tensor, dlse: Tensor | None = None, arithmetic: Arithmetic | None = None
) -> Gradients:
    """Bounds on the errors of the gradients: float64, in the shapes of the inputs."""
    rounding = arithmetic or Arithmetic.of(problem)
    factor = rounding.oracle_factor
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (inputs.q, inputs.k, inputs.v))
    dbias = None if inputs.bias is None else Reduction(inputs.bias)
    dsinks = None if inputs.sinks is None else Reduction(inputs.sinks)
    for piece in pieces(problem, inputs):
        do = torch.where(piece.seen.any(-1)[..., None], dout[piece.rows].double(), 0.0)
        dl = torch.zeros_like(piece.q[..., 0]) if dlse is None else dlse[piece.rows].double()
        behind = BackwardErrors(ForwardErrors(problem, piece, rounding), do, dl)
        dq[piece.rows] = factor * behind.dq()
        dk[piece.cols] = factor * behind.dk()
        dv[piece.cols] = factor * behind.dv()
        if dbias is not None:
            error = behind.ds_error + rounding.weight * behind.ds.abs()
            rows, cols = (slice(length) for length in piece.seen.shape[1:])
            at = bias_index(dbias.value, piece.sequence, piece.heads, rows, cols)
            dbias.add(behind.ds, error, piece.seen, at)
        if dsinks is not None:
            value, error = behind.dsink()
            dsinks.add(value, error, torch.ones_like(value, dtype=torch.bool), (piece.heads,))
    return Gradients(
        dq,
        dk,
        dv,
        None if dbias is None else factor * dbias.error(rounding.u),
        None if dsinks is None else factor * dsinks.error(rounding.u),
    )


def ratios(actual: Tensor, exact: Tensor, bound: Tensor) -> Tensor:
    """Error / bound, elementwise; 0 where both are the same infinity or NaN, inf where only one is not finite."""
    limit = torch.finfo(actual.dtype).max
    value = actual.detach().to(exact.device, torch.float64)
    overflow = value.isinf() & (exact.abs() + bound >= limit) & (exact.sign() == value.sign())
    same = (value == exact) | (value.isnan() & exact.isnan()) | overflow
    ratio = (value - exact).abs() / bound
    return torch.where(same, 0.0, ratio.nan_to_num(nan=float("inf"), posinf=float("inf")))


class Reduction:
    """A gradient summed over broadcast sides and over pieces: its value, its magnitude, its terms, their errors."""

    def __init__(self, like: Tensor) -> None:
        self.dtype = like.dtype
        self.value, self.magnitude, self.errors, self.terms = torch.zeros(
            (4, *like.shape), dtype=torch.float64, device=like.device
        ).unbind()

    def add(self, value: Tensor, error: Tensor, seen: Tensor, at: tuple[int | slice | Tensor, ...]) -> None:
        shape = self.value[at].shape
        totals = (self.value, self.magnitude, self.errors, self.terms)
        for total, x in zip(totals, (value, value.abs(), error, seen.double()), strict=True):
            total[at] += x.sum_to_size(shape) if len(shape) == x.ndim else x.sum(1)

    def error(self, u: float) -> Tensor:
        error = self.errors + growth(self.terms) * u * (self.magnitude + self.errors)
        return error + unit_roundoff(self.dtype) * (self.value.abs() + error) + floor(self.dtype)
