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
def has_data(structure):
    """Does any letter read tensors the size of the sequence?"""
    return bool(set(structure) & set("dDsSeE"))


@triton.constexpr_function
def has_gaps(structure):
    """May a tile inside the hull be EMPTY? Then tiles are guarded."""
    return bool(set(structure) & set("dDsSeE|"))


@triton.constexpr_function
def term_has_band(structure, i):
    """Does the term that literal i closes hold a band?"""
    term = len([1 for literal in literals(structure)[: i + 1] if literal[4]]) - 1
    return bool(set(structure.split("|")[term]) & set("bto"))


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
def seen_queries(mask, seq, n0, n1, q, C: tl.constexpr):
    """Which of the queries `q` see some key in [n0, n1); exact when no letter reads data."""
    if count(C.STRUCTURE) == 0:
        return q < seq.len_q
    seen = q < 0
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
            seen |= (lo <= hi) & (k0 < k1) & (q >= k0 - hi) & (q < k1 - lo)
    return seen & (q < seq.len_q)


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
def allowed(mask, seq, q, k, C: tl.constexpr):
    """The mask over the tile q × k; keys beyond the sequence are never allowed."""
    in_reach = (k < seq.len_k) & (q < seq.len_q)
    if count(C.STRUCTURE) == 0:
        return in_reach
    result = (q < 0) & (k < 0)
    term = in_reach
    lo = -UNBOUNDED
    hi = UNBOUNDED
    start = 0
    end = seq.len_k
    for i in tl.static_range(count(C.STRUCTURE)):
        if opens(C.STRUCTURE, i):
            term = in_reach
            lo = -UNBOUNDED
            hi = UNBOUNDED
            start = 0
            end = seq.len_k
        lo, hi, start, end = narrow(mask, seq, lo, hi, start, end, C, i)
        if letter(C.STRUCTURE, i) in "dDsSeE":
            term &= data_literal(mask, seq, q, k, C, i)
        if closes(C.STRUCTURE, i):
            term &= (k >= start) & (k < end)
            if term_has_band(C.STRUCTURE, i):
                term &= (k - q >= lo) & (k - q <= hi)
            result |= term
    return result
