"""The mask of a list's PARTIAL tile: by intervals, ids and bits."""

from __future__ import annotations

from tilewise.backends.hopper.compat import gl, gluon, opaque
from tilewise.backends.hopper.lists import bit_words, ids_of, inside_terms, live_terms, same_document, tile_number


@gluon.jit
def visible_keys(x_tile, work, row0, cursor, OTHER: gl.constexpr, a, C: gl.constexpr):
    """[64 queries, keys]: x where a query from row0 on sees a key of the tile at a place in its list, else OTHER."""
    LAYOUT: gl.constexpr = x_tile.type.layout
    b = work.b
    key0 = tile_number(cursor) * C.BLOCK_N
    row0 = opaque(row0)  # else what is computed from it is kept in registers from before the loop
    k = key0 + gl.arange(0, C.BLOCK_N, gl.SliceLayout(0, LAYOUT))
    q = row0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    ok = inside_terms(a.lists, b, live_terms(cursor), q[:, None], k[None, :], False, C)
    if C.LISTS.ids > 0:
        q_ids = ids_of(a.lists.q_ids, a.lists.ids_strides[0], b, q, a.len_q)
        if a.lists.k_ids is not None:
            k_ids = ids_of(a.lists.k_ids, a.lists.ids_strides[1], b, k, a.len_k)
        else:
            k_ids = ids_of(a.lists.q_ids, a.lists.ids_strides[0], b, k, a.len_k)
        ok = ok & same_document(q_ids[:, None], k_ids[None, :], C)
    x_tile = gl.where(ok, x_tile, OTHER)
    if C.LISTS.bits:
        # in the accumulator's order: column 32 word + 8 group + 2 lane + pair. Words are shifted by lane first: all other shifts
        # are numbers in the code
        parts = x_tile.reshape([64, C.BLOCK_N // 32, 4, 4, 2])
        BY_LANE: gl.constexpr = gl.SliceLayout(4, parts.type.layout)
        WORDS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, BY_LANE))
        q = row0 + gl.arange(0, 64, gl.SliceLayout(1, WORDS))[:, None]
        word = key0 // 32 + gl.arange(0, C.BLOCK_N // 32, gl.SliceLayout(0, WORDS))[None, :]
        words = bit_words(a.lists, b, work.h, q, word, a)[:, :, None, None, None]
        lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, BY_LANE))))
        group = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, BY_LANE))))
        ACROSS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, parts.type.layout))
        pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, ACROSS)))
        shift = 8 * group[None, None, :, None, None] + pair[None, None, None, None, :]
        words = words >> (2 * lane)[None, None, None, :, None]
        parts = gl.where(((words >> shift) & 1) != 0, parts, OTHER)
        x_tile = gl.convert_layout(parts.reshape([64, C.BLOCK_N]), LAYOUT, assert_trivial=True)
    return x_tile


@gluon.jit
def visible_queries(x_tile, work, h, k0, cursor, a, C: gl.constexpr):
    """[64 keys, queries]: x where a query of the tile at a place in its list sees a key from k0 on, else 0; h is a query head."""
    LAYOUT: gl.constexpr = x_tile.type.layout
    b = work.b
    m = tile_number(cursor) * C.BLOCK_M
    k0 = opaque(k0)
    k = k0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    q = m + gl.arange(0, C.BLOCK_M, gl.SliceLayout(0, LAYOUT))
    ok = inside_terms(a.lists, b, live_terms(cursor), q[None, :], k[:, None], True, C)
    if C.LISTS.ids > 0:
        q_ids = ids_of(a.lists.q_ids, a.lists.ids_strides[0], b, q, a.len_q)
        if a.lists.k_ids is not None:
            k_ids = ids_of(a.lists.k_ids, a.lists.ids_strides[1], b, k, a.len_k)
        else:
            k_ids = ids_of(a.lists.q_ids, a.lists.ids_strides[0], b, k, a.len_k)
        ok = ok & same_document(q_ids[None, :], k_ids[:, None], C)
    x_tile = gl.where(ok, x_tile, 0.0)
    if C.LISTS.bits:
        cube = x_tile.reshape([2, 32, C.BLOCK_M])
        WORDS: gl.constexpr = gl.SliceLayout(1, cube.type.layout)
        bit = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, cube.type.layout)))
        q = m + gl.arange(0, C.BLOCK_M, gl.SliceLayout(0, WORDS))[None, :]
        word = k0 // 32 + gl.arange(0, 2, gl.SliceLayout(1, WORDS))[:, None]
        words = bit_words(a.lists, b, h, q, word, a)
        cube = gl.where(((words[:, None, :] >> bit[None, :, None]) & 1) != 0, cube, 0.0)
        x_tile = gl.convert_layout(cube.reshape([64, C.BLOCK_M]), LAYOUT, assert_trivial=True)
    return x_tile
