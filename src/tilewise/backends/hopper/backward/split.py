"""The computing roles where a gradient of 64 keys fills a warpgroup's registers: one keeps dV, the other dK.

    values:  S = K Qᵀ,   P = exp2(x - lse2),          dv += P dO
    keys:    dP = V dOᵀ, dS = P ∘ (dP - delta),       dk += dS Q

P goes from the first to the second through shared memory, in fp32. Each issues its next product of scores before its last one is
done, and what it computes between products runs under the other's. dQ is left to `queries`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.hopper.backward.schedule import locate_keys
from tilewise.backends.hopper.backward.tile import (
    accumulator,
    as_operand,
    guard,
    seen_weights,
    statistic,
    store_tile,
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
def finish_step(token, spent, n, rows, next_ring, LAST: gl.constexpr, C: gl.constexpr):
    """After a gradient's product is issued: the next product of scores behind it. `spent` is the ring it reads."""
    s_token = token
    if LAST:
        gradient = warpgroup_mma_wait(0, deps=[token])
    else:
        s_token = issue_scores(rows, next_ring, n + 1, C)
        gradient = warpgroup_mma_wait(1, deps=[token])
    release(spent, n)
    return gradient, s_token


@gluon.jit
def values_step(dv, s_token, rings, stats, n, m, band, k0, a, LAST: gl.constexpr, C: gl.constexpr):
    """The n-th tile of queries, whose S is on its way."""
    q_ring, do_ring, w_ring, k_tile, _ = rings
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
    return finish_step(dv_token, do_ring, n, k_tile, q_ring, LAST, C)


@gluon.jit
def keys_step(dk, dp_token, rings, stats, n, LAST: gl.constexpr, C: gl.constexpr):
    """The n-th tile of queries, whose dP is on its way."""
    q_ring, do_ring, w_ring, _, v_tile = rings
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
    ds_tile = w_tile * dp_tile
    dk_token = warpgroup_mma(as_operand(ds_tile, C.BLOCK_D, DTYPE), matrix(q_ring, n), dk, is_async=True)
    return finish_step(dk_token, q_ring, n, v_tile, do_ring, LAST, C)


@gluon.jit
def values_gradient(rings, stats, taken, spot, band, a, C: gl.constexpr):
    """dV of 64 keys from all queries of all heads of the group."""
    q_ring, k_tile = rings[0], rings[3]
    dv = zeros(C.BLOCK_DV)
    for g in range(a.group.value):
        n0 = taken + g * spot.count
        last = n0 + spot.count - 1
        s_token = issue_scores(k_tile, q_ring, n0, C)
        for n in range(n0, last):
            m = (spot.first + n - n0) * C.BLOCK_M
            dv, s_token = values_step(dv, s_token, rings, stats, n, m, band, spot.n0, a, False, C)
        m = (spot.first + spot.count - 1) * C.BLOCK_M
        dv, _ = values_step(dv, s_token, rings, stats, last, m, band, spot.n0, a, True, C)
    return dv


@gluon.jit
def keys_gradient(rings, stats, taken, spot, a, C: gl.constexpr):
    """dK of 64 keys, likewise."""
    do_ring, v_tile = rings[1], rings[4]
    dk = zeros(C.BLOCK_D)
    for g in range(a.group.value):
        n0 = taken + g * spot.count
        last = n0 + spot.count - 1
        dp_token = issue_scores(v_tile, do_ring, n0, C)
        for n in range(n0, last):
            dk, dp_token = keys_step(dk, dp_token, rings, stats, n, False, C)
        dk, _ = keys_step(dk, dp_token, rings, stats, last, True, C)
    return dk


@gluon.jit
def consume_split(grad_desc, stats, q_ring, do_ring, k_ring, v_ring, w_ring, a, WG: gl.constexpr, C: gl.constexpr):
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
        rings = q_ring, do_ring, w_ring, k_tile, v_tile
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
            store_tile(grad_desc, gradient, v_ring.tiles.index(0), spot.row, spot.h, spot.n0)
            await_stores()
            release(v_ring, served)
        else:
            store_tile(grad_desc, gradient * a.scale, k_ring.tiles.index(0), spot.row, spot.h, spot.n0)
            await_stores()
            release(k_ring, served)
        served += 1
