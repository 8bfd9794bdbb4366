"""Which keys each query sees, as intervals: exact, O(tokens), never N × N.

All tokens of a plan stand on one axis, sequence after sequence. A mask becomes **layers**: in each, query t sees the keys
[first[t], past[t]) of that axis, and what it sees in all is the union over the layers. Bands, ranges, padding and documents are
exact; a table or dense mask counts as seen by all heads and batch entries what any of them sees, and a dense mask of more than
2048 keys by blocks of 64. What is more broken than `MOST_LAYERS` intervals a row is taken as wide as it reaches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tilewise.distributed.intervals import Intervals, Ints, pieces
from tilewise.masks import UNBOUNDED, Literal, MaskProgram
from tilewise.masks.program import listed
from tilewise.problem import Problem

Layer = tuple[Ints, Ints]
MOST_LAYERS = 64
EXACT_DENSE = 2048
DENSE_BLOCK = 64


@dataclass(frozen=True)
class Coverage:
    """The layers of each batch entry that has keys of its own, and how many entries each of them stands for.

    The layers of an entry are disjoint: no row sees a key in two of them.
    """

    tokens: int
    entries: tuple[tuple[Layer, ...], ...]
    repeat: int

    @property
    def layers(self) -> list[Layer]:
        """Of all entries: their union is what travels."""
        return [layer for entry in self.entries for layer in entry]

    @cached_property
    def counts(self) -> Ints:
        """How many keys each row sees, all batch entries together."""
        total = np.zeros(self.tokens, np.int64)
        for first, past in self.layers:
            total += past - first
        return total * self.repeat

    @cached_property
    def seeing(self) -> Ints:
        """How many rows see each key, all batch entries together."""
        steps = np.zeros(self.tokens + 1, np.int64)
        for first, past in self.layers:
            some = first < past
            for at, step in ((first, 1), (past, -1)):
                steps += step * np.bincount(at[some], minlength=self.tokens + 1)
        return np.asarray(np.cumsum(steps)[:-1] * self.repeat)

    def parts(self, bounds: Ints) -> Parts:
        """All visible pairs as rectangles, cut at `bounds` (0 … tokens) both ways; see `Parts`."""
        tables = [_parts(first, past, bounds, self.tokens) for first, past in self.layers]
        q0, q1, k0, k1, area = (np.concatenate(column) for column in zip(*tables, strict=True))
        return Parts(q0, q1, k0, k1, area * self.repeat)

    @cached_property
    def borders(self) -> Ints:
        """Where the axis can be cut without parting a query from a key it sees, 0 and the end included."""
        reach, back = np.zeros(self.tokens, np.int64), np.full(self.tokens, self.tokens, np.int64)
        for first, past in self.layers:
            some = first < past
            reach, back = np.maximum(reach, np.where(some, past, 0)), np.minimum(back, np.where(some, first, self.tokens))
        reach, back = np.maximum.accumulate(reach), np.minimum.accumulate(back[::-1])[::-1]
        at = np.arange(1, self.tokens)
        free = at[(reach[:-1] <= at) & (back[1:] >= at)]
        return np.concatenate([[0], free, [self.tokens]]) if self.tokens else np.zeros(1, np.int64)


class Parts(NamedTuple):
    """Rectangles [q0, q1) × [k0, k1) whose first and last rows see some key in them, and every key of which is seen.

    area: the pairs in each that the mask lets through, all batch entries together. Rectangles of one layer have no pair in
    common; those of two layers may overlap, but not in pairs that count.
    """

    q0: Ints
    q1: Ints
    k0: Ints
    k1: Ints
    area: Ints

    def where(self, keep: Any) -> Parts:
        return Parts(*(column[keep] for column in self))


def _parts(first: Ints, past: Ints, bounds: Ints, tokens: int) -> Parts:
    """The rectangles of one layer.

    Rows that follow each other form a run while their intervals overlap and neither side falls back. Within a run both
    sides are sorted: which rows see a stretch of keys, and how much of it, are two searches in it.
    """
    row = np.flatnonzero(first < past)
    first, past = first[row], past[row]
    piece = np.searchsorted(bounds, row, side="right")
    falls = (first[1:] < first[:-1]) | (past[1:] < past[:-1]) | (first[1:] >= past[:-1])
    begin = np.concatenate([[True], (piece[1:] != piece[:-1]) | falls | (np.diff(row) != 1)])[: len(row)]
    start = np.flatnonzero(begin)
    end = np.append(start[1:], len(row))[: len(start)]
    number = np.cumsum(begin) - 1  # the run of each row
    cut, run, _ = pieces(Intervals(start, first[start], past[end - 1]), bounds)
    k0, k1 = cut.first, cut.past
    stretch = tokens + 1
    sums = _Sorted(number * stretch + first, first), _Sorted(number * stretch + past, past)
    low = sums[1].upto(run * stretch + k0)  # rows of the run that end before the stretch of keys
    high = sums[0].below(run * stretch + k1)  # rows that begin in it or before
    area = sums[1].clipped(low, high, k0, k1) - sums[0].clipped(low, high, k0, k1)
    return Parts(row[low], row[high - 1] + 1, k0, k1, area)


class _Sorted:
    """Values of rows, sorted run by run, with their sums."""

    def __init__(self, keys: Ints, values: Ints) -> None:
        self.keys, self.values = keys, values
        self.total = np.concatenate([[0], np.cumsum(values)])

    def below(self, limit: Ints) -> Ints:
        return np.searchsorted(self.keys, limit)

    def upto(self, limit: Ints) -> Ints:
        return np.searchsorted(self.keys, limit, side="right")

    def clipped(self, low: Ints, high: Ints, least: Ints, most: Ints) -> Ints:
        """Σ over rows [low, high) of the value cut to [least, most]."""
        offset = self.keys[low] - self.values[low]  # of the run
        under, over = self.below(offset + least), self.below(offset + most)
        under, over = np.clip(under, low, high), np.clip(over, low, high)
        return np.asarray((under - low) * least + self.total[over] - self.total[under] + (high - over) * most)


def _disjoint(layers: list[Layer]) -> tuple[Layer, ...]:
    """The same union, row by row, with no key in two layers."""
    if len(layers) == 1:
        first, past = layers[0]
        return ((first, np.maximum(first, past)),)
    first, past = np.array(layers).swapaxes(0, 1)
    order = np.argsort(first, axis=0, kind="stable")
    reach, found = np.zeros(first.shape[1], np.int64), []
    for begin, stop in zip(np.take_along_axis(first, order, 0), np.take_along_axis(past, order, 0), strict=True):
        begin = np.maximum(begin, reach)
        found.append((begin, np.maximum(begin, stop)))
        reach = np.maximum(reach, stop)
    return tuple(layer for layer in found if (layer[0] < layer[1]).any()) or (found[0],)


@dataclass(frozen=True)
class _Axis:
    """The tokens of all sequences on one axis: which sequence each is of, its place there, and where that one lies."""

    sequence: Ints
    place: Ints
    start: Ints
    end: Ints
    entry: int | None
    """The batch entry that is looked at; None in a packed batch, whose sequences are told apart by token."""

    def of(self, values: Any) -> Any:
        """The value of a per-sequence tensor for each token."""
        values = values.astype(np.int64)
        if len(values) == 1:
            return values[0]
        return values[self.sequence] if self.entry is None else values[self.entry]


def coverage(problem: Problem, lengths: Sequence[int] | None = None) -> Coverage:
    """The layers of a problem's mask; `lengths` are those of a packed batch. Tensors are read on the host."""
    program = on_host(problem.program)
    sizes = np.asarray([problem.seqlen_q] if lengths is None else lengths, np.int64)
    ends = np.cumsum(sizes)
    sequence = np.repeat(np.arange(len(sizes)), sizes)
    start, end = (ends - sizes)[sequence], ends[sequence]
    axis = _Axis(sequence, np.arange(len(sequence)) - start, start, end, None)
    if lengths is not None:
        return Coverage(len(sequence), (_disjoint(list(_layers(program, axis))),), 1)
    distinct = any(t.shape[0] > 1 for t in _per_entry(program))
    entries = [_disjoint(list(_layers(program, replace(axis, entry=b)))) for b in range(problem.batch if distinct else 1)]
    return Coverage(len(sequence), tuple(entries), 1 if distinct else problem.batch)


