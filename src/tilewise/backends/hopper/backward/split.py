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
    guard_queries,
    issue_scores,
    put,
    seen_weights,
    statistic,
    store_rows,
    zeros,
)
from tilewise.backends.hopper.finish import await_stores
from tilewise.backends.hopper.ring import await_tile, matrix, phase, place, release
from tilewise.backends.hopper.schedule import tile_at
from tilewise.backends.hopper.shim import afresh, named_sync


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
def guard_next(rings, n, m, spot, band, WG: gl.constexpr, LAST: gl.constexpr, C: gl.constexpr):
    """Before the n-th tile's last product, for the scores behind it."""
    if not LAST:
        guard_queries(rings[0], rings[1], n + 1, m + C.BLOCK_M, spot, band, WG, C)


@gluon.jit
def values_step(dv, s_token, rings, stats, n, m, spot, band, a, LAST: gl.constexpr, C: gl.constexpr):
    """The n-th tile of queries, whose S is on its way."""
    q_ring, do_ring, w_ring, k_tile, _ = rings
    DTYPE: gl.constexpr = q_ring.tiles.dtype
    lse2 = statistic(stats, place(q_ring, n), 0, C)
    s_tile = warpgroup_mma_wait(0, deps=[s_token])  # [64, M]
    release(q_ring, n)
    p_tile, w_tile = seen_weights(s_tile, lse2, band, m, spot.n0, a, C)
    at = place(w_ring, n)
    mbarrier.wait(w_ring.empty.index(at), phase(w_ring, n) ^ 1)
    w_ring.tiles.index(at).store(w_tile)
    mbarrier.arrive(w_ring.full.index(at), count=1)
    guard_next(rings, n, m, spot, band, 0, LAST, C)
    await_tile(do_ring, n)
    dv_token = warpgroup_mma(as_operand(p_tile, C.BLOCK_DV, DTYPE), matrix(do_ring, n), dv, is_async=True)
    return finish_step(dv_token, do_ring, n, k_tile, q_ring, LAST, C)


@gluon.jit
def keys_step(dk, dp_token, rings, stats, n, m, spot, band, LAST: gl.constexpr, C: gl.constexpr):
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
    guard_next(rings, n, m, spot, band, 1, LAST, C)
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
        guard_queries(q_ring, rings[1], n0, spot.first * C.BLOCK_M, spot, band, 0, C)
        s_token = issue_scores(k_tile, q_ring, n0, C)
        for n in range(n0, last):
            m = (spot.first + n - n0) * C.BLOCK_M
            dv, s_token = values_step(dv, s_token, rings, stats, n, m, spot, band, a, False, C)
        m = (spot.first + spot.count - 1) * C.BLOCK_M
        dv, _ = values_step(dv, s_token, rings, stats, last, m, spot, band, a, True, C)
    return dv


@gluon.jit
def keys_gradient(rings, stats, taken, spot, band, a, C: gl.constexpr):
    """dK of 64 keys, likewise."""
    do_ring, v_tile = rings[1], rings[4]
    dk = zeros(C.BLOCK_D)
    for g in range(a.group.value):
        n0 = taken + g * spot.count
        last = n0 + spot.count - 1
        guard_queries(rings[0], do_ring, n0, spot.first * C.BLOCK_M, spot, band, 1, C)
        dp_token = issue_scores(v_tile, do_ring, n0, C)
        for n in range(n0, last):
            m = (spot.first + n - n0) * C.BLOCK_M
            dk, dp_token = keys_step(dk, dp_token, rings, stats, n, m, spot, band, False, C)
        dk, _ = keys_step(dk, dp_token, rings, stats, last, 0, spot, band, True, C)
    return dk


@gluon.jit
def serve_split(grad_desc, stats, rings, served, taken, spot, band, i, a, WG: gl.constexpr, C: gl.constexpr):
    """One tile of keys, the i-th of this program: its gradient leaves through the memory of V or of K."""
    q_ring, do_ring, k_ring, v_ring, w_ring = rings
    HALF: gl.constexpr = WG * 32
    await_tile(k_ring, served)
    await_tile(v_ring, served)
    k_tile = matrix(k_ring, served)
    v_tile = matrix(v_ring, served)
    guard(k_tile.slice(HALF, 32, dim=0), v_tile.slice(HALF, 32, dim=0), band, spot, spot.n0 + HALF, 32, a, C)
    rings = q_ring, do_ring, w_ring, k_tile, v_tile
    if WG == 0:
        gradient = values_gradient(rings, stats, taken, spot, band, a, C)
        ring = v_ring
        rows = a.dv
    else:
        gradient = keys_gradient(rings, stats, taken, spot, band, a, C) * a.scale
        ring = k_ring
        rows = a.dk
    # asked again rather than kept in registers
    spot, band = locate_keys(a, tile_at(a, afresh(i)), C)
    named_sync(14, 256)  # neither reads K or V any more
    put(grad_desc, rows, gradient, ring.tiles.index(0), spot.row, spot.h, spot.k_start, spot.n0, spot.len_k, C)
    await_stores()
    release(ring, served)


@gluon.jit
def consume_split(grad_desc, stats, q_ring, do_ring, k_ring, v_ring, w_ring, a, WG: gl.constexpr, C: gl.constexpr):
    """All tiles of this program: dV of each (WG 0) or dK (WG 1)."""
    taken = 0
    served = 0
    i = 0
    t = tile_at(a, i)
    rings = q_ring, do_ring, k_ring, v_ring, w_ring
    while t >= 0:
        spot, band = locate_keys(a, t, C)
        if C.VARLEN:
            if spot.count > 0:
                serve_split(grad_desc, stats, rings, served, taken, spot, band, i, a, WG, C)
                served += 1
            else:
                # keys without a single query; writes nothing past the sequence's end
                if WG == 0:
                    store_rows(zeros(C.BLOCK_DV), a.dv, spot.h, spot.k_start, spot.n0, spot.len_k)
                else:
                    store_rows(zeros(C.BLOCK_D), a.dk, spot.h, spot.k_start, spot.n0, spot.len_k)
        else:
            serve_split(grad_desc, stats, rings, served, taken, spot, band, i, a, WG, C)
            served += 1
        taken += spot.count * a.group.value
        i += 1
        t = tile_at(a, i)
