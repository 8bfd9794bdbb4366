"""dK and dV of a warpgroup's 64 keys where dQ has a kernel of its own, with the next scores under the last gradients.

    over the queries seen so far:   dv = Σ P dO,   dk = Σ dS Q        P = exp2(x - lse2),   dS = P ∘ (dP - delta)

Another order than `keys.step`: the next S is issued behind the last dV and dK, and dP behind it when those two are done. So a
product of this warpgroup is in flight while it computes weights, unlike there between two query tiles.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.hopper.backward.common import (
    DELTA,
    LSE2,
    as_operand,
    issue_scores,
    masked_weights,
    statistic,
    zero_unseeing_queries,
)
from tilewise.backends.hopper.compat import opaque
from tilewise.backends.hopper.mainloop import zeros
from tilewise.backends.hopper.ring import matrix, release, stage


@gluon.jit
def score_tiles(s_token, dp_token, rings, n, m, k0, band, a, C: gl.constexpr):
    """P and dS of the n-th query tile as left operands; S and dP are in flight."""
    DTYPE: gl.constexpr = rings.q.tiles.dtype
    at = stage(rings.q, n)
    s_tile = warpgroup_mma_wait(1, deps=[s_token])  # [64, M]
    p_tile, w_tile = masked_weights(s_tile, statistic(rings.stats, at, LSE2, C), band, m, k0, a, C)
    dp_tile = warpgroup_mma_wait(0, deps=[dp_token])  # [64, M]
    ds_tile = w_tile * (dp_tile - statistic(rings.stats, at, DELTA, C)[None, :])
    return as_operand(p_tile, C.BLOCK_DV, DTYPE), as_operand(ds_tile, C.BLOCK_D, DTYPE)


@gluon.jit
def issue_gradients(p, ds, dk, dv, rings, n):
    dv_token = warpgroup_mma(p, matrix(rings.do, n), dv, is_async=True)
    dk_token = warpgroup_mma(ds, matrix(rings.q, n), dk, is_async=True)
    return dv_token, dk_token


@gluon.jit
def overlapped_gradients(rings, tile, q_base, a, WG: gl.constexpr, C: gl.constexpr):
    """dK and dV of this warpgroup's 64 keys, from all queries of all heads of the group."""
    work = tile.work
    k0 = work.start + 64 * WG
    k_rows = matrix(rings.k, tile.index).slice(WG * 64, 64, dim=0)
    v_rows = matrix(rings.v, tile.index).slice(WG * 64, 64, dim=0)
    dk = zeros(C.BLOCK_D)
    dv = zeros(C.BLOCK_DV)
    m0 = work.first * C.BLOCK_M
    zero_unseeing_queries(rings, q_base, m0, tile, WG, C)
    s_token = issue_scores(k_rows, rings.q, q_base, C.BLOCK_M)
    dp_token = issue_scores(v_rows, rings.do, q_base, C.BLOCK_M)
    p, ds = score_tiles(s_token, dp_token, rings, q_base, m0, k0, tile.band, a, C)
    # over the query tiles before n: dv and dk lack the last one, whose P and dS wait in p and ds
    for g in range(a.group.value):
        n0 = q_base + g * work.count
        for j in range(gl.maximum(n0, q_base + 1), n0 + work.count):
            m = (work.first + j - n0) * C.BLOCK_M
            n = opaque(j)  # else each address is a variable of the loop in a register of its own
            zero_unseeing_queries(rings, n, m, tile, WG, C)
            dv_token, dk_token = issue_gradients(p, ds, dk, dv, rings, n - 1)
            s_token = issue_scores(k_rows, rings.q, n, C.BLOCK_M)
            dv, dk, _, _ = warpgroup_mma_wait(1, deps=[dv_token, dk_token, p, ds])
            release(rings.q, n - 1)  # for dO too
            dp_token = issue_scores(v_rows, rings.do, n, C.BLOCK_M)
            p, ds = score_tiles(s_token, dp_token, rings, n, m, k0, tile.band, a, C)
    release(rings.v, tile.index)
    release(rings.k, tile.index)
    last = q_base + work.count * a.group.value - 1
    dv_token, dk_token = issue_gradients(p, ds, dk, dv, rings, last)
    dv, dk = warpgroup_mma_wait(0, deps=[dv_token, dk_token])
    release(rings.q, last)
    return dk, dv
