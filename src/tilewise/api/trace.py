"""`trace_nonfinite`: the first tile and step of a forward in which a NaN or an infinity appears."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch
from torch import Tensor

from tilewise.api import html
from tilewise.api.call import Options, understand
from tilewise.api.certify import words
from tilewise.backends.base import Inputs
from tilewise.backends.sequence import Cut, Range, Sequence, cut_tile, cuts
from tilewise.errors import ArgumentError
from tilewise.masks import MaskProgram, TileClass, TileMap, allowed
from tilewise.numerics.merge import finite
from tilewise.problem import Problem

if TYPE_CHECKING:
    from rich.panel import Panel

STEPS = ("q load", "k load", "score", "softcap", "bias", "softmax", "v load", "product", "sink", "output")
"""In the order in which a tile meets them; the last two come once, after a row's last tile."""
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
class Trace:
    """What `trace_nonfinite` found; `first` is None if every step of every tile is finite."""

    problem: str
    tile: tuple[int, int]
    first: NonFinite | None

    @property
    def clean(self) -> bool:
        return self.first is None

    def lines(self) -> list[str]:
        if self.first is None:
            return ["Every step of every visited tile is finite."]
        return [f"First at {self.first}.", MEANING[self.first.step][0].upper() + MEANING[self.first.step][1:] + "."]

    def to_dict(self) -> dict[str, Any]:
        return {
            "problem": self.problem,
            "tile": list(self.tile),
            "first": None if self.first is None else asdict(self.first),
        }

    def __str__(self) -> str:
        return "\n  ".join([f"{self.problem}, tiles of {self.tile[0]} × {self.tile[1]}", *self.lines()])

    def __rich__(self) -> Panel:
        from rich.panel import Panel
        from rich.text import Text

        title = f"{'Finite' if self.clean else 'Not finite'}: {self.problem}, tiles of {self.tile[0]} × {self.tile[1]}"
        colour = "green" if self.clean else "red"
        return Panel(Text("\n".join(self.lines())), title=title, title_align="left", border_style=colour)

    def _repr_html_(self) -> str:
        return html.card(str(self).split("\n")[0], map(html.text, self.lines()), "#2e9e5b" if self.clean else "#d33")


class _Hit(NamedTuple):
    """A non-finite element of one head; ordered as the tiles are walked."""

    query_tile: int
    key_tile: int  # the number of key tiles for steps after the last one
    step: int
    row: int
    key: int | None
    value: float


@torch.no_grad()
def trace_nonfinite(
    q: Tensor, k: Tensor, v: Tensor, *, tile: tuple[int, int] = (128, 64), **options: Unpack[Options]
) -> Trace:
    """Walk the forward tile by tile and name the first (batch, head, query tile, key tile) and step that is not finite.

    The arguments are those of `attention` (or of `attention_varlen`, with `cu_seqlens_q`). Keys that no query of a tile
    sees are never loaded, so what they hold does not count. `tile` is the walk's: queries × keys.
    """
    if min(tile) < 1:
        raise ArgumentError(f"tile: got {tile}, need two positive sizes")
    problem, inputs = understand(q.detach(), k.detach(), v.detach(), options, needs_seed=False)
    first = None
    if min(problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k) > 0:
        first = next(_findings(problem, inputs, tile), None)
    return Trace(words(problem), tile, first)


