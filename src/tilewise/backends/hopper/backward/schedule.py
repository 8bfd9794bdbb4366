"""Which tile of keys a program takes next, and which queries see it.

What `tilewise.backends.hopper.schedule` says of rows holds for columns too: each key k is seen by one interval of queries
[query_lo(k), query_hi(k)), and both ends never fall as k grows.
"""

# No `from __future__ import annotations` here: aggregates check their fields against the annotations themselves.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.schedule import UNBOUNDED, band_of, divide, find_sequence, key_hi, key_lo
from tilewise.backends.hopper.shim import aggregate


@aggregate
class KeySpot:
    """A tile of keys: sequence b, key head h, first key n0; `count` tiles of queries see it, from tile `first` on."""

    b: gl.tensor
    row: gl.tensor  # of the tensors' batch: b, or 0 when packed
    h: gl.tensor
    n0: gl.tensor
    q_start: gl.tensor  # tokens of the sequence in a packed batch, else 0
    k_start: gl.tensor
    len_q: gl.tensor
    len_k: gl.tensor
    stat_start: gl.tensor  # tile of statistics where the sequence begins in each head
    first: gl.tensor
    count: gl.tensor  # at least 1; 0 if there is nothing to do

    @gluon.constexpr_function
    def __init__(self, b, row, h, n0, q_start, k_start, len_q, len_k, stat_start, first, count):
        self.b = b
        self.row = row
        self.h = h
        self.n0 = n0
        self.q_start = q_start
        self.k_start = k_start
        self.len_q = len_q
        self.len_k = len_k
        self.stat_start = stat_start
        self.first = first
        self.count = count


@gluon.jit
def query_lo(band, k, C: gl.constexpr):
    """The first query that sees a key (k: a number or a vector)."""
    if C.TERMS == 2:
        one = gl.where(k < band.end, k + 1 - band.past, UNBOUNDED)
        two = gl.where(k < band.end2, k + 1 - band.past2, UNBOUNDED)
        return gl.minimum(one, two)
    elif C.BAND:
        return gl.where(k < band.end, k + 1 - band.past, UNBOUNDED)
    else:
        return gl.where(k < band.end, 0, UNBOUNDED)


@gluon.jit
def query_hi(band, k, C: gl.constexpr):
    """One past the last query that sees a key."""
    if C.LEFT:
        return gl.where(k >= band.start, k + 1 - band.lo, 0)
    else:
        return k * 0 + UNBOUNDED


@gluon.jit
def visiting(band, n0, len_q, C: gl.constexpr):
    """The first tile of queries that sees any key of a tile, and how many do."""
    tiles = gl.cdiv(len_q, C.BLOCK_M)
    first = gl.minimum(gl.maximum(query_lo(band, n0, C), 0) // C.BLOCK_M, tiles - 1)
    past = gl.minimum(query_hi(band, gl.minimum(n0 + C.BLOCK_N, band.end) - 1, C), len_q)
    return first, gl.maximum(gl.cdiv(past, C.BLOCK_M) - first, 1)


@gluon.jit
def locate_keys(a, t, C: gl.constexpr):
    """Tile t, counted through each head from its first keys to its last, and the mask of its sequence."""
    bh = divide(t, a.blocks)
    tile = t - bh * a.blocks.value
    if C.VARLEN:
        b, tile = find_sequence(a.cu_k, a.batch, tile, C.BLOCK_N)
        q_start = gl.load(a.cu_q + b)
        k_start = gl.load(a.cu_k + b)
        len_q = gl.load(a.cu_q + b + 1) - q_start
        len_k = gl.load(a.cu_k + b + 1) - k_start
        band = band_of(a, b, len_q, len_k, C)
        n0 = tile * C.BLOCK_N
        first, count = visiting(band, n0, len_q, C)
        count = gl.where((n0 < len_k) & (len_q > 0), count, 0)
        first = gl.maximum(first, 0)
        return KeySpot(b, b * 0, bh, n0, q_start, k_start, len_q, len_k, q_start // C.BLOCK_M + b, first, count), band
    else:
        b = divide(bh, a.heads)
        band = band_of(a, b, a.len_q, a.len_k, C)
        n0 = tile * C.BLOCK_N
        first, count = visiting(band, n0, a.len_q, C)
        h = bh - b * a.heads.value
        return KeySpot(b, b, h, n0, b * 0, b * 0, a.len_q, a.len_k, b * 0, first, count), band


@gluon.jit
def first_statistics(spot, a):
    """The tile of statistics of the first tile of queries that sees these keys, in the first head of the group."""
    return spot.stat_start + (spot.row * a.heads.value + spot.h) * a.group.value * a.stat_blocks + spot.first


@gluon.jit
def seen_keys(band, spot, C: gl.constexpr):
    """[lo, hi): the keys that some query of the sequence sees lie between."""
    return key_lo(band, spot.b * 0, C), key_hi(band, spot.len_q - 1, C)


@gluon.jit
def seeing_queries(band, len_q, C: gl.constexpr):
    """[lo, hi): the queries that see some key lie between; those of the sequence lie before len_q."""
    lo = len_q * 0
    hi = len_q * 0 + UNBOUNDED
    if C.BLIND:
        lo = gl.maximum(query_lo(band, band.start, C), 0)
        hi = query_hi(band, band.end - 1, C)
    if C.VARLEN:  # else the loads fill in zeros past the last query
        hi = gl.minimum(hi, len_q)
    return lo, hi


@gluon.jit
def sees_all(band, m, k0, KEYS: gl.constexpr, C: gl.constexpr):
    """Do all queries of the tile at m see all of these keys?"""
    ok = m >= query_lo(band, k0 + (KEYS - 1), C)
    if C.LEFT:
        ok = ok & (m + C.BLOCK_M <= query_hi(band, k0, C))
    return ok


@gluon.jit
def visible(band, m, k0, like, C: gl.constexpr):
    """[keys, queries]: who sees whom."""
    LAYOUT: gl.constexpr = like.type.layout
    KEYS: gl.constexpr = like.type.shape[0]
    k = k0 + gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
    q = m + gl.arange(0, C.BLOCK_M, gl.SliceLayout(0, LAYOUT))
    lo = query_lo(band, k, C)
    ok = q[None, :] >= lo[:, None]
    if C.LEFT:
        ok = ok & (q[None, :] < query_hi(band, k, C)[:, None])
    return ok
