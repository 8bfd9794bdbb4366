"""The computing role where each warpgroup has 64 keys of its own: dK, dV of 64 keys, and half of dQ.

    over the queries seen so far:   dv = Σ P dO,   dk = Σ dS Q        P = exp2(x - lse2),   dS = P ∘ (dP - delta)

All tiles of scores are transposed, [keys, queries], so P and dS are left operands as they stand in registers. Only dS goes
through shared memory: dQ(n) = dS(n)ᵀ K needs the other warpgroup's half of the keys too. It is computed one tile of queries
later, so that neither warpgroup waits for the other's scores, and the two drift apart: one computes weights while the other
multiplies. So dQ of a tile of keys' last queries is computed under the next tile's first ones, and K has two places.
"""

# No `from __future__ import annotations` here: aggregates check their fields against the annotations themselves.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.backends.hopper.backward.early import early_gradients
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
from tilewise.backends.hopper.ring import Ring, await_tile, matrix, place, release
from tilewise.backends.hopper.schedule import tile_at
from tilewise.backends.hopper.shim import afresh, aggregate


@aggregate
class Rings:
    """What the roles share. The tiles of queries turn together: `q.empty` stands for all of them."""

    q: Ring
    do: Ring
    k: Ring
    v: Ring
    ds: Ring
    stats: gl.shared_memory_descriptor  # [places of q, 2 M]

    @gluon.constexpr_function
    def __init__(self, q, do, k, v, ds, stats):
        self.q = q
        self.do = do
        self.k = k
        self.v = v
        self.ds = ds
        self.stats = stats


@gluon.jit
def tile_in(ring, at):
    """The tile in one of a ring's places, as a matrix."""
    ROWS: gl.constexpr = ring.tiles.type.shape[3]
    WIDTH: gl.constexpr = ring.tiles.type.shape[4]
    return ring.tiles.index(at).reshape([ROWS, WIDTH])


@gluon.jit
def issue_dq(k_tile, ds_ring, n, live, WG: gl.constexpr, C: gl.constexpr):
    """This warpgroup's part of dQ of the tile of queries before the n-th: half of the columns (64 queries) or rows (128).
    Where there was none before, what is computed means nothing."""
    at = (n & 1) ^ 1
    mbarrier.wait(ds_ring.full.index(at), ((n - 1) >> 1) & 1, pred=live)
    ds_tile = ds_ring.tiles.index(at)
    none = zeros(C.PIECE)
    if C.BLOCK_M == 128:
        rows = ds_tile.slice(WG * 64, 64, dim=1).permute((1, 0))
        token = warpgroup_mma(rows, k_tile, none, use_acc=False, is_async=True)
    else:
        columns = k_tile.slice(WG * C.PIECE, C.PIECE, dim=1)
        token = warpgroup_mma(ds_tile.permute((1, 0)), columns, none, use_acc=False, is_async=True)
    return token


