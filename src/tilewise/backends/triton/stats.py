"""What rows see: the forward with the entropy's sum beside, sweeps for what keys received and for the largest weights, and the
gradient of the entropy.

    over the keys met so far, with p = exp2(x - m):   l = Σ p,   spread = Σ p (x - m),   so that the entropy is log l - spread / l

A new m shifts every term: spread = rescale · (spread + (m_old - m_new) · l). Units of x are those of `tile.scores`.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tilewise.backends.gpu.program as mp
import tilewise.backends.gpu.tile as tt
import tilewise.backends.triton.derivatives as td
from tilewise.backends.gpu.structs import Head
from tilewise.backends.triton.bias import inside, own_rows, own_tile, size, sum_tiles
from tilewise.backends.triton.forward import finish

FLOOR = tl.constexpr(-300.0)
"""Below it a weight is 0, and what it is multiplied by must be finite."""
NOBODY = tl.constexpr(-(1 << 63))
"""No key, in the order of `ranked`."""
LAST = tl.constexpr((1 << 31) - 1)
"""A key and what is left to it are each other's complement: k ^ LAST falls as k grows."""


@triton.jit
def statistics_step(a, w, seq, desc, rows, q_tile, state, n, MODE: tl.constexpr, C: tl.constexpr):
    """One tile of keys, as in the forward. `rows`: the queries, the first one, the last one + 1."""
    acc, l, m, spread = state
    q = rows[0][:, None]
    k = (n + tl.arange(0, C.BLOCK_N))[None, :]
    exist = None
    seen = None
    bias_tile = None
    if a.bias is not None:
        bias_tile = tt.load_bias(a, seq, q, k)
    if MODE != mp.FULL:
        exist = n + tl.arange(0, C.BLOCK_N) < seq.len_k
        seen = td.seen_by(a, seq, rows, n, bias_tile, C)  # a value no query of this tile may see must not meet 0 · inf
    keys = Head(a.k, desc[0], seq.row, seq.kv_h, seq.k_start)
    k_tile = tt.load_stream(a, keys, n, exist, C.BLOCK_N, C.D, C.BLOCK_D, C)  # [N, D]
    s_tile, factors = tt.product(q_tile, k_tile, C)  # [M, N] fp32
    if C.FOLD:
        unit = factors * (a.scale * tt.LOG2E)
        unit_tile = tt.per_row(unit, C)
    else:
        s_tile, _ = tt.scores(a, seq, s_tile * tt.per_row(factors, C), bias_tile, q, k, C)
        unit = 1.0
        unit_tile = 1.0
    if MODE != mp.FULL:
        s_tile = tl.where(mp.allowed(a.mask, seq, q, k, C), s_tile, float("-inf"))
    new_m = tl.maximum(m, tl.max(s_tile, 1) * unit)
    shift = new_m
    if MODE != mp.FULL or not C.FOLD:
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)  # a row that has seen nothing yet
    gap_tile = s_tile * unit_tile - shift[:, None]
    p_tile = tt.exponential(gap_tile, bias_tile)
    rescale = tt.exponential(m - shift, bias_tile)
    if w.entropy_ptr is not None:
        moved = tl.where(l == 0.0, 0.0, m - shift)
        spread = (spread + moved * l) * rescale + tl.sum(p_tile * tl.maximum(gap_tile, FLOOR), 1)
    l = l * rescale + tl.sum(p_tile, 1)
    if C.DROPOUT:
        p_tile *= tt.dropout_keep(a, seq, q, n, C)
    values = Head(a.v, desc[1], seq.row, seq.kv_h, seq.k_start)
    v_tile = tt.load_stream(a, values, n, seen, C.BLOCK_N, C.DV, C.BLOCK_DV, C)  # [N, DV]
    acc = tt.dot(p_tile, v_tile, acc * rescale[:, None], C)  # [M, DV]
    return acc, l, new_m, spread


