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

from tilewise.masks import MaskProgram, MaskShape, allowed
from tilewise.numerics.merge import NOTHING, finite
from tilewise.numerics.oracle import Piece, Tensors, bias_part
from tilewise.numerics.philox import drop_threshold, philox
from tilewise.numerics.propagation import RESCALE_EVERY, ForwardErrors, OutputSums, out_error
from tilewise.numerics.rounding import Arithmetic, growth
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


class Sequence(NamedTuple):
    """Where one sequence lies in the tensors of a call."""

    side: int  # where it is along the batch
    q_start: int
    k_start: int
    queries: int
    keys: int
    program: MaskProgram


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

    def share(self, whole: _Weight) -> Tensor:
        """What part of `whole` it is; 0 of nothing."""
        total = whole.total.masked_fill(whole.total == 0, 1.0)
        return self.total * _ratio(self.peak, whole.peak) / total


def _ratio(low: Tensor, high: Tensor) -> Tensor:
    """exp(low - high); 1 where they are equal, infinite ones too."""
    return torch.where(low == high, 1.0, torch.exp(low - finite(high)))


def _weight(logit: Tensor, seen: Tensor) -> _Weight:
    """Of the visible keys of a chunk."""
    logit = logit.masked_fill(~seen, NOTHING)
    peak = logit.amax(-1)
    return _Weight(peak, torch.exp(logit - finite(peak)[..., None]).sum(-1))


class _Chunk(ForwardErrors):
    """A part of the keys, with the statistics of all of them."""

    def __init__(self, problem: Problem, piece: Piece, rounding: Arithmetic, totals: _Totals) -> None:
        super().__init__(problem, piece, rounding)
        self.totals = totals
        own = _weight(self.exact.logit, piece.seen)
        share = own.share(totals.weight)[..., None]  # [1, M, 1], of the whole denominator
        self.exact = self.exact._replace(lse=totals.lse, p=self.exact.p * share, w=self.exact.w * share)
        self.out = self.out * share

    @cached_property
    def top(self) -> Tensor:
        return self.totals.top

    @cached_property
    def summing(self) -> Tensor:
        return _summing(self.totals.keys, self.rounding)


def locate(problem: Problem, inputs: Tensors, b: int) -> Sequence:
    """Sequence b of a plain or of a packed batch."""
    if not problem.varlen:
        return Sequence(b, 0, 0, problem.seqlen_q, problem.seqlen_k, problem.program)
    assert inputs.cu_q is not None and inputs.cu_k is not None
    q0, q1 = inputs.cu_q[b : b + 2].tolist()
    k0, k1 = inputs.cu_k[b : b + 2].tolist()
    return Sequence(0, q0, k0, q1 - q0, k1 - k0, problem.program.for_sequence(b, q0, q1, k0, k1))


@torch.no_grad()
def exact_rows(problem: Problem, inputs: Tensors, rows: Rows, rounding: Arithmetic | None = None) -> ExactRows:
    """The exact output and LSE of some rows, and how far from them a correct result may be."""
    rounding = rounding or Arithmetic.of(problem)
    where = locate(problem, inputs, rows.sequence)
    totals = _totals(problem, inputs, rows, where, rounding)
    shape = (1, len(rows.positions), problem.head_dim_v)
    out, errors, seen = inputs.q.new_zeros((3, *shape), dtype=torch.float64).unbind()
    most = out.new_zeros((1, 1, problem.head_dim_v))
    kept = 1.0 / (1.0 - problem.dropout_p)
    # over the keys of the chunks so far: out = Σ w·v,  errors = Σ weight_error·|v|,  seen = Σ |v|,  most = max |v|
    for piece in _pieces(problem, inputs, rows, where):
        chunk = _Chunk(problem, piece, rounding, totals)
        size = piece.v.abs()
        out = out + torch.where(piece.seen.any(-1, keepdim=True), chunk.out, 0.0)
        errors = errors + chunk.weight_error @ size
        seen = seen + piece.seen.double() @ size
        most = torch.maximum(most, size.amax(-2, keepdim=True))
    bound = out_error(OutputSums(out, errors, seen, most), totals.denominator, kept, rounding)
    lse_bound = totals.denominator + rounding.u * (4 * (finite(totals.lse).abs() + totals.top) + 8)
    lse_bound = torch.where(totals.lse == NOTHING, 0.0, lse_bound)
    share = rounding.oracle_share
    return ExactRows(out[0], totals.lse[0], share * bound[0], share * lse_bound[0])


def _totals(problem: Problem, inputs: Tensors, rows: Rows, where: Sequence, rounding: Arithmetic) -> _Totals:
    """The first walk. ε of a weight is its own part plus 4u·top + 8u, the same for all keys and the sink of a row."""
    u = rounding.u
    lse, peak, uncertain = inputs.q.new_full((3, 1, len(rows.positions)), NOTHING, dtype=torch.float64).unbind()
    keys = torch.zeros_like(lse)
    weight = _Weight(peak, torch.zeros_like(peak))
    for piece in _pieces(problem, inputs, rows, where):
        part = ForwardErrors(problem, piece, rounding)
        logit = part.exact.logit
        raised = (logit + part.logit + 4 * u * logit.abs()).masked_fill(~piece.seen, NOTHING)
        lse = torch.logaddexp(lse, part.exact.lse)
        uncertain = torch.logaddexp(uncertain, torch.logsumexp(raised, dim=-1))
        weight = weight.plus(_weight(logit, piece.seen))
        keys = keys + piece.seen.sum(-1)
    if inputs.sinks is not None:
        sink = inputs.sinks[rows.head].double()
        lse, weight = torch.logaddexp(lse, sink), weight.plus(_Weight(sink, torch.ones_like(sink)))
        uncertain = torch.logaddexp(uncertain, sink + 4 * u * finite(sink).abs())
    top = finite(weight.peak).abs()
    log_f = (uncertain - finite(lse) + 4 * u * top + 8 * u).clamp(min=0.0)  # −inf, nothing to be uncertain of, gives 0
    return _Totals(lse, weight, top, keys, log_f + _summing(keys, rounding))


