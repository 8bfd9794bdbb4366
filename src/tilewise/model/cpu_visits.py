"""What the CPU kernels compute of a mask: strips of a register tile's rows, from the first key that they see to the last."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tilewise.masks import MaskProgram, visited_tiles
from tilewise.masks.rows import Ends, row_ends
from tilewise.masks.tiles import as_array
from tilewise.model.grid import grid_of
from tilewise.model.tile import TilePlan
from tilewise.problem import Problem

Floats = np.ndarray[Any, np.dtype[np.float64]]
REGISTER_TILE = (16, 4)
"""Where a tile does not tell its own."""
CLASS_ROWS = 128
"""Queries that a class of tiles is for, however many a block has: the kernels skip what a mask's tensors hide from so many."""
HALF_KEYS = 16
"""Keys from which on a half of a strip has a step of its own: O of the half is read and written once more. (Neoverse N1: 8 bring
nothing.)"""
NEVER = 1 << 40


class Visits(NamedTuple):
    """What each query block [blocks] of one head visits."""

    pairs: Floats
    """Scores, of whole register tiles."""
    crossings: Floats
    """Strips by key blocks."""
    keys: Floats
    """Keys that are packed, or read."""
    rows: Floats


def visits_of(sizes: Problem, tile: TilePlan) -> Visits:
    """What a mask lets the strips and blocks of one head visit."""
    m, n = sizes.seqlen_q, sizes.seqlen_k
    R, J = (1, 1) if tile.pass_ == "decode" else tile.register_tile or REGISTER_TILE
    M, N = tile.block_q, tile.block_k
    terms = sizes.program.intervals(sizes.shape)
    starts = np.arange(0, -(-m // R), max(1, M // R))

    def by_block(strips: Any) -> Floats:
        return np.add.reduceat(strips, starts).astype(float) if len(starts) else np.zeros(0)

    rows = np.minimum(M, m - np.arange(0, m, M)).astype(float)
    pairs = by_block(visited_tiles(terms, m, n, R, J)) * (R * J)
    crossings = by_block(visited_tiles(terms, m, n, R, N))
    keys = visited_tiles(terms, m, n, M, J).astype(float) * J
    program, reads = sizes.program, bool(sizes.program.tensors)
    # bands alone say too much: what tensors hide is not visited, and what one half of a strip sees costs half
    if m and n and (reads or (tile.half_rows and program.structure)):
        ends = row_ends(MaskProgram(program.structure, program.ints, tuple(map(as_array, program.tensors))), sizes.shape)
        if ends is not None:  # the kernels walk from the first key that a strip sees to its last
            scores = _walked(ends, R, J) * (R * J)
            scores -= np.minimum(scores, _spared(ends, R, J, tile.half_rows))
            return Visits(by_block(scores), by_block(_walked(ends, R, N)), _walked(ends, M, J) * J, rows)
    if m and n and reads:
        fine = math.gcd(M, CLASS_ROWS)
        firsts = np.arange(0, -(-m // fine), M // fine)
        bands, seen = (np.add.reduceat(tiles, firsts) for tiles in (visited_tiles(terms, m, n, fine, N), _seen(sizes, fine, N)))
        pairs, crossings = (part * seen / np.maximum(1, bands) for part in (pairs, crossings))
        keys = keys * _seen(sizes, M, N) / np.maximum(1, visited_tiles(terms, m, n, M, N))
    return Visits(pairs, crossings, keys, rows)


def _walked(ends: Ends, rows: int, keys: int) -> Floats:
    """Tiles that each row of tiles visits, the mean of the batch, where every row sees one interval."""
    lo, hi = ends
    blind, firsts = lo >= hi, np.arange(0, lo.shape[1], rows)
    first = np.minimum.reduceat(np.where(blind, NEVER, lo), firsts, axis=1) // keys
    last = -(-np.maximum.reduceat(np.where(blind, 0, hi), firsts, axis=1) // keys)
    return np.asarray(np.maximum(last - first, 0).mean(axis=0))


def _spared(ends: Ends, rows: int, keys: int, half: int) -> Floats:
    """Scores that a strip does not compute since keys are seen by one half of its rows alone, the mean of the batch. (Taken as if
    no block of keys ended between.)"""
    lo, hi = ends
    firsts = np.arange(0, lo.shape[1], rows)
    if not half:
        return np.zeros(len(firsts))
    last = np.minimum(firsts + rows, lo.shape[1]) - 1

    def from_key(row: Any) -> Any:
        return lo[:, np.minimum(row, last)] // keys * keys

    def to_key(row: Any) -> Any:
        return -(-hi[:, np.minimum(row, last)] // keys) * keys

    first, past = from_key(firsts), np.maximum(to_key(last), from_key(firsts))
    high = np.where(firsts + half <= last, np.clip(from_key(firsts + half), first, past), past)
    low = np.maximum(to_key(firsts + rows - half - 1), np.where(high - first < HALF_KEYS, first, high))
    below, above = (np.where(part < HALF_KEYS, 0, part) for part in (high - first, past - low))
    return np.asarray(((below + above) * (rows - half)).mean(axis=0))


def _seen(sizes: Problem, rows: int, keys: int) -> Floats:
    """The same of any mask, the mean of all heads."""
    heads = list(grid_of(sizes, rows, keys).heads())
    return np.asarray(sum(head.by_row * head.count for head in heads) / max(1, sum(head.count for head in heads)))
