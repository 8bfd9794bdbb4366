"""The forward kernel: one program for each tile of queries, keys streamed through it.

    over keys [0, n):   acc = Σ exp2(x - m) v,   l = Σ exp2(x - m),   m = max x        (x: scores in units of log 2)

The keys of a tile fall into tiles that every query sees, where no mask is evaluated, and boundary tiles on both sides of them.
The order of keys does not matter, so one loop takes the former and one the latter. With SPLIT the keys are cut into `splits`
chunks and partial (out, lse) pairs are written.

With SPAN the bits of a row follow from the row alone: one tile serves every number of rows, its keys come in order, in parts that
begin at multiples of SPAN. Parts are merged in order, here or, with SPLIT, by the merge kernel, however many programs share them:
the arithmetic is the same. What a row does not see of a tile leaves its state as it is, and tiles that all rows see give the same
bits with a mask and without, for no sum leaves the compiler a choice of what is fused.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

import tilewise.backends.gpu.paged as pg
import tilewise.backends.gpu.pairs as pr
import tilewise.backends.gpu.program as mp
import tilewise.backends.gpu.tile as tt
import tilewise.backends.gpu.walk as wk
from tilewise.backends.gpu.merge import add_in_order, add_sink, normalized, part_of
from tilewise.backends.gpu.structs import Head, PartsAt, QueryTile, SeqInfo


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
    acc = pg.empty_sums(C)
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
        acc, l, m = gap_or_step(a, seq, place, tile, (acc, l, m), n, MODE, C)
    return acc, l, m


@triton.jit
def gap_or_step(a, seq, desc, tile, state, n, MODE: tl.constexpr, C: tl.constexpr):
    """One tile of keys, unless nobody sees any of it."""
    acc, l, m = state
    if MODE != mp.FULL and C.MASK.has_gaps:
        k = n + tl.arange(0, C.BLOCK_N)
        ok = mp.allowed(a.mask, seq, tile.q[:, None], k[None, :], C)
        if mp.any_allowed(ok):
            acc, l, m = keys_step(a, seq, desc, tile, (acc, l, m), n, (ok, None, None), MODE, C)
    else:
        acc, l, m = keys_step(a, seq, desc, tile, (acc, l, m), n, (None, None, None), MODE, C)
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
    if C.PAGED:
        more = None
        if C.REST:
            more = pg.load_pages(a, keys, n, exist, C.BLOCK_D, C.D - C.BLOCK_D, C.REST, C)  # [N, REST]
        s_tile = pg.product(a, tile.q_tile, k_tile, more, C)  # [M, N] fp32
        factors = pr.unit_of(a, C)
    else:
        s_tile, factors = tt.product(tile.q_tile, k_tile, C)  # [M, N] fp32
    if C.PAGES.Q_FACTORS:
        factors = tile.factors
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
    MAY_BE_EMPTY: tl.constexpr = MODE != mp.FULL or not C.FOLD or C.SPAN > 0
    p_tile, acc, l, m = online_softmax(s_tile, unit, unit_tile, bias_tile, state, MAY_BE_EMPTY, C)
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
    if C.PAGED:
        scale = None
        if C.PAGES.PER_TOKEN:
            scale = pg.load_scale(a, a.pages.v_scale, values, n, seen, C)
        acc = pg.add_values(a, p_tile, v_tile, scale, acc, C)  # [M, DV]
    else:
        acc = tt.dot(p_tile, v_tile, acc, C)  # [M, DV]
    return acc, l, m


@triton.jit
def fixed_parts(a, seq, tile, at, split, bounds, C: tl.constexpr):
    """The parts that are this program's, of the keys that the tile sees: merged in order, the maximum in natural units."""
    lo, hi, full_lo, full_hi = bounds
    first = lo // C.SPAN
    past = tl.maximum(tl.cdiv(hi, C.SPAN), first)
    if C.SPLIT:
        for part in range(split, a.pages.parts, a.splits):  # without a key
            if (part < first) | (part >= past):
                tl.store(at.lse + part * at.lses, tl.full([C.BLOCK_M], float("-inf"), tl.float32), mask=at.ok)
        parts = past - first
        past = first + (split + 1) * parts // a.splits
        first += split * parts // a.splits
        lo = tl.maximum(lo, first * C.SPAN)
        hi = tl.minimum(hi, past * C.SPAN)
    nothing, whole_l, whole_m = empty_state(C)
    whole, whole_l = pg.whole_sums(a, nothing, whole_l, C)
    if a.bias is not None:
        for part in range(first, past):
            start = part * C.SPAN
            _, span = mp.spans(tl.maximum(lo, start), tl.minimum(hi, start + C.SPAN), 0, 0, C.BLOCK_N)
            acc, l, m = stream_keys(a, seq, (None, None), tile, empty_state(C), span, mp.MASKED, C)
            if tt.any_infinite(acc):  # perhaps because of a value that the bias hides: once more, with care
                acc, l, m = stream_keys(a, seq, (None, None), tile, empty_state(C), span, mp.CAREFUL, C)
            whole, whole_l, whole_m = end_part(a, seq, at, (acc, l, m), (whole, whole_l, whole_m), part, C)
    else:
        acc, l, m = empty_state(C)
        full, partial = mp.spans(lo, hi, full_lo, full_hi, C.BLOCK_N)
        for side in range(2 if C.FOLD else 1):  # boundary tiles, those that all rows see, boundary tiles
            start = tl.where(side == 0, partial[0], partial[2])
            end = tl.where(side == 0, partial[1], partial[3])
            if not C.FOLD:
                start, end = partial[0], partial[3]
            state = (acc, l, m, whole, whole_l, whole_m)
            acc, l, m, whole, whole_l, whole_m = stream_parts(a, seq, tile, at, state, start, end, mp.MASKED, C)
            if C.FOLD:
                start = tl.where(side == 0, full[0], full[1])
                state = (acc, l, m, whole, whole_l, whole_m)
                acc, l, m, whole, whole_l, whole_m = stream_parts(a, seq, tile, at, state, start, full[1], mp.FULL, C)
        if (partial[3] > partial[0]) & (tl.cdiv(partial[3], C.BLOCK_N) * C.BLOCK_N % C.SPAN != 0):
            part = (partial[3] - 1) // C.SPAN
            whole, whole_l, whole_m = end_part(a, seq, at, (acc, l, m), (whole, whole_l, whole_m), part, C)
    return whole, whole_l, whole_m


