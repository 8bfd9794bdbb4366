"""The backward kernels. Weights are recomputed from the scores and each row's LSE; nothing of size M × N is stored.

    P = exp2(x - lse2)     dV = Pᵀ dO     dP = dO Vᵀ     dS = P ∘ (dP - delta)     dQ = scale · dS K     dK = scale · dSᵀ Q

`prepare_kernel` writes delta = rowsum(dO ∘ O) - dLSE and the LSE in the unit of the scores. `keys_kernel` holds a tile of keys
and streams the queries that see it (of every head of the group) in transposed form, so that Pᵀ and dSᵀ feed the products as they
are. `queries_kernel` holds a tile of queries and streams keys. No atomics: the results are the same bits in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gpu.program import (
    allowed,
    has_gaps,
    key_bounds,
    query_bounds,
    seeing_of_tile,
    seen_keys,
    seen_of_tile,
    span_length,
    span_start,
    spans,
    whole_span,
)
from tilewise.backends.gpu.structs import Descriptors
from tilewise.backends.gpu.tile import (
    LOG2E,
    any_infinite,
    base,
    dot,
    exponential,
    find_sequence,
    kept,
    load_bias,
    load_resident,
    load_rows,
    load_stream,
    per_row,
    place,
    product,
    scores,
    sequence_of,
    store_rows,
    tile_count,
)


@triton.jit
def prepare_kernel(a, g, C: tl.constexpr):
    """delta and lse2 of BLOCK_M rows of one head; packed batches are one long row."""
    pid = tl.program_id(0)
    tiles = tl.cdiv(a.len_q, C.BLOCK_M)
    rows = pid % tiles * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    h = pid // tiles % a.heads
    row = pid // tiles // a.heads
    ok = rows < a.len_q
    nothing = pid * 0
    out_tile = load_rows(
        base(a.out, row, h, nothing), a.out.stride_s, a.out.stride_d, rows, ok, C.DV, C.BLOCK_DV
    )  # [M, DV]
    dout_at = base(g.dout, row, h, nothing)
    dout_tile = load_rows(dout_at, g.dout.stride_s, g.dout.stride_d, rows, ok, C.DV, C.BLOCK_DV)
    at = (row.to(tl.int64) * a.heads + h) * a.len_q + rows
    lse = tl.load(a.lse_ptr + at, mask=ok, other=0.0)
    # an empty row has no weights: what flows in there, infinite or not, is not its business
    product_tile = tl.where(out_tile == 0.0, 0.0, out_tile.to(tl.float32) * dout_tile.to(tl.float32))
    empty = lse == float("-inf")
    delta = tl.where(empty, 0.0, tl.sum(product_tile, 1))
    if g.dlse_ptr is not None:
        delta -= tl.where(empty, 0.0, tl.load(g.dlse_ptr + at, mask=ok, other=0.0))
    if a.bias is None:
        lse *= LOG2E  # the unit of `scores`
    tl.store(g.delta_ptr + at, delta, mask=ok)
    tl.store(g.lse2_ptr + at, tl.where(empty, float("inf"), lse), mask=ok)


@triton.jit
def weights(a, seq, s_tile, factors, bias_tile, q, k, lse, ok, MASKED: tl.constexpr, C: tl.constexpr):
    """Softmax weights of a tile from its products and their rows' factors, and the softcap's slope; `q`, `k`, `lse` broadcast.

    The mask is `ok` where that was evaluated already; evaluated here, not before the products, it costs fewer registers.
    """
    slope = 1.0
    if C.FOLD:
        p_tile = tl.exp2(s_tile * per_row(factors * (a.scale * LOG2E), C) - lse)
    else:
        x_tile, slope = scores(a, seq, s_tile * per_row(factors, C), bias_tile, q, k, C)
        p_tile = exponential(x_tile - lse, bias_tile)
    if MASKED:
        if ok is not None:
            p_tile = tl.where(ok, p_tile, 0.0)
        else:
            p_tile = tl.where(allowed(a.mask, seq, q, k, C), p_tile, 0.0)
    return p_tile, slope


@triton.jit
def score_gradient(a, seq, p_tile, dp_tile, factors, slope, delta, q, n, C: tl.constexpr):
    """dS before the scale. Keys that nobody sees hold zeros, but rows that see nothing hold what they like: not 0 · inf."""
    dp_tile *= per_row(factors, C)
    if C.DROPOUT:
        dp_tile *= kept(a, seq, q, n, C) * a.keep_scale
    ds_tile = p_tile * (dp_tile - delta)
    if C.SOFTCAP:
        ds_tile *= slope
    if C.BLIND:
        ds_tile = tl.where(p_tile == 0.0, 0.0, ds_tile)
    return ds_tile


@triton.jit
def keys_step(
    a, g, seq, desc, k_tile, v_tile, dk, dv, m, n, ok, MASKED: tl.constexpr, CAREFUL: tl.constexpr, C: tl.constexpr
):
    """One tile of queries against the resident keys. Tiles are transposed: [N, M].

    CAREFUL: queries that only a bias keeps from seeing anything are left out too.
    """
    rows = tl.arange(0, C.BLOCK_M)
    q = m + rows
    k = n + tl.arange(0, C.BLOCK_N)
    stats = (seq.row.to(tl.int64) * a.heads + seq.h) * a.len_q + seq.q_start + m
    if MASKED:
        # beyond the last query lies another sequence, whose numbers must not come near
        there = q < seq.len_q
        lse2 = tl.load(g.lse2_ptr + stats + rows, mask=there, other=float("inf"))
        delta = tl.load(g.delta_ptr + stats + rows, mask=there, other=0.0)
    else:
        lse2 = tl.load(g.lse2_ptr + stats + rows)
        delta = tl.load(g.delta_ptr + stats + rows)
    bias_tile = None
    if a.bias is not None:
        bias_tile = load_bias(a, seq, q[None, :], k[:, None])
    exist = None
    if MASKED and C.BLIND and (a.bias is None or CAREFUL):  # a query that sees no key must not meet 0 · inf
        exist = seeing_of_tile(a, seq, q, k, lse2, ok, bias_tile, C)
    elif MASKED and (desc.k is None or C.TERMS == 2):
        exist = there
    q_tile = load_stream(a, a.q, desc.k, seq.row, seq.h, seq.q_start, m, exist, C.BLOCK_M, C.D, C.BLOCK_D, C)  # [M, D]
    dout_tile = load_stream(
        a, g.dout, desc.v, seq.row, seq.h, seq.q_start, m, exist, C.BLOCK_M, C.DV, C.BLOCK_DV, C
    )  # [M, DV]
    s_tile, factors = product(k_tile, q_tile, C)  # [N, M] fp32
    p_tile, slope = weights(
        a, seq, s_tile, factors, bias_tile, q[None, :], k[:, None], lse2[None, :], ok, MASKED, C
    )
    if g.dv is not None:
        met_v = p_tile
        if C.DROPOUT:
            met_v = p_tile * kept(a, seq, q[None, :], n, C) * a.keep_scale
        dv = dot(met_v, dout_tile, dv, C)  # [N, DV]
    if g.dk is not None:
        dp_tile, factors = product(v_tile, dout_tile, C)  # [N, M]
        ds_tile = score_gradient(a, seq, p_tile, dp_tile, factors, slope, delta[None, :], q[None, :], n, C)
        dk = dot(ds_tile, q_tile, dk, C)  # [N, D]
    return dk, dv


@triton.jit
def stream_queries(a, g, seq, desc, k_tile, v_tile, dk, dv, n, span, CAREFUL: tl.constexpr, C: tl.constexpr):
    """First the tiles that need no mask, then those on both sides of them; one that may be EMPTY is looked at before."""
    if not CAREFUL:
        for m in range(span[1], span[2], C.BLOCK_M):
            dk, dv = keys_step(a, g, seq, desc, k_tile, v_tile, dk, dv, m, n, None, False, False, C)
    for i in range(span_length(span, C.BLOCK_M)):
        m = span_start(span, i, C.BLOCK_M)
        if has_gaps(C.STRUCTURE):
            q = m + tl.arange(0, C.BLOCK_M)
            k = n + tl.arange(0, C.BLOCK_N)
            ok = allowed(a.mask, seq, q[None, :], k[:, None], C)  # [N, M]
            if tl.max(tl.max(ok.to(tl.int32), 1), 0) > 0:
                dk, dv = keys_step(a, g, seq, desc, k_tile, v_tile, dk, dv, m, n, ok, True, CAREFUL, C)
        else:
            dk, dv = keys_step(a, g, seq, desc, k_tile, v_tile, dk, dv, m, n, None, True, CAREFUL, C)
    return dk, dv


@triton.jit
def keys_kernel(a, g, q_desc, dout_desc, C: tl.constexpr):
    """dK and dV of one tile of keys. First keys go first: under a causal mask most queries see them."""
    desc = Descriptors(q_desc, dout_desc)
    pid = tl.program_id(0)
    tiles = tile_count(a, a.len_k, C.BLOCK_N, C)
    tile, kv_h, b = place(a, pid, tiles, a.kv_heads, C)
    if C.VARLEN:
        b, tile = find_sequence(a.cu_k, a.batch, tile, C.BLOCK_N)
    group = a.heads // a.kv_heads
    seq = sequence_of(a, b, kv_h * group, C)
    n0 = tile * C.BLOCK_N
    if n0 >= seq.len_k:
        return
    k = n0 + tl.arange(0, C.BLOCK_N)
    ok = k < seq.len_k
    seen = seen_keys(a.mask, seq, 0, seq.len_q, k, C)
    k_tile = load_resident(a, a.k, seq.row, kv_h, seq.k_start, k, seen, C.D, C.BLOCK_D, C)  # [N, D]
    v_tile = load_resident(a, a.v, seq.row, kv_h, seq.k_start, k, seen, C.DV, C.BLOCK_DV, C)  # [N, DV]

    n1 = tl.minimum(n0 + C.BLOCK_N, seq.len_k)
    lo, hi, full_lo, full_hi = query_bounds(a.mask, seq, n0, n1, C)
    # a tile cut by the end of the keys is masked throughout: its rows beyond would otherwise count
    full_hi = tl.where(n0 + C.BLOCK_N <= seq.len_k, full_hi, full_lo)
    _, span = spans(lo, hi, full_lo, full_hi, C.BLOCK_M)

    dk = tl.full([C.BLOCK_N, C.BLOCK_D], 0.0, tl.float32)
    dv = tl.full([C.BLOCK_N, C.BLOCK_DV], 0.0, tl.float32)
    # over query heads [0, i): dk, dv = what their queries [lo, hi) contribute
    for i in range(group):
        seq = sequence_of(a, b, kv_h * group + i, C)
        dk, dv = stream_queries(a, g, seq, desc, k_tile, v_tile, dk, dv, n0, span, False, C)
    if a.bias is not None:
        if any_infinite(dk) | any_infinite(dv):  # perhaps because of a query that the bias blinds: once more, with care
            dk = tl.full([C.BLOCK_N, C.BLOCK_D], 0.0, tl.float32)
            dv = tl.full([C.BLOCK_N, C.BLOCK_DV], 0.0, tl.float32)
            for i in range(group):
                seq = sequence_of(a, b, kv_h * group + i, C)
                dk, dv = stream_queries(a, g, seq, desc, k_tile, v_tile, dk, dv, n0, whole_span(span), True, C)
    if g.dk is not None:
        dk_at = base(g.dk, seq.row, kv_h, seq.k_start)
        store_rows(dk_at, g.dk.stride_s, g.dk.stride_d, k, ok, dk * a.scale, C.D, C.BLOCK_D, C)
    if g.dv is not None:
        dv_at = base(g.dv, seq.row, kv_h, seq.k_start)
        store_rows(dv_at, g.dv.stride_s, g.dv.stride_d, k, ok, dv, C.DV, C.BLOCK_DV, C)


@triton.jit
def queries_step(
    a,
    seq,
    desc,
    q_tile,
    dout_tile,
    dq,
    q,
    lse2,
    delta,
    n,
    rows,
    ok,
    MASKED: tl.constexpr,
    CAREFUL: tl.constexpr,
    C: tl.constexpr,
):
    """One tile of keys against the resident queries: [M, N]. CAREFUL: keys that only a bias hides are left out too."""
    k = n + tl.arange(0, C.BLOCK_N)
    bias_tile = None
    if a.bias is not None:
        bias_tile = load_bias(a, seq, q[:, None], k[None, :])
    seen = None
    if MASKED:
        seen = seen_of_tile(a, seq, q, k, rows, ok, bias_tile, CAREFUL, C)
    k_tile = load_stream(
        a, a.k, desc.k, seq.row, seq.kv_h, seq.k_start, n, seen, C.BLOCK_N, C.D, C.BLOCK_D, C
    )  # [N, D]
    v_tile = load_stream(
        a, a.v, desc.v, seq.row, seq.kv_h, seq.k_start, n, seen, C.BLOCK_N, C.DV, C.BLOCK_DV, C
    )  # [N, DV]
    s_tile, factors = product(q_tile, k_tile, C)  # [M, N] fp32
    p_tile, slope = weights(
        a, seq, s_tile, factors, bias_tile, q[:, None], k[None, :], lse2[:, None], ok, MASKED, C
    )
    dp_tile, factors = product(dout_tile, v_tile, C)  # [M, N]
    ds_tile = score_gradient(a, seq, p_tile, dp_tile, factors, slope, delta[:, None], q[:, None], n, C)
    return dot(ds_tile, k_tile, dq, C)  # [M, D]


@triton.jit
def stream_keys(
    a,
    seq,
    desc,
    q_tile,
    dout_tile,
    dq,
    q,
    lse2,
    delta,
    span,
    rows,
    MASKED: tl.constexpr,
    CAREFUL: tl.constexpr,
    C: tl.constexpr,
):
    for i in range(span_length(span, C.BLOCK_N)):
        n = span_start(span, i, C.BLOCK_N)
        if MASKED and has_gaps(C.STRUCTURE):
            k = n + tl.arange(0, C.BLOCK_N)
            ok = allowed(a.mask, seq, q[:, None], k[None, :], C)  # [M, N]
            if tl.max(tl.max(ok.to(tl.int32), 1), 0) > 0:
                dq = queries_step(a, seq, desc, q_tile, dout_tile, dq, q, lse2, delta, n, rows, ok, True, CAREFUL, C)
        else:
            dq = queries_step(a, seq, desc, q_tile, dout_tile, dq, q, lse2, delta, n, rows, None, MASKED, CAREFUL, C)
    return dq


@triton.jit
def queries_kernel(a, g, k_desc, v_desc, C: tl.constexpr):
    """dQ of one tile of queries."""
    desc = Descriptors(k_desc, v_desc)
    pid = tl.program_id(0)
    tiles = tile_count(a, a.len_q, C.BLOCK_M, C)
    tile, h, b = place(a, pid, tiles, a.heads, C)
    tile = tiles - 1 - tile
    if C.VARLEN:
        b, tile = find_sequence(a.cu_q, a.batch, tile, C.BLOCK_M)
    seq = sequence_of(a, b, h, C)
    m0 = tile * C.BLOCK_M
    if m0 >= seq.len_q:
        return
    q = m0 + tl.arange(0, C.BLOCK_M)
    row_ok = q < seq.len_q
    m1 = tl.minimum(m0 + C.BLOCK_M, seq.len_q)
    q_tile = load_resident(a, a.q, seq.row, h, seq.q_start, q, row_ok, C.D, C.BLOCK_D, C)  # [M, D]
    dout_tile = load_resident(a, g.dout, seq.row, h, seq.q_start, q, row_ok, C.DV, C.BLOCK_DV, C)  # [M, DV]
    stats = (seq.row.to(tl.int64) * a.heads + h) * a.len_q + seq.q_start + q
    lse2 = tl.load(g.lse2_ptr + stats, mask=row_ok, other=float("inf"))
    delta = tl.load(g.delta_ptr + stats, mask=row_ok, other=0.0)

    lo, hi, full_lo, full_hi = key_bounds(a.mask, seq, m0, m1, C)
    full, partial = spans(lo, hi, full_lo, full_hi, C.BLOCK_N)
    dq = tl.full([C.BLOCK_M, C.BLOCK_D], 0.0, tl.float32)
    # over the keys met so far: dq = Σ dS k
    dq = stream_keys(a, seq, desc, q_tile, dout_tile, dq, q, lse2, delta, full, (m0, m1), False, False, C)
    dq = stream_keys(a, seq, desc, q_tile, dout_tile, dq, q, lse2, delta, partial, (m0, m1), True, False, C)
    if a.bias is not None:
        if any_infinite(dq):  # perhaps because of a key that the bias hides: once more, with care
            dq = tl.full([C.BLOCK_M, C.BLOCK_D], 0.0, tl.float32)
            all_keys = whole_span(partial)
            dq = stream_keys(a, seq, desc, q_tile, dout_tile, dq, q, lse2, delta, all_keys, (m0, m1), True, True, C)
    dq_at = base(g.dq, seq.row, h, seq.q_start)
    store_rows(dq_at, g.dq.stride_s, g.dq.stride_d, q, row_ok, dq * a.scale, C.D, C.BLOCK_D, C)
