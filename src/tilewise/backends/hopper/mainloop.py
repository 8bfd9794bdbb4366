"""One warpgroup, one key tile: S = Q·Kᵀ, online softmax, O += P·V.

    over the keys seen so far:   o = Σ exp2(x - m) v,   l = Σ exp2(x - m),   m near max x        (x: scores in units of log 2)

Two products are in flight: S(n) = Q·K(n)ᵀ is issued, then O += P(n-1)·V(n-1), and while the second runs the softmax of the first
is computed. So o lags l and m by one tile, whose weights wait in p. That goes on from one work tile to the next: the softmax of
the next one's first scores runs under the last product of this one (`step_into_next`).
"""

# No `from __future__ import annotations` here: aggregates check their fields against the annotations themselves.

from tilewise.backends.hopper.alibi import ahead_of, columns_from, slope_of, with_alibi
from tilewise.backends.hopper.bias import (
    add_by_row,
    as_scores,
    is_paired,
    load_bias,
    load_by_row,
    natural_softmax_step,
    unpacked,
)
from tilewise.backends.hopper.compat import (
    PINGPONG_BARRIER,
    aggregate,
    gl,
    gluon,
    named_barrier,
    opaque,
    opaque_float,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.backends.hopper.draw import drop_drawn
from tilewise.backends.hopper.dropout import dropped, kept_by_row
from tilewise.backends.hopper.lane_words import interval_words, no_words, rows_of_words, where_set
from tilewise.backends.hopper.listed import visible_keys
from tilewise.backends.hopper.lists import is_partial, tile_number
from tilewise.backends.hopper.operands import (
    accumulator,
    as_operand,
    columns,
    columns_of,
    left_operand,
    no_output,
    operand_for,
    output_spans,
    packed,
    rows_of,
    spans,
    zeros,
)
from tilewise.backends.hopper.quads import drop_quads, quad_words
from tilewise.backends.hopper.quick_softmax import quick_softmax_step
from tilewise.backends.hopper.ring import Rings, bias_ring, matrix, release, stage, units, wait_full
from tilewise.backends.hopper.softmax import INF, exp2_scale, lane_sum, masked, rescale_output, scores, softmax_step
from tilewise.backends.hopper.statistics import first_seen, next_seen
from tilewise.backends.hopper.work_tile import Band, WorkTile, key_hi, key_lo
from tilewise.backends.hopper.zeroing import zero_unseen_listed


@aggregate
class State:
    """The online softmax of a warpgroup, from one key tile to the next."""

    o: gl.tuple  # fp32 accumulators [64, width], side by side
    p: gl.tensor  # [64, N / 2] words of two weights not yet in o
    m: gl.tensor  # [64]
    l: gl.tensor  # [64, 4], partial sums by lane
    rescale: gl.tensor  # [64], what o is still to be multiplied by
    seen: gl.tuple  # of statistics


@aggregate
class WarpgroupRows:
    """The 64 rows of a work tile that a warpgroup computes, from row0 on."""

    work: WorkTile
    band: Band
    row0: gl.tensor


@aggregate
class Queries:
    """A warpgroup's queries: all columns in shared memory, the first of them in registers too."""

    rings: Rings
    n: gl.tensor  # their number in the ring
    tile: gl.tuple  # of [64, width], side by side
    fragments: gl.tuple  # of [64, width], left operands


@gluon.jit
def load_fragments(q_tile, C: gl.constexpr):
    """The first columns of the queries from shared memory to registers."""
    LAYOUT: gl.constexpr = left_operand(C.BLOCK_N)
    SPANS: gl.constexpr = spans(0, C.Q_IN_REGISTERS)
    fragments = ()
    for i in gl.static_range(len(SPANS)):
        fragments += (columns_of(q_tile, SPANS[i][0], SPANS[i][1]).load(LAYOUT),)
    return fragments


@gluon.jit
def first_scores(rows, key0, a, C: gl.constexpr):
    """What scores accumulate from: 0, or ALiBi's part in units of products q·k."""
    if C.ALIBI_FIRST:
        LAYOUT: gl.constexpr = accumulator(C.BLOCK_N)
        slope = opaque_float(slope_of(rows.work.b, rows.work.h, a) * a.alibi_unit)
        if C.LISTS is not None:
            key0 = tile_number(key0) * C.BLOCK_N
        start = slope * (key0 - rows.row0 - ahead_of(rows.work, a, C)).to(gl.float32)
        column = columns_from(start, slope, C.BLOCK_N, LAYOUT)
        return gl.broadcast(column[None, :], gl.zeros([64, 1], gl.float32, LAYOUT))[0]
    else:
        return zeros(C.BLOCK_N)


@gluon.jit
def issue_scores(q, n, token, C: gl.constexpr):
    """S(n), issued: a sum of products over the columns, those in registers first, from what `first_scores` gives."""
    FRAGMENTS: gl.constexpr = len(q.fragments)
    IN_REGISTERS: gl.constexpr = C.Q_IN_REGISTERS if FRAGMENTS > 0 else 0
    COLUMNS: gl.constexpr = C.QK_COLUMNS if C.QK_COLUMNS > 0 else C.BLOCK_D
    MOST: gl.constexpr = C.QK_UNIT if C.QK_UNIT > 0 else 256
    SPANS: gl.constexpr = spans(0, IN_REGISTERS) + spans(IN_REGISTERS, COLUMNS, MOST)
    k_tile = units(q.rings.k, stage(q.rings.k, n))
    for i in gl.static_range(len(SPANS)):
        keys = columns_of(k_tile, SPANS[i][0], SPANS[i][1]).permute((1, 0))
        if i < FRAGMENTS:
            token = warpgroup_mma(q.fragments[i], keys, token, use_acc=C.ALIBI_FIRST or i > 0, is_async=True)
        else:
            part = columns_of(q.tile, SPANS[i][0], SPANS[i][1])
            token = warpgroup_mma(part, keys, token, use_acc=C.ALIBI_FIRST or i > 0, is_async=True)
    return token


@gluon.jit
def weights(s_tile, m, MASKED: gl.constexpr, a, C: gl.constexpr):
    """See softmax_step; with a bias scores are in natural units."""
    if C.BIAS != "":
        return natural_softmax_step(s_tile, m)
    else:
        return softmax_step(s_tile, m, exp2_scale(a, C), MASKED)


@gluon.jit
def key_words(rows, key0, a, C: gl.constexpr):
    """Which keys of a tile of a list or of a packed sequence the rows see, as words. Found while the scores are computed."""
    LAYOUT: gl.constexpr = accumulator(C.BLOCK_N)
    if C.LISTS is not None:
        return visible_keys(rows.work, rows.row0, key0, a, LAYOUT, C)
    elif C.VARLEN or C.WORDS:
        like = no_words(C.BLOCK_N, LAYOUT)
        q = opaque(rows_of_words(like, rows.row0))
        lo = key_lo(rows.band, q, C) - key0
        hi = key_hi(rows.band, q, C) - key0
        return quad_words(lo, hi, like, C.BLOCK_N) if C.QUADS else interval_words(lo, hi, like)
    else:
        return rows.row0


@gluon.jit
def first_key_words(rows, key0, a, C: gl.constexpr):
    """The same of a work tile's first key tile. A list's may be FULL: then nothing is read for it."""
    if C.LISTS is not None:
        words = no_words(C.BLOCK_N, accumulator(C.BLOCK_N)) - 1
        if is_partial(key0):
            words = key_words(rows, key0, a, C)
        return words
    else:
        return key_words(rows, key0, a, C)


@gluon.jit
def visible_scores(s_tile, rows, key0, words, C: gl.constexpr):
    """-inf where a row does not see a key; `words` as of `key_words`."""
    if C.LISTS is not None or C.VARLEN or C.WORDS:
        return where_set(words, s_tile, -INF)
    else:
        return masked(s_tile, rows.band, rows.row0, key0, C)


@gluon.jit
def first_softmax(s_tile, q, n, rows, key0, words, a, WG: gl.constexpr, C: gl.constexpr):
    """Weights, maximum, sums and statistics of a work tile's first key tile; `words` as of `key_words`."""
    S_LAYOUT: gl.constexpr = s_tile.type.layout
    s_tile = scores(s_tile, a, C)
    if C.BIAS_STAGES > 0:
        bias = load_bias(q.rings, n * C.WARPGROUPS + WG, C)
        s_tile = s_tile + unpacked(bias, C)
        release(bias_ring(q.rings), n * C.WARPGROUPS + WG)
    elif C.BIAS != "":
        s_tile = add_by_row(s_tile, rows.work, rows.row0, key0, a, False, C)
    if C.ALIBI != "" and not C.ALIBI_FIRST:
        slope = slope_of(rows.work.b, rows.work.h, a)
        s_tile = with_alibi(s_tile, slope, ahead_of(rows.work, a, C), rows.row0, key0, C)
    if C.LISTS is not None:
        if is_partial(key0):
            s_tile = visible_scores(s_tile, rows, key0, words, C)
    elif C.TERMS > 0 or C.VARLEN or C.TAIL:
        s_tile = visible_scores(s_tile, rows, key0, words, C)
    m = gl.full([64], -INF, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    p_tile, m, _, top = weights(s_tile, m, True, a, C)
    l = lane_sum(p_tile, C.FOURS)
    seen = first_seen(s_tile, p_tile, m, top, a, C)
    if C.QUADS:
        p_tile = drop_quads(p_tile, rows.row0, key0, rows.work.b, rows.work.h, a, C)
    elif C.DROPOUT and C.DRAWERS == 0:
        kept = kept_by_row(rows.row0, key0, rows.work.b, rows.work.h, a, C.BLOCK_N, C)
        p_tile = dropped(p_tile, kept, True)
    return p_tile, m, l, seen


@gluon.jit
def first_state(o_tile, words, m, l, seen):
    return State(o=o_tile, p=words, m=m, l=l, rescale=gl.full_like(m, 1.0), seen=seen)


@gluon.jit
def kept_words(p_tile, rings, n, WG: gl.constexpr, C: gl.constexpr):
    """Weights of key tile n in words of two, with 0 where they are dropped; where others draw, as they are."""
    if C.DRAWERS > 0:
        return drop_drawn(packed(p_tile, rings.k.tiles.dtype), rings, n, WG)
    else:
        return p_tile


@gluon.jit
def in_words(p_tile, dtype: gl.constexpr, C: gl.constexpr):
    """What is not yet."""
    if C.DRAWERS > 0:
        return p_tile
    else:
        return packed(p_tile, dtype)


@gluon.jit
def first_step(q, n, rows, key0, a, WG: gl.constexpr, C: gl.constexpr):
    """The first key tile of a program's first work tile: nothing is in flight yet."""
    k_ring = q.rings.k
    wait_full(k_ring, n)
    s_token = issue_scores(q, n, first_scores(rows, key0, a, C), C)
    words = first_key_words(rows, key0, a, C)
    s_tile = warpgroup_mma_wait(0, deps=[s_token])  # [64, N]
    release(k_ring, n)
    p_tile, m, l, seen = first_softmax(s_tile, q, n, rows, key0, words, a, WG, C)
    p_tile = kept_words(p_tile, q.rings, n, WG, C)
    return first_state(no_output(C), in_words(p_tile, k_ring.tiles.dtype, C), m, l, seen)


@gluon.jit
def issue_pv(state, v_ring, n, C: gl.constexpr):
    """O += P·V of value tile n, issued by accumulator, and P as its operand."""
    SPANS: gl.constexpr = output_spans(C)
    wait_full(v_ring, n)
    p_tile = as_operand(state.p, v_ring.tiles.dtype, C)
    v_tile = matrix(v_ring, n)
    tokens = ()
    for i in gl.static_range(len(SPANS)):
        o_part = state.o[i]
        if C.LAZY_RESCALE:
            o_part = rescale_output(o_part, rows_of(state.rescale, o_part), SPANS[i][1])
        v_part = columns(v_tile, SPANS[i][0], SPANS[i][1])
        tokens += (warpgroup_mma(operand_for(p_tile, SPANS[i][1]), v_part, o_part, is_async=True),)
    return tokens, p_tile


@gluon.jit
def await_output(tokens, old_p, C: gl.constexpr):
    """The output when P·V is done, by accumulator."""
    done = warpgroup_mma_wait(0, deps=tokens + (old_p,))  # noqa: RUF005
    parts = ()
    for i in gl.static_range(len(output_spans(C))):
        parts += (done[i],)
    return parts


@gluon.jit
def rescaled_now(parts, rescale, C: gl.constexpr):
    """The output times a factor by row."""
    found = ()
    for i in gl.static_range(len(output_spans(C))):
        found += (parts[i] * rows_of(rescale, parts[i]),)
    return found


@gluon.jit
def issue(state, q, n, before, rows, key0, a, WG: gl.constexpr, C: gl.constexpr):
    """S(n), and the product with the value tile before it, issued. In ping-pong the warpgroups do so in turns."""
    token = first_scores(rows, key0, a, C)
    if C.PINGPONG:
        named_barrier("sync", PINGPONG_BARRIER + WG)
    s_token = issue_scores(q, n, token, C)
    o_token, p_tile = issue_pv(state, q.rings.v, before, C)
    if C.PINGPONG:
        named_barrier("arrive", PINGPONG_BARRIER + (1 - WG))
    return s_token, o_token, p_tile


@gluon.jit
def step(state, q, n, more, rows, key0, a, MASKED: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """Key tile n, which has landed; `more`: another follows. key0 is its first key, or its place in a list."""
    k_ring = q.rings.k
    s_token, o_token, old_p = issue(state, q, n, n - 1, rows, key0, a, WG, C)
    if MASKED:
        words = key_words(rows, key0, a, C)
    if C.ALIBI != "" and not C.ALIBI_FIRST:
        slope = slope_of(rows.work.b, rows.work.h, a)
        ahead = ahead_of(rows.work, a, C)
    if C.DROPOUT and not C.QUADS and C.DRAWERS == 0:
        kept = kept_by_row(rows.row0, key0, rows.work.b, rows.work.h, a, C.BLOCK_N, C)
    if C.BIAS_STAGES > 0:
        bias = load_bias(q.rings, n * C.WARPGROUPS + WG, C)
    elif is_paired(C.BIAS):
        bias = load_by_row(rows.work, rows.row0, key0, a, C.BLOCK_N, not MASKED, C)
    s_tile = warpgroup_mma_wait(len(output_spans(C)), deps=[s_token])  # [64, N]
    release(k_ring, n)
    if C.BIAS_STAGES > 0:
        release(bias_ring(q.rings), n * C.WARPGROUPS + WG)
    if C.RELEASE_Q_EARLY:
        release(q.rings.q, q.n, not more)
    s_tile = scores(s_tile, a, C)
    if C.ALIBI != "" and not C.ALIBI_FIRST:
        s_tile = with_alibi(s_tile, slope, ahead, rows.row0, key0, C)
    if C.BIAS_STAGES > 0:
        s_tile = s_tile + unpacked(bias, C)
    elif is_paired(C.BIAS):
        s_tile = s_tile + as_scores(bias, C.BLOCK_N, C)
    elif C.BIAS != "":
        s_tile = add_by_row(s_tile, rows.work, rows.row0, key0, a, not MASKED, C)
    if MASKED:
        s_tile = visible_scores(s_tile, rows, key0, words, C)
    if C.QUICK > 0 and not MASKED:
        p_tile, m, rescale, added = quick_softmax_step(s_tile, state.m, exp2_scale(a, C), C.QUICK, C.QUICK_AHEAD)
        seen = state.seen
    else:
        p_tile, m, rescale, top = weights(s_tile, state.m, MASKED, a, C)
        added = lane_sum(p_tile, C.FOURS)
        seen = next_seen(state, s_tile, p_tile, (m, rescale, top), MASKED, a, C)
    l = state.l * rows_of(rescale, added) + added
    if C.QUADS:
        p_tile = drop_quads(p_tile, rows.row0, key0, rows.work.b, rows.work.h, a, C)
    elif C.DROPOUT and C.DRAWERS == 0:
        p_tile = dropped(p_tile, kept, True)
    if C.DRAW_EARLY:
        p_tile = kept_words(p_tile, q.rings, n, WG, C)
    # The wait for the next key tile is a loop, hence the boundary of a basic block: without one ptxas moves all of the
    # softmax below the wait for P·V, and nothing overlaps. Only branches that all threads take alike may stand here.
    wait_full(k_ring, n + 1, more)
    o_tile = await_output(o_token, old_p, C)
    release(q.rings.v, n - 1)
    if MASKED and C.LISTS is not None and C.UNSEEN_KEYS:
        zero_unseen_listed(q.rings.v, n, tile_number(key0) * C.BLOCK_N, rows.work, a, C)
    if not C.LAZY_RESCALE:
        o_tile = rescaled_now(o_tile, rescale, C)
    if not C.DRAW_EARLY:
        p_tile = kept_words(p_tile, q.rings, n, WG, C)
    return State(o=o_tile, p=in_words(p_tile, k_ring.tiles.dtype, C), m=m, l=l, rescale=rescale, seen=seen)


@gluon.jit
def step_into_next(state, q, n, before, rows, key0, a, WG: gl.constexpr, C: gl.constexpr):
    """From one work tile to the next, whose first key tile is n: (the state of the next, the output of this one)."""
    k_ring = q.rings.k
    s_token, o_token, old_p = issue(state, q, n, before, rows, key0, a, WG, C)
    words = first_key_words(rows, key0, a, C)
    s_tile = warpgroup_mma_wait(len(output_spans(C)), deps=[s_token])  # [64, N]
    release(k_ring, n)
    p_tile, m, l, seen = first_softmax(s_tile, q, n, rows, key0, words, a, WG, C)
    if C.DRAW_EARLY:
        p_tile = kept_words(p_tile, q.rings, n, WG, C)
    # the queries are there: a boundary as in `step`. The wait for the next keys comes after the release of these values,
    # which the producer may need first
    wait_full(q.rings.q, q.n)
    o_tile = await_output(o_token, old_p, C)
    release(q.rings.v, before)
    if not C.DRAW_EARLY:
        p_tile = kept_words(p_tile, q.rings, n, WG, C)
    return first_state(no_output(C), in_words(p_tile, k_ring.tiles.dtype, C), m, l, seen), o_tile


@gluon.jit
def last_output(state, v_ring, n, C: gl.constexpr):
    """The output of a program's last work tile, whose last value tile is n."""
    o_token, p_tile = issue_pv(state, v_ring, n, C)
    o_tile = await_output(o_token, p_tile, C)
    release(v_ring, n)
    return o_tile
