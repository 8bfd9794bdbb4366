"""The forward kernel: one program for each tile of queries, keys streamed through it.

    over keys [0, n):   acc = Σ exp2(x - m) v,   l = Σ exp2(x - m),   m = max x        (x: scores in units of log 2)

The keys of a tile fall into tiles that every query sees, where no mask is evaluated, and boundary tiles on both sides of them.
The order of keys does not matter, so one loop takes the former and one the latter. With SPLIT the keys are cut into `splits`
chunks and partial (out, lse) pairs are written.

With SPAN the bits of a row follow from the row alone: one tile serves every number of rows, its keys come in order, all of them
under the mask, in parts that begin at multiples of SPAN. Parts are merged in order, here or, with SPLIT, each by a program of its
own, by the merge kernel: the arithmetic is the same. What a row does not see of a tile leaves its state as it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tilewise.backends.gpu.paged as pg
import tilewise.backends.gpu.program as mp
import tilewise.backends.gpu.tile as tt
import tilewise.backends.gpu.walk as wk
from tilewise.backends.gpu.merge import add_in_order, add_sink, normalized
from tilewise.backends.gpu.structs import Head, QueryTile, SeqInfo


@triton.jit
def locate(a, C: tl.constexpr):
    """This program's chunk of the keys, first row, and sequence. Last rows go first: under a causal mask they see most."""
    pid = tl.program_id(0)
    split = pid * 0
    if C.LISTED:
        tile, h, b = wk.listed_tile(a, pid, a.cu_q, a.len_q, a.heads, C.BLOCK_M, C)
        return split, tile * C.BLOCK_M, tt.seq_info(a, b, h, C)
    if C.SPLIT:
        split = pid % a.splits
        pid = pid // a.splits
    if C.PAGED:
        tile, h, b = pg.work_tile(a, pid, C)
        return split, tile * C.BLOCK_M, pg.seq_info(a, b, h * C.PACK, C)
    else:
        tile, h, b = tt.work_tile(a, pid, a.cu_q, a.len_q * C.PACK, a.heads // C.PACK, C.BLOCK_M, True, C)
        return split, tile * C.BLOCK_M, tt.seq_info(a, b, h * C.PACK, C)


@triton.jit
def empty_state(C: tl.constexpr):
    """acc, l and m before the first key."""
    acc = tl.full([C.BLOCK_M, C.BLOCK_DV], 0.0, tl.float32)
    return acc, tl.full([C.BLOCK_M], 0.0, tl.float32), tl.full([C.BLOCK_M], float("-inf"), tl.float32)


@triton.jit
def stream_keys(a, seq, desc, tile, state, span, MODE: tl.constexpr, C: tl.constexpr):
    """Stream the tiles of a span through the tile of queries."""
    acc, l, m = state
    if C.PAGED:
        numbers = pg.page_numbers(a, seq, mp.span_start(span, 0, C.BLOCK_N), C)
    for i in range(mp.span_length(span, C.BLOCK_N)):
        n = mp.span_start(span, i, C.BLOCK_N)
        place = desc
        if C.PAGED:
            place = (numbers, numbers)
            numbers = pg.page_numbers(a, seq, mp.span_start(span, i + 1, C.BLOCK_N), C)  # long before it is needed
        if MODE != mp.FULL and C.MASK.has_gaps:
            k = n + tl.arange(0, C.BLOCK_N)
            ok = mp.allowed(a.mask, seq, tile.q[:, None], k[None, :], C)
            if mp.any_allowed(ok):
                acc, l, m = keys_step(a, seq, place, tile, (acc, l, m), n, (ok, None, None), MODE, C)
        else:
            acc, l, m = keys_step(a, seq, place, tile, (acc, l, m), n, (None, None, None), MODE, C)
    return acc, l, m


@triton.jit
def stream_listed(a, seq, desc, tile, state, listed, PARTIAL: tl.constexpr, MODE: tl.constexpr, C: tl.constexpr):
    """Stream the tiles of one class that the list names."""
    acc, l, m = state
    word, following, r, i = wk.first_run(a, listed.row, PARTIAL)
    for _ in range(wk.tiles_of(a, listed.row, PARTIAL)):
        n = wk.tile_number((word, following, r, i)) * C.BLOCK_N
        live = word if PARTIAL else wk.ALL_LIVE
        acc, l, m = keys_step(a, seq, desc, tile, (acc, l, m), n, (None, listed, live), MODE, C)
        word, following, r, i = wk.next_run(a, listed.row, (word, following, r, i), PARTIAL)
    return acc, l, m


@triton.jit
def keys_step(a, seq, desc, tile, state, n, mask, MODE: tl.constexpr, C: tl.constexpr):
    """One tile of keys: scores, the online softmax update, and the weighted values.

    `mask`: the mask of the tile where it has been evaluated, or what it is listed with and its run.
    """
    ok = mask[0]
    k = n + tl.arange(0, C.BLOCK_N)
    q = tile.q
    exist = None  # a descriptor reads 0, or the next sequence's keys, beyond the end: masked in either case, but not a scale
    if MODE != mp.FULL and (desc[0] is None or C.FP16_SPLIT or C.PAGED):
        exist = k < seq.len_k
    if C.PAGES.LATENT and MODE != mp.FULL:  # the values are among the keys, and what nobody sees is not read
        exist = mp.seen_of_tile(a, seq, tile, k, ok, None, mp.MASKED, C)
    keys = Head(a.k, desc[0], seq.row, seq.kv_h, seq.k_start)
    if C.PAGED:
        k_tile = pg.load_pages(a, keys, n, exist, 0, C.D, C.BLOCK_D, C)  # [N, D]
    else:
        k_tile = tt.load_stream(a, keys, n, exist, C.BLOCK_N, C.D, C.BLOCK_D, C)  # [N, D]
    bias_tile = None
    if a.bias is not None:
        bias_tile = tt.load_bias(a, seq, q[:, None], k[None, :])
    if C.REST:
        more = pg.load_pages(a, keys, n, exist, C.BLOCK_D, C.D - C.BLOCK_D, C.REST, C)  # [N, REST]
        s_tile = pg.product_in_two(tile.q_tile, k_tile, more, C)
        factors = 1.0
    else:
        s_tile, factors = tt.product(tile.q_tile, k_tile, C)  # [M, N] fp32
    if C.PAGES.SCALED:
        s_tile *= pg.load_scale(a, a.pages.k_scale, keys, n, exist, C)
    if C.FOLD:
        unit = factors * (a.scale * tt.LOG2E)
        unit_tile = tt.per_row(unit, C)
    else:
        s_tile, _ = tt.scores(a, seq, s_tile * tt.per_row(factors, C), bias_tile, q[:, None], k[None, :], C)
        unit = 1.0
        unit_tile = 1.0
    if MODE != mp.FULL:
        if C.LISTED:
            visible = wk.visible(a, seq, q[:, None], k[None, :], mask[1], mask[2], C)
            s_tile = tl.where(visible, s_tile, float("-inf"))
        elif ok is None:  # evaluated here, not before the product, it costs fewer registers
            s_tile = tl.where(mp.allowed(a.mask, seq, q[:, None], k[None, :], C), s_tile, float("-inf"))
        else:
            s_tile = tl.where(ok, s_tile, float("-inf"))
    p_tile, acc, l, m = online_softmax(s_tile, unit, unit_tile, bias_tile, state, MODE != mp.FULL or not C.FOLD)
    if C.DROPOUT:
        p_tile *= tt.dropout_keep(a, seq, q[:, None], n, C)
    seen = None
    if C.LISTED and MODE == mp.MASKED:  # values that no query of the tile sees are dealt with if something is infinite
        seen = exist
    elif C.LISTED and MODE == mp.CAREFUL:
        seen = wk.seen(a, seq, q[:, None], k[None, :], mask, bias_tile, C)
    elif MODE != mp.FULL:  # a value no query of this tile may see must not meet 0 · inf
        seen = mp.seen_of_tile(a, seq, tile, k, ok, bias_tile, MODE, C)
    values = Head(a.v, desc[1], seq.row, seq.kv_h, seq.k_start)
    if C.PAGES.LATENT:
        v_tile = k_tile
    elif C.PAGED:
        v_tile = pg.load_pages(a, values, n, seen, 0, C.DV, C.BLOCK_DV, C)  # [N, DV]
    else:
        v_tile = tt.load_stream(a, values, n, seen, C.BLOCK_N, C.DV, C.BLOCK_DV, C)  # [N, DV]
    if C.PAGES.PER_TOKEN:
        acc = pg.weighted(p_tile, v_tile, pg.load_scale(a, a.pages.v_scale, values, n, seen, C), acc, C)  # [M, DV]
    else:
        acc = tt.dot(p_tile, v_tile, acc, C)  # [M, DV]
    return acc, l, m


@triton.jit
def fixed_parts(a, seq, tile, split, lo, hi, C: tl.constexpr):
    """All parts of the keys [lo, hi), or one of them, merged in order; the maximum is in natural units."""
    first = lo // C.SPAN
    past = tl.cdiv(hi, C.SPAN)
    if C.SPLIT:
        first = tl.maximum(first, split)
        past = tl.minimum(past, split + 1)
    whole, whole_l, whole_m = empty_state(C)
    for part in range(first, past):
        start = part * C.SPAN
        _, span = mp.spans(tl.maximum(lo, start), tl.minimum(hi, start + C.SPAN), 0, 0, C.BLOCK_N)
        acc, l, m = stream_keys(a, seq, (None, None), tile, empty_state(C), span, mp.MASKED, C)
        if a.bias is not None:
            if tt.any_infinite(acc):  # perhaps because of a value that the bias hides: once more, with care
                acc, l, m = stream_keys(a, seq, (None, None), tile, empty_state(C), span, mp.CAREFUL, C)
        else:
            m *= tt.LN2  # from units of log 2
        if C.PAGES.SCALED and not C.PAGES.PER_TOKEN:
            acc *= tl.load(a.pages.v_scale.ptr + seq.kv_h.to(tl.int64) * a.pages.v_scale.stride_h)
        part_tile, lse = normalized(acc, l, m)
        whole, whole_l, whole_m = add_in_order(whole, whole_l, whole_m, part_tile, lse)
    return whole, whole_l, whole_m


@triton.jit
def online_softmax(s_tile, unit, unit_tile, bias_tile, state, MAY_BE_EMPTY: tl.constexpr):
    """Weights of a tile under the running maximum, which they may raise; the state so far, rescaled to it."""
    acc, l, m = state
    new_m = tl.maximum(m, tl.max(s_tile, 1) * unit)
    shift = new_m
    if MAY_BE_EMPTY:
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)  # a row that has seen nothing yet
    p_tile = tt.exponential(s_tile * unit_tile - shift[:, None], bias_tile)
    rescale = tt.exponential(m - shift, bias_tile)
    return p_tile, acc * rescale[:, None], l * rescale + tl.sum(p_tile, 1), new_m