@triton.jit
def store_statistics(a, w, at, ok, l, m, spread):
    """The statistics of the rows at their places, from the state over all keys, before the sink joins."""
    whole = tl.where(l == 0.0, 1.0, l)
    to_natural: tl.constexpr = tt.LN2 if a.bias is None else 1.0
    if w.max_logit_ptr is not None:
        tl.store(w.max_logit_ptr + at, m * to_natural, mask=ok)
    if w.entropy_ptr is not None:
        log_l = tl.log2(whole) * tt.LN2
        entropy = tl.maximum(log_l - spread / whole * to_natural, 0.0)
        tl.store(w.entropy_ptr + at, tl.where(l == 0.0, 0.0, entropy), mask=ok)
        tl.store(w.key_lse_ptr + at, tl.where(l == 0.0, float("-inf"), m * to_natural + log_l), mask=ok)


@triton.jit
def statistics_kernel(a, w, k_desc, v_desc, C: tl.constexpr):
    """out, lse and the statistics of one tile of queries."""
    desc = (k_desc, v_desc)
    tile, h, b = tt.work_tile(a, tl.program_id(0), a.cu_q, a.len_q, a.heads, C.BLOCK_M, True, C)
    seq = tt.seq_info(a, b, h, C)
    m0 = tile * C.BLOCK_M
    if m0 >= seq.len_q:
        return
    m1 = tl.minimum(m0 + C.BLOCK_M, seq.len_q)
    q = m0 + tl.arange(0, C.BLOCK_M)
    row_ok = q < seq.len_q
    rows = (q, m0, m1)
    q_tile = tt.load_resident(a, Head(a.q, None, seq.row, h, seq.q_start), q, row_ok, C.D, C.BLOCK_D, C)  # [M, D]
    acc = tl.full([C.BLOCK_M, C.BLOCK_DV], 0.0, tl.float32)
    l = tl.full([C.BLOCK_M], 0.0, tl.float32)
    m = tl.full([C.BLOCK_M], float("-inf"), tl.float32)
    spread = tl.full([C.BLOCK_M], 0.0, tl.float32)
    full, partial = td.key_spans(a, seq, m0, m1, C)
    for n in range(full[0], full[1], C.BLOCK_N):
        acc, l, m, spread = statistics_step(a, w, seq, desc, rows, q_tile, (acc, l, m, spread), n, mp.FULL, C)
    for i in range(mp.span_length(partial, C.BLOCK_N)):
        n = mp.span_start(partial, i, C.BLOCK_N)
        if td.worth(a, seq, q[:, None], (n + tl.arange(0, C.BLOCK_N))[None, :], C):
            acc, l, m, spread = statistics_step(a, w, seq, desc, rows, q_tile, (acc, l, m, spread), n, mp.MASKED, C)
    at = (seq.row.to(tl.int64) * a.heads + h) * a.len_q + seq.q_start + q
    store_statistics(a, w, at, row_ok, l, m, spread)
    out_tile, lse = finish(a, h, (acc, l, m), C)
    tt.store_rows(tt.base(Head(a.out, None, seq.row, h, seq.q_start)), a.out, q, row_ok, out_tile, C.DV, C.BLOCK_DV, C)
    tl.store(a.lse_ptr + at, lse, mask=row_ok)


@triton.jit
def seen_weights(a, seq, s_tile, lse, q, k, C: tl.constexpr):
    """Weights of a tile from its products and `lse` (natural), natural scores and the softcap's slope; all broadcast."""
    bias_tile = None
    if a.bias is not None:
        bias_tile = tt.load_bias(a, seq, q, k)
    x_tile, slope = tt.scores(a, seq, s_tile, bias_tile, q, k, C)
    ok = mp.allowed(a.mask, seq, q, k, C)
    if a.bias is None:
        x_tile *= tt.LN2
    else:
        ok &= bias_tile > float("-inf")
    p_tile = tl.where(ok, tl.exp2((x_tile - lse) * tt.LOG2E), 0.0)
    return p_tile, tl.where(ok, x_tile, 0.0), slope


@triton.jit
def load_row(ptr, a, seq, q, other):
    """A number for each of the queries q."""
    at = (seq.row.to(tl.int64) * a.heads + seq.h) * a.len_q + seq.q_start + q
    return tl.load(ptr + at, mask=q < seq.len_q, other=other)


