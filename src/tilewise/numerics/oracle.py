"""The measuring stick: standard attention in float64, on the inputs' quantised values, differentiable by autograd.

It walks the batch sequence by sequence and a few heads at a time, so packed and rectangular batches are the same code
and, without gradients, the O(N²) memory stays that of one piece. What nobody sees is zeroed before it is multiplied,
and rows that see nothing are cut out before and after the softmax: no value and no gradient meets 0·NaN or inf − inf.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tilewise.masks import MaskProgram, MaskShape, allowed
from tilewise.numerics.merge import NOTHING, log_sum, shares
from tilewise.numerics.philox import keep_tile
from tilewise.problem import Problem

PIECE_ELEMENTS = 2**22
"""Heads are taken together up to this many scores."""


class Tensors(Protocol):
    """What the oracle reads: the fields of a backend's inputs, rank 4 (packed batches are (1, H, T, D))."""

    @property
    def q(self) -> Tensor: ...
    @property
    def k(self) -> Tensor: ...
    @property
    def v(self) -> Tensor: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def alibi(self) -> Tensor | None: ...
    @property
    def sinks(self) -> Tensor | None: ...
    @property
    def seed(self) -> Tensor | None: ...
    @property
    def cu_q(self) -> Tensor | None: ...
    @property
    def cu_k(self) -> Tensor | None: ...