@triton.jit
def finish(a, heads, state, C: tl.constexpr):
    """Normalise: the sink is added to the denominator, an empty row becomes (0, -inf)."""
    acc, l, m = state
    if a.bias is None and C.SPAN == 0:
        m *= tt.LN2  # from units of log 2
    if a.sinks_ptr is not None and not C.SPLIT:
        acc, l, m = add_sink(acc, l, m, tl.load(a.sinks_ptr + heads).to(tl.float32))
    out_tile, lse = normalized(acc, l, m)
    if C.DROPOUT:
        out_tile *= a.keep_scale
    return out_tile, lse


@triton.jit
def forward_kernel(a, k_desc, v_desc, C: tl.constexpr):
    desc = (k_desc, v_desc)
    split, m0, seq = locate(a, C)
    if m0 >= seq.len_q * C.PACK:
        return
    if C.CAREFUL:
        if tl.load(a.flags_ptr + tl.program_id(0)) == 0:
            return
    rows = m0 + tl.arange(0, C.BLOCK_M)
    row_ok = rows < seq.len_q * C.PACK
    # packed rows are (query, head of the group), heads running fastest
    q = rows // C.PACK
    heads = seq.h
    if C.PACK > 1:
        heads = seq.h + rows % C.PACK
        seq = SeqInfo(seq.b, heads[:, None], seq.kv_h, seq.row, seq.q_start, seq.k_start, seq.len_q, seq.len_k)
    out_at = tt.base(Head(a.out, None, seq.row, heads, seq.q_start))
    if C.PACK > 1:
        out_at = out_at[:, None]
    queries = Head(a.q, None, seq.row, heads, seq.q_start)
    if C.REST:
        q_tile = pg.load_in_two(queries, q, row_ok, C)  # [M, BLOCK_D], [M, REST]
    else:
        q_tile = tt.load_resident(a, queries, q, row_ok, C.D, C.BLOCK_D, C)  # [M, D]

    first = m0 // C.PACK
    last = tl.minimum((m0 + C.BLOCK_M - 1) // C.PACK + 1, seq.len_q)
    tile = QueryTile(q_tile, q, first, last, None, None, None)
    if C.LISTED:
        row = wk.list_row(a, seq, seq.q_start, m0 // C.BLOCK_M, C.BLOCK_M, C)
        listed = wk.load_listed(a, seq, row, q, False, C)
        WHOLE: tl.constexpr = mp.CAREFUL if C.CAREFUL and a.bias is not None else mp.FULL
        acc, l, m = stream_listed(a, seq, desc, tile, empty_state(C), listed, False, WHOLE, C)
        if not C.ALL_FULL:
            PART: tl.constexpr = mp.CAREFUL if C.CAREFUL else mp.MASKED
            acc, l, m = stream_listed(a, seq, desc, tile, (acc, l, m), listed, True, PART, C)
        if not (C.CAREFUL or C.ALL_FULL):  # infinite perhaps because of a value that nobody sees
            tl.store(a.flags_ptr + tl.program_id(0), tt.any_infinite(acc).to(tl.int32))
    else:
        lo, hi, full_lo, full_hi = mp.key_bounds(a.mask, seq, first, last, C)
        if C.SPAN > 0:
            acc, l, m = fixed_parts(a, seq, tile, split, lo, hi, C)
        else:
            if C.SPLIT:
                chunk = tl.cdiv(tl.cdiv(tl.maximum(hi - lo, 0), C.BLOCK_N) + 1, a.splits) * C.BLOCK_N
                start = lo // C.BLOCK_N * C.BLOCK_N + split * chunk
                lo = tl.maximum(lo, start)
                hi = tl.minimum(hi, start + chunk)
                full_lo = tl.maximum(full_lo, start)
                full_hi = tl.minimum(full_hi, start + chunk)
            full, partial = mp.spans(lo, hi, full_lo, full_hi, C.BLOCK_N)
            state = stream_keys(a, seq, desc, tile, empty_state(C), full, mp.FULL, C)
            acc, l, m = stream_keys(a, seq, desc, tile, state, partial, mp.MASKED, C)
            if a.bias is not None:
                if tt.any_infinite(acc):  # perhaps because of a value that the bias hides: once more, with care
                    acc, l, m = stream_keys(a, seq, desc, tile, empty_state(C), mp.whole_span(partial), mp.CAREFUL, C)

    if C.PAGES.SCALED and not C.PAGES.PER_TOKEN and C.SPAN == 0:
        acc *= tl.load(a.pages.v_scale.ptr + seq.kv_h.to(tl.int64) * a.pages.v_scale.stride_h)
    out_tile, lse = finish(a, heads, (acc, l, m), C)
    out_row = seq.row
    if C.SPLIT:
        out_row += split * (1 if C.VARLEN else a.batch)
        out_at += split.to(tl.int64) * (1 if C.VARLEN else a.batch) * a.out.stride_b
    tt.store_rows(out_at, a.out, q, row_ok, out_tile, C.DV, C.BLOCK_DV, C)
    lse_at = a.lse_ptr + (out_row.to(tl.int64) * a.heads + heads) * a.len_q + seq.q_start + q
    tl.store(lse_at, lse, mask=row_ok)
