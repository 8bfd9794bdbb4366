"""The backward kernels. Weights are recomputed from the scores and each row's LSE; nothing of size M × N is stored.

    P = exp2(x - lse2)     dV = Pᵀ dO     dP = dO Vᵀ     dS = P ∘ (dP - delta)     dQ = scale · dS K     dK = scale · dSᵀ Q

`prepare_kernel` writes delta = rowsum(dO ∘ O) - dLSE and the LSE in the unit of the scores. `keys_kernel` holds a tile of keys
and streams the queries that see it (of every head of the group) in transposed form, so that Pᵀ and dSᵀ feed the products as they
are. `queries_kernel` holds a tile of queries and streams keys. No atomics: the results are the same bits in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tilewise.backends.gpu.program as mp
import tilewise.backends.gpu.tile as tt
import tilewise.backends.gpu.walk as wk
from tilewise.backends.gpu.structs import Head, KeyTile, Listed, QueryTile

LATE_UP_TO = tl.constexpr(32)
"""Queries of a tile whose delta is waited for behind the product dP, so that exponentials run beside that product. With more of
them it takes registers that only kernels without PARTIAL tiles have."""


@triton.jit
def prepare_kernel(a, g, C: tl.constexpr):
    """delta and lse2 of BLOCK_M rows of one head; packed batches are one long row."""
    rows, ok, row, h, zero = tt.row_block(a.len_q, a.heads, C.BLOCK_M)
    out_tile = tt.load_rows(Head(a.out, None, row, h, zero), rows, ok, C.DV, C.BLOCK_DV)  # [M, DV]
    dout_tile = tt.load_rows(Head(g.dout, None, row, h, zero), rows, ok, C.DV, C.BLOCK_DV)  # [M, DV]
    at = (row.to(tl.int64) * a.heads + h) * a.len_q + rows
    lse = tl.load(a.lse_ptr + at, mask=ok, other=0.0)
    # an empty row has no weights: its gradient, infinite or not, must not count
    product_tile = tl.where(out_tile == 0.0, 0.0, out_tile.to(tl.float32) * dout_tile.to(tl.float32))
    empty = lse == float("-inf")
    delta = tl.where(empty, 0.0, tl.sum(product_tile, 1))
    if g.dlse_ptr is not None:
        delta -= tl.where(empty, 0.0, tl.load(g.dlse_ptr + at, mask=ok, other=0.0))
    if a.bias is None:
        lse *= tt.LOG2E  # the unit of `scores`
    tl.store(g.delta_ptr + at, delta, mask=ok)
    tl.store(g.lse2_ptr + at, tl.where(empty, float("inf"), lse), mask=ok)


@triton.jit
def row_stats(a, g, seq, q, ok):
    """lse2 and delta of the queries q of a head; those that are not `ok` count as empty rows."""
    at = (seq.row.to(tl.int64) * a.heads + seq.h) * a.len_q + seq.q_start + q
    return tl.load(g.lse2_ptr + at, mask=ok, other=float("inf")), tl.load(g.delta_ptr + at, mask=ok, other=0.0)


@triton.jit
def weights(a, seq, products, bias_tile, q, k, lse, ok, MODE: tl.constexpr, C: tl.constexpr):
    """Softmax weights of a tile from its products, and the softcap's slope; `q`, `k`, `lse` broadcast.

    The mask is `ok` where it has been evaluated; evaluated here, not before the products, it costs fewer registers.
    """
    s_tile, factors = products
    slope = 1.0
    if C.FOLD:
        p_tile = tl.exp2(s_tile * tt.per_row(factors * (a.scale * tt.LOG2E), C) - lse)
    else:
        x_tile, slope = tt.scores(a, seq, s_tile * tt.per_row(factors, C), bias_tile, q, k, C)
        p_tile = tt.exponential(x_tile - lse, bias_tile)
    if MODE != mp.FULL:
        if ok is not None:
            p_tile = tl.where(ok, p_tile, 0.0)
        else:
            p_tile = tl.where(mp.allowed(a.mask, seq, q, k, C), p_tile, 0.0)
    return p_tile, slope


@triton.jit
def score_gradient(
    a, p_tile, products, slope, delta, kept, SIGNED: tl.constexpr, MODE: tl.constexpr, C: tl.constexpr
):
    """dS before the scale. Keys that nobody sees hold zeros, but rows that see nothing may hold anything: no 0 · inf. Of a FULL
    tile every row sees something, unless a bias hides it.

    `kept`: with dropout the factor of each weight, 0 or 1 / (1 - p); SIGNED: dropped weights have a minus sign instead.
    """
    dp_tile, factors = products
    dp_tile *= tt.per_row(factors, C)
    if C.DROPOUT:
        if SIGNED:
            dp_tile = tl.where(p_tile < 0.0, 0.0, dp_tile * a.keep_scale)
            p_tile = tl.abs(p_tile)
        else:
            dp_tile *= kept
    ds_tile = p_tile * (dp_tile - delta)
    if C.SOFTCAP:
        ds_tile *= slope
    if C.EMPTY_ROWS and (MODE != mp.FULL or a.bias is not None):
        ds_tile = tl.where(p_tile == 0.0, 0.0, ds_tile)
    return ds_tile


@triton.jit
def kept_factors(a, seq, q, n, C: tl.constexpr):
    """What dropout multiplies the weights of a tile by; 1 without."""
    kept = 1.0
    if C.DROPOUT:
        kept = tt.dropout_keep(a, seq, q, n, C) * a.keep_scale
    return kept


@triton.jit
def queries_step(a, g, seq, desc, keys, sums, m, mask, MODE: tl.constexpr, C: tl.constexpr):
    """One tile of queries against the resident keys. Tiles are transposed: [N, M]. `sums` are dK and dV so far.

    `mask`: the mask of the tile where it has been evaluated, or what it is listed with and its run. `desc`: tensor maps of Q and
    dO, and of the statistics. A copy by threads would take them an instruction for every column of theirs.
    """
    dk, dv = sums
    MAPPED: tl.constexpr = desc[2] is not None and MODE != mp.CAREFUL
    LATE: tl.constexpr = C.ALL_FULL or C.BLOCK_M <= LATE_UP_TO
    ok = mask[0]
    rows = tl.arange(0, C.BLOCK_M)
    q = m + rows
    k = keys.n + tl.arange(0, C.BLOCK_N)
    in_sequence = q < seq.len_q
    first = (seq.row * a.heads + seq.h) * a.len_q + seq.q_start + m  # where there are maps, 32 bits are enough
    at = (seq.row.to(tl.int64) * a.heads + seq.h) * a.len_q + seq.q_start + m
    if MAPPED:
        lse2 = desc[2].load([first])  # beyond the last query lies another sequence, but these weights become 0
    elif MODE == mp.FULL:
        lse2 = tl.load(g.lse2_ptr + at + rows)
        delta = tl.load(g.delta_ptr + at + rows)
    else:
        # beyond the last query lies another sequence, whose numbers must not be read
        lse2 = tl.load(g.lse2_ptr + at + rows, mask=in_sequence, other=float("inf"))
        delta = tl.load(g.delta_ptr + at + rows, mask=in_sequence, other=0.0)
    bias_tile = None
    if a.bias is not None:
        bias_tile = tt.load_bias(a, seq, q[None, :], k[:, None])
    exist = None
    # a query that sees no key must not meet 0 · inf
    if C.LISTED and MODE == mp.CAREFUL:
        exist = (lse2 < float("inf")) & wk.seen(a, seq, q[None, :], k[:, None], mask, bias_tile, C)
    elif MODE != mp.FULL and C.EMPTY_ROWS and not C.LISTED and (a.bias is None or MODE == mp.CAREFUL):
        exist = mp.seeing_of_tile(a, seq, q, k, lse2, ok, bias_tile, C)
    elif MODE != mp.FULL and (desc[0] is None or C.FP16_SPLIT):
        exist = in_sequence
    queries = Head(a.q, desc[0], seq.row, seq.h, seq.q_start)
    gradients = Head(g.dout, desc[1], seq.row, seq.h, seq.q_start)
    q_tile = tt.load_stream(a, queries, m, exist, C.BLOCK_M, C.D, C.BLOCK_D, C)  # [M, D]
    dout_tile = tt.load_stream(a, gradients, m, exist, C.BLOCK_M, C.DV, C.BLOCK_DV, C)  # [M, DV]
    products = tt.product(keys.k_tile, q_tile, C)  # [N, M] fp32
    if C.LISTED and MODE != mp.FULL:
        ok = wk.visible(a, seq, q[None, :], k[:, None], mask[1], mask[2], C)
    p_tile, slope = weights(a, seq, products, bias_tile, q[None, :], k[:, None], lse2[None, :], ok, MODE, C)
    if C.DROPOUT:  # a dropped weight has a minus sign from here on: what is kept takes no registers of its own
        p_tile *= 2.0 * tt.dropout_keep(a, seq, q[None, :], keys.n, C) - 1.0
    if MAPPED:  # a wgmma whose result is used is waited for at once, but a sum is not: dV runs beside dS
        if not LATE:
            delta = desc[3].load([first])
        if g.dk is not None:
            products = tt.product(keys.v_tile, dout_tile, C)  # [N, M]
        if LATE:
            delta = desc[3].load([first])
    if g.dv is not None:
        dropped_tile = p_tile
        if C.DROPOUT:
            dropped_tile = tl.where(p_tile < 0.0, 0.0, p_tile * a.keep_scale)
        dv = tt.dot(dropped_tile, dout_tile, dv, C)  # [N, DV]
    if g.dk is not None:
        if not MAPPED:
            products = tt.product(keys.v_tile, dout_tile, C)  # [N, M]
        ds_tile = score_gradient(a, p_tile, products, slope, delta[None, :], 1.0, True, MODE, C)
        dk = tt.dot(ds_tile, q_tile, dk, C)  # [N, D]
    return dk, dv


@triton.jit
def stream_queries(a, g, seq, desc, keys, sums, span, MODE: tl.constexpr, C: tl.constexpr):
    """First the tiles that need no mask, then those on both sides of them, whose mask is evaluated first if it may be EMPTY."""
    dk, dv = sums
    if MODE != mp.CAREFUL:
        for m in range(span[1], span[2], C.BLOCK_M):
            dk, dv = queries_step(a, g, seq, desc, keys, (dk, dv), m, (None, None, None), mp.FULL, C)
    for i in range(mp.span_length(span, C.BLOCK_M)):
        m = mp.span_start(span, i, C.BLOCK_M)
        if C.MASK.has_gaps:
            q = m + tl.arange(0, C.BLOCK_M)
            k = keys.n + tl.arange(0, C.BLOCK_N)
            ok = mp.allowed(a.mask, seq, q[None, :], k[:, None], C)  # [N, M]
            if mp.any_allowed(ok):
                dk, dv = queries_step(a, g, seq, desc, keys, (dk, dv), m, (ok, None, None), MODE, C)
        else:
            dk, dv = queries_step(a, g, seq, desc, keys, (dk, dv), m, (None, None, None), MODE, C)
    return dk, dv


@triton.jit
def stream_listed_queries(
    a, g, seq, desc, keys, sums, listed, PARTIAL: tl.constexpr, MODE: tl.constexpr, C: tl.constexpr
):
    """The tiles of one class that the list names."""
    dk, dv = sums
    word, following, r, i = wk.first_run(a, listed.row, PARTIAL)
    for _ in range(wk.tiles_of(a, listed.row, PARTIAL)):
        m = wk.tile_number((word, following, r, i)) * C.BLOCK_M
        live = word if PARTIAL else wk.ALL_LIVE
        dk, dv = queries_step(a, g, seq, desc, keys, (dk, dv), m, (None, listed, live), MODE, C)
        word, following, r, i = wk.next_run(a, listed.row, (word, following, r, i), PARTIAL)
    return dk, dv


@triton.jit
def listed_sums(a, g, b, kv_h, group, desc, keys, C: tl.constexpr):
    """dK and dV of the resident keys as `group_sums` has them, by lists."""
    dk = tl.full([C.BLOCK_N, C.BLOCK_D], 0.0, tl.float32)
    dv = tl.full([C.BLOCK_N, C.BLOCK_DV], 0.0, tl.float32)
    WHOLE: tl.constexpr = mp.CAREFUL if C.CAREFUL and a.bias is not None else mp.FULL
    PART: tl.constexpr = mp.CAREFUL if C.CAREFUL else mp.MASKED
    for i in range(group):
        seq = tt.seq_info(a, b, kv_h * group + i, C)
        row = wk.list_row(a, seq, seq.k_start, keys.n // C.BLOCK_N, C.BLOCK_N, C)
        whole = Listed(row, (), None)
        if WHOLE == mp.CAREFUL:
            whole = wk.load_listed(a, seq, row, keys.n + tl.arange(0, C.BLOCK_N), True, C)
        dk, dv = stream_listed_queries(a, g, seq, desc, keys, (dk, dv), whole, False, WHOLE, C)
        if not C.ALL_FULL:  # what PARTIAL tiles ask for is loaded here: it would take registers of the loop above
            listed = wk.load_listed(a, seq, row, keys.n + tl.arange(0, C.BLOCK_N), True, C)
            dk, dv = stream_listed_queries(a, g, seq, desc, keys, (dk, dv), listed, True, PART, C)
    return dk, dv


@triton.jit
def group_sums(a, g, b, kv_h, group, desc, keys, span, MODE: tl.constexpr, C: tl.constexpr):
    """dK and dV of the resident keys: the sum over the query heads of the group."""
    dk = tl.full([C.BLOCK_N, C.BLOCK_D], 0.0, tl.float32)
    dv = tl.full([C.BLOCK_N, C.BLOCK_DV], 0.0, tl.float32)
    # over query heads [0, i): dk, dv = what their queries in the span contribute
    for i in range(group):
        seq = tt.seq_info(a, b, kv_h * group + i, C)
        dk, dv = stream_queries(a, g, seq, desc, keys, (dk, dv), span, MODE, C)
    return dk, dv


@triton.jit
def keys_kernel(a, g, q_desc, dout_desc, lse_desc, delta_desc, C: tl.constexpr):
    """dK and dV of one tile of keys. First keys go first: under a causal mask most queries see them."""
    if C.CAREFUL:
        if tl.load(a.flags_ptr + tl.program_id(0)) == 0:
            return
    desc = (q_desc, dout_desc, lse_desc, delta_desc)
    if C.LISTED:
        tile, kv_h, b = wk.listed_tile(a, tl.program_id(0), a.cu_k, a.len_k, a.kv_heads, C.BLOCK_N, C)
    else:
        tile, kv_h, b = tt.work_tile(a, tl.program_id(0), a.cu_k, a.len_k, a.kv_heads, C.BLOCK_N, False, C)
    group = a.heads // a.kv_heads
    seq = tt.seq_info(a, b, kv_h * group, C)
    n0 = tile * C.BLOCK_N
    if n0 >= seq.len_k:
        return
    k = n0 + tl.arange(0, C.BLOCK_N)
    ok = k < seq.len_k
    if C.LISTED:
        seen = ok
    else:
        seen = mp.seen_keys(a.mask, seq, 0, seq.len_q, k, C)
    k_tile = tt.load_resident(a, Head(a.k, None, seq.row, kv_h, seq.k_start), k, seen, C.D, C.BLOCK_D, C)  # [N, D]
    v_tile = tt.load_resident(a, Head(a.v, None, seq.row, kv_h, seq.k_start), k, seen, C.DV, C.BLOCK_DV, C)  # [N, DV]
    keys = KeyTile(k_tile, v_tile, n0)

    if C.LISTED:
        dk, dv = listed_sums(a, g, b, kv_h, group, desc, keys, C)
        if not (C.CAREFUL or C.ALL_FULL):  # infinite perhaps because of a query that sees nothing
            tl.store(a.flags_ptr + tl.program_id(0), (tt.any_infinite(dk) | tt.any_infinite(dv)).to(tl.int32))
    else:
        n1 = tl.minimum(n0 + C.BLOCK_N, seq.len_k)
        lo, hi, full_lo, full_hi = mp.query_bounds(a.mask, seq, n0, n1, C)
        # a tile cut by the end of the keys is masked throughout: its rows beyond would otherwise count
        full_hi = tl.where(n0 + C.BLOCK_N <= seq.len_k, full_hi, full_lo)
        _, span = mp.spans(lo, hi, full_lo, full_hi, C.BLOCK_M)
        dk, dv = group_sums(a, g, b, kv_h, group, desc, keys, span, mp.MASKED, C)
        if a.bias is not None:
            # perhaps because of a query for which the bias hides all keys: once more, with care
            if tt.any_infinite(dk) | tt.any_infinite(dv):
                dk, dv = group_sums(a, g, b, kv_h, group, desc, keys, mp.whole_span(span), mp.CAREFUL, C)
    if g.dk is not None:
        dk_at = tt.base(Head(g.dk, None, seq.row, kv_h, seq.k_start))
        tt.store_rows(dk_at, g.dk, k, ok, dk * a.scale, C.D, C.BLOCK_D, C)
    if g.dv is not None:
        dv_at = tt.base(Head(g.dv, None, seq.row, kv_h, seq.k_start))
        tt.store_rows(dv_at, g.dv, k, ok, dv, C.DV, C.BLOCK_DV, C)


@triton.jit
def keys_step(a, seq, desc, tile, dq, n, mask, MODE: tl.constexpr, C: tl.constexpr):
    """One tile of keys against the resident queries: [M, N]. `mask` is as in `queries_step`."""
    ok = mask[0]
    k = n + tl.arange(0, C.BLOCK_N)
    q = tile.q
    bias_tile = None
    if a.bias is not None:
        bias_tile = tt.load_bias(a, seq, q[:, None], k[None, :])
    seen = None
    if C.LISTED and MODE == mp.MASKED:
        if desc[0] is None or C.FP16_SPLIT:
            seen = k < seq.len_k
    elif C.LISTED and MODE == mp.CAREFUL:
        seen = wk.seen(a, seq, q[:, None], k[None, :], mask, bias_tile, C)
    elif MODE != mp.FULL:
        seen = mp.seen_of_tile(a, seq, tile, k, ok, bias_tile, MODE, C)
    keys = Head(a.k, desc[0], seq.row, seq.kv_h, seq.k_start)
    values = Head(a.v, desc[1], seq.row, seq.kv_h, seq.k_start)
    k_tile = tt.load_stream(a, keys, n, seen, C.BLOCK_N, C.D, C.BLOCK_D, C)  # [N, D]
    v_tile = tt.load_stream(a, values, n, seen, C.BLOCK_N, C.DV, C.BLOCK_DV, C)  # [N, DV]
    products = tt.product(tile.q_tile, k_tile, C)  # [M, N] fp32
    if C.LISTED and MODE != mp.FULL:
        ok = wk.visible(a, seq, q[:, None], k[None, :], mask[1], mask[2], C)
    p_tile, slope = weights(a, seq, products, bias_tile, q[:, None], k[None, :], tile.lse2[:, None], ok, MODE, C)
    products = tt.product(tile.dout_tile, v_tile, C)  # [M, N]
    kept = kept_factors(a, seq, q[:, None], n, C)
    ds_tile = score_gradient(a, p_tile, products, slope, tile.delta[:, None], kept, False, MODE, C)
    return tt.dot(ds_tile, k_tile, dq, C)  # [M, D]


@triton.jit
def stream_keys(a, seq, desc, tile, dq, span, MODE: tl.constexpr, C: tl.constexpr):
    for i in range(mp.span_length(span, C.BLOCK_N)):
        n = mp.span_start(span, i, C.BLOCK_N)
        if MODE != mp.FULL and C.MASK.has_gaps:
            k = n + tl.arange(0, C.BLOCK_N)
            ok = mp.allowed(a.mask, seq, tile.q[:, None], k[None, :], C)  # [M, N]
            if mp.any_allowed(ok):
                dq = keys_step(a, seq, desc, tile, dq, n, (ok, None, None), MODE, C)
        else:
            dq = keys_step(a, seq, desc, tile, dq, n, (None, None, None), MODE, C)
    return dq


@triton.jit
def stream_listed_keys(a, seq, desc, tile, dq, listed, PARTIAL: tl.constexpr, MODE: tl.constexpr, C: tl.constexpr):
    """The tiles of one class that the list names."""
    word, following, r, i = wk.first_run(a, listed.row, PARTIAL)
    for _ in range(wk.tiles_of(a, listed.row, PARTIAL)):
        n = wk.tile_number((word, following, r, i)) * C.BLOCK_N
        live = word if PARTIAL else wk.ALL_LIVE
        dq = keys_step(a, seq, desc, tile, dq, n, (None, listed, live), MODE, C)
        word, following, r, i = wk.next_run(a, listed.row, (word, following, r, i), PARTIAL)
    return dq


@triton.jit
def queries_kernel(a, g, k_desc, v_desc, C: tl.constexpr):
    """dQ of one tile of queries."""
    if C.CAREFUL:
        if tl.load(a.flags_ptr + tl.program_id(0)) == 0:
            return
    desc = (k_desc, v_desc)
    if C.LISTED:
        tile, h, b = wk.listed_tile(a, tl.program_id(0), a.cu_q, a.len_q, a.heads, C.BLOCK_M, C)
    else:
        tile, h, b = tt.work_tile(a, tl.program_id(0), a.cu_q, a.len_q, a.heads, C.BLOCK_M, True, C)
    seq = tt.seq_info(a, b, h, C)
    m0 = tile * C.BLOCK_M
    if m0 >= seq.len_q:
        return
    q = m0 + tl.arange(0, C.BLOCK_M)
    row_ok = q < seq.len_q
    m1 = tl.minimum(m0 + C.BLOCK_M, seq.len_q)
    queries = Head(a.q, None, seq.row, h, seq.q_start)
    gradients = Head(g.dout, None, seq.row, h, seq.q_start)
    q_tile = tt.load_resident(a, queries, q, row_ok, C.D, C.BLOCK_D, C)  # [M, D]
    dout_tile = tt.load_resident(a, gradients, q, row_ok, C.DV, C.BLOCK_DV, C)  # [M, DV]
    lse2, delta = row_stats(a, g, seq, q, row_ok)
    resident = QueryTile(q_tile, q, m0, m1, dout_tile, lse2, delta)

    dq = tl.full([C.BLOCK_M, C.BLOCK_D], 0.0, tl.float32)
    # over the keys met so far: dq = Σ dS k
    if C.LISTED:
        row = wk.list_row(a, seq, seq.q_start, tile, C.BLOCK_M, C)
        WHOLE: tl.constexpr = mp.CAREFUL if C.CAREFUL and a.bias is not None else mp.FULL
        whole = Listed(row, (), None)
        if WHOLE == mp.CAREFUL:
            whole = wk.load_listed(a, seq, row, q, False, C)
        dq = stream_listed_keys(a, seq, desc, resident, dq, whole, False, WHOLE, C)
        if not C.ALL_FULL:
            listed = wk.load_listed(a, seq, row, q, False, C)
            dq = stream_listed_keys(a, seq, desc, resident, dq, listed, True, mp.CAREFUL if C.CAREFUL else mp.MASKED, C)
        if not (C.CAREFUL or C.ALL_FULL):  # infinite perhaps because of a key that nobody sees
            tl.store(a.flags_ptr + tl.program_id(0), tt.any_infinite(dq).to(tl.int32))
    else:
        lo, hi, full_lo, full_hi = mp.key_bounds(a.mask, seq, m0, m1, C)
        full, partial = mp.spans(lo, hi, full_lo, full_hi, C.BLOCK_N)
        dq = stream_keys(a, seq, desc, resident, dq, full, mp.FULL, C)
        dq = stream_keys(a, seq, desc, resident, dq, partial, mp.MASKED, C)
        if a.bias is not None:
            if tt.any_infinite(dq):  # perhaps because of a key that the bias hides: once more, with care
                dq = tl.full([C.BLOCK_M, C.BLOCK_D], 0.0, tl.float32)
                dq = stream_keys(a, seq, desc, resident, dq, mp.whole_span(partial), mp.CAREFUL, C)
    dq_at = tt.base(Head(g.dq, None, seq.row, h, seq.q_start))
    tt.store_rows(dq_at, g.dq, q, row_ok, dq * a.scale, C.D, C.BLOCK_D, C)
