"""The consumer: one warpgroup, 64 rows of each work tile, all their keys."""

from __future__ import annotations

from tilewise.backends.hopper.compat import PINGPONG_BARRIER, gl, gluon, named_barrier, opaque
from tilewise.backends.hopper.draw import drawn_ring, skip_drawn
from tilewise.backends.hopper.epilogue import await_stores, finish
from tilewise.backends.hopper.lists import announced, is_partial, tile_number
from tilewise.backends.hopper.mainloop import (
    Queries,
    WarpgroupRows,
    first_step,
    last_output,
    load_fragments,
    step,
    step_into_next,
)
from tilewise.backends.hopper.ring import bias_ring, release, stage, units, wait_full
from tilewise.backends.hopper.statistics import store_seen
from tilewise.backends.hopper.work_tile import key_hi, key_lo, locate, next_tile, tile_at
from tilewise.backends.hopper.zeroing import zero_unseen_listed, zero_unseen_values


@gluon.jit
def loop_over_tiles(state, q, kv_base, j0, j1, rows, a, MASKED: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """The key tiles j0 <= j < j1 of this work tile; j counts from the right, or along a list."""
    work = rows.work
    for j in range(j0, j1):
        key0 = (work.last - 1 - j) * C.BLOCK_N
        state = step(state, q, kv_base + j, j + 1 < work.count, rows, key0, a, MASKED, WG, C)
    return state


@gluon.jit
def tiles_without_mask(work, band, row0, C: gl.constexpr):
    """[j0, j1): the key tiles that all rows of this warpgroup see wholly."""
    right = key_hi(band, row0, C) // C.BLOCK_N
    left = gl.cdiv(key_lo(band, row0 + 63, C), C.BLOCK_N)
    j0 = gl.minimum(gl.maximum(work.last - right, 0), work.count)
    j1 = gl.minimum(gl.maximum(work.last - left, j0), work.count)
    return j0, j1


@gluon.jit
def loop_over_partial_tiles(state, q, kv_base, rows, a, WG: gl.constexpr, C: gl.constexpr):
    """The PARTIAL tiles of a list from its second tile on."""
    work = rows.work
    for j in range(1, work.last):
        cursor = announced(q.rings.listed[0], stage(q.rings.k, kv_base + j))
        state = step(state, q, kv_base + j, j + 1 < work.count, rows, cursor, a, True, WG, C)
    return state


@gluon.jit
def first_keys(rings, n, work, skip, C: gl.constexpr):
    """The first key of a work tile's first key tile, n, or its place in a list when it has landed."""
    if C.LISTS is not None:
        wait_full(rings.k, n)
        return announced(rings.listed[0], stage(rings.k, n))
    else:
        return (work.last - 1 - skip) * C.BLOCK_N


@gluon.jit
def tiles_to_skip(work, band, row0, WG: gl.constexpr, C: gl.constexpr):
    """How many of the work tile's first key tiles no row of this warpgroup sees. The last warpgroup sees them all."""
    if C.BAND and C.LISTS is None and WG + 1 < C.WARPGROUPS and not C.PINGPONG:
        last = gl.cdiv(key_hi(band, row0 + 63, C), C.BLOCK_N)
        return gl.minimum(gl.maximum(work.last - last, 0), work.count - 1)
    else:
        return work.count * 0


@gluon.jit
def skip_tiles(ring, n, skip, WG: gl.constexpr, C: gl.constexpr):
    """Release the first key or value tiles unread, once they are there: an earlier arrival would count for the tile before."""
    if C.BAND and C.LISTS is None and WG + 1 < C.WARPGROUPS and not C.PINGPONG:
        for i in range(skip):
            wait_full(ring, n + i)
            release(ring, n + i)


@gluon.jit
def skip_bias(rings, n, skip, WG: gl.constexpr, C: gl.constexpr):
    """The same for this warpgroup's tiles of a bias."""
    if C.BIAS_STAGES > 0 and C.BAND and WG + 1 < C.WARPGROUPS and not C.PINGPONG:
        for i in range(skip):
            at = (n + i) * C.WARPGROUPS + WG
            wait_full(bias_ring(rings), at)
            release(bias_ring(rings), at)


@gluon.jit
def own_tiles(work, rows, C: gl.constexpr):
    """How many of the work tile's key tiles are not left of all rows of this warpgroup."""
    if C.LEFT_SKIP:
        return gl.minimum(gl.maximum(work.last - key_lo(rows.band, rows.row0, C) // C.BLOCK_N, 1), work.count)
    else:
        return work.count


@gluon.jit
def skip_left(rings, kv_base, work, rows, skip, C: gl.constexpr):
    """Release the last key and value tiles unread; the number of the last one that is read."""
    if C.LEFT_SKIP:
        j0, j1 = tiles_without_mask(work, rows.band, rows.row0, C)
        end = gl.maximum(own_tiles(work, rows, C), gl.maximum(j1, gl.maximum(j0, skip + 1)))
        for j in range(end, work.count):
            wait_full(rings.k, kv_base + j)
            release(rings.k, kv_base + j)
            wait_full(rings.v, kv_base + j)
            release(rings.v, kv_base + j)
            if C.DRAWERS > 0:
                wait_full(drawn_ring(rings), kv_base + j)
                release(drawn_ring(rings), kv_base + j)
        return kv_base + end - 1
    else:
        return kv_base + work.count - 1


@gluon.jit
def query_tile(q_ring, n, slot, C: gl.constexpr):
    """This warpgroup's n-th query tile; slot is its number, the stage of all of them where there is one."""
    if C.Q_STAGES == 1:
        return units(q_ring, stage(q_ring, slot))
    else:
        return units(q_ring, stage(q_ring, n))


@gluon.jit
def remaining_tiles(state, rings, q_n, kv_base, skip, key0, rows, a, WG: gl.constexpr, C: gl.constexpr):
    """A work tile from its second key tile on; the last product with values is left to do."""
    work = rows.work
    if C.LISTS is not None:
        j0 = work.last
        j1 = work.count
    else:
        j0, j1 = tiles_without_mask(work, rows.band, rows.row0, C)
    # at the right end some rows see only part of a tile; then come tiles all see; then, if rows begin inside, the left end
    j0 = gl.maximum(j0, skip + 1)
    j1 = gl.maximum(j1, j0)
    # 0, which the assembler cannot know: where two loops read the same queries, ptxas 12.8 computes part of their address before
    # the first loop only, also for when that is skipped
    zero = a.last_q + 1 - a.len_q
    fragments = ()
    if C.Q_IN_REGISTERS > 0:
        fragments = load_fragments(query_tile(rings.q, q_n, WG, C), C)
    if C.BAND or C.LISTS is not None:
        q = Queries(rings=rings, n=q_n, tile=query_tile(rings.q, q_n + zero, WG, C), fragments=fragments)
        if C.LISTS is not None:
            state = loop_over_partial_tiles(state, q, kv_base, rows, a, WG, C)
        elif C.PINGPONG:
            state = loop_over_tiles(state, q, kv_base, skip + 1, j0, rows, a, True, WG, C)
        else:
            # 64 rows end within 64 keys, so in two tiles: the first is done. A loop would cost registers
            if skip + 1 < j0:
                n = kv_base + skip + 1
                key0 = (work.last - 2 - skip) * C.BLOCK_N
                state = step(state, q, n, work.count > skip + 2, rows, key0, a, True, WG, C)
    q = Queries(rings=rings, n=q_n, tile=query_tile(rings.q, q_n, WG, C), fragments=fragments)
    state = loop_over_tiles(state, q, kv_base, j0, j1, rows, a, False, WG, C)
    if C.LEFT and C.LISTS is None:
        q = Queries(rings=rings, n=q_n, tile=query_tile(rings.q, q_n - zero, WG, C), fragments=fragments)
        state = loop_over_tiles(state, q, kv_base, j1, own_tiles(work, rows, C), rows, a, True, WG, C)
        if C.UNSEEN_KEYS:
            if work.count > skip + 1:
                leftmost = (work.last - work.count) * C.BLOCK_N
                zero_unseen_values(rings.v, kv_base + work.count - 1, leftmost, work, rows.band, a, C)
    return state


@gluon.jit
def prepare_values(rings, kv_base, skip, key0, work, band, a, WG: gl.constexpr, C: gl.constexpr):
    """After a work tile's first softmax: its values are ready, and so are its second keys."""
    skip_tiles(rings.v, kv_base, skip, WG, C)
    if C.UNSEEN_KEYS:
        if C.LISTS is not None:
            if is_partial(key0):
                zero_unseen_listed(rings.v, kv_base + skip, tile_number(key0) * C.BLOCK_N, work, a, C)
        else:
            zero_unseen_values(rings.v, kv_base + skip, key0, work, band, a, C)
    wait_full(rings.k, kv_base + skip + 1, work.count > skip + 1)


@gluon.jit
def process_tiles(o_desc, o_buffers, rings, i, t, work, band, a, WG: gl.constexpr, C: gl.constexpr):
    """All work tiles of this program from its i-th on, which is t."""
    q_n = i * 0 + WG
    kv_base = i * 0  # key tiles of the work tiles before
    row0 = work.m0 + 64 * WG
    wait_full(rings.q, q_n)
    skip = tiles_to_skip(work, band, row0, WG, C)
    skip_tiles(rings.k, kv_base, skip, WG, C)
    skip_bias(rings, kv_base, skip, WG, C)
    skip_drawn(rings, kv_base, skip, WG, C)
    key0 = first_keys(rings, kv_base + skip, work, skip, C)
    q = Queries(rings=rings, n=q_n, tile=query_tile(rings.q, q_n, WG, C), fragments=())
    state = first_step(q, kv_base + skip, WarpgroupRows(work=work, band=band, row0=row0), key0, a, WG, C)
    prepare_values(rings, kv_base, skip, key0, work, band, a, WG, C)
    while t >= 0:
        # the softmax of work tile t's first key tile is done, nothing is in flight
        state = remaining_tiles(
            state, rings, q_n, kv_base, skip, key0, WarpgroupRows(work=work, band=band, row0=row0), a, WG, C
        )
        if C.RELEASE_Q_EARLY:
            release(rings.q, q_n, work.count == skip + 1)  # else the last step has
        else:
            release(rings.q, q_n)
        q_n += C.WARPGROUPS
        last = skip_left(rings, kv_base, work, WarpgroupRows(work=work, band=band, row0=row0), skip, C)
        kv_base += work.count
        done = work
        done_i = i
        i, t, work, band = next_tile(a, i + 1, C)
        slot = opaque(q_n * 0 + WG)
        if t >= 0:
            row0 = work.m0 + 64 * WG
            skip = tiles_to_skip(work, band, row0, WG, C)
            key0 = first_keys(rings, kv_base + skip, work, skip, C)
            skip_tiles(rings.k, kv_base, skip, WG, C)
            skip_bias(rings, kv_base, skip, WG, C)
            skip_drawn(rings, kv_base, skip, WG, C)
            wait_full(rings.q, q_n)
            wait_full(rings.k, kv_base + skip)
            l = state.l
            m = state.m
            seen = state.seen
            # beside queries in registers there are none left for this stage, so it is computed again
            where = slot if C.Q_IN_REGISTERS > 0 else WG
            q = Queries(rings=rings, n=q_n, tile=query_tile(rings.q, q_n, where, C), fragments=())
            rows = WarpgroupRows(work=work, band=band, row0=row0)
            state, o_tile = step_into_next(state, q, kv_base + skip, last, rows, key0, a, WG, C)
            if not C.VARLEN:
                # located again rather than kept in registers
                done, _ = locate(a, tile_at(a, opaque(done_i)), C)
            store_seen(seen, l, m, done, done.m0 + 64 * WG, a, C)
            finish(o_tile, l, m, o_desc, o_buffers, slot, done, done.m0 + 64 * WG, a, C)
            prepare_values(rings, kv_base, skip, key0, work, band, a, WG, C)
        else:
            o_tile = last_output(state, rings.v, last, C)
            store_seen(state.seen, state.l, state.m, done, done.m0 + 64 * WG, a, C)
            finish(o_tile, state.l, state.m, o_desc, o_buffers, slot, done, done.m0 + 64 * WG, a, C)


@gluon.jit
def consume(o_desc, o_buffers, rings, a, WG: gl.constexpr, C: gl.constexpr):
    """All work tiles of this program, rows [64 WG, 64 WG + 64) of each."""
    if C.PINGPONG:
        if WG == 1:
            named_barrier("arrive", PINGPONG_BARRIER)  # warpgroup 0 goes first
    i, t, work, band = next_tile(a, gl.program_id(0) * 0, C)
    if C.VARLEN or C.BIAS != "":
        if t >= 0:
            process_tiles(o_desc, o_buffers, rings, i, t, work, band, a, WG, C)
    else:
        process_tiles(o_desc, o_buffers, rings, i, t, work, band, a, WG, C)
    if C.PINGPONG:
        if WG == 0:
            named_barrier("sync", PINGPONG_BARRIER)  # as many arrivals as waits
    await_stores()
