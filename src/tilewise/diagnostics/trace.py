"""`trace_nonfinite`: the first tile and step of a forward in which a NaN or an infinity appears."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from tilewise.api.options import CallOptions
from tilewise.api.parse import parse_call
from tilewise.backends.base import Inputs
from tilewise.backends.sequence import Range, SequenceView, cut_tile, sequences
from tilewise.display import Group, Panel, Shown, Text
from tilewise.errors import ArgumentError
from tilewise.masks import Literal, TileClass, TileMap, allowed
from tilewise.model.show import describe_problem
from tilewise.numerics.merge import finite
from tilewise.problem import Problem

MEANING = {
    "q load": "q itself holds it",
    "k load": "k itself holds it, at a key this tile sees",
    "score": "scale·q·k leaves the range of the arithmetic; q or k is too large, or scale",
    "softcap": "the capped score is not finite",
    "bias": "the bias holds it (−inf would mask, and is no fault)",
    "softmax": "the weights or their sum are not finite",
    "v load": "v itself holds it, at a key this tile sees",
    "product": "the weighted sum of v leaves the range of the arithmetic",
    "sink": "the sink of this head is not finite",
    "output": "the result leaves the range of the output's dtype",
}
"""The steps in the order in which a tile meets them; the last two come once, after a row's last tile."""


@dataclass(frozen=True)
class NonFinite:
    """Where it appears first: the tile, the step, and the element within the call's tensors."""

    batch: int
    head: int
    query_tile: int
    key_tile: int | None
    """None for steps that come after the last key tile."""
    step: str
    row: int
    """The query's position in its sequence; for `k load` and `v load` a row that sees the key."""
    key: int | None
    value: float

    def __str__(self) -> str:
        tile = f"query tile {self.query_tile}"
        if self.key_tile is not None:
            tile += f", key tile {self.key_tile}"
        key = "" if self.key is None else f", key {self.key}"
        return f"{self.step}: {self.value} in batch {self.batch}, head {self.head}, {tile} (row {self.row}{key})"


@dataclass(frozen=True)
class Trace(Shown):
    """The answer of `trace_nonfinite`; `first` is None if every step of every tile is finite."""

    problem: str
    tile: tuple[int, int]
    first: NonFinite | None

    @property
    def clean(self) -> bool:
        return self.first is None

    def lines(self) -> list[str]:
        """What it says, in sentences."""
        if self.first is None:
            return ["Every step of every visited tile is finite."]
        return [f"First at {self.first}.", MEANING[self.first.step][0].upper() + MEANING[self.first.step][1:] + "."]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def content(self) -> Shown:
        title = f"{'Finite' if self.clean else 'Not finite'}: {self.problem}, tiles of {self.tile[0]} × {self.tile[1]}"
        return Panel(title, Group(*map(Text, self.lines())), "green" if self.clean else "red")


@torch.no_grad()
def trace_nonfinite(
    q: Tensor, k: Tensor, v: Tensor, *, tile: tuple[int, int] = (128, 64), **options: Unpack[CallOptions]
) -> Trace:
    """Walk the forward tile by tile and name the first (batch, head, query tile, key tile) and step that is not finite.

    Keys that no query of a tile sees are never loaded, so what they hold does not count.

    q: queries (B, Hq, Sq, D).
    k: keys (B, Hk, Sk, D).
    v: values (B, Hk, Sk, Dv).
    tile: queries and keys of a tile of the walk.
    options: all else that `attention` takes; with `cu_seqlens_q` (and `cu_seqlens_k`) the call is that of `attention_varlen`.

    >>> print(tw.trace_nonfinite(q, k, v, mask=tw.causal()))
    """
    if min(tile) < 1:
        raise ArgumentError(f"tile: got {tile}, need two positive sizes")
    problem, inputs = parse_call(q.detach(), k.detach(), v.detach(), options)
    first = None
    if min(problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k) > 0:
        first = next(_findings(problem, inputs, tile), None)
    return Trace(describe_problem(problem), tile, first)


def _findings(problem: Problem, inputs: Inputs, tile: tuple[int, int]) -> Iterator[NonFinite]:
    """The first hit of each sequence and head that has one, in order."""
    for seq in sequences(problem, inputs):
        if not (seq.seqlen_q and seq.seqlen_k):
            continue
        for b in range(seq.batch):
            for h in range(seq.heads):
                head = _one_head(seq, b, h)
                hit = None if _harmless(head) else _first(head, tile)
                if hit is not None:
                    yield replace(hit, batch=(seq.cut.b or 0) + b, head=h)


