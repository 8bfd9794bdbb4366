"""JVP and double backward tile by tile: the formulas of docs/derivatives.md, in their letters.

The JVP is the forward's loop with two more sums, Σ p s_t and Σ p (s_t v + v_t), which are rescaled with the others. The double
backward is the backward's loop with the derivative of every step beside it. A tangent that is None is zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import Jvp, Tangents, rounded, sink_weight
from tilewise.backends.sequence import Range, SequenceView, Tile, cut_tile
from tilewise.backends.tiled.sums import Sum, accumulator, key_sums
from tilewise.numerics.merge import finite, join_sink


class ScoreTangents(NamedTuple):
    """How the scores of one tile move."""

    z_t: Tensor | None  # [B, Hq, M, N]: before softcap; None where q and k stay
    s_t: Tensor | None  # after softcap and bias; 0 where masked; None where all stay
    slope: Tensor | None  # cap'; None without softcap


def cut_tangents(seq: SequenceView, tangents: Tangents) -> Tangents:
    """What one sequence has of the tangents."""
    q, k, v, bias, sinks = tangents
    return Tangents(
        None if q is None else seq.cut.queries(q),
        None if k is None else seq.cut.keys(k),
        None if v is None else seq.cut.keys(v),
        None if bias is None else seq.cut.scores(bias),
        sinks,
    )


def score_tangents(
    seq: SequenceView, tile: Tile, q_tile: Tensor, tangents: Tangents, q: Range, k: Range
) -> ScoreTangents:
    """Z_t = scale · (Q_t Kᵀ + Q K_tᵀ) and S_t = cap'(Z) ∘ Z_t + b_t over one tile."""
    rows = q[1] - q[0]
    z_t = None
    if tangents.q is not None:
        q_t = seq.fold(tile.rows(seq.load(tangents.q, q)))
        z_t = seq.product(q_t, seq.load(seq.inputs.k, k, tile.seen).mT)  # [B, Hk, G·M, N]
    if tangents.k is not None:
        by_k = seq.product(seq.fold(tile.rows(q_tile)), seq.load(tangents.k, k, tile.seen).mT)
        z_t = by_k if z_t is None else z_t + by_k
    slope = None if tile.capped is None else 1.0 - (tile.capped / seq.problem.softcap) ** 2
    s_t = None
    if z_t is not None:
        z_t = seq.unfold(z_t, rows) * seq.problem.scale
        s_t = z_t if slope is None else slope * z_t
    if tangents.bias is not None:
        bias_t = cut_tile(tangents.bias, q, k).to(seq.dtype)
        s_t = bias_t.expand_as(tile.s) if s_t is None else s_t + bias_t
    if s_t is not None and tile.seen is not None:
        s_t = torch.where(tile.s == float("-inf"), 0.0, s_t)
    return ScoreTangents(z_t, s_t, slope)


def jvp_rows(seq: SequenceView, i: int, q: Range, tangents: Tangents) -> Jvp:
    """Query block `i` against every key block it sees: output, LSE and their derivatives."""
    problem, inputs, rows = seq.problem, seq.inputs, q[1] - q[0]
    q_tile = seq.load(inputs.q, q)  # [B, Hq, M, D]
    column = (seq.batch, seq.heads, rows, 1)
    m = q_tile.new_full(column, float("-inf"))
    l, l_t = (accumulator(q_tile.new_zeros(column), problem) for _ in range(2))
    acc, acc_t = (accumulator(q_tile.new_zeros((*column[:3], inputs.v.shape[-1])), problem) for _ in range(2))
    # over the keys visited so far, with p = exp(s - m):
    # m = max s,  l = Σ p,  acc = Σ p v,  l_t = Σ p s_t,  acc_t = Σ p (s_t v + v_t)
    for _, k, kind in seq.key_blocks(i):
        tile = seq.scores(q_tile, q, k, kind)
        s_t = score_tangents(seq, tile, q_tile, tangents, q, k).s_t
        m_new = torch.maximum(m, tile.s.amax(dim=-1, keepdim=True))
        alpha = torch.exp(m - finite(m_new))
        p = torch.exp(tile.s - finite(m_new))  # [B, Hq, M, N]
        for running in (l, l_t, acc, acc_t):
            running.scale(alpha)
        l.add(seq.row_sum(p))
        v_tile = seq.load(inputs.v, k, tile.seen)  # [B, Hk, N, Dv]
        w = seq.dropped(p, q, k)
        acc.add(seq.unfold(seq.product(seq.fold(w), v_tile), rows))
        if s_t is not None:
            l_t.add(seq.row_sum(p * s_t))
            acc_t.add(seq.unfold(seq.product(seq.fold(w * s_t), v_tile), rows))
        if tangents.v is not None:
            v_t = seq.load(tangents.v, k, tile.seen)
            acc_t.add(seq.unfold(seq.product(seq.fold(w), v_t), rows))
        m = m_new
    total = l.total()
    divisor = total.masked_fill(total == 0, 1.0)
    out, out_t, lse_t = acc.total() / divisor, acc_t.total() / divisor, (l_t.total() / divisor).squeeze(-1)
    lse = (finite(m) + total.log()).squeeze(-1)  # log 0 = -inf marks a row that saw no key
    if inputs.sinks is not None:
        own = lse
        out, lse = join_sink(out, lse, inputs.sinks)
        share = torch.exp(own - finite(lse))  # what the keys keep of the weight
        out_t, lse_t = out_t * share.unsqueeze(-1), lse_t * share
        if tangents.sinks is not None:
            lse_t = lse_t + sink_weight(inputs.sinks, lse) * tangents.sinks.to(lse.dtype)[:, None]
    return Jvp(out, lse, out_t - lse_t.unsqueeze(-1) * out, lse_t)


