"""Score tiles of the backward: S and dP, weights from S and the statistics of rows."""

# No `from __future__ import annotations` here: aggregates check their fields against the annotations themselves.

from tilewise.backends.hopper.alibi import columns_from, less_distance, rows_from, slope_of
from tilewise.backends.hopper.bias import as_scores
from tilewise.backends.hopper.compat import aggregate, gl, gluon, opaque, opaque_float, warpgroup_mma
from tilewise.backends.hopper.grad_tile import HeldTile, seeing_words, sees_all, visible
from tilewise.backends.hopper.lane_words import no_words, where_set
from tilewise.backends.hopper.listed import visible_queries
from tilewise.backends.hopper.lists import Cursor, announced, is_partial, tile_number
from tilewise.backends.hopper.operands import accumulator, columns, left_operand, operand_for, spans, zeros
from tilewise.backends.hopper.ring import matrix, stage, wait_full
from tilewise.backends.hopper.softmax import LOG2E, logistic, tanh


@aggregate
class ListedQueries:
    """A query tile of a list."""

    cursor: Cursor
    partial: gl.tensor
    h: gl.tensor  # a query head


@gluon.jit
def listed_queries(rings, n, h):
    """The n-th query tile, one of a list, when it has landed."""
    wait_full(rings.q, n)
    cursor = announced(rings.listed[0], stage(rings.q, n))
    return ListedQueries(cursor=cursor, partial=is_partial(cursor), h=h)


@gluon.jit
def as_operand(x_tile, n: gl.constexpr, dtype: gl.constexpr):
    """A [64, M] tile in registers as the left operand of a product with n columns."""
    LAYOUT: gl.constexpr = left_operand(n)
    return gl.convert_layout(x_tile.to(dtype), LAYOUT, assert_trivial=True)


@gluon.constexpr_function
def pieces(used, width):
    """The columns that a product over `width` of them takes, of which the first `used` (0: all) are not zeros."""
    return spans(0, used if used > 0 else width)


@gluon.constexpr_function
def score_pieces(held, used, width):
    """The same, those that are held in registers first."""
    return spans(0, held) + spans(held, used if used > 0 else width)


@gluon.jit
def hold(rows, n: gl.constexpr, HELD: gl.constexpr):
    """The first HELD columns as left operands of products with n columns."""
    LAYOUT: gl.constexpr = left_operand(n)
    SPANS: gl.constexpr = spans(0, HELD)
    fragments = ()
    for i in gl.static_range(len(SPANS)):
        fragments += (columns(rows, SPANS[i][0], SPANS[i][1]).load(LAYOUT),)
    return fragments


@gluon.jit
def product(rows, others, acc, FROM: gl.constexpr, USED: gl.constexpr, fragments=None, HELD: gl.constexpr = 0):
    """rows · othersᵀ, issued: over the columns that are not zeros, from acc or (not FROM) from 0. Of HELD columns the left
    operands are fragments in registers."""
    WIDTH: gl.constexpr = rows.type.shape[1]
    SPANS: gl.constexpr = score_pieces(HELD, USED, WIDTH)
    FRAGMENTS: gl.constexpr = len(spans(0, HELD))
    token = acc
    for i in gl.static_range(len(SPANS)):
        right = columns(others, SPANS[i][0], SPANS[i][1]).permute((1, 0))
        if i < FRAGMENTS:
            token = warpgroup_mma(fragments[i], right, token, use_acc=FROM or i > 0, is_async=True)
        else:
            left = columns(rows, SPANS[i][0], SPANS[i][1])
            token = warpgroup_mma(left, right, token, use_acc=FROM or i > 0, is_async=True)
    return token


@gluon.jit
def issue_scores(rows, ring, n, N: gl.constexpr, USED: gl.constexpr, fragments=None, HELD: gl.constexpr = 0):
    """S or dP against the n-th tile that is streamed, issued: K or V against Q or dO, or the reverse. More: see `product`."""
    wait_full(ring, n)
    return product(rows, matrix(ring, n), zeros(N), False, USED, fragments, HELD)


@gluon.constexpr_function
def gradient_spans(used, width):
    """The columns of a gradient by accumulator."""
    return spans(0, used if used > 0 else width)


@gluon.jit
def no_gradient(SPANS: gl.constexpr):
    """A gradient of zeros, by accumulator."""
    parts = ()
    for i in gl.static_range(len(SPANS)):
        parts += (zeros(SPANS[i][1]),)
    return parts


@gluon.jit
def add_product(x_tile, others, parts, SPANS: gl.constexpr):
    """parts += x · others, issued by accumulator; x is a left operand."""
    tokens = ()
    for i in gl.static_range(len(SPANS)):
        right = columns(others, SPANS[i][0], SPANS[i][1])
        tokens += (warpgroup_mma(operand_for(x_tile, SPANS[i][1]), right, parts[i], is_async=True),)
    return tokens