@triton.jit
def stream_parts(a, seq, tile, at, state, start, end, MODE: tl.constexpr, C: tl.constexpr):
    """Stream the keys [start, end) through the tile of queries. One loop takes all parts: the first tiles of a part are on their
    way while the part before it ends."""
    acc, l, m, whole, whole_l, whole_m = state
    if start < end:  # else not even a page is asked for
        numbers = pg.page_numbers(a, seq, start, C)
        for i in range(tl.cdiv(end - start, C.BLOCK_N)):
            n = start + i * C.BLOCK_N
            place = (numbers, numbers)
            numbers = pg.page_numbers(a, seq, n + C.BLOCK_N, C)
            acc, l, m = gap_or_step(a, seq, place, tile, (acc, l, m), n, MODE, C)
            if (n + C.BLOCK_N) % C.SPAN == 0:
                whole, whole_l, whole_m = end_part(a, seq, at, (acc, l, m), (whole, whole_l, whole_m), n // C.SPAN, C)
                acc, l, m = empty_state(C)
    return acc, l, m, whole, whole_l, whole_m


@triton.jit
def end_part(a, seq, at, state, whole, part, C: tl.constexpr):
    """Add a part to those before it or, with SPLIT, write it."""
    acc, l, m = state
    if a.bias is None:
        m *= tt.LN2  # from units of log 2
    acc, l = pg.whole_sums(a, acc, l, C)
    if C.PAGES.SCALED and not C.PAGES.PER_TOKEN:
        acc *= pg.head_scale(a.pages.v_scale, seq.kv_h)
    part_tile, lse = part_of(acc, l, m)
    if C.SPLIT:
        out_at = at.out + tl.cast(part, tl.int64) * tt.batch_rows(a, C) * a.out.stride_b
        tt.store_rows(out_at, a.out, at.q, at.ok, part_tile, C.DV, C.BLOCK_DV, C)
        tl.store(at.lse + part * at.lses, lse, mask=at.ok)
        return whole
    else:
        return add_in_order(whole[0], whole[1], whole[2], part_tile, lse)


@triton.jit
def online_softmax(s_tile, unit, unit_tile, bias_tile, state, MAY_BE_EMPTY: tl.constexpr, C: tl.constexpr):
    """Weights of a tile under the running maximum, which they may raise; the state so far, rescaled to it. Where the bits count,
    the compiler has no choice of what is fused."""
    acc, l, m = state
    new_m = tl.maximum(m, tl.max(s_tile, 1) * unit)
    shift = new_m
    if MAY_BE_EMPTY:
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)  # a row that has seen nothing yet
    below = shift
    if C.PAGES.Q_FACTORS:
        below -= pr.LIFT
    rescale = tt.exponential(m - shift, bias_tile)
    if C.SPAN > 0:
        p_tile = tt.exponential(tl.fma(s_tile, unit_tile, -below[:, None]), bias_tile)
        return p_tile, pg.rescaled(acc, rescale, C), tl.fma(l, rescale, tl.sum(p_tile, 1)), new_m
    else:
        p_tile = tt.exponential(s_tile * unit_tile - below[:, None], bias_tile)
        return p_tile, pg.rescaled(acc, rescale, C), l * rescale + tl.sum(p_tile, 1), new_m


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
    if C.EARLY:
        gdc_launch_dependents()
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

    factors = None
    if C.PAGES.PAIRS != "":
        q_tile, factors = pr.queries(q_tile, C)

    first = m0 // C.PACK
    last = tl.minimum((m0 + C.BLOCK_M - 1) // C.PACK + 1, seq.len_q)
    tile = QueryTile(q_tile, q, first, last, None, None, None, factors)
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
            lse_at = a.lse_ptr + (seq.row.to(tl.int64) * a.heads + heads) * a.len_q + seq.q_start + q
            lses = tl.cast(a.heads, tl.int64) * a.len_q * tt.batch_rows(a, C)
            at = PartsAt(out_at, lse_at, lses, q, row_ok)
            acc, l, m = fixed_parts(a, seq, tile, at, split, (lo, hi, full_lo, full_hi), C)
            if C.SPLIT:
                return
        else:
            if C.SPLIT:
                tiles = tl.maximum(tl.cdiv(hi, C.BLOCK_N) - lo // C.BLOCK_N, 0)
                chunk = tl.cdiv(tiles, a.splits) * C.BLOCK_N
                start = lo // C.BLOCK_N * C.BLOCK_N + split * chunk
                lo = tl.maximum(lo, start)
                hi = tl.minimum(hi, start + chunk)
                full_lo = tl.maximum(full_lo, start)
                full_hi = tl.minimum(full_hi, start + chunk)
            full, partial = mp.spans(lo, hi, full_lo, full_hi, C.BLOCK_N)
            if C.PAGED:  # where there is no tile not even a page is asked for: programs of few tiles wait for each number
                if C.SPLIT:  # beside one or two whole tiles the cut ones are not worth a loop of their own
                    few = (mp.span_length(partial, C.BLOCK_N) > 0) & (mp.span_length(full, C.BLOCK_N) <= 2)
                    full, partial = mp.spans(lo, hi, full_lo, tl.where(few, full_lo, full_hi), C.BLOCK_N)
                acc, l, m = empty_state(C)
                if mp.span_length(full, C.BLOCK_N) > 0:
                    acc, l, m = stream_keys(a, seq, desc, tile, (acc, l, m), full, mp.FULL, C)
                if mp.span_length(partial, C.BLOCK_N) > 0:
                    acc, l, m = stream_keys(a, seq, desc, tile, (acc, l, m), partial, mp.MASKED, C)
            else:
                state = stream_keys(a, seq, desc, tile, empty_state(C), full, mp.FULL, C)
                acc, l, m = stream_keys(a, seq, desc, tile, state, partial, mp.MASKED, C)
            if a.bias is not None:
                if tt.any_infinite(acc):  # perhaps because of a value that the bias hides: once more, with care
                    acc, l, m = stream_keys(a, seq, desc, tile, empty_state(C), mp.whole_span(partial), mp.CAREFUL, C)

    if C.SPAN == 0:
        acc, l = pg.whole_sums(a, acc, l, C)
    if C.PAGES.SCALED and not C.PAGES.PER_TOKEN and C.SPAN == 0:
        acc *= pg.head_scale(a.pages.v_scale, seq.kv_h)
    out_tile, lse = finish(a, heads, (acc, l, m), C)
    out_row = seq.row
    if C.SPLIT:
        out_row += split * (1 if C.VARLEN else a.batch)
        out_at += split.to(tl.int64) * (1 if C.VARLEN else a.batch) * a.out.stride_b
    tt.store_rows(out_at, a.out, q, row_ok, out_tile, C.DV, C.BLOCK_DV, C)
    lse_at = a.lse_ptr + (out_row.to(tl.int64) * a.heads + heads) * a.len_q + seq.q_start + q
    tl.store(lse_at, lse, mask=row_ok)
