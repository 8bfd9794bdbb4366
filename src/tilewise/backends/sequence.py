"""A call as the plain backends see it: one sequence, or one batch of equal ones, at a time, and its tiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import Inputs, Statistics
from tilewise.masks import MaskProgram, MaskShape, TileClass, TileMap, allowed
from tilewise.numerics import summation
from tilewise.numerics.inputs import origin_of, spans
from tilewise.numerics.merge import finite
from tilewise.numerics.philox import keep_tile
from tilewise.problem import Origin, Problem

Range = tuple[int, int]
BLOCKS = (512, 512)
"""Tiles for those who only ask where the mask lets through; who computes scores passes the plan's."""


class Tile(NamedTuple):
    """The scores of one tile and what its masking left visible."""

    s: Tensor  # [B, Hq, M, N], -inf where masked
    capped: Tensor | None  # the scores after softcap, before bias and mask
    seen: Tensor | None  # [B or 1, Hk or 1, N, 1]: keys that some row of the tile sees; None for all
    seeing: Tensor | None  # [B or 1, Hq or 1, M, 1]: rows that see some key of the tile; None for all

    def rows(self, x: Tensor) -> Tensor:
        """[B, Hq, M, X] with 0 in rows that see nothing here, whatever they hold."""
        return x if self.seeing is None else torch.where(self.seeing, x, 0.0)


class Cut(NamedTuple):
    """Where a sequence lies in the tensors of a call: views of them, so that results are written in place."""

    batch: slice  # of q, k, v and their like
    q: slice
    k: slice
    b: int | None = None  # of what is given for each sequence; None for a whole batch

    def queries(self, x: Tensor) -> Tensor:
        return x[self.batch, :, self.q]

    def keys(self, x: Tensor) -> Tensor:
        return x[self.batch, :, self.k]

    def own(self, x: Tensor) -> Tensor:
        """What sequence `b` has of a tensor whose first side counts sequences or is 1."""
        return x if self.b is None or x.shape[0] == 1 else x[self.b : self.b + 1]

    def scores(self, x: Tensor) -> Tensor:
        """The same of a bias, whose positions count within the sequence."""
        rows, keys = (None if s.stop is None else s.stop - s.start for s in (self.q, self.k))
        return self.own(x)[:, :, : rows if x.shape[2] > 1 else None, : keys if x.shape[3] > 1 else None]

    def inputs(self, inputs: Inputs) -> Inputs:
        return inputs._replace(
            q=self.queries(inputs.q),
            k=self.keys(inputs.k),
            v=self.keys(inputs.v),
            bias=None if inputs.bias is None else self.scores(inputs.bias),
            alibi=None if inputs.alibi is None else self.own(inputs.alibi),
        )


