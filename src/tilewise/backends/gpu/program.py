"""The MaskProgram on the device: which keys a tile of queries can see, which it sees wholly, and the tile's own mask.

The bands and ranges of a term have one interval form: lo <= k - q <= hi and start <= k < end. It gives the exact hull of a tile's
keys, so EMPTY tiles are never visited and FULL ones never masked. Literals that read data (documents, blocks, dense, trees) say
nothing about intervals: their tiles are evaluated one by one, but for the keys before a tree. `C.MASK` (structs.py) says which
literals there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNBOUNDED = tl.constexpr(2**30)
FULL = tl.constexpr(0)
MASKED = tl.constexpr(1)
CAREFUL = tl.constexpr(2)
"""How a tile is processed: without a mask, under the mask, and also without what only a bias hides."""


@triton.jit
def narrow(mask, seq, interval, C: tl.constexpr, t: tl.constexpr, i: tl.constexpr):
    """The interval form of term t, narrowed by its literal i."""
    lo, hi, start, end = interval
    KIND: tl.constexpr = C.MASK.terms[t].literals[i].kind
    I: tl.constexpr = C.MASK.terms[t].literals[i].ints
    T: tl.constexpr = C.MASK.terms[t].literals[i].tensors
    if KIND.is_band:
        shift = 0
        if KIND.is_bottom_right:
            shift = seq.len_k - seq.len_q
        if KIND.is_offset:
            shift = tl.load(mask.tensors[T] + seq.b)
        new_lo = mask.ints[I]
        new_hi = mask.ints[I + 1]
        # an unbounded side stays where it is, so that no shift can overflow
        lo = tl.maximum(lo, tl.where(new_lo <= -UNBOUNDED, -UNBOUNDED, new_lo + shift))
        hi = tl.minimum(hi, tl.where(new_hi >= UNBOUNDED, UNBOUNDED, new_hi + shift))
    elif KIND.is_range:
        start = tl.maximum(start, mask.ints[I])
        end = tl.minimum(end, mask.ints[I + 1])
    elif KIND.is_padding:
        start = tl.maximum(start, tl.load(mask.tensors[T] + seq.b))
        end = tl.minimum(end, tl.load(mask.tensors[T + 1] + seq.b))
    elif KIND.is_nothing:
        end = start
    return lo, hi, start, end


@triton.jit
def term_interval(mask, seq, C: tl.constexpr, t: tl.constexpr):
    """lo, hi, start, end of term t: its bands and ranges, intersected."""
    interval = (-UNBOUNDED, UNBOUNDED, 0, seq.len_k)
    LITERALS: tl.constexpr = len(C.MASK.terms[t].literals)
    for i in tl.static_range(LITERALS):
        interval = narrow(mask, seq, interval, C, t, i)
    return interval


@triton.jit
def longer(bounds, first, last):
    """The longer one of two ranges."""
    better = last - first > bounds[1] - bounds[0]
    return tl.where(better, first, bounds[0]), tl.where(better, last, bounds[1])


@triton.jit
def key_bounds(mask, seq, m0, m1, C: tl.constexpr):
    """For queries [m0, m1): the hull [lo, hi) of the keys any of them sees, and a range [full_lo, full_hi) all of them see."""
    TERMS: tl.constexpr = len(C.MASK.terms)
    if TERMS == 0:
        return 0, seq.len_k, 0, seq.len_k
    hull_lo = seq.len_k
    hull_hi = seq.len_k * 0
    full = (seq.len_k * 0, seq.len_k * 0)
    for t in tl.static_range(TERMS):
        lo, hi, start, end = term_interval(mask, seq, C, t)
        first = tl.maximum(m0 + lo, start)
        last = tl.minimum(m1 + hi, end)
        some = (lo <= hi) & (first < last)
        hull_lo = tl.where(some, tl.minimum(hull_lo, first), hull_lo)
        hull_hi = tl.where(some, tl.maximum(hull_hi, last), hull_hi)
        if not C.MASK.terms[t].reads_data:
            full = longer(full, tl.maximum(m1 - 1 + lo, start), tl.minimum(m0 + hi + 1, end))
        elif C.MASK.terms[t].tree >= 0:  # keys before the tree that all its rows see
            rows = tl.minimum(m0 + tl.arange(0, C.BLOCK_M), m1 - 1)
            firsts, pasts, tree = tree_ends(mask, seq, rows, C, t, C.MASK.terms[t].tree)
            past = tree + tl.minimum(tl.min(pasts, 0), 0)
            full = longer(full, tl.maximum(tree + tl.max(firsts, 0), start), tl.minimum(past, end))
    return hull_lo, hull_hi, full[0], full[1]


@triton.jit
def query_bounds(mask, seq, n0, n1, C: tl.constexpr):
    """For keys [n0, n1): the hull of the queries that see any of them, and a range of queries that see them all."""
    TERMS: tl.constexpr = len(C.MASK.terms)
    if TERMS == 0:
        return 0, seq.len_q, 0, seq.len_q
    hull_lo = seq.len_q
    hull_hi = seq.len_q * 0
    full = (seq.len_q * 0, seq.len_q * 0)
    for t in tl.static_range(TERMS):
        lo, hi, start, end = term_interval(mask, seq, C, t)
        k0 = tl.maximum(n0, start)
        k1 = tl.minimum(n1, end)
        first = tl.maximum(k0 - hi, 0)
        last = tl.minimum(k1 - lo, seq.len_q)
        some = (lo <= hi) & (k0 < k1) & (first < last)
        hull_lo = tl.where(some, tl.minimum(hull_lo, first), hull_lo)
        hull_hi = tl.where(some, tl.maximum(hull_hi, last), hull_hi)
        if not C.MASK.terms[t].reads_data:
            first = tl.maximum(n1 - 1 - hi, 0)
            whole = (start <= n0) & (n1 <= end)
            full = longer(full, first, tl.where(whole, tl.minimum(n0 - lo + 1, seq.len_q), first))
    return hull_lo, hull_hi, full[0], full[1]


@triton.jit
def seen_keys(mask, seq, m0, m1, k, C: tl.constexpr):
    """Which of the keys `k` some query in [m0, m1) sees; exact when no literal reads data."""
    TERMS: tl.constexpr = len(C.MASK.terms)
    if TERMS == 0:
        return k < seq.len_k
    seen = k < 0
    for t in tl.static_range(TERMS):
        lo, hi, start, end = term_interval(mask, seq, C, t)
        seen |= (lo <= hi) & (k >= tl.maximum(m0 + lo, start)) & (k < tl.minimum(m1 + hi, end))
    return seen


@triton.jit
def documents_equal(mask, seq, q, k, C: tl.constexpr, t: tl.constexpr, i: tl.constexpr):
    """Documents over the tile of q × k, not negated."""
    T: tl.constexpr = C.MASK.terms[t].literals[i].tensors
    S: tl.constexpr = C.MASK.terms[t].literals[i].strides
    # packed ids lie at the sequence's tokens, others in the row of the batch
    row = seq.row.to(tl.int64)
    q_ids = tl.load(mask.tensors[T] + row * mask.strides[S] + seq.q_start + q, mask=q < seq.len_q, other=0)
    k_ids = tl.load(mask.tensors[T + 1] + row * mask.strides[S + 1] + seq.k_start + k, mask=k < seq.len_k, other=0)
    return q_ids == k_ids


@triton.jit
def selected_block(mask, seq, q, k, C: tl.constexpr, t: tl.constexpr, i: tl.constexpr):
    """Does the list of a query's block name the key's block? Over the tile of q × k, not negated."""
    I: tl.constexpr = C.MASK.terms[t].literals[i].ints
    S: tl.constexpr = C.MASK.terms[t].literals[i].strides
    row = q // mask.ints[I]
    column = k // mask.ints[I + 1]
    count = mask.strides[S + 2]
    at = mask.tensors[C.MASK.terms[t].literals[i].tensors] + row.to(tl.int64) * count
    at += seq.b.to(tl.int64) * mask.strides[S] + (seq.h // mask.ints[I + 2]).to(tl.int64) * mask.strides[S + 1]
    exists = (q < seq.len_q) & (row < mask.strides[S + 3])
    holds = (q + k) < 0
    for entry in range(count):
        holds |= tl.load(at + entry, mask=exists, other=-1) == column
    return holds


@triton.jit
def table_entry(mask, seq, q, k, C: tl.constexpr, t: tl.constexpr, i: tl.constexpr):
    """Blocks or dense over the tile of q × k, not negated; what lies beyond a table is not seen."""
    KIND: tl.constexpr = C.MASK.terms[t].literals[i].kind
    I: tl.constexpr = C.MASK.terms[t].literals[i].ints
    S: tl.constexpr = C.MASK.terms[t].literals[i].strides
    at = mask.tensors[C.MASK.terms[t].literals[i].tensors]
    at += seq.b.to(tl.int64) * mask.strides[S] + seq.h.to(tl.int64) * mask.strides[S + 1]
    inside = (q < seq.len_q) & (k < seq.len_k)
    if KIND.is_blocks:
        row = q // mask.ints[I]
        column = k // mask.ints[I + 1]
        at += row.to(tl.int64) * mask.strides[S + 2] + column
        inside &= (row < mask.strides[S + 3]) & (column < mask.strides[S + 2])
    else:
        at += q.to(tl.int64) * mask.strides[S + 2] + k * mask.strides[S + 3]
    return tl.load(at, mask=inside, other=0) != 0


@triton.jit
def tree_ends(mask, seq, q, C: tl.constexpr, t: tl.constexpr, i: tl.constexpr):
    """From and up to which key before the tree queries q see, counted from the tree; and where the tree begins."""
    I: tl.constexpr = C.MASK.terms[t].literals[i].ints
    T: tl.constexpr = C.MASK.terms[t].literals[i].tensors
    S: tl.constexpr = C.MASK.terms[t].literals[i].strides
    size = mask.ints[I + 2]
    slot = q - (seq.len_q - size)
    b = seq.b.to(tl.int64)
    inside = (slot >= 0) & (q < seq.len_q)
    first = tl.load(mask.tensors[T + 1] + b * mask.strides[S + 1] + slot, mask=inside, other=0)
    past = tl.load(mask.tensors[T + 2] + b * mask.strides[S + 2] + slot, mask=inside, other=0)
    # a row before the tree has the band of its slot
    first = tl.where(slot >= 0, first, slot + mask.ints[I])
    past = tl.where(slot >= 0, past, slot + mask.ints[I + 1] + 1)
    return first, past, seq.len_k - size


@triton.jit
def tree_literal(mask, seq, q, k, C: tl.constexpr, t: tl.constexpr, i: tl.constexpr):
    """Is a key before the tree, and not out of a band, or an ancestor in it? Over the tile of q × k."""
    I: tl.constexpr = C.MASK.terms[t].literals[i].ints
    S: tl.constexpr = C.MASK.terms[t].literals[i].strides
    size = mask.ints[I + 2]
    first, past, tree = tree_ends(mask, seq, q, C, t, i)
    row = q - (seq.len_q - size)
    column = k - tree
    at = mask.tensors[C.MASK.terms[t].literals[i].tensors] + seq.b.to(tl.int64) * mask.strides[S] + row * size + column
    inside = (row >= 0) & (q < seq.len_q) & (column >= 0) & (k < seq.len_k)
    among = tl.load(at, mask=inside, other=0) != 0
    return tl.where(column >= 0, among, (column >= first) & (column < past))


@triton.jit
def data_literal(mask, seq, q, k, C: tl.constexpr, t: tl.constexpr, i: tl.constexpr):
    """A literal that reads data, over the tile of q × k (index tiles that broadcast against each other)."""
    KIND: tl.constexpr = C.MASK.terms[t].literals[i].kind
    if KIND.is_documents:
        holds = documents_equal(mask, seq, q, k, C, t, i)
    elif KIND.is_selected:
        holds = selected_block(mask, seq, q, k, C, t, i)
    elif KIND.is_tree:
        holds = tree_literal(mask, seq, q, k, C, t, i)
    else:
        holds = table_entry(mask, seq, q, k, C, t, i)
    if KIND.negated:
        holds = ~holds
    return holds


@triton.jit
def inside(q, k, interval, len_q):
    """A term's interval form over the tile q × k: two bounds for each row of the tile, two comparisons for each element."""
    lo, hi, start, end = interval
    if q.shape[0] == 1:  # the rows are keys
        low = tl.maximum(k - hi, 0)
        high = tl.where((k >= start) & (k < end), tl.minimum(k - lo, len_q - 1), -1)
        return (q >= low) & (q <= high)
    else:
        low = tl.maximum(q + lo, start)
        high = tl.where(q < len_q, tl.minimum(q + hi, end - 1), -1)
        return (k >= low) & (k <= high)


