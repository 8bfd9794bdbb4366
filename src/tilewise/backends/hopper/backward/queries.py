"""The roles of the kernel that holds queries and streams keys: dQ without additions in memory, the same bits in every run.

    over the keys seen so far:   dq = Σ dS K        dS = P ∘ (dP - delta)

Each of two warpgroups has 64 queries. While dQ's product runs, the scores of the next keys are already issued behind it.
"""

# No `from __future__ import annotations` here: aggregates check their fields against the annotations themselves.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from tilewise.backends.hopper.backward.tile import accumulator, as_operand, clear_rows, put, zeros
from tilewise.backends.hopper.finish import await_stores
from tilewise.backends.hopper.ring import await_tile, fill, matrix, release
from tilewise.backends.hopper.schedule import band_of, divide, find_sequence, key_hi, key_lo, tile_at
from tilewise.backends.hopper.shim import afresh, aggregate, named_sync
from tilewise.backends.hopper.softmax import INF, tanh


@aggregate
class QuerySpot:
    """128 queries of sequence b and query head h from m0 on; `count` tiles of keys, from tile `first` on, are seen by some."""

    b: gl.tensor
    row: gl.tensor  # of the tensors' batch: b, or 0 when packed
    h: gl.tensor
    m0: gl.tensor
    q_start: gl.tensor  # tokens of the sequence in a packed batch, else 0
    k_start: gl.tensor
    len_q: gl.tensor
    stat_start: gl.tensor  # tile of statistics where the sequence begins in each head
    first: gl.tensor
    count: gl.tensor  # at least 1; 0 if there is nothing to do

    @gluon.constexpr_function
    def __init__(self, b, row, h, m0, q_start, k_start, len_q, stat_start, first, count):
        self.b = b
        self.row = row
        self.h = h
        self.m0 = m0
        self.q_start = q_start
        self.k_start = k_start
        self.len_q = len_q
        self.stat_start = stat_start
        self.first = first
        self.count = count


@gluon.jit
def visited(band, m0, len_q, C: gl.constexpr):
    """The first tile of keys that some of the queries see, and how many there are."""
    first = key_lo(band, m0, C) // C.BLOCK_N
    hi = key_hi(band, gl.minimum(m0 + 127, len_q - 1), C)
    return first, gl.maximum(gl.cdiv(hi, C.BLOCK_N) - first, 1)


@gluon.jit
def locate_queries(a, t, C: gl.constexpr):
    """Tile t, counted through each head from its last queries to its first, and the mask of its sequence."""
    bh = divide(t, a.blocks)
    tile = a.blocks.value - 1 - (t - bh * a.blocks.value)
    if C.VARLEN:
        b, tile = find_sequence(a.cu_q, a.batch, tile, 128)
        q_start = gl.load(a.cu_q + b)
        k_start = gl.load(a.cu_k + b)
        len_q = gl.load(a.cu_q + b + 1) - q_start
        len_k = gl.load(a.cu_k + b + 1) - k_start
        band = band_of(a, b, len_q, len_k, C)
        m0 = tile * 128
        first, count = visited(band, m0, len_q, C)
        count = gl.where(m0 < len_q, count, 0)
        stat_start = q_start // C.STAT_ROWS + b
        return QuerySpot(b, b * 0, bh, m0, q_start, k_start, len_q, stat_start, first, count), band
    else:
        b = divide(bh, a.heads)
        band = band_of(a, b, a.len_q, a.len_k, C)
        m0 = tile * 128
        first, count = visited(band, m0, a.len_q, C)
        h = bh - b * a.heads.value
        return QuerySpot(b, b, h, m0, b * 0, b * 0, a.len_q, b * 0, first, count), band


