"""The MaskProgram on the device: which keys a tile of queries can see, which it sees wholly, and the tile's own mask.

A term's bands and ranges meet in one interval form: lo <= k - q <= hi and start <= k < end. From it the hull of a tile's keys
is exact, so EMPTY tiles are never visited and FULL ones never masked. Letters that read tensors ("data") say nothing about
intervals: their tiles are looked at one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNBOUNDED = tl.constexpr(2**30)


@triton.constexpr_function
def literals(structure):
    """(letter, first int, first tensor, first stride, opens its term, closes its term, term is intervals only)."""
    ints = {"b": 2, "t": 2, "o": 2, "r": 2, "s": 2, "S": 2}
    tensors = {"o": 1, "k": 2, "d": 2, "D": 2, "s": 1, "S": 1, "e": 1, "E": 1}
    strides = {"d": 2, "D": 2, "s": 3, "S": 3, "e": 4, "E": 4}
    result, i, t, s = [], 0, 0, 0
    for term in structure.split("|"):
        for j, letter in enumerate(term):
            result.append((letter, i, t, s, j == 0, j == len(term) - 1, not set(term) & set("dDsSeE")))
            i, t, s = i + ints.get(letter, 0), t + tensors.get(letter, 0), s + strides.get(letter, 0)
    return result


@triton.constexpr_function
def count(structure):
    return len(literals(structure))


@triton.constexpr_function
def letter(structure, i):
    return literals(structure)[i][0]


@triton.constexpr_function
def int_at(structure, i):
    return literals(structure)[i][1]


@triton.constexpr_function
def tensor_at(structure, i):
    return literals(structure)[i][2]


@triton.constexpr_function
def stride_at(structure, i):
    return literals(structure)[i][3]


@triton.constexpr_function
def opens(structure, i):
    return literals(structure)[i][4]


@triton.constexpr_function
def closes(structure, i):
    return literals(structure)[i][5]


@triton.constexpr_function
def intervals_only(structure, i):
    return literals(structure)[i][6]


@triton.constexpr_function
def reads_data(structure, i):
    return literals(structure)[i][0] in "dDsSeE"


@triton.constexpr_function
def has_data(structure):
    """Does any letter read tensors the size of the sequence?"""
    return bool(set(structure) & set("dDsSeE"))


@triton.constexpr_function
def has_gaps(structure):
    """May a tile inside the hull be EMPTY? Then tiles are guarded."""
    return bool(set(structure) & set("dDsSeE|"))


@triton.constexpr_function
def has_alternatives(structure):
    return "|" in structure


@triton.jit
def narrow(mask, seq, lo, hi, start, end, C: tl.constexpr, i: tl.constexpr):
    """The interval form of a term so far, narrowed by literal i."""
    LETTER: tl.constexpr = letter(C.STRUCTURE, i)
    I: tl.constexpr = int_at(C.STRUCTURE, i)
    T: tl.constexpr = tensor_at(C.STRUCTURE, i)
    if LETTER == "b" or LETTER == "t" or LETTER == "o":
        shift = 0
        if LETTER == "b":
            shift = seq.len_k - seq.len_q
        if LETTER == "o":
            shift = tl.load(mask.tensors[T] + seq.b)
        new_lo = mask.ints[I]
        new_hi = mask.ints[I + 1]
        # an unbounded side stays where it is, so that no shift can overflow
        lo = tl.maximum(lo, tl.where(new_lo <= -UNBOUNDED, -UNBOUNDED, new_lo + shift))
        hi = tl.minimum(hi, tl.where(new_hi >= UNBOUNDED, UNBOUNDED, new_hi + shift))
    elif LETTER == "r":
        start = tl.maximum(start, mask.ints[I])
        end = tl.minimum(end, mask.ints[I + 1])
    elif LETTER == "k":
        start = tl.maximum(start, tl.load(mask.tensors[T] + seq.b))
        end = tl.minimum(end, tl.load(mask.tensors[T + 1] + seq.b))
    elif LETTER == "0":
        end = start
    return lo, hi, start, end


@triton.jit
def key_bounds(mask, seq, m0, m1, C: tl.constexpr):
    """For queries [m0, m1): the hull [lo, hi) of the keys any of them sees, and a range [full_lo, full_hi) all of them see."""
    if count(C.STRUCTURE) == 0:
        return 0, seq.len_k, 0, seq.len_k
    hull_lo = seq.len_k
    hull_hi = seq.len_k * 0
    full_lo = hull_hi
    full_hi = hull_hi
    lo = -UNBOUNDED
    hi = UNBOUNDED
    start = 0
    end = seq.len_k
    for i in tl.static_range(count(C.STRUCTURE)):
        if opens(C.STRUCTURE, i):
            lo = -UNBOUNDED
            hi = UNBOUNDED
            start = 0
            end = seq.len_k
        lo, hi, start, end = narrow(mask, seq, lo, hi, start, end, C, i)
        if closes(C.STRUCTURE, i):
            first = tl.maximum(m0 + lo, start)
            last = tl.minimum(m1 + hi, end)
            some = (lo <= hi) & (first < last)
            hull_lo = tl.where(some, tl.minimum(hull_lo, first), hull_lo)
            hull_hi = tl.where(some, tl.maximum(hull_hi, last), hull_hi)
            if intervals_only(C.STRUCTURE, i):
                first = tl.maximum(m1 - 1 + lo, start)
                last = tl.minimum(m0 + hi + 1, end)
                longer = last - first > full_hi - full_lo
                full_lo = tl.where(longer, first, full_lo)
                full_hi = tl.where(longer, last, full_hi)
    return hull_lo, hull_hi, full_lo, full_hi


@triton.jit
def query_bounds(mask, seq, n0, n1, C: tl.constexpr):
    """For keys [n0, n1): the hull of the queries that see any of them, and a range of queries that see them all."""
    if count(C.STRUCTURE) == 0:
        return 0, seq.len_q, 0, seq.len_q
    hull_lo = seq.len_q
    hull_hi = seq.len_q * 0
    full_lo = hull_hi
    full_hi = hull_hi
    lo = -UNBOUNDED
    hi = UNBOUNDED
    start = 0
    end = seq.len_k
    for i in tl.static_range(count(C.STRUCTURE)):
        if opens(C.STRUCTURE, i):
            lo = -UNBOUNDED
            hi = UNBOUNDED
            start = 0
            end = seq.len_k
        lo, hi, start, end = narrow(mask, seq, lo, hi, start, end, C, i)
        if closes(C.STRUCTURE, i):
            k0 = tl.maximum(n0, start)
            k1 = tl.minimum(n1, end)
            first = tl.maximum(k0 - hi, 0)
            last = tl.minimum(k1 - lo, seq.len_q)
            some = (lo <= hi) & (k0 < k1) & (first < last)
            hull_lo = tl.where(some, tl.minimum(hull_lo, first), hull_lo)
            hull_hi = tl.where(some, tl.maximum(hull_hi, last), hull_hi)
            if intervals_only(C.STRUCTURE, i):
                first = tl.maximum(n1 - 1 - hi, 0)
                last = tl.where((start <= n0) & (n1 <= end), tl.minimum(n0 - lo + 1, seq.len_q), first)
                longer = last - first > full_hi - full_lo
                full_lo = tl.where(longer, first, full_lo)
                full_hi = tl.where(longer, last, full_hi)
    return hull_lo, hull_hi, full_lo, full_hi


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
def seen_keys(mask, seq, m0, m1, k, C: tl.constexpr):
    """Which of the keys `k` some query in [m0, m1) sees; exact when no letter reads data."""
    if count(C.STRUCTURE) == 0:
        return k < seq.len_k
    seen = k < 0
    lo = -UNBOUNDED
    hi = UNBOUNDED
    start = 0
    end = seq.len_k
    for i in tl.static_range(count(C.STRUCTURE)):
        if opens(C.STRUCTURE, i):
            lo = -UNBOUNDED
            hi = UNBOUNDED
            start = 0
            end = seq.len_k
        lo, hi, start, end = narrow(mask, seq, lo, hi, start, end, C, i)
        if closes(C.STRUCTURE, i):
            seen |= (lo <= hi) & (k >= tl.maximum(m0 + lo, start)) & (k < tl.minimum(m1 + hi, end))
    return seen


@triton.jit
def data_literal(mask, seq, q, k, C: tl.constexpr, i: tl.constexpr):
    """A literal that reads tensors, over the tile of q × k (index tiles that broadcast against each other)."""
    LETTER: tl.constexpr = letter(C.STRUCTURE, i)
    I: tl.constexpr = int_at(C.STRUCTURE, i)
    T: tl.constexpr = tensor_at(C.STRUCTURE, i)
    S: tl.constexpr = stride_at(C.STRUCTURE, i)
    q_in = q < seq.len_q
    k_in = k < seq.len_k
    if LETTER == "d" or LETTER == "D":
        # packed ids lie at the sequence's tokens, others in the row of the batch
        row = seq.row.to(tl.int64)
        q_ids = tl.load(mask.tensors[T] + row * mask.strides[S] + seq.q_start + q, mask=q_in, other=0)
        k_ids = tl.load(mask.tensors[T + 1] + row * mask.strides[S + 1] + seq.k_start + k, mask=k_in, other=0)
        same = q_ids == k_ids
        if LETTER == "D":
            same = ~same
        return same
    elif LETTER == "s" or LETTER == "S":
        at = mask.tensors[T] + seq.b.to(tl.int64) * mask.strides[S] + seq.h.to(tl.int64) * mask.strides[S + 1]
        at += (q // mask.ints[I]).to(tl.int64) * mask.strides[S + 2] + k // mask.ints[I + 1]
        there = tl.load(at, mask=q_in & k_in, other=0) != 0
        if LETTER == "S":
            there = ~there
        return there
    else:
        at = mask.tensors[T] + seq.b.to(tl.int64) * mask.strides[S] + seq.h.to(tl.int64) * mask.strides[S + 1]
        at += q.to(tl.int64) * mask.strides[S + 2] + k * mask.strides[S + 3]
        there = tl.load(at, mask=q_in & k_in, other=0) != 0
        if LETTER == "E":
            there = ~there
        return there


@triton.jit
def inside(q, k, lo, hi, start, end, len_q):
    """A term's interval form over the tile q × k: two bounds for each row of the tile, two comparisons for each element."""
    if q.shape[0] == 1:  # the rows are keys
        low = tl.maximum(k - hi, 0)
        high = tl.where((k >= start) & (k < end), tl.minimum(k - lo, len_q - 1), -1)
        return (q >= low) & (q <= high)
    else:
        low = tl.maximum(q + lo, start)
        high = tl.where(q < len_q, tl.minimum(q + hi, end - 1), -1)
        return (k >= low) & (k <= high)


