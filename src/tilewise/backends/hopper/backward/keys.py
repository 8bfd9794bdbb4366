"""The computing role where each warpgroup has 64 keys of its own: dK, dV of 64 keys, and half of dQ.

    over the queries seen so far:   dv = Σ P dO,   dk = Σ dS Q        P = exp2(x - lse2),   dS = P ∘ (dP - delta)

All tiles of scores are transposed, [keys, queries], so P and dS are left operands as they stand in registers. Only dS goes
through shared memory: dQ(n) = dS(n)ᵀ K needs the other warpgroup's half of the keys too. It is computed one tile of queries later,
so that neither warpgroup waits for the other's scores, and the two drift apart: one computes weights while the other multiplies.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.backends.hopper.backward.schedule import first_statistics, locate_keys
from tilewise.backends.hopper.backward.tile import (
    as_operand,
    guard,
    guard_queries,
    put,
    reduce_dq,
    seeded,
    seen_weights,
    statistic,
    store_rows,
    zeros,
)
from tilewise.backends.hopper.finish import await_stores
from tilewise.backends.hopper.ring import await_tile, matrix, phase, place, release
from tilewise.backends.hopper.schedule import tile_at
from tilewise.backends.hopper.shim import afresh


@gluon.jit
def issue_dq(k_tile, ds_ring, n, WG: gl.constexpr, C: gl.constexpr):
    """This warpgroup's part of dQ of the n-th tile of queries: its half of the columns (64 queries) or rows (128)."""
    await_tile(ds_ring, n)
    ds_tile = ds_ring.tiles.index(place(ds_ring, n))
    none = zeros(C.PIECE)
    if C.BLOCK_M == 128:
        rows = ds_tile.slice(WG * 64, 64, dim=1).permute((1, 0))
        token = warpgroup_mma(rows, k_tile, none, use_acc=False, is_async=True)
    else:
        columns = k_tile.slice(WG * C.PIECE, C.PIECE, dim=1)
        token = warpgroup_mma(ds_tile.permute((1, 0)), columns, none, use_acc=False, is_async=True)
    return token