class SequenceView:
    """The tensors, mask and tiles that forward and backward share."""

    def __init__(
        self,
        problem: Problem,
        inputs: Inputs,
        program: MaskProgram,
        cut: Cut | None = None,
        blocks: Range | None = None,
    ) -> None:
        everything = slice(None)
        self.problem, self.program, self.cut = problem, program, cut or Cut(everything, everything, everything)
        self.inputs = inputs = self.cut.inputs(inputs)
        self.batch, self.heads, self.seqlen_q, _ = inputs.q.shape
        self.kv_heads, self.seqlen_k = inputs.k.shape[1:3]
        self.origin = origin_of(inputs, self.cut.b or 0)
        self.dtype = torch.float64 if problem.arithmetic == "float64" else torch.float32
        self.shape = MaskShape(self.batch, self.heads, self.seqlen_q, self.seqlen_k)
        self.blocks = blocks or BLOCKS

    @cached_property
    def tiles(self) -> TileMap:
        return TileMap(self.program, self.shape, *self.blocks)

    def query_blocks(self) -> Iterator[tuple[int, Range]]:
        for i in range(self.tiles.rows):
            yield i, (i * self.tiles.block_q, min((i + 1) * self.tiles.block_q, self.seqlen_q))

    def key_blocks(self, i: int) -> Iterator[tuple[int, Range, TileClass]]:
        """The tiles that query block `i` must visit."""
        for j, kind in self.tiles.key_blocks(i):
            yield j, self.key_block(j), kind

    def key_block(self, j: int) -> Range:
        return j * self.tiles.block_k, min((j + 1) * self.tiles.block_k, self.seqlen_k)

    def fold(self, x: Tensor) -> Tensor:
        """[B, Hq, M, X] -> [B, Hk, G·M, X]: the rows of all query heads of a group side by side, so that K is read once."""
        return x.reshape(self.batch, self.kv_heads, x.shape[1] // self.kv_heads * x.shape[2], x.shape[-1])

    def unfold(self, x: Tensor, rows: int) -> Tensor:
        """[B, Hk, G·M, X] -> [B, Hq, M, X]."""
        return x.reshape(self.batch, self.heads, rows, x.shape[-1])

    def load(self, x: Tensor, positions: Range, seen: Tensor | None = None) -> Tensor:
        """Rows `positions` of x in the dtype of the arithmetic; rows nobody sees become 0, whatever they hold."""
        tile = x[:, :, slice(*positions)].to(self.dtype)
        return tile if seen is None else torch.where(seen, tile, 0.0)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        if self.problem.invariant:
            return summation.ordered_product(a, b)
        return summation.product(a, b) if self.problem.carries_errors else a @ b

    def row_sum(self, p: Tensor) -> Tensor:
        """[B, Hq, M, N] -> [B, Hq, M, 1]."""
        if self.problem.carries_errors or self.problem.invariant:
            return self.product(p, p.new_ones((p.shape[-1], 1)))
        return p.sum(dim=-1, keepdim=True)

    def scores(self, q_tile: Tensor, q: Range, k: Range, kind: TileClass) -> Tile:
        """scale·QKᵀ -> softcap -> + bias -> mask, over one tile. What is not seen is never multiplied."""
        problem, inputs = self.problem, self.inputs
        visible = None if kind is TileClass.FULL else allowed(self.program, self.shape, q, k, self._arange)
        if inputs.bias is not None:
            bias = narrowed(cut_tile(inputs.bias, q, k), self.dtype)
            unmasked = bias != float("-inf")
            visible = unmasked if visible is None else visible & unmasked
        seen = seeing = None
        if visible is not None:
            seen, seeing = self._seen(visible), visible.any(dim=-1, keepdim=True)
            q_tile = torch.where(seeing, q_tile, 0.0)
        k_tile = self.load(inputs.k, k, seen)  # [B, Hk, N, D]
        s = self.unfold(self.product(self.fold(q_tile), k_tile.mT), q[1] - q[0]) * problem.scale  # [B, Hq, M, N]
        capped = None
        if problem.softcap:
            s = capped = torch.tanh(s / problem.softcap) * problem.softcap
        if inputs.bias is not None:
            s = s + bias
        if inputs.alibi is not None:
            ahead = self.seqlen_k - self.seqlen_q if self.origin is None else self.origin.q - self.origin.k
            distance = (self._arange(*q)[:, None] + ahead - self._arange(*k)).abs()
            s = s - inputs.alibi.to(self.dtype)[:, :, None, None] * distance
        if visible is not None:
            s = torch.where(visible, s, float("-inf"))
        return Tile(s, capped, seen, seeing)

    def dropped(self, p: Tensor, q: Range, k: Range) -> Tensor:
        """p with dropout: kept entries over the probability of being kept, the others 0."""
        problem, seed = self.problem, self.inputs.seed
        if not problem.dropout_p or seed is None:
            return p
        starts = self.origin or Origin(0, 0, 0, self.cut.b or 0)
        ends = (q[1], k[1], self.heads, self.batch)
        rows, keys, heads, batch = (range(start, start + end) for start, end in zip(starts, ends, strict=True))
        ids = batch, heads, rows[q[0] :], keys[k[0] :]
        keep = keep_tile(seed, problem.dropout_p, *ids, device=p.device)
        return torch.where(keep, p / (1.0 - problem.dropout_p), 0.0)

    def _arange(self, lo: int, hi: int) -> Tensor:
        return torch.arange(lo, hi, device=self.inputs.q.device)

    def _seen(self, visible: Tensor) -> Tensor:
        """[B or 1, Hq or 1, M, N] -> [B or 1, Hk or 1, N, 1]: keys that any row of the tile sees."""
        if visible.shape[1] > 1:
            visible = visible.unflatten(1, (self.kv_heads, -1)).flatten(2, 3)
        return visible.any(dim=2).unsqueeze(-1)


class RunningTop:
    """The largest logits of each row so far and their keys, falling; of equal ones the first."""

    def __init__(self, like: Tensor, k: int) -> None:
        """`like` is [B, Hq, M, 1]."""
        self.values = like.new_full((*like.shape[:3], k), float("-inf"))
        self.indices = torch.full(self.values.shape, -1, device=like.device)

    def add(self, s: Tensor, first: int) -> None:
        """The logits [B, Hq, M, N] of the keys from `first` on, which come after all before."""
        own = torch.arange(first, first + s.shape[-1], device=s.device).expand(s.shape)
        values, order = torch.cat([self.values, s], dim=-1).sort(dim=-1, descending=True, stable=True)
        k = self.values.shape[-1]
        self.values = values[..., :k]
        self.indices = torch.cat([self.indices, own], dim=-1).gather(-1, order[..., :k])

    def weights(self, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Their weights, from the log-sum-exp [B, Hq, M], and their keys."""
        weights = torch.exp(self.values - finite(lse).unsqueeze(-1))
        return weights, self.indices.masked_fill(self.values == float("-inf"), -1)


def sweep_statistics(problem: Problem, inputs: Inputs, lse: Tensor, stats: Statistics) -> None:
    """`key_mass` and the largest weights where they are asked for, by one sweep over the scores once lse is known."""
    if stats.key_mass is None and stats.weights is None:
        return
    for seq in sequences(problem, inputs):
        own_lse, mass = seq.cut.queries(lse), None if stats.key_mass is None else seq.cut.keys(stats.key_mass)
        for i, q in seq.query_blocks():
            rows = slice(*q)
            q_tile, row_lse = seq.load(seq.inputs.q, q), finite(own_lse[:, :, rows]).unsqueeze(-1)
            top = None if stats.weights is None else RunningTop(row_lse, problem.top)
            for _, k, kind in seq.key_blocks(i):
                s = seq.scores(q_tile, q, k, kind).s
                if top is not None:
                    top.add(s, k[0])
                if mass is not None:
                    mass[:, :, slice(*k)] += torch.exp(s - row_lse).sum(dim=-2)
            if top is not None and stats.weights is not None and stats.indices is not None:
                found = top.weights(own_lse[:, :, rows])
                seq.cut.queries(stats.weights)[:, :, rows], seq.cut.queries(stats.indices)[:, :, rows] = found


def narrowed(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias in the dtype of the arithmetic; what is finite stays finite, for only -inf masks."""
    if bias.dtype != torch.float64 or dtype == torch.float64:
        return bias.to(dtype)
    most = torch.finfo(dtype).max
    return torch.where(bias.isinf(), bias, bias.clamp(-most, most)).to(dtype)


def cut_tile(x: Tensor, q: Range, k: Range) -> Tensor:
    """The part of a bias that belongs to a tile; sides of length 1 broadcast."""
    return x[:, :, slice(*q) if x.shape[2] > 1 else slice(None), slice(*k) if x.shape[3] > 1 else slice(None)]


def sequences(problem: Problem, inputs: Inputs, blocks: Range | None = None) -> Iterator[SequenceView]:
    """The sequences of a call: a plain batch is one; a packed batch, or one whose mask differs by sequence, is taken apart."""
    if not problem.varlen and not problem.origins and all(t.shape[0] <= 1 for t in problem.program.tensors):
        yield SequenceView(problem, inputs, problem.program, blocks=blocks)
        return
    for span in spans(problem, inputs, range(problem.batch)):
        cut = Cut(slice(span.batch, span.batch + 1), span.q, span.k, span.sequence)
        tensors = tuple(map(cut.own, span.program.tensors))
        program = MaskProgram(span.program.structure, span.program.ints, tensors)
        yield SequenceView(problem, inputs, program, cut, blocks)
