"""A mask restricted to a rectangle, or to some tokens: the program of some rows and keys of a problem, which count from 0 there.

Bands and ranges that let the whole rectangle through are left out, terms that let nothing through too, so a rectangle that is
full has no mask at all, and a square on the diagonal of a causal one is causal. Tensors are cut as views where that is possible.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np

from tilewise.masks.algebra import lowered
from tilewise.masks.program import KINDS, UNBOUNDED, Literal, MaskProgram, MaskShape

Range = tuple[int, int]
ROWS, KEYS = 2, 3
"""Sides of a table (B, H, queries, keys)."""


def restricted(
    program: MaskProgram, shape: MaskShape, q: Range, k: Range, heads: Range | None = None, *, reads: bool = False
) -> MaskProgram:
    """The program of rows `q` × keys `k`, and of some `heads`, of one that was lowered for `shape`.

    Of a packed batch, `program` is that of one sequence (`MaskProgram.for_sequence`) and `shape` has its lengths.
    reads: tensors are on the host, so ids are read, and documents left out where there is one alone.
    """
    cut = _Cut(shape, q, k, heads, reads)
    terms = [[cut.literal(literal) for literal in term] for term in program.terms()]
    kept = [[literal for literal in term if literal is not True] for term in terms if False not in term]
    return lowered(kept)  # type: ignore[arg-type]  # no booleans are left


def picked(program: MaskProgram, shape: MaskShape, tokens: Any, sequences: Any = None) -> MaskProgram | None:
    """The program of some tokens of a self-attention, in their order, as queries and as keys; None where there is none.

    Order is all that a causal mask asks for, so it stays one; a window would have to know how far tokens are apart.

    tokens: their numbers in the whole, ascending, of the kind that indexes the program's tensors.
    sequences: the sequence of each of them, if there are several: these see only each other then.
    """
    apart = [] if sequences is None else [Literal(KINDS["d"], (), (sequences[None], sequences[None]))]
    terms: list[list[Literal]] = []
    for term in program.terms():
        kept = [_picked(literal, shape, tokens) for literal in term]
        if None in kept:
            return None
        terms.append([*(literal for literal in kept if literal is not None), *apart])
    return lowered(terms)


def grouped(q_ids: Any, k_ids: Any) -> MaskProgram:
    """The program of queries and keys (one number each) that see all of those with the same number, and nothing else."""
    return lowered([[Literal(KINDS["d"], (), (q_ids[None], k_ids[None]))]])


def ordered(ids: Any, causal: bool) -> MaskProgram:
    """The program of tokens that see those of the same number (ids; None: all), with `causal` only up to themselves."""
    numbers = [] if ids is None else [Literal(KINDS["d"], (), (ids[None],) * 2)]
    return lowered([[*([Literal(KINDS["b"], (-UNBOUNDED, 0), ())] if causal else []), *numbers]])


def _picked(literal: Literal, shape: MaskShape, tokens: Any) -> Literal | None:
    """The literal of some tokens; None where their order does not say."""
    kind, tensors = literal.kind, literal.tensors
    if kind.is_documents:
        ids = tensors[0][:, tokens]
        return literal._replace(tensors=(ids, ids if tensors[0] is tensors[1] else tensors[1][:, tokens]))
    if not kind.is_band or kind.is_offset:
        return literal if kind.is_nothing else None
    lo, hi = literal.band(literal.shift(shape))
    ordered = lo in (-UNBOUNDED, 0, 1) and hi in (UNBOUNDED, 0, -1)  # before, not after, and the other way
    return Literal(KINDS["b"], (lo, hi), ()) if ordered else None


class _Cut:
    """A rectangle of the scores, and the literals of the whole in it."""

    def __init__(self, shape: MaskShape, q: Range, k: Range, heads: Range | None, reads: bool) -> None:
        self.shape, self.q, self.k, self.heads, self.reads = shape, q, k, heads, reads
        self.rows, self.keys = q[1] - q[0], k[1] - k[0]

    def literal(self, literal: Literal) -> Literal | bool:
        """The literal in the rectangle; True if it holds all over it, False if nowhere."""
        kind, ints, tensors = literal
        if kind.is_offset:
            return literal._replace(tensors=(tensors[0] + (self.q[0] - self.k[0]),))
        if kind.is_band:
            return self._band(*literal.band(literal.shift(self.shape)))
        if kind.is_range:
            start, end = max(ints[0] - self.k[0], 0), min(ints[1] - self.k[0], self.keys)
            if (start, end) == (0, self.keys):
                return True
            return literal._replace(ints=(start, end)) if start < end else False
        if kind.is_padding:
            return literal._replace(tensors=tuple((t - self.k[0]).clip(0, self.keys) for t in tensors))
        if kind.is_documents:
            ids = tensors[0][:, slice(*self.q)], tensors[1][:, slice(*self.k)]
            if self.reads and all((side == ids[0][:, :1]).all() for side in ids):
                return not kind.negated
            return literal._replace(tensors=ids)
        if kind.is_nothing:
            return False
        if self.heads is not None and self.heads != (0, self.shape.heads):
            literal = literal.for_heads(range(*self.heads))
        table, ints = literal.tensors[0], literal.ints
        if kind.is_selected:
            return self._selected(literal)
        if kind.is_dense:
            table = table[:, :, slice(*self.q)] if table.shape[ROWS] > 1 else table
            return literal._replace(tensors=(table[..., slice(*self.k)] if table.shape[KEYS] > 1 else table,))
        table, size_q = _blocks(table, ints[0], self.q, ROWS)
        table, size_k = _blocks(table, ints[1], self.k, KEYS)
        return literal._replace(ints=(size_q, size_k), tensors=(table,))

    def _selected(self, literal: Literal) -> Literal:
        """Lists that name blocks of the rectangle: what lies outside of it is below 0 or past its last block."""
        size_q, size_k, heads, count = literal.ints
        lists, size_q = _blocks(literal.tensors[0], size_q, self.q, ROWS)
        lists = lists.clip(-1, -(-self.shape.seqlen_k // size_k))
        start = self.k[0]
        fine = gcd(size_k, start)
        parts = size_k // fine  # a block of the whole is so many here
        entries = [entry for entry in range(count) for _ in range(parts)]
        offsets = [part - start // fine for _ in range(count) for part in range(parts)]
        moved = np.asarray(offsets, lists.dtype) if isinstance(lists, np.ndarray) else lists.new_tensor(offsets)
        return literal._replace(ints=(size_q, fine, heads, count * parts), tensors=(lists[..., entries] * parts + moved,))

    def _band(self, lo: int, hi: int) -> Literal | bool:
        """lo <= k - q <= hi of the whole, counted from the rectangle's last row and key."""
        least, most = 1 - self.rows, self.keys - 1  # of k - q in the rectangle
        ahead = self.q[0] - self.k[0]
        low = lo + ahead if lo > -UNBOUNDED else -UNBOUNDED
        high = hi + ahead if hi < UNBOUNDED else UNBOUNDED
        if low > most or high < least or low > high:
            return False
        if low <= least and high >= most:
            return True
        corner = self.keys - self.rows
        ints = (low - corner if low > least else -UNBOUNDED, high - corner if high < most else UNBOUNDED)
        return Literal(KINDS["b"], ints, ())


def _blocks(table: Any, size: int, span: Range, side: int) -> tuple[Any, int]:
    """The blocks of a table along a side that a span of positions meets, and their size: that of the whole where a block begins
    with the span, a divisor of it elsewhere."""
    start, end = span
    first, past = start // size, -(-end // size)
    if start % size and past - first > 1:
        fine = gcd(size, start)
        picked = [position // size for position in range(start, end, fine)]
        return (table[:, :, picked] if side == ROWS else table[:, :, :, picked]), fine
    cut = slice(first, past)
    return (table[:, :, cut] if side == ROWS else table[:, :, :, cut]), size
