"""Which tile a program works on next, and which key tiles it sees. Every role computes the same answers.

A mask of bands and ranges leaves each row one interval of keys [key_lo(q), key_hi(q)), and both ends never fall as q grows. So
some row of [m0, m1) sees a key only in [key_lo(m0), key_hi(m1 - 1)), and all of them see [key_lo(m1 - 1), key_hi(m0)). The same
holds for columns: each key k is seen by one interval of queries [query_lo(k), query_hi(k)).
"""

# No `from __future__ import annotations` here: aggregates check their fields against the annotations themselves.

from tilewise.backends.hopper.compat import aggregate, gl, gluon
from tilewise.backends.hopper.lists import row_counts, row_of

UNBOUNDED = gl.constexpr(2**30)


@aggregate
class WorkTile:
    """A query tile: sequence b, query head h, first row m0. Its key tiles are `count`, from the right: the first is last - 1. In
    a list `last` of them are PARTIAL, and come first."""

    b: gl.tensor
    row: gl.tensor  # of the tensors' batch: b, or 0 when packed
    h: gl.tensor
    m0: gl.tensor
    q_start: gl.tensor  # the sequence's first token in a packed batch, else 0
    k_start: gl.tensor
    last_q: gl.tensor  # the sequence's last query
    last: gl.tensor
    count: gl.tensor  # at least 1; 0 if there is nothing to do


@aggregate
class SeqInfo:
    """The sequence of a work tile: where it starts in a packed batch (else 0), and its lengths."""

    b: gl.tensor
    q_start: gl.tensor
    k_start: gl.tensor
    len_q: gl.tensor
    len_k: gl.tensor


@aggregate
class Band:
    """The mask of one sequence as numbers: lo <= k - q < past and start <= k < end, or k - q < past2 and k < end2."""

    lo: gl.tensor
    past: gl.tensor
    start: gl.tensor
    end: gl.tensor
    past2: gl.tensor
    end2: gl.tensor


@gluon.jit
def divide(n, d):
    """n // d for a Divisor."""
    high = gl.umulhi(n.to(gl.uint32), d.factor.to(gl.uint32, bitcast=True))
    return ((high + n.to(gl.uint32)) >> d.shift.to(gl.uint32)).to(gl.int32)


@gluon.jit
def tile_at(a, i):
    """The number of this program's i-th work tile, negative past its last. Read early: the order is in device memory."""
    program = gl.program_id(0)
    if a.order is not None:
        t = gl.load(a.order + i * a.programs + program)
    else:
        # odd rounds run backwards: where tiles get shorter along the way, that evens out a little
        t = i * a.programs + gl.where(i % 2 == 0, program, a.programs - 1 - program)
        t = gl.where(t < a.total, t, -1)
    if a.bias_flag is not None:
        t = gl.where((a.bias_again == 0) | (gl.load(a.bias_flag) != 0), t, -1)  # see hidden.py
    return t


@gluon.jit
def shifted(lo, past, by):
    """A shifted band; an unbounded side stays where it is, so that no shift can overflow."""
    return gl.where(lo <= -UNBOUNDED, lo, lo + by), gl.where(past >= UNBOUNDED, past, past + by)


@gluon.jit
def term_band(term, b, len_q, len_k, C: gl.constexpr):
    """A term's numbers for sequence b."""
    lo = term.lo
    past = term.past
    start = term.start
    end = term.end
    if C.VARLEN:
        end = gl.minimum(end, len_k)
        if C.BOTTOM_RIGHT:
            lo, past = shifted(lo, past, len_k - len_q)
    if term.off is not None:
        lo, past = shifted(lo, past, gl.load(term.off + b))
    if term.first is not None:
        start = gl.maximum(start, gl.load(term.first + b))
        end = gl.minimum(end, gl.load(term.last + b))
    return lo, past, start, end


@gluon.jit
def band_of(a, b, len_q, len_k, C: gl.constexpr):
    zero = b * 0
    if C.TERMS == 0:
        return Band(lo=zero, past=zero, start=zero, end=len_k, past2=zero, end2=zero)
    else:
        lo, past, start, end = term_band(a.terms[0], b, len_q, len_k, C)
        past2 = zero
        end2 = zero
        if C.TERMS == 2:
            _, past2, _, end2 = term_band(a.terms[1], b, len_q, len_k, C)
        return Band(lo=lo, past=past, start=start, end=end, past2=past2, end2=end2)


@gluon.jit
def key_lo(band, q, C: gl.constexpr):
    """The first key a row sees (q: a number or a vector)."""
    if C.LEFT:
        return gl.maximum(q + band.lo, band.start)
    else:
        return q * 0


@gluon.jit
def key_hi(band, q, C: gl.constexpr):
    """One past the last key a row sees."""
    if C.TERMS == 2:
        return gl.maximum(gl.minimum(q + band.past, band.end), gl.minimum(q + band.past2, band.end2))
    elif C.BAND:
        return gl.minimum(q + band.past, band.end)
    else:
        return q * 0 + band.end


