"""The gradient of an additive bias, by a kernel over the bias's own tiles.

Each program owns one tile of dBias and loops over everything that tile was broadcast to (batches, heads, query and key tiles), so
memory stays that of the bias and the sums have a fixed order. Other modules
sum their gradients likewise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import tilewise.backends.gpu.program as mp
import tilewise.backends.gpu.tile as tt
from tilewise.backends.gpu.structs import Head
from tilewise.backends.triton.backward import kept_factors, row_stats, score_gradient, weights


@triton.jit
def bias_kernel(a, g, C: tl.constexpr):
    own = own_tile(size(g.bias_shape[0]), size(g.bias_shape[1]), size(g.bias_shape[2]), size(g.bias_shape[3]), C)
    acc = sum_tiles(a, g, own, gradient_tile, C)
    at = own_rows(tt.base(Head(g.dbias, None, own.b, own.h, own.n * 0)), own, g.dbias.stride_s, g.dbias.stride_d, C)
    tl.store(at, acc, mask=inside(own, C))


class OwnTile(NamedTuple):
    """A program's tile of the bias, and the bias's sizes."""

    b: Any
    h: Any
    m: Any
    n: Any
    size_b: Any
    size_h: Any
    size_q: Any
    size_k: Any


@triton.jit
def size(length):
    """A length as a number of the device: constants inside structs get lost under Triton 3.6."""
    return tl.program_id(0) * 0 + length


@triton.jit
def own_tile(size_b, size_h, size_q, size_k, C: tl.constexpr):
    pid = tl.program_id(0)
    tiles_k = tl.cdiv(size_k, C.BLOCK_N)
    tiles_q = tl.cdiv(size_q, C.BLOCK_M)
    n = pid % tiles_k * C.BLOCK_N
    m = pid // tiles_k % tiles_q * C.BLOCK_M
    h = pid // tiles_k // tiles_q % size_h
    b = pid // tiles_k // tiles_q // size_h
    return OwnTile(b, h, m, n, size_b, size_h, size_q, size_k)


@triton.jit
def own_rows(at, own, stride_s, stride_d, C: tl.constexpr):
    """The addresses of the tile in the head that begins at `at`."""
    rows = own.m + tl.arange(0, C.BLOCK_M)
    cols = own.n + tl.arange(0, C.BLOCK_N)
    return at + rows[:, None].to(tl.int64) * stride_s + cols[None, :] * stride_d


@triton.jit
def inside(own, C: tl.constexpr):
    rows = own.m + tl.arange(0, C.BLOCK_M)
    cols = own.n + tl.arange(0, C.BLOCK_N)
    return (rows < own.size_q)[:, None] & (cols < own.size_k)[None, :]


@triton.jit
def sum_tiles(a, g, own, TILE: tl.constexpr, C: tl.constexpr):
    """The sum over all that a tile of the bias was broadcast to of what the function TILE(a, g, seq, m0, n0, C) gives."""
    acc = tl.full([C.BLOCK_M, C.BLOCK_N], 0.0, tl.float32)
    # a side of size 1 is a loop over all it was broadcast to; any other runs once
    b_last = tl.where(own.size_b == 1, a.batch, own.b + 1)
    h_last = tl.where(own.size_h == 1, a.heads, own.h + 1)
    for b in range(own.b, b_last):
        for h in range(own.h, h_last):
            seq = tt.seq_info(a, own.b * 0 + b, own.b * 0 + h, C)
            m_last = tl.where(own.size_q == 1, seq.len_q, tl.minimum(own.m + 1, seq.len_q))
            n_last = tl.where(own.size_k == 1, seq.len_k, tl.minimum(own.n + 1, seq.len_k))
            for m0 in range(own.m, m_last, C.BLOCK_M):
                for n0 in range(own.n, n_last, C.BLOCK_N):
                    acc += TILE(a, g, seq, m0, n0, C)
    # sums over a broadcast side land in its only row or column
    if C.SUM_M:
        acc = tl.sum(acc, 0)[None, :] + tl.full([C.BLOCK_M, C.BLOCK_N], 0.0, tl.float32)
    if C.SUM_N:
        acc = tl.sum(acc, 1)[:, None] + tl.full([C.BLOCK_M, C.BLOCK_N], 0.0, tl.float32)
    return acc


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
    kept = kept_factors(a, seq, q[:, None], n0, C)
    return score_gradient(a, p_tile, products, 1.0, delta[:, None], kept, False, mp.MASKED, C)
