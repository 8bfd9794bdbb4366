"""What both kinds of consumers do with a tile: weights from products, dQ into memory, dK and dV out of registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from tilewise.backends.hopper.backward.schedule import seeing_queries, seen_keys, sees_all, visible
from tilewise.backends.hopper.ring import await_tile, matrix
from tilewise.backends.hopper.shim import named_sync, tma_store
from tilewise.backends.hopper.softmax import tanh


@gluon.constexpr_function
def accumulator(n):
    """The layout of a warpgroup's [64, n] product."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.jit
def as_operand(x_tile, n: gl.constexpr, dtype: gl.constexpr):
    """A [64, M] tile in registers as the left operand of a product with n columns."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, accumulator(n), 2)
    return gl.convert_layout(x_tile.to(dtype), LAYOUT, assert_trivial=True)


@gluon.jit
def zeros(n: gl.constexpr):
    LAYOUT: gl.constexpr = accumulator(n)
    return gl.zeros([64, n], gl.float32, LAYOUT)


@gluon.jit
def issue_scores(rows, ring, n, C: gl.constexpr):
    """S or dP of the n-th tile of queries: K or V against Q or dO."""
    await_tile(ring, n)
    return warpgroup_mma(rows, matrix(ring, n).permute((1, 0)), zeros(C.BLOCK_M), use_acc=False, is_async=True)


@gluon.jit
def seeded(vector, like):
    """Every row is the vector, in registers of its own: otherwise the copies sink between wgmma's fence and the wgmma, and
    ptxas waits there (C7517)."""
    x, like = gl.broadcast(vector[None, :], like)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def statistic(stats, at, WHICH: gl.constexpr, C: gl.constexpr):
    """0: lse in units of log 2 (or what a seeded product starts at), 1: delta; of a tile of queries, by column."""
    S_LAYOUT: gl.constexpr = accumulator(C.BLOCK_M)
    return stats.index(at).slice(WHICH * C.BLOCK_M, C.BLOCK_M, dim=0).load(gl.SliceLayout(0, S_LAYOUT))


@gluon.jit
def weights(s_tile, lse2, a, C: gl.constexpr):
    """P, and what dP - delta is multiplied with: P times the softcap's slope."""
    if C.SCORES == "softcap":
        t_tile = tanh(s_tile * a.slope)
        p_tile = gl.exp2(t_tile * a.unit - lse2[None, :])
        return p_tile, p_tile * (1.0 - t_tile * t_tile)
    elif C.SEEDED:
        p_tile = gl.exp2(s_tile * a.unit)
        return p_tile, p_tile
    else:
        p_tile = gl.exp2(s_tile * a.unit - lse2[None, :])
        return p_tile, p_tile


@gluon.jit
def seen_weights(s_tile, lse2, band, m, k0, a, C: gl.constexpr):
    """Weights, 0 where a query does not see a key. Queries past the last have an lse of +inf, so theirs are 0 anyway."""
    p_tile, w_tile = weights(s_tile, lse2, a, C)
    if not sees_all(band, m, k0, 64, C):
        ok = visible(band, m, k0, p_tile, C)
        p_tile = gl.where(ok, p_tile, 0.0)
        w_tile = gl.where(ok, w_tile, 0.0)
    return p_tile, w_tile


