"""The tiles of a problem as matrices: which are visited, how long they are, what their mask costs to read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from tilewise.masks import UNBOUNDED, Full, MaskProgram, TileMap
from tilewise.problem import Problem

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Classes = np.ndarray[Any, np.dtype[np.uint8]]


class HeadTiles:
    """The tiles of one query head: `count` heads of the problem look the same."""

    def __init__(self, b: int, h: int, count: int, classes: Classes) -> None:
        self.b, self.h, self.count = b, h, count
        self.classes = classes  # [Tr, Tc] of TileClass

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


class Grid:
    """A problem cut into tiles of `block_q` × `block_k`."""

    def __init__(self, problem: Problem, block_q: int, block_k: int) -> None:
        self.problem = problem = even(problem)
        self.block_q, self.block_k = block_q, block_k
        self.map = TileMap(problem.program, problem.shape, block_q, block_k)
        self._classes: dict[tuple[int, int], Classes] = {}
        self.row_lengths = _lengths(problem.seqlen_q, block_q)
        self.col_lengths = _lengths(problem.seqlen_k, block_k)

    @property
    def rows(self) -> int:
        return self.map.rows

    @property
    def cols(self) -> int:
        return self.map.cols

    def classes(self, b: int, h: int) -> Classes:
        """[Tr, Tc] of one query head."""
        key = (b if self.map.per_batch else 0, h if self.map.per_head else 0)
        if key not in self._classes:
            self._classes[key] = self._classify(*key)
        return self._classes[key]

    def _classify(self, b: int, h: int) -> Classes:
        if not self.rows or not self.cols:
            return np.zeros((self.rows, self.cols), dtype=np.uint8)
        if self.problem.program.structure in ("", "b", "t"):
            return self._band_classes()
        return np.stack([self.map.row(i, b, h) for i in range(self.rows)])

    def _band_classes(self) -> Classes:
        """The same for lo <= k - q <= hi, all rows at once: long sequences have millions of tiles."""
        problem, program = self.problem, self.problem.program
        lo, hi = program.ints or (-UNBOUNDED, UNBOUNDED)
        shift = problem.seqlen_k - problem.seqlen_q if program.structure == "b" else 0
        lo = lo + shift if lo > -UNBOUNDED else -2 * UNBOUNDED
        hi = hi + shift if hi < UNBOUNDED else 2 * UNBOUNDED
        q_first = np.arange(self.rows, dtype=np.int64) * self.block_q
        k_first = np.arange(self.cols, dtype=np.int64) * self.block_k
        q_last, k_last = q_first + self.row_lengths - 1, k_first + self.col_lengths - 1
        # a tile's k - q runs from k_first - q_last to k_last - q_first
        column = np.arange(self.cols)
        some = column >= np.searchsorted(k_last, q_first + lo, "left")[:, None]
        some &= column < np.searchsorted(k_first, q_last + hi, "right")[:, None]
        every = column >= np.searchsorted(k_first, q_last + lo, "left")[:, None]
        every &= column < np.searchsorted(k_last, q_first + hi, "right")[:, None]
        some &= lo <= hi
        return some.astype(np.uint8) + (some & every)

    def heads(self) -> Iterator[HeadTiles]:
        """Query heads, those with equal tiles together."""
        problem = self.problem
        batches = range(problem.batch) if self.map.per_batch else range(min(1, problem.batch))
        heads = range(problem.heads) if self.map.per_head else range(min(1, problem.heads))
        count = (1 if self.map.per_batch else problem.batch) * (1 if self.map.per_head else problem.heads)
        for b in batches:
            for h in heads:
                yield HeadTiles(b, h, count, self.classes(b, h))

    def kv_heads(self) -> Iterator[tuple[list[HeadTiles], int]]:
        """For each key head (those with equal tiles together): its query heads' tiles, and how many such there are."""
        problem = self.problem
        batches = range(problem.batch) if self.map.per_batch else range(min(1, problem.batch))
        kv_heads = range(problem.kv_heads) if self.map.per_head else range(min(1, problem.kv_heads))
        count = (1 if self.map.per_batch else problem.batch) * (1 if self.map.per_head else problem.kv_heads)
        for b in batches:
            for kv in kv_heads:
                if self.map.per_head:
                    group = [kv * problem.group + g for g in range(problem.group)]
                    yield [HeadTiles(b, h, 1, self.classes(b, h)) for h in group], count
                else:
                    yield [HeadTiles(b, kv * problem.group, problem.group, self.classes(b, 0))], count

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
        """[Tr, Tc] bytes of mask tensors a PARTIAL tile reads."""
        return mask_bytes(self.problem.program, self.row_lengths, self.col_lengths, self.block_q, self.block_k)

    def bias_bytes(self) -> Ints:
        """[Tr, Tc] bytes of bias a visited tile reads."""
        shape = self.problem.bias
        if shape is None:
            return np.zeros((self.rows, self.cols), dtype=np.int64)
        rows = self.row_lengths if shape[2] > 1 else np.ones_like(self.row_lengths)
        cols = self.col_lengths if shape[3] > 1 else np.ones_like(self.col_lengths)
        return np.asarray(np.outer(rows, cols) * self.problem.itemsize)


@lru_cache(maxsize=4)
def _static_grid(problem: Problem, block_q: int, block_k: int) -> Grid:
    return Grid(problem, block_q, block_k)


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


def mask_bytes(program: MaskProgram, rows: Ints, cols: Ints, block_q: int, block_k: int) -> Ints:
    """[Tr, Tc] bytes that evaluating the program over a tile reads from its tensors."""
    total = np.zeros((len(rows), len(cols)), dtype=np.int64)
    one_row, one_col = np.ones_like(rows), np.ones_like(cols)
    for term in program.terms():
        for kind, ints, tensors in term:
            if kind.is_documents:
                total += 4 * (rows[:, None] + cols[None, :])
            elif kind.is_blocks:
                total += np.outer(_spans(rows, block_q, ints[0]), _spans(cols, block_k, ints[1]))
            elif kind.is_dense:
                shape: Any = tensors[0].shape
                total += np.outer(rows if shape[2] > 1 else one_row, cols if shape[3] > 1 else one_col)
            else:
                total += 4 * len(tensors)
    return total


def _lengths(length: int, block: int) -> Ints:
    starts = np.arange(0, length, block, dtype=np.int64)
    return np.asarray(np.minimum(starts + block, length) - starts)


def _spans(lengths: Ints, block: int, size: int) -> Ints:
    """How many cells of `size` each tile touches."""
    starts = np.arange(len(lengths), dtype=np.int64) * block
    return np.asarray((starts + lengths - 1) // size - starts // size + 1)
