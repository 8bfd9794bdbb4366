"""Attention tile by tile in plain torch: the readable statement of the algorithm.

Query blocks outside, key blocks inside. For one query block the state over the keys seen so far is

    m = max s,   l = Σ exp(s - m),   acc = Σ exp(s - m) v

and each new tile may raise m, which rescales l and acc by alpha = exp(m_old - m_new). One division at the end. Nothing of
size N × N exists: the backward recomputes each tile's probabilities from the saved log-sum-exp, p = exp(s - lse).

EMPTY tiles are never touched, FULL ones never masked. It does everything the semantics say, on any device torch has; the
other backends do the same with kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import (
    Backend,
    BackwardInputs,
    Direction,
    EntropyCotangent,
    Grads,
    Inputs,
    Jvp,
    Statistics,
    Tangents,
    Verdict,
    empty_lse,
    empty_out,
    empty_statistics,
    rounded,
    row_products,
    sink_gradient,
    sink_gradient_tangent,
)
from tilewise.backends.sequence import Range, SequenceView, cut_tile, sequences, sweep_statistics
from tilewise.backends.tiled import plan
from tilewise.backends.tiled.statistics import RowWatch, Step
from tilewise.backends.tiled.sums import Sum, accumulator, key_sums
from tilewise.numerics.merge import finite, join_sink
from tilewise.problem import Problem


def forward_rows(seq: SequenceView, i: int, q: Range, watch: RowWatch | None = None) -> tuple[Tensor, Tensor]:
    """Query block `i` against every key block it sees: normalised output [B, Hq, M, Dv] and LSE [B, Hq, M]."""
    problem, inputs, rows = seq.problem, seq.inputs, q[1] - q[0]
    q_tile = seq.load(inputs.q, q)  # [B, Hq, M, D]
    column = (seq.batch, seq.heads, rows, 1)
    m = q_tile.new_full(column, float("-inf"))
    l = accumulator(q_tile.new_zeros(column), problem)
    acc = accumulator(q_tile.new_zeros((*column[:3], inputs.v.shape[-1])), problem)
    # over the keys visited so far: m = max s,  l = Σ exp(s - m),  acc = Σ exp(s - m) v
    for _, k, kind in seq.key_blocks(i):
        tile = seq.scores(q_tile, q, k, kind)
        m_new = torch.maximum(m, tile.s.amax(dim=-1, keepdim=True))
        alpha = torch.exp(m - finite(m_new))
        p = torch.exp(tile.s - finite(m_new))  # [B, Hq, M, N]
        if watch is not None:
            watch.see(Step(tile.s, p, m, m_new, alpha, l.total()), k)
        l.scale(alpha)
        l.add(seq.row_sum(p))
        v_tile = seq.load(inputs.v, k, tile.seen)  # [B, Hk, N, Dv]
        acc.scale(alpha)
        acc.add(seq.unfold(seq.product(seq.fold(seq.dropped(p, q, k)), v_tile), rows))
        m = m_new
    total = l.total()
    out = acc.total() / total.masked_fill(total == 0, 1.0)
    lse = (finite(m) + total.log()).squeeze(-1)  # log 0 = -inf marks a row that saw no key
    if watch is not None:
        watch.finish(m, total)
    return (out, lse) if inputs.sinks is None else join_sink(out, lse, inputs.sinks)


def row_deltas(seq: SequenceView, dout: Tensor, lse: Tensor) -> Tensor:
    """rowsum(dO ∘ O) [B, Hq, M] as rowsum(P ∘ dP): O was rounded when it was stored, P and dP are recomputed."""
    delta = torch.zeros_like(lse)
    for i, q in seq.query_blocks():
        rows, (q_tile, do_tile) = slice(*q), (seq.load(x, q) for x in (seq.inputs.q, dout))
        for _, k, kind in seq.key_blocks(i):
            tile = seq.scores(q_tile, q, k, kind)
            p = torch.exp(tile.s - finite(lse[:, :, rows]).unsqueeze(-1))
            dp = seq.fold(tile.rows(do_tile)) @ seq.load(seq.inputs.v, k, tile.seen).mT
            delta[:, :, rows] += (p * seq.dropped(seq.unfold(dp, q[1] - q[0]), q, k)).sum(dim=-1)
    return delta


class Cotangents(NamedTuple):
    """What the backward of one sequence starts from."""

    dout: Tensor  # [B, Hq, M, Dv]
    lse: Tensor  # [B, Hq, M]
    delta: Tensor  # [B, Hq, M]: rowsum(dO ∘ O) - dLSE, so that dS = P ∘ (dP - delta)
    entropy: EntropyCotangent | None = None


def backward_sequence(
    seq: SequenceView, given: Cotangents, dq: Tensor, dbias: Tensor | None
) -> tuple[list[Sum], list[Sum]]:
    """Recompute each tile's P from the LSE and push the gradients through it.

    dQ and dBias are filled in; dK and dV come back as running sums, one for each key block.
    """
    problem, inputs = seq.problem, seq.inputs
    dk, dv = key_sums(seq)
    for i, q in seq.query_blocks():
        rows = q[1] - q[0]
        q_tile, dout = seq.load(inputs.q, q), seq.load(given.dout, q)
        lse = finite(given.lse[:, :, slice(*q)].to(seq.dtype)).unsqueeze(-1)
        delta = given.delta[:, :, slice(*q)].unsqueeze(-1)
        dq_tile = accumulator(torch.zeros_like(q_tile), problem)
        for j, k, kind in seq.key_blocks(i):
            tile = seq.scores(q_tile, q, k, kind)
            k_tile, v_tile = seq.load(inputs.k, k, tile.seen), seq.load(inputs.v, k, tile.seen)
            do_tile = seq.fold(tile.rows(dout))  # [B, Hk, G·M, Dv]
            p = torch.exp(tile.s - lse)  # [B, Hq, M, N]
            dv[j].add(seq.product(seq.fold(seq.dropped(p, q, k)).mT, do_tile))
            dp = seq.dropped(seq.unfold(seq.product(do_tile, v_tile.mT), rows), q, k)
            if given.entropy is not None:
                dentropy, mean = (x[:, :, slice(*q)].unsqueeze(-1) for x in given.entropy)
                dp = dp - dentropy * torch.where(tile.s == float("-inf"), 0.0, tile.s - mean)
            ds = p * (dp - tile.rows(delta))
            if dbias is not None:
                part = cut_tile(dbias, q, k)
                part += ds.sum_to_size(part.shape)
            if tile.capped is not None:
                ds = ds * (1.0 - (tile.capped / problem.softcap) ** 2)
            ds = ds * problem.scale
            dq_tile.add(seq.unfold(seq.product(seq.fold(ds), k_tile), rows))
            dk[j].add(seq.product(seq.fold(ds).mT, seq.fold(tile.rows(q_tile))))
        dq[:, :, slice(*q)] = rounded(dq_tile.total(), dq.dtype)
    return dk, dv


def write_keys(seq: SequenceView, gradients: tuple[Tensor, Tensor], sums: tuple[list[Sum], list[Sum]]) -> None:
    """dK and dV of a sequence from their sums by key block."""
    for gradient, parts in zip(gradients, sums, strict=True):
        for j, part in enumerate(parts):
            seq.cut.keys(gradient)[:, :, slice(*seq.key_block(j))] = rounded(part.total(), gradient.dtype)


class Tiled(Backend):
    """See the module's text."""

    name = "tiled"
    invariant = plan.INVARIANT

    def usable(self, device: str) -> Verdict:
        return Verdict.of(None if device in ("cpu", "cuda") else f"runs on cpu and cuda, not on {device}")

    def supports(self, problem: Problem, inputs: Inputs | None = None, *, backward: bool = False) -> Verdict:
        return plan.supports(problem)

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
        out, lse, _ = self.statistics(problem, inputs)
        return out, lse

    def statistics(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Statistics]:
        out, lse = empty_out(inputs.q, problem.head_dim_v), empty_lse(inputs.q, problem.precision)
        stats = empty_statistics(problem, lse)
        for seq in sequences(problem, inputs, plan.tiles(problem)["forward"].sizes):
            own_out, own_lse = seq.cut.queries(out), seq.cut.queries(lse)
            for i, q in seq.query_blocks():
                watch = RowWatch(problem) if problem.stats else None
                rows, row_lse = forward_rows(seq, i, q, watch)
                own_out[:, :, slice(*q)] = rounded(rows, out.dtype)
                own_lse[:, :, slice(*q)] = row_lse.to(lse.dtype)
                if watch is not None:
                    watch.store(row_lse, Statistics(*(None if x is None else seq.cut.queries(x) for x in stats)), q)
        sweep_statistics(problem, inputs, lse, stats._replace(weights=None, indices=None))
        return out, lse, stats

    def backward(self, problem: Problem, inputs: Inputs, given: BackwardInputs) -> Grads:
        return self._backward(problem, inputs, given, None)

    def entropy_backward(
        self, problem: Problem, inputs: Inputs, given: BackwardInputs, entropy: EntropyCotangent
    ) -> Grads:
        return self._backward(problem, inputs, given, entropy)

    def _backward(
        self, problem: Problem, inputs: Inputs, given: BackwardInputs, entropy: EntropyCotangent | None
    ) -> Grads:
        out, lse, dout, dlse, needs = given
        if problem.widened:
            delta = torch.empty_like(lse)
            for seq in sequences(problem, inputs, plan.tiles(problem)["backward"].sizes):
                seq.cut.queries(delta)[:] = row_deltas(seq, *map(seq.cut.queries, (dout, lse)))
        else:
            delta = row_products(dout, out, lse.dtype)
        if dlse is not None:
            delta = delta - dlse
        dq, dk, dv = (torch.zeros_like(x) for x in inputs[:3])
        dbias = torch.zeros_like(inputs.bias, dtype=lse.dtype) if needs.dbias and inputs.bias is not None else None
        for seq in sequences(problem, inputs, plan.tiles(problem)["backward"].sizes):
            cut = seq.cut
            own_entropy = None if entropy is None else EntropyCotangent(*map(cut.queries, entropy))
            cotangents = Cotangents(cut.queries(dout), cut.queries(lse), cut.queries(delta), entropy=own_entropy)
            own_dbias = None if dbias is None else cut.scores(dbias)
            sums = backward_sequence(seq, cotangents, cut.queries(dq), own_dbias)
            write_keys(seq, (dk, dv), sums)
        return Grads(
            dq if needs.dq else None,
            dk if needs.dk else None,
            dv if needs.dv else None,
            None if dbias is None or inputs.bias is None else rounded(dbias, inputs.bias.dtype),
            sink_gradient(inputs.sinks, lse, delta) if needs.dsinks and inputs.sinks is not None else None,
        )

    def derives(self, problem: Problem, inputs: Inputs | None = None, *, derivative: str) -> Verdict:
        return plan.derives(problem, derivative=derivative)

    def jvp(self, problem: Problem, inputs: Inputs, tangents: Tangents) -> Jvp:
        from tilewise.backends.tiled.derivatives import cut_tangents, jvp_rows  # a plain call needs none

        out, lse = empty_out(inputs.q, problem.head_dim_v), empty_lse(inputs.q, problem.precision)
        result = Jvp(out, lse, torch.empty_like(out), torch.empty_like(lse))
        for seq in sequences(problem, inputs, plan.derivative_tiles(problem, None, "jvp")["jvp"].sizes):
            own = [seq.cut.queries(x) for x in result]
            for i, q in seq.query_blocks():
                for to, rows in zip(own, jvp_rows(seq, i, q, cut_tangents(seq, tangents)), strict=True):
                    to[:, :, slice(*q)] = rounded(rows, to.dtype)
        return result

    def double_backward(self, problem: Problem, inputs: Inputs, given: BackwardInputs, direction: Direction) -> Grads:
        from tilewise.backends.tiled.derivatives import (
            MovingRows,
            cut_tangents,
            double_backward_sequence,
            moving_deltas,
        )

        out, lse, dout, dlse, needs = given
        tangents, out_t, lse_t = direction
        assert out_t is not None and lse_t is not None
        blocks = plan.derivative_tiles(problem, None, "double_backward")["double_backward"].sizes
        delta, delta_t = (row_products(dout, x, lse.dtype) for x in (out, out_t))
        if problem.widened:
            for seq in sequences(problem, inputs, blocks):
                rows = MovingRows(*map(seq.cut.queries, (dout, lse, lse_t, delta, delta_t)))
                sums = moving_deltas(seq, rows, cut_tangents(seq, tangents))
                seq.cut.queries(delta)[:], seq.cut.queries(delta_t)[:] = sums
        if dlse is not None:
            delta = delta - dlse
        moving = MovingRows(dout, lse, lse_t, delta, delta_t)
        dq, dk, dv = (torch.zeros_like(x) for x in inputs[:3])
        dbias = torch.zeros_like(inputs.bias, dtype=lse.dtype) if needs.dbias and inputs.bias is not None else None
        for seq in sequences(problem, inputs, blocks):
            cut, rows = seq.cut, MovingRows(*map(seq.cut.queries, moving))
            own_dbias = None if dbias is None else cut.scores(dbias)
            parts = double_backward_sequence(seq, rows, cut_tangents(seq, tangents), cut.queries(dq), own_dbias)
            write_keys(seq, (dk, dv), parts)
        sinks = inputs.sinks if needs.dsinks else None
        return Grads(
            dq if needs.dq else None,
            dk if needs.dk else None,
            dv if needs.dv else None,
            None if dbias is None or inputs.bias is None else rounded(dbias, inputs.bias.dtype),
            None if sinks is None else sink_gradient_tangent(sinks, tangents.sinks, moving[1:]),
        )


backend = Tiled()