def _one_head(seq: SequenceView, b: int, h: int) -> SequenceView:
    """One head of one sequence as a problem of its own; dropout only removes terms and is left out."""

    def one(literal: Literal) -> Literal:
        return literal._replace(tensors=tuple(_side(t, 0, b) for t in literal.tensors)).for_heads(range(h, h + 1))

    own, kv = seq.inputs, h // (seq.heads // seq.kv_heads)
    alone = Inputs(
        own.q[b : b + 1, h : h + 1],
        own.k[b : b + 1, kv : kv + 1],
        own.v[b : b + 1, kv : kv + 1],
        None if own.bias is None else _side(_side(own.bias, 0, b), 1, h),
        None if own.alibi is None else _side(own.alibi, 0, b)[:, h : h + 1],
        None if own.sinks is None else own.sinks[h : h + 1],
    )
    problem = replace(seq.problem, batch=1, heads=1, kv_heads=1, varlen=False, dropout_p=0.0)
    return SequenceView(problem, alone, seq.program.map(one))


def _side(x: Tensor, side: int, index: int) -> Tensor:
    return x.narrow(side, index, 1) if x.shape[side] > 1 else x


def _harmless(head: SequenceView) -> bool:
    """Are all inputs finite and so small that no product or sum of them can leave the range?"""
    problem, inputs = head.problem, head.inputs
    q, k, v = (_largest(x) for x in inputs[:3])
    others = [_largest(torch.where(x == float("-inf"), 0.0, x)) for x in (inputs.bias, inputs.sinks) if x is not None]
    if inputs.alibi is not None:
        others.append(_largest(inputs.alibi) * (head.seqlen_q + head.seqlen_k))
    score = max(1.0, abs(problem.scale)) * q * k * problem.head_dim
    room = torch.finfo(head.dtype).max / 8
    reached = [q, k, score, v * head.seqlen_k, *others]
    # written so that NaN is not harmless
    return all(x < room for x in reached) and v < 0.9 * torch.finfo(inputs.q.dtype).max


def _largest(x: Tensor) -> float:
    low, high = (float(end) for end in torch.aminmax(x))
    return max(-low, high) if low == low and high == high else float("nan")


