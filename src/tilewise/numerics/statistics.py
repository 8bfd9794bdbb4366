"""The statistics of a call in float64, and how far a correct one may be from them. `bounds` has the model of rounding.

Logits x, their errors e and the factors exp(±ε) of weights are those of the forward; A is the error of its sums.

    max logit   |Δ| ≤ max (e + 4u|x|)
    weights     |Δp| ≤ p · expm1(ε'), as in the backward, recomputed from the log-sum-exp
    key mass    their sum over the rows, and g(rows) · u of it
    entropy     log l - t / l with l = Σ w, t = Σ w y and y = x - m. Weights are off by exp(±(ε + A)), each y by e + 4u X, where
                X = |x| + |m| and m is the maximum or, since |x| ≤ scale · |q| |k|, at most that bound; l by exp(±D):
                |ΔH| ≤ D + Σ p |y| expm1(ε + A + D) + Σ p (e + 4u X) + 8u (|m| + |log l| + 1)
    its gradient  dS = -dH · P ∘ (x - mean), mean = lse - H: p as above, x - mean off by e + |Δlse| + |ΔH| + 4u (|x| + |mean|)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.numerics.bounds import Reduction
from tilewise.numerics.merge import NEG_INF, finite, softmax_with_sink
from tilewise.numerics.oracle import Inputs, Piece, bias_index, pieces, softmax
from tilewise.numerics.propagation import BackwardErrors, ForwardErrors, factor_error
from tilewise.numerics.rounding import Arithmetic, growth
from tilewise.problem import Problem


class RowStatistics(NamedTuple):
    """float64; of values, or of bounds on their errors."""

    max_logit: Tensor  # (B, Hq, M)
    entropy: Tensor  # (B, Hq, M)
    key_mass: Tensor  # (B, Hq, N)
    weights: Tensor  # (B, Hq, M, N), keys counted within the sequence

    @classmethod
    def zeros(cls, inputs: Inputs) -> RowStatistics:
        (b, h, m, _), n = inputs.q.shape, inputs.k.shape[2]

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=inputs.q.device)

        return cls(zeros(b, h, m), zeros(b, h, m), zeros(b, h, n), zeros(b, h, m, n))

    def put(self, piece: Piece, values: tuple[Tensor, ...]) -> None:
        batch, _, keys = piece.cols
        max_logit, entropy, key_mass, weights = values
        self.max_logit[piece.rows], self.entropy[piece.rows] = max_logit, entropy
        self.key_mass[batch, piece.heads, keys] = key_mass
        self.weights[(*piece.rows, slice(weights.shape[-1]))] = weights


def entropy_of(problem: Problem, piece: Piece) -> Tensor:
    """[H, M], differentiable: of the softmax without the sink."""
    logit = softmax(problem, piece).logit.masked_fill(~piece.seen, NEG_INF)
    p, _, _ = softmax_with_sink(logit)
    return -(p * torch.where(p > 0, p, 1.0).log()).sum(-1)


def exact(problem: Problem, inputs: Inputs) -> RowStatistics:
    """The statistics of the quantised inputs."""
    found = RowStatistics.zeros(inputs)
    for piece in pieces(problem, inputs):
        state = softmax(problem, piece)
        logit = state.logit.masked_fill(~piece.seen, NEG_INF)
        most = logit.amax(-1) if logit.shape[-1] else torch.full_like(state.lse, NEG_INF)
        found.put(piece, (most, entropy_of(problem, piece), state.p.sum(-2), state.p))
    return found


def entropy_gradients(problem: Problem, inputs: Inputs, dentropy: Tensor) -> dict[str, Tensor]:
    """The gradients of Σ dentropy · entropy by q, k and, if there is one, the bias."""
    names = [name for name in ("q", "k", "bias") if getattr(inputs, name) is not None]
    with torch.enable_grad():
        leaves = {name: getattr(inputs, name).detach().double().requires_grad_() for name in names}
        total = sum(
            (dentropy[piece.rows].double() * entropy_of(problem, piece)).sum()
            for piece in pieces(problem, inputs._replace(**leaves))
        )
        grads = torch.autograd.grad(total, list(leaves.values()))  # type: ignore[arg-type]
    return dict(zip(names, grads, strict=True))


class EntropyErrors:
    """The exact entropy of a piece and bounds on the errors of its steps. The piece has no sink."""

    def __init__(self, ahead: ForwardErrors) -> None:
        piece, r = ahead.piece, ahead.rounding
        self.ahead, self.logit = ahead, ahead.exact.logit
        p, lse = ahead.exact.p, finite(ahead.exact.lse)
        self.mean = (p * self.logit).sum(-1)  # [H, M]
        self.entropy = torch.where(piece.seen.any(-1), lse - self.mean, 0.0)
        q_norm, k_norm = piece.q.norm(dim=-1), piece.k.norm(dim=-1)
        most = k_norm.amax(-1, keepdim=True) if k_norm.shape[-1] else torch.zeros_like(q_norm[:, :1])
        m = torch.maximum(ahead.top, abs(ahead.problem.scale) * q_norm * most)
        size = self.logit.abs() + m[..., None]
        off = ahead.logit + 4 * r.u * size
        self.logit_error = torch.where(piece.seen, off, 0.0)
        spread = factor_error(p * size, ahead.exponent + (ahead.summing + ahead.denominator)[..., None])
        self.error = ahead.denominator + (spread + p * off).sum(-1) + 8 * r.u * (m + (lse - m).abs() + 1)
        self.error = torch.where(piece.seen.any(-1), self.error, 0.0)


@torch.no_grad()
def bounds(problem: Problem, inputs: Inputs) -> RowStatistics:
    """Bounds on the errors of `exact`'s values."""
    rounding = Arithmetic.of(problem)
    found, factor = RowStatistics.zeros(inputs), rounding.oracle_factor
    for piece, alone in zip(pieces(problem, inputs), pieces(problem, inputs._replace(sinks=None)), strict=True):
        ahead = ForwardErrors(problem, piece, rounding)
        off = torch.where(piece.seen, ahead.logit + 4 * rounding.u * ahead.exact.logit.abs(), 0.0)
        most = off.amax(-1) if off.shape[-1] else torch.zeros_like(ahead.exact.lse)
        zero = torch.zeros_like(ahead.out)
        exponent = BackwardErrors(ahead, zero, zero[..., 0]).p_exponent
        p_error = factor_error(ahead.exact.p, exponent + 2 * rounding.u) + rounding.p_floor * piece.seen.double()
        rows = growth(piece.seen.sum(-2).double())
        mass = p_error.sum(-2) + rounding.u * rows * (ahead.exact.p + p_error).sum(-2)
        entropy = EntropyErrors(ForwardErrors(problem, alone, rounding)).error
        found.put(piece, tuple(factor * x for x in (most, entropy, mass, p_error)))
    return found


