"""What the kernels of JVP and double backward share: the formulas of docs/derivatives.md, tile by tile.

Tiles that every query sees are not masked, unless there is a bias, which may hide a key. A tangent that is None is zero, and its
products are left out. Device functions cannot return None, so what is absent returns something that is there, and whoever takes
it asks the arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tilewise.backends.gpu.program as mp
import tilewise.backends.gpu.tile as tt
from tilewise.backends.gpu.structs import Head
from tilewise.backends.triton.tangents import KeyTiles, QueryTiles


@triton.jit
def load_queries(a, t, desc, seq, m, ok, C: tl.constexpr):
    """The tiles of the queries from m on; 0 where not `ok` (None: all are)."""
    q_tile = tt.load_stream(a, Head(a.q, desc[0], seq.row, seq.h, seq.q_start), m, ok, C.BLOCK_M, C.D, C.BLOCK_D, C)  # [M, D]
    q_t_tile = q_tile
    dout_tile = q_tile
    if t.q is not None:
        q_t_tile = tt.load_stream(a, Head(t.q, desc[1], seq.row, seq.h, seq.q_start), m, ok, C.BLOCK_M, C.D, C.BLOCK_D, C)
    if t.dout is not None:
        upstream = Head(t.dout, desc[2], seq.row, seq.h, seq.q_start)
        dout_tile = tt.load_stream(a, upstream, m, ok, C.BLOCK_M, C.DV, C.BLOCK_DV, C)  # [M, DV]
    return QueryTiles(q_tile, q_t_tile, dout_tile)


@triton.jit
def load_keys(a, t, desc, seq, n, k_ok, ok, C: tl.constexpr):
    """The tiles of the keys from n on; 0 where not `ok` (None: all are); keys themselves and their tangents where not `k_ok`."""
    k_tile = tt.load_stream(a, Head(a.k, desc[0], seq.row, seq.kv_h, seq.k_start), n, k_ok, C.BLOCK_N, C.D, C.BLOCK_D, C)
    v_tile = tt.load_stream(a, Head(a.v, desc[1], seq.row, seq.kv_h, seq.k_start), n, ok, C.BLOCK_N, C.DV, C.BLOCK_DV, C)
    k_t_tile = k_tile
    v_t_tile = v_tile  # [N, DV]
    if t.k is not None:
        k_t_tile = tt.load_stream(a, Head(t.k, desc[2], seq.row, seq.kv_h, seq.k_start), n, k_ok, C.BLOCK_N, C.D, C.BLOCK_D, C)
    if t.v is not None:
        v_t_tile = tt.load_stream(a, Head(t.v, desc[3], seq.row, seq.kv_h, seq.k_start), n, ok, C.BLOCK_N, C.DV, C.BLOCK_DV, C)
    return KeyTiles(k_tile, v_tile, k_t_tile, v_t_tile)


@triton.jit
def bias_of(a, seq, q, k):
    """The bias over the tile q × k (index tiles that broadcast against each other); anything where there is none."""
    bias_tile = q
    if a.bias is not None:
        bias_tile = tt.load_bias(a, seq, q, k)
    return bias_tile


@triton.jit
def visible(a, seq, q, k, bias_tile, C: tl.constexpr):
    """The mask over the tile q × k, a bias of -inf included."""
    ok = mp.allowed(a.mask, seq, q, k, C)
    if a.bias is not None:
        ok &= bias_tile != float("-inf")
    return ok


@triton.jit
def seen_by(a, seq, rows, n, bias_tile, C: tl.constexpr):
    """Which keys from n on some query of the tile sees. `rows`: the queries, the first one, the last one + 1."""
    k = n + tl.arange(0, C.BLOCK_N)
    if a.bias is not None or C.MASK.reads_data:
        return tl.max(visible(a, seq, rows[0][:, None], k[None, :], bias_tile, C).to(tl.int32), 0) > 0
    else:
        return mp.seen_keys(a.mask, seq, rows[1], rows[2], k, C)


@triton.jit
def worth(a, seq, q, k, C: tl.constexpr):
    """May a masked tile hold anything visible? Evaluated where tiles inside the hull may be EMPTY."""
    if C.MASK.has_gaps:
        return mp.any_allowed(mp.allowed(a.mask, seq, q, k, C))
    else:
        return True


@triton.jit
def key_spans(a, seq, m0, m1, C: tl.constexpr):
    """The keys of the queries [m0, m1): tiles that need no mask, and those that do."""
    lo, hi, full_lo, full_hi = mp.key_bounds(a.mask, seq, m0, m1, C)
    if a.bias is not None:
        full_hi = full_lo
    return mp.spans(lo, hi, full_lo, full_hi, C.BLOCK_N)


@triton.jit
def product2(x, y, x2, y2, first: tl.constexpr, second: tl.constexpr, C: tl.constexpr):
    """x·yᵀ + x2·y2ᵀ in fp32, or one of them."""
    if first and second:
        if C.INTERPRET:
            return tt.product(x, y, C)[0] + tt.product(x2, y2, C)[0]
        else:
            return tl.dot(x2, tl.trans(y2), tl.dot(x, tl.trans(y), input_precision=C.PRECISION), input_precision=C.PRECISION)
    elif second:
        return tt.product(x2, y2, C)[0]
    else:
        return tt.product(x, y, C)[0]


@triton.jit
def moving_scores(a, t, seq, products, bias_tile, q, k, C: tl.constexpr):
    """Of products q·k and their derivative: scores, their derivative S_t, that of scale·q·k, and tanh of the softcap.

    With FOLD the scores are the products as they are; else they are in natural units.
    """
    s_tile, z_t_tile = products
    MOVES: tl.constexpr = t.q is not None or t.k is not None
    if MOVES:
        z_t_tile *= a.scale
    else:
        z_t_tile = tl.full(s_tile.shape, 0.0, tl.float32)
    tanh_tile = s_tile
    if not C.FOLD:
        s_tile *= a.scale
        if C.SOFTCAP:
            tanh_tile = tt.tanh(s_tile / a.softcap)
            s_tile = tanh_tile * a.softcap
        if a.bias is not None:
            s_tile += bias_tile
        if a.alibi is not None:
            steepness = tl.load(a.alibi.ptr + seq.b.to(tl.int64) * a.alibi.stride_b + seq.h * a.alibi.stride_h)
            s_tile -= steepness * tl.abs(q + (seq.len_k - seq.len_q) - k).to(tl.float32)
    s_t_tile = z_t_tile
    if C.SOFTCAP:
        s_t_tile = z_t_tile * (1.0 - tanh_tile * tanh_tile)
    if t.bias is not None:
        at = tt.base(Head(t.bias, None, seq.b, seq.h, seq.b * 0))
        at += q.to(tl.int64) * t.bias.stride_s + k * t.bias.stride_d
        s_t_tile += tl.load(at, mask=(q < seq.len_q) & (k < seq.len_k), other=0.0).to(tl.float32)
    return s_tile, s_t_tile, z_t_tile, tanh_tile


@triton.jit
def weights(a, s_tile, shift, C: tl.constexpr):
    """exp(s - shift) of scores as `moving_scores` has them; `shift` is in units of log 2 with FOLD, else natural."""
    if C.FOLD:
        return tl.exp2(s_tile * (a.scale * tt.LOG2E) - shift)
    else:
        return tl.exp2((s_tile - shift) * tt.LOG2E)