@gluon.jit
def load_for_queries(q_desc, do_desc, k_desc, v_desc, q_ring, do_ring, k_ring, v_ring, a, C: gl.constexpr):
    """Queries once for a tile, 64 for each warpgroup, then its keys and values from the left to the right."""
    taken = 0
    served = 0
    i = 0
    t = tile_at(a, i)
    while t >= 0:
        spot, _ = locate_queries(a, t, C)
        i += 1
        t = tile_at(a, i)
        kv_h = divide(spot.h, a.group)
        if spot.count > 0:
            for w in gl.static_range(2):
                fill(q_ring, q_desc, served * 2 + w, spot.row, spot.h, spot.q_start + spot.m0 + 64 * w)
                fill(do_ring, do_desc, served * 2 + w, spot.row, spot.h, spot.q_start + spot.m0 + 64 * w)
            served += 1
        for j in range(spot.count):
            at = spot.k_start + (spot.first + j) * C.BLOCK_N
            fill(k_ring, k_desc, taken + j, spot.row, kv_h, at)
            fill(v_ring, v_desc, taken + j, spot.row, kv_h, at)
        taken += spot.count


@gluon.jit
def row_statistics(spot, row0, a, C: gl.constexpr):
    """lse in units of log 2 and delta of 64 rows; rows past the last have an lse of +inf."""
    S_LAYOUT: gl.constexpr = accumulator(C.BLOCK_N)
    q = row0 + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
    tile = spot.stat_start + (spot.row * a.heads.value + spot.h) * a.stat_blocks + q // C.STAT_ROWS
    at = a.stats_ptr + tile.to(gl.int64) * (2 * C.STAT_ROWS) + q % C.STAT_ROWS
    ok = q < spot.len_q
    lse2 = gl.load(at, mask=ok, other=INF)
    delta = gl.load(at + C.STAT_ROWS, mask=ok, other=0.0)
    return lse2, delta


@gluon.jit
def row_weights(s_tile, lse2, band, row0, key0, a, C: gl.constexpr):
    """What dP - delta is multiplied with: weights times the softcap's slope, 0 where a query does not see a key."""
    if C.SCORES == "softcap":
        t_tile = tanh(s_tile * a.slope)
        w_tile = gl.exp2(t_tile * a.unit - lse2[:, None]) * (1.0 - t_tile * t_tile)
    else:
        w_tile = gl.exp2(s_tile * a.unit - lse2[:, None])
    all_see = (key_hi(band, row0, C) >= key0 + C.BLOCK_N) & (key_lo(band, row0 + 63, C) <= key0)
    if not all_see:
        LAYOUT: gl.constexpr = s_tile.type.layout
        q = row0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        k = key0 + gl.arange(0, C.BLOCK_N, gl.SliceLayout(0, LAYOUT))
        ok = k[None, :] < key_hi(band, q, C)[:, None]
        if C.LEFT:
            ok = ok & (k[None, :] >= key_lo(band, q, C)[:, None])
        w_tile = gl.where(ok, w_tile, 0.0)
    return w_tile


@gluon.jit
def issue_product(rows, ring, n, C: gl.constexpr):
    """S or dP of the n-th tile of keys: Q or dO against K or V."""
    await_tile(ring, n)
    return warpgroup_mma(rows, matrix(ring, n).permute((1, 0)), zeros(C.BLOCK_N), use_acc=False, is_async=True)


@gluon.jit
def guard(k_ring, v_ring, n, key0, spot, band, a, WG: gl.constexpr, C: gl.constexpr):
    """Keys of an outermost tile that no query of the sequence sees become zeros; each warpgroup sees to half of them."""
    if C.TERMS > 0 or C.VARLEN:
        HALF: gl.constexpr = C.BLOCK_N // 2
        lo = key_lo(band, spot.b * 0, C)
        hi = key_hi(band, spot.len_q - 1, C)
        # beyond the tensor the loads have filled in zeros
        if (key0 < lo) | ((key0 + C.BLOCK_N > hi) & (spot.k_start + hi < a.len_k)):
            await_tile(k_ring, n)
            await_tile(v_ring, n)
            clear_rows(matrix(k_ring, n).slice(WG * HALF, HALF, dim=0), key0 + WG * HALF, lo, hi, HALF)
            clear_rows(matrix(v_ring, n).slice(WG * HALF, HALF, dim=0), key0 + WG * HALF, lo, hi, HALF)
            fence_async_shared()
            named_sync(15, 256)


