"""The double backward recomputes S, S_t, dP and dP_t of a tile from the row's LSE and its derivative.

`queries_kernel` holds queries and gives dQ_t. `keys_kernel` holds keys, streams queries in transposed form, so that its tiles
feed the products as they are, and gives dK_t and dV_t, summed over the query heads of a group. `second_bias_kernel` holds a tile
of the bias and gives dBias_t. No atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tilewise.backends.gpu.program as mp
import tilewise.backends.gpu.tile as tt
import tilewise.backends.triton.derivatives as td
from tilewise.backends.gpu.structs import Head
from tilewise.backends.triton.bias import inside, own_rows, own_tile, size, sum_tiles


@triton.jit
def load_stats(a, t, seq, q, C: tl.constexpr):
    """lse (in the unit of `td.weights`; +inf for a row that sees nothing), lse_t, delta and delta_t of the queries q."""
    at = (seq.row.to(tl.int64) * a.heads + seq.h) * a.len_q + seq.q_start + q
    ok = q < seq.len_q
    lse = tl.load(a.lse_ptr + at, mask=ok, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    if C.FOLD:
        lse *= tt.LOG2E
    lse_t = tl.load(t.lse_ptr + at, mask=ok, other=0.0)
    return lse, lse_t, tl.load(t.delta_ptr + at, mask=ok, other=0.0), tl.load(t.delta_t_ptr + at, mask=ok, other=0.0)


@triton.jit
def moving_tile(a, t, seq, products, stats, q, k, n, MODE: tl.constexpr, C: tl.constexpr):
    """P_t after dropout, dS, dS_t, scale · Z_t and tanh of one tile, transposed or not: `stats`, q and k broadcast to it.

    `products` are S, S_t's, dP and, where V moves, dP_t before all else that belongs to them, and the bias.
    """
    s_tile, z_t_tile, dp_tile, dp_t_tile, bias_tile = products
    lse, lse_t, delta, delta_t = stats
    s_tile, s_t_tile, z_t_tile, tanh_tile = td.moving_scores(a, t, seq, (s_tile, z_t_tile), bias_tile, q, k, C)
    p_tile = td.weights(a, s_tile, lse, C)
    if MODE != mp.FULL:
        ok = td.visible(a, seq, q, k, bias_tile, C)
        p_tile = tl.where(ok, p_tile, 0.0)
        if a.bias is not None:  # a key that the bias hides may hold anything: no 0 · inf
            s_t_tile = tl.where(ok, s_t_tile, 0.0)
            z_t_tile = tl.where(ok, z_t_tile, 0.0)
            dp_tile = tl.where(ok, dp_tile, 0.0)
            dp_t_tile = tl.where(ok, dp_t_tile, 0.0)
            tanh_tile = tl.where(ok, tanh_tile, 0.0)
    p_t_tile = p_tile * (s_t_tile - lse_t)
    if C.DROPOUT:
        keep = tt.dropout_keep(a, seq, q, n, C) * a.keep_scale
        dp_tile *= keep
    gap_tile = dp_tile - delta
    ds_tile = p_tile * gap_tile
    inner_tile = -delta_t
    if t.v is not None:
        if C.DROPOUT:
            dp_t_tile *= keep
        inner_tile = dp_t_tile - delta_t
    ds_t_tile = p_t_tile * gap_tile + p_tile * inner_tile
    if C.DROPOUT:
        p_t_tile *= keep
    return p_t_tile, ds_tile, ds_t_tile, z_t_tile, tanh_tile


@triton.jit
def through_cap(a, ds_tile, ds_t_tile, z_t_tile, tanh_tile, C: tl.constexpr):
    """dZ and dZ_t before the scale."""
    if C.SOFTCAP:
        slope = 1.0 - tanh_tile * tanh_tile
        ds_t_tile = slope * (ds_t_tile - ds_tile * z_t_tile * tanh_tile * (2.0 / a.softcap))
        ds_tile *= slope
    return ds_tile, ds_t_tile


@triton.jit
def keys_tile(a, t, seq, rows, queries, keys, bias_tile, stats, n, MODE: tl.constexpr, C: tl.constexpr):
    """`moving_tile` of the queries `rows` and the keys from n on: [M, N]."""
    s_tile = tt.product(queries.q_tile, keys.k_tile, C)[0]  # [M, N] fp32
    z_t_tile = td.product2(
        queries.q_t_tile, keys.k_tile, queries.q_tile, keys.k_t_tile, t.q is not None, t.k is not None, C
    )
    dp_tile = tt.product(queries.dout_tile, keys.v_tile, C)[0]
    dp_t_tile = dp_tile
    if t.v is not None:
        dp_t_tile = tt.product(queries.dout_tile, keys.v_t_tile, C)[0]
    products = (s_tile, z_t_tile, dp_tile, dp_t_tile, bias_tile)
    columns = (stats[0][:, None], stats[1][:, None], stats[2][:, None], stats[3][:, None])
    k = (n + tl.arange(0, C.BLOCK_N))[None, :]
    return moving_tile(a, t, seq, products, columns, rows[:, None], k, n, MODE, C)


@triton.jit
def keys_step(a, t, desc, seq, rows, queries, stats, dq, n, MODE: tl.constexpr, C: tl.constexpr):
    """One tile of keys against the resident queries: [M, N]."""
    bias_tile = td.bias_of(a, seq, rows[0][:, None], (n + tl.arange(0, C.BLOCK_N))[None, :])
    seen = None
    if MODE != mp.FULL:
        seen = td.seen_by(a, seq, rows, n, bias_tile, C)
    keys = td.load_keys(a, t, desc, seq, n, seen, seen, C)
    _, ds_tile, ds_t_tile, z_t_tile, tanh_tile = keys_tile(
        a, t, seq, rows[0], queries, keys, bias_tile, stats, n, MODE, C
    )
    dz_tile, dz_t_tile = through_cap(a, ds_tile, ds_t_tile, z_t_tile, tanh_tile, C)
    dq = tt.dot(dz_t_tile, keys.k_tile, dq, C)  # [M, D]
    if t.k is not None:
        dq = tt.dot(dz_tile, keys.k_t_tile, dq, C)
    return dq


@triton.jit
def queries_kernel(a, t, k_desc, v_desc, k_t_desc, v_t_desc, C: tl.constexpr):
    """dQ_t of one tile of queries."""
    desc = (k_desc, v_desc, k_t_desc, v_t_desc)
    tile, h, b = tt.work_tile(a, tl.program_id(0), a.cu_q, a.len_q, a.heads, C.BLOCK_M, True, C)
    seq = tt.seq_info(a, b, h, C)
    m0 = tile * C.BLOCK_M
    if m0 >= seq.len_q:
        return
    m1 = tl.minimum(m0 + C.BLOCK_M, seq.len_q)
    q = m0 + tl.arange(0, C.BLOCK_M)
    rows = (q, m0, m1)
    row_ok = q < seq.len_q
    stats = load_stats(a, t, seq, q, C)
    queries = td.load_queries(a, t, (None, None, None), seq, m0, row_ok & (stats[0] < float("inf")), C)
    dq = tl.full([C.BLOCK_M, C.BLOCK_D], 0.0, tl.float32)
    full, partial = td.key_spans(a, seq, m0, m1, C)
    # over the keys met so far: dq = Σ (dZ_t k + dZ k_t)
    for n in range(full[0], full[1], C.BLOCK_N):
        dq = keys_step(a, t, desc, seq, rows, queries, stats, dq, n, mp.FULL, C)
    for i in range(mp.span_length(partial, C.BLOCK_N)):
        n = mp.span_start(partial, i, C.BLOCK_N)
        if td.worth(a, seq, q[:, None], (n + tl.arange(0, C.BLOCK_N))[None, :], C):
            dq = keys_step(a, t, desc, seq, rows, queries, stats, dq, n, mp.MASKED, C)
    tt.store_rows(tt.base(Head(t.dq, None, seq.row, h, seq.q_start)), t.dq, q, row_ok, dq * a.scale, C.D, C.BLOCK_D, C)


@triton.jit
def seeing_of(a, seq, q, n, bias_tile, C: tl.constexpr):
    """Which of the queries q see a key of the tile from n on; without gaps in the mask, none between its first and its last."""
    if C.MASK.has_gaps or a.bias is not None:
        k = (n + tl.arange(0, C.BLOCK_N))[:, None]
        return tl.max(td.visible(a, seq, q[None, :], k, bias_tile, C).to(tl.int32), 0) > 0
    else:
        lo, hi, _, _ = mp.query_bounds(a.mask, seq, n, tl.minimum(n + C.BLOCK_N, seq.len_k), C)
        return (q >= lo) & (q < hi)


@triton.jit
def queries_step(a, t, desc, seq, keys, sums, m, n, MODE: tl.constexpr, C: tl.constexpr):
    """One tile of queries against the resident keys from n on. Tiles are transposed: [N, M]. `sums` are dK_t and dV_t so far."""
    dk, dv = sums
    rows = m + tl.arange(0, C.BLOCK_M)
    q = rows[None, :]
    k = (n + tl.arange(0, C.BLOCK_N))[:, None]
    stats = load_stats(a, t, seq, rows, C)
    bias_tile = td.bias_of(a, seq, q, k)
    seeing = None
    if MODE != mp.FULL:  # a query that sees no key must not meet 0 · inf
        seeing = seeing_of(a, seq, rows, n, bias_tile, C)
    queries = td.load_queries(a, t, desc, seq, m, seeing, C)
    s_tile = tt.product(keys.k_tile, queries.q_tile, C)[0]  # [N, M] fp32
    z_t_tile = td.product2(
        keys.k_tile, queries.q_t_tile, keys.k_t_tile, queries.q_tile, t.q is not None, t.k is not None, C
    )
    dp_tile = tt.product(keys.v_tile, queries.dout_tile, C)[0]
    dp_t_tile = dp_tile
    if t.v is not None:
        dp_t_tile = tt.product(keys.v_t_tile, queries.dout_tile, C)[0]
    products = (s_tile, z_t_tile, dp_tile, dp_t_tile, bias_tile)
    lines = (stats[0][None, :], stats[1][None, :], stats[2][None, :], stats[3][None, :])
    p_t_tile, ds_tile, ds_t_tile, z_t_tile, tanh_tile = moving_tile(a, t, seq, products, lines, q, k, n, MODE, C)
    dz_tile, dz_t_tile = through_cap(a, ds_tile, ds_t_tile, z_t_tile, tanh_tile, C)
    dv = tt.dot(p_t_tile, queries.dout_tile, dv, C)  # [N, DV]
    dk = tt.dot(dz_t_tile, queries.q_tile, dk, C)  # [N, D]
    if t.q is not None:
        dk = tt.dot(dz_tile, queries.q_t_tile, dk, C)
    return dk, dv


@triton.jit
def keys_kernel(a, t, q_desc, q_t_desc, dout_desc, C: tl.constexpr):
    """dK_t and dV_t of one tile of keys: the sum over the query heads of the group."""
    desc = (q_desc, q_t_desc, dout_desc)
    tile, kv_h, b = tt.work_tile(a, tl.program_id(0), a.cu_k, a.len_k, a.kv_heads, C.BLOCK_N, False, C)
    group = a.heads // a.kv_heads
    seq = tt.seq_info(a, b, kv_h * group, C)
    n0 = tile * C.BLOCK_N
    if n0 >= seq.len_k:
        return
    k = n0 + tl.arange(0, C.BLOCK_N)
    ok = k < seq.len_k
    seen = mp.seen_keys(a.mask, seq, 0, seq.len_q, k, C)
    keys = td.load_keys(a, t, (None, None, None, None), seq, n0, seen, seen, C)
    dk = tl.full([C.BLOCK_N, C.BLOCK_D], 0.0, tl.float32)
    dv = tl.full([C.BLOCK_N, C.BLOCK_DV], 0.0, tl.float32)
    lo, hi, full_lo, full_hi = mp.query_bounds(a.mask, seq, n0, tl.minimum(n0 + C.BLOCK_N, seq.len_k), C)
    # a tile cut by the end of the keys is masked throughout: its rows beyond would otherwise count
    full_hi = tl.where(n0 + C.BLOCK_N <= seq.len_k, full_hi, full_lo)
    if a.bias is not None:
        full_hi = full_lo
    full, partial = mp.spans(lo, hi, full_lo, full_hi, C.BLOCK_M)
    # over query heads [0, i) and their queries met so far: dk = Σ (dZ_tᵀ q + dZᵀ q_t),  dv = Σ P_tᵀ dO
    for i in range(group):
        head = tt.seq_info(a, b, kv_h * group + i, C)
        for m in range(full[0], full[1], C.BLOCK_M):
            dk, dv = queries_step(a, t, desc, head, keys, (dk, dv), m, n0, mp.FULL, C)
        for j in range(mp.span_length(partial, C.BLOCK_M)):
            m = mp.span_start(partial, j, C.BLOCK_M)
            if td.worth(a, head, (m + tl.arange(0, C.BLOCK_M))[None, :], k[:, None], C):
                dk, dv = queries_step(a, t, desc, head, keys, (dk, dv), m, n0, mp.MASKED, C)
    tt.store_rows(tt.base(Head(t.dk, None, seq.row, kv_h, seq.k_start)), t.dk, k, ok, dk * a.scale, C.D, C.BLOCK_D, C)
    tt.store_rows(tt.base(Head(t.dv, None, seq.row, kv_h, seq.k_start)), t.dv, k, ok, dv, C.DV, C.BLOCK_DV, C)


@triton.jit
def bias_tile_of(a, t, seq, m0, n0, C: tl.constexpr):
    """dS_t of one tile, without the softcap's slope: the bias is added after it."""
    rows = m0 + tl.arange(0, C.BLOCK_M)
    bias_tile = td.bias_of(a, seq, rows[:, None], (n0 + tl.arange(0, C.BLOCK_N))[None, :])
    stats = load_stats(a, t, seq, rows, C)
    m1 = tl.minimum(m0 + C.BLOCK_M, seq.len_q)
    seen = td.seen_by(a, seq, (rows, m0, m1), n0, bias_tile, C)
    seeing = (rows < seq.len_q) & (stats[0] < float("inf"))
    queries = td.load_queries(a, t, (None, None, None), seq, m0, seeing, C)
    keys = td.load_keys(a, t, (None, None, None, None), seq, n0, seen, seen, C)
    return keys_tile(a, t, seq, rows, queries, keys, bias_tile, stats, n0, mp.MASKED, C)[2]


@triton.jit
def second_bias_kernel(a, t, C: tl.constexpr):
    """dBias_t of one tile of the bias."""
    own = own_tile(size(t.bias_shape[0]), size(t.bias_shape[1]), size(t.bias_shape[2]), size(t.bias_shape[3]), C)
    acc = sum_tiles(a, t, own, bias_tile_of, C)
    at = own_rows(tt.base(Head(t.dbias, None, own.b, own.h, own.n * 0)), own, t.dbias.stride_s, t.dbias.stride_d, C)
    tl.store(at, acc, mask=inside(own, C))
