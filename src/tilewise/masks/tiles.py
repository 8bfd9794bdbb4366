"""Which tiles of a mask hold nothing, something or everything: decided in closed form, never by building N × N.

Bands and key ranges of one term are intersected exactly; the other literals are classified each for itself (`rectangles`) and
combined by the three-valued logic in which AND is the minimum and OR the maximum. So the answer is always sound (an EMPTY tile
is empty, a FULL one full) and exact for single masks and for conjunctions of bands and ranges.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tilewise.errors import MaskError
from tilewise.masks.program import Literal, MaskProgram, MaskShape, interval
from tilewise.masks.visits import visits

Classes = np.ndarray[Any, np.dtype[np.uint8]]  # numpy.typing would be imported for these names alone
Array = np.ndarray[Any, np.dtype[Any]]
Runs = tuple[Array, Array]
"""[first, past) of the tiles of each line."""
LINES = 64
"""Rows of tiles classified together: neighbours are asked for next, and all of them are N × N."""


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
            [literal._replace(tensors=tuple(map(as_array, literal.tensors))) for literal in term]
            for term in program.terms()
        ]
        tensors = [(literal.kind, t) for term in self._terms for literal in term for t in literal.tensors]
        self.per_batch = any(t.shape[0] > 1 for _, t in tensors)
        self.per_head = any(kind.per_head and t.shape[1] > 1 for kind, t in tensors)
        self._some = lru_cache(maxsize=64)(self._classify_some)
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
        """[rows, cols] of one sequence and query head."""
        return self._classify((0, self.rows), (0, self.cols), b * self.per_batch, h * self.per_head)

    def counts(self) -> TileCounts:
        """Tiles of each class over all sequences and query heads."""
        distinct, repeat = self.distinct(self.shape.heads)
        total = np.zeros(3, dtype=np.int64)
        for b, h in distinct:
            for i in range(0, self.rows, LINES):
                total += np.bincount(self._some(i // LINES, False, b, h).ravel(), minlength=3)
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
        lines = [self._some(index // LINES, across, *place)[index % LINES] for place in own]
        if len(lines) == 1:
            return np.asarray(lines[0])
        stacked = np.stack(lines)
        low, high = stacked.min(axis=0), stacked.max(axis=0)
        return np.where(low == high, low, np.uint8(TileClass.PARTIAL))

    def _classify_some(self, part: int, across: bool, b: int, h: int) -> Classes:
        """LINES neighbouring rows, or columns (`across`), one after another."""
        lines = (part * LINES, min((part + 1) * LINES, self.cols if across else self.rows))
        return self._classify((0, self.rows), lines, b, h).T if across else self._classify(lines, (0, self.cols), b, h)

    def _classify(self, rows: tuple[int, int], cols: tuple[int, int], b: int, h: int) -> Classes:
        """The tiles of some rows and columns, [rows, cols]."""
        _, _, queries, keys = self.shape
        edges = _edges(rows, self.block_q, queries), _edges(cols, self.block_k, keys)
        result = np.zeros((rows[1] - rows[0], cols[1] - cols[0]), dtype=np.uint8)
        for number, term in enumerate(self._terms):
            classes = _in_runs(*self._runs(number, b), slice(*rows), cols)
            for literal in term:
                if literal.kind.reads_data:
                    from tilewise.masks.rectangles import Edges, classify_literal  # masks without data need none

                    classes = np.minimum(classes, classify_literal(_own(literal, b, h), Edges(*edges)))
            result = np.maximum(result, classes)
        return result

    def _interval_runs(self, number: int, b: int) -> tuple[Runs, Runs]:
        """The visited and the FULL tiles of every row, as far as the bands and ranges of a term decide."""
        _, _, queries, keys = self.shape
        term, sizes = interval(self._terms[number], self.shape, b), (queries, keys, self.block_q, self.block_k)
        return visits(term, *sizes), visits(term, *sizes, full=True)


def _own(literal: Literal, b: int, h: int) -> Literal:
    """What the literal's tensors hold for one sequence and head: ids (S,), tables and lists of rank 2."""
    tensors = [t[b if t.shape[0] > 1 else 0] for t in literal.tensors]
    return literal._replace(tensors=tuple(t[literal.side(h)] for t in tensors) if literal.kind.per_head else tuple(tensors))


def _edges(tiles: tuple[int, int], block: int, length: int) -> Array:
    """Where tiles begin, and the last one ends."""
    return np.minimum(np.arange(tiles[0], tiles[1] + 1, dtype=np.int64) * block, length)


def _visits(classes: Classes) -> list[tuple[int, TileClass]]:
    return [(int(j), TileClass(classes[j])) for j in np.flatnonzero(classes)]


def as_array(tensor: Any) -> Array:
    return tensor if isinstance(tensor, np.ndarray) else np.asarray(tensor.detach().cpu().numpy())


def _in_runs(visited: Runs, full: Runs, lines: slice, tiles: tuple[int, int]) -> Classes:
    """Classes [lines, tiles] of tiles by the runs they lie in."""
    number = np.arange(*tiles)
    some, every = ((number >= first[lines, None]) & (number < past[lines, None]) for first, past in (visited, full))
    return some.astype(np.uint8) + (some & every)