@gluon.jit
def step(dk, dv, rings, served, n, m, before, spot, band, a, FIRST: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """One tile of queries; also dQ of the one before, whose statistics are tile `before`. The FIRST of these keys follows one of
    the keys before."""
    DTYPE: gl.constexpr = rings.q.tiles.dtype
    # Every ring of queries has two places and turns alike. Taken afresh: else each address is a variable or constant of the loop
    # in a register of its own.
    n = afresh(n)
    served = afresh(served)
    at = n & 1
    turn = (n >> 1) & 1
    q_tile = tile_in(rings.q, at)
    do_tile = tile_in(rings.do, at)
    k_tile = matrix(rings.k, served)
    k_rows = k_tile.slice(WG * 64, 64, dim=0)
    v_rows = matrix(rings.v, served).slice(WG * 64, 64, dim=0)
    none = zeros(C.BLOCK_M)
    guard_queries(rings.q, rings.do, n, m, spot, band, WG, C)
    mbarrier.wait(rings.q.full.index(at), turn)
    if C.SEEDED:
        lse2 = statistic(rings.stats, at, 0, C)
        s_seed = seeded(lse2, none)
        mbarrier.wait(rings.do.full.index(at), turn)
        dp_seed = seeded(statistic(rings.stats, at, 1, C), none)
        s_token = warpgroup_mma(k_rows, q_tile.permute((1, 0)), s_seed, is_async=True)
        dp_token = warpgroup_mma(v_rows, do_tile.permute((1, 0)), dp_seed, is_async=True)
    else:
        s_token = warpgroup_mma(k_rows, q_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(rings.do.full.index(at), turn)
        dp_token = warpgroup_mma(v_rows, do_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        lse2 = statistic(rings.stats, at, 0, C)
    s_tile = warpgroup_mma_wait(1, deps=[s_token])  # [64, M]
    p_tile, w_tile = seen_weights(s_tile, lse2, band, m, spot.n0 + 64 * WG, a, C)
    if C.REDUCE:
        # both warpgroups are done with step n - 1, and so with dQ(n - 2)
        mbarrier.wait(rings.q.empty.index(at ^ 1), ((n - 1) >> 1) & 1)
    dp_tile = warpgroup_mma_wait(0, deps=[dp_token])  # [64, M]
    if not C.SEEDED:
        dp_tile = dp_tile - statistic(rings.stats, at, 1, C)[None, :]
    ds_tile = (w_tile * dp_tile).to(DTYPE)
    if C.REDUCE:
        rings.ds.tiles.index(at).slice(WG * 64, 64, dim=0).store(ds_tile)
    dv_token = warpgroup_mma(as_operand(p_tile, C.BLOCK_DV, DTYPE), do_tile, dv, is_async=True)
    if C.REDUCE:
        fence_async_shared()
        mbarrier.arrive(rings.ds.full.index(at), count=1)
        live = True
        dq_keys = k_tile
        if FIRST:
            live = n > 0
            dq_keys = matrix(rings.k, served + 1)  # of two places, so it is served - 1's
        dq_token = issue_dq(dq_keys, rings.ds, n, live, WG, C)
    dk_token = warpgroup_mma(as_operand(ds_tile, C.BLOCK_D, DTYPE), q_tile, dk, is_async=True)
    if C.REDUCE:
        dq_tile, dv = warpgroup_mma_wait(1, deps=[dq_token, dv_token])
        reduce_dq(dq_tile, WG, before, a, C)
        dk = warpgroup_mma_wait(0, deps=[dk_token])
        if FIRST:
            mbarrier.arrive(rings.k.empty.index(place(rings.k, served + 1)), count=1, pred=live)
    else:
        dk, dv = warpgroup_mma_wait(0, deps=[dk_token, dv_token])
    mbarrier.arrive(rings.q.empty.index(at), count=1)  # for dO and dS(n - 1) too
    return dk, dv


@gluon.jit
def gradients(rings, served, taken, before, spot, band, a, WG: gl.constexpr, C: gl.constexpr):
    """dK and dV of this warpgroup's 64 keys, from all queries of all heads of the group."""
    stat_tile = first_statistics(spot, a)
    dk = zeros(C.BLOCK_D)
    dv = zeros(C.BLOCK_DV)
    dk, dv = step(dk, dv, rings, served, taken, spot.first * C.BLOCK_M, before, spot, band, a, True, WG, C)
    before = stat_tile
    for g in range(a.group.value):
        n0 = taken + g * spot.count
        stat0 = stat_tile + g * a.stat_blocks - n0
        for n in range(gl.maximum(n0, taken + 1), n0 + spot.count):
            m = (spot.first + n - n0) * C.BLOCK_M
            dk, dv = step(dk, dv, rings, served, n, m, before, spot, band, a, False, WG, C)
            before = stat0 + n
    release(rings.v, served)
    if not C.REDUCE:
        release(rings.k, served)
    return dk, dv, before


@gluon.jit
def flush(rings, served, taken, before, a, WG: gl.constexpr, C: gl.constexpr):
    """dQ of this program's last tile of queries."""
    dq_token = issue_dq(matrix(rings.k, served + 1), rings.ds, taken, True, WG, C)
    dq_tile = warpgroup_mma_wait(0, deps=[dq_token])
    reduce_dq(dq_tile, WG, before, a, C)


@gluon.jit
def serve(dk_desc, dv_desc, buffers, rings, served, taken, before, spot, band, i, a, WG: gl.constexpr, C: gl.constexpr):
    """One tile of keys, the i-th of this program."""
    dk_buffers, dv_buffers = buffers
    k0 = spot.n0 + 64 * WG
    await_tile(rings.k, served)
    await_tile(rings.v, served)
    k_rows = matrix(rings.k, served).slice(WG * 64, 64, dim=0)
    guard(k_rows, matrix(rings.v, served).slice(WG * 64, 64, dim=0), band, spot, k0, 64, a, C)
    if C.EARLY:
        dk, dv = early_gradients(rings, served, taken, spot, band, a, WG, C)
    else:
        dk, dv, before = gradients(rings, served, taken, before, spot, band, a, WG, C)
    # asked again rather than kept in registers
    spot, band = locate_keys(a, tile_at(a, afresh(i)), C)
    k0 = spot.n0 + 64 * WG
    await_stores()
    put(dv_desc, a.dv, dv, dv_buffers.index(WG), spot.row, spot.h, spot.k_start, k0, spot.len_k, C)
    if C.BLOCK_D == C.BLOCK_DV:
        await_stores()  # the two share a buffer
    put(dk_desc, a.dk, dk * a.scale, dk_buffers.index(WG), spot.row, spot.h, spot.k_start, k0, spot.len_k, C)
    return before


@gluon.jit
def consume_keys(dk_desc, dv_desc, dk_buffers, dv_buffers, rings, a, WG: gl.constexpr, C: gl.constexpr):
    """All tiles of this program, keys [64 WG, 64 WG + 64) of each."""
    taken = 0
    served = 0
    i = 0
    t = tile_at(a, i)
    before = a.stat_tiles  # nothing: what is added there is never read
    buffers = dk_buffers, dv_buffers
    while t >= 0:
        spot, band = locate_keys(a, t, C)
        if C.VARLEN:
            if spot.count > 0:
                before = serve(dk_desc, dv_desc, buffers, rings, served, taken, before, spot, band, i, a, WG, C)
                served += 1
            else:
                # keys without a single query; writes nothing past the sequence's end
                k0 = spot.n0 + 64 * WG
                store_rows(zeros(C.BLOCK_DV), a.dv, spot.h, spot.k_start, k0, spot.len_k)
                store_rows(zeros(C.BLOCK_D), a.dk, spot.h, spot.k_start, k0, spot.len_k)
        else:
            before = serve(dk_desc, dv_desc, buffers, rings, served, taken, before, spot, band, i, a, WG, C)
            served += 1
        taken += spot.count * a.group.value
        i += 1
        t = tile_at(a, i)
    if C.REDUCE:
        if taken > 0:
            flush(rings, served, taken, before, a, WG, C)
    await_stores()
