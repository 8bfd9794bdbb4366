"""The classes of a rectangle of tiles under one literal that reads data: documents, blocks, selected or dense.

All tiles at once, by arithmetic on arrays: documents by joining the tiles of each id, blocks by sums over a table, `selected` by
counting the keys that a list names in a tile, dense masks by reductions. 0, 1 and 2 are EMPTY, PARTIAL and FULL, and exact.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tilewise.masks.program import Literal

Classes = np.ndarray[Any, np.dtype[np.uint8]]  # numpy.typing would be imported for these names alone
Array = np.ndarray[Any, np.dtype[Any]]
WORD = 8
"""Booleans that are reduced together, as one integer."""


class Edges(NamedTuple):
    """Where the tiles of both sides begin and the last ones end: tile i of the queries is [queries[i], queries[i + 1])."""

    queries: Array
    keys: Array


def classify_literal(literal: Literal, edges: Edges) -> Classes:
    """[rows, columns] of the tiles; the tensors of the literal are those of one sequence and head."""
    kind, ints, tensors = literal
    if len(edges.queries) < 2 or len(edges.keys) < 2:
        return np.zeros((max(0, len(edges.queries) - 1), max(0, len(edges.keys) - 1)), dtype=np.uint8)
    if kind.is_documents:
        q_ids, k_ids = tensors
        classes = _documents(q_ids, k_ids, edges)
    elif kind.is_blocks:
        classes = _blocks(tensors[0], ints, edges)
    elif kind.is_tree:  # sound, and near enough: what a tree leaves is looked at key by key
        classes = np.ones((len(edges.queries) - 1, len(edges.keys) - 1), dtype=np.uint8)
    elif kind.is_selected:
        classes = _selected(tensors[0], ints, edges)
    else:
        classes = _dense(tensors[0], edges)
    return 2 - classes if kind.negated else classes


def _three(some: Any, every: Any) -> Classes:
    return np.asarray(some.astype(np.uint8) + (some & every))


# -- documents


def _documents(q_ids: Array, k_ids: Array, edges: Edges) -> Classes:
    """A tile sees something where its sides have an id in common, everything where each side has that one id alone."""
    queries, keys = _ids_of_tiles(q_ids, edges.queries), _ids_of_tiles(k_ids, edges.keys)
    rows, cols = len(edges.queries) - 1, len(edges.keys) - 1
    some = _joined(queries, keys, (rows, cols))
    (q_only, q_id), (k_only, k_id) = _only(queries, rows), _only(keys, cols)
    every = (q_id[:, None] == k_id) & q_only[:, None] & k_only
    return _three(some, every)


class _Pairs(NamedTuple):
    """Each id that a tile holds, once for a tile, sorted by id."""

    ids: Array
    tiles: Array


def _ids_of_tiles(ids: Array, edges: Array) -> _Pairs:
    own = ids[edges[0] : edges[-1]]
    begins = np.flatnonzero(own[1:] != own[:-1]) + 1  # of runs of an id; each tile begins one, too
    begins = np.union1d(begins, edges[:-1] - edges[0])
    values, tiles = own[begins].astype(np.int64), np.searchsorted(edges, begins + edges[0], side="right") - 1
    pairs = np.unique(values * len(edges) + tiles)  # fits: ids have 32 bits, and so have positions
    return _Pairs(pairs // len(edges), pairs % len(edges))


def _joined(queries: _Pairs, keys: _Pairs, shape: tuple[int, int]) -> Array:
    """[rows, columns]: which pairs of tiles have an id in common?"""
    ids, q_counts = np.unique(queries.ids, return_counts=True)
    first, past = (np.searchsorted(keys.ids, ids, side=side) for side in ("left", "right"))
    k_counts = past - first
    some = np.zeros(shape, dtype=np.bool_)
    if int(q_counts @ k_counts) <= 4 * some.size + len(queries.ids):
        each = np.repeat(k_counts, q_counts)  # of each pair of a query tile and an id
        starts = np.repeat(first, q_counts)
        nth = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
        some[np.repeat(queries.tiles, each), keys.tiles[np.repeat(starts, each) + nth]] = True
        return some
    # many ids in many tiles each: then there are few ids, and a product of two tables is small
    tables = [np.zeros((size, len(ids)), dtype=np.float32) for size in shape]
    for table, pairs in zip(tables, (queries, keys), strict=True):
        at = np.searchsorted(ids, pairs.ids)
        known = (at < len(ids)) & (ids[np.minimum(at, len(ids) - 1)] == pairs.ids)
        table[pairs.tiles[known], at[known]] = 1.0
    return np.asarray(tables[0] @ tables[1].T > 0)


def _only(pairs: _Pairs, tiles: int) -> tuple[Array, Array]:
    """Which tiles have one id alone, and an id of each tile."""
    one = np.zeros(tiles, dtype=np.int64)
    one[pairs.tiles] = pairs.ids
    return np.bincount(pairs.tiles, minlength=tiles) == 1, one


# -- tables, lists, dense masks


def _blocks(table: Array, sizes: tuple[int, ...], edges: Edges) -> Classes:
    """By the number of cells that are set among those a tile meets."""
    (row_first, row_past), (col_first, col_past) = (_met(side, size) for side, size in zip(edges, sizes, strict=True))
    if (row_past - row_first == 1).all() and (col_past - col_first == 1).all():  # tiles lie within blocks
        return np.where(table[np.ix_(row_first, col_first)] != 0, np.uint8(2), np.uint8(0))
    part = table[row_first[0] : row_past[-1], col_first[0] : col_past[-1]] != 0
    sums = np.zeros((part.shape[0] + 1, part.shape[1] + 1), dtype=np.int64)
    np.cumsum(np.cumsum(part, axis=0, dtype=np.int64), axis=1, out=sums[1:, 1:])
    rows, cols = (row_first - row_first[0], row_past - row_first[0]), (col_first - col_first[0], col_past - col_first[0])
    (a, b), (c, d) = rows, cols
    count = sums[np.ix_(b, d)] - sums[np.ix_(a, d)] - sums[np.ix_(b, c)] + sums[np.ix_(a, c)]
    return _three(count > 0, count == np.outer(b - a, d - c))


def _met(edges: Array, size: int) -> tuple[Array, Array]:
    """[first, past) of the blocks that each tile meets."""
    return edges[:-1] // size, (edges[1:] - 1) // size + 1


def _selected(lists: Array, sizes: tuple[int, ...], edges: Edges) -> Classes:
    """By the number of a tile's keys that each list names; a tile meets the lists of its queries."""
    size_q, size_k, *_ = sizes
    first, past = _met(edges.queries, size_q)
    own, keys = lists[first[0] : past[-1]], edges.keys
    entries = np.sort(own, axis=1)
    fresh = np.ones(entries.shape, dtype=np.bool_)
    fresh[:, 1:] = entries[:, 1:] != entries[:, :-1]
    fresh &= (entries >= 0) & (entries < -(-int(keys[-1]) // size_k))
    rows, named = np.nonzero(fresh)[0], entries[fresh].astype(np.int64)
    width = np.diff(keys)
    covered = np.zeros((len(own), len(width)))
    begin, end = np.maximum(named * size_k, keys[0]), np.minimum((named + 1) * size_k, keys[-1])
    tile = np.searchsorted(keys, begin, side="right") - 1
    while len(begin):  # a block reaches over as many tiles as it is longer than they are
        inside = (begin < end) & (tile < len(width))
        rows, begin, end, tile = rows[inside], begin[inside], end[inside], tile[inside]
        stop = np.minimum(end, keys[tile + 1])
        covered += np.bincount(rows * len(width) + tile, stop - begin, covered.size).reshape(covered.shape)
        begin, tile = stop, tile + 1
    some, every = covered > 0, covered == width
    if (past - first == 1).all():
        at = first - first[0]
        return _three(some[at], every[at])
    result = np.empty((len(first), len(width)), dtype=np.uint8)
    for row, (a, b) in enumerate(zip(first - first[0], past - first[0], strict=True)):
        result[row] = _three(some[a:b].any(axis=0), every[a:b].all(axis=0))
    return result


def _dense(dense: Array, edges: Edges) -> Classes:
    """Element by element, several at a time; a side of 1 is the same all along."""
    (row0, row1), (col0, col1) = ((int(side[0]), int(side[-1])) for side in edges)
    own = dense[row0:row1] if dense.shape[0] > 1 else dense
    own = own[:, col0:col1] if dense.shape[1] > 1 else own
    some = every = own if own.dtype == np.bool_ else own != 0
    if dense.shape[0] > 1:
        some, every = _rows_reduced(some, edges.queries - row0)
    if dense.shape[1] > 1:
        at = (edges.keys - col0)[:-1]
        some, every = np.logical_or.reduceat(some, at, axis=1), np.logical_and.reduceat(every, at, axis=1)
    shape = (len(edges.queries) - 1, len(edges.keys) - 1)
    return _three(np.broadcast_to(some, shape), np.broadcast_to(every, shape))


def _rows_reduced(dense: Array, edges: Array) -> tuple[Array, Array]:
    """[tiles, columns]: which columns hold something, and which everything, in each tile of rows."""
    whole = dense.shape[1] % WORD == 0 and dense.flags.c_contiguous
    words = dense.view(np.uint64) if whole else dense
    some, every = (np.empty((len(edges) - 1, words.shape[1]), dtype=words.dtype) for _ in range(2))
    for i, (a, b) in enumerate(pairwise(edges)):
        np.bitwise_or.reduce(words[a:b], axis=0, out=some[i])
        np.bitwise_and.reduce(words[a:b], axis=0, out=every[i])
    return some.view(np.bool_), every.view(np.bool_)
