"""dK and dV of a warpgroup's 64 keys where dQ is left to `queries`, with scores issued early.

    over the queries seen so far:   dv = Σ P dO,   dk = Σ dS Q        P = exp2(x - lse2),   dS = P ∘ (dP - delta)

The other way through the tiles of queries than `step` of `keys`: the next S is issued behind the last dV and dK, and dP behind it
when those two are done. So a product of this warpgroup is on its way while it computes weights, unlike there between two tiles.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.hopper.backward.tile import (
    as_operand,
    guard_queries,
    issue_scores,
    seen_weights,
    statistic,
    zeros,
)
from tilewise.backends.hopper.ring import matrix, place, release
from tilewise.backends.hopper.shim import afresh


@gluon.jit
def score_tiles(s_token, dp_token, rings, n, m, k0, band, a, C: gl.constexpr):
    """P and dS of the n-th tile of queries as left operands; S and dP are on their way."""
    DTYPE: gl.constexpr = rings.q.tiles.dtype
    at = place(rings.q, n)
    s_tile = warpgroup_mma_wait(1, deps=[s_token])  # [64, M]
    p_tile, w_tile = seen_weights(s_tile, statistic(rings.stats, at, 0, C), band, m, k0, a, C)
    dp_tile = warpgroup_mma_wait(0, deps=[dp_token])  # [64, M]
    ds_tile = w_tile * (dp_tile - statistic(rings.stats, at, 1, C)[None, :])
    return as_operand(p_tile, C.BLOCK_DV, DTYPE), as_operand(ds_tile, C.BLOCK_D, DTYPE)


@gluon.jit
def first_scores(rings, k_rows, v_rows, n, m, k0, spot, band, a, WG: gl.constexpr, C: gl.constexpr):
    """P and dS of a tile of keys' first queries."""
    guard_queries(rings.q, rings.do, n, m, spot, band, WG, C)
    s_token = issue_scores(k_rows, rings.q, n, C)
    dp_token = issue_scores(v_rows, rings.do, n, C)
    return score_tiles(s_token, dp_token, rings, n, m, k0, band, a, C)


@gluon.jit
def early_gradients(rings, served, taken, spot, band, a, WG: gl.constexpr, C: gl.constexpr):
    """dK and dV of this warpgroup's 64 keys, from all queries of all heads of the group."""
    k0 = spot.n0 + 64 * WG
    k_rows = matrix(rings.k, served).slice(WG * 64, 64, dim=0)
    v_rows = matrix(rings.v, served).slice(WG * 64, 64, dim=0)
    dk = zeros(C.BLOCK_D)
    dv = zeros(C.BLOCK_DV)
    p, ds = first_scores(rings, k_rows, v_rows, taken, spot.first * C.BLOCK_M, k0, spot, band, a, WG, C)
    # over the tiles of queries before n: dv and dk lack the last one, whose P and dS wait in p and ds
    for g in range(a.group.value):
        n0 = taken + g * spot.count
        for j in range(gl.maximum(n0, taken + 1), n0 + spot.count):
            m = (spot.first + j - n0) * C.BLOCK_M
            n = afresh(j)  # else each address is a variable of the loop in a register of its own
            guard_queries(rings.q, rings.do, n, m, spot, band, WG, C)
            dv_token = warpgroup_mma(p, matrix(rings.do, n - 1), dv, is_async=True)
            dk_token = warpgroup_mma(ds, matrix(rings.q, n - 1), dk, is_async=True)
            s_token = issue_scores(k_rows, rings.q, n, C)
            dv, dk, _, _ = warpgroup_mma_wait(1, deps=[dv_token, dk_token, p, ds])
            release(rings.q, n - 1)  # for dO too
            dp_token = issue_scores(v_rows, rings.do, n, C)
            p, ds = score_tiles(s_token, dp_token, rings, n, m, k0, band, a, C)
    release(rings.v, served)
    release(rings.k, served)
    last = taken + spot.count * a.group.value - 1
    dv_token = warpgroup_mma(p, matrix(rings.do, last), dv, is_async=True)
    dk_token = warpgroup_mma(ds, matrix(rings.q, last), dk, is_async=True)
    dv, dk = warpgroup_mma_wait(0, deps=[dv_token, dk_token])
    release(rings.q, last)
    return dk, dv
