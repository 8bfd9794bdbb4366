"""Keys and queries that must not matter become zeros in shared memory: their weights are 0, but 0 · inf is not."""

from __future__ import annotations

from tilewise.backends.hopper.compat import (
    ZEROED_BARRIER,
    fence_async_shared,
    gl,
    gluon,
    named_barrier,
    opaque,
    warps_barrier,
)
from tilewise.backends.hopper.grad_tile import seeing_queries, seen_keys
from tilewise.backends.hopper.lists import all_set, place, tile_number
from tilewise.backends.hopper.ring import matrix, wait_full
from tilewise.backends.hopper.work_tile import UNBOUNDED, key_hi, key_lo


@gluon.jit
def zero_rows(tile, first, lo, hi, ROWS: gl.constexpr):
    """Zero the rows of keys (or queries) outside [lo, hi), from `first` on."""
    SLICE: gl.constexpr = 32
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for i in gl.static_range(ROWS // SLICE):
        first_row = first + i * SLICE
        if (first_row < lo) | (first_row + SLICE > hi):
            rows = tile.slice(i * SLICE, SLICE, dim=0)
            k = first_row + gl.arange(0, SLICE, gl.SliceLayout(1, LAYOUT))
            x_tile = rows.load(LAYOUT)
            rows.store(gl.where(((k >= lo) & (k < hi))[:, None], x_tile, gl.zeros_like(x_tile)))


@gluon.jit
def zero_rows_by_words(tile, first, words, ROWS: gl.constexpr):
    """Zero the rows of keys (or queries) whose bits are not set, from `first` on; `words` begin at position 0."""
    SLICE: gl.constexpr = 32
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for i in gl.static_range(ROWS // SLICE):
        word = gl.load(words + first // 32 + i)
        if word != -1:
            rows = tile.slice(i * SLICE, SLICE, dim=0)
            r = gl.arange(0, SLICE, gl.SliceLayout(1, LAYOUT))
            x_tile = rows.load(LAYOUT)
            rows.store(gl.where((((word >> r) & 1) != 0)[:, None], x_tile, gl.zeros_like(x_tile)))


@gluon.jit
def zero_unseen_listed(v_ring, n, key0, work, a, C: gl.constexpr):
    """Before the values of a PARTIAL tile of a list are used: zero those that no query sees."""
    lists = a.lists
    if not all_set(lists.seen, lists.seen_strides, work.b, work.h, key0, a.len_k, C.BLOCK_N):
        wait_full(v_ring, n)
        words = lists.seen + place(work.b, work.h, lists.seen_strides)
        zero_rows_by_words(matrix(v_ring, n), key0, words, C.BLOCK_N)
        fence_async_shared()
        warps_barrier()


@gluon.jit
def zero_unseen_values(v_ring, n, key0, work, band, a, C: gl.constexpr):
    """Before the values of an outermost tile are used: zero those that no query of the sequence sees."""
    lo = key_lo(band, work.b * 0, C)
    hi = key_hi(band, opaque(work.last_q), C)
    # beyond the tensor the loads have filled in zeros
    if (key0 < lo) | ((key0 + C.BLOCK_N > hi) & (work.k_start + hi < opaque(a.len_k))):
        wait_full(v_ring, n)
        zero_rows(matrix(v_ring, n), key0, lo, hi, C.BLOCK_N)
        fence_async_shared()
        warps_barrier()


@gluon.jit
def zeroed():
    """Both warpgroups have zeroed their rows, and products may read them."""
    fence_async_shared()
    named_barrier("sync", ZEROED_BARRIER)


@gluon.jit
def keys_to_keep(band, work, a, C: gl.constexpr):
    """[lo, hi): all keys but these become zeros, unless they are zeros: beyond the tensor the loads have filled them in."""
    lo, hi = seen_keys(band, work, C)
    return lo, gl.where(work.k_start + hi < a.len_k, hi, UNBOUNDED)


@gluon.jit
def zero_unseen_keys(k_rows, v_rows, tile, k0, KEYS: gl.constexpr, a, C: gl.constexpr):
    """Keys that no query of the sequence sees become zeros in shared memory. Both warpgroups come here for every work tile."""
    if C.LISTS is not None:
        if C.UNSEEN_KEYS:
            lists = a.lists
            h = tile.work.h * a.group.value
            if not all_set(lists.seen, lists.seen_strides, tile.work.b, h, tile.work.start, a.len_k, C.BLOCK_N):
                words = lists.seen + place(tile.work.b, h, lists.seen_strides)
                zero_rows_by_words(k_rows, k0, words, KEYS)
                zero_rows_by_words(v_rows, k0, words, KEYS)
                zeroed()
    elif C.TERMS > 0 or C.VARLEN:
        lo, hi = keys_to_keep(tile.band, tile.work, a, C)
        if (tile.work.start < lo) | (tile.work.start + C.BLOCK_N > hi):
            zero_rows(k_rows, k0, lo, hi, KEYS)
            zero_rows(v_rows, k0, lo, hi, KEYS)
            zeroed()


@gluon.jit
def zero_halves(ring, other_ring, n, first, lo, hi, ROWS: gl.constexpr, WG: gl.constexpr):
    """Zero the rows outside [lo, hi) of the n-th tile of both rings; each warpgroup takes half of the rows."""
    HALF: gl.constexpr = ROWS // 2
    wait_full(ring, n)
    wait_full(other_ring, n)
    zero_rows(matrix(ring, n).slice(WG * HALF, HALF, dim=0), first + WG * HALF, lo, hi, HALF)
    zero_rows(matrix(other_ring, n).slice(WG * HALF, HALF, dim=0), first + WG * HALF, lo, hi, HALF)
    zeroed()


@gluon.jit
def zero_halves_by_words(ring, other_ring, n, first, words, ROWS: gl.constexpr, WG: gl.constexpr):
    """The same for rows whose bits are not set."""
    HALF: gl.constexpr = ROWS // 2
    wait_full(ring, n)
    wait_full(other_ring, n)
    zero_rows_by_words(matrix(ring, n).slice(WG * HALF, HALF, dim=0), first + WG * HALF, words, HALF)
    zero_rows_by_words(matrix(other_ring, n).slice(WG * HALF, HALF, dim=0), first + WG * HALF, words, HALF)
    zeroed()


@gluon.jit
def zero_unseeing_queries(rings, n, m, tile, a, WG: gl.constexpr, C: gl.constexpr):
    """Queries that see no key, and those past a packed sequence's end, which belong to the next one, become zeros. Both
    warpgroups come here for every query tile, with no product in flight. Of a list, m is a ListedQueries."""
    if C.LISTS is not None:
        if C.EMPTY_ROWS:
            lists = a.lists
            first = tile_number(m.cursor) * C.BLOCK_M
            if m.partial:
                if not all_set(lists.seeing, lists.seeing_strides, tile.work.b, m.h, first, a.len_q, C.BLOCK_M):
                    words = lists.seeing + place(tile.work.b, m.h, lists.seeing_strides)
                    zero_halves_by_words(rings.q, rings.do, n, first, words, C.BLOCK_M, WG)
    elif C.VARLEN or C.EMPTY_ROWS:
        lo, hi = seeing_queries(tile.band, tile.work.len_q, C)
        if (m < lo) | (m + C.BLOCK_M > hi):
            zero_halves(rings.q, rings.do, n, m, lo, hi, C.BLOCK_M, WG)


@gluon.jit
def zero_unseen_key_halves(rings, n, key0, tile, a, WG: gl.constexpr, C: gl.constexpr):
    """Keys of an outermost tile that no query of the sequence sees become zeros; of a list, `key0` is a PARTIAL tile's place."""
    if C.LISTS is not None:
        if C.UNSEEN_KEYS:
            lists = a.lists
            first = tile_number(key0) * C.BLOCK_N
            if not all_set(lists.seen, lists.seen_strides, tile.work.b, tile.work.h, first, a.len_k, C.BLOCK_N):
                words = lists.seen + place(tile.work.b, tile.work.h, lists.seen_strides)
                zero_halves_by_words(rings.k, rings.v, n, first, words, C.BLOCK_N, WG)
    elif C.TERMS > 0 or C.VARLEN:
        lo, hi = keys_to_keep(tile.band, tile.work, a, C)
        if (key0 < lo) | (key0 + C.BLOCK_N > hi):
            zero_halves(rings.k, rings.v, n, key0, lo, hi, C.BLOCK_N, WG)
