"""The computing roles where a gradient of 64 keys fills a warpgroup's registers: one keeps dV, the other dK.

    values:  S = K Qᵀ,   P = exp2(x - lse2),          dv += P dO,    the first half of dQ's columns
    keys:    dP = V dOᵀ, dS = P ∘ (dP - delta),       dk += dS Q,    the second half

P goes from the first to the second through shared memory in fp32, dS back. Each issues its next product of scores before its
last one is done, and what it computes between products runs under the other's.
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
    accumulator,
    as_operand,
    guard,
    put,
    reduce_dq,
    seen_weights,
    statistic,
    zeros,
)
from tilewise.backends.hopper.finish import await_stores
from tilewise.backends.hopper.ring import await_tile, matrix, phase, place, release
from tilewise.backends.hopper.schedule import tile_at
from tilewise.backends.hopper.shim import afresh, named_sync


@gluon.jit
def issue_scores(rows, ring, n, C: gl.constexpr):
    """S or dP of the n-th tile of queries: K or V against Q or dO."""
    await_tile(ring, n)
    return warpgroup_mma(rows, matrix(ring, n).permute((1, 0)), zeros(C.BLOCK_M), use_acc=False, is_async=True)


@gluon.jit
def issue_dq(k_tile, ds_tile, part: gl.constexpr, C: gl.constexpr):
    columns = k_tile.slice(part * C.PIECE, C.PIECE, dim=1)
    return warpgroup_mma(ds_tile.permute((1, 0)), columns, zeros(C.PIECE), use_acc=False, is_async=True)


@gluon.jit
def finish_step(acc_token, spent, n, rows, next_ring, k_tile, ds_ring, stat_tile, a, WG: gl.constexpr, LAST: gl.constexpr, C: gl.constexpr):
    """After a gradient's product is issued: half of dQ, piece by piece, and the next product of scores. `spent` is the ring
    whose tile that gradient read."""
    s_token = acc_token
    if C.REDUCE:
        PIECES: gl.constexpr = C.BLOCK_D // 2 // C.PIECE
        await_tile(ds_ring, n)
        ds_tile = ds_ring.tiles.index(place(ds_ring, n))
        token = issue_dq(k_tile, ds_tile, WG * PIECES, C)
        acc = warpgroup_mma_wait(1, deps=[acc_token])
        release(spent, n)
        for i in gl.static_range(1, PIECES):
            following = issue_dq(k_tile, ds_tile, WG * PIECES + i, C)
            dq_tile = warpgroup_mma_wait(1, deps=[token])
            reduce_dq(dq_tile, WG * PIECES + i - 1, stat_tile, a, C)
            token = following
        if LAST:
            dq_tile = warpgroup_mma_wait(0, deps=[token])
        else:
            s_token = issue_scores(rows, next_ring, n + 1, C)
            dq_tile = warpgroup_mma_wait(1, deps=[token])
        release(ds_ring, n)
        reduce_dq(dq_tile, WG * PIECES + PIECES - 1, stat_tile, a, C)
    elif LAST:
        acc = warpgroup_mma_wait(0, deps=[acc_token])
        release(spent, n)
    else:
        s_token = issue_scores(rows, next_ring, n + 1, C)
        acc = warpgroup_mma_wait(1, deps=[acc_token])
        release(spent, n)
    return acc, s_token


@gluon.jit
def values_step(dv, s_token, rings, stats, n, m, stat_tile, band, k0, a, LAST: gl.constexpr, C: gl.constexpr):
    """The n-th tile of queries, whose S is on its way."""
    q_ring, do_ring, w_ring, ds_ring, k_tile, _ = rings
    DTYPE: gl.constexpr = q_ring.tiles.dtype
    lse2 = statistic(stats, place(q_ring, n), 0, C)
    s_tile = warpgroup_mma_wait(0, deps=[s_token])  # [64, M]
    release(q_ring, n)
    p_tile, w_tile = seen_weights(s_tile, lse2, band, m, k0, a, C)
    at = place(w_ring, n)
    mbarrier.wait(w_ring.empty.index(at), phase(w_ring, n) ^ 1)
    w_ring.tiles.index(at).store(w_tile)
    mbarrier.arrive(w_ring.full.index(at), count=1)
    await_tile(do_ring, n)
    dv_token = warpgroup_mma(as_operand(p_tile, C.BLOCK_DV, DTYPE), matrix(do_ring, n), dv, is_async=True)
    return finish_step(dv_token, do_ring, n, k_tile, q_ring, k_tile, ds_ring, stat_tile, a, 0, LAST, C)


@gluon.jit
def keys_step(dk, dp_token, rings, stats, n, stat_tile, a, LAST: gl.constexpr, C: gl.constexpr):
    """The n-th tile of queries, whose dP is on its way."""
    q_ring, do_ring, w_ring, ds_ring, k_tile, v_tile = rings
    DTYPE: gl.constexpr = q_ring.tiles.dtype
    S_LAYOUT: gl.constexpr = accumulator(C.BLOCK_M)
    await_tile(q_ring, n)
    delta = statistic(stats, place(q_ring, n), 1, C)
    dp_tile = warpgroup_mma_wait(0, deps=[dp_token])  # [64, M]
    release(do_ring, n)
    dp_tile = dp_tile - delta[None, :]
    await_tile(w_ring, n)
    w_tile = w_ring.tiles.index(place(w_ring, n)).load(S_LAYOUT)
    release(w_ring, n)
    ds_tile = (w_tile * dp_tile).to(DTYPE)
    if C.REDUCE:
        at = place(ds_ring, n)
        mbarrier.wait(ds_ring.empty.index(at), phase(ds_ring, n) ^ 1)
        ds_ring.tiles.index(at).store(ds_tile)
        fence_async_shared()
        mbarrier.arrive(ds_ring.full.index(at), count=1)
    dk_token = warpgroup_mma(as_operand(ds_tile, C.BLOCK_D, DTYPE), matrix(q_ring, n), dk, is_async=True)
    return finish_step(dk_token, q_ring, n, v_tile, do_ring, k_tile, ds_ring, stat_tile, a, 1, LAST, C)


@gluon.jit
def values_gradient(rings, stats, taken, spot, band, a, C: gl.constexpr):
    """dV of 64 keys from all queries of all heads of the group."""
    q_ring, do_ring, w_ring, ds_ring, k_tile, v_tile = rings
    dv = zeros(C.BLOCK_DV)
    n = taken
    stat_tile = first_statistics(spot, a)
    for _ in range(a.group.value):
        m = spot.first * C.BLOCK_M
        last = n + spot.count - 1
        s_token = issue_scores(k_tile, q_ring, n, C)
        for n in range(n, last):
            dv, s_token = values_step(dv, s_token, rings, stats, n, m, stat_tile, band, spot.n0, a, False, C)
            m += C.BLOCK_M
            stat_tile += 1
        dv, _ = values_step(dv, s_token, rings, stats, last, m, stat_tile, band, spot.n0, a, True, C)
        n = last + 1
        stat_tile += 1 + a.stat_blocks - spot.count
    return dv


@gluon.jit
def keys_gradient(rings, stats, taken, spot, a, C: gl.constexpr):
    """dK of 64 keys, likewise."""
    q_ring, do_ring, w_ring, ds_ring, k_tile, v_tile = rings
    dk = zeros(C.BLOCK_D)
    n = taken
    stat_tile = first_statistics(spot, a)
    for _ in range(a.group.value):
        last = n + spot.count - 1
        dp_token = issue_scores(v_tile, do_ring, n, C)
        for n in range(n, last):
            dk, dp_token = keys_step(dk, dp_token, rings, stats, n, stat_tile, a, False, C)
            stat_tile += 1
        dk, _ = keys_step(dk, dp_token, rings, stats, last, stat_tile, a, True, C)
        n = last + 1
        stat_tile += 1 + a.stat_blocks - spot.count
    return dk


@gluon.jit
def consume_split(grad_desc, stats, q_ring, do_ring, k_ring, v_ring, w_ring, ds_ring, a, WG: gl.constexpr, C: gl.constexpr):
    """All tiles of this program: dV of each (WG 0) or dK (WG 1), which leave through the memory of V and of K."""
    HALF: gl.constexpr = WG * 32
    taken = 0
    served = 0
    i = 0
    t = tile_at(a, i)
    while t >= 0:
        spot, band = locate_keys(a, t, C)
        await_tile(k_ring, served)
        await_tile(v_ring, served)
        k_tile = matrix(k_ring, served)
        v_tile = matrix(v_ring, served)
        guard(k_tile.slice(HALF, 32, dim=0), v_tile.slice(HALF, 32, dim=0), band, spot, spot.n0 + HALF, 32, a, C)
        rings = q_ring, do_ring, w_ring, ds_ring, k_tile, v_tile
        if WG == 0:
            gradient = values_gradient(rings, stats, taken, spot, band, a, C)
        else:
            gradient = keys_gradient(rings, stats, taken, spot, a, C)
        taken += spot.count * a.group.value
        # asked again rather than kept in registers; the next tile's number comes from memory while this one is stored
        spot, band = locate_keys(a, tile_at(a, afresh(i)), C)
        i += 1
        t = tile_at(a, i)
        named_sync(14, 256)  # neither reads K or V any more
        if WG == 0:
            put(grad_desc, a.dv, gradient, v_ring.tiles.index(0), spot.row, spot.h, spot.k_start, spot.n0, spot.len_k, C)
            await_stores()
            release(v_ring, served)
        else:
            put(grad_desc, a.dk, gradient * a.scale, k_ring.tiles.index(0), spot.row, spot.h, spot.k_start, spot.n0, spot.len_k, C)
            await_stores()
            release(k_ring, served)
        served += 1
