"""Work tiles of the backward: which keys or queries a program holds, and which tiles of the other side see them or are seen."""

# No `from __future__ import annotations` here: aggregates check their fields against the annotations themselves.

from tilewise.backends.hopper.compat import aggregate, gl, gluon, opaque
from tilewise.backends.hopper.lane_words import interval_words, no_words, rows_of_words
from tilewise.backends.hopper.lists import row_counts, row_of
from tilewise.backends.hopper.work_tile import (
    UNBOUNDED,
    Band,
    band_of,
    batch_row,
    divide,
    head_of,
    key_hi,
    key_lo,
    sequence_of,
)


@aggregate
class GradTile:
    """A work tile of the backward: keys (or queries) of sequence b and head h from `start` on. `count` tiles of the other side,
    from tile `first` on, see some of them (or are seen). In a list the first `first` of them are PARTIAL."""

    b: gl.tensor
    row: gl.tensor  # of the tensors' batch: b, or 0 when packed
    h: gl.tensor
    start: gl.tensor
    q_start: gl.tensor  # the sequence's first token in a packed batch, else 0
    k_start: gl.tensor
    len_q: gl.tensor
    len_k: gl.tensor
    stat_start: gl.tensor  # tile of statistics where the sequence begins in each head
    first: gl.tensor
    count: gl.tensor  # at least 1; 0 if there is nothing to do


@aggregate
class HeldTile:
    """A work tile, the mask of its sequence, and its number in the rings of the side that is held."""

    work: GradTile
    band: Band
    index: gl.tensor
    h: gl.tensor  # a query head, and ALiBi's slope of it; any numbers where neither is asked for
    slope: gl.tensor


@aggregate
class Sweep:
    """The query tiles of a work tile in the order in which its keys take them: in turns of an outer and an inner loop.

    As a rule outside are the heads of the group, inside their tiles, from the first to the last. Under a causal mask heads that
    share keys do not fit the cache: tiles are outside and heads inside, and every second work tile of a program goes from the
    last tile to the first. Programs take long work tiles and short ones in turns, so that those which
    begin together begin at the last queries, and those which end together end there: all read the same queries at about the
    same time, and memory gives them once.
    """

    tile: gl.tensor  # the first that is taken
    step: gl.tensor  # to the next one


@gluon.jit
def sweep_of(work, i, C: gl.constexpr):
    """The sweep of a program's i-th work tile."""
    if C.GROUPED:
        back = (i & 1) == 0
        return Sweep(tile=work.first + gl.where(back, work.count - 1, 0), step=gl.where(back, -1, 1))
    else:
        return Sweep(tile=work.first, step=work.first)  # nobody asks for the step


@gluon.jit
def sweep_sides(work, a, C: gl.constexpr):
    """How often the outer loop runs, and the inner one."""
    if C.GROUPED:
        return work.count, a.group.value
    else:
        return a.group.value, work.count


@gluon.jit
def swept_tile(sweep, i, n, n0, C: gl.constexpr):
    """The n-th query tile, of a turn i of the outer loop that began with the n0-th."""
    if C.GROUPED:
        return sweep.tile + i * sweep.step
    else:
        return sweep.tile + n - n0


@gluon.jit
def first_statistics(sweep, stat_tile, i, n0, a, C: gl.constexpr):
    """For `statistics_at`, in turn i of the outer loop; `stat_tile`: the tile of statistics that is taken first."""
    if C.GROUPED:
        return stat_tile + i * sweep.step
    else:
        return stat_tile + i * a.stat_blocks - n0


@gluon.jit
def statistics_at(stat0, n, n0, a, C: gl.constexpr):
    """The tile of statistics of the n-th query tile."""
    if C.GROUPED:
        return stat0 + (n - n0) * a.stat_blocks
    else:
        return stat0 + n


@aggregate
class Place:
    """One query tile of a sweep: its head of the group, and which of its tiles."""

    g: gl.tensor
    tile: gl.tensor


@gluon.jit
def first_place(sweep):
    return Place(g=sweep.tile * 0, tile=sweep.tile)


@gluon.jit
def next_place(at, sweep, work, a, C: gl.constexpr):
    """The next query tile of a sweep, for a single loop."""
    if C.GROUPED:
        wraps = at.g + 1 == a.group.value
        return Place(g=gl.where(wraps, 0, at.g + 1), tile=at.tile + gl.where(wraps, sweep.step, 0))
    else:
        wraps = at.tile + 1 == work.first + work.count
        return Place(g=at.g + gl.where(wraps, 1, 0), tile=gl.where(wraps, work.first, at.tile + 1))


