"""The computing role: one warpgroup, 64 rows of each tile of queries, all their keys."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tilewise.backends.hopper.finish import await_stores, finish
from tilewise.backends.hopper.ring import await_tile, matrix, release
from tilewise.backends.hopper.schedule import key_hi, key_lo, locate, next_tile, tile_at
from tilewise.backends.hopper.shim import afresh, named_arrive, named_sync, warps_barrier
from tilewise.backends.hopper.step import Queries, begin, end, hold, step, turn


@gluon.jit
def walk(x, q, k_ring, v_ring, taken, j0, j1, spot, band, row0, a, MASKED: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """The tiles of keys j0 <= j < j1 of this tile of queries; j counts from the right."""
    for j in range(j0, j1):
        key0 = (spot.last - 1 - j) * C.BLOCK_N
        x = step(x, q, k_ring, v_ring, taken + j, j + 1 < spot.count, band, row0, key0, a, MASKED, WG, C)
    return x


@gluon.jit
def clear_unseen(v_ring, n, key0, lo, hi, C: gl.constexpr):
    """Zero the values of keys outside [lo, hi), which no query sees: their weights are 0, but 0 · inf is not."""
    SLICE: gl.constexpr = 32
    SLICES: gl.constexpr = C.BLOCK_N // SLICE
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile = matrix(v_ring, n)
    for i in gl.static_range(SLICES):
        first = key0 + i * SLICE
        if (first < lo) | (first + SLICE > hi):
            rows = tile.slice(i * SLICE, SLICE, dim=0)
            k = first + gl.arange(0, SLICE, gl.SliceLayout(1, LAYOUT))
            v_tile = rows.load(LAYOUT)
            rows.store(gl.where(((k >= lo) & (k < hi))[:, None], v_tile, gl.zeros_like(v_tile)))
    fence_async_shared()
    warps_barrier()


@gluon.jit
def guard(v_ring, n, key0, spot, band, a, C: gl.constexpr):
    """Before the values of an outermost tile are used: see to those that no query of the sequence sees."""
    lo = key_lo(band, spot.b * 0, C)
    hi = key_hi(band, afresh(spot.last_q), C)
    # beyond the tensor the loads have filled in zeros
    if (key0 < lo) | ((key0 + C.BLOCK_N > hi) & (spot.k_start + hi < afresh(a.len_k))):
        await_tile(v_ring, n)
        clear_unseen(v_ring, n, key0, lo, hi, C)


@gluon.jit
def seen_by_all(spot, band, row0, C: gl.constexpr):
    """[j0, j1): the tiles of keys that all rows of this warpgroup see wholly."""
    right = key_hi(band, row0, C) // C.BLOCK_N
    left = gl.cdiv(key_lo(band, row0 + 63, C), C.BLOCK_N)
    j0 = gl.minimum(gl.maximum(spot.last - right, 0), spot.count)
    j1 = gl.minimum(gl.maximum(spot.last - left, j0), spot.count)
    return j0, j1


@gluon.jit
def unseen(spot, band, row0, WG: gl.constexpr, C: gl.constexpr):
    """How many of the tile's first tiles of keys no row of this warpgroup sees. The last warpgroup sees them all."""
    if C.BAND and WG + 1 < C.WARPGROUPS and not C.PINGPONG:
        last = gl.cdiv(key_hi(band, row0 + 63, C), C.BLOCK_N)
        return gl.minimum(gl.maximum(spot.last - last, 0), spot.count - 1)
    else:
        return spot.count * 0


@gluon.jit
def pass_by(ring, n, skip, WG: gl.constexpr, C: gl.constexpr):
    """Let the first tiles of keys or values go unread, once they are there: an earlier sign would count for the tile before."""
    if C.BAND and WG + 1 < C.WARPGROUPS and not C.PINGPONG:
        for i in range(skip):
            await_tile(ring, n + i)
            release(ring, n + i)


@gluon.jit
def queries(q_ring, n, slot, C: gl.constexpr):
    """This warpgroup's n-th tile of queries; slot is its number, the place of all of them where there is one."""
    if C.QUERIES == 1:
        return matrix(q_ring, slot)
    else:
        return matrix(q_ring, n)


