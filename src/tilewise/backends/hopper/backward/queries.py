"""The consumer that holds queries and streams keys: dQ without additions in memory, the same bits in every run.

    over the keys seen so far:   dq = Σ dS K        dS = P ∘ (dP - delta)

Each of two warpgroups has 64 queries. While dQ's product runs, the scores of the next keys are already issued behind it.
"""

from __future__ import annotations

from tilewise.backends.hopper.alibi import columns_from, rows_from, slope_of
from tilewise.backends.hopper.backward.scores import (
    add_product,
    as_operand,
    first_parts,
    gradient_spans,
    hold,
    issue_scores,
    no_gradient,
    pieces,
    score_pieces,
    times,
    weights,
)
from tilewise.backends.hopper.bias import load_by_row, raise_flag, store_gradient_by_row
from tilewise.backends.hopper.compat import gl, gluon, opaque, opaque_float, warpgroup_mma_wait
from tilewise.backends.hopper.dropout import dropped, kept_by_row
from tilewise.backends.hopper.epilogue import await_stores, store_gradient
from tilewise.backends.hopper.grad_tile import HeldTile, locate_queries
from tilewise.backends.hopper.lane_words import interval_words, no_words, rows_of_words, where_set
from tilewise.backends.hopper.listed import visible_keys
from tilewise.backends.hopper.lists import announced, is_partial, place, tile_number
from tilewise.backends.hopper.operands import accumulator
from tilewise.backends.hopper.ring import matrix, release, stage, wait_full
from tilewise.backends.hopper.softmax import INF
from tilewise.backends.hopper.work_tile import key_hi, key_lo, tile_at
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
def interval_keys(band, row0, key0, C: gl.constexpr):
    """The key tile from key0 on: its first key, whether some query does not see all of it, and then which keys queries see, as
    words. Found while the scores are computed: later there are no registers for it."""
    LAYOUT: gl.constexpr = accumulator(C.BLOCK_N)
    last = row0 + 63
    if C.LEFT and C.VARLEN:  # else the bounds of both rows are kept in registers
        row0 = opaque(row0)
        last = opaque(row0 + 63)
    all_see = (key_hi(band, row0, C) >= key0 + C.BLOCK_N) & (key_lo(band, last, C) <= key0)
    words = no_words(C.BLOCK_N, LAYOUT)
    if not all_see:
        q = opaque(rows_of_words(words, row0))  # else what is computed from it is kept in registers
        first = key0
        if C.LEFT:
            first = opaque(key0)  # else its distances from lanes are variables of the loop
        words = interval_words(key_lo(band, q, C) - first, key_hi(band, q, C) - first, words)
    return key0, not all_see, words


@gluon.jit
def positions_by_row(like, tile, row0, key0, C: gl.constexpr):
    """Slope times the positions of queries by row and of keys by column, from row0 on; key0 as below."""
    LAYOUT: gl.constexpr = like.type.layout
    first = key0[0]
    if C.LISTS is not None:
        first = tile_number(key0[0]) * C.BLOCK_N
    ahead = tile.work.len_k - tile.work.len_q
    slope = opaque_float(tile.slope)
    keys = columns_from(slope * (first - ahead - row0).to(gl.float32), slope, C.BLOCK_N, LAYOUT)
    return rows_from(0.0, slope, LAYOUT), keys


@gluon.jit
def row_weights(s_tile, lse2, tile, row0, key0, bias, a, C: gl.constexpr):
    """Weights, and what dP - delta is multiplied with: weights times the softcap's slope, 0 where a query does not see a key.
    `key0`: as of `interval_keys` or `listed_keys`."""
    if C.ALIBI != "":
        queries, keys = positions_by_row(s_tile, tile, row0, key0, C)
        if C.ALIBI == "past":
            lse2 = lse2 + queries
        p_tile, w_tile = weights(s_tile, lse2[:, None], a, C, (queries, keys, tile.slope), False)
    else:
        p_tile, w_tile = weights(s_tile, lse2[:, None], a, C, bias=bias)
    if key0[1]:
        w_tile = where_set(key0[2], w_tile, 0.0)
        if C.DBIAS != "" and C.SCORES == "softcap":
            p_tile = where_set(key0[2], p_tile, 0.0)
    return p_tile, w_tile


