"""The tiles of a problem: which are visited, how long they are, what their mask costs to read.

`Grid` is exact for every mask and is used wherever bytes are reported; `visited_fraction` is fast enough for choosing a tile at
call time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from tilewise.masks import Full, Interval, TileMap, visited_tiles
from tilewise.problem import Problem

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Classes = np.ndarray[Any, np.dtype[np.uint8]]


class HeadTiles:
    """The tiles of one query head: `count` heads of the problem look the same."""

    def __init__(self, b: int, h: int, count: int, classes: Classes, row_lengths: Ints, col_lengths: Ints) -> None:
        self.b, self.h, self.count = b, h, count
        self.classes = classes  # [Tr, Tc] of TileClass
        self.row_lengths, self.col_lengths = row_lengths, col_lengths

    @cached_property
    def visited(self) -> Bools:
        return np.asarray(self.classes > 0)

    @cached_property
    def partial(self) -> Bools:
        return np.asarray(self.classes == 1)

    @cached_property
    def by_row(self) -> Ints:
        """[Tr] tiles each row of tiles visits."""
        return np.asarray(self.visited.sum(axis=1, dtype=np.int64))

    @cached_property
    def by_col(self) -> Ints:
        """[Tc] rows of tiles that visit each key tile."""
        return np.asarray(self.visited.sum(axis=0, dtype=np.int64))

    @property
    def rows(self) -> int:
        """Queries of the rows of tiles that visit any tile."""
        return int(self.row_lengths[self.visited.any(axis=1)].sum())

    @property
    def rows_by_tile(self) -> int:
        """Queries of all visited tiles, counted once for each tile."""
        return int(self.by_row @ self.row_lengths)

    @property
    def keys_by_tile(self) -> int:
        """Keys of all visited tiles, counted once for each tile."""
        return int(self.by_col @ self.col_lengths)


class Grid:
    """A problem cut into tiles of `block_q` × `block_k`."""

    def __init__(self, problem: Problem, block_q: int, block_k: int) -> None:
        self.problem = problem = even(problem)
        self.block_q, self.block_k = block_q, block_k
        self.map = TileMap(problem.program, problem.shape, block_q, block_k)
        self.rows, self.cols = self.map.rows, self.map.cols
        self._classes: dict[tuple[int, int], Classes] = {}
        self.row_lengths = _lengths(problem.seqlen_q, block_q)
        self.col_lengths = _lengths(problem.seqlen_k, block_k)

    def classes(self, b: int, h: int) -> Classes:
        """[Tr, Tc] of one query head."""
        key = (b if self.map.per_batch else 0, h if self.map.per_head else 0)
        if key not in self._classes:
            self._classes[key] = self.map.classes(*key)
        return self._classes[key]

    def _head(self, b: int, h: int, count: int) -> HeadTiles:
        return HeadTiles(b, h, count, self.classes(b, h), self.row_lengths, self.col_lengths)

    def heads(self) -> Iterator[HeadTiles]:
        """Query heads, those with equal tiles together."""
        distinct, count = self.map.distinct(self.problem.heads)
        return (self._head(b, h, count) for b, h in distinct)

    def kv_heads(self) -> Iterator[tuple[list[HeadTiles], int]]:
        """For each key head (those with equal tiles together): its query heads' tiles, and how many such there are."""
        group = self.problem.group
        distinct, count = self.map.distinct(self.problem.kv_heads)
        for b, kv in distinct:
            if self.map.per_head:
                yield [self._head(b, kv * group + g, 1) for g in range(group)], count
            else:
                yield [self._head(b, kv * group, group)], count

    def keys_used(self, group: list[HeadTiles]) -> int:
        """Keys of the tiles that any head of a group visits."""
        used = np.any([head.visited.any(axis=0) for head in group], axis=0)
        return int(self.col_lengths[used].sum())

    def extras(self, head: HeadTiles) -> tuple[int, int]:
        """Bytes of bias over a head's visited tiles, and of mask tensors over its PARTIAL ones."""
        bias = int((head.visited * self.bias_bytes()).sum()) if self.problem.bias is not None else 0
        mask = int((head.partial * self.mask_bytes()).sum()) if self.problem.program.tensors else 0
        return bias, mask

    def area(self, head: HeadTiles) -> int:
        """Scores in a head's visited tiles; only the last row and column of tiles are shorter than the rest."""
        if not self.rows or not self.cols:
            return 0
        keys = head.by_row * self.col_lengths[0] + head.visited[:, -1] * (self.col_lengths[-1] - self.col_lengths[0])
        return int(keys @ self.row_lengths)

    def mask_bytes(self) -> Ints:
        """[Tr, Tc] bytes that evaluating the mask over a PARTIAL tile reads from its tensors."""
        rows, cols = self.row_lengths, self.col_lengths
        total = np.zeros((self.rows, self.cols), dtype=np.int64)
        for term in self.problem.program.terms():
            for kind, ints, tensors in term:
                if kind.is_documents:
                    total += 4 * (rows[:, None] + cols[None, :])
                elif kind.is_blocks:
                    total += np.outer(_spans(rows, self.block_q, ints[0]), _spans(cols, self.block_k, ints[1]))
                elif kind.is_selected:
                    total += 4 * ints[3] * _spans(rows, self.block_q, ints[0])[:, None]
                elif kind.is_dense:
                    total += self._broadcast(tensors[0].shape)
                else:
                    total += 4 * len(tensors)
        return total

    def bias_bytes(self) -> Ints:
        """[Tr, Tc] bytes of bias a visited tile reads."""
        shape = self.problem.bias
        if shape is None:
            return np.zeros((self.rows, self.cols), dtype=np.int64)
        return self._broadcast(shape) * self.problem.itemsize

    def _broadcast(self, shape: Any) -> Ints:
        """[Tr, Tc] elements that a tile needs of an array (B, H, Sq, Sk) whose sides may be 1."""
        sides = zip((self.row_lengths, self.col_lengths), shape[2:], strict=True)
        rows, cols = (lengths if size > 1 else np.ones_like(lengths) for lengths, size in sides)
        return np.asarray(np.outer(rows, cols))


