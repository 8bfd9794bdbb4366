"""The measuring stick: standard attention in float64, on the inputs' quantised values, differentiable by autograd.

It walks the batch sequence by sequence and a few heads at a time, so packed and rectangular batches are the same code
and, without gradients, the O(N²) memory stays that of one piece. What nobody sees is zeroed before it is multiplied,
and rows that see nothing are cut out before and after the softmax: no value and no gradient meets 0·NaN or inf − inf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.masks import Literal, MaskProgram, MaskShape, allowed
from tilewise.numerics.inputs import Inputs as Inputs
from tilewise.numerics.inputs import Span as Span
from tilewise.numerics.inputs import origin_of as origin_of
from tilewise.numerics.inputs import spans as spans
from tilewise.numerics.merge import NEG_INF, softmax_with_sink
from tilewise.numerics.philox import keep_tile
from tilewise.problem import Problem

PIECE_ELEMENTS = 2**22
"""Heads are taken together up to this many scores."""


class Gradients(NamedTuple):
    """float64, in the shapes of the inputs; None where there is no such input."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    dsinks: Tensor | None = None


@dataclass(frozen=True)
class Piece:
    """Some queries and heads of one sequence against some keys, in float64; k and v are repeated to the query heads."""

    sequence: int
    heads: slice  # query heads
    rows: tuple[int, slice, Tensor]  # where the piece lies in q, out and lse
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
    sink: Tensor | None  # the sink's weight
    p: Tensor  # softmax
    w: Tensor  # after dropout


