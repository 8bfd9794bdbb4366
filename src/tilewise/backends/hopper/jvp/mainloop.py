"""One warpgroup, one key tile of the JVP: S = Q·Kᵀ and its derivative, online softmax, and the sums they weigh.

    over the keys seen so far, with p = exp2(x - m) and u = scale · (q_t·k + q·k_t):
    l = Σ p,   l_t = Σ p u,   o = Σ p v,   o_t = Σ p (u v + v_t),   m near max x        (x: scores in units of log 2)

A step issues the products of the last tile's weights with values, then those of the next scores: S, and behind it S_t, under
which the weights are computed. So o and o_t lag l, l_t and m by one tile, whose weights wait as words of 16-bit numbers.
"""

# No `from __future__ import annotations` here: aggregates check their fields against the annotations themselves.

from tilewise.backends.hopper.compat import (
    PINGPONG_BARRIER,
    aggregate,
    gl,
    gluon,
    named_barrier,
    opaque,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.backends.hopper.jvp.rings import tangent_in
from tilewise.backends.hopper.lane_words import where_set
from tilewise.backends.hopper.mainloop import key_words
from tilewise.backends.hopper.operands import (
    as_operand,
    columns,
    no_output,
    operand_for,
    output_spans,
    packed,
    rows_of,
    spans,
    zeros,
)
from tilewise.backends.hopper.ring import matrix_in, release, stage, wait_full
from tilewise.backends.hopper.softmax import INF, exp2_scale, lane_sum, rescale_output, scores


@aggregate
class JvpState:
    """The online softmax of a warpgroup and its derivative, from one key tile to the next."""

    o: gl.tuple  # fp32 accumulators [64, width], side by side
    o_t: gl.tuple
    p: gl.tensor  # [64, N / 2] words of two weights not yet in o and o_t
    w: gl.tuple  # the same of p u; () where neither q nor k moves
    m: gl.tensor  # [64]
    l: gl.tensor  # [64, 4], partial sums by lane
    l_t: gl.tuple  # the same; () as w
    rescale: gl.tensor  # [64], what o and o_t are still to be multiplied by


@gluon.constexpr_function
def slack_of(dtype):
    """How far a maximum may rise before m follows, in units of log 2. The product of a weight with u has to fit 16 bits: in fp16
    weights stay below 1."""
    return 0.0 if dtype == gl.float16 else 8.0


@gluon.constexpr_function
def column_spans(C):
    """The columns of a product over head dims."""
    return spans(0, C.QK_COLUMNS if C.QK_COLUMNS > 0 else C.BLOCK_D)


@gluon.constexpr_function
def terms_of_tangent(C):
    """How many S_t is a sum of: none, Q_t·Kᵀ, Q·K_tᵀ or both."""
    return int(C.Q_T) + int(C.K_T)


@gluon.jit
def add_scores(q_tile, k_tile, token, FIRST: gl.constexpr, C: gl.constexpr):
    """token + q kᵀ, or with FIRST q kᵀ alone, issued."""
    SPANS: gl.constexpr = column_spans(C)
    for i in gl.static_range(len(SPANS)):
        keys = columns(k_tile, SPANS[i][0], SPANS[i][1]).permute((1, 0))
        queries = columns(q_tile, SPANS[i][0], SPANS[i][1])
        token = warpgroup_mma(queries, keys, token, use_acc=not FIRST or i > 0, is_async=True)
    return token


@gluon.jit
def issue_scores(rings, n, WG: gl.constexpr, C: gl.constexpr):
    """S(n), and behind it S_t(n) if queries or keys move: their tokens."""
    at = stage(rings.k, n)
    q_at = opaque(n * 0 + WG)  # in every step: the addresses of all products are not kept in registers
    q_tile = matrix_in(rings.q, q_at)
    k_tile = matrix_in(rings.k, at)
    s_token = add_scores(q_tile, k_tile, zeros(C.BLOCK_N), True, C)
    if C.Q_T and C.K_T:
        u_token = add_scores(tangent_in(rings.q_t, q_at), k_tile, zeros(C.BLOCK_N), True, C)
        u_token = add_scores(q_tile, tangent_in(rings.k_t, at), u_token, False, C)
        return s_token, (u_token,)
    elif C.Q_T:
        return s_token, (add_scores(tangent_in(rings.q_t, q_at), k_tile, zeros(C.BLOCK_N), True, C),)
    elif C.K_T:
        return s_token, (add_scores(q_tile, tangent_in(rings.k_t, at), zeros(C.BLOCK_N), True, C),)
    else:
        return s_token, ()


@gluon.jit
def softmax_step(s_tile, m, scale, SLACK: gl.constexpr, MASKED: gl.constexpr):
    """Weights of a tile relative to 2**m, the raised m, and the factor that rescales older weights: see softmax.softmax_step."""
    top = gl.max(s_tile, 1) * scale
    new_m = gl.where(top > m + SLACK, top, m)
    shift = new_m
    if MASKED:
        shift = gl.where(new_m == -INF, 0.0, new_m)  # a row that has seen nothing yet
    p_tile = gl.exp2(s_tile * scale - shift[:, None])  # [64, N]
    return p_tile, new_m, gl.exp2(m - shift)


@gluon.jit
def weigh(u_token, p_tile, words, rings, n, a, MASKED: gl.constexpr, C: gl.constexpr):
    """p u as words, and its sums by lane, when S_t(n) is done; () where there is none. Then the keys' stage is free."""
    if C.Q_T or C.K_T:
        u_tile = warpgroup_mma_wait(0, deps=[u_token[0]])  # [64, N]
        release(rings.k, n)
        if MASKED:
            u_tile = where_set(words, u_tile, 0.0)  # what a row does not see may be infinite, and 0 · inf is no number
        w_tile = p_tile * (u_tile * a.scale)
        return (packed(w_tile, rings.k.tiles.dtype),), (lane_sum(w_tile),)
    else:
        release(rings.k, n)
        return (), ()


@gluon.jit
def issue_values(state, v_ring, v_t, n, C: gl.constexpr):
    """o += p v and o_t += p v_t + (p u) v of value tile n, issued by accumulator; the weights as operands, which are read until
    then."""
    SPANS: gl.constexpr = output_spans(C)
    at = stage(v_ring, n)
    v_tile = matrix_in(v_ring, at)
    weights = (as_operand(state.p, v_ring.tiles.dtype, C),)
    if C.Q_T or C.K_T:
        weights += (as_operand(state.w[0], v_ring.tiles.dtype, C),)
    tokens = ()
    moving = ()
    for i in gl.static_range(len(SPANS)):
        WIDTH: gl.constexpr = SPANS[i][1]
        v_part = columns(v_tile, SPANS[i][0], WIDTH)
        o_part = rescale_output(state.o[i], rows_of(state.rescale, state.o[i]), WIDTH)
        t_part = rescale_output(state.o_t[i], rows_of(state.rescale, state.o_t[i]), WIDTH)
        tokens += (warpgroup_mma(operand_for(weights[0], WIDTH), v_part, o_part, is_async=True),)
        if C.Q_T or C.K_T:
            t_part = warpgroup_mma(operand_for(weights[1], WIDTH), v_part, t_part, is_async=True)
        if C.V_T:
            v_t_part = columns(tangent_in(v_t, at), SPANS[i][0], WIDTH)
            t_part = warpgroup_mma(operand_for(weights[0], WIDTH), v_t_part, t_part, is_async=True)
        moving += (t_part,)
    return tokens + moving, weights


@gluon.jit
def accumulators_of(done, C: gl.constexpr):
    """o and o_t, which come first of what a wait gives."""
    COUNT: gl.constexpr = len(output_spans(C))
    o = ()
    o_t = ()
    for i in gl.static_range(COUNT):
        o += (done[i],)
        o_t += (done[COUNT + i],)
    return o, o_t


@gluon.jit
def first_step(rings, n, rows, key0, a, MASKED: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """A work tile's first key tile: nothing is in flight yet."""
    wait_full(rings.k, n)
    s_token, u_token = issue_scores(rings, n, WG, C)
    words = rows.row0
    if MASKED:
        words = key_words(rows, key0, a, C)
    BEHIND: gl.constexpr = len(column_spans(C)) * terms_of_tangent(C)
    s_tile = scores(warpgroup_mma_wait(BEHIND, deps=[s_token]), a, C)  # [64, N]
    if MASKED:
        s_tile = where_set(words, s_tile, -INF)
    m = gl.full([64], -INF, gl.float32, gl.SliceLayout(1, s_tile.type.layout))
    SLACK: gl.constexpr = slack_of(rings.k.tiles.dtype)
    p_tile, m, _ = softmax_step(s_tile, m, exp2_scale(a, C), SLACK, True)
    l = lane_sum(p_tile)
    wait_full(rings.v, n)
    w, l_t = weigh(u_token, p_tile, words, rings, n, a, MASKED, C)
    p = packed(p_tile, rings.k.tiles.dtype)
    return JvpState(o=no_output(C), o_t=no_output(C), p=p, w=w, m=m, l=l, l_t=l_t, rescale=gl.full_like(m, 1.0))


@gluon.jit
def step(state, rings, n, more, rows, key0, a, MASKED: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """Key tile n, which has landed as have the values before it; `more`: another follows. The warpgroups issue the products of
    a step in turns: the softmax of one runs under the products of the other, and of its own S_t."""
    BEHIND: gl.constexpr = len(column_spans(C)) * terms_of_tangent(C)
    named_barrier("sync", PINGPONG_BARRIER + WG)
    tokens, weights = issue_values(state, rings.v, rings.v_t, n - 1, C)
    o, o_t = accumulators_of(warpgroup_mma_wait(0, deps=tokens + weights), C)
    release(rings.v, n - 1)
    s_token, u_token = issue_scores(rings, n, WG, C)
    named_barrier("arrive", PINGPONG_BARRIER + (1 - WG))
    words = rows.row0
    if MASKED:
        words = key_words(rows, key0, a, C)
    s_tile = scores(warpgroup_mma_wait(BEHIND, deps=[s_token]), a, C)  # [64, N]
    if MASKED:
        s_tile = where_set(words, s_tile, -INF)
    SLACK: gl.constexpr = slack_of(rings.k.tiles.dtype)
    p_tile, m, rescale = softmax_step(s_tile, state.m, exp2_scale(a, C), SLACK, MASKED)
    added = lane_sum(p_tile)
    l = state.l * rows_of(rescale, added) + added
    # the wait for the next keys is a loop, hence the boundary of a basic block: without one ptxas moves all of the softmax below
    # the wait for S_t, and nothing overlaps
    wait_full(rings.k, n + 1, more)
    w, l_t = weigh(u_token, p_tile, words, rings, n, a, MASKED, C)
    if C.Q_T or C.K_T:
        l_t = (state.l_t[0] * rows_of(rescale, added) + l_t[0],)
    p = packed(p_tile, rings.k.tiles.dtype)
    wait_full(rings.v, n)
    return JvpState(o=o, o_t=o_t, p=p, w=w, m=m, l=l, l_t=l_t, rescale=rescale)


@gluon.jit
def last_values(state, rings, n, C: gl.constexpr):
    """The state when the products with its last value tile, n, are done."""
    tokens, weights = issue_values(state, rings.v, rings.v_t, n, C)
    o, o_t = accumulators_of(warpgroup_mma_wait(0, deps=tokens + weights), C)
    release(rings.v, n)
    return JvpState(o=o, o_t=o_t, p=state.p, w=state.w, m=state.m, l=state.l, l_t=state.l_t, rescale=state.rescale)
