"""Masks under which every row sees one interval of keys: the ends of all rows, as arrays.

Bands and ranges give such intervals, and so do documents whose tokens lie together, which they do wherever documents are packed
one after another. A conjunction intersects them. A union has them too if its parts touch in every row, as in a prefix-LM.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tilewise.masks.program import UNBOUNDED, Literal, MaskProgram, MaskShape
from tilewise.masks.rectangles import Array

Ends = tuple[Array, Array]
"""lo and hi of the keys [lo, hi) that each row sees; none where lo >= hi."""


class _Rows(NamedTuple):
    """Rows of one sequence, or of all sequences of a packed batch one after another. Positions count within the sequence."""

    q: Array
    keys: Any  # keys of the row's sequence
    shift: Any  # keys less queries of it
    sequence: Any  # its number
    begins: Array  # where sequences begin among the rows


def row_ends(program: MaskProgram, shape: MaskShape, packed: tuple[Array, Array] | None = None) -> Ends | None:
    """lo and hi (B or 1, rows) of a mask under which each row sees one interval of keys; None for any other mask.

    Both ends never fall from row to row of a sequence, and of the keys between those of two rows each is seen by some row between
    them: where a mask has no such ends, the answer is None too. `packed` are the cumulative lengths of a packed batch.
    """
    terms = list(program.terms())
    if not all(_has_ends(literal) for term in terms for literal in term):
        return None
    if packed is not None:
        ends = _ends(terms, _packed_rows(*packed), packed)
        return None if ends is None else (ends[0][None], ends[1][None])
    each = any(t.shape[0] > 1 for t in program.tensors)
    _, _, queries, keys = shape
    found = []
    for b in range(shape.batch if each else 1):
        rows = _Rows(np.arange(queries, dtype=np.int64), keys, keys - queries, b, np.zeros(1, dtype=np.int64))
        ends = _ends(terms, rows, None)
        if ends is None:
            return None
        found.append(ends)
    return (np.stack([lo for lo, _ in found]), np.stack([hi for _, hi in found])) if found else None


def _has_ends(literal: Literal) -> bool:
    kind = literal.kind
    return kind.is_interval or (kind.is_documents and not kind.negated and _same(*literal.tensors))


def _same(a: Any, b: Any) -> bool:
    """Are the ids of the queries those of the keys?"""
    return a is b or (a.shape == b.shape and bool((a == b).all()))


def _packed_rows(cu_q: Array, cu_k: Array) -> _Rows:
    queries, keys = np.diff(cu_q).astype(np.int64), np.diff(cu_k).astype(np.int64)
    sequence = np.repeat(np.arange(len(queries)), queries)
    q = np.arange(len(sequence), dtype=np.int64) - cu_q[:-1].astype(np.int64)[sequence]
    return _Rows(q, keys[sequence], (keys - queries)[sequence], sequence, np.unique(cu_q[:-1]).astype(np.int64))


def _ends(terms: list[list[Literal]], rows: _Rows, packed: tuple[Array, Array] | None) -> Ends | None:
    every = []
    for term in terms:
        lo, hi = np.zeros_like(rows.q), np.full_like(rows.q, rows.keys)
        for literal in term:
            ends = _of_literal(literal, rows, packed)
            if ends is None:
                return None
            lo, hi = np.maximum(lo, ends[0]), np.minimum(hi, ends[1])
        every.append((lo, hi))
    joined = _joined(every)
    return None if joined is None else _monotone(*joined, rows)


def _of_literal(literal: Literal, rows: _Rows, packed: tuple[Array, Array] | None) -> tuple[Any, Any] | None:
    kind, ints, tensors = literal

    def own(tensor: Any) -> Any:
        values = np.asarray(tensor).astype(np.int64)
        return values[0] if len(values) == 1 else values[rows.sequence]

    if kind.is_band:
        lo, hi = ints
        at = rows.q + (own(tensors[0]) if kind.is_offset else rows.shift if kind.is_bottom_right else 0)
        return (0 if lo <= -UNBOUNDED else at + lo), (UNBOUNDED if hi >= UNBOUNDED else at + hi + 1)
    if kind.is_range:
        return ints[0], ints[1]
    if kind.is_padding:
        return own(tensors[0]), own(tensors[1])
    if kind.is_nothing:
        return 0, 0
    ids = np.asarray(tensors[0])
    if packed is None:
        return _runs(ids[rows.sequence if len(ids) > 1 else 0], rows)
    if not np.array_equal(*packed):
        return None
    return _runs(ids[0], rows)


def _runs(ids: Array, rows: _Rows) -> Ends | None:
    """Where the document of each row begins and ends; None if one lies in several places of a sequence."""
    count = len(ids)
    if not count:
        return rows.q, rows.q
    first = np.zeros(count, dtype=np.bool_)
    first[1:] = ids[1:] != ids[:-1]
    first[rows.begins[rows.begins < count]] = True
    begins = np.flatnonzero(first)
    sequence = rows.sequence[begins] if isinstance(rows.sequence, np.ndarray) else np.zeros(len(begins), dtype=np.int64)
    names = np.unique((sequence << 32) + ids[begins])
    if len(names) < len(begins):
        return None
    lengths = np.diff(begins, append=count)
    start = rows.q[begins]
    return np.repeat(start, lengths), np.repeat(start + lengths, lengths)


def _joined(every: list[Ends]) -> Ends | None:
    """The union of several intervals of each row; None if they leave a gap in some row."""
    if len(every) == 1:
        return every[0]
    lows, highs = (np.stack(side) for side in zip(*every, strict=True))
    lows = np.where(lows < highs, lows, UNBOUNDED)  # what is empty comes last, and reaches nothing
    order = np.argsort(lows, axis=0)
    lows, highs = np.take_along_axis(lows, order, 0), np.take_along_axis(highs, order, 0)
    end = highs[0]
    for lo, hi in zip(lows[1:], highs[1:], strict=True):
        there = lo < hi
        if (there & (lo > end)).any():
            return None
        end = np.where(there, np.maximum(end, hi), end)
    return lows[0], end


def _monotone(lo: Array, hi: Array, rows: _Rows) -> Ends | None:
    """The ends as they promise to be; None if they cannot. Rows that see nothing get ends between those of their neighbours."""
    if len(rows.begins) == 1 and (lo < hi).all():  # the usual case, and the fast one
        falls = (lo[:-1] > lo[1:]).any() or (hi[:-1] > hi[1:]).any() or (lo[1:] > hi[:-1]).any()
        return None if falls else (lo, hi)
    begins = np.zeros(len(lo), dtype=np.bool_)
    begins[rows.begins[rows.begins < len(lo)]] = True
    seeing = np.flatnonzero(lo < hi)
    group = np.cumsum(begins)
    a, b = seeing[:-1], seeing[1:]
    same = group[a] == group[b]
    if (same & ((lo[a] > lo[b]) | (hi[a] > hi[b]) | (lo[b] > hi[a]) | ((b - a > 1) & (lo[b] < hi[a])))).any():
        return None
    if len(seeing) < len(lo):
        lo, hi = _filled(lo, hi, seeing, group)
    return lo, hi


def _filled(lo: Array, hi: Array, seeing: Array, group: Array) -> Ends:
    """A row that sees nothing: from the lo of the next row that sees some to the hi of the last one that did."""
    blind = np.ones(len(lo), dtype=np.bool_)
    blind[seeing] = False
    at = np.flatnonzero(blind)
    after = np.searchsorted(seeing, at)
    following, before = np.append(seeing, -1)[after], np.insert(seeing, 0, -1)[after]
    lo, hi = lo.copy(), hi.copy()
    lo[at] = np.where((following >= 0) & (group[following] == group[at]), lo[following], UNBOUNDED)
    hi[at] = np.where((before >= 0) & (group[before] == group[at]), hi[before], 0)
    return lo, hi
