"""Some rows of attention in float64, with their error bounds, over chunks of keys: memory does not grow with the sequence.

The derivation is that of `bounds`. Everything there is either elementwise, and belongs to a chunk, or a sum or maximum
over the keys of a row: a first walk over the keys gathers lse, maximum, visible keys and the uncertainty of the
denominator; a second one, now that each weight is known, sums the output and its errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.numerics.merge import NEG_INF, finite
from tilewise.numerics.oracle import Inputs, Piece, make_piece, spans
from tilewise.numerics.propagation import ForwardErrors, OutputSums, lse_error, out_error, summing_error
from tilewise.numerics.rounding import Arithmetic
from tilewise.problem import Problem

CHUNK = 1024
"""Keys taken at a time."""


class Rows(NamedTuple):
    """Query positions [M] of one head of one sequence; any positions in any order."""

    sequence: int
    head: int
    positions: Tensor


class ExactRows(NamedTuple):
    """float64: [M, Dv] and [M]."""

    out: Tensor
    lse: Tensor
    out_bound: Tensor
    lse_bound: Tensor


class _Totals(NamedTuple):
    """Of each row over all its keys, [1, M]."""

    lse: Tensor
    weight: _Weight
    top: Tensor
    keys: Tensor
    denominator: Tensor


class _Weight(NamedTuple):
    """Σ exp(logit) as exp(peak) · total, [1, M]: far from 0 its logarithm would have no digits for the number of keys."""

    peak: Tensor
    total: Tensor

    def plus(self, other: _Weight) -> _Weight:
        peak = torch.maximum(self.peak, other.peak)
        return _Weight(peak, self.total * _ratio(self.peak, peak) + other.total * _ratio(other.peak, peak))


def _ratio(low: Tensor, high: Tensor) -> Tensor:
    """exp(low - high); 1 where they are equal, infinite ones too."""
    return torch.where(low == high, 1.0, torch.exp(low - finite(high)))


class _Chunk(ForwardErrors):
    """A part of the keys, with the statistics of all of them."""

    def __init__(self, problem: Problem, piece: Piece, rounding: Arithmetic, totals: _Totals) -> None:
        super().__init__(problem, piece, rounding)
        self.totals = totals
        peak, total = totals.weight
        p = torch.exp(_masked(self) - finite(peak)[..., None]) / total.masked_fill(total == 0, 1.0)[..., None]
        w = p if piece.keep is None else p * piece.keep
        self.exact, self.out = self.exact._replace(lse=totals.lse, p=p, w=w), w @ piece.v

    @cached_property
    def top(self) -> Tensor:
        return self.totals.top

    @cached_property
    def summing(self) -> Tensor:
        return summing_error(self.totals.keys, self.rounding)


def _masked(errors: ForwardErrors) -> Tensor:
    return errors.exact.logit.masked_fill(~errors.piece.seen, NEG_INF)


@torch.no_grad()
def exact_rows(problem: Problem, inputs: Inputs, rows: Rows, rounding: Arithmetic | None = None) -> ExactRows:
    """The exact output and LSE of some rows, and how far from them a correct result may be."""
    rounding = rounding or Arithmetic.of(problem)
    totals = _totals(problem, inputs, rows, rounding)
    shape = (1, len(rows.positions), problem.head_dim_v)
    out, errors, seen = inputs.q.new_zeros((3, *shape), dtype=torch.float64).unbind()
    most = out.new_zeros((1, 1, problem.head_dim_v))
    kept = 1.0 / (1.0 - problem.dropout_p)
    # over the keys of the chunks so far: out = Σ w·v,  errors = Σ weight_error·|v|,  seen = Σ |v|,  most = max |v|
    for piece in _pieces(problem, inputs, rows):
        chunk = _Chunk(problem, piece, rounding, totals)
        size = piece.v.abs()
        out = out + torch.where(piece.seen.any(-1, keepdim=True), chunk.out, 0.0)
        errors = errors + chunk.weight_error @ size
        seen = seen + piece.seen.double() @ size
        most = torch.maximum(most, size.amax(-2, keepdim=True))
    bound = out_error(OutputSums(out, errors, seen, most), totals.denominator, kept, rounding)
    lse_bound = lse_error(totals.lse, totals.top, totals.denominator, rounding)
    factor = rounding.oracle_factor
    return ExactRows(out[0], totals.lse[0], factor * bound[0], factor * lse_bound[0])


def _totals(problem: Problem, inputs: Inputs, rows: Rows, rounding: Arithmetic) -> _Totals:
    """The first walk. ε of a weight is its own part plus 4u·top + 8u, the same for all keys and the sink of a row."""
    u = rounding.u
    peak, uncertain = inputs.q.new_full((2, 1, len(rows.positions)), NEG_INF, dtype=torch.float64).unbind()
    keys = torch.zeros_like(peak)
    weight = _Weight(peak, torch.zeros_like(peak))
    for piece in _pieces(problem, inputs, rows):
        part = ForwardErrors(problem, piece, rounding)
        raised = part.exact.logit + part.logit + 4 * u * part.exact.logit.abs()
        uncertain = torch.logaddexp(uncertain, torch.logsumexp(raised.masked_fill(~piece.seen, NEG_INF), dim=-1))
        logit = _masked(part)
        peak = logit.amax(-1)
        weight = weight.plus(_Weight(peak, torch.exp(logit - finite(peak)[..., None]).sum(-1)))
        keys = keys + piece.seen.sum(-1)
    if inputs.sinks is not None:
        sink = inputs.sinks[rows.head].double()
        weight = weight.plus(_Weight(sink, torch.ones_like(sink)))
        uncertain = torch.logaddexp(uncertain, sink + 4 * u * finite(sink).abs())
    lse, top = weight.peak + weight.total.log(), finite(weight.peak).abs()
    log_f = (uncertain - finite(lse) + 4 * u * top + 8 * u).clamp(min=0.0)  # −inf, nothing to be uncertain of, gives 0
    return _Totals(lse, weight, top, keys, log_f + summing_error(keys, rounding))


def _pieces(problem: Problem, inputs: Inputs, rows: Rows) -> Iterator[Piece]:
    """The rows against CHUNK keys at a time; the sink is left to the totals."""
    (span,) = spans(problem, inputs, (rows.sequence,))
    heads, length = slice(rows.head, rows.head + 1), span.lengths[1]
    for start in range(0, length, CHUNK):
        keys = range(start, min(start + CHUNK, length))
        yield make_piece(problem, inputs._replace(sinks=None), span, heads, rows.positions, keys)