def oracle(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out (B, Hq, M, Dv) and lse (B, Hq, M) in float64."""
    q = inputs.q
    out = torch.zeros((*q.shape[:3], problem.head_dim_v), dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:3], NEG_INF, dtype=torch.float64, device=q.device)
    for piece in pieces(problem, inputs):
        state = softmax(problem, piece)
        live = piece.seen.any(-1, keepdim=True)
        out[piece.rows] = torch.where(live, state.w @ piece.v, 0.0)
        lse[piece.rows] = state.lse
    return out, lse


def oracle_gradients(problem: Problem, inputs: Inputs, dout: Tensor, dlse: Tensor | None = None) -> Gradients:
    """The gradients of Σ dout · out + Σ dlse · lse."""
    names = [name for name in ("q", "k", "v", "bias", "sinks") if getattr(inputs, name) is not None]
    with torch.enable_grad():
        leaves = {name: getattr(inputs, name).detach().double().requires_grad_() for name in names}
        out, lse = oracle(problem, inputs._replace(**leaves))
        upstream = (dout.double(), torch.zeros_like(lse) if dlse is None else dlse.double())
        grads: Sequence[Tensor | None] = [None] * len(names)
        if out.requires_grad:  # else there is no query, key or head at all
            grads = torch.autograd.grad((out, lse), list(leaves.values()), upstream, allow_unused=True)
    pairs = zip(leaves.items(), grads, strict=True)
    return Gradients(**{f"d{name}": torch.zeros_like(x) if grad is None else grad for (name, x), grad in pairs})


def oracle_second(
    problem: Problem, inputs: Inputs, dout: Tensor, dlse: Tensor | None, tangents: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor, Gradients]:
    """The derivatives of out, lse and the gradients of Σ dout · out + Σ dlse · lse along tangents of q, k, v, bias and sinks.

    ⟨tangents, gradients⟩ is linear in the upstream gradients, and its gradient in them is the derivative of the outputs.
    """
    names = [name for name in ("q", "k", "v", "bias", "sinks") if getattr(inputs, name) is not None]
    along = dict(zip(("q", "k", "v", "bias", "sinks"), tangents, strict=True))
    with torch.enable_grad():
        leaves = {name: getattr(inputs, name).detach().double().requires_grad_() for name in names}
        out, lse = oracle(problem, inputs._replace(**leaves))
        upstream = [dout.detach().double(), torch.zeros_like(lse) if dlse is None else dlse.detach().double()]
        upstream = [x.clone().requires_grad_() for x in upstream]
        sources, moved = [*upstream, *leaves.values()], out.new_zeros(())
        if out.requires_grad:
            grads = torch.autograd.grad((out, lse), list(leaves.values()), upstream, create_graph=True, allow_unused=True)
            for name, grad in zip(names, grads, strict=True):
                if grad is not None and along[name] is not None:
                    moved = moved + (grad * along[name].double()).sum()  # type: ignore[union-attr]
        found: Sequence[Tensor | None] = [None] * len(sources)
        if moved.requires_grad:
            found = torch.autograd.grad(moved, sources, allow_unused=True)
    out_t, lse_t, *second = (torch.zeros_like(x) if grad is None else grad for x, grad in zip(sources, found, strict=True))
    return out_t.detach(), lse_t.detach(), Gradients(**{f"d{n}": x.detach() for n, x in zip(names, second, strict=True)})


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
    masked = logit.masked_fill(~piece.seen, NEG_INF)
    p, sink, lse = softmax_with_sink(masked, piece.sinks)
    return Softmax(score, capped, logit, lse, sink, p, p if piece.keep is None else p * piece.keep)


def pieces(problem: Problem, inputs: Inputs) -> Iterator[Piece]:
    """The problem, cut into sequences and groups of heads."""
    for span in spans(problem, inputs, range(problem.batch)):
        m, n = span.lengths
        step = problem.group * max(1, PIECE_ELEMENTS // max(1, m * n * problem.group))
        for h in range(0, problem.heads, step):
            heads = slice(h, min(h + step, problem.heads))
            yield make_piece(problem, inputs, span, heads, torch.arange(m, device=inputs.q.device), range(n))


def make_piece(
    problem: Problem, inputs: Inputs, span: Span, heads: slice, positions: Tensor, keys: range
) -> Piece:
    """The queries at `positions` [M] against `keys`, both counted within the sequence. The heads are one, or whole groups."""
    b, (m, n), device = span.sequence, span.lengths, positions.device
    kv_heads = slice(heads.start // problem.group, -(-heads.stop // problem.group))
    repeats = (heads.stop - heads.start) // max(1, kv_heads.stop - kv_heads.start)
    at_q = (span.batch, heads, span.q.start + positions)
    at_k = (span.batch, kv_heads, slice(span.k.start + keys.start, span.k.start + keys.stop))
    shape = (heads.stop - heads.start, len(positions), len(keys))
    seen = _visible(problem, span, heads, positions, keys).expand(shape)
    bias = alibi = keep = None
    if inputs.bias is not None:
        at = bias_index(inputs.bias, b, heads, positions, slice(keys.start, keys.stop))
        bias = inputs.bias[at].double()
        seen = seen & (bias != NEG_INF)
    origin = origin_of(inputs, b)
    start_q, start_k, first_head, batch = origin or (0, 0, 0, b)
    if inputs.alibi is not None:
        ahead = n - m if origin is None else start_q - start_k
        distance = (positions[:, None] + ahead - torch.arange(keys.start, keys.stop, device=device)).abs()  # [M, N]
        alibi = -inputs.alibi[b if inputs.alibi.shape[0] > 1 else 0].double()[heads, None, None] * distance
    if problem.dropout_p:
        assert inputs.seed is not None
        numbers = range(first_head, first_head + problem.heads)[heads]
        ids = range(batch, batch + 1), numbers, positions + start_q, range(start_k + keys.start, start_k + keys.stop)
        keep = keep_tile(inputs.seed, problem.dropout_p, *ids, device=device)[0].double() / (1.0 - problem.dropout_p)
    k, v = (x[at_k].double().repeat_interleave(repeats, dim=0) for x in (inputs.k, inputs.v))
    reached = seen.any(-2)[..., None]  # [H, N, 1]
    return Piece(
        sequence=b,
        heads=heads,
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


def _visible(problem: Problem, span: Span, heads: slice, positions: Tensor, keys: range) -> Tensor:
    """Which keys each row sees by the mask: bool, broadcasts to [H, M, N]."""
    program, device = _part(span.program, span.sequence, (heads, problem.heads), positions), positions.device
    # `allowed` asks for the positions of the queries, then for those of the keys
    vectors = iter((positions, torch.arange(keys.start, keys.stop, device=device)))
    shape = MaskShape(1, problem.heads, *span.lengths)
    tile = allowed(program, shape, (0, len(positions)), (keys.start, keys.stop), lambda lo, hi: next(vectors))
    everything = torch.ones((1, 1, 1), dtype=torch.bool, device=device)
    return everything if tile is None else tile[0]


def _part(program: MaskProgram, b: int, of_heads: tuple[slice, int], positions: Tensor) -> MaskProgram:
    """The program with what its tensors hold for one sequence, some of its heads and some queries."""
    heads, count = of_heads

    def own(literal: Literal) -> Literal:
        tensors = [torch.as_tensor(t, device=positions.device) for t in literal.tensors]
        tensors = [t[b : b + 1] if t.shape[0] > 1 else t for t in tensors]
        literal = literal._replace(tensors=tuple(tensors)).for_heads(range(count)[heads])
        if literal.kind.is_documents:
            return literal._replace(tensors=(tensors[0][:, positions], tensors[1]))
        if literal.kind.is_dense and tensors[0].shape[2] > 1:
            return literal._replace(tensors=(literal.tensors[0][:, :, positions],))
        return literal

    return program.map(own)


def bias_index(bias: Tensor, b: int, heads: slice, rows: slice | Tensor, cols: slice) -> tuple[int | slice | Tensor, ...]:
    """Where some scores of sequence b lie in the bias; sides of length 1 broadcast."""
    sides = zip(bias.shape[1:], (heads, rows, cols), strict=True)
    return b if bias.shape[0] > 1 else 0, *(index if side > 1 else slice(None) for side, index in sides)