@gluon.jit
def fragment_offsets(N: gl.constexpr):
    """Where an element of a [64, N] accumulator stands in register order: 16 bytes a thread, threads side by side."""
    LAYOUT: gl.constexpr = accumulator(N)
    r = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    c = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))[None, :]
    return (r // 16) * 128 + (r % 8) * 16 + ((r // 8) % 2) * 2 + (c // 8) * 512 + ((c % 8) // 2) * 4 + (c % 2)


@gluon.jit
def reduce_dq(dq_tile, part, stat_tile, a, C: gl.constexpr):
    """Add a [64, PIECE] part of dQ in memory, four numbers at a time; parts of a tile follow one another."""
    offsets = fragment_offsets(C.PIECE)
    base = a.dq_ptr + stat_tile.to(gl.int64) * (C.BLOCK_M * C.BLOCK_D) + part * (64 * C.PIECE)
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$1], {$5, $6, $7, $8};\nmov.b32 $0, 0;",
        "=r,l,l,l,l,f,f,f,f",
        [(base + offsets).to(gl.int64), dq_tile],
        dtype=gl.int8,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def clear_rows(tile, k0, lo, hi, KEYS: gl.constexpr):
    """Zero rows whose keys (or queries) are outside [lo, hi): their weights are 0, but 0 · inf is not."""
    SLICE: gl.constexpr = 32
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for i in gl.static_range(KEYS // SLICE):
        first = k0 + i * SLICE
        if (first < lo) | (first + SLICE > hi):
            rows = tile.slice(i * SLICE, SLICE, dim=0)
            k = first + gl.arange(0, SLICE, gl.SliceLayout(1, LAYOUT))
            x_tile = rows.load(LAYOUT)
            rows.store(gl.where(((k >= lo) & (k < hi))[:, None], x_tile, gl.zeros_like(x_tile)))


@gluon.jit
def guard(k_rows, v_rows, band, spot, k0, KEYS: gl.constexpr, a, C: gl.constexpr):
    """Keys that no query of the sequence sees become zeros in shared memory. Both warpgroups come here for every tile."""
    if C.TERMS > 0 or C.VARLEN:
        lo, hi = seen_keys(band, spot, C)
        # beyond the tensor the loads have filled in zeros
        if (spot.n0 < lo) | ((spot.n0 + C.BLOCK_N > hi) & (spot.k_start + hi < a.len_k)):
            clear_rows(k_rows, k0, lo, hi, KEYS)
            clear_rows(v_rows, k0, lo, hi, KEYS)
            fence_async_shared()
            named_sync(15, 256)


@gluon.jit
def guard_queries(q_ring, do_ring, n, m, spot, band, WG: gl.constexpr, C: gl.constexpr):
    """Queries that see no key, and those past a packed sequence's end, which belong to the next one, become zeros. Both
    warpgroups come here for every tile, with no product on its way."""
    if C.VARLEN or C.BLIND:
        HALF: gl.constexpr = C.BLOCK_M // 2
        lo, hi = seeing_queries(band, spot.len_q, C)
        if (m < lo) | (m + C.BLOCK_M > hi):
            await_tile(q_ring, n)
            await_tile(do_ring, n)
            clear_rows(matrix(q_ring, n).slice(WG * HALF, HALF, dim=0), m + WG * HALF, lo, hi, HALF)
            clear_rows(matrix(do_ring, n).slice(WG * HALF, HALF, dim=0), m + WG * HALF, lo, hi, HALF)
            fence_async_shared()
            named_sync(15, 256)


@gluon.jit
def store_rows(x_tile, rows, h, start, r0, length):
    """The last rows of a packed sequence one by one: behind them stand those of the next."""
    LAYOUT: gl.constexpr = x_tile.type.layout
    WIDTH: gl.constexpr = x_tile.type.shape[1]
    r = r0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    at = rows.ptr + h.to(gl.int64) * rows.stride_h + (start + r).to(gl.int64)[:, None] * rows.stride_s
    ok = (r < length)[:, None] & (d < rows.width)[None, :]
    gl.store(at + d[None, :], x_tile.to(rows.ptr.dtype.element_ty), mask=ok)


@gluon.jit
def store_tile(desc, x_tile, buffer, row, h, token):
    """Through shared memory; rows beyond the tensor are not written."""
    WIDTH: gl.constexpr = x_tile.type.shape[1]
    buffer.reshape([64, WIDTH]).store(x_tile.to(buffer.dtype))
    fence_async_shared()
    tma_store(desc, [row, h, token, 0], buffer)


@gluon.jit
def put(desc, rows, x_tile, buffer, row, h, start, r0, length, C: gl.constexpr):
    """64 rows of a gradient, from row r0 of a sequence of `length` on, to memory, through a buffer that is free."""
    if C.VARLEN:
        if r0 + 64 <= length:
            store_tile(desc, x_tile, buffer, row, h, start + r0)
        else:
            store_rows(x_tile, rows, h, start, r0, length)
    else:
        store_tile(desc, x_tile, buffer, row, h, start + r0)