def _first(head: SequenceView, tile: tuple[int, int]) -> NonFinite | None:
    """A rough pass over large tiles gives the rows, a fine one over the tiles asked for the place."""
    rough = next(_walk(head, head.tiles, range(head.tiles.rows)), None)
    if rough is None:
        return None
    start = rough.query_tile * head.tiles.block_q
    stop = min(start + head.tiles.block_q, head.seqlen_q)
    blocks = range(start // tile[0], -(-stop // tile[0]))
    exact = next(_walk(head, TileMap(head.program, head.shape, *tile), blocks), None)
    if exact is not None:
        return exact
    # sums of another order stay in range: the rough place is all that can be named
    return replace(rough, query_tile=rough.row // tile[0], key_tile=None if rough.key is None else rough.key // tile[1])


def _walk(head: SequenceView, tiles: TileMap, blocks: range) -> Iterator[NonFinite]:
    """What is not finite in the forward of one head, in the order in which it appears."""
    problem, inputs = head.problem, head.inputs
    for i in blocks:
        q = (i * tiles.block_q, min((i + 1) * tiles.block_q, head.seqlen_q))
        q_tile = head.load(inputs.q, q)[0, 0]  # [M, D]
        m, l = q_tile.new_full((len(q_tile), 1), float("-inf")), q_tile.new_zeros((len(q_tile), 1))
        acc = q_tile.new_zeros((len(q_tile), problem.head_dim_v))
        # over the keys visited so far: m = max s,  l = Σ exp(s - m),  acc = Σ exp(s - m) v
        for j, kind in tiles.key_blocks(i):
            k = (j * tiles.block_k, min((j + 1) * tiles.block_k, head.seqlen_k))
            at = _Tile(i, j, q[0], k[0], _visible(head, q, k, kind))
            s, hits = _scores(head, q_tile, q, k, at)
            yield from hits
            s = torch.where(at.visible, s, float("-inf"))
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            alpha, p = torch.exp(m - finite(m_new)), torch.exp(s - finite(m_new))
            l = l * alpha + p.sum(-1, keepdim=True)
            yield from at.rows("softmax", l)
            v_tile = head.load(inputs.v, k, at.seen)[0, 0]  # [N, Dv]
            yield from at.keys("v load", v_tile)
            acc = acc * alpha + p @ v_tile
            yield from at.rows("product", acc)
            m = m_new
        last = _Tile(i, None, q[0], 0, torch.ones_like(l, dtype=torch.bool))
        if inputs.sinks is not None:
            sink = inputs.sinks.to(head.dtype)
            yield from last.rows("sink", torch.where(sink == float("-inf"), 0.0, sink).expand_as(l))
        yield from last.rows("output", (acc / torch.where(l == 0, 1.0, l)).to(inputs.q.dtype))


def _visible(head: SequenceView, q: Range, k: Range, kind: TileClass) -> Tensor:
    """[M, N]; a bias of −inf masks too."""
    arange = partial(torch.arange, device=head.inputs.q.device)
    visible = None if kind is TileClass.FULL else allowed(head.program, head.shape, q, k, arange)
    everything = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=head.inputs.q.device)
    mask: Tensor = (everything if visible is None else visible)[0, 0].expand(q[1] - q[0], k[1] - k[0])
    return mask if head.inputs.bias is None else mask & (cut_tile(head.inputs.bias, q, k)[0, 0] != float("-inf"))


def _scores(head: SequenceView, q_tile: Tensor, q: Range, k: Range, at: _Tile) -> tuple[Tensor, list[NonFinite]]:
    """The scores of a tile and the hits on the way to them."""
    problem, inputs = head.problem, head.inputs
    hits = at.rows("q load", q_tile)
    k_tile = head.load(inputs.k, k, at.seen)[0, 0]  # [N, D]
    hits += at.keys("k load", k_tile)
    s = q_tile @ k_tile.mT * problem.scale  # [M, N]
    hits += at.scores("score", s)
    if problem.softcap:
        s = torch.tanh(s / problem.softcap) * problem.softcap
        hits += at.scores("softcap", s)
    if inputs.bias is not None:
        s = s + cut_tile(inputs.bias, q, k)[0, 0].to(head.dtype)
    if inputs.alibi is not None:
        i, j = (torch.arange(*span, device=s.device) for span in (q, k))
        s = s - inputs.alibi.to(head.dtype) * (i[:, None] + (head.seqlen_k - head.seqlen_q) - j).abs()
    if inputs.bias is not None or inputs.alibi is not None:
        hits += at.scores("bias", s)
    return s, hits


class _Tile(NamedTuple):
    """A tile: its indices, where it begins, and what is visible in it [M, N]."""

    i: int
    j: int | None
    row: int
    key: int
    visible: Tensor

    @property
    def seen(self) -> Tensor:
        """[N, 1]: keys that some row sees."""
        return self.visible.any(0)[:, None]

    def rows(self, step: str, x: Tensor) -> list[NonFinite]:
        """The first bad element of x [M, ·] in a row that sees a key."""
        bad = ~x.isfinite() & self.visible.any(-1, keepdim=True)
        return [self._hit(step, m, None, x[m, column]) for m, column in _where(bad)]

    def scores(self, step: str, x: Tensor) -> list[NonFinite]:
        """The first bad element of x [M, N] among the visible ones."""
        return [self._hit(step, m, n, x[m, n]) for m, n in _where(~x.isfinite() & self.visible)]

    def keys(self, step: str, x: Tensor) -> list[NonFinite]:
        """The first bad element of keys or values x [N, ·], by the first row that sees it."""
        bad = self.visible & (~x.isfinite()).any(-1)
        return [self._hit(step, m, n, x[n][~x[n].isfinite()][0]) for m, n in _where(bad)]

    def _hit(self, step: str, m: int, n: int | None, value: Tensor) -> NonFinite:
        """An element of this tile, in the only head of its problem."""
        return NonFinite(0, 0, self.i, self.j, step, self.row + m, None if n is None else self.key + n, float(value))


def _where(bad: Tensor) -> list[tuple[int, int]]:
    """The first place that is set, row by row; none if there is none."""
    if not bad.any():
        return []
    row, column = divmod(int(bad.flatten().to(torch.uint8).argmax()), bad.shape[-1])
    return [(row, column)]