@torch.no_grad()
def entropy_gradient_bounds(problem: Problem, inputs: Inputs, dentropy: Tensor) -> dict[str, Tensor]:
    """Bounds on the errors of the gradients by q, k and the bias where nothing but `dentropy` comes back."""
    rounding = Arithmetic.of(problem)
    inputs = inputs._replace(sinks=None)
    found = {name: torch.zeros_like(getattr(inputs, name), dtype=torch.float64) for name in "qk"}
    dbias = None if inputs.bias is None else Reduction(inputs.bias)
    for piece in pieces(problem, inputs):
        ahead = ForwardErrors(problem, piece, rounding)
        own, zero = EntropyErrors(ahead), torch.zeros_like(ahead.out)
        behind = BackwardErrors(ahead, zero, zero[..., 0])
        factor = dentropy[piece.rows].double()[..., None]
        gap = torch.where(piece.seen, own.logit - own.mean[..., None], 0.0)
        moved = own.logit_error + (ahead.lse_error + own.error + 4 * rounding.u * own.mean.abs())[..., None]
        moved = moved + 4 * rounding.u * (own.logit.abs() + gap.abs())
        p_error = factor_error(ahead.exact.p, behind.p_exponent + 2 * rounding.u) + rounding.p_floor * piece.seen.double()
        behind.ds = -factor * ahead.exact.p * gap
        behind.ds_error = factor.abs() * (p_error * (gap.abs() + moved) + ahead.exact.p * moved)
        found["q"][piece.rows] = rounding.oracle_factor * behind.dq()
        found["k"][piece.cols] = rounding.oracle_factor * behind.dk()
        if dbias is not None:
            rows, cols = (slice(length) for length in piece.seen.shape[1:])
            at = bias_index(dbias.value, piece.sequence, piece.heads, rows, cols)
            dbias.add(behind.ds, behind.ds_error + rounding.weight * behind.ds.abs(), piece.seen, at)
    if dbias is not None:
        found["bias"] = rounding.oracle_factor * dbias.error(rounding.u)
    return found
