"""The mask of a list's PARTIAL tile as words (`lane_words.py`): by bounds where they say it all, or by terms, ids and bits."""

from __future__ import annotations

from tilewise.backends.hopper.compat import gl, gluon, opaque
from tilewise.backends.hopper.lane_words import (
    from_natural,
    interval_words,
    no_words,
    rows_of_words,
    words_of,
)
from tilewise.backends.hopper.lists import (
    bit_words,
    ids_of,
    live_terms,
    place,
    same_document,
    term_bounds,
    tile_number,
)

QUERIES = gl.constexpr(128)
"""Of a row of a list by query: two warpgroups walk it in every kernel. (Newer tritons do not read a config's properties.)"""


@gluon.jit
def words_by_bounds(bounds, first, like):
    """Words of the columns from `first` on that are within their rows' bounds."""
    lo = (bounds & 0x7FFFFFFF).to(gl.int32) - first
    return interval_words(lo, lo + (bounds >> 32).to(gl.int32), like)


@gluon.jit
def words_by_terms(b, rows, first, live, like, a, BY_KEY: gl.constexpr, C: gl.constexpr):
    """Words of the columns from `first` on that lie in the interval of a live term."""
    INTERVALS: gl.constexpr = C.LISTS.intervals
    # opaque: else the addresses of a term's numbers are kept from before the loop
    terms = a.lists.terms + (place(b, b, (a.lists.terms_stride, None)) + opaque(b * 0))
    found = like
    for r in gl.static_range(INTERVALS):
        lo, hi = term_bounds(terms + 4 * r, rows, BY_KEY)
        words = interval_words(lo - first, hi - first, like)
        if C.LISTS.live:
            words = gl.where((live & (1 << r)) != 0, words, 0)
        found = found | words
    return found


@gluon.jit
def words_by_ids(b, q, k, a, BY_KEY: gl.constexpr, C: gl.constexpr):
    """Words of the pairs of positions of one document, [64, N] with queries q and keys k, one of which is a column."""
    q_ids = ids_of(a.lists.q_ids, a.lists.ids_strides[0], b, q, a.len_q)
    if a.lists.k_ids is not None:
        k_ids = ids_of(a.lists.k_ids, a.lists.ids_strides[1], b, k, a.len_k)
    else:
        k_ids = ids_of(a.lists.q_ids, a.lists.ids_strides[0], b, k, a.len_k)
    if BY_KEY:
        return words_of(same_document(q_ids[None, :], k_ids[:, None], C))
    else:
        return words_of(same_document(q_ids[:, None], k_ids[None, :], C))


@gluon.jit
def words_by_bits(b, h, rows, first, like, a, BY_KEY: gl.constexpr, C: gl.constexpr):
    """Words of a dense mask, of columns from `first` on."""
    WORDS: gl.constexpr = (C.BLOCK_M if BY_KEY else C.BLOCK_N) // 32
    len_rows, len_columns = a.len_q, a.len_k
    if BY_KEY:
        len_rows, len_columns = a.len_k, a.len_q
    found = like
    for i in gl.static_range(WORDS):
        natural = bit_words(a.lists, b, h, rows, first // 32 + i, len_rows, len_columns)
        found = found | (from_natural(natural, like) << (8 * i))
    return found


@gluon.jit
def visible_keys(work, row0, cursor, a, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Words of the keys of the tile at a place in its list that queries from row0 on see, for a tile [64, keys] of the layout."""
    like = no_words(C.BLOCK_N, LAYOUT)
    key0 = tile_number(cursor) * C.BLOCK_N
    row0 = opaque(row0)  # else what is computed from it is kept in registers from before the loop
    rows = rows_of_words(like, row0)
    if a.lists.bounds is not None:
        at = a.lists.bounds + place(work.b, work.h, a.lists.strides) * QUERIES
        words = words_by_bounds(gl.load(at + rows), key0, like)
        if gl.load(at + row0) < 0:
            words = keys_by_parts(work, row0, cursor, like, a, LAYOUT, C)
    else:
        words = keys_by_parts(work, row0, cursor, like, a, LAYOUT, C)
    return words


@gluon.jit
def keys_by_parts(work, row0, cursor, like, a, LAYOUT: gl.constexpr, C: gl.constexpr):
    """The same by intervals, ids and bits."""
    key0 = tile_number(cursor) * C.BLOCK_N
    rows = rows_of_words(like, row0)
    words = words_by_terms(work.b, rows, key0, live_terms(cursor), like, a, False, C)
    if C.LISTS.ids > 0:
        q = row0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        k = key0 + gl.arange(0, C.BLOCK_N, gl.SliceLayout(0, LAYOUT))
        words = words & words_by_ids(work.b, q, k, a, False, C)
    if C.LISTS.bits:
        words = words & words_by_bits(work.b, work.h, rows, key0, like, a, False, C)
    return words


@gluon.jit
def visible_queries(work, h, k0, cursor, a, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Words of the queries of the tile at a place in its list that see keys from k0 on, for a tile [64, queries] of the layout; h
    is a query head."""
    like = no_words(C.BLOCK_M, LAYOUT)
    k0 = opaque(k0)
    m = tile_number(cursor) * C.BLOCK_M
    if a.lists.bounds is not None:
        at = a.lists.bounds + place(work.b, h, a.lists.strides) * C.BLOCK_N
        words = words_by_bounds(gl.load(at + rows_of_words(like, k0)), m, like)
        if gl.load(at + k0) < 0:
            words = queries_by_parts(work, h, k0, cursor, like, a, LAYOUT, C)
    else:
        words = queries_by_parts(work, h, k0, cursor, like, a, LAYOUT, C)
    return words


@gluon.jit
def queries_by_parts(work, h, k0, cursor, like, a, LAYOUT: gl.constexpr, C: gl.constexpr):
    """The same by intervals, ids and bits."""
    m = tile_number(cursor) * C.BLOCK_M
    rows = rows_of_words(like, k0)
    words = words_by_terms(work.b, rows, m, live_terms(cursor), like, a, True, C)
    if C.LISTS.ids > 0:
        k = k0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        q = m + gl.arange(0, C.BLOCK_M, gl.SliceLayout(0, LAYOUT))
        words = words & words_by_ids(work.b, q, k, a, True, C)
    if C.LISTS.bits:
        words = words & words_by_bits(work.b, h, rows, m, like, a, True, C)
    return words