_static_grid = lru_cache(maxsize=4)(Grid)


def grid_of(problem: Problem, block_q: int, block_k: int) -> Grid:
    """The grid, shared by the counts of one problem; masks with tensors are no values and are cut anew."""
    return _static_grid(problem, block_q, block_k) if problem.mask.static else Grid(problem, block_q, block_k)


def even(problem: Problem) -> Problem:
    """A packed batch as if all its sequences were equally long: a Problem does not hold the lengths themselves.

    Masks with tensors are cut along the real lengths, so they are taken as full here.
    """
    if not problem.varlen:
        return problem
    count = max(1, problem.batch)
    mask = problem.mask if problem.mask.static else Full()
    return replace(
        problem, varlen=False, seqlen_q=-(-problem.seqlen_q // count), seqlen_k=-(-problem.seqlen_k // count), mask=mask
    )


def _lengths(length: int, block: int) -> Ints:
    starts = np.arange(0, length, block, dtype=np.int64)
    return np.asarray(np.minimum(starts + block, length) - starts)


def _spans(lengths: Ints, block: int, size: int) -> Ints:
    """How many cells of `size` each tile touches."""
    starts = np.arange(len(lengths), dtype=np.int64) * block
    return np.asarray((starts + lengths - 1) // size - starts // size + 1)


def bucket(length: int) -> int:
    """A length rounded up to an eighth of its octave, exact up to 256.

    Tiles are cached by length. A cache of keys that grows by one a step would otherwise be planned anew at every step.
    """
    if length <= 256:
        return length
    step = 1 << (length.bit_length() - 4)
    return -(-length // step) * step


def band_of(problem: Problem) -> tuple[int, int] | None:
    """lo, hi of k - q for a mask that is one band, None for any other; lengths are those of a whole sequence."""
    kinds = problem.program.kinds
    if problem.varlen or len(kinds) != 1 or not kinds[0].is_band or kinds[0].is_offset:
        return None
    return problem.program.intervals(problem.shape)[0][:2]


@lru_cache(maxsize=4096)
def visited_fraction(band: tuple[int, int] | None, rows: int, keys: int, m: int, n: int) -> tuple[float, float]:
    """Visited tiles over all tiles, on average and in the fullest row of tiles.

    A mask that is not one band counts as full, which does not change which tile is best.
    """
    if band is None:
        return 1.0, 1.0
    visited, cols = visited_tiles([Interval(*band)], rows, keys, m, n), -(-keys // n)
    return float(visited.mean() / cols), float(visited.max() / cols)


def grid_fraction(problem: Problem, m: int, n: int, by_key: bool = False) -> tuple[float, float]:
    """The same counted in the grid of any mask: on average and in the fullest row of tiles, or column of a group of heads."""
    grid = grid_of(even(problem), m, n)
    every, blocks = (grid.rows * problem.group, grid.cols) if by_key else (grid.cols, grid.rows)
    if not every or not blocks:
        return 0.0, 0.0
    heads: list[tuple[Ints, int]] = [(head.by_row, head.count) for head in grid.heads()]
    if by_key:
        heads = [(np.sum([one.by_col * one.count for one in group], axis=0), count) for group, count in grid.kv_heads()]
    visited, counts = (np.array(column) for column in zip(*heads, strict=True))  # [heads, blocks], [heads]
    return float(counts @ visited.mean(axis=1)) / float(counts.sum() * every), float(visited.max()) / every