class Gradients(NamedTuple):
    """float64, in the shapes of the inputs; None where there is no such input."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    dsinks: Tensor | None = None


@dataclass(frozen=True)
class Piece:
    """Some heads of one sequence, in float64; k and v are repeated to the query heads."""

    sequence: int
    heads: slice  # query heads
    kv_heads: slice
    rows: tuple[int, slice, slice]  # where the piece lies in q, out and lse
    cols: tuple[int, slice, slice]  # where it lies in k and v
    q: Tensor  # [H, M, D]; zero where the row sees nothing
    k: Tensor  # [H, N, D]; zero where no row sees it
    v: Tensor  # [H, N, Dv]
    seen: Tensor  # [H, M, N] bool; a bias of −inf is not seen
    bias: Tensor | None  # broadcasts to [H, M, N]
    alibi: Tensor | None  # [H, M, N]
    sinks: Tensor | None  # [H]
    keep: Tensor | None  # [H, M, N] float64: 0 where dropped, 1 / (1 − p) where kept


class Softmax(NamedTuple):
    """The steps from scores to weights, each [H, M, N] except lse [H, M] and sink [H, M]."""

    score: Tensor  # scale · q·k
    capped: Tensor  # after softcap
    logit: Tensor  # after bias and alibi; 0 where not seen
    lse: Tensor
    sink: Tensor | None  # the sink's share of the denominator
    p: Tensor  # softmax
    w: Tensor  # after dropout


def oracle(problem: Problem, inputs: Tensors) -> tuple[Tensor, Tensor]:
    """out (B, Hq, M, Dv) and lse (B, Hq, M) in float64."""
    q = inputs.q
    out = torch.zeros((*q.shape[:3], problem.head_dim_v), dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:3], NOTHING, dtype=torch.float64, device=q.device)
    for piece in pieces(problem, inputs):
        state = softmax(problem, piece)
        live = piece.seen.any(-1, keepdim=True)
        out[piece.rows] = torch.where(live, state.w @ piece.v, 0.0)
        lse[piece.rows] = state.lse
    return out, lse


def oracle_gradients(problem: Problem, inputs: Tensors, dout: Tensor, dlse: Tensor | None = None) -> Gradients:
    """The gradients of Σ dout · out + Σ dlse · lse."""
    names = [name for name in ("q", "k", "v", "bias", "sinks") if getattr(inputs, name) is not None]
    with torch.enable_grad():
        leaves = {name: getattr(inputs, name).detach().double().requires_grad_() for name in names}
        others = {name: getattr(inputs, name) for name in ("alibi", "seed", "cu_q", "cu_k")}
        out, lse = oracle(problem, _Leaves(**leaves, **others))
        upstream = torch.zeros_like(lse) if dlse is None else dlse.double()
        if not out.requires_grad:  # no query, key or head at all
            found: list[Tensor | None] = [None] * len(names)
        else:
            upstreams = (dout.double(), upstream)
            found = list(torch.autograd.grad((out, lse), list(leaves.values()), upstreams, allow_unused=True))
    grads = {
        f"d{name}": torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }
    return Gradients(**grads)


class _Leaves(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    alibi: Tensor | None = None
    sinks: Tensor | None = None
    seed: Tensor | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None


def softmax(problem: Problem, piece: Piece) -> Softmax:
    """Scores → softcap → bias → mask → softmax with the sink → dropout."""
    score = problem.scale * (piece.q @ piece.k.transpose(-1, -2))  # [H, M, N]
    score = torch.where(piece.seen, score, 0.0)
    capped = problem.softcap * torch.tanh(score / problem.softcap) if problem.softcap else score
    logit = capped
    if piece.bias is not None:
        logit = logit + torch.where(piece.seen, piece.bias, 0.0)
    if piece.alibi is not None:
        logit = logit + torch.where(piece.seen, piece.alibi, 0.0)
    masked = logit.masked_fill(~piece.seen, NOTHING)
    joined, sink_logit = masked, None
    if piece.sinks is not None:
        sink_logit = piece.sinks[:, None, None].expand(*masked.shape[:2], 1)
        joined = torch.cat([masked, sink_logit], dim=-1)
    lse = log_sum(joined, dim=-1)
    p, sink = shares(masked, sink_logit)
    sink = None if sink is None else sink[..., 0]  # [H, M]
    return Softmax(score, capped, logit, lse, sink, p, p if piece.keep is None else p * piece.keep)


def pieces(problem: Problem, inputs: Tensors) -> Iterator[Piece]:
    """The problem, cut into sequences and groups of heads."""
    if problem.varlen:
        assert inputs.cu_q is not None and inputs.cu_k is not None
        cu_q, cu_k = inputs.cu_q.tolist(), inputs.cu_k.tolist()
    for b in range(problem.batch):
        if problem.varlen:
            index, rows, cols = 0, slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            program = problem.program.for_sequence(b, rows.start, rows.stop, cols.start, cols.stop)
        else:
            index, rows, cols, program = b, slice(0, problem.seqlen_q), slice(0, problem.seqlen_k), problem.program
        seen = _visible(problem, program, b, rows.stop - rows.start, cols.stop - cols.start, inputs.q.device)
        step = max(1, PIECE_ELEMENTS // max(1, seen[0].numel() * problem.group))
        for h in range(0, problem.kv_heads, step):
            kv_heads = slice(h, min(h + step, problem.kv_heads))
            yield _piece(problem, inputs, b, kv_heads, (index, rows, cols), seen)


def _visible(problem: Problem, program: MaskProgram, b: int, m: int, n: int, device: torch.device) -> Tensor:
    """Which keys each query of sequence b may see by the mask: bool [H, M, N]."""
    tensors = tuple(torch.as_tensor(t, device=device) for t in program.tensors)
    tile = allowed(
        MaskProgram(program.structure, program.ints, tensors),
        MaskShape(1 if problem.varlen else problem.batch, problem.heads, m, n),
        (0, m),
        (0, n),
        lambda lo, hi: torch.arange(lo, hi, device=device),
    )
    if tile is None:
        return torch.ones((1, m, n), dtype=torch.bool, device=device).expand(problem.heads, m, n)
    return _pick(tile, b).expand(problem.heads, m, n)


def _piece(
    problem: Problem, inputs: Tensors, b: int, kv_heads: slice, where: tuple[int, slice, slice], visible: Tensor
) -> Piece:
    index, rows, cols = where
    group = problem.group
    heads = slice(kv_heads.start * group, kv_heads.stop * group)
    at_q, at_k = (index, heads, rows), (index, kv_heads, cols)
    seen = visible[heads]
    m, n = seen.shape[1:]
    bias = alibi = keep = None
    if inputs.bias is not None:
        bias = inputs.bias[bias_part(inputs.bias, b, heads, m, n)].double()
        seen = seen & (bias != NOTHING)
    if inputs.alibi is not None:
        i, j = (torch.arange(length, device=seen.device) for length in (m, n))
        distance = (i[:, None] + (n - m) - j).abs()  # [M, N]
        alibi = -_pick(inputs.alibi, b).double()[heads, None, None] * distance
    if problem.dropout_p:
        assert inputs.seed is not None
        ids = range(b, b + 1), range(problem.heads)[heads]
        kept = keep_tile(inputs.seed, problem.dropout_p, *ids, 0, m, 0, n, seen.device)
        keep = kept[0].double() / (1.0 - problem.dropout_p)
    k, v = (x[at_k].double().repeat_interleave(group, dim=0) for x in (inputs.k, inputs.v))
    reached = seen.any(-2)[..., None]  # [H, N, 1]
    return Piece(
        sequence=b,
        heads=heads,
        kv_heads=kv_heads,
        rows=at_q,
        cols=at_k,
        q=torch.where(seen.any(-1)[..., None], inputs.q[at_q].double(), 0.0),
        k=torch.where(reached, k, 0.0),
        v=torch.where(reached, v, 0.0),
        seen=seen,
        bias=bias,
        alibi=alibi,
        sinks=None if inputs.sinks is None else inputs.sinks[heads].double(),
        keep=keep,
    )


def bias_part(bias: Tensor, b: int, heads: slice, m: int, n: int) -> tuple[int | slice, ...]:
    """Where the scores of some heads of sequence b lie in the bias; rows and columns are positions in the sequence."""
    batch_side, heads_side, rows_side, cols_side = (size > 1 for size in bias.shape)
    every = slice(None)
    return (
        b if batch_side else 0,
        heads if heads_side else every,
        slice(m) if rows_side else every,
        slice(n) if cols_side else every,
    )


def _pick(x: Tensor, b: int) -> Tensor:
    """The part of sequence b of a tensor whose first side is the batch or 1."""
    return x[b] if x.shape[0] > 1 else x[0]