@triton.jit
def term_tile(mask, seq, q, k, C: tl.constexpr, t: tl.constexpr):
    """Term t over the tile q × k."""
    result = inside(q, k, term_interval(mask, seq, C, t), seq.len_q)
    LITERALS: tl.constexpr = len(C.MASK.terms[t].literals)
    for i in tl.static_range(LITERALS):
        if C.MASK.terms[t].literals[i].kind.reads_data:
            result &= data_literal(mask, seq, q, k, C, t, i)
    return result


@triton.jit
def allowed(mask, seq, q, k, C: tl.constexpr):
    """The mask over the tile q × k; keys beyond the sequence are never allowed."""
    TERMS: tl.constexpr = len(C.MASK.terms)
    if TERMS == 0:
        return inside(q, k, (-UNBOUNDED, UNBOUNDED, 0, seq.len_k), seq.len_q)
    else:
        result = term_tile(mask, seq, q, k, C, 0)
        for t in tl.static_range(1, TERMS):
            result |= term_tile(mask, seq, q, k, C, t)
        return result


@triton.jit
def spans(lo, hi, full_lo, full_hi, BLOCK: tl.constexpr):
    """Cut [lo, hi) into the tiles inside [full_lo, full_hi) and the boundary tiles on both sides of them.

    Tiles start at multiples of BLOCK. A span (lo, gap_lo, gap_hi, hi) is [lo, gap_lo) followed by [gap_hi, hi).
    """
    lo = lo // BLOCK * BLOCK
    hi = tl.maximum(hi, lo)
    full_lo = tl.minimum(tl.maximum(tl.cdiv(full_lo, BLOCK) * BLOCK, lo), hi)
    full_hi = tl.maximum(full_hi // BLOCK * BLOCK, full_lo)
    # with no full tile, [lo, hi) is one run: a tile cut by full_lo must not be met twice
    none = full_hi <= full_lo
    full_lo = tl.where(none, lo, full_lo)
    full_hi = tl.where(none, lo, full_hi)
    return (full_lo, full_hi, full_hi, full_hi), (lo, full_lo, full_hi, hi)


@triton.jit
def whole_span(partial):
    """All tiles between the first and the last of the boundary tiles, as one span."""
    return partial[0], partial[0], partial[0], partial[3]


@triton.jit
def span_length(span, BLOCK: tl.constexpr):
    """Tiles in a span."""
    return (span[1] - span[0]) // BLOCK + tl.cdiv(span[3] - span[2], BLOCK)


@triton.jit
def span_start(span, i, BLOCK: tl.constexpr):
    """Where tile i of a span starts."""
    at = span[0] + i * BLOCK
    return tl.where(at < span[1], at, at + span[2] - span[1])


@triton.jit
def any_allowed(ok):
    """Is a tile of the mask not EMPTY?"""
    return tl.max(tl.max(ok.to(tl.int32), 1), 0) > 0


@triton.jit
def seen_of_tile(a, seq, tile, k, ok, bias_tile, MODE: tl.constexpr, C: tl.constexpr):
    """Which of the keys k some query of the tile sees under the mask; CAREFUL: under the mask and the bias.

    `ok` is the mask over the tile where it has been evaluated.
    """
    if MODE == CAREFUL:
        visible = bias_tile > float("-inf")
        if ok is None:
            visible &= allowed(a.mask, seq, tile.q[:, None], k[None, :], C)
        else:
            visible &= ok
        return tl.max(visible.to(tl.int32), 0) > 0
    elif C.MASK.reads_data:
        return tl.max(ok.to(tl.int32), 0) > 0
    else:
        return seen_keys(a.mask, seq, tile.first, tile.last, k, C)


@triton.jit
def seeing_of_tile(a, seq, q, k, lse, ok, bias_tile, C: tl.constexpr):
    """Which queries of the transposed tile k × q see a key at all.

    Rows that see nothing have an LSE of +inf here, unless a sink gives them a finite one: then the mask of the tile decides.
    """
    seeing = lse < float("inf")
    if a.sinks_ptr is not None:
        if ok is None:
            visible = allowed(a.mask, seq, q[None, :], k[:, None], C)
        else:
            visible = ok
        if bias_tile is not None:
            visible &= bias_tile > float("-inf")
        seeing &= tl.max(visible.to(tl.int32), 0) > 0
    return seeing