def on_host(program: MaskProgram) -> MaskProgram:
    """The program with its tensors as numpy arrays; what is one tensor stays one."""
    arrays = {id(t): t if isinstance(t, np.ndarray) else t.detach().cpu().numpy() for t in program.tensors}
    return MaskProgram(program.structure, program.ints, tuple(arrays[id(t)] for t in program.tensors))


def _per_entry(program: MaskProgram) -> Iterator[Any]:
    for term in program.terms():
        for literal in term:
            if not literal.kind.per_head:
                yield from literal.tensors


def _layers(program: MaskProgram, axis: _Axis) -> Iterator[Layer]:
    for term in program.terms():
        first, past = axis.start, axis.end
        data: list[list[Layer]] = []
        for literal in term:
            if literal.kind.reads_data:
                data.append(_within_budget(_data_layers(literal, axis)))
            else:
                low, high = _bounds(literal, axis)
                first, past = np.maximum(first, low), np.minimum(past, high)
        layers = [(first, past)]
        for others in data:
            product = [(np.maximum(f, g), np.minimum(p, q)) for f, p in layers for g, q in others]
            layers = _within_budget(product)
        yield from layers


def _within_budget(layers: list[Layer]) -> list[Layer]:
    """The layers, or one as wide as all of them where they are too many."""
    if len(layers) <= MOST_LAYERS:
        return layers
    first, past = np.array(layers).swapaxes(0, 1)
    empty = first >= past
    return [(np.where(empty, UNBOUNDED, first).min(axis=0), np.where(empty, -1, past).max(axis=0))]


