"""The forward kernel: one program for each tile of queries, keys streamed through it.

    over keys [0, n):   acc = Σ exp2(x - m) v,   l = Σ exp2(x - m),   m = max x        (x: scores in units of log 2)

The keys of a tile fall into tiles that every query sees, where no mask is evaluated, and boundary tiles on both sides of them.
The order of keys does not matter, so one loop takes the former and one the latter. With SPLIT the keys are cut into `splits`
shares and partial (out, lse) pairs are written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gpu.merge import merged, with_sink
from tilewise.backends.gpu.program import (
    allowed,
    has_gaps,
    key_bounds,
    seen_of_tile,
    span_length,
    span_start,
    spans,
    whole_span,
)
from tilewise.backends.gpu.structs import Descriptors, Sequence
from tilewise.backends.gpu.tile import (
    LN2,
    LOG2E,
    any_infinite,
    base,
    dot,
    exponential,
    find_sequence,
    kept,
    load_bias,
    load_resident,
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
def locate(a, C: tl.constexpr):
    """This program's share of the keys, first row, and sequence. Last rows go first: under a causal mask they see most."""
    pid = tl.program_id(0)
    tiles = tile_count(a, a.len_q * C.PACK, C.BLOCK_M, C)
    split = pid * 0
    if C.SPLIT:
        split = pid % a.splits
        pid = pid // a.splits
    tile, h, b = place(a, pid, tiles, a.heads // C.PACK, C)
    tile = tiles - 1 - tile
    if C.VARLEN:
        b, tile = find_sequence(a.cu_q, a.batch, tile, C.BLOCK_M)
    return split, tile * C.BLOCK_M, sequence_of(a, b, h * C.PACK, C)


@triton.jit
def attend(
    a, seq, kv, q_tile, q, acc, l, m, span, rows, MASKED: tl.constexpr, CAREFUL: tl.constexpr, C: tl.constexpr
):
    """Stream the tiles of a span through the tile."""
    for i in range(span_length(span, C.BLOCK_N)):
        n = span_start(span, i, C.BLOCK_N)
        k = n + tl.arange(0, C.BLOCK_N)
        if MASKED and has_gaps(C.STRUCTURE):
            ok = allowed(a.mask, seq, q[:, None], k[None, :], C)
            if tl.max(tl.max(ok.to(tl.int32), 1), 0) > 0:
                acc, l, m = step(a, seq, kv, q_tile, q, k, n, acc, l, m, rows, ok, True, CAREFUL, C)
        else:
            acc, l, m = step(a, seq, kv, q_tile, q, k, n, acc, l, m, rows, None, MASKED, CAREFUL, C)
    return acc, l, m


@triton.jit
def step(
    a, seq, kv, q_tile, q, k, n, acc, l, m, rows, ok, MASKED: tl.constexpr, CAREFUL: tl.constexpr, C: tl.constexpr
):
    """One tile of keys: scores, the online softmax update, and the weighted values.

    CAREFUL: values that only a bias hides are left out too.
    """
    there = None  # a descriptor reads 0, or the next sequence's keys, beyond the end: masked in either case, but not a scale
    if MASKED and (kv.k is None or C.TERMS == 2):
        there = k < seq.len_k
    k_tile = load_stream(a, a.k, kv.k, seq.row, seq.kv_h, seq.k_start, n, there, C.BLOCK_N, C.D, C.BLOCK_D, C)  # [N, D]
    bias_tile = None
    if a.bias is not None:
        bias_tile = load_bias(a, seq, q[:, None], k[None, :])
    s_tile, factors = product(q_tile, k_tile, C)  # [M, N] fp32
    if C.FOLD:
        unit = factors * (a.scale * LOG2E)
        unit_tile = per_row(unit, C)
    else:
        s_tile, _ = scores(a, seq, s_tile * per_row(factors, C), bias_tile, q[:, None], k[None, :], C)
        unit = 1.0
        unit_tile = 1.0
    if MASKED:
        if ok is None:  # evaluated here, not before the product, it costs fewer registers
            s_tile = tl.where(allowed(a.mask, seq, q[:, None], k[None, :], C), s_tile, float("-inf"))
        else:
            s_tile = tl.where(ok, s_tile, float("-inf"))
    p_tile, acc, l, m = online_update(s_tile, unit, unit_tile, bias_tile, acc, l, m, MASKED or not C.FOLD)
    if C.DROPOUT:
        p_tile *= kept(a, seq, q[:, None], n, C)
    seen = None
    if MASKED:  # a value no query of this tile may see must not meet 0 · inf
        seen = seen_of_tile(a, seq, q, k, rows, ok, bias_tile, CAREFUL, C)
    v_tile = load_stream(
        a, a.v, kv.v, seq.row, seq.kv_h, seq.k_start, n, seen, C.BLOCK_N, C.DV, C.BLOCK_DV, C
    )  # [N, DV]
    acc = dot(p_tile, v_tile, acc, C)  # [M, DV]
    return acc, l, m


@triton.jit
def online_update(s_tile, unit, unit_tile, bias_tile, acc, l, m, MAY_BE_EMPTY: tl.constexpr):
    """Weights of a tile under the running maximum, which they may raise."""
    new_m = tl.maximum(m, tl.max(s_tile, 1) * unit)
    shift = new_m
    if MAY_BE_EMPTY:
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)  # a row that has seen nothing yet
    p_tile = exponential(s_tile * unit_tile - shift[:, None], bias_tile)
    rescale = exponential(m - shift, bias_tile)
    return p_tile, acc * rescale[:, None], l * rescale + tl.sum(p_tile, 1), new_m