class MovingRows(NamedTuple):
    """What the double backward knows of its rows, each [B, Hq, M] but dout."""

    dout: Tensor  # [B, Hq, M, Dv]
    lse: Tensor
    lse_t: Tensor
    delta: Tensor  # rowsum(dO ∘ O) - dL
    delta_t: Tensor  # rowsum(dO ∘ O_t)

    def at(self, q: Range, dtype: torch.dtype) -> list[Tensor]:
        """lse, lse_t, delta and delta_t of a block of queries, [B, Hq, M, 1]."""
        return [x[:, :, slice(*q)].to(dtype).unsqueeze(-1) for x in self[1:]]


class MovingTile(NamedTuple):
    """One tile of the backward and how it moves, each [B, Hq, M, N]."""

    p: Tensor
    p_t: Tensor
    dp: Tensor  # after dropout
    dp_t: Tensor | None
    scores: ScoreTangents


def moving_tile(
    seq: SequenceView, tile: Tile, q_tile: Tensor, given: MovingRows, tangents: Tangents, q: Range, k: Range
) -> MovingTile:
    """P, dP and their derivatives, recomputed from the log-sum-exp and its derivative."""
    rows = q[1] - q[0]
    lse, lse_t, _, _ = given.at(q, seq.dtype)
    scores = score_tangents(seq, tile, q_tile, tangents, q, k)
    p = torch.exp(tile.s - finite(lse))
    p_t = -p * lse_t if scores.s_t is None else p * (scores.s_t - lse_t)
    do_tile = seq.fold(tile.rows(seq.load(given.dout, q)))  # [B, Hk, G·M, Dv]
    dp = seq.unfold(seq.product(do_tile, seq.load(seq.inputs.v, k, tile.seen).mT), rows)
    dp_t = None
    if tangents.v is not None:
        dp_t = seq.unfold(seq.product(do_tile, seq.load(tangents.v, k, tile.seen).mT), rows)
        dp_t = seq.dropped(dp_t, q, k)
    return MovingTile(p, p_t, seq.dropped(dp, q, k), dp_t, scores)


def moving_deltas(seq: SequenceView, given: MovingRows, tangents: Tangents) -> tuple[Tensor, Tensor]:
    """Σ P ∘ dP and Σ (P_t ∘ dP + P ∘ dP_t) [B, Hq, M]: O and O_t were rounded when they were stored, these are not."""
    delta, delta_t = torch.zeros_like(given.lse), torch.zeros_like(given.lse)
    for i, q in seq.query_blocks():
        q_tile, rows = seq.load(seq.inputs.q, q), slice(*q)
        for _, k, kind in seq.key_blocks(i):
            tile = seq.scores(q_tile, q, k, kind)
            p, p_t, dp, dp_t, _ = moving_tile(seq, tile, q_tile, given, tangents, q, k)
            delta[:, :, rows] += (p * dp).sum(dim=-1)
            delta_t[:, :, rows] += (p_t * dp if dp_t is None else p_t * dp + p * dp_t).sum(dim=-1)
    return delta, delta_t


def double_backward_sequence(
    seq: SequenceView, given: MovingRows, tangents: Tangents, dq: Tensor, dbias: Tensor | None
) -> tuple[list[Sum], list[Sum]]:
    """The backward's loop with the derivative of each step; fills in dQ_t and db_t, returns sums of dK_t and dV_t."""
    problem, inputs = seq.problem, seq.inputs
    dk, dv = key_sums(seq)
    for i, q in seq.query_blocks():
        rows = q[1] - q[0]
        q_tile, dout = seq.load(inputs.q, q), seq.load(given.dout, q)
        _, _, delta, delta_t = given.at(q, seq.dtype)
        dq_tile = accumulator(torch.zeros_like(q_tile), problem)
        for j, k, kind in seq.key_blocks(i):
            tile = seq.scores(q_tile, q, k, kind)
            p, p_t, dp, dp_t, (z_t, _, slope) = moving_tile(seq, tile, q_tile, given, tangents, q, k)
            dv[j].add(seq.product(seq.fold(seq.dropped(p_t, q, k)).mT, seq.fold(tile.rows(dout))))
            gap = dp - tile.rows(delta)
            ds = p * gap
            ds_t = p_t * gap + p * ((0.0 if dp_t is None else dp_t) - tile.rows(delta_t))
            if dbias is not None:
                part = cut_tile(dbias, q, k)
                part += ds_t.sum_to_size(part.shape)
            if slope is not None and tile.capped is not None:
                ds_t = ds_t * slope
                if z_t is not None:  # cap'' = -2 u (1 - u²) / c
                    ds_t = ds_t - ds * z_t * slope * tile.capped * (2.0 / problem.softcap**2)
                ds = ds * slope
            dz, dz_t = (seq.fold(x * problem.scale) for x in (ds, ds_t))  # [B, Hk, G·M, N]
            dq_tile.add(seq.unfold(seq.product(dz_t, seq.load(inputs.k, k, tile.seen)), rows))
            dk[j].add(seq.product(dz_t.mT, seq.fold(tile.rows(q_tile))))
            if tangents.k is not None:
                dq_tile.add(seq.unfold(seq.product(dz, seq.load(tangents.k, k, tile.seen)), rows))
            if tangents.q is not None:
                dk[j].add(seq.product(dz.mT, seq.fold(tile.rows(seq.load(tangents.q, q)))))
        dq[:, :, slice(*q)] = rounded(dq_tile.total(), dq.dtype)
    return dk, dv