@gluon.jit
def first_parts(parts, N: gl.constexpr, FIRST: gl.constexpr = 0):
    """N of a tuple."""
    found = ()
    for i in gl.static_range(N):
        found += (parts[FIRST + i],)
    return found


@gluon.jit
def times(parts, factor):
    found = ()
    for i in gl.static_range(len(parts)):
        found += (parts[i] * factor,)
    return found


@gluon.jit
def accumulator_from(vector, like):
    """Every row is the vector, in registers of its own: otherwise the copies sink between wgmma's fence and the wgmma, and
    ptxas waits there (C7517)."""
    x, like = gl.broadcast(vector[None, :], like)
    return opaque_float(x)


@gluon.jit
def sum_of(vector, column, like):
    """The same of a vector over columns and one over rows."""
    x, like = gl.broadcast(vector[None, :], like)
    y, like = gl.broadcast(column[:, None], like)
    return gl.inline_asm_elementwise("add.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def of_head(tile, g, a, C: gl.constexpr):
    """The tile of keys for the g-th query head of its group."""
    if C.ALIBI != "":
        h = tile.work.h * a.group.value + g
        slope = slope_of(tile.work.b, h, a)
        if C.ACC_FROM_STATS:
            slope = slope / a.scale_log2  # scores accumulate before they are scaled
        return HeldTile(work=tile.work, band=tile.band, index=tile.index, h=h, slope=slope)
    elif C.DROPOUT or C.BIAS != "":
        return HeldTile(
            work=tile.work, band=tile.band, index=tile.index, h=tile.work.h * a.group.value + g, slope=tile.slope
        )
    else:
        return tile


@gluon.jit
def of_outer(tile, i, a, C: gl.constexpr):
    """The tile of keys in turn i of a sweep's outer loop."""
    if C.GROUPED:
        return tile
    else:
        return of_head(tile, i, a, C)


@gluon.jit
def of_inner(tile, j, a, C: gl.constexpr):
    """The same in turn j of the inner loop."""
    if C.GROUPED:
        return of_head(tile, j, a, C)
    else:
        return tile


@gluon.jit
def positions(like, tile, m, k0, C: gl.constexpr):
    """Slope times the positions of keys by row and of queries by column, from the tile's first query on. Of a list, m is a
    ListedQueries."""
    LAYOUT: gl.constexpr = like.type.layout
    first = m
    if C.LISTS is not None:
        first = tile_number(m.cursor) * C.BLOCK_M
    ahead = tile.work.len_k - tile.work.len_q
    slope = opaque_float(tile.slope)
    keys = rows_from(slope * (k0 - ahead - first).to(gl.float32), slope, LAYOUT)
    return keys, columns_from(0.0, slope, C.BLOCK_M, LAYOUT)


@gluon.jit
def accumulator_with_alibi(lse2, like, tile, m, k0, C: gl.constexpr):
    """What S accumulates from: -lse by column less slope times the distance."""
    keys, queries = positions(like, tile, m, k0, C)
    if C.ALIBI == "past":
        return sum_of(lse2 - queries, keys, like)
    else:
        return opaque_float(less_distance(gl.broadcast(lse2[None, :], like)[0], keys, queries, tile.slope))


@gluon.jit
def statistic(stats, at, WHICH: gl.constexpr, C: gl.constexpr):
    """A statistic of the query tile in stage `at`, by column: "lse2" in units of log 2 (or what S accumulates from), "delta"."""
    S_LAYOUT: gl.constexpr = accumulator(C.BLOCK_M)
    FIRST: gl.constexpr = 0 if WHICH == "lse2" else C.BLOCK_M
    return stats.index(at).slice(FIRST, C.BLOCK_M, dim=0).load(gl.SliceLayout(0, S_LAYOUT))


@gluon.jit
def with_positions(x_tile, alibi, BY_COLUMN: gl.constexpr, C: gl.constexpr):
    """Scores with ALiBi. `alibi`: slope times positions by row and by column, and the slope. Where no key is ahead of its query,
    those of the queries, which stand by column or by row, are in the lse already."""
    if C.ALIBI == "past":
        if BY_COLUMN:
            return x_tile + alibi[0][:, None]
        else:
            return x_tile + alibi[1][None, :]
    else:
        return less_distance(x_tile, alibi[0], alibi[1], alibi[2])


@gluon.jit
def with_bias(x_tile, bias, C: gl.constexpr):
    if C.BIAS != "":
        return x_tile + as_scores(bias, x_tile.type.shape[1], C)
    else:
        return x_tile


@gluon.jit
def power(x_tile, C: gl.constexpr):
    """Weights of scores less the lse: in units of log 2, or with a bias in natural units."""
    if C.BIAS != "":
        return gl.exp2(x_tile * LOG2E)
    else:
        return gl.exp2(x_tile)


@gluon.jit
def weights(s_tile, lse2, a, C: gl.constexpr, alibi=None, BY_COLUMN: gl.constexpr = True, bias=None):
    """P, and what dP - delta is multiplied with: P times the softcap's slope. Without lse2, S accumulated from it. `bias` is as
    it was loaded."""
    if C.SCORES == "softcap":
        t_tile = tanh(s_tile * a.softcap_slope)
        x_tile = t_tile * a.scale_log2
        if alibi is not None:
            x_tile = with_positions(x_tile, alibi, BY_COLUMN, C)
        p_tile = power(with_bias(x_tile, bias, C) - lse2, C)
        return p_tile, p_tile * (1.0 - t_tile * t_tile)
    elif C.SCORES == "cap":
        # a quarter of the slope: gradients are scaled by four times as much
        r_tile = logistic(s_tile * a.softcap_slope)
        p_tile = gl.exp2(r_tile * a.scale_log2 - lse2)
        return p_tile, p_tile * (r_tile - r_tile * r_tile)
    else:
        x_tile = s_tile * a.scale_log2
        if alibi is not None:
            x_tile = with_positions(x_tile, alibi, BY_COLUMN, C)
        x_tile = with_bias(x_tile, bias, C)
        if lse2 is not None:
            x_tile = x_tile - lse2
        p_tile = power(x_tile, C)
        return p_tile, p_tile


@gluon.jit
def weights_of_list(p_tile, w_tile, work, queries, k0, a, C: gl.constexpr):
    """Weights against a query tile of a list, 0 where a query does not see a key."""
    if queries.partial:
        LAYOUT: gl.constexpr = p_tile.type.layout
        words = visible_queries(work, queries.h, k0, queries.cursor, a, LAYOUT, C)
        p_tile, w_tile = where_seen(words, p_tile, w_tile, C)
    return p_tile, w_tile


@gluon.jit
def where_seen(words, p_tile, w_tile, C: gl.constexpr):
    """Both weights, 0 where a bit is not set; without a softcap they are one."""
    p_tile = where_set(words, p_tile, 0.0)
    if C.SCORES == "softcap" or C.SCORES == "cap":
        w_tile = where_set(words, w_tile, 0.0)
    else:
        w_tile = p_tile
    return p_tile, w_tile


@gluon.jit
def queries_seen(tile, m, k0, C: gl.constexpr):
    """Whether some query of the tile at m does not see all of 64 keys from k0 on, and then which of them do, as words. Found
    before the scores are issued: later there are no registers for it."""
    LAYOUT: gl.constexpr = accumulator(C.BLOCK_M)
    words = no_words(C.BLOCK_M, LAYOUT)
    partial = not sees_all(tile.band, m, k0, 64, C)
    if partial:
        words = seeing_words(tile.band, opaque(m), opaque(k0), LAYOUT, C)
    return partial, words


@gluon.jit
def masked_weights(s_tile, lse2, tile, m, k0, a, C: gl.constexpr, bias=None, found=None):
    """Weights, 0 where a query does not see a key. Queries past the last have an lse of +inf, so theirs are 0 anyway. Of a list,
    m is a ListedQueries, else the tile's first query. `found`: as of `queries_seen`, where it was computed before."""
    if C.ACC_FROM_STATS:
        p_tile, w_tile = weights(s_tile, None, a, C)
    elif C.ALIBI != "":
        keys, queries = positions(s_tile, tile, m, k0, C)
        if C.ALIBI == "past":
            lse2 = lse2 + queries
        p_tile, w_tile = weights(s_tile, lse2[None, :], a, C, (keys, queries, tile.slope))
    else:
        p_tile, w_tile = weights(s_tile, lse2[None, :], a, C, bias=bias)
    if C.LISTS is not None:
        p_tile, w_tile = weights_of_list(p_tile, w_tile, tile.work, m, k0, a, C)
    elif found is not None:
        if found[0]:
            p_tile, w_tile = where_seen(found[1], p_tile, w_tile, C)
    else:
        if not sees_all(tile.band, m, k0, 64, C):
            # beside these, words keep more in memory than they free; so they do for packed sequences without a band
            if (C.EMPTY_ROWS and not (C.VARLEN and (C.BAND or C.LEFT))) or C.ALIBI != "":
                ok = visible(tile.band, m, k0, p_tile, C)
                p_tile = gl.where(ok, p_tile, 0.0)
                w_tile = gl.where(ok, w_tile, 0.0)
            else:
                LAYOUT: gl.constexpr = p_tile.type.layout
                words = seeing_words(tile.band, m, k0, LAYOUT, C)
                p_tile, w_tile = where_seen(words, p_tile, w_tile, C)
    return p_tile, w_tile
