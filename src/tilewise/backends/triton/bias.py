"""The gradient of an additive bias, by a kernel over the bias's own tiles.

Each program owns one tile of dBias and loops over everything that tile was broadcast to (batches, heads, query and key tiles), so
memory stays that of the bias and the sums have a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gpu.program import allowed, has_data, seen_keys
from tilewise.backends.gpu.tile import base, load_bias, load_rows, product, sequence_of
from tilewise.backends.triton.backward import score_gradient, weights


@triton.jit
def bias_kernel(a, g, C: tl.constexpr):
    size_b, size_h, size_q, size_k = g.bias_shape[0], g.bias_shape[1], g.bias_shape[2], g.bias_shape[3]
    pid = tl.program_id(0)
    tiles_k = tl.cdiv(size_k, C.BLOCK_N)
    tiles_q = tl.cdiv(size_q, C.BLOCK_M)
    n_own = pid % tiles_k * C.BLOCK_N
    m_own = pid // tiles_k % tiles_q * C.BLOCK_M
    h_own = pid // tiles_k // tiles_q % size_h
    b_own = pid // tiles_k // tiles_q // size_h
    acc = tl.full([C.BLOCK_M, C.BLOCK_N], 0.0, tl.float32)
    # a side of size 1 is a loop over all it was broadcast to; any other runs once
    b_last = tl.where(size_b == 1, a.batch, b_own + 1)
    h_last = tl.where(size_h == 1, a.heads, h_own + 1)
    for b in range(b_own, b_last):
        for h in range(h_own, h_last):
            seq = sequence_of(a, pid * 0 + b, pid * 0 + h, C)
            m_last = tl.where(size_q == 1, seq.len_q, tl.minimum(m_own + 1, seq.len_q))
            n_last = tl.where(size_k == 1, seq.len_k, tl.minimum(n_own + 1, seq.len_k))
            for m0 in range(m_own, m_last, C.BLOCK_M):
                q = m0 + tl.arange(0, C.BLOCK_M)
                for n0 in range(n_own, n_last, C.BLOCK_N):
                    k = n0 + tl.arange(0, C.BLOCK_N)
                    acc += gradient_tile(a, g, seq, q, k, m0, n0, C)
    rows = m_own + tl.arange(0, C.BLOCK_M)
    cols = n_own + tl.arange(0, C.BLOCK_N)
    # sums over a broadcast side land in its only row or column
    if C.SUM_M:
        acc = tl.sum(acc, 0)[None, :] + tl.full([C.BLOCK_M, C.BLOCK_N], 0.0, tl.float32)
    if C.SUM_N:
        acc = tl.sum(acc, 1)[:, None] + tl.full([C.BLOCK_M, C.BLOCK_N], 0.0, tl.float32)
    at = (
        base(g.dbias, b_own, h_own, pid * 0)
        + rows[:, None].to(tl.int64) * g.dbias.stride_s
        + cols[None, :] * g.dbias.stride_d
    )
    tl.store(at, acc, mask=(rows < size_q)[:, None] & (cols < size_k)[None, :])


@triton.jit
def gradient_tile(a, g, seq, q, k, m0, n0, C: tl.constexpr):
    """dS of one tile, without the softcap's slope: the bias joins after it."""
    row_ok = q < seq.len_q
    ok = allowed(a.mask, seq, q[:, None], k[None, :], C)  # [M, N]
    if has_data(C.STRUCTURE):
        seen = tl.max(ok.to(tl.int32), 0) > 0
    else:
        seen = seen_keys(a.mask, seq, m0, tl.minimum(m0 + C.BLOCK_M, seq.len_q), k, C)
    q_at = base(a.q, seq.row, seq.h, seq.q_start)
    dout_at = base(g.dout, seq.row, seq.h, seq.q_start)
    k_at = base(a.k, seq.row, seq.kv_h, seq.k_start)
    v_at = base(a.v, seq.row, seq.kv_h, seq.k_start)
    q_tile = load_rows(q_at, a.q.stride_s, a.q.stride_d, q, row_ok, C.D, C.BLOCK_D)  # [M, D]
    k_tile = load_rows(k_at, a.k.stride_s, a.k.stride_d, k, seen, C.D, C.BLOCK_D)  # [N, D]
    v_tile = load_rows(v_at, a.v.stride_s, a.v.stride_d, k, seen, C.DV, C.BLOCK_DV)  # [N, DV]
    dout_tile = load_rows(dout_at, g.dout.stride_s, g.dout.stride_d, q, row_ok, C.DV, C.BLOCK_DV)  # [M, DV]
    stats = (seq.row.to(tl.int64) * a.heads + seq.h) * a.len_q + seq.q_start + q
    lse2 = tl.load(g.lse2_ptr + stats, mask=row_ok, other=float("inf"))
    delta = tl.load(g.delta_ptr + stats, mask=row_ok, other=0.0)
    s_tile, factors = product(q_tile, k_tile, C)  # [M, N] fp32
    bias_tile = load_bias(a, seq, q[:, None], k[None, :])
    p_tile, _ = weights(a, seq, s_tile, factors, bias_tile, q[:, None], k[None, :], lse2[:, None], ok, True, C)
    dp_tile, factors = product(dout_tile, v_tile, C)  # [M, N]
    return score_gradient(a, seq, p_tile, dp_tile, factors, 1.0, delta[:, None], q[:, None], n0, C)
