"""The consumers where a gradient of 64 keys fills a warpgroup's registers: one keeps dV, the other dK.

    values:  S = K Qᵀ,   P = exp2(x - lse2),          dv += P dO
    keys:    dP = V dOᵀ, dS = P ∘ (dP - delta),       dk += dS Q

P goes from the first to the second through shared memory, in fp32. Each issues its next product of scores before its last one is
done, and what it computes between products runs under the other's. dQ has a kernel of its own.
"""

from __future__ import annotations

from tilewise.backends.hopper.backward.scores import (
    add_product,
    as_operand,
    first_parts,
    gradient_spans,
    hold,
    issue_scores,
    listed_queries,
    masked_weights,
    no_gradient,
    of_head,
    score_pieces,
    statistic,
    times,
)
from tilewise.backends.hopper.bias import load_by_column, raise_flag
from tilewise.backends.hopper.compat import (
    KV_READ_BARRIER,
    gl,
    gluon,
    mbarrier,
    named_barrier,
    opaque,
    warpgroup_mma_wait,
)
from tilewise.backends.hopper.dropout import dropped, kept_by_column, signed
from tilewise.backends.hopper.epilogue import await_stores, store_gradient, store_rows
from tilewise.backends.hopper.grad_tile import HeldTile, first_place, locate_keys, next_place, sweep_of
from tilewise.backends.hopper.operands import accumulator, zeros
from tilewise.backends.hopper.ring import matrix, phase, release, stage, wait_full
from tilewise.backends.hopper.work_tile import tile_at
from tilewise.backends.hopper.zeroing import zero_unseeing_queries, zero_unseen_keys


@gluon.jit
def issue_next(
    tokens, read_ring, n, rows, held, next_ring, USED: gl.constexpr, HELD: gl.constexpr, LAST: gl.constexpr, C: gl.constexpr
):
    """After a gradient's product is issued: the next product of scores behind it, over USED columns. The gradient's reads
    `read_ring`."""
    BEHIND: gl.constexpr = len(score_pieces(HELD, USED, rows.type.shape[1]))
    s_token = tokens[0]
    if LAST:
        gradient = awaited(tokens, 0)
    else:
        s_token = issue_scores(rows, next_ring, n + 1, C.BLOCK_M, USED, held, HELD)
        gradient = awaited(tokens, BEHIND)
    release(read_ring, n)
    return gradient, s_token


@gluon.jit
def awaited(tokens, LEFT: gl.constexpr):
    """A gradient's parts, when all products but the last so many are done."""
    if len(tokens) == 1:
        return (warpgroup_mma_wait(LEFT, deps=[tokens[0]]),)
    else:
        done = warpgroup_mma_wait(LEFT, deps=tokens)
        return first_parts(done, len(tokens))


@gluon.jit
def zero_listed_queries(rings, n, h, tile, a, WG: gl.constexpr, C: gl.constexpr):
    if C.EMPTY_ROWS:
        zero_unseeing_queries(rings, n, listed_queries(rings, n, h), tile, a, WG, C)


@gluon.jit
def zero_next_queries(rings, n, m, tile, a, WG: gl.constexpr, LAST: gl.constexpr, C: gl.constexpr):
    """Before the n-th tile's last product, for the scores behind it: the queries from m on; of a list, m is their head."""
    if not LAST:
        if C.LISTS is not None:
            zero_listed_queries(rings, n + 1, m, tile, a, WG, C)
        else:
            zero_unseeing_queries(rings, n + 1, m, tile, a, WG, C)


@gluon.jit
def values_step(carried, rings, n, m, tile, k_tile, held, a, LAST: gl.constexpr, C: gl.constexpr):
    """The n-th query tile, whose S is in flight. `m`: its first query and that of the next; of a list, its head twice."""
    dv, s_token = carried
    DTYPE: gl.constexpr = rings.q.tiles.dtype
    lse2 = statistic(rings.stats, stage(rings.q, n), "lse2", C)
    queries = m[0]
    if C.LISTS is not None:
        queries = listed_queries(rings, n, m[0])
    if C.DROPOUT:
        kept = kept_by_column(queries, tile.work.start, tile.work.b, tile.h, a, C)
    bias = lse2
    if C.BIAS != "":
        bias = load_by_column(tile.work.b, tile.h, queries, tile.work.start, a, C)
    s_tile = warpgroup_mma_wait(0, deps=[s_token])  # [64, M]
    release(rings.q, n)
    p_tile, w_tile = masked_weights(s_tile, lse2, tile, queries, tile.work.start, a, C, bias)
    if C.DROPOUT:
        w_tile = signed(w_tile, kept, False)  # for the other warpgroup
        p_tile = dropped(p_tile, kept, False)
    w_ring = rings.exchange
    at = stage(w_ring, n)
    mbarrier.wait(w_ring.empty.index(at), phase(w_ring, n) ^ 1)
    w_ring.tiles.index(at).store(w_tile)
    mbarrier.arrive(w_ring.full.index(at), count=1)
    zero_next_queries(rings, n, m[1], tile, a, 0, LAST, C)
    wait_full(rings.do, n)
    DV: gl.constexpr = gradient_spans(C.V_COLUMNS, C.BLOCK_DV)
    dv_token = add_product(as_operand(p_tile, DV[0][1], DTYPE), matrix(rings.do, n), dv, DV)
    return issue_next(dv_token, rings.do, n, k_tile, held, rings.q, C.QK_COLUMNS, C.HELD[0], LAST, C)