@gluon.jit
def rest(x, q_ring, q_n, k_ring, v_ring, taken, skip, spot, band, row0, a, WG: gl.constexpr, C: gl.constexpr):
    """A tile of queries from its second tile of keys on; the last product with values is left to do."""
    # at the right end some rows see only part of a tile; then come tiles all see; then, if rows begin inside, the left end
    j0, j1 = seen_by_all(spot, band, row0, C)
    j0 = gl.maximum(j0, skip + 1)
    j1 = gl.maximum(j1, j0)
    # 0, which the assembler cannot know: where two loops read the same queries, ptxas 12.8 computes part of their address before
    # the first loop only, also for when that is passed by
    zero = a.last_q + 1 - a.len_q
    held = ()
    if C.Q_HELD > 0:
        held = hold(queries(q_ring, q_n, WG, C), C)
    if C.BAND:
        q = Queries(q_ring, q_n, queries(q_ring, q_n + zero, WG, C), held)
        if C.PINGPONG:
            x = walk(x, q, k_ring, v_ring, taken, skip + 1, j0, spot, band, row0, a, True, WG, C)
        else:
            # 64 rows end within 64 keys, so in two tiles: the first is weighed. A loop would cost registers
            if skip + 1 < j0:
                n = taken + skip + 1
                key0 = (spot.last - 2 - skip) * C.BLOCK_N
                x = step(x, q, k_ring, v_ring, n, spot.count > skip + 2, band, row0, key0, a, True, WG, C)
    q = Queries(q_ring, q_n, queries(q_ring, q_n, WG, C), held)
    x = walk(x, q, k_ring, v_ring, taken, j0, j1, spot, band, row0, a, False, WG, C)
    if C.LEFT:
        q = Queries(q_ring, q_n, queries(q_ring, q_n - zero, WG, C), held)
        x = walk(x, q, k_ring, v_ring, taken, j1, spot.count, spot, band, row0, a, True, WG, C)
        if C.UNSEEN:
            if spot.count > skip + 1:
                guard(v_ring, taken + spot.count - 1, (spot.last - spot.count) * C.BLOCK_N, spot, band, a, C)
    return x


@gluon.jit
def serve(o_desc, o_buffers, q_ring, k_ring, v_ring, i, t, spot, band, a, WG: gl.constexpr, C: gl.constexpr):
    """All tiles of queries of this program from its i-th on, which is t."""
    q_n = i * 0 + WG
    taken = i * 0  # tiles of keys before those of this tile of queries
    row0 = spot.m0 + 64 * WG
    await_tile(q_ring, q_n)
    skip = unseen(spot, band, row0, WG, C)
    pass_by(k_ring, taken, skip, WG, C)
    key0 = (spot.last - 1 - skip) * C.BLOCK_N
    q = Queries(q_ring, q_n, queries(q_ring, q_n, WG, C), ())
    x = begin(q, k_ring, taken + skip, band, row0, key0, a, C)
    pass_by(v_ring, taken, skip, WG, C)
    if C.UNSEEN:
        guard(v_ring, taken + skip, key0, spot, band, a, C)
    await_tile(k_ring, taken + skip + 1, spot.count > skip + 1)
    while t >= 0:
        # of tile t of queries the first tile of keys is weighed, nothing is in flight
        x = rest(x, q_ring, q_n, k_ring, v_ring, taken, skip, spot, band, row0, a, WG, C)
        if C.Q_EARLY:
            release(q_ring, q_n, spot.count == skip + 1)  # else the last step has
        else:
            release(q_ring, q_n)
        q_n += C.WARPGROUPS
        last = taken + spot.count - 1
        taken = last + 1
        was = spot
        before = i
        i, t, spot, band = next_tile(a, i + 1, C)
        slot = afresh(q_n * 0 + WG)
        if t >= 0:
            row0 = spot.m0 + 64 * WG
            skip = unseen(spot, band, row0, WG, C)
            key0 = (spot.last - 1 - skip) * C.BLOCK_N
            pass_by(k_ring, taken, skip, WG, C)
            await_tile(q_ring, q_n)
            await_tile(k_ring, taken + skip)
            old_l = x.l
            old_m = x.m
            # beside queries in registers there are none for this place, so it is found again
            where = slot if C.Q_HELD > 0 else WG
            q = Queries(q_ring, q_n, queries(q_ring, q_n, where, C), ())
            x, o_tile = turn(x, q, k_ring, taken + skip, v_ring, last, band, row0, key0, a, WG, C)
            if not C.VARLEN:
                # asked again rather than kept in registers
                was, _ = locate(a, tile_at(a, afresh(before)), C)
            finish(o_tile, old_l, old_m, o_desc, o_buffers, slot, was, was.m0 + 64 * WG, a, C)
            pass_by(v_ring, taken, skip, WG, C)
            if C.UNSEEN:
                guard(v_ring, taken + skip, key0, spot, band, a, C)
            await_tile(k_ring, taken + skip + 1, spot.count > skip + 1)
        else:
            finish(end(x, v_ring, last, C), x.l, x.m, o_desc, o_buffers, slot, was, was.m0 + 64 * WG, a, C)


@gluon.jit
def consume(o_desc, o_buffers, q_ring, k_ring, v_ring, a, WG: gl.constexpr, C: gl.constexpr):
    """All tiles of this program, rows [64 WG, 64 WG + 64) of each."""
    if C.PINGPONG:
        if WG == 1:
            named_arrive(14, 256)  # warpgroup 0 goes first
    i, t, spot, band = next_tile(a, gl.program_id(0) * 0, C)
    if C.VARLEN:
        if t >= 0:
            serve(o_desc, o_buffers, q_ring, k_ring, v_ring, i, t, spot, band, a, WG, C)
    else:
        serve(o_desc, o_buffers, q_ring, k_ring, v_ring, i, t, spot, band, a, WG, C)
    if C.PINGPONG:
        if WG == 0:
            named_sync(14, 256)  # as many arrivals as waits
    await_stores()
