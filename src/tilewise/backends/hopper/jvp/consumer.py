"""The consumer of the JVP: one warpgroup, 64 rows of each work tile, all their keys."""

from __future__ import annotations

from tilewise.backends.hopper.compat import PINGPONG_BARRIER, gl, gluon, named_barrier, opaque
from tilewise.backends.hopper.consumer import tiles_without_mask
from tilewise.backends.hopper.epilogue import await_stores
from tilewise.backends.hopper.jvp.epilogue import finish
from tilewise.backends.hopper.jvp.mainloop import first_step, last_values, step
from tilewise.backends.hopper.mainloop import WarpgroupRows
from tilewise.backends.hopper.ring import Ring, release, wait_full
from tilewise.backends.hopper.work_tile import locate, next_tile, tile_at
from tilewise.backends.hopper.zeroing import zero_unseen_values


@gluon.jit
def loop_over_tiles(state, rings, kv_base, j0, j1, rows, a, MASKED: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """The key tiles j0 <= j < j1 of this work tile, counted from the right."""
    work = rows.work
    for j in range(j0, j1):
        key0 = (work.last - 1 - j) * C.BLOCK_N
        state = step(state, rings, kv_base + j, j + 1 < work.count, rows, key0, a, MASKED, WG, C)
    return state


@gluon.jit
def zero_unseen(rings, n, key0, rows, a, C: gl.constexpr):
    """Values and their tangents that no query of the sequence sees become zeros."""
    zero_unseen_values(rings.v, n, key0, rows.work, rows.band, a, C)
    if C.V_T:
        moving = Ring(tiles=rings.v_t[0], full=rings.v.full, empty=rings.v.empty)
        zero_unseen_values(moving, n, key0, rows.work, rows.band, a, C)


@gluon.jit
def attend(rings, q_n, kv_base, rows, a, WG: gl.constexpr, C: gl.constexpr):
    """All key tiles of a work tile."""
    MASKED: gl.constexpr = C.TERMS > 0 or C.VARLEN or C.TAIL
    work = rows.work
    wait_full(rings.q, q_n)
    key0 = (work.last - 1) * C.BLOCK_N
    state = first_step(rings, kv_base, rows, key0, a, MASKED, WG, C)
    if C.UNSEEN_KEYS:
        zero_unseen(rings, kv_base, key0, rows, a, C)
    wait_full(rings.k, kv_base + 1, work.count > 1)
    j0, j1 = tiles_without_mask(work, rows.band, rows.row0, C)
    # at the right end some rows see only part of a tile; then come tiles all see; then, if rows begin inside, the left end
    j0 = gl.maximum(j0, 1)
    j1 = gl.maximum(j1, j0)
    if C.BAND:
        state = loop_over_tiles(state, rings, kv_base, 1, j0, rows, a, True, WG, C)
    state = loop_over_tiles(state, rings, kv_base, j0, j1, rows, a, False, WG, C)
    if C.LEFT:
        state = loop_over_tiles(state, rings, kv_base, j1, work.count, rows, a, True, WG, C)
        if C.UNSEEN_KEYS:
            if work.count > 1:
                zero_unseen(rings, kv_base + work.count - 1, (work.last - work.count) * C.BLOCK_N, rows, a, C)
    release(rings.q, q_n)
    return last_values(state, rings, kv_base + work.count - 1, C)


@gluon.jit
def consume(o_desc, o_t_desc, o_buffers, rings, a, WG: gl.constexpr, C: gl.constexpr):
    """All work tiles of this program, rows [64 WG, 64 WG + 64) of each."""
    if WG == 1:
        named_barrier("arrive", PINGPONG_BARRIER)  # warpgroup 0 goes first
    i, t, work, band = next_tile(a, gl.program_id(0) * 0, C)
    q_n = i * 0 + WG
    kv_base = i * 0  # key tiles of the work tiles before
    while t >= 0:
        state = attend(rings, q_n, kv_base, WarpgroupRows(work=work, band=band, row0=work.m0 + 64 * WG), a, WG, C)
        done = work
        if not C.VARLEN:
            # located again rather than kept in registers
            done, _ = locate(a, tile_at(a, opaque(i)), C)
        finish(state, o_desc, o_t_desc, o_buffers.index(WG), done, done.m0 + 64 * WG, a, C)
        q_n += C.WARPGROUPS
        kv_base += done.count
        i, t, work, band = next_tile(a, i + 1, C)
    if WG == 0:
        named_barrier("sync", PINGPONG_BARRIER)  # as many arrivals as waits
    await_stores()
