"""The kernels of JVP and double backward: the formulas of docs/derivatives.md, tile by tile.

`jvp_kernel` is the forward with two more sums, Σ p s_t and Σ p (s_t v + v_t), rescaled with the others. The double backward
recomputes S, S_t, dP and dP_t of a tile from the row's LSE and its derivative: `queries_kernel` holds queries and gives dQ_t,
`keys_kernel` holds keys and gives dK_t and dV_t, summed over the query heads of a group. No atomics. Scores are in natural units.
A tangent that is None is zero, and its products are left out. Device functions cannot return None, so what is absent returns
something that is there, and whoever takes it asks the arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tilewise.backends.gpu.program as mp
import tilewise.backends.gpu.tile as tt
from tilewise.backends.gpu.merge import add_sink, normalized
from tilewise.backends.gpu.structs import Head
from tilewise.backends.triton.tangents import KeyTiles, QueryTiles


@triton.jit
def load_queries(a, t, seq, q, ok, C: tl.constexpr):
    """The tiles of the queries q, without what came back to them; 0 where not `ok`."""
    q_tile = tt.load_rows(Head(a.q, None, seq.row, seq.h, seq.q_start), q, ok, C.D, C.BLOCK_D)  # [M, D]
    q_t_tile = q_tile
    if t.q is not None:
        q_t_tile = tt.load_rows(Head(t.q, None, seq.row, seq.h, seq.q_start), q, ok, C.D, C.BLOCK_D)
    return QueryTiles(q_tile, q_t_tile, q_tile)


@triton.jit
def load_upstream(a, t, seq, q, ok, C: tl.constexpr):
    """The same with dO."""
    queries = load_queries(a, t, seq, q, ok, C)
    dout_tile = tt.load_rows(Head(t.dout, None, seq.row, seq.h, seq.q_start), q, ok, C.DV, C.BLOCK_DV)  # [M, DV]
    return QueryTiles(queries.q_tile, queries.q_t_tile, dout_tile)


@triton.jit
def load_keys(a, t, seq, k, ok, C: tl.constexpr):
    """The tiles of the keys k; 0 where not `ok`."""
    k_tile = tt.load_rows(Head(a.k, None, seq.row, seq.kv_h, seq.k_start), k, ok, C.D, C.BLOCK_D)  # [N, D]
    v_tile = tt.load_rows(Head(a.v, None, seq.row, seq.kv_h, seq.k_start), k, ok, C.DV, C.BLOCK_DV)  # [N, DV]
    k_t_tile = k_tile
    v_t_tile = v_tile
    if t.k is not None:
        k_t_tile = tt.load_rows(Head(t.k, None, seq.row, seq.kv_h, seq.k_start), k, ok, C.D, C.BLOCK_D)
    if t.v is not None:
        v_t_tile = tt.load_rows(Head(t.v, None, seq.row, seq.kv_h, seq.k_start), k, ok, C.DV, C.BLOCK_DV)
    return KeyTiles(k_tile, v_tile, k_t_tile, v_t_tile)


@triton.jit
def visible(a, seq, q, k, C: tl.constexpr):
    """The mask over the tile q × k [M, N], a bias of -inf included; and that bias."""
    ok = mp.allowed(a.mask, seq, q[:, None], k[None, :], C)
    bias_tile = ok
    if a.bias is not None:
        bias_tile = tt.load_bias(a, seq, q[:, None], k[None, :])
        ok &= bias_tile != float("-inf")
    return ok, bias_tile


@triton.jit
def moving_scores(a, t, seq, queries, keys, bias_tile, q, k, ok, C: tl.constexpr):
    """Scores, -inf where not `ok`, S_t and Z_t, and tanh of the softcap; all [M, N] fp32, natural units."""
    s_tile, _ = tt.product(queries.q_tile, keys.k_tile, C)
    s_tile *= a.scale
    tanh_tile = s_tile
    if C.SOFTCAP:
        tanh_tile = tt.tanh(s_tile / a.softcap)
        s_tile = tanh_tile * a.softcap
    if a.bias is not None:
        s_tile += bias_tile
    if a.alibi is not None:
        steepness = tl.load(a.alibi.ptr + seq.b.to(tl.int64) * a.alibi.stride_b + seq.h * a.alibi.stride_h)
        s_tile -= steepness * tl.abs(q[:, None] + (seq.len_k - seq.len_q) - k[None, :]).to(tl.float32)
    z_t_tile = tl.full([C.BLOCK_M, C.BLOCK_N], 0.0, tl.float32)
    if t.q is not None:
        by_q, _ = tt.product(queries.q_t_tile, keys.k_tile, C)
        z_t_tile += by_q * a.scale
    if t.k is not None:
        by_k, _ = tt.product(queries.q_tile, keys.k_t_tile, C)
        z_t_tile += by_k * a.scale
    s_t_tile = z_t_tile
    if C.SOFTCAP:
        s_t_tile = z_t_tile * (1.0 - tanh_tile * tanh_tile)
    if t.bias is not None:
        at = tt.base(Head(t.bias, None, seq.b, seq.h, seq.b * 0))
        at += q[:, None].to(tl.int64) * t.bias.stride_s + k[None, :] * t.bias.stride_d
        s_t_tile += tl.load(at, mask=ok, other=0.0).to(tl.float32)
    s_t_tile = tl.where(ok, s_t_tile, 0.0)
    return tl.where(ok, s_tile, float("-inf")), s_t_tile, z_t_tile, tanh_tile


@triton.jit
def jvp_step(a, t, seq, queries, q, state, n, C: tl.constexpr):
    """One tile of keys: the online softmax with its two derivatives."""
    acc, acc_t, l, l_t, m = state
    k = n + tl.arange(0, C.BLOCK_N)
    ok, bias_tile = visible(a, seq, q, k, C)
    # what no query of the tile sees must not meet 0 · inf
    keys = load_keys(a, t, seq, k, tl.max(ok.to(tl.int32), 0) > 0, C)
    s_tile, s_t_tile = moving_scores(a, t, seq, queries, keys, bias_tile, q, k, ok, C)[:2]
    new_m = tl.maximum(m, tl.max(s_tile, 1))
    shift = tl.where(new_m == float("-inf"), 0.0, new_m)
    p_tile = tl.exp2((s_tile - shift[:, None]) * tt.LOG2E)
    rescale = tl.exp2((m - shift) * tt.LOG2E)
    l = l * rescale + tl.sum(p_tile, 1)
    l_t = l_t * rescale + tl.sum(p_tile * s_t_tile, 1)
    if C.DROPOUT:
        p_tile *= tt.dropout_keep(a, seq, q[:, None], n, C)
    acc = tt.dot(p_tile, keys.v_tile, acc * rescale[:, None], C)  # [M, DV]
    acc_t = tt.dot(p_tile * s_t_tile, keys.v_tile, acc_t * rescale[:, None], C)
    if t.v is not None:
        acc_t = tt.dot(p_tile, keys.v_t_tile, acc_t, C)
    return acc, acc_t, l, l_t, new_m


@triton.jit
def jvp_kernel(a, t, C: tl.constexpr):
    """out, lse, out_t and lse_t of one tile of queries."""
    tile, h, b = tt.work_tile(a, tl.program_id(0), a.cu_q, a.len_q, a.heads, C.BLOCK_M, True, C)
    seq = tt.seq_info(a, b, h, C)
    m0 = tile * C.BLOCK_M
    if m0 >= seq.len_q:
        return
    q = m0 + tl.arange(0, C.BLOCK_M)
    row_ok = q < seq.len_q
    queries = load_queries(a, t, seq, q, row_ok, C)
    acc = tl.full([C.BLOCK_M, C.BLOCK_DV], 0.0, tl.float32)
    acc_t = tl.full([C.BLOCK_M, C.BLOCK_DV], 0.0, tl.float32)
    l = tl.full([C.BLOCK_M], 0.0, tl.float32)
    l_t = tl.full([C.BLOCK_M], 0.0, tl.float32)
    m = tl.full([C.BLOCK_M], float("-inf"), tl.float32)
    lo, hi, _, _ = mp.key_bounds(a.mask, seq, m0, tl.minimum(m0 + C.BLOCK_M, seq.len_q), C)
    # over the keys met so far, with p = exp(s - m):
    # m = max s,  l = Σ p,  acc = Σ p v,  l_t = Σ p s_t,  acc_t = Σ p (s_t v + v_t)
    for n in range(lo // C.BLOCK_N * C.BLOCK_N, hi, C.BLOCK_N):
        acc, acc_t, l, l_t, m = jvp_step(a, t, seq, queries, q, (acc, acc_t, l, l_t, m), n, C)
    keys_m = m
    sink = None
    if a.sinks_ptr is not None:
        sink = tl.load(a.sinks_ptr + h).to(tl.float32)
        acc, l, m = add_sink(acc, l, m, sink)
    out_tile, lse = normalized(acc, l, m)
    # the sums over exp(s - keys_m) become sums over P
    weight = tl.where(tl.abs(lse) == float("inf"), 0.0, tl.exp2((keys_m - lse) * tt.LOG2E))
    lse_t = l_t * weight
    if t.sinks_ptr is not None:
        sink_weight = tl.where(tl.abs(sink) == float("inf"), 0.0, tl.exp2((sink - lse) * tt.LOG2E))
        lse_t += sink_weight * tl.load(t.sinks_ptr + h).to(tl.float32)
    out_t_tile = acc_t * weight[:, None]
    if C.DROPOUT:
        out_tile *= a.keep_scale
        out_t_tile *= a.keep_scale
    out_t_tile -= lse_t[:, None] * out_tile
    tt.store_rows(tt.base(Head(a.out, None, seq.row, h, seq.q_start)), a.out, q, row_ok, out_tile, C.DV, C.BLOCK_DV, C)
    tt.store_rows(tt.base(Head(t.out, None, seq.row, h, seq.q_start)), t.out, q, row_ok, out_t_tile, C.DV, C.BLOCK_DV, C)
    at = (seq.row.to(tl.int64) * a.heads + h) * a.len_q + seq.q_start + q
    tl.store(a.lse_ptr + at, lse, mask=row_ok)
    tl.store(t.lse_ptr + at, lse_t, mask=row_ok)


@triton.jit
def load_stats(a, t, seq, q, ok):
    """lse (+inf for a row that sees nothing), lse_t, delta and delta_t of the queries q."""
    at = (seq.row.to(tl.int64) * a.heads + seq.h) * a.len_q + seq.q_start + q
    lse = tl.load(a.lse_ptr + at, mask=ok, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    lse_t = tl.load(t.lse_ptr + at, mask=ok, other=0.0)
    return lse, lse_t, tl.load(t.delta_ptr + at, mask=ok, other=0.0), tl.load(t.delta_t_ptr + at, mask=ok, other=0.0)


@triton.jit
def moving_tile(a, t, seq, queries, keys, stats, masking, q, k, C: tl.constexpr):
    """P_t after dropout, dZ and dZ_t before the scale, of one tile [M, N] fp32."""
    lse, lse_t, delta, delta_t = stats
    ok, bias_tile = masking
    s_tile, s_t_tile, z_t_tile, tanh_tile = moving_scores(a, t, seq, queries, keys, bias_tile, q, k, ok, C)
    p_tile = tl.where(ok, tl.exp2((s_tile - lse[:, None]) * tt.LOG2E), 0.0)
    p_t_tile = p_tile * (s_t_tile - lse_t[:, None])
    dp_tile, _ = tt.product(queries.dout_tile, keys.v_tile, C)
    if C.DROPOUT:
        keep = tt.dropout_keep(a, seq, q[:, None], tl.min(k, 0), C) * a.keep_scale
        dp_tile *= keep
    gap_tile = dp_tile - delta[:, None]
    ds_tile = p_tile * gap_tile
    inner_tile = -delta_t[:, None]
    if t.v is not None:
        dp_t_tile, _ = tt.product(queries.dout_tile, keys.v_t_tile, C)
        if C.DROPOUT:
            dp_t_tile *= keep
        inner_tile = dp_t_tile - delta_t[:, None]
    ds_t_tile = p_t_tile * gap_tile + p_tile * inner_tile
    if C.SOFTCAP:
        slope = 1.0 - tanh_tile * tanh_tile
        ds_t_tile = slope * (ds_t_tile - ds_tile * z_t_tile * tanh_tile * (2.0 / a.softcap))
        ds_tile *= slope
    if C.DROPOUT:
        p_t_tile *= keep
    return p_t_tile, ds_tile, ds_t_tile


@triton.jit
def queries_kernel(a, t, C: tl.constexpr):
    """dQ_t of one tile of queries."""
    tile, h, b = tt.work_tile(a, tl.program_id(0), a.cu_q, a.len_q, a.heads, C.BLOCK_M, True, C)
    seq = tt.seq_info(a, b, h, C)
    m0 = tile * C.BLOCK_M
    if m0 >= seq.len_q:
        return
    q = m0 + tl.arange(0, C.BLOCK_M)
    row_ok = q < seq.len_q
    stats = load_stats(a, t, seq, q, row_ok)
    queries = load_upstream(a, t, seq, q, row_ok & (stats[0] < float("inf")), C)
    dq = tl.full([C.BLOCK_M, C.BLOCK_D], 0.0, tl.float32)
    lo, hi, _, _ = mp.key_bounds(a.mask, seq, m0, tl.minimum(m0 + C.BLOCK_M, seq.len_q), C)
    # over the keys met so far: dq = Σ (dZ_t k + dZ k_t)
    for n in range(lo // C.BLOCK_N * C.BLOCK_N, hi, C.BLOCK_N):
        k = n + tl.arange(0, C.BLOCK_N)
        masking = visible(a, seq, q, k, C)
        keys = load_keys(a, t, seq, k, tl.max(masking[0].to(tl.int32), 0) > 0, C)
        dz_tile, dz_t_tile = moving_tile(a, t, seq, queries, keys, stats, masking, q, k, C)[1:]
        dq = tt.dot(dz_t_tile, keys.k_tile, dq, C)  # [M, D]
        if t.k is not None:
            dq = tt.dot(dz_tile, keys.k_t_tile, dq, C)
    tt.store_rows(tt.base(Head(t.dq, None, seq.row, h, seq.q_start)), t.dq, q, row_ok, dq * a.scale, C.D, C.BLOCK_D, C)


@triton.jit
def keys_step(a, t, seq, keys, sums, m, k, C: tl.constexpr):
    """One tile of queries against the resident keys."""
    dk, dv = sums
    q = m + tl.arange(0, C.BLOCK_M)
    row_ok = q < seq.len_q
    stats = load_stats(a, t, seq, q, row_ok)
    masking = visible(a, seq, q, k, C)
    # a query that sees no key must not meet 0 · inf
    queries = load_upstream(a, t, seq, q, (tl.max(masking[0].to(tl.int32), 1) > 0) & row_ok, C)
    p_t_tile, dz_tile, dz_t_tile = moving_tile(a, t, seq, queries, keys, stats, masking, q, k, C)
    dv = tt.dot(tl.trans(p_t_tile), queries.dout_tile, dv, C)  # [N, DV]
    dk = tt.dot(tl.trans(dz_t_tile), queries.q_tile, dk, C)  # [N, D]
    if t.q is not None:
        dk = tt.dot(tl.trans(dz_tile), queries.q_t_tile, dk, C)
    return dk, dv


@triton.jit
def keys_kernel(a, t, C: tl.constexpr):
    """dK_t and dV_t of one tile of keys: the sum over the query heads of the group."""
    tile, kv_h, b = tt.work_tile(a, tl.program_id(0), a.cu_k, a.len_k, a.kv_heads, C.BLOCK_N, False, C)
    group = a.heads // a.kv_heads
    seq = tt.seq_info(a, b, kv_h * group, C)
    n0 = tile * C.BLOCK_N
    if n0 >= seq.len_k:
        return
    k = n0 + tl.arange(0, C.BLOCK_N)
    ok = k < seq.len_k
    keys = load_keys(a, t, seq, k, mp.seen_keys(a.mask, seq, 0, seq.len_q, k, C), C)
    dk = tl.full([C.BLOCK_N, C.BLOCK_D], 0.0, tl.float32)
    dv = tl.full([C.BLOCK_N, C.BLOCK_DV], 0.0, tl.float32)
    lo, hi, _, _ = mp.query_bounds(a.mask, seq, n0, tl.minimum(n0 + C.BLOCK_N, seq.len_k), C)
    # over query heads [0, i) and their queries met so far: dk = Σ (dZ_tᵀ q + dZᵀ q_t),  dv = Σ P_tᵀ dO
    for i in range(group):
        head = tt.seq_info(a, b, kv_h * group + i, C)
        for m in range(lo // C.BLOCK_M * C.BLOCK_M, hi, C.BLOCK_M):
            dk, dv = keys_step(a, t, head, keys, (dk, dv), m, k, C)
    tt.store_rows(tt.base(Head(t.dk, None, seq.row, kv_h, seq.k_start)), t.dk, k, ok, dk * a.scale, C.D, C.BLOCK_D, C)
    tt.store_rows(tt.base(Head(t.dv, None, seq.row, kv_h, seq.k_start)), t.dv, k, ok, dv, C.DV, C.BLOCK_DV, C)