@gluon.jit
def score_gradient(s_token, dp_token, v_ring, n, key0, rows, band, row0, a, C: gl.constexpr):
    """dS of the n-th tile of keys as the left operand of its product with K; S and dP are on their way."""
    lse2, delta = rows
    s_tile = warpgroup_mma_wait(1, deps=[s_token])  # [64, N]
    w_tile = row_weights(s_tile, lse2, band, row0, key0, a, C)
    dp_tile = warpgroup_mma_wait(0, deps=[dp_token])  # [64, N]
    release(v_ring, n)
    return as_operand(w_tile * (dp_tile - delta[:, None]), C.BLOCK_D, v_ring.tiles.dtype)


@gluon.jit
def gradient(tiles, k_ring, v_ring, taken, spot, band, row0, a, WG: gl.constexpr, C: gl.constexpr):
    """dQ of this warpgroup's queries from all keys they see."""
    q_tile, do_tile = tiles
    rows = row_statistics(spot, row0, a, C)
    dq = zeros(C.BLOCK_D)
    key0 = spot.first * C.BLOCK_N
    past = taken + spot.count
    guard(k_ring, v_ring, taken, key0, spot, band, a, WG, C)
    s_token = issue_product(q_tile, k_ring, taken, C)
    dp_token = issue_product(do_tile, v_ring, taken, C)
    ds = score_gradient(s_token, dp_token, v_ring, taken, key0, rows, band, row0, a, C)
    # over the tiles of keys before n: dq lacks the last one, whose dS waits in ds
    for j in range(taken + 1, past):
        key0 += C.BLOCK_N
        n = afresh(j)  # else each address is a variable of the loop in a register of its own
        guard(k_ring, v_ring, n, key0, spot, band, a, WG, C)
        dq_token = warpgroup_mma(ds, matrix(k_ring, n - 1), dq, is_async=True)
        s_token = issue_product(q_tile, k_ring, n, C)
        dq, _ = warpgroup_mma_wait(1, deps=[dq_token, ds])
        release(k_ring, n - 1)
        dp_token = issue_product(do_tile, v_ring, n, C)
        ds = score_gradient(s_token, dp_token, v_ring, n, key0, rows, band, row0, a, C)
    dq_token = warpgroup_mma(ds, matrix(k_ring, past - 1), dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq_token])
    release(k_ring, past - 1)
    return dq


@gluon.jit
def seeing_rows(dq, band, row0, C: gl.constexpr):
    """dQ with zeros in rows that see no key, whatever they hold and whatever comes back to them."""
    if C.BLIND:
        q = row0 + gl.arange(0, 64, gl.SliceLayout(1, dq.type.layout))
        dq = gl.where((key_lo(band, q, C) < key_hi(band, q, C))[:, None], dq, 0.0)
    return dq


@gluon.jit
def consume_queries(dq_desc, q_ring, do_ring, k_ring, v_ring, a, WG: gl.constexpr, C: gl.constexpr):
    """All tiles of this program, rows [64 WG, 64 WG + 64) of each; dQ leaves through the queries' memory."""
    taken = 0
    served = 0
    i = 0
    t = tile_at(a, i)
    while t >= 0:
        spot, band = locate_queries(a, t, C)
        if spot.count > 0:
            row0 = spot.m0 + 64 * WG
            at = served * 2 + WG
            await_tile(q_ring, at)
            await_tile(do_ring, at)
            tiles = matrix(q_ring, WG), matrix(do_ring, WG)
            dq = gradient(tiles, k_ring, v_ring, taken, spot, band, row0, a, WG, C)
            release(do_ring, at)
            # asked again rather than kept in registers
            spot, band = locate_queries(a, tile_at(a, afresh(i)), C)
            row0 = spot.m0 + 64 * WG
            dq = seeing_rows(dq, band, row0, C)
            put(
                dq_desc, a.dq, dq * a.scale, q_ring.tiles.index(WG), spot.row, spot.h, spot.q_start, row0, spot.len_q, C
            )
            await_stores()
            release(q_ring, at)
            served += 1
        taken += spot.count
        i += 1
        t = tile_at(a, i)
