"""The gradient of an additive bias, by a kernel over the bias's own tiles.

Each program owns one tile of dBias and loops over everything that tile was broadcast to (batches, heads, query and key tiles), so
memory stays that of the bias and the sums have a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tilewise.backends.gpu.program as mp
import tilewise.backends.gpu.tile as tt
from tilewise.backends.gpu.structs import Head
from tilewise.backends.triton.backward import row_stats, score_gradient, weights


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
            seq = tt.seq_info(a, pid * 0 + b, pid * 0 + h, C)
            m_last = tl.where(size_q == 1, seq.len_q, tl.minimum(m_own + 1, seq.len_q))
            n_last = tl.where(size_k == 1, seq.len_k, tl.minimum(n_own + 1, seq.len_k))
            for m0 in range(m_own, m_last, C.BLOCK_M):
                for n0 in range(n_own, n_last, C.BLOCK_N):
                    acc += gradient_tile(a, g, seq, m0, n0, C)
    rows = m_own + tl.arange(0, C.BLOCK_M)
    cols = n_own + tl.arange(0, C.BLOCK_N)
    # sums over a broadcast side land in its only row or column
    if C.SUM_M:
        acc = tl.sum(acc, 0)[None, :] + tl.full([C.BLOCK_M, C.BLOCK_N], 0.0, tl.float32)
    if C.SUM_N:
        acc = tl.sum(acc, 1)[:, None] + tl.full([C.BLOCK_M, C.BLOCK_N], 0.0, tl.float32)
    own = Head(g.dbias, None, b_own, h_own, pid * 0)
    at = tt.base(own) + rows[:, None].to(tl.int64) * g.dbias.stride_s + cols[None, :] * g.dbias.stride_d
    tl.store(at, acc, mask=(rows < size_q)[:, None] & (cols < size_k)[None, :])


@triton.jit
def gradient_tile(a, g, seq, m0, n0, C: tl.constexpr):
    """dS of one tile, without the softcap's slope: the bias is added after it."""
    q = m0 + tl.arange(0, C.BLOCK_M)
    k = n0 + tl.arange(0, C.BLOCK_N)
    row_ok = q < seq.len_q
    ok = mp.allowed(a.mask, seq, q[:, None], k[None, :], C)  # [M, N]
    if C.MASK.reads_data:
        seen = tl.max(ok.to(tl.int32), 0) > 0
    else:
        seen = mp.seen_keys(a.mask, seq, m0, tl.minimum(m0 + C.BLOCK_M, seq.len_q), k, C)
    queries = Head(a.q, None, seq.row, seq.h, seq.q_start)
    gradients = Head(g.dout, None, seq.row, seq.h, seq.q_start)
    q_tile = tt.load_rows(queries, q, row_ok, C.D, C.BLOCK_D)  # [M, D]
    k_tile = tt.load_rows(Head(a.k, None, seq.row, seq.kv_h, seq.k_start), k, seen, C.D, C.BLOCK_D)  # [N, D]
    v_tile = tt.load_rows(Head(a.v, None, seq.row, seq.kv_h, seq.k_start), k, seen, C.DV, C.BLOCK_DV)  # [N, DV]
    dout_tile = tt.load_rows(gradients, q, row_ok, C.DV, C.BLOCK_DV)  # [M, DV]
    lse2, delta = row_stats(a, g, seq, q, row_ok)
    products = tt.product(q_tile, k_tile, C)  # [M, N] fp32
    bias_tile = tt.load_bias(a, seq, q[:, None], k[None, :])
    p_tile, _ = weights(a, seq, products, bias_tile, q[:, None], k[None, :], lse2[:, None], ok, mp.MASKED, C)
    products = tt.product(dout_tile, v_tile, C)  # [M, N]
    return score_gradient(a, seq, p_tile, products, 1.0, delta[:, None], q[:, None], n0, C)