@gluon.jit
def score_gradient(s_token, dp_token, v_ring, n, key0, statistics, tile, row0, a, C: gl.constexpr):
    """dS of the n-th key tile as the left operand of its product with K; S and dP are in flight."""
    BEHIND: gl.constexpr = len(score_pieces(C.HELD[1], C.V_COLUMNS, C.BLOCK_DV))
    lse2, delta = statistics
    if C.DROPOUT:
        kept = kept_by_row(row0, key0[0], tile.work.b, tile.work.h, a, C.BLOCK_N, C)
    bias = lse2
    if C.BIAS != "":
        bias = load_by_row(tile.work, row0, key0[0], a, C.BLOCK_N, False, C)
    s_tile = warpgroup_mma_wait(BEHIND, deps=[s_token])  # [64, N]
    p_tile, w_tile = row_weights(s_tile, lse2, tile, row0, key0, bias, a, C)
    dp_tile = warpgroup_mma_wait(0, deps=[dp_token])  # [64, N]
    release(v_ring, n)
    if C.DROPOUT:
        dp_tile = dropped(dp_tile * a.keep_scale, kept, True)
    dp_tile = dp_tile - delta[:, None]
    if C.DBIAS != "":  # added behind the softcap
        ds_tile = w_tile * dp_tile if C.SCORES != "softcap" else p_tile * dp_tile
        store_gradient_by_row(ds_tile, tile.work, row0, key0[0], a, C)
    DQ: gl.constexpr = gradient_spans(C.QK_COLUMNS, C.BLOCK_D)
    return as_operand(w_tile * dp_tile, DQ[0][1], v_ring.tiles.dtype)


@gluon.jit
def await_dq(tokens, ds, LEFT: gl.constexpr):
    """dQ's parts, when all products but the last so many are done."""
    done = warpgroup_mma_wait(LEFT, deps=tokens + (ds,))  # noqa: RUF005
    return first_parts(done, len(tokens))


@gluon.jit
def gradient(rings, tile, kv_base, row0, a, WG: gl.constexpr, C: gl.constexpr):
    """dQ of this warpgroup's queries from all keys they see."""
    S_PIECES: gl.constexpr = len(score_pieces(C.HELD[0], C.QK_COLUMNS, C.BLOCK_D))
    q_tile = matrix(rings.q, WG)
    do_tile = matrix(rings.do, WG)
    statistics = row_statistics(tile.work, row0, a, C)
    DQ: gl.constexpr = gradient_spans(C.QK_COLUMNS, C.BLOCK_D)
    dq = no_gradient(DQ)
    q_held = hold(q_tile, C.BLOCK_N, C.HELD[0])
    do_held = hold(do_tile, C.BLOCK_N, C.HELD[1])
    key0 = tile.work.first * C.BLOCK_N
    past = kv_base + tile.work.count
    zero_unseen_key_halves(rings, kv_base, key0, tile, a, WG, C)
    s_token = issue_scores(q_tile, rings.k, kv_base, C.BLOCK_N, C.QK_COLUMNS, q_held, C.HELD[0])
    found = interval_keys(tile.band, row0, key0, C)
    dp_token = issue_scores(do_tile, rings.v, kv_base, C.BLOCK_N, C.V_COLUMNS, do_held, C.HELD[1])
    ds = score_gradient(s_token, dp_token, rings.v, kv_base, found, statistics, tile, row0, a, C)
    # over the key tiles before n: dq lacks the last one, whose dS waits in ds
    for j in range(kv_base + 1, past):
        key0 += C.BLOCK_N
        n = opaque(j)  # else each address is a variable of the loop in a register of its own
        zero_unseen_key_halves(rings, n, key0, tile, a, WG, C)
        dq_token = add_product(ds, matrix(rings.k, n - 1), dq, DQ)
        s_token = issue_scores(q_tile, rings.k, n, C.BLOCK_N, C.QK_COLUMNS, q_held, C.HELD[0])
        found = interval_keys(tile.band, row0, key0, C)
        dq = await_dq(dq_token, ds, S_PIECES)
        release(rings.k, n - 1)
        dp_token = issue_scores(do_tile, rings.v, n, C.BLOCK_N, C.V_COLUMNS, do_held, C.HELD[1])
        ds = score_gradient(s_token, dp_token, rings.v, n, found, statistics, tile, row0, a, C)
    dq = await_dq(add_product(ds, matrix(rings.k, past - 1), dq, DQ), ds, 0)
    release(rings.k, past - 1)
    return dq


@gluon.jit
def listed_keys(rings, n, tile, row0, a, C: gl.constexpr):
    """The n-th key tile, which has landed: its place in a list, whether it is PARTIAL, and then which keys queries see, as words.
    Found while the scores are computed: later there are no registers for it."""
    LAYOUT: gl.constexpr = accumulator(C.BLOCK_N)
    cursor = announced(rings.listed[0], stage(rings.k, n))
    partial = is_partial(cursor)
    words = no_words(C.BLOCK_N, LAYOUT)
    if partial:
        words = visible_keys(tile.work, row0, cursor, a, LAYOUT, C)
    return cursor, partial, words


