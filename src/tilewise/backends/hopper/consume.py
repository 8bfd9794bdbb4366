"""The computing role: one warpgroup, 64 queries, all their keys.

    over the keys seen so far:   o = Σ exp2(x - m) v,   l = Σ exp2(x - m),   m = max x        (x: scores in units of log 2)

Step j has two products in flight: S(j) = Q·K(j)ᵀ is issued, then O += P(j-1)·V(j-1), and while the second runs the softmax of the
first is computed. So o lags l and m by one tile, whose weights wait in p.
"""

# No `from __future__ import annotations` here: aggregates check their fields against the annotations themselves.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.hopper.finish import await_stores, normalise, store_lse, store_out, store_rows
from tilewise.backends.hopper.ring import await_tile, matrix, release
from tilewise.backends.hopper.schedule import key_hi, key_lo, locate, tile_at
from tilewise.backends.hopper.shim import afresh, aggregate, named_arrive, named_sync, warps_barrier
from tilewise.backends.hopper.softmax import INF, lane_sum, masked, scores, unit_of, weigh


@aggregate
class Running:
    """What a warpgroup carries from one tile of keys to the next."""

    o: gl.tensor  # [64, DV] fp32
    p: gl.tensor  # [64, N] 16 bit, weights not yet in o
    m: gl.tensor  # [64]
    l: gl.tensor  # [64, 4], partial sums by lane

    @gluon.constexpr_function
    def __init__(self, o, p, m, l):
        self.o = o
        self.p = p
        self.m = m
        self.l = l


@gluon.constexpr_function
def accumulator(n):
    """The layout of a warpgroup's [64, n] product."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.constexpr_function
def weights_layout(dv):
    """P as the left operand of P·V, straight from the registers of S."""
    return gl.DotOperandLayout(0, accumulator(dv), 2)


@gluon.jit
def as_operand(p_tile, dtype: gl.constexpr, C: gl.constexpr):
    LAYOUT: gl.constexpr = weights_layout(C.BLOCK_DV)
    return gl.convert_layout(p_tile.to(dtype), LAYOUT, assert_trivial=True)


@gluon.jit
def rows_of(x, like):
    """A vector over rows in the layout of the rows of `like`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)[:, None]


