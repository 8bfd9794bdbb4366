"""Which tile of queries a program takes next, and which keys it sees. Every role asks the same questions.

A mask of bands and ranges leaves each row one interval of keys [key_lo(q), key_hi(q)), and both ends never fall as q grows. So
the keys that rows [m0, m1) see between them are [key_lo(m0), key_hi(m1 - 1)), and all of them see [key_lo(m1 - 1), key_hi(m0)).
"""

# No `from __future__ import annotations` here: aggregates check their fields against the annotations themselves.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.shim import aggregate

UNBOUNDED = gl.constexpr(2**30)


@aggregate
class Spot:
    """A tile of queries: sequence b, query head h, first row m0; its keys are walked by `count` tiles down from `last`."""

    b: gl.tensor
    row: gl.tensor  # of the tensors' batch: b, or 0 when packed
    h: gl.tensor
    m0: gl.tensor
    q_start: gl.tensor  # tokens of the sequence in a packed batch, else 0
    k_start: gl.tensor
    last_q: gl.tensor  # the sequence's last query
    last: gl.tensor  # the first tile of keys visited is last - 1
    count: gl.tensor  # at least 1; 0 if there is nothing to do

    @gluon.constexpr_function
    def __init__(self, b, row, h, m0, q_start, k_start, last_q, last, count):
        self.b = b
        self.row = row
        self.h = h
        self.m0 = m0
        self.q_start = q_start
        self.k_start = k_start
        self.last_q = last_q
        self.last = last
        self.count = count


@aggregate
class Band:
    """The mask of one sequence as numbers: lo <= k - q < past and start <= k < end, or k - q < past2 and k < end2."""

    lo: gl.tensor
    past: gl.tensor
    start: gl.tensor
    end: gl.tensor
    past2: gl.tensor
    end2: gl.tensor

    @gluon.constexpr_function
    def __init__(self, lo, past, start, end, past2, end2):
        self.lo = lo
        self.past = past
        self.start = start
        self.end = end
        self.past2 = past2
        self.end2 = end2


@gluon.jit
def divide(n, d):
    """n // d for a Divisor."""
    high = gl.umulhi(n.to(gl.uint32), d.factor.to(gl.uint32, bitcast=True))
    return ((high + n.to(gl.uint32)) >> d.shift.to(gl.uint32)).to(gl.int32)


@gluon.jit
def tile_at(a, i):
    """The number of this program's i-th tile, negative past its last. Ask early where memory answers: see `order.py`."""
    me = gl.program_id(0)
    if a.order is not None:
        return gl.load(a.order + i * a.programs + me)
    else:
        # odd rounds run backwards: where tiles get shorter along the way, that evens out a little
        t = i * a.programs + gl.where(i % 2 == 0, me, a.programs - 1 - me)
        return gl.where(t < a.total, t, -1)


@gluon.jit
def shifted(lo, past, by):
    """A band moved along; an unbounded side stays where it is, so that no shift can overflow."""
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
        if C.BOTTOM:
            lo, past = shifted(lo, past, len_k - len_q)
    if term.off is not None:
        lo, past = shifted(lo, past, gl.load(term.off + b))
    if term.first is not None:
        start = gl.maximum(start, gl.load(term.first + b))
        end = gl.minimum(end, gl.load(term.last + b))
    return lo, past, start, end


@gluon.jit
def band_of(a, b, len_q, len_k, C: gl.constexpr):
    none = b * 0
    if C.TERMS == 0:
        return Band(none, none, none, len_k, none, none)
    elif C.TERMS == 1:
        lo, past, start, end = term_band(a.terms[0], b, len_q, len_k, C)
        return Band(lo, past, start, end, none, none)
    else:
        lo, past, start, end = term_band(a.terms[0], b, len_q, len_k, C)
        _, past2, _, end2 = term_band(a.terms[1], b, len_q, len_k, C)
        return Band(lo, past, start, end, past2, end2)


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
def visited(band, m0, last_q, C: gl.constexpr):
    """One past the last tile of keys that the rows of a tile of queries see, and how many there are down from it."""
    BLOCK_M: gl.constexpr = 64 * C.WARPGROUPS
    first = key_lo(band, m0, C) // C.BLOCK_N
    hi = key_hi(band, gl.minimum(m0 + (BLOCK_M - 1), last_q), C)
    last = gl.maximum(gl.cdiv(hi, C.BLOCK_N), first + 1)
    return last, last - first


@gluon.jit
def locate(a, t, C: gl.constexpr):
    """Tile t, counted through each head from its last queries to its first, and the mask of its sequence."""
    BLOCK_M: gl.constexpr = 64 * C.WARPGROUPS
    bh = divide(t, a.blocks)
    tile = a.last_block - (t - bh * a.blocks.value)
    if C.VARLEN:
        b, tile = find_sequence(a.cu_q, a.batch, tile, BLOCK_M)
        q_start = gl.load(a.cu_q + b)
        k_start = gl.load(a.cu_k + b)
        len_q = gl.load(a.cu_q + b + 1) - q_start
        len_k = gl.load(a.cu_k + b + 1) - k_start
        band = band_of(a, b, len_q, len_k, C)
        m0 = tile * BLOCK_M
        last, count = visited(band, m0, len_q - 1, C)
        count = gl.where(m0 < len_q, count, 0)
        return Spot(b, b * 0, bh, m0, q_start, k_start, len_q - 1, last, count), band
    else:
        b = divide(bh, a.heads)
        band = band_of(a, b, a.len_q, a.len_k, C)
        m0 = tile * BLOCK_M
        last, count = visited(band, m0, a.last_q, C)
        return Spot(b, b, bh - b * a.heads.value, m0, b * 0, b * 0, a.last_q, last, count), band


@gluon.jit
def next_tile(a, i, C: gl.constexpr):
    """The first of this program's tiles from the i-th on that has something to do: (i, its number, its spot, its mask). The
    number is negative when there is none."""
    t = tile_at(a, i)
    spot, band = locate(a, gl.maximum(t, 0), C)
    if C.VARLEN:
        while (t >= 0) & (spot.count == 0):
            i += 1
            t = tile_at(a, i)
            spot, band = locate(a, gl.maximum(t, 0), C)
    return i, t, spot, band