@gluon.jit
def keys_step(carried, rings, n, m, tile, v_tile, held, a, LAST: gl.constexpr, C: gl.constexpr):
    """The n-th query tile, whose dP is in flight."""
    dk, dp_token = carried
    DTYPE: gl.constexpr = rings.q.tiles.dtype
    S_LAYOUT: gl.constexpr = accumulator(C.BLOCK_M)
    wait_full(rings.q, n)
    delta = statistic(rings.stats, stage(rings.q, n), "delta", C)
    dp_tile = warpgroup_mma_wait(0, deps=[dp_token])  # [64, M]
    release(rings.do, n)
    if not C.DROPOUT:
        dp_tile = dp_tile - delta[None, :]
    w_ring = rings.exchange
    wait_full(w_ring, n)
    w_tile = w_ring.tiles.index(stage(w_ring, n)).load(S_LAYOUT)
    release(w_ring, n)
    if C.DROPOUT:  # weights that are dropped are negative
        dp_tile = gl.where(w_tile < 0, 0.0, dp_tile * a.keep_scale) - delta[None, :]
        w_tile = gl.abs(w_tile)
    ds_tile = w_tile * dp_tile
    zero_next_queries(rings, n, m[1], tile, a, 1, LAST, C)
    DK: gl.constexpr = gradient_spans(C.QK_COLUMNS, C.BLOCK_D)
    dk_token = add_product(as_operand(ds_tile, DK[0][1], DTYPE), matrix(rings.q, n), dk, DK)
    return issue_next(dk_token, rings.q, n, v_tile, held, rings.do, C.V_COLUMNS, C.HELD[1], LAST, C)


