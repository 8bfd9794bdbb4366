"""Which tiles of a mask hold nothing, something or everything: decided in closed form, never by building N × N.

Bands and key ranges of one term are intersected exactly; the other literals are classified each for itself and combined by
the three-valued logic in which AND is the minimum and OR the maximum. So the answer is always sound (an EMPTY tile is empty,
a FULL one full) and exact for single masks and for conjunctions of bands and ranges.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tilewise.errors import MaskError
from tilewise.masks.program import Literal, MaskProgram, MaskShape, interval, listed
from tilewise.masks.visits import visits

Classes = np.ndarray[Any, np.dtype[np.uint8]]  # numpy.typing would be imported for these names alone
Array = np.ndarray[Any, np.dtype[Any]]
Runs = tuple[Array, Array]
"""[first, past) of the tiles of each line."""


class TileClass(IntEnum):
    EMPTY = 0
    PARTIAL = 1
    FULL = 2


class TileCounts(NamedTuple):
    empty: int
    partial: int
    full: int

    @property
    def visited(self) -> int:
        return self.partial + self.full


class _Line(NamedTuple):
    """One row of tiles (`across` = False: fixed queries, keys move) or one column (fixed keys, queries move)."""

    fixed: tuple[int, int]
    starts: Array  # of the moving tiles
    ends: Array
    across: bool


class TileMap:
    """The classes of a program's tiles of `block_q` × `block_k`."""

    def __init__(self, program: MaskProgram, shape: MaskShape, block_q: int, block_k: int) -> None:
        if block_q < 1 or block_k < 1:
            raise MaskError(f"tile {block_q} × {block_k}: both sides must be at least 1")
        self.shape = shape
        self.block_q, self.block_k = block_q, block_k
        self.rows = -(-shape.seqlen_q // block_q)
        self.cols = -(-shape.seqlen_k // block_k)
        self._terms = [
            [literal._replace(tensors=tuple(map(_numpy, literal.tensors))) for literal in term]
            for term in program.terms()
        ]
        tensors = [(literal.kind, t) for term in self._terms for literal in term for t in literal.tensors]
        self.per_batch = any(t.shape[0] > 1 for _, t in tensors)
        self.per_head = any(kind.per_head and t.shape[1] > 1 for kind, t in tensors)
        # neighbours ask for the same line; N × N stays out of memory
        self._line = lru_cache(maxsize=64)(self._classify_line)
        self._runs = lru_cache(maxsize=64)(self._interval_runs)

    def row(self, i: int, b: int | None = None, h: int | None = None) -> Classes:
        """Classes of the key tiles of query tile `i`; without `b` or `h`, over all sequences or heads together."""
        return self._together(i, False, b, h)

    def col(self, j: int, b: int | None = None, h: int | None = None) -> Classes:
        """Classes of the query tiles of key tile `j`."""
        return self._together(j, True, b, h)

    def key_blocks(self, i: int, b: int | None = None, h: int | None = None) -> list[tuple[int, TileClass]]:
        """The key tiles that query tile `i` visits, in order."""
        return _visits(self.row(i, b, h))

    def query_blocks(self, j: int, b: int | None = None, h: int | None = None) -> list[tuple[int, TileClass]]:
        """The query tiles that visit key tile `j`, in order."""
        return _visits(self.col(j, b, h))

    def classes(self, b: int = 0, h: int = 0) -> Classes:
        """[rows, cols] of one sequence and query head; all rows at once where no data are read."""
        if self.rows and any(literal.kind.reads_data for term in self._terms for literal in term):
            return np.stack([self.row(i, b, h) for i in range(self.rows)])
        result = np.zeros((self.rows, self.cols), dtype=np.uint8)
        for number in range(len(self._terms)):
            result = np.maximum(result, _in_runs(*self._runs(number, False, b), slice(None), self.cols))
        return result

    def counts(self) -> TileCounts:
        """Tiles of each class over all sequences and query heads."""
        distinct, repeat = self.distinct(self.shape.heads)
        total = np.zeros(3, dtype=np.int64)
        for b, h in distinct:
            for i in range(self.rows):
                total += np.bincount(self.row(i, b, h), minlength=3)
        return TileCounts(*(int(n) * repeat for n in total))

    def distinct(self, heads: int) -> tuple[list[tuple[int, ...]], int]:
        """(sequence, head) of those that may have tiles of their own, of `heads` heads; how many look like each of them."""
        batch = self.shape.batch
        sizes = (batch if self.per_batch else min(1, batch), heads if self.per_head else min(1, heads))
        return list(np.ndindex(sizes)), (1 if self.per_batch else batch) * (1 if self.per_head else heads)

    def _together(self, index: int, across: bool, b: int | None, h: int | None) -> Classes:
        """One line; where several sequences or heads are asked for together, EMPTY and FULL must hold for each of them."""
        if not 0 <= index < (self.cols if across else self.rows):
            raise IndexError(f"tile {index} of {self.cols if across else self.rows}")
        batches = [b or 0] if b is not None or not self.per_batch else range(self.shape.batch)
        heads = [h or 0] if h is not None or not self.per_head else range(self.shape.heads)
        own = ((x * self.per_batch, y * self.per_head) for x in batches for y in heads)
        lines = [self._line(index, across, *place) for place in own]
        if len(lines) == 1:
            return lines[0]
        stacked = np.stack(lines)
        low, high = stacked.min(axis=0), stacked.max(axis=0)
        return np.where(low == high, low, np.uint8(TileClass.PARTIAL))

    def _classify_line(self, index: int, across: bool, b: int, h: int) -> Classes:
        shape = self.shape
        fixed_block, fixed_len = (self.block_k, shape.seqlen_k) if across else (self.block_q, shape.seqlen_q)
        block, length = (self.block_q, shape.seqlen_q) if across else (self.block_k, shape.seqlen_k)
        starts = np.arange(0, length, block, dtype=np.int64)
        fixed = (index * fixed_block, min((index + 1) * fixed_block, fixed_len))
        line = _Line(fixed, starts, np.minimum(starts + block, length), across)
        result = np.zeros(len(starts), dtype=np.uint8)
        for number, term in enumerate(self._terms):
            classes = _in_runs(*self._runs(number, across, b), slice(index, index + 1), len(starts))[0]
            for literal in term:
                if literal.kind.reads_data:
                    classes = np.minimum(classes, self._classify_literal(literal, line, b, h))
            result = np.maximum(result, classes)
        return result

    def _interval_runs(self, number: int, across: bool, b: int) -> tuple[Runs, Runs]:
        """The visited and the FULL tiles of every line, as far as the bands and ranges of a term decide."""
        _, _, queries, keys = self.shape
        term, sizes = interval(self._terms[number], self.shape, b), (queries, keys, self.block_q, self.block_k)
        return visits(term, *sizes, by_key=across), visits(term, *sizes, by_key=across, full=True)

    def _classify_literal(self, literal: Literal, line: _Line, b: int, h: int) -> Classes:
        """The classes of one literal that reads data."""
        kind, ints, tensors = literal
        if kind.is_documents:
            classes = _documents(_pick(tensors[0], b), _pick(tensors[1], b), line)
        else:
            own = _pick(tensors[0], b)[literal.side(h)]
            if kind.is_blocks:
                classes = _blocks(own, ints, line)
            elif kind.is_selected:
                classes = _selected(own, ints, line)
            else:
                classes = _dense(own, self.shape, line)
        return 2 - classes if kind.negated else classes


def _visits(classes: Classes) -> list[tuple[int, TileClass]]:
    return [(int(j), TileClass(classes[j])) for j in np.flatnonzero(classes)]


def _pick(array: Array, index: int) -> Any:
    return array[index if array.shape[0] > 1 else 0]


def _numpy(tensor: Any) -> Array:
    return tensor if isinstance(tensor, np.ndarray) else np.asarray(tensor.detach().cpu().numpy())


def _three(some: Any, every: Any) -> Classes:
    return np.where(every, np.uint8(2), np.where(some, np.uint8(1), np.uint8(0))).astype(np.uint8)


def _in_runs(visited: Runs, full: Runs, lines: slice, tiles: int) -> Classes:
    """Classes [lines, tiles] of tiles by the runs they lie in."""
    number = np.arange(tiles)
    some, every = ((number >= first[lines, None]) & (number < past[lines, None]) for first, past in (visited, full))
    return some.astype(np.uint8) + (some & every)


def _documents(q_ids: Array, k_ids: Array, line: _Line) -> Classes:
    fixed, moving = (k_ids, q_ids) if line.across else (q_ids, k_ids)
    here = np.unique(fixed[slice(*line.fixed)])
    hit = np.isin(moving, here)
    some = np.logical_or.reduceat(hit, line.starts) if len(line.starts) else hit[:0]
    if len(here) > 1 or not len(line.starts):
        return _three(some, np.zeros_like(some))
    return _three(some, np.logical_and.reduceat(hit, line.starts))


def _blocks(table: Array, sizes: tuple[int, ...], line: _Line) -> Classes:
    fixed_size, moving_size = (sizes[1], sizes[0]) if line.across else sizes
    lines = (table.T if line.across else table)[line.fixed[0] // fixed_size : (line.fixed[1] - 1) // fixed_size + 1]
    first, last = line.starts // moving_size, (line.ends - 1) // moving_size
    held = np.concatenate([[0], np.cumsum(lines.any(axis=0))])
    filled = np.concatenate([[0], np.cumsum(lines.all(axis=0))])
    return _three(held[last + 1] > held[first], filled[last + 1] - filled[first] == last + 1 - first)


def _selected(lists: Array, sizes: tuple[int, ...], line: _Line) -> Classes:
    """As a table of the blocks that the line meets; lists of other queries, and blocks of other keys, are not looked at."""
    size_q, size_k = sizes[:2]
    queries, keys = (line.starts, line.fixed) if line.across else (line.fixed, line.starts)
    if not len(line.starts):
        return np.zeros(0, dtype=np.uint8)
    if line.across:
        first, past = keys[0] // size_k, (keys[1] - 1) // size_k + 1
        table = listed(lists, first, past - first)
        shifted = line._replace(fixed=(keys[0] - first * size_k, keys[1] - first * size_k))
    else:
        first, past = queries[0] // size_q, (queries[1] - 1) // size_q + 1
        table = listed(lists[first:past], 0, int(line.ends[-1] - 1) // size_k + 1)
        shifted = line._replace(fixed=(queries[0] - first * size_q, queries[1] - first * size_q))
    return _blocks(table, (size_q, size_k), shifted)


def _dense(dense: Array, shape: MaskShape, line: _Line) -> Classes:
    dense = np.broadcast_to(dense, (shape.seqlen_q, shape.seqlen_k))
    lines = (dense.T if line.across else dense)[slice(*line.fixed)]
    if not len(line.starts):
        return np.zeros(0, dtype=np.uint8)
    return _three(
        np.logical_or.reduceat(lines.any(axis=0), line.starts), np.logical_and.reduceat(lines.all(axis=0), line.starts)
    )
