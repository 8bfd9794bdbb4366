"""Which tiles a mask of bands and ranges visits, in closed form: the one host function that planning, models and `TileMap` ask.

A conjunction of bands and ranges (an `Interval`) leaves the rows of a query tile one run of keys that some row sees, and
within it one that every row sees. Both follow from the corners of the tile; the same holds for the queries that see a key tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewise.masks.program import Interval, MaskProgram, MaskShape

Ints = np.ndarray[Any, np.dtype[np.int64]]  # numpy.typing would be imported for this name alone


def visits(
    term: Interval, queries: int, keys: int, block_q: int, block_k: int, *, by_key: bool = False, full: bool = False
) -> tuple[Ints, Ints]:
    """The key tiles [first, past) that each query tile visits under one conjunction; exact, empty where first >= past.

    by_key: for each key tile the query tiles that visit it. full: only the tiles in which every position is visible.
    """
    lo, hi, start, end = term
    end = min(end, keys)
    own, other = (queries, block_q, 0, queries), (keys, block_k, start, end)
    if by_key:
        lo, hi, own, other = -hi, -lo, other, own
    length, block, least, most = own
    inner, inner_block, inner_least, inner_most = other
    at = np.arange(0, length, block, dtype=np.int64)
    if lo > hi or start >= end:
        return np.zeros_like(at), np.zeros_like(at)
    to = np.minimum(at + block, length)
    if full:
        inside = (at >= least) & (to <= most)
        first = -(-np.maximum(to - 1 + lo, inner_least) // inner_block)
        past = np.minimum(at + hi + 1, inner_most)
        past = np.where(past >= inner, -(-inner // inner_block), past // inner_block)  # the last tile may be short
        return first, np.where(inside, past, 0)
    at, to = np.maximum(at, least), np.minimum(to, most)
    first, past = np.maximum(at + lo, inner_least), np.minimum(to + hi, inner_most)
    return first // inner_block, np.where((at < to) & (first < past), -(-past // inner_block), 0)


def visited_tiles(
    terms: Sequence[Interval], queries: int, keys: int, block_q: int, block_k: int, *, by_key: bool = False
) -> Ints:
    """How many key tiles each query tile visits (by key: how many query tiles visit each key tile), int64 [tiles].

    A mask is the union of its terms, `MaskProgram.intervals(shape)`; a tile that several of them visit counts once.
    """
    runs = [visits(term, queries, keys, block_q, block_k, by_key=by_key) for term in terms]
    if len(runs) == 1:
        return np.asarray(np.maximum(runs[0][1] - runs[0][0], 0))
    tiles = -(-keys // block_k) if by_key else -(-queries // block_q)
    first, past = np.array(runs, dtype=np.int64).reshape(len(runs), 2, tiles).swapaxes(0, 1)  # [terms, tiles] each
    order = np.argsort(first, axis=0)
    covered, total = np.zeros(tiles, np.int64), np.zeros(tiles, np.int64)
    for begin, stop in zip(np.take_along_axis(first, order, 0), np.take_along_axis(past, order, 0), strict=True):
        total += np.maximum(stop - np.maximum(begin, covered), 0)
        covered = np.maximum(covered, stop)
    return total


def may_have_empty_rows(program: MaskProgram, queries: int, keys: int) -> bool:
    """May a query see no key? Exact for bands and ranges; what tensors hold is not looked at, so with them always."""
    if program.tensors:
        return True
    covered = 0  # every new problem asks: plain integers are faster here than arrays
    for first, past in sorted(_seeing_rows(term) for term in program.intervals(MaskShape(1, 1, queries, keys))):
        if first > covered:
            break
        covered = max(covered, past)
    return covered < queries


def _seeing_rows(term: Interval) -> tuple[int, int]:
    """[first, past): the rows, whatever their number, that see some key under one conjunction."""
    lo, hi, start, end = term
    return (start - hi, end - lo) if lo <= hi and start < end else (0, 0)
