"""The consumer where each warpgroup has 64 keys of its own: dK, dV of 64 keys, and half of dQ.

    over the queries seen so far:   dv = Σ P dO,   dk = Σ dS Q        P = exp2(x - lse2),   dS = P ∘ (dP - delta)

All score tiles are transposed, [keys, queries], so P and dS are left operands as they stand in registers. Only dS goes through
shared memory: dQ(n) = dS(n)ᵀ K needs the other warpgroup's half of the keys too. It is computed one query tile later, so that
neither warpgroup waits for the other's scores, and the two drift apart: one computes weights while the other multiplies. So dQ
of a work tile's last queries is computed under the next one's first ones, and K has two stages.

Where dQ has a kernel of its own and registers are left, `overlapped_gradients` takes another order: the next S is issued behind
the last dV and dK, and dP behind it when those two are done. So a product of its own is in flight while it computes weights.
"""

from __future__ import annotations

from tilewise.backends.hopper.backward.drop import dropped_both
from tilewise.backends.hopper.backward.reduce import reduce_dq
from tilewise.backends.hopper.backward.scores import (
    accumulator_from,
    accumulator_with_alibi,
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
    of_inner,
    of_outer,
    product,
    queries_seen,
    score_pieces,
    statistic,
    times,
)
from tilewise.backends.hopper.bias import load_by_column, raise_flag
from tilewise.backends.hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    opaque,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.backends.hopper.dropout import dropped, kept_by_column
from tilewise.backends.hopper.epilogue import await_stores, store_gradient, store_rows
from tilewise.backends.hopper.grad_tile import (
    HeldTile,
    first_statistics,
    head_statistics,
    listed_statistics,
    locate_keys,
    statistics_at,
    sweep_of,
    sweep_sides,
    swept_tile,
)
from tilewise.backends.hopper.lists import tile_number
from tilewise.backends.hopper.operands import accumulator, columns, zeros
from tilewise.backends.hopper.ring import matrix, matrix_in, release, stage, wait_full
from tilewise.backends.hopper.work_tile import tile_at
from tilewise.backends.hopper.zeroing import zero_unseeing_queries, zero_unseen_keys


@gluon.jit
def issue_dq(k_tile, ds_ring, n, live, WG: gl.constexpr, C: gl.constexpr):
    """This warpgroup's part of dQ of the query tile before the n-th: half of the columns (64 queries) or rows (128).
    Where there was none before (not `live`), the result means nothing."""
    at = (n & 1) ^ 1
    mbarrier.wait(ds_ring.full.index(at), ((n - 1) >> 1) & 1, pred=live)
    ds_tile = ds_ring.tiles.index(at)
    OWN: gl.constexpr = C.DQ_PARTS[WG]
    zero = zeros(OWN)
    if C.BLOCK_M == 128:
        rows = ds_tile.slice(WG * 64, 64, dim=1).permute((1, 0))
        token = warpgroup_mma(rows, columns(k_tile, 0, OWN), zero, use_acc=False, is_async=True)
    else:
        part = k_tile.slice(WG * C.DQ_PARTS[0], OWN, dim=1)
        token = warpgroup_mma(ds_tile.permute((1, 0)), part, zero, use_acc=False, is_async=True)
    return token


