"""The JVP: the forward with two more sums, Σ p s_t and Σ p (s_t v + v_t), rescaled with the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tilewise.backends.gpu.program as mp
import tilewise.backends.gpu.tile as tt
import tilewise.backends.triton.derivatives as td
from tilewise.backends.gpu.merge import add_sink, normalized
from tilewise.backends.gpu.structs import Head


@triton.jit
def jvp_step(a, t, desc, seq, rows, queries, state, n, MODE: tl.constexpr, C: tl.constexpr):
    """One tile of keys: the online softmax with its two derivatives. `rows`: the queries, the first, the last + 1."""
    acc, acc_t, l, l_t, m = state
    q = rows[0][:, None]
    k = (n + tl.arange(0, C.BLOCK_N))[None, :]
    bias_tile = td.bias_of(a, seq, q, k)
    seen = None
    exist = None
    if MODE != mp.FULL:
        seen = td.seen_by(a, seq, rows, n, bias_tile, C)  # what no query of the tile sees must not meet 0 · inf
        if desc[0] is None:  # a descriptor reads anything: its scores are masked
            exist = seen
    keys = td.load_keys(a, t, desc, seq, n, exist, seen, C)
    s_tile = tt.product(queries.q_tile, keys.k_tile, C)[0]  # [M, N] fp32
    z_t_tile = td.product2(
        queries.q_t_tile, keys.k_tile, queries.q_tile, keys.k_t_tile, t.q is not None, t.k is not None, C
    )
    s_tile, s_t_tile, _, _ = td.moving_scores(a, t, seq, (s_tile, z_t_tile), bias_tile, q, k, C)
    if MODE != mp.FULL:  # evaluated here, not before the products, the mask costs fewer registers
        ok = td.visible(a, seq, q, k, bias_tile, C)
        s_tile = tl.where(ok, s_tile, float("-inf"))
        s_t_tile = tl.where(ok, s_t_tile, 0.0)
    if C.FOLD:
        new_m = tl.maximum(m, tl.max(s_tile, 1) * (a.scale * tt.LOG2E))
    else:
        new_m = tl.maximum(m, tl.max(s_tile, 1))
    shift = new_m
    if MODE != mp.FULL or not C.FOLD:
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)  # a row that has seen nothing yet
    p_tile = td.weights(a, s_tile, shift[:, None], C)
    rescale = tl.exp2(m - shift) if C.FOLD else tl.exp2((m - shift) * tt.LOG2E)
    moved_tile = p_tile * s_t_tile
    l = l * rescale + tl.sum(p_tile, 1)
    l_t = l_t * rescale + tl.sum(moved_tile, 1)
    if C.DROPOUT:
        keep = tt.dropout_keep(a, seq, q, n, C)
        p_tile *= keep
        moved_tile *= keep
    acc = tt.dot(p_tile, keys.v_tile, acc * rescale[:, None], C)  # [M, DV]
    acc_t = tt.dot(moved_tile, keys.v_tile, acc_t * rescale[:, None], C)
    if t.v is not None:
        acc_t = tt.dot(p_tile, keys.v_t_tile, acc_t, C)
    return acc, acc_t, l, l_t, new_m


@triton.jit
def jvp_kernel(a, t, k_desc, v_desc, k_t_desc, v_t_desc, C: tl.constexpr):
    """out, lse, out_t and lse_t of one tile of queries."""
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
    queries = td.load_queries(a, t, (None, None, None), seq, m0, row_ok, C)
    acc = tl.full([C.BLOCK_M, C.BLOCK_DV], 0.0, tl.float32)
    acc_t = tl.full([C.BLOCK_M, C.BLOCK_DV], 0.0, tl.float32)
    l = tl.full([C.BLOCK_M], 0.0, tl.float32)
    l_t = tl.full([C.BLOCK_M], 0.0, tl.float32)
    m = tl.full([C.BLOCK_M], float("-inf"), tl.float32)
    full, partial = td.key_spans(a, seq, m0, m1, C)
    # over the keys met so far, with p = exp(s - m):
    # m = max s,  l = Σ p,  acc = Σ p v,  l_t = Σ p s_t,  acc_t = Σ p (s_t v + v_t)
    for n in range(full[0], full[1], C.BLOCK_N):
        acc, acc_t, l, l_t, m = jvp_step(a, t, desc, seq, rows, queries, (acc, acc_t, l, l_t, m), n, mp.FULL, C)
    for i in range(mp.span_length(partial, C.BLOCK_N)):
        n = mp.span_start(partial, i, C.BLOCK_N)
        if td.worth(a, seq, q[:, None], (n + tl.arange(0, C.BLOCK_N))[None, :], C):
            acc, acc_t, l, l_t, m = jvp_step(a, t, desc, seq, rows, queries, (acc, acc_t, l, l_t, m), n, mp.MASKED, C)
    if C.FOLD:
        m *= tt.LN2  # from units of log 2
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