@gluon.jit
def beyond_keys(a, C: gl.constexpr):
    """The first key tile past the tensor's end, which loads fill with zeros."""
    return gl.cdiv(a.len_k, C.BLOCK_N)


@gluon.jit
def find_sequence(cu, batch, tile, BLOCK: gl.constexpr):
    """The packed sequence that owns `tile`, and the tile's number in it.

    Sequence b owns the tiles from cu[b] // BLOCK + b on: at least as many as it fills, found without knowing the lengths on
    the host. Tiles beyond a sequence's end have nothing to do.
    """
    lo = batch * 0
    hi = batch
    # the owner is in [lo, hi)
    while hi - lo > 1:
        mid = (lo + hi) // 2
        mine = gl.load(cu + mid) // BLOCK + mid <= tile
        lo = gl.where(mine, mid, lo)
        hi = gl.where(mine, hi, mid)
    return lo, tile - (gl.load(cu + lo) // BLOCK + lo)


@gluon.jit
def owner_of(a, tile, cu, BLOCK: gl.constexpr, C: gl.constexpr):
    """The same, as it was when the order was written; searched for where lengths have changed since."""
    if C.ORDERED:
        b = gl.load(a.owners + tile)
        first = gl.load(cu + b) // BLOCK + b
        if (tile < first) | (tile > gl.load(cu + b + 1) // BLOCK + b):
            b, number = find_sequence(cu, a.batch, tile, BLOCK)
            first = tile - number
        return b, tile - first
    else:
        return find_sequence(cu, a.batch, tile, BLOCK)


@gluon.jit
def sequence_of(a, bh, tile, cu, BLOCK: gl.constexpr, C: gl.constexpr):
    """The sequence that owns a tile of head `bh`, and the tile's number in it; `cu` belongs to the side that is tiled."""
    if C.VARLEN:
        b, tile = owner_of(a, tile, cu, BLOCK, C)
        q_start = gl.load(a.cu_q + b)
        k_start = gl.load(a.cu_k + b)
        len_q = gl.load(a.cu_q + b + 1) - q_start
        len_k = gl.load(a.cu_k + b + 1) - k_start
        return SeqInfo(b=b, q_start=q_start, k_start=k_start, len_q=len_q, len_k=len_k), tile
    else:
        b = divide(bh, a.heads)
        return SeqInfo(b=b, q_start=b * 0, k_start=b * 0, len_q=a.len_q, len_k=a.len_k), tile


@gluon.jit
def batch_row(b, C: gl.constexpr):
    """The row of the tensors' batch that holds sequence b."""
    if C.VARLEN:
        return b * 0
    else:
        return b


@gluon.jit
def head_of(a, bh, b, C: gl.constexpr):
    if C.VARLEN:
        return bh
    else:
        return bh - b * a.heads.value


@gluon.jit
def locate(a, t, C: gl.constexpr):
    """Work tile t, counted through each head from its last queries to its first, and the mask of its sequence."""
    BLOCK_M: gl.constexpr = 64 * C.WARPGROUPS
    bh = divide(t, a.blocks)
    seq, tile = sequence_of(a, bh, a.last_block - (t - bh * a.blocks.value), a.cu_q, BLOCK_M, C)
    band = band_of(a, seq.b, seq.len_q, seq.len_k, C)
    m0 = tile * BLOCK_M
    last_q = a.last_q
    if C.VARLEN:
        last_q = seq.len_q - 1
    if C.LISTS is not None:
        last, count = row_counts(a.lists, row_of(a.lists, seq.b, head_of(a, bh, seq.b, C), tile))
    else:
        first = key_lo(band, m0, C) // C.BLOCK_N
        hi = key_hi(band, gl.minimum(m0 + (BLOCK_M - 1), last_q), C)
        last = gl.maximum(gl.cdiv(hi, C.BLOCK_N), first + 1)
        count = last - first
    if C.VARLEN:
        count = gl.where(m0 < seq.len_q, count, 0)
    work = WorkTile(
        b=seq.b, row=batch_row(seq.b, C), h=head_of(a, bh, seq.b, C), m0=m0, q_start=seq.q_start, k_start=seq.k_start,
        last_q=last_q, last=last, count=count,
    )  # fmt: skip
    return work, band


@gluon.jit
def next_tile(a, i, C: gl.constexpr):
    """The first of this program's work tiles from the i-th on that has something to do: (i, its number, the tile, its mask). The
    number is negative when there is none."""
    t = tile_at(a, i)
    work, band = locate(a, gl.maximum(t, 0), C)
    if C.VARLEN:
        while (t >= 0) & (work.count == 0):
            i += 1
            t = tile_at(a, i)
            work, band = locate(a, gl.maximum(t, 0), C)
    return i, t, work, band