def _summing(keys: Tensor, rounding: Arithmetic) -> Tensor:
    return rounding.u * (growth(keys) + 6 * growth((keys / RESCALE_EVERY).ceil()))


def _pieces(problem: Problem, inputs: Tensors, rows: Rows, where: Sequence) -> Iterator[Piece]:
    """The rows against CHUNK keys at a time; the sink is left to the totals."""
    b, h, positions = rows
    kv = h // problem.group
    program = _rows_of(where.program, positions)
    shape = MaskShape(1 if problem.varlen else problem.batch, problem.heads, where.queries, where.keys)
    q = inputs.q[where.side, h, where.q_start + positions].double()[None]  # [1, M, D]
    for start in range(0, where.keys, CHUNK):
        stop = min(start + CHUNK, where.keys)
        cols = slice(where.k_start + start, where.k_start + stop)
        seen = _visible(program, shape, positions, start, stop, b, h)  # [M, N]
        bias = alibi = keep = None
        if inputs.bias is not None:
            part = inputs.bias[bias_part(inputs.bias, b, slice(h, h + 1), where.queries, where.keys)]
            part = part[:, positions] if part.shape[1] > 1 else part
            bias = (part[:, :, start:stop] if part.shape[2] > 1 else part).double()
            seen = seen & (bias[0] != NOTHING)
        if inputs.alibi is not None:
            slope = inputs.alibi[b if inputs.alibi.shape[0] > 1 else 0, h].double()
            keys = torch.arange(start, stop, device=q.device)
            alibi = -slope * (positions[:, None] + (where.keys - where.queries) - keys).abs().double()[None]
        if problem.dropout_p:
            assert inputs.seed is not None
            keep = _kept(inputs.seed, problem.dropout_p, rows, start, stop)[None].double() / (1.0 - problem.dropout_p)
        reached = seen.any(-2)[:, None]  # [N, 1]
        k, v = (torch.where(reached, x[where.side, kv, cols].double(), 0.0)[None] for x in (inputs.k, inputs.v))
        yield Piece(
            sequence=b,
            heads=slice(h, h + 1),
            kv_heads=slice(kv, kv + 1),
            rows=(where.side, slice(h, h + 1), slice(0, len(positions))),
            cols=(where.side, slice(kv, kv + 1), cols),
            q=torch.where(seen.any(-1)[:, None], q, 0.0),
            k=k,
            v=v,
            seen=seen[None],
            bias=bias,
            alibi=alibi,
            sinks=None,
            keep=keep,
        )


def _rows_of(program: MaskProgram, positions: Tensor) -> MaskProgram:
    """The program with only these rows of what it holds for each query."""
    tensors: list[Tensor] = []
    for term in program.terms():
        for kind, _, given in term:
            held = [torch.as_tensor(t, device=positions.device) for t in given]
            if kind.is_documents:
                held[0] = held[0][:, positions]
            elif kind.is_dense and held[0].shape[2] > 1:
                held[0] = held[0][:, :, positions]
            tensors += held
    return MaskProgram(program.structure, program.ints, tuple(tensors))


def _visible(
    program: MaskProgram, shape: MaskShape, positions: Tensor, start: int, stop: int, b: int, h: int
) -> Tensor:
    """Which of the keys [start, stop) each row sees by the mask: bool [M, N]."""
    # `allowed` asks for the positions of the queries, then for those of the keys
    vectors = iter((positions, torch.arange(start, stop, device=positions.device)))
    tile = allowed(program, shape, (0, len(positions)), (start, stop), lambda lo, hi: next(vectors))
    size = (len(positions), stop - start)
    if tile is None:
        return torch.ones(size, dtype=torch.bool, device=positions.device)
    picked: Tensor = tile[b if tile.shape[0] > 1 else 0, h if tile.shape[1] > 1 else 0]
    return picked.expand(size)


def _kept(seed: Tensor, p: float, rows: Rows, start: int, stop: int) -> Tensor:
    """Which weights survive dropout: bool [M, N]."""
    device = rows.positions.device
    first, last = start // 4, -(-stop // 4)
    counter = (
        torch.arange(first, last, device=device),
        rows.positions[:, None],
        torch.full((), rows.head, dtype=torch.int64, device=device),
        torch.full((), rows.sequence, dtype=torch.int64, device=device),
    )
    kept = torch.stack([word >= drop_threshold(p) for word in philox(counter, seed.to(device))], dim=-1)
    return kept.flatten(-2)[:, start - 4 * first : stop - 4 * first]