@gluon.jit
def step(carried, rings, n, m, tile, kv_tile, kept, a, LAST: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """(gradient, product in flight) after the n-th query tile. `kept`: fragments of K or V in registers."""
    if WG == 0:
        return values_step(carried, rings, n, m, tile, kv_tile, kept, a, LAST, C)
    else:
        return keys_step(carried, rings, n, m, tile, kv_tile, kept, a, LAST, C)


@gluon.constexpr_function
def own_spans(WG, C):
    """The columns of a warpgroup's gradient, dV or dK, by accumulator."""
    return gradient_spans(C.V_COLUMNS, C.BLOCK_DV) if WG == 0 else gradient_spans(C.QK_COLUMNS, C.BLOCK_D)


@gluon.jit
def gradient(rings, tile, kv_tile, sweep, q_base, a, WG: gl.constexpr, C: gl.constexpr):
    """dV (WG 0, from K) or dK (WG 1, from V) of 64 keys from all queries of all heads of the group."""
    USED: gl.constexpr = C.QK_COLUMNS if WG == 0 else C.V_COLUMNS
    score_ring = rings.q if WG == 0 else rings.do
    grad = no_gradient(own_spans(WG, C))
    kept = hold(kv_tile, C.BLOCK_M, C.HELD[WG])
    zero_unseeing_queries(rings, q_base, sweep.tile * C.BLOCK_M, tile, a, WG, C)
    token = issue_scores(kv_tile, score_ring, q_base, C.BLOCK_M, USED, kept, C.HELD[WG])
    last = q_base + tile.work.count * a.group.value - 1
    at = first_place(sweep)
    for j in range(q_base, last):
        n = j
        if WG == 0 and C.EMPTY_ROWS and not C.VARLEN:
            n = opaque(j)  # where rows are zeroed, there is no register for each address as a variable of the loop
        after = next_place(at, sweep, tile.work, a, C)
        m = at.tile * C.BLOCK_M, after.tile * C.BLOCK_M
        own = of_head(tile, at.g, a, C) if WG == 0 else tile
        grad, token = step((grad, token), rings, n, m, own, kv_tile, kept, a, False, WG, C)
        at = after
    m = at.tile * C.BLOCK_M, at.tile * C.BLOCK_M
    own = of_head(tile, at.g, a, C) if WG == 0 else tile
    grad, _ = step((grad, token), rings, last, m, own, kv_tile, kept, a, True, WG, C)
    return grad


@gluon.jit
def listed_gradient(rings, tile, kv_tile, q_base, a, WG: gl.constexpr, C: gl.constexpr):
    """The same from the queries of a list."""
    work = tile.work
    score_ring = rings.q if WG == 0 else rings.do
    grad = no_gradient(own_spans(WG, C))
    USED: gl.constexpr = C.QK_COLUMNS if WG == 0 else C.V_COLUMNS
    kept = hold(kv_tile, C.BLOCK_M, C.HELD[WG])
    for g in range(a.group.value):
        h = work.h * a.group.value + g
        n0 = q_base + g * work.count
        last = n0 + work.count - 1
        zero_listed_queries(rings, n0, h, tile, a, WG, C)
        token = issue_scores(kv_tile, score_ring, n0, C.BLOCK_M, USED, kept, C.HELD[WG])
        held = of_head(tile, g, a, C) if WG == 0 else tile
        for n in range(n0, last):
            grad, token = step((grad, token), rings, n, (h, h), held, kv_tile, kept, a, False, WG, C)
        grad, _ = step((grad, token), rings, last, (h, h), held, kv_tile, kept, a, True, WG, C)
    return grad


@gluon.jit
def gradient_of(rings, tile, kv_tile, q_base, i, a, WG: gl.constexpr, C: gl.constexpr):
    if C.LISTS is not None:
        return listed_gradient(rings, tile, kv_tile, q_base, a, WG, C)
    else:
        return gradient(rings, tile, kv_tile, sweep_of(tile.work, i, C), q_base, a, WG, C)


@gluon.jit
def process_tile(grad_desc, rings, tile, q_base, i, a, WG: gl.constexpr, C: gl.constexpr):
    """One work tile, the i-th of this program: its gradient leaves through the memory of V or of K."""
    HALF: gl.constexpr = WG * 32
    wait_full(rings.k, tile.index)
    wait_full(rings.v, tile.index)
    k_tile = matrix(rings.k, tile.index)
    v_tile = matrix(rings.v, tile.index)
    half_start = tile.work.start + HALF
    zero_unseen_keys(k_tile.slice(HALF, 32, dim=0), v_tile.slice(HALF, 32, dim=0), tile, half_start, 32, a, C)
    if WG == 0:
        grad = gradient_of(rings, tile, k_tile, q_base, i, a, WG, C)
        if C.DROPOUT:
            grad = times(grad, a.keep_scale)
        ring = rings.v
        rows = a.dv
    else:
        grad = times(gradient_of(rings, tile, v_tile, q_base, i, a, WG, C), a.scale)
        ring = rings.k
        rows = a.dk
    for j in gl.static_range(len(grad)):
        raise_flag(grad[j], a, C)
    # located again rather than kept in registers
    work, _ = locate_keys(a, tile_at(a, opaque(i)), C)
    named_barrier("sync", KV_READ_BARRIER)
    SPANS: gl.constexpr = own_spans(WG, C)
    store_gradient(grad_desc, rows, grad, ring.tiles.index(0), work, work.k_start, work.start, work.len_k, SPANS, C)
    await_stores()
    release(ring, tile.index)


@gluon.jit
def consume_split(grad_desc, rings, a, WG: gl.constexpr, C: gl.constexpr):
    """All work tiles of this program: dV of each (WG 0) or dK (WG 1)."""
    q_base = 0  # query tiles of the work tiles before
    kv_index = 0
    i = 0
    t = tile_at(a, i)
    while t >= 0:
        work, band = locate_keys(a, t, C)
        tile = HeldTile(work=work, band=band, index=kv_index, h=kv_index, slope=kv_index)
        if C.VARLEN:
            if work.count > 0:
                process_tile(grad_desc, rings, tile, q_base, i, a, WG, C)
                kv_index += 1
            else:
                # keys without a single query; writes nothing past the sequence's end
                WIDTH: gl.constexpr = C.BLOCK_DV if WG == 0 else C.BLOCK_D
                rows = a.dv if WG == 0 else a.dk
                store_rows(zeros(WIDTH), rows, work.h, work.k_start, work.start, work.len_k)
        else:
            process_tile(grad_desc, rings, tile, q_base, i, a, WG, C)
            kv_index += 1
        q_base += work.count * a.group.value
        i += 1
        t = tile_at(a, i)