def _findings(problem: Problem, inputs: Inputs, tile: tuple[int, int]) -> Iterator[NonFinite]:
    """The first hit of each sequence and head that has one, in order."""
    for cut, program in cuts(problem, inputs):
        seq = Sequence(problem, inputs, cut, program)
        if not (seq.seqlen_q and seq.seqlen_k):
            continue
        rough: dict[tuple[int, int], _Hit] = {}
        for b, h, hit in _walk(seq, seq.tiles, range(seq.tiles.rows), rough):
            rough[b, h] = hit
        for (b, h), hit in sorted(rough.items()):
            own = _one_head(seq, program, b, h)
            start = hit.query_tile * seq.tiles.block_q // tile[0]
            stop = -(-min((hit.query_tile + 1) * seq.tiles.block_q, seq.seqlen_q) // tile[0])
            fine = TileMap(own.program, own.shape, *tile)
            found = next((x for _, _, x in _walk(own, fine, range(start, stop), {})), None)
            if found is None:  # sums of another order stay in range: the rough tile is all that can be named
                key_tile = fine.cols if hit.key is None else hit.key // tile[1]
                found = hit._replace(query_tile=hit.row // tile[0], key_tile=key_tile)
            i, j, step, row, key, value = found
            yield NonFinite((cut.b or 0) + b, h, i, None if j >= fine.cols else j, STEPS[step], row, key, value)


def _one_head(seq: Sequence, program: MaskProgram, b: int, h: int) -> Sequence:
    """One head of one sequence as a problem of its own."""
    tensors: list[Tensor] = []
    for term in program.terms():
        for letter, _, given in term:
            for t in given:
                t = t[b : b + 1] if t.shape[0] > 1 else t
                tensors.append(t[:, h : h + 1] if letter in "sSeE" and t.shape[1] > 1 else t)
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
    own_program = MaskProgram(program.structure, program.ints, tuple(tensors))
    return Sequence(problem, alone, Cut(slice(None), slice(None), slice(None)), own_program)


def _side(x: Tensor, side: int, index: int) -> Tensor:
    return x.narrow(side, index, 1) if x.shape[side] > 1 else x


Found = tuple[int, int, _Hit]
Known = dict[tuple[int, int], _Hit]


def _walk(seq: Sequence, tiles: TileMap, blocks: range, known: Known) -> Iterator[Found]:
    """The first hit of each (sequence, head) not in `known`, in the order of the walk.

    Dropout only removes terms and is left out.
    """
    problem, inputs = seq.problem, seq.inputs
    for i in blocks:
        if len(known) == seq.batch * seq.heads:
            return
        q = (i * tiles.block_q, min((i + 1) * tiles.block_q, seq.seqlen_q))
        q_tile = seq.load(inputs.q, q)  # [B, Hq, M, D]
        column = (seq.batch, seq.heads, q[1] - q[0], 1)
        m, l = q_tile.new_full(column, float("-inf")), q_tile.new_zeros(column)
        acc = q_tile.new_zeros((*column[:3], problem.head_dim_v))
        # over the keys visited so far: m = max s,  l = Σ exp(s - m),  acc = Σ exp(s - m) v
        for j, kind in tiles.key_blocks(i):
            k = (j * tiles.block_k, min((j + 1) * tiles.block_k, seq.seqlen_k))
            visible = _visible(seq, q, k, kind)
            at = _Where(i, j, q[0], k[0], known)
            s, hits = _scores(seq, q_tile, q, k, visible, at)
            yield from hits
            s = torch.where(visible, s, float("-inf"))
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            alpha, p = torch.exp(m - finite(m_new)), torch.exp(s - finite(m_new))
            l = l * alpha + p.sum(-1, keepdim=True)
            yield from at.hits("softmax", l, visible.any(-1, keepdim=True).expand_as(l))
            v_tile = seq.load(inputs.v, k, _seen(seq, visible))
            yield from at.loads("v load", seq, v_tile, visible)
            acc = acc * alpha + seq.unfold(seq.fold(p) @ v_tile, q[1] - q[0])
            yield from at.hits("product", acc, visible.any(-1, keepdim=True).expand_as(acc))
            m = m_new
        last = _Where(i, tiles.cols, q[0], 0, known)
        if inputs.sinks is not None:
            sink = inputs.sinks.to(seq.dtype)[None, :, None, None].expand(column)
            yield from last.hits("sink", torch.where(sink == float("-inf"), 0.0, sink))
        out = (acc / torch.where(l == 0, 1.0, l)).to(inputs.q.dtype)
        yield from last.hits("output", out)


def _visible(seq: Sequence, q: Range, k: Range, kind: TileClass) -> Tensor:
    """[B, Hq, M, N]; a bias of −inf masks too."""
    full = (seq.batch, seq.heads, q[1] - q[0], k[1] - k[0])
    visible = None if kind is TileClass.FULL else allowed(seq.program, seq.shape, q, k, partial(_arange, seq))
    everything = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=seq.inputs.q.device)
    found: Tensor = (everything if visible is None else visible).expand(full)
    return found if seq.inputs.bias is None else found & (cut_tile(seq.inputs.bias, q, k) != float("-inf"))


def _seen(seq: Sequence, visible: Tensor) -> Tensor:
    """[B, Hk, N, 1]: keys that some row of the tile sees."""
    rows: Tensor = visible.unflatten(1, (seq.kv_heads, -1)).flatten(2, 3)  # of all query heads of a group
    return rows.any(2).unsqueeze(-1)


def _arange(seq: Sequence, start: int, stop: int) -> Tensor:
    return torch.arange(start, stop, device=seq.inputs.q.device)


def _scores(
    seq: Sequence, q_tile: Tensor, q: Range, k: Range, visible: Tensor, at: _Where
) -> tuple[Tensor, list[Found]]:
    """The scores of a tile and the hits on the way to them."""
    problem, inputs = seq.problem, seq.inputs
    hits = at.hits("q load", q_tile, visible.any(-1, keepdim=True).expand_as(q_tile))
    k_tile = seq.load(inputs.k, k, _seen(seq, visible))
    hits += at.loads("k load", seq, k_tile, visible)
    s = seq.unfold(seq.fold(q_tile) @ k_tile.mT, q[1] - q[0]) * problem.scale  # [B, Hq, M, N]
    hits += at.hits("score", s, visible, keys=True)
    if problem.softcap:
        s = torch.tanh(s / problem.softcap) * problem.softcap
        hits += at.hits("softcap", s, visible, keys=True)
    if inputs.bias is not None:
        s = s + cut_tile(inputs.bias, q, k).to(seq.dtype)
    if inputs.alibi is not None:
        distance = (_arange(seq, *q)[:, None] + (seq.seqlen_k - seq.seqlen_q) - _arange(seq, *k)).abs()
        s = s - inputs.alibi.to(seq.dtype)[:, :, None, None] * distance
    if inputs.bias is not None or inputs.alibi is not None:
        hits += at.hits("bias", s, visible, keys=True)
    return s, hits


class _Where(NamedTuple):
    """A tile, where it begins, and the heads that need no more hits."""

    i: int
    j: int
    row: int
    key: int
    known: Known

    def hits(self, step: str, x: Tensor, counts: Tensor | None = None, *, keys: bool = False) -> list[Found]:
        """The first bad element of each head of x [B, Hq, M, ·] among those that count."""
        bad = ~x.isfinite() if counts is None else ~x.isfinite() & counts
        if not bad.any():
            return []
        found = []
        for b, h in self._new(bad):
            row, column = divmod(int(bad[b, h].flatten().to(torch.uint8).argmax()), x.shape[-1])
            key = self.key + column if keys else None
            hit = _Hit(self.i, self.j, STEPS.index(step), self.row + row, key, float(x[b, h, row, column]))
            found.append((b, h, hit))
        return found

    def loads(self, step: str, seq: Sequence, x: Tensor, visible: Tensor) -> list[Found]:
        """The like for keys or values x [B, Hk, N, D], which count for each query head with a row that sees them."""
        bad = (~x.isfinite()).any(-1)  # [B, Hk, N]
        if not bad.any():
            return []
        meets = visible & bad.repeat_interleave(seq.heads // seq.kv_heads, dim=1)[:, :, None]  # [B, Hq, M, N]
        found = []
        for b, h in self._new(meets):
            row, key = divmod(int(meets[b, h].flatten().to(torch.uint8).argmax()), visible.shape[-1])
            element = x[b, h // (seq.heads // seq.kv_heads), key]
            value = float(element[~element.isfinite()][0])
            found.append((b, h, _Hit(self.i, self.j, STEPS.index(step), self.row + row, self.key + key, value)))
        return found

    def _new(self, bad: Tensor) -> list[tuple[int, int]]:
        heads = bad.flatten(2).any(-1).nonzero().tolist()
        return [(b, h) for b, h in heads if (b, h) not in self.known]