@gluon.jit
def step(dk, dv, rings, stats, n, m, stat_tile, k0, band, len_q, a, FIRST: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """One tile of queries of a head; also dQ of the one before, unless it is the first."""
    q_ring, do_ring, k_ring, v_ring, ds_ring, served = rings
    DTYPE: gl.constexpr = q_ring.tiles.dtype
    q_tile = matrix(q_ring, n)
    do_tile = matrix(do_ring, n)
    k_tile = matrix(k_ring, served)
    k_rows = k_tile.slice(WG * 64, 64, dim=0)
    v_rows = matrix(v_ring, served).slice(WG * 64, 64, dim=0)
    at = place(q_ring, n)
    none = zeros(C.BLOCK_M)
    await_tile(q_ring, n)
    if C.VARLEN:
        await_tile(do_ring, n)
        guard_queries(q_tile, do_tile, m, len_q, WG, C)
    if C.SEEDED:
        lse2 = statistic(stats, at, 0, C)
        s_seed = seeded(lse2, none)
        await_tile(do_ring, n)
        dp_seed = seeded(statistic(stats, at, 1, C), none)
        s_token = warpgroup_mma(k_rows, q_tile.permute((1, 0)), s_seed, is_async=True)
        dp_token = warpgroup_mma(v_rows, do_tile.permute((1, 0)), dp_seed, is_async=True)
    else:
        s_token = warpgroup_mma(k_rows, q_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        await_tile(do_ring, n)
        dp_token = warpgroup_mma(v_rows, do_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        lse2 = statistic(stats, at, 0, C)
    s_tile = warpgroup_mma_wait(1, deps=[s_token])  # [64, M]
    p_tile, w_tile = seen_weights(s_tile, lse2, band, m, k0, a, C)
    p_operand = as_operand(p_tile, C.BLOCK_DV, DTYPE)
    if C.REDUCE:
        mbarrier.wait(ds_ring.empty.index(place(ds_ring, n)), phase(ds_ring, n) ^ 1)
    dp_tile = warpgroup_mma_wait(0, deps=[dp_token])  # [64, M]
    if not C.SEEDED:
        dp_tile = dp_tile - statistic(stats, at, 1, C)[None, :]
    ds_tile = (w_tile * dp_tile).to(DTYPE)
    if C.REDUCE:
        ds_ring.tiles.index(place(ds_ring, n)).slice(WG * 64, 64, dim=0).store(ds_tile)
    dv_token = warpgroup_mma(p_operand, do_tile, dv, is_async=True)
    if C.REDUCE:
        fence_async_shared()
        mbarrier.arrive(ds_ring.full.index(place(ds_ring, n)), count=1)
    if C.REDUCE and not FIRST:
        dq_token = issue_dq(k_tile, ds_ring, n - 1, WG, C)
    dk_token = warpgroup_mma(as_operand(ds_tile, C.BLOCK_D, DTYPE), q_tile, dk, is_async=True)
    if C.REDUCE and not FIRST:
        dq_tile, dv = warpgroup_mma_wait(1, deps=[dq_token, dv_token])
        reduce_dq(dq_tile, WG, stat_tile - 1, a, C)
        dk = warpgroup_mma_wait(0, deps=[dk_token])
        release(ds_ring, n - 1)
    else:
        dk, dv = warpgroup_mma_wait(0, deps=[dk_token, dv_token])
    release(do_ring, n)
    release(q_ring, n)
    return dk, dv


@gluon.jit
def gradients(rings, stats, taken, spot, band, k0, a, WG: gl.constexpr, C: gl.constexpr):
    """dK and dV of this warpgroup's 64 keys, from all queries of all heads of the group."""
    q_ring, do_ring, k_ring, v_ring, ds_ring, served = rings
    dk = zeros(C.BLOCK_D)
    dv = zeros(C.BLOCK_DV)
    n = taken
    stat_tile = first_statistics(spot, a)
    for _ in range(a.group.value):
        m = spot.first * C.BLOCK_M
        past = n + spot.count
        dk, dv = step(dk, dv, rings, stats, n, m, stat_tile, k0, band, spot.len_q, a, True, WG, C)
        for n in range(n + 1, past):
            m += C.BLOCK_M
            stat_tile += 1
            dk, dv = step(dk, dv, rings, stats, n, m, stat_tile, k0, band, spot.len_q, a, False, WG, C)
        if C.REDUCE:
            dq_token = issue_dq(matrix(k_ring, served), ds_ring, past - 1, WG, C)
            dq_tile = warpgroup_mma_wait(0, deps=[dq_token])
            release(ds_ring, past - 1)
            reduce_dq(dq_tile, WG, stat_tile, a, C)
        n = past
        stat_tile += 1 + a.stat_blocks - spot.count
    release(v_ring, served)
    release(k_ring, served)
    return dk, dv


@gluon.jit
def serve(dk_desc, dv_desc, buffers, rings, stats, taken, spot, band, i, a, WG: gl.constexpr, C: gl.constexpr):
    """One tile of keys, the i-th of this program."""
    q_ring, do_ring, k_ring, v_ring, ds_ring, served = rings
    dk_buffers, dv_buffers = buffers
    k0 = spot.n0 + 64 * WG
    await_tile(k_ring, served)
    await_tile(v_ring, served)
    k_rows = matrix(k_ring, served).slice(WG * 64, 64, dim=0)
    guard(k_rows, matrix(v_ring, served).slice(WG * 64, 64, dim=0), band, spot, k0, 64, a, C)
    dk, dv = gradients(rings, stats, taken, spot, band, k0, a, WG, C)
    # asked again rather than kept in registers
    spot, band = locate_keys(a, tile_at(a, afresh(i)), C)
    k0 = spot.n0 + 64 * WG
    await_stores()
    put(dv_desc, a.dv, dv, dv_buffers.index(WG), spot.row, spot.h, spot.k_start, k0, spot.len_k, C)
    if C.BLOCK_D == C.BLOCK_DV:
        await_stores()  # the two share a buffer
    put(dk_desc, a.dk, dk * a.scale, dk_buffers.index(WG), spot.row, spot.h, spot.k_start, k0, spot.len_k, C)


@gluon.jit
def consume_keys(
    dk_desc, dv_desc, dk_buffers, dv_buffers, stats, q_ring, do_ring, k_ring, v_ring, ds_ring, a, WG: gl.constexpr, C: gl.constexpr
):
    """All tiles of this program, keys [64 WG, 64 WG + 64) of each."""
    taken = 0
    served = 0
    i = 0
    t = tile_at(a, i)
    buffers = dk_buffers, dv_buffers
    while t >= 0:
        spot, band = locate_keys(a, t, C)
        rings = q_ring, do_ring, k_ring, v_ring, ds_ring, served
        if C.VARLEN:
            if spot.count > 0:
                serve(dk_desc, dv_desc, buffers, rings, stats, taken, spot, band, i, a, WG, C)
                served += 1
            else:
                # keys without a single query; writes nothing past the sequence's end
                k0 = spot.n0 + 64 * WG
                store_rows(zeros(C.BLOCK_DV), a.dv, spot.h, spot.k_start, k0, spot.len_k)
                store_rows(zeros(C.BLOCK_D), a.dk, spot.h, spot.k_start, k0, spot.len_k)
        else:
            serve(dk_desc, dv_desc, buffers, rings, stats, taken, spot, band, i, a, WG, C)
            served += 1
        taken += spot.count * a.group.value
        i += 1
        t = tile_at(a, i)
    await_stores()