@gluon.jit
def step(grads, held, rings, tile, n, m, before, a, FIRST: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """One query tile; also dQ of the one before, whose statistics are tile `before`. The FIRST of these keys follows one of
    the keys before. `held`: fragments of K and V in registers."""
    DTYPE: gl.constexpr = rings.q.tiles.dtype
    BEHIND: gl.constexpr = len(score_pieces(C.HELD[1], C.V_COLUMNS, C.BLOCK_DV))
    DK: gl.constexpr = gradient_spans(C.QK_COLUMNS, C.BLOCK_D)
    DV: gl.constexpr = gradient_spans(C.V_COLUMNS, C.BLOCK_DV)
    dk, dv = grads
    # Every ring of queries has two stages and advances alike. Opaque: else each address is a variable or constant of the loop
    # in a register of its own.
    n = opaque(n)
    index = opaque(tile.index)
    at = n & 1
    parity = (n >> 1) & 1
    q_tile = matrix_in(rings.q, at)
    do_tile = matrix_in(rings.do, at)
    k_tile = matrix(rings.k, index)
    k_rows = k_tile.slice(WG * 64, 64, dim=0)
    v_rows = matrix(rings.v, index).slice(WG * 64, 64, dim=0)
    zero = zeros(C.BLOCK_M)
    first = m
    if C.EMPTY_ROWS and C.LISTS is None and not C.VARLEN:
        first = opaque(m)  # else what is computed from it is kept for the branch that zeroes
    zero_unseeing_queries(rings, n, first, tile, a, WG, C)
    found = None
    # for packed sequences, words found here take a register too many
    if C.EMPTY_ROWS and not C.VARLEN and C.ALIBI == "" and C.LISTS is None:
        found = queries_seen(tile, m, tile.work.start + 64 * WG, C)
    mbarrier.wait(rings.q.full.index(at), parity)
    bias = zero
    if C.ACC_FROM_STATS:
        lse2 = statistic(rings.stats, at, "lse2", C)
        if C.ALIBI != "":
            s_acc = accumulator_with_alibi(lse2, zero, tile, m, tile.work.start + 64 * WG, C)
        else:
            s_acc = accumulator_from(lse2, zero)
        mbarrier.wait(rings.do.full.index(at), parity)
        dp_acc = accumulator_from(statistic(rings.stats, at, "delta", C), zero)
        s_token = product(k_rows, q_tile, s_acc, True, C.QK_COLUMNS, held[0], C.HELD[0])
        dp_token = product(v_rows, do_tile, dp_acc, True, C.V_COLUMNS, held[1], C.HELD[1])
    else:
        s_token = product(k_rows, q_tile, zero, False, C.QK_COLUMNS, held[0], C.HELD[0])
        mbarrier.wait(rings.do.full.index(at), parity)
        dp_token = product(v_rows, do_tile, zero, False, C.V_COLUMNS, held[1], C.HELD[1])
        if C.DROPOUT:
            kept = kept_by_column(m, tile.work.start + 64 * WG, tile.work.b, tile.h, a, C)
        if C.BIAS != "":
            bias = load_by_column(tile.work.b, tile.h, m, tile.work.start + 64 * WG, a, C)
        lse2 = statistic(rings.stats, at, "lse2", C)
    s_tile = warpgroup_mma_wait(BEHIND, deps=[s_token])  # [64, M]
    p_tile, w_tile = masked_weights(s_tile, lse2, tile, m, tile.work.start + 64 * WG, a, C, bias, found)
    if C.REDUCE_DQ:
        # both warpgroups are done with step n - 1, and so with dQ(n - 2)
        mbarrier.wait(rings.q.empty.index(at ^ 1), ((n - 1) >> 1) & 1)
    dp_tile = warpgroup_mma_wait(0, deps=[dp_token])  # [64, M]
    if C.DROPOUT:
        p_tile, dp_tile = dropped_both(p_tile, dp_tile, kept)
        dp_tile = dp_tile * a.keep_scale
    if not C.ACC_FROM_STATS:
        dp_tile = dp_tile - statistic(rings.stats, at, "delta", C)[None, :]
    ds_tile = (w_tile * dp_tile).to(DTYPE)
    if C.REDUCE_DQ:
        rings.exchange.tiles.index(at).slice(WG * 64, 64, dim=0).store(ds_tile)
    dv_token = add_product(as_operand(p_tile, DV[0][1], DTYPE), do_tile, dv, DV)
    if C.REDUCE_DQ:
        fence_async_shared()
        mbarrier.arrive(rings.exchange.full.index(at), count=1)
        live = True
        dq_keys = k_tile
        if FIRST:
            live = n > 0
            dq_keys = matrix(rings.k, index + 1)  # of two stages, so it is that of index - 1
        dq_token = issue_dq(dq_keys, rings.exchange, n, live, WG, C)
    dk_token = add_product(as_operand(ds_tile, DK[0][1], DTYPE), q_tile, dk, DK)
    if C.REDUCE_DQ:
        done = warpgroup_mma_wait(len(DK), deps=(dq_token,) + dv_token)  # noqa: RUF005
        dv = first_parts(done, len(DV), 1)
        reduce_dq(done[0], WG, before, a, C)
        dk = awaited(dk_token)
        if FIRST:
            mbarrier.arrive(rings.k.empty.index(stage(rings.k, index + 1)), count=1, pred=live)
    else:
        done = warpgroup_mma_wait(0, deps=dk_token + dv_token)
        dk = first_parts(done, len(DK))
        dv = first_parts(done, len(DV), len(DK))
    mbarrier.arrive(rings.q.empty.index(at), count=1)  # for dO and dS(n - 1) too
    return dk, dv


@gluon.jit
def awaited(tokens):
    """The parts of the last gradient in flight."""
    if len(tokens) == 1:
        return (warpgroup_mma_wait(0, deps=[tokens[0]]),)
    else:
        done = warpgroup_mma_wait(0, deps=tokens)
        return first_parts(done, len(tokens))


@gluon.jit
def hold_keys(rings, tile, WG: gl.constexpr, C: gl.constexpr):
    """Columns of this warpgroup's keys and values, in registers."""
    k_rows = matrix(rings.k, tile.index).slice(WG * 64, 64, dim=0)
    v_rows = matrix(rings.v, tile.index).slice(WG * 64, 64, dim=0)
    return hold(k_rows, C.BLOCK_M, C.HELD[0]), hold(v_rows, C.BLOCK_M, C.HELD[1])


@gluon.jit
def gradients(rings, tile, sweep, q_base, before, a, WG: gl.constexpr, C: gl.constexpr):
    """dK and dV of this warpgroup's 64 keys, from all queries of all heads of the group."""
    work = tile.work
    stat_tile = head_statistics(work, a) + sweep.tile
    dk = no_gradient(gradient_spans(C.QK_COLUMNS, C.BLOCK_D))
    dv = no_gradient(gradient_spans(C.V_COLUMNS, C.BLOCK_DV))
    kept = hold_keys(rings, tile, WG, C)
    dk, dv = step((dk, dv), kept, rings, of_head(tile, 0, a, C), q_base, sweep.tile * C.BLOCK_M, before, a, True, WG, C)
    before = stat_tile
    outer, inner = sweep_sides(work, a, C)
    for i in range(outer):
        held = of_outer(tile, i, a, C)
        n0 = q_base + i * inner
        stat0 = first_statistics(sweep, stat_tile, i, n0, a, C)
        for n in range(gl.maximum(n0, q_base + 1), n0 + inner):
            m = swept_tile(sweep, i, n, n0, C) * C.BLOCK_M
            dk, dv = step((dk, dv), kept, rings, of_inner(held, n - n0, a, C), n, m, before, a, False, WG, C)
            before = statistics_at(stat0, n, n0, a, C)
    release(rings.v, tile.index)
    if not C.REDUCE_DQ:
        release(rings.k, tile.index)
    return dk, dv, before


@gluon.jit
def listed_gradients(rings, tile, q_base, before, a, WG: gl.constexpr, C: gl.constexpr):
    """The same from the queries of a list."""
    work = tile.work
    stat0 = head_statistics(work, a)
    dk = no_gradient(gradient_spans(C.QK_COLUMNS, C.BLOCK_D))
    dv = no_gradient(gradient_spans(C.V_COLUMNS, C.BLOCK_DV))
    kept = hold_keys(rings, tile, WG, C)
    m = listed_queries(rings, q_base, work.h * a.group.value)
    dk, dv = step((dk, dv), kept, rings, of_head(tile, 0, a, C), q_base, m, before, a, True, WG, C)
    before = listed_statistics(tile_number(m.cursor), stat0, a, C)
    for g in range(a.group.value):
        held = of_head(tile, g, a, C)
        n0 = q_base + g * work.count
        first = stat0 + g * a.stat_blocks
        for n in range(gl.maximum(n0, q_base + 1), n0 + work.count):
            m = listed_queries(rings, n, work.h * a.group.value + g)
            dk, dv = step((dk, dv), kept, rings, held, n, m, before, a, False, WG, C)
            before = listed_statistics(tile_number(m.cursor), first, a, C)
    release(rings.v, tile.index)
    if not C.REDUCE_DQ:
        release(rings.k, tile.index)
    return dk, dv, before


@gluon.jit
def score_tiles(s_token, dp_token, rings, n, m, k0, tile, a, C: gl.constexpr):
    """P and dS of the n-th query tile as left operands; S and dP are in flight."""
    DTYPE: gl.constexpr = rings.q.tiles.dtype
    BEHIND: gl.constexpr = len(score_pieces(C.HELD[1], C.V_COLUMNS, C.BLOCK_DV))
    at = stage(rings.q, n)
    if C.DROPOUT:
        kept = kept_by_column(m, k0, tile.work.b, tile.h, a, C)
    bias = at
    if C.BIAS != "":
        bias = load_by_column(tile.work.b, tile.h, m, k0, a, C)
    s_tile = warpgroup_mma_wait(BEHIND, deps=[s_token])  # [64, M]
    p_tile, w_tile = masked_weights(s_tile, statistic(rings.stats, at, "lse2", C), tile, m, k0, a, C, bias)
    dp_tile = warpgroup_mma_wait(0, deps=[dp_token])  # [64, M]
    if C.DROPOUT:
        dp_tile = dropped(dp_tile * a.keep_scale, kept, False)
        p_tile = dropped(p_tile, kept, False)
    ds_tile = w_tile * (dp_tile - statistic(rings.stats, at, "delta", C)[None, :])
    DK: gl.constexpr = gradient_spans(C.QK_COLUMNS, C.BLOCK_D)
    DV: gl.constexpr = gradient_spans(C.V_COLUMNS, C.BLOCK_DV)
    return as_operand(p_tile, DV[0][1], DTYPE), as_operand(ds_tile, DK[0][1], DTYPE)


@gluon.jit
def issue_gradients(p, ds, dk, dv, rings, n, C: gl.constexpr):
    DK: gl.constexpr = gradient_spans(C.QK_COLUMNS, C.BLOCK_D)
    DV: gl.constexpr = gradient_spans(C.V_COLUMNS, C.BLOCK_DV)
    dv_token = add_product(p, matrix(rings.do, n), dv, DV)
    dk_token = add_product(ds, matrix(rings.q, n), dk, DK)
    return dv_token, dk_token


@gluon.jit
def overlapped_gradients(rings, tile, sweep, q_base, a, WG: gl.constexpr, C: gl.constexpr):
    """dK and dV of this warpgroup's 64 keys, from all queries of all heads of the group."""
    S_PIECES: gl.constexpr = len(score_pieces(C.HELD[0], C.QK_COLUMNS, C.BLOCK_D))
    DK: gl.constexpr = gradient_spans(C.QK_COLUMNS, C.BLOCK_D)
    DV: gl.constexpr = gradient_spans(C.V_COLUMNS, C.BLOCK_DV)
    work = tile.work
    k0 = work.start + 64 * WG
    k_rows = matrix(rings.k, tile.index).slice(WG * 64, 64, dim=0)
    v_rows = matrix(rings.v, tile.index).slice(WG * 64, 64, dim=0)
    dk = no_gradient(DK)
    dv = no_gradient(DV)
    kept = hold_keys(rings, tile, WG, C)
    m0 = sweep.tile * C.BLOCK_M
    zero_unseeing_queries(rings, q_base, m0, tile, a, WG, C)
    s_token = issue_scores(k_rows, rings.q, q_base, C.BLOCK_M, C.QK_COLUMNS, kept[0], C.HELD[0])
    dp_token = issue_scores(v_rows, rings.do, q_base, C.BLOCK_M, C.V_COLUMNS, kept[1], C.HELD[1])
    p, ds = score_tiles(s_token, dp_token, rings, q_base, m0, k0, of_head(tile, 0, a, C), a, C)
    outer, inner = sweep_sides(work, a, C)
    # over the query tiles before n: dv and dk lack the last one, whose P and dS wait in p and ds
    for i in range(outer):
        n0 = q_base + i * inner
        held = of_outer(tile, i, a, C)
        for j in range(gl.maximum(n0, q_base + 1), n0 + inner):
            m = swept_tile(sweep, i, j, n0, C) * C.BLOCK_M
            n = opaque(j)  # else each address is a variable of the loop in a register of its own
            zero_unseeing_queries(rings, n, m, tile, a, WG, C)
            dv_token, dk_token = issue_gradients(p, ds, dk, dv, rings, n - 1, C)
            s_token = issue_scores(k_rows, rings.q, n, C.BLOCK_M, C.QK_COLUMNS, kept[0], C.HELD[0])
            done = warpgroup_mma_wait(S_PIECES, deps=dv_token + dk_token + (p, ds))
            dv = first_parts(done, len(DV))
            dk = first_parts(done, len(DK), len(DV))
            release(rings.q, n - 1)  # for dO too
            dp_token = issue_scores(v_rows, rings.do, n, C.BLOCK_M, C.V_COLUMNS, kept[1], C.HELD[1])
            p, ds = score_tiles(s_token, dp_token, rings, n, m, k0, of_inner(held, j - n0, a, C), a, C)
    release(rings.v, tile.index)
    release(rings.k, tile.index)
    last = q_base + work.count * a.group.value - 1
    dv_token, dk_token = issue_gradients(p, ds, dk, dv, rings, last, C)
    done = warpgroup_mma_wait(0, deps=dv_token + dk_token)
    dv = first_parts(done, len(DV))
    dk = first_parts(done, len(DK), len(DV))
    release(rings.q, last)
    return dk, dv


@gluon.jit
def last_dq(rings, kv_index, q_base, before, a, WG: gl.constexpr, C: gl.constexpr):
    """dQ of this program's last query tile."""
    dq_token = issue_dq(matrix(rings.k, kv_index + 1), rings.exchange, q_base, True, WG, C)
    dq_tile = warpgroup_mma_wait(0, deps=[dq_token])
    reduce_dq(dq_tile, WG, before, a, C)


@gluon.jit
def process_tile(outputs, rings, tile, q_base, before, i, a, WG: gl.constexpr, C: gl.constexpr):
    """One work tile, the i-th of this program."""
    dk_desc, dv_desc, dk_buffers, dv_buffers = outputs
    k0 = tile.work.start + 64 * WG
    wait_full(rings.k, tile.index)
    wait_full(rings.v, tile.index)
    k_rows = matrix(rings.k, tile.index).slice(WG * 64, 64, dim=0)
    zero_unseen_keys(k_rows, matrix(rings.v, tile.index).slice(WG * 64, 64, dim=0), tile, k0, 64, a, C)
    if C.REDUCE_DQ and C.BIAS != "":
        # dQ is looked at by nobody here, and 0 · inf is NaN: dK and dV tell of all that is infinite but keys
        raise_flag(k_rows.load(accumulator(C.BLOCK_D)).to(gl.float32), a, C)
    if C.LISTS is not None:
        dk, dv, before = listed_gradients(rings, tile, q_base, before, a, WG, C)
    elif C.OVERLAP_SCORES:
        dk, dv = overlapped_gradients(rings, tile, sweep_of(tile.work, i, C), q_base, a, WG, C)
    else:
        dk, dv, before = gradients(rings, tile, sweep_of(tile.work, i, C), q_base, before, a, WG, C)
    # located again rather than kept in registers
    work, _ = locate_keys(a, tile_at(a, opaque(i)), C)
    k0 = work.start + 64 * WG
    DK: gl.constexpr = gradient_spans(C.QK_COLUMNS, C.BLOCK_D)
    DV: gl.constexpr = gradient_spans(C.V_COLUMNS, C.BLOCK_DV)
    if C.DROPOUT:
        dv = times(dv, a.keep_scale)
    for j in gl.static_range(len(DV)):
        raise_flag(dv[j], a, C)
    for j in gl.static_range(len(DK)):
        raise_flag(dk[j], a, C)
    await_stores()
    store_gradient(dv_desc, a.dv, dv, dv_buffers.index(WG), work, work.k_start, k0, work.len_k, DV, C)
    if C.BLOCK_D == C.BLOCK_DV:
        await_stores()  # the two share a buffer
    store_gradient(dk_desc, a.dk, times(dk, a.scale), dk_buffers.index(WG), work, work.k_start, k0, work.len_k, DK, C)
    return before


@gluon.jit
def consume_keys(dk_desc, dv_desc, dk_buffers, dv_buffers, rings, a, WG: gl.constexpr, C: gl.constexpr):
    """All work tiles of this program, keys [64 WG, 64 WG + 64) of each."""
    q_base = 0  # query tiles of the work tiles before
    kv_index = 0
    i = 0
    t = tile_at(a, i)
    before = a.stat_tiles  # none: what is added there is never read
    outputs = dk_desc, dv_desc, dk_buffers, dv_buffers
    while t >= 0:
        work, band = locate_keys(a, t, C)
        tile = HeldTile(work=work, band=band, index=kv_index, h=kv_index, slope=kv_index)
        if C.VARLEN:
            if work.count > 0:
                before = process_tile(outputs, rings, tile, q_base, before, i, a, WG, C)
                kv_index += 1
            else:
                # keys without a single query; writes nothing past the sequence's end
                k0 = work.start + 64 * WG
                store_rows(zeros(C.BLOCK_DV), a.dv, work.h, work.k_start, k0, work.len_k)
                store_rows(zeros(C.BLOCK_D), a.dk, work.h, work.k_start, k0, work.len_k)
        else:
            before = process_tile(outputs, rings, tile, q_base, before, i, a, WG, C)
            kv_index += 1
        q_base += work.count * a.group.value
        i += 1
        t = tile_at(a, i)
    if C.REDUCE_DQ:
        if q_base > 0:
            last_dq(rings, kv_index, q_base, before, a, WG, C)
    await_stores()