@triton.jit
def load_lse(a, seq, q):
    """+inf for rows that see nothing, and beyond the last: their weights are 0."""
    lse = load_row(a.lse_ptr, a, seq, q, float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit
def mass_kernel(a, w, C: tl.constexpr):
    """What one tile of keys received from the rows of one query head."""
    tile, h, b = tt.work_tile(a, tl.program_id(0), a.cu_k, a.len_k, a.heads, C.BLOCK_N, False, C)
    seq = tt.seq_info(a, b, h, C)
    n0 = tile * C.BLOCK_N
    if n0 >= seq.len_k:
        return
    k = n0 + tl.arange(0, C.BLOCK_N)
    seen = mp.seen_keys(a.mask, seq, 0, seq.len_q, k, C)
    k_tile = tt.load_rows(Head(a.k, None, seq.row, seq.kv_h, seq.k_start), k, seen, C.D, C.BLOCK_D)  # [N, D]
    mass = tl.full([C.BLOCK_N], 0.0, tl.float32)
    lo, hi, _, _ = mp.query_bounds(a.mask, seq, n0, tl.minimum(n0 + C.BLOCK_N, seq.len_k), C)
    # over the queries met so far: mass = Σ P
    for m in range(lo // C.BLOCK_M * C.BLOCK_M, hi, C.BLOCK_M):
        q = m + tl.arange(0, C.BLOCK_M)
        q_tile = tt.load_rows(Head(a.q, None, seq.row, h, seq.q_start), q, q < seq.len_q, C.D, C.BLOCK_D)  # [M, D]
        s_tile = tt.product(k_tile, q_tile, C)[0]  # [N, M] fp32
        p_tile = seen_weights(a, seq, s_tile, load_lse(a, seq, q)[None, :], q[None, :], k[:, None], C)[0]
        mass += tl.sum(p_tile, 1)
    at = (seq.row.to(tl.int64) * a.heads + h) * a.len_k + seq.k_start + k
    tl.store(w.mass_ptr + at, mass, mask=k < seq.len_k)


@triton.jit
def ranked(x_tile, k):
    """Scores and their keys as integers in the same order; of equal scores the first key is the largest."""
    x_tile = tl.where(x_tile == 0.0, 0.0, x_tile)  # without a sign
    bits = x_tile.to(tl.int32, bitcast=True)
    bits ^= (bits >> 31) & 0x7FFFFFFF  # integers have their sign in two's complement
    return tl.where(x_tile == float("-inf"), NOBODY, (bits.to(tl.int64) << 32) | (k ^ LAST).to(tl.int64))


@triton.jit
def top_kernel(a, w, C: tl.constexpr):
    """The largest weights of one tile of queries, and their keys."""
    K: tl.constexpr = triton.next_power_of_2(C.TOP)
    tile, h, b = tt.work_tile(a, tl.program_id(0), a.cu_q, a.len_q, a.heads, C.BLOCK_M, True, C)
    seq = tt.seq_info(a, b, h, C)
    m0 = tile * C.BLOCK_M
    if m0 >= seq.len_q:
        return
    q = m0 + tl.arange(0, C.BLOCK_M)
    q_tile = tt.load_rows(Head(a.q, None, seq.row, h, seq.q_start), q, q < seq.len_q, C.D, C.BLOCK_D)  # [M, D]
    best = tl.full([C.BLOCK_M, K], NOBODY, tl.int64)
    lo, hi, _, _ = mp.key_bounds(a.mask, seq, m0, tl.minimum(m0 + C.BLOCK_M, seq.len_q), C)
    # over the keys met so far: best = the K largest, falling
    for n in range(lo // C.BLOCK_N * C.BLOCK_N, hi, C.BLOCK_N):
        k = n + tl.arange(0, C.BLOCK_N)
        k_tile = tt.load_rows(Head(a.k, None, seq.row, seq.kv_h, seq.k_start), k, k < seq.len_k, C.D, C.BLOCK_D)  # [N, D]
        s_tile = tt.product(q_tile, k_tile, C)[0]  # [M, N] fp32
        bias_tile = None
        if a.bias is not None:
            bias_tile = tt.load_bias(a, seq, q[:, None], k[None, :])
        x_tile = tt.scores(a, seq, s_tile, bias_tile, q[:, None], k[None, :], C)[0]
        x_tile = tl.where(mp.allowed(a.mask, seq, q[:, None], k[None, :], C), x_tile, float("-inf"))
        found = ranked(x_tile, k[None, :])  # [M, N]
        if tl.max((tl.max(found, 1) > tl.min(best, 1)).to(tl.int32), 0) > 0:  # for no row is there more to sort
            both = tl.join(best, tl.topk(found, K)).reshape(C.BLOCK_M, 2 * K)
            best = tl.topk(both, K)
    bits = (best >> 32).to(tl.int32)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    x_tile = bits.to(tl.float32, bitcast=True)
    if a.bias is None:
        x_tile *= tt.LN2
    lse = load_lse(a, seq, q)
    weights = tl.where(best == NOBODY, 0.0, tl.exp2((x_tile - lse[:, None]) * tt.LOG2E))
    indices = tl.where(best == NOBODY, -1, (best & LAST) ^ LAST)
    column = tl.arange(0, K)
    ok = (q < seq.len_q)[:, None] & (column < C.TOP)[None, :]
    at = ((seq.row.to(tl.int64) * a.heads + h) * a.len_q + seq.q_start + q)[:, None] * C.TOP + column[None, :]
    tl.store(w.weights_ptr + at, weights, mask=ok)
    tl.store(w.indices_ptr + at, indices, mask=ok)


@triton.jit
def entropy_queries_kernel(a, w, C: tl.constexpr):
    """What comes back to one tile of queries from the entropy: dS = -dH · P ∘ (S - mean)."""
    tile, h, b = tt.work_tile(a, tl.program_id(0), a.cu_q, a.len_q, a.heads, C.BLOCK_M, True, C)
    seq = tt.seq_info(a, b, h, C)
    m0 = tile * C.BLOCK_M
    if m0 >= seq.len_q:
        return
    m1 = tl.minimum(m0 + C.BLOCK_M, seq.len_q)
    q = m0 + tl.arange(0, C.BLOCK_M)
    q_tile = tt.load_rows(Head(a.q, None, seq.row, h, seq.q_start), q, q < seq.len_q, C.D, C.BLOCK_D)  # [M, D]
    lse, mean, dentropy = load_lse(a, seq, q), load_row(w.mean_ptr, a, seq, q, 0.0), load_row(w.dentropy_ptr, a, seq, q, 0.0)
    dq = tl.full([C.BLOCK_M, C.BLOCK_D], 0.0, tl.float32)
    lo, hi, _, _ = mp.key_bounds(a.mask, seq, m0, m1, C)
    # over the keys met so far: dq = Σ dS k
    for n in range(lo // C.BLOCK_N * C.BLOCK_N, hi, C.BLOCK_N):
        k = n + tl.arange(0, C.BLOCK_N)
        bias_tile = td.bias_of(a, seq, q[:, None], k[None, :])
        seen = td.seen_by(a, seq, (q, m0, m1), n, bias_tile, C)
        k_tile = tt.load_rows(Head(a.k, None, seq.row, seq.kv_h, seq.k_start), k, seen, C.D, C.BLOCK_D)  # [N, D]
        s_tile = tt.product(q_tile, k_tile, C)[0]  # [M, N] fp32
        p_tile, x_tile, slope = seen_weights(a, seq, s_tile, lse[:, None], q[:, None], k[None, :], C)
        dq = tt.dot(-dentropy[:, None] * p_tile * (x_tile - mean[:, None]) * slope, k_tile, dq, C)  # [M, D]
    to = tt.base(Head(w.dq, None, seq.row, h, seq.q_start))
    tt.store_rows(to, w.dq, q, q < seq.len_q, dq * a.scale, C.D, C.BLOCK_D, C)


@triton.jit
def entropy_keys_kernel(a, w, C: tl.constexpr):
    """The same for one tile of keys: the sum over the query heads of the group."""
    tile, kv_h, b = tt.work_tile(a, tl.program_id(0), a.cu_k, a.len_k, a.kv_heads, C.BLOCK_N, False, C)
    group = a.heads // a.kv_heads
    seq = tt.seq_info(a, b, kv_h * group, C)
    n0 = tile * C.BLOCK_N
    if n0 >= seq.len_k:
        return
    k = n0 + tl.arange(0, C.BLOCK_N)
    seen = mp.seen_keys(a.mask, seq, 0, seq.len_q, k, C)
    k_tile = tt.load_rows(Head(a.k, None, seq.row, kv_h, seq.k_start), k, seen, C.D, C.BLOCK_D)  # [N, D]
    dk = tl.full([C.BLOCK_N, C.BLOCK_D], 0.0, tl.float32)
    lo, hi, _, _ = mp.query_bounds(a.mask, seq, n0, tl.minimum(n0 + C.BLOCK_N, seq.len_k), C)
    # over query heads [0, i) and their queries met so far: dk = Σ dSᵀ q
    for i in range(group):
        head = tt.seq_info(a, b, kv_h * group + i, C)
        for m in range(lo // C.BLOCK_M * C.BLOCK_M, hi, C.BLOCK_M):
            q = m + tl.arange(0, C.BLOCK_M)
            lse = load_lse(a, head, q)
            mean, dentropy = load_row(w.mean_ptr, a, head, q, 0.0), load_row(w.dentropy_ptr, a, head, q, 0.0)
            # a query that sees nothing must not meet 0 · inf
            q_tile = tt.load_rows(Head(a.q, None, head.row, head.h, head.q_start), q, lse < float("inf"), C.D, C.BLOCK_D)
            s_tile = tt.product(k_tile, q_tile, C)[0]  # [N, M] fp32
            p_tile, x_tile, slope = seen_weights(a, head, s_tile, lse[None, :], q[None, :], k[:, None], C)
            dk = tt.dot(-dentropy[None, :] * p_tile * (x_tile - mean[None, :]) * slope, q_tile, dk, C)  # [N, D]
    to = tt.base(Head(w.dk, None, seq.row, kv_h, seq.k_start))
    tt.store_rows(to, w.dk, k, k < seq.len_k, dk * a.scale, C.D, C.BLOCK_D, C)


@triton.jit
def entropy_bias_tile(a, w, seq, m0, n0, C: tl.constexpr):
    """dS of one tile, without the softcap's slope: the bias is added after it."""
    q = m0 + tl.arange(0, C.BLOCK_M)
    k = n0 + tl.arange(0, C.BLOCK_N)
    lse, mean, dentropy = load_lse(a, seq, q), load_row(w.mean_ptr, a, seq, q, 0.0), load_row(w.dentropy_ptr, a, seq, q, 0.0)
    q_tile = tt.load_rows(Head(a.q, None, seq.row, seq.h, seq.q_start), q, q < seq.len_q, C.D, C.BLOCK_D)  # [M, D]
    k_tile = tt.load_rows(Head(a.k, None, seq.row, seq.kv_h, seq.k_start), k, k < seq.len_k, C.D, C.BLOCK_D)  # [N, D]
    s_tile = tt.product(q_tile, k_tile, C)[0]  # [M, N] fp32
    p_tile, x_tile, _ = seen_weights(a, seq, s_tile, lse[:, None], q[:, None], k[None, :], C)
    return -dentropy[:, None] * p_tile * (x_tile - mean[:, None])


@triton.jit
def entropy_bias_kernel(a, w, C: tl.constexpr):
    """What comes back to one tile of the bias from the entropy."""
    own = own_tile(size(w.bias_shape[0]), size(w.bias_shape[1]), size(w.bias_shape[2]), size(w.bias_shape[3]), C)
    acc = sum_tiles(a, w, own, entropy_bias_tile, C)
    at = own_rows(tt.base(Head(w.dbias, None, own.b, own.h, own.n * 0)), own, w.dbias.stride_s, w.dbias.stride_d, C)
    tl.store(at, acc, mask=inside(own, C))