@triton.jit
def allowed(mask, seq, q, k, C: tl.constexpr):
    """The mask over the tile q × k; keys beyond the sequence are never allowed."""
    lo = -UNBOUNDED
    hi = UNBOUNDED
    start = 0
    end = seq.len_k
    if count(C.STRUCTURE) == 0:
        return inside(q, k, lo, hi, start, end, seq.len_q)
    result = (q < 0) & (k < 0)
    data = (q >= 0) & (k >= 0)
    for i in tl.static_range(count(C.STRUCTURE)):
        if opens(C.STRUCTURE, i):
            data = (q >= 0) & (k >= 0)
            lo = -UNBOUNDED
            hi = UNBOUNDED
            start = 0
            end = seq.len_k
        lo, hi, start, end = narrow(mask, seq, lo, hi, start, end, C, i)
        if reads_data(C.STRUCTURE, i):
            data &= data_literal(mask, seq, q, k, C, i)
        if closes(C.STRUCTURE, i):
            term = inside(q, k, lo, hi, start, end, seq.len_q)
            if not intervals_only(C.STRUCTURE, i):
                term &= data
            if i == 0 or not has_alternatives(C.STRUCTURE):
                result = term
            else:
                result |= term
    return result


@triton.jit
def seen_of_tile(a, seq, q, k, rows, ok, bias_tile, CAREFUL: tl.constexpr, C: tl.constexpr):
    """Which keys of the tile q × k some query of it sees under the mask; CAREFUL: under the mask and the bias.

    `ok` is the mask over the tile where that was evaluated already, `rows` the range of its queries.
    """
    if CAREFUL:
        visible = bias_tile > float("-inf")
        if ok is None:
            visible &= allowed(a.mask, seq, q[:, None], k[None, :], C)
        else:
            visible &= ok
        return tl.max(visible.to(tl.int32), 0) > 0
    elif has_data(C.STRUCTURE):
        return tl.max(ok.to(tl.int32), 0) > 0
    else:
        return seen_keys(a.mask, seq, rows[0], rows[1], k, C)


@triton.jit
def seeing_of_tile(a, seq, q, k, lse, ok, bias_tile, C: tl.constexpr):
    """Which queries of the transposed tile k × q see a key at all.

    Rows that see nothing have an LSE of +inf here, unless a sink gives them a finite one: then the tile itself is looked at.
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