@triton.jit
def finish(a, seq, acc, l, m, C: tl.constexpr):
    """Normalise: the sink joins the denominator, an empty row becomes (0, -inf)."""
    if a.bias is None:
        m *= LN2  # from units of log 2
    if a.sinks_ptr is not None and not C.SPLIT:
        acc, l, m = with_sink(acc, l, m, tl.load(a.sinks_ptr + seq.h).to(tl.float32))
    out_tile, lse = merged(acc, l, m)
    if C.DROPOUT:
        out_tile *= a.keep_scale
    return out_tile, lse


@triton.jit
def forward_kernel(a, k_desc, v_desc, C: tl.constexpr):
    kv = Descriptors(k_desc, v_desc)
    split, m0, seq = locate(a, C)
    if m0 >= seq.len_q * C.PACK:
        return
    rows = m0 + tl.arange(0, C.BLOCK_M)
    row_ok = rows < seq.len_q * C.PACK
    # packed rows are (query, head of the group), heads running fastest
    q = rows // C.PACK
    heads = seq.h
    if C.PACK > 1:
        heads = seq.h + rows % C.PACK
        seq = Sequence(seq.b, heads[:, None], seq.kv_h, seq.row, seq.q_start, seq.k_start, seq.len_q, seq.len_k)
        out_at = base(a.out, seq.row, heads, seq.q_start)[:, None]
    else:
        out_at = base(a.out, seq.row, heads, seq.q_start)
    q_tile = load_resident(a, a.q, seq.row, heads, seq.q_start, q, row_ok, C.D, C.BLOCK_D, C)  # [M, D]

    first = m0 // C.PACK
    last = tl.minimum((m0 + C.BLOCK_M - 1) // C.PACK + 1, seq.len_q)
    lo, hi, full_lo, full_hi = key_bounds(a.mask, seq, first, last, C)
    if C.SPLIT:
        share = tl.cdiv(tl.cdiv(tl.maximum(hi - lo, 0), C.BLOCK_N) + 1, a.splits) * C.BLOCK_N
        start = lo // C.BLOCK_N * C.BLOCK_N + split * share
        lo = tl.maximum(lo, start)
        hi = tl.minimum(hi, start + share)
        full_lo = tl.maximum(full_lo, start)
        full_hi = tl.minimum(full_hi, start + share)
    full, partial = spans(lo, hi, full_lo, full_hi, C.BLOCK_N)
    acc = tl.full([C.BLOCK_M, C.BLOCK_DV], 0.0, tl.float32)
    l = tl.full([C.BLOCK_M], 0.0, tl.float32)
    m = tl.full([C.BLOCK_M], float("-inf"), tl.float32)
    acc, l, m = attend(a, seq, kv, q_tile, q, acc, l, m, full, (first, last), False, False, C)
    acc, l, m = attend(a, seq, kv, q_tile, q, acc, l, m, partial, (first, last), True, False, C)
    if a.bias is not None:
        if any_infinite(acc):  # perhaps because of a value that the bias hides: once more, with care
            acc = tl.full([C.BLOCK_M, C.BLOCK_DV], 0.0, tl.float32)
            l = tl.full([C.BLOCK_M], 0.0, tl.float32)
            m = tl.full([C.BLOCK_M], float("-inf"), tl.float32)
            acc, l, m = attend(a, seq, kv, q_tile, q, acc, l, m, whole_span(partial), (first, last), True, True, C)

    out_tile, lse = finish(
        a, Sequence(seq.b, heads, seq.kv_h, seq.row, seq.q_start, seq.k_start, seq.len_q, seq.len_k), acc, l, m, C
    )
    out_row = seq.row
    if C.SPLIT:
        out_row += split * (1 if C.VARLEN else a.batch)
        out_at += split.to(tl.int64) * (1 if C.VARLEN else a.batch) * a.out.stride_b
    store_rows(out_at, a.out.stride_s, a.out.stride_d, q, row_ok, out_tile, C.DV, C.BLOCK_DV, C)
    lse_at = a.lse_ptr + (out_row.to(tl.int64) * a.heads + heads) * a.len_q + seq.q_start + q
    tl.store(lse_at, lse, mask=row_ok)