def _bounds(literal: Literal, axis: _Axis) -> tuple[Any, Any]:
    """[first, past) that a band or range leaves each row."""
    kind, ints, tensors = literal
    if kind.is_band:
        lo, hi = ints
        anchor = axis.place + axis.start + (axis.of(tensors[0]) if kind.is_offset else 0)
        return (anchor + lo if lo > -UNBOUNDED else axis.start), (anchor + hi + 1 if hi < UNBOUNDED else axis.end)
    if kind.is_nothing:
        return axis.start, axis.start
    first, past = ints if kind.is_range else (axis.of(t) for t in tensors)
    return axis.start + first, axis.start + past


def _data_layers(literal: Literal, axis: _Axis) -> list[Layer]:
    kind, ints, tensors = literal
    if kind.is_documents:
        q_ids, k_ids = (t[axis.entry if axis.entry is not None and t.shape[0] > 1 else 0] for t in tensors)
        return _documents(k_ids if tensors[0] is tensors[1] else q_ids, k_ids, axis, kind.negated)
    if kind.is_selected:
        table = listed(tensors[0], 0, -(-int((axis.end - axis.start).max(initial=0)) // ints[1]))
        return _table((~table if kind.negated else table).any(axis=(0, 1)), ints[:2], axis)
    table, sizes = (tensors[0], ints) if kind.is_blocks else _blocked(tensors[0], kind.negated)
    seen = (~table if kind.negated else table).any(axis=(0, 1))
    return _table(seen, sizes, axis)


def _blocked(dense: Any, negated: bool) -> tuple[Any, tuple[int, int]]:
    """A dense mask as a table; where that is coarse, a block holds (or, negated, lacks) what any of its elements does."""
    sizes = []
    for side in (2, 3):
        length = dense.shape[side]
        block = UNBOUNDED if length == 1 else 1 if dense.shape[3] <= EXACT_DENSE else DENSE_BLOCK
        if block == DENSE_BLOCK:
            reduce = np.logical_and if negated else np.logical_or
            dense = reduce.reduceat(dense, np.arange(0, length, block), axis=side)
        sizes.append(block)
    return dense, (sizes[0], sizes[1])


def _table(seen: Any, sizes: tuple[int, ...], axis: _Axis) -> list[Layer]:
    """One layer for each run of set blocks that a row of the table has."""
    rows, cols = seen.shape
    edges = np.diff(np.pad(seen.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    row, begin = np.nonzero(edges == 1)
    _, stop = np.nonzero(edges == -1)
    number = np.arange(len(row)) - np.searchsorted(row, row)  # of the run within its row
    count = int(number.max()) + 1 if len(row) else 1
    first, past = np.zeros((2, count, rows), np.int64)
    first[number, row], past[number, row] = begin, stop
    if count > MOST_LAYERS:
        first, past = np.where(past > 0, first, cols).min(axis=0)[None], past.max(axis=0)[None]
    at = axis.place // sizes[0]
    return [(f[at] * sizes[1] + axis.start, p[at] * sizes[1] + axis.start) for f, p in zip(first, past, strict=True)]


def _documents(q_ids: Ints, k_ids: Ints, axis: _Axis, negated: bool) -> list[Layer]:
    """Runs of equal ids; a row has a layer for each run of its id (negated: for each gap between them)."""
    if not len(k_ids):
        return [(axis.start, axis.end)]
    keys, runs = _id_runs(k_ids, axis.sequence)
    order = np.argsort(keys, kind="stable")
    sorted_keys, begin, stop = keys[order], runs[:-1][order], runs[1:][order]
    if q_ids is not k_ids:
        wanted, runs = _id_runs(q_ids, axis.sequence)
    else:
        wanted = keys
    least, most = np.searchsorted(sorted_keys, wanted), np.searchsorted(sorted_keys, wanted, side="right")
    sizes = np.diff(runs)
    low, high = axis.start[runs[:-1]], axis.end[runs[:-1]]  # of the sequence that the run of queries lies in
    count = int((most - least).max())
    if count > MOST_LAYERS:
        spans = [(low, high)] if negated else [(begin[least % len(begin)], np.where(most > least, stop[most - 1], 0))]
        return [(np.repeat(first, sizes), np.repeat(past, sizes)) for first, past in spans]
    layers, before = [], low
    for j in range(count + negated):
        there = least + j < most
        here = np.minimum(least + j, len(begin) - 1)
        first, past = np.where(there, begin[here], high), np.where(there, stop[here], high)
        layers.append((before, first) if negated else (first, past))
        before = past
    return [(np.repeat(first, sizes), np.repeat(past, sizes)) for first, past in layers or [(low, low)]]


def _id_runs(ids: Ints, sequence: Ints) -> tuple[Ints, Ints]:
    """One number for the sequence and id of each run of tokens that share both, and where the runs start and end."""
    change = ids[1:] != ids[:-1]
    if sequence[-1]:
        change |= sequence[1:] != sequence[:-1]
    runs = np.concatenate([[0], np.flatnonzero(change) + 1, [len(ids)]])
    return sequence[runs[:-1]] * 2**32 + ids[runs[:-1]].astype(np.int64), runs
