"""What rows see, beside the online softmax: their largest score and, for the entropy, a sum over their keys.

    with p = exp2(x - m) and l = Σ p:   largest = max x,   spread = Σ p (x - m),   so that the entropy is log2 l - spread / l

A raised m shifts every term: spread = rescale · (spread + (m_old - m_new) · l). Units are those of `softmax_step`, and spread is
kept by lane, as l is. Dropout and sinks take no part.
"""

from __future__ import annotations

from tilewise.backends.hopper.compat import gl, gluon, opaque
from tilewise.backends.hopper.softmax import INF, exp2_scale

LN2 = gl.constexpr(0.6931471805599453)
FLOOR = gl.constexpr(-300.0)
"""Below it a weight is 0, and what it is multiplied by must be finite."""


@gluon.jit
def by_lane(x, like):
    """A vector over rows as it broadcasts to partial sums."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)[:, None]


@gluon.jit
def lane_product(x_tile, y_tile):
    """Row sums of products as `lane_sum` adds them up, over groups of columns first: an FMA for each."""
    N: gl.constexpr = x_tile.type.shape[1]
    products = gl.reshape(x_tile * y_tile, [64, N // 8, 4, 2])
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, products.type.layout))
    return gl.convert_layout(gl.sum(gl.sum(products, 1), 2), LAYOUT, assert_trivial=True)


@gluon.jit
def tile_spread(s_tile, p_tile, m, MASKED: gl.constexpr, a, C: gl.constexpr):
    """Σ p (x - m) of a tile, by lane."""
    shift = m
    if MASKED:
        shift = gl.where(m == -INF, 0.0, m)
    gap_tile = s_tile * exp2_scale(a, C) - shift[:, None]  # [64, N]
    if MASKED:
        gap_tile = gl.maximum(gap_tile, FLOOR)
    return lane_product(p_tile, gap_tile)


@gluon.jit
def first_seen(s_tile, p_tile, m, top, a, C: gl.constexpr):
    """The statistics of a work tile's first key tile, () where none are wanted."""
    if C.STATS == "":
        return ()
    elif C.STATS == "max":
        return (top,)
    else:
        return top, tile_spread(s_tile, p_tile, m, True, a, C)


@gluon.jit
def next_seen(state, s_tile, p_tile, step, MASKED: gl.constexpr, a, C: gl.constexpr):
    """Those of one key tile more. `step`: its m, the factor that rescales older weights, and its largest scores."""
    m, rescale, top = step
    if C.STATS == "":
        return ()
    elif C.STATS == "max":
        return (gl.maximum(state.seen[0], top),)
    else:
        moved = gl.where(state.m == -INF, 0.0, state.m - m)  # at first there is nothing to shift
        added = tile_spread(s_tile, p_tile, m, MASKED, a, C)
        spread = state.seen[1] + by_lane(moved, added) * state.l
        return gl.maximum(state.seen[0], top), spread * by_lane(rescale, added) + added


@gluon.jit
def store_seen(seen, l, m, work, row0, a, C: gl.constexpr):
    """64 rows of statistics to memory, in natural units."""
    if C.STATS != "":
        q = row0 + gl.arange(0, 64, m.type.layout)
        head = work.row * a.heads.value + work.h
        at = head.to(gl.int64) * opaque(a.len_q) + work.q_start + q
        ok = q <= work.last_q
        gl.store(a.max_logit_ptr + at, seen[0] * LN2, mask=ok)
        if C.STATS == "entropy":
            total = gl.convert_layout(gl.sum(l, 1), m.type.layout, assert_trivial=True)  # [64]
            spread = gl.convert_layout(gl.sum(seen[1], 1), m.type.layout, assert_trivial=True)
            empty = total == 0.0
            whole = gl.where(empty, 1.0, total)
            log_l = gl.log2(whole)
            entropy = gl.maximum((log_l - spread / whole) * LN2, 0.0)
            gl.store(a.entropy_ptr + at, gl.where(empty, 0.0, entropy), mask=ok)
            gl.store(a.key_lse_ptr + at, gl.where(empty, -INF, (m + log_l) * LN2), mask=ok)