@gluon.jit
def begin(q_tile, k_ring, taken, spot, band, row0, needs_mask, a, C: gl.constexpr):
    """The first tile of keys: nothing is in flight yet."""
    N: gl.constexpr = C.BLOCK_N
    DV: gl.constexpr = C.BLOCK_DV
    S_LAYOUT: gl.constexpr = accumulator(N)
    O_LAYOUT: gl.constexpr = accumulator(DV)
    await_tile(k_ring, taken)
    s_none = gl.zeros([64, N], gl.float32, S_LAYOUT)
    s_token = warpgroup_mma(q_tile, matrix(k_ring, taken).permute((1, 0)), s_none, use_acc=False, is_async=True)
    s_tile = warpgroup_mma_wait(0, deps=[s_token])  # [64, N]
    release(k_ring, taken)
    s_tile = scores(s_tile, a, C)
    if needs_mask:
        s_tile = masked(s_tile, band, row0, (afresh(spot.last) - 1) * C.BLOCK_N, C)
    m = gl.full([64], -INF, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    p_tile, m, _ = weigh(s_tile, m, unit_of(a, C), True)
    o_tile = gl.zeros([64, DV], gl.float32, O_LAYOUT)
    return Running(o_tile, as_operand(p_tile, k_ring.tiles.dtype, C), m, lane_sum(p_tile))


@gluon.jit
def step(x, q_tile, k_ring, v_ring, n, more, band, row0, key0, a, MASKED: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """Tile n of keys, which has landed; `more`: another follows."""
    N: gl.constexpr = C.BLOCK_N
    S_LAYOUT: gl.constexpr = accumulator(N)
    s_none = gl.zeros([64, N], gl.float32, S_LAYOUT)
    if C.PINGPONG:
        named_sync(14 + WG, 256)
    s_token = warpgroup_mma(q_tile, matrix(k_ring, n).permute((1, 0)), s_none, use_acc=False, is_async=True)
    await_tile(v_ring, n - 1)
    o_token = warpgroup_mma(x.p, matrix(v_ring, n - 1), x.o, is_async=True)
    if C.PINGPONG:
        named_arrive(15 - WG, 256)
    s_tile = warpgroup_mma_wait(1, deps=[s_token])  # [64, N]
    release(k_ring, n)
    s_tile = scores(s_tile, a, C)
    if MASKED:
        s_tile = masked(s_tile, band, row0, key0, C)
    p_tile, m, fade = weigh(s_tile, x.m, unit_of(a, C), MASKED)
    added = lane_sum(p_tile)
    l = x.l * rows_of(fade, added) + added
    # The wait for the next tile of keys is a loop, hence the boundary of a basic block: without one ptxas moves all of the
    # softmax below the wait for P·V, and nothing overlaps. Only branches that all threads take alike may stand here.
    await_tile(k_ring, n + 1, more)
    o_tile, _ = warpgroup_mma_wait(0, deps=[o_token, x.p])
    release(v_ring, n - 1)
    return Running(o_tile * rows_of(fade, o_tile), as_operand(p_tile, k_ring.tiles.dtype, C), m, l)


@gluon.jit
def walk(x, q_tile, k_ring, v_ring, taken, j0, j1, spot, band, row0, a, MASKED: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """The tiles of keys j0 <= j < j1 of this tile of queries; j counts from the right."""
    for j in range(j0, j1):
        key0 = (spot.last - 1 - j) * C.BLOCK_N
        x = step(x, q_tile, k_ring, v_ring, taken + j, j + 1 < spot.count, band, row0, key0, a, MASKED, WG, C)
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
def attend(q_ring, k_ring, v_ring, taken, q_n, spot, band, row0, a, WG: gl.constexpr, C: gl.constexpr):
    """All keys of one tile of queries."""
    await_tile(q_ring, q_n)
    q_tile = matrix(q_ring, q_n)
    j0, j1 = seen_by_all(spot, band, row0, C)
    x = begin(q_tile, k_ring, taken, spot, band, row0, (j0 > 0) | (j1 == 0), a, C)
    key0 = (spot.last - 1) * C.BLOCK_N
    if C.TERMS > 0 or C.VARLEN:
        guard(v_ring, taken, key0, spot, band, a, C)
    await_tile(k_ring, taken + 1, spot.count > 1)
    # at the right end some rows see only part of a tile; then come tiles all see; then, if rows begin inside, the left end
    j0 = gl.maximum(j0, 1)
    j1 = gl.maximum(j1, j0)
    if C.BAND:
        x = walk(x, q_tile, k_ring, v_ring, taken, 1, j0, spot, band, row0, a, True, WG, C)
    x = walk(x, q_tile, k_ring, v_ring, taken, j0, j1, spot, band, row0, a, False, WG, C)
    if C.LEFT:
        x = walk(x, q_tile, k_ring, v_ring, taken, j1, spot.count, spot, band, row0, a, True, WG, C)
        if spot.count > 1:
            guard(v_ring, taken + spot.count - 1, key0 - (spot.count - 1) * C.BLOCK_N, spot, band, a, C)
    last = taken + spot.count - 1
    if C.STAGED:
        release(q_ring, q_n)
    await_tile(v_ring, last)
    o_token = warpgroup_mma(x.p, matrix(v_ring, last), x.o, is_async=True)
    o_tile = warpgroup_mma_wait(0, deps=[o_token])
    release(v_ring, last)
    return o_tile, x.l, x.m


@gluon.jit
def finish(o_tile, l, m, o_desc, o_buffers, q_ring, q_n, spot, row0, a, WG: gl.constexpr, C: gl.constexpr):
    """The tile's results on their way to memory."""
    slot = afresh(q_n * 0 + WG)
    o_tile, lse = normalise(o_tile, l, m, unit_of(a, C))
    store_lse(lse, a, spot, row0)
    if C.STAGED:
        await_stores()
    if C.VARLEN:
        if row0 + 63 <= spot.last_q:
            store_out(o_desc, o_tile, o_buffers.index(slot), spot, row0)
        else:
            store_rows(o_tile, a, spot, row0)
    else:
        store_out(o_desc, o_tile, o_buffers.index(slot), spot, row0)
    if not C.STAGED:
        await_stores()
        release(q_ring, q_n)


@gluon.jit
def consume(o_desc, o_buffers, q_ring, k_ring, v_ring, a, WG: gl.constexpr, C: gl.constexpr):
    """All tiles of this program, rows [64 WG, 64 WG + 64) of each."""
    if C.PINGPONG:
        if WG == 1:
            named_arrive(14, 256)  # warpgroup 0 goes first
    taken = 0
    served = 0
    i = 0
    t = tile_at(a, i)
    while t >= 0:
        spot, band = locate(a, t, C)
        row0 = spot.m0 + 64 * WG
        if C.VARLEN:
            if spot.count > 0:
                q_n = served * C.WARPGROUPS + WG
                o_tile, l, m = attend(q_ring, k_ring, v_ring, taken, q_n, spot, band, row0, a, WG, C)
                finish(o_tile, l, m, o_desc, o_buffers, q_ring, q_n, spot, row0, a, WG, C)
                served += 1
            taken += spot.count
            i += 1
            t = tile_at(a, i)
        else:
            q_n = i * C.WARPGROUPS + WG
            o_tile, l, m = attend(q_ring, k_ring, v_ring, taken, q_n, spot, band, row0, a, WG, C)
            taken += spot.count
            # asked again rather than kept in registers; the next tile's number comes from memory while this one is stored
            spot, band = locate(a, tile_at(a, afresh(i)), C)
            row0 = spot.m0 + 64 * WG
            i += 1
            t = tile_at(a, i)
            finish(o_tile, l, m, o_desc, o_buffers, q_ring, q_n, spot, row0, a, WG, C)
    if C.PINGPONG:
        if WG == 0:
            named_sync(14, 256)  # as many arrivals as waits
    await_stores()