@gluon.jit
def zero_partial_keys(rings, n, tile, a, WG: gl.constexpr, C: gl.constexpr):
    if C.UNSEEN_KEYS:
        wait_full(rings.k, n)
        cursor = announced(rings.listed[0], stage(rings.k, n))
        if is_partial(cursor):
            zero_unseen_key_halves(rings, n, cursor, tile, a, WG, C)


@gluon.jit
def listed_gradient(rings, tile, kv_base, row0, a, WG: gl.constexpr, C: gl.constexpr):
    """The same from the keys of a list."""
    S_PIECES: gl.constexpr = len(pieces(C.QK_COLUMNS, C.BLOCK_D))
    work = tile.work
    q_tile = matrix(rings.q, WG)
    do_tile = matrix(rings.do, WG)
    statistics = row_statistics(work, row0, a, C)
    DQ: gl.constexpr = gradient_spans(C.QK_COLUMNS, C.BLOCK_D)
    dq = no_gradient(DQ)
    past = kv_base + work.count
    zero_partial_keys(rings, kv_base, tile, a, WG, C)
    s_token = issue_scores(q_tile, rings.k, kv_base, C.BLOCK_N, C.QK_COLUMNS)
    found = listed_keys(rings, kv_base, tile, row0, a, C)
    dp_token = issue_scores(do_tile, rings.v, kv_base, C.BLOCK_N, C.V_COLUMNS)
    ds = score_gradient(s_token, dp_token, rings.v, kv_base, found, statistics, tile, row0, a, C)
    # over the key tiles before n: dq lacks the last one, whose dS waits in ds
    for i in range(kv_base + 1, past):
        n = opaque(i)  # else each address is a variable of the loop in a register of its own
        zero_partial_keys(rings, n, tile, a, WG, C)
        dq_token = add_product(ds, matrix(rings.k, n - 1), dq, DQ)
        s_token = issue_scores(q_tile, rings.k, n, C.BLOCK_N, C.QK_COLUMNS)
        found = listed_keys(rings, n, tile, row0, a, C)
        dq = await_dq(dq_token, ds, S_PIECES)
        release(rings.k, n - 1)
        dp_token = issue_scores(do_tile, rings.v, n, C.BLOCK_N, C.V_COLUMNS)
        ds = score_gradient(s_token, dp_token, rings.v, n, found, statistics, tile, row0, a, C)
    dq = await_dq(add_product(ds, matrix(rings.k, past - 1), dq, DQ), ds, 0)
    release(rings.k, past - 1)
    return dq


@gluon.jit
def zero_empty_rows(dq, work, band, row0, a, C: gl.constexpr):
    """dQ with zeros in rows that see no key, whatever they hold and whatever comes back to them."""
    if not C.EMPTY_ROWS:
        return dq
    else:
        found = ()
        for i in gl.static_range(len(dq)):
            found += (zero_empty_part(dq[i], work, band, row0, a, C),)
        return found


@gluon.jit
def zero_empty_part(dq, work, band, row0, a, C: gl.constexpr):
    if C.LISTS is not None:
        q = row0 + gl.arange(0, 64, gl.SliceLayout(1, dq.type.layout))
        words = a.lists.seeing + place(work.b, work.h, a.lists.seeing_strides)
        word = gl.load(words + q // 32, mask=q < a.len_q, other=0)
        return gl.where((((word >> (q % 32)) & 1) != 0)[:, None], dq, 0.0)
    else:
        q = row0 + gl.arange(0, 64, gl.SliceLayout(1, dq.type.layout))
        return gl.where((key_lo(band, q, C) < key_hi(band, q, C))[:, None], dq, 0.0)


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
            held = HeldTile(work=work, band=band, index=q_index, h=q_index, slope=q_index)
            if C.ALIBI != "":
                held = HeldTile(work=work, band=band, index=q_index, h=work.h, slope=slope_of(work.b, work.h, a))
            if C.LISTS is not None:
                dq = listed_gradient(rings, held, kv_base, row0, a, WG, C)
            else:
                dq = gradient(rings, held, kv_base, row0, a, WG, C)
            release(rings.do, at)
            # located again rather than kept in registers
            work, band = locate_queries(a, tile_at(a, opaque(i)), C)
            row0 = work.start + 64 * WG
            dq = zero_empty_rows(dq, work, band, row0, a, C)
            SPANS: gl.constexpr = gradient_spans(C.QK_COLUMNS, C.BLOCK_D)
            for j in gl.static_range(len(SPANS)):
                raise_flag(dq[j], a, C)
            buffer = rings.q.tiles.index(WG)
            store_gradient(dq_desc, a.dq, times(dq, a.scale), buffer, work, work.q_start, row0, work.len_q, SPANS, C)
            await_stores()
            release(rings.q, at)
            q_index += 1
        kv_base += work.count
        i += 1
        t = tile_at(a, i)
