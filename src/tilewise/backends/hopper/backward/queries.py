"""The consumer that holds queries and streams keys: dQ without additions in memory, the same bits in every run.

    over the keys seen so far:   dq = Σ dS K        dS = P ∘ (dP - delta)

Each of two warpgroups has 64 queries. While dQ's product runs, the scores of the next keys are already issued behind it.
"""

from __future__ import annotations

from tilewise.backends.hopper.backward.scores import as_operand, issue_scores, weights
from tilewise.backends.hopper.compat import gl, gluon, opaque, warpgroup_mma, warpgroup_mma_wait
from tilewise.backends.hopper.epilogue import await_stores, store_gradient
from tilewise.backends.hopper.mainloop import accumulator, zeros
from tilewise.backends.hopper.ring import matrix, release, wait_full
from tilewise.backends.hopper.softmax import INF
from tilewise.backends.hopper.work_tile import HeldTile, key_hi, key_lo, locate_queries, tile_at
from tilewise.backends.hopper.zeroing import zero_unseen_key_halves


@gluon.jit
def row_statistics(work, row0, a, C: gl.constexpr):
    """lse in units of log 2 and delta of 64 rows; rows past the last have an lse of +inf."""
    S_LAYOUT: gl.constexpr = accumulator(C.BLOCK_N)
    q = row0 + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
    tile = work.stat_start + (work.row * a.heads.value + work.h) * a.stat_blocks + q // C.STAT_ROWS
    at = a.stats_ptr + tile.to(gl.int64) * (2 * C.STAT_ROWS) + q % C.STAT_ROWS
    ok = q < work.len_q
    lse2 = gl.load(at, mask=ok, other=INF)
    delta = gl.load(at + C.STAT_ROWS, mask=ok, other=0.0)
    return lse2, delta


@gluon.jit
def row_weights(s_tile, lse2, band, row0, key0, a, C: gl.constexpr):
    """What dP - delta is multiplied with: weights times the softcap's slope, 0 where a query does not see a key."""
    _, w_tile = weights(s_tile, lse2[:, None], a, C)
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
def score_gradient(s_token, dp_token, v_ring, n, key0, statistics, band, row0, a, C: gl.constexpr):
    """dS of the n-th key tile as the left operand of its product with K; S and dP are in flight."""
    lse2, delta = statistics
    s_tile = warpgroup_mma_wait(1, deps=[s_token])  # [64, N]
    w_tile = row_weights(s_tile, lse2, band, row0, key0, a, C)
    dp_tile = warpgroup_mma_wait(0, deps=[dp_token])  # [64, N]
    release(v_ring, n)
    return as_operand(w_tile * (dp_tile - delta[:, None]), C.BLOCK_D, v_ring.tiles.dtype)


@gluon.jit
def gradient(rings, tile, kv_base, row0, a, WG: gl.constexpr, C: gl.constexpr):
    """dQ of this warpgroup's queries from all keys they see."""
    q_tile = matrix(rings.q, WG)
    do_tile = matrix(rings.do, WG)
    statistics = row_statistics(tile.work, row0, a, C)
    dq = zeros(C.BLOCK_D)
    key0 = tile.work.first * C.BLOCK_N
    past = kv_base + tile.work.count
    zero_unseen_key_halves(rings, kv_base, key0, tile, a, WG, C)
    s_token = issue_scores(q_tile, rings.k, kv_base, C.BLOCK_N)
    dp_token = issue_scores(do_tile, rings.v, kv_base, C.BLOCK_N)
    ds = score_gradient(s_token, dp_token, rings.v, kv_base, key0, statistics, tile.band, row0, a, C)
    # over the key tiles before n: dq lacks the last one, whose dS waits in ds
    for j in range(kv_base + 1, past):
        key0 += C.BLOCK_N
        n = opaque(j)  # else each address is a variable of the loop in a register of its own
        zero_unseen_key_halves(rings, n, key0, tile, a, WG, C)
        dq_token = warpgroup_mma(ds, matrix(rings.k, n - 1), dq, is_async=True)
        s_token = issue_scores(q_tile, rings.k, n, C.BLOCK_N)
        dq, _ = warpgroup_mma_wait(1, deps=[dq_token, ds])
        release(rings.k, n - 1)
        dp_token = issue_scores(do_tile, rings.v, n, C.BLOCK_N)
        ds = score_gradient(s_token, dp_token, rings.v, n, key0, statistics, tile.band, row0, a, C)
    dq_token = warpgroup_mma(ds, matrix(rings.k, past - 1), dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq_token])
    release(rings.k, past - 1)
    return dq


@gluon.jit
def zero_empty_rows(dq, band, row0, C: gl.constexpr):
    """dQ with zeros in rows that see no key, whatever they hold and whatever comes back to them."""
    if C.EMPTY_ROWS:
        q = row0 + gl.arange(0, 64, gl.SliceLayout(1, dq.type.layout))
        dq = gl.where((key_lo(band, q, C) < key_hi(band, q, C))[:, None], dq, 0.0)
    return dq


@gluon.jit
def consume_queries(dq_desc, rings, a, WG: gl.constexpr, C: gl.constexpr):
    """All work tiles of this program, rows [64 WG, 64 WG + 64) of each; dQ leaves through the queries' memory."""
    kv_base = 0  # key tiles of the work tiles before
    q_index = 0
    i = 0
    t = tile_at(a, i)
    while t >= 0:
        work, band = locate_queries(a, t, C)
        if work.count > 0:
            row0 = work.start + 64 * WG
            at = q_index * 2 + WG
            wait_full(rings.q, at)
            wait_full(rings.do, at)
            dq = gradient(rings, HeldTile(work=work, band=band, index=q_index), kv_base, row0, a, WG, C)
            release(rings.do, at)
            # located again rather than kept in registers
            work, band = locate_queries(a, tile_at(a, opaque(i)), C)
            row0 = work.start + 64 * WG
            dq = zero_empty_rows(dq, band, row0, C)
            buffer = rings.q.tiles.index(WG)
            store_gradient(dq_desc, a.dq, dq * a.scale, buffer, work, work.q_start, row0, work.len_q, C)
            await_stores()
            release(rings.q, at)
            q_index += 1
        kv_base += work.count
        i += 1
        t = tile_at(a, i)