@gluon.jit
def beyond_queries(a, C: gl.constexpr):
    """The first query tile past the tensor's end."""
    return gl.cdiv(a.len_q, C.BLOCK_M)


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
def grad_tile(a, bh, seq, start, first, count, STAT_ROWS: gl.constexpr, C: gl.constexpr):
    stat_start = seq.b * 0
    if C.VARLEN:
        stat_start = seq.q_start // STAT_ROWS + seq.b
    return GradTile(
        b=seq.b, row=batch_row(seq.b, C), h=head_of(a, bh, seq.b, C), start=start, q_start=seq.q_start, k_start=seq.k_start,
        len_q=seq.len_q, len_k=seq.len_k, stat_start=stat_start, first=first, count=count,
    )  # fmt: skip


@gluon.jit
def locate_keys(a, t, C: gl.constexpr):
    """Key tile t, counted through each head from its first keys to its last, and the mask of its sequence."""
    bh = divide(t, a.blocks)
    seq, tile = sequence_of(a, bh, t - bh * a.blocks.value, a.cu_k, C.BLOCK_N, C)
    band = band_of(a, seq.b, seq.len_q, seq.len_k, C)
    n0 = tile * C.BLOCK_N
    if C.LISTS is not None:
        h = head_of(a, bh, seq.b, C) * a.group.value
        first, count = row_counts(a.lists, row_of(a.lists, seq.b, h, tile))
    else:
        tiles = gl.cdiv(seq.len_q, C.BLOCK_M)
        first = gl.minimum(gl.maximum(query_lo(band, n0, C), 0) // C.BLOCK_M, tiles - 1)
        past = gl.minimum(query_hi(band, gl.minimum(n0 + C.BLOCK_N, band.end) - 1, C), seq.len_q)
        count = gl.maximum(gl.cdiv(past, C.BLOCK_M) - first, 1)
    if C.VARLEN:
        count = gl.where((n0 < seq.len_k) & (seq.len_q > 0), count, 0)
        first = gl.maximum(first, 0)
    return grad_tile(a, bh, seq, n0, first, count, C.BLOCK_M, C), band


@gluon.jit
def locate_queries(a, t, C: gl.constexpr):
    """Tile t of 128 queries, counted through each head from its last queries to its first, and the mask of its sequence."""
    bh = divide(t, a.blocks)
    seq, tile = sequence_of(a, bh, a.blocks.value - 1 - (t - bh * a.blocks.value), a.cu_q, 128, C)
    band = band_of(a, seq.b, seq.len_q, seq.len_k, C)
    m0 = tile * 128
    if C.LISTS is not None:
        first, count = row_counts(a.lists, row_of(a.lists, seq.b, head_of(a, bh, seq.b, C), tile))
    else:
        first = key_lo(band, m0, C) // C.BLOCK_N
        hi = key_hi(band, gl.minimum(m0 + 127, seq.len_q - 1), C)
        count = gl.maximum(gl.cdiv(hi, C.BLOCK_N) - first, 1)
    if C.VARLEN:
        count = gl.where(m0 < seq.len_q, count, 0)
    return grad_tile(a, bh, seq, m0, first, count, C.STAT_ROWS, C), band


@gluon.jit
def head_statistics(work, a):
    """The first tile of statistics of the work tile's sequence, in the first head of the group."""
    return work.stat_start + (work.row * a.heads.value + work.h) * a.group.value * a.stat_blocks


@gluon.jit
def listed_statistics(tile, first, a, C: gl.constexpr):
    """The tile of statistics of a query tile of a list, of those from `first` on; beyond the queries the spare one."""
    return gl.where(tile < beyond_queries(a, C), first + tile, a.stat_tiles)


@gluon.jit
def seen_keys(band, work, C: gl.constexpr):
    """[lo, hi): the keys that some query of the sequence sees lie between."""
    return key_lo(band, opaque(work.b * 0), C), key_hi(band, work.len_q - 1, C)


@gluon.jit
def seeing_queries(band, len_q, C: gl.constexpr):
    """[lo, hi): the queries that see some key lie between; those of the sequence lie before len_q."""
    lo = len_q * 0
    hi = len_q * 0 + UNBOUNDED
    if C.EMPTY_ROWS:
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
def seeing_words(band, m, k0, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Words (`lane_words.py`) of the queries from m on that see 64 keys from k0 on."""
    like = no_words(C.BLOCK_M, LAYOUT)
    k = opaque(rows_of_words(like, k0))
    lo = query_lo(band, k, C) - m
    hi = lo * 0 + C.BLOCK_M
    if C.LEFT:
        hi = query_hi(band, k, C) - m
    return interval_words(lo, hi, like)


@gluon.jit
def visible(band, m, k0, like, C: gl.constexpr):
    """[keys, queries]: which queries see which keys."""
    LAYOUT: gl.constexpr = like.type.layout
    KEYS: gl.constexpr = like.type.shape[0]
    k = k0 + gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
    q = m + gl.arange(0, C.BLOCK_M, gl.SliceLayout(0, LAYOUT))
    lo = query_lo(band, k, C)
    ok = q[None, :] >= lo[:, None]
    if C.LEFT:
        ok = ok & (q[None, :] < query_hi(band, k, C)[:, None])
    return ok
