"""What the backward's consumers do with a tile: weights from products, dQ into memory, gradients out of registers."""

# No `from __future__ import annotations` here: aggregates check their fields against the annotations themselves.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from tilewise.backends.hopper.backward.work_tile import seeing_queries, seen_keys, sees_all, visible
from tilewise.backends.hopper.compat import TWO_WARPGROUPS, ZEROED_BARRIER, aggregate, named_sync
from tilewise.backends.hopper.epilogue import store_rows, store_tile
from tilewise.backends.hopper.mainloop import accumulator, left_operand, zeros
from tilewise.backends.hopper.ring import Ring, matrix, wait_full, zero_rows
from tilewise.backends.hopper.softmax import tanh

LSE2 = gl.constexpr(0)
"""Of a query tile's statistics: lse in units of log 2, or what S accumulates from."""
DELTA = gl.constexpr(1)
DQ_COLUMNS = gl.constexpr(64)
"""Columns of dQ that a warpgroup computes at a time."""


@aggregate
class Rings:
    """What the producer fills."""

    q: Ring
    do: Ring
    k: Ring
    v: Ring


@aggregate
class KeyRings:
    """What the roles share where keys are held."""

    q: Ring
    do: Ring
    k: Ring
    v: Ring
    exchange: Ring  # what the warpgroups write for one another: dS, or weights where each has one gradient
    stats: gl.shared_memory_descriptor  # [stages of q, 2 M]


@gluon.jit
def as_operand(x_tile, n: gl.constexpr, dtype: gl.constexpr):
    """A [64, M] tile in registers as the left operand of a product with n columns."""
    LAYOUT: gl.constexpr = left_operand(n)
    return gl.convert_layout(x_tile.to(dtype), LAYOUT, assert_trivial=True)


@gluon.jit
def issue_scores(rows, ring, n, COLUMNS: gl.constexpr):
    """S or dP against the n-th tile that is streamed, issued: K or V against Q or dO, or the reverse."""
    wait_full(ring, n)
    return warpgroup_mma(rows, matrix(ring, n).permute((1, 0)), zeros(COLUMNS), use_acc=False, is_async=True)


@gluon.jit
def accumulator_from(vector, like):
    """Every row is the vector, in registers of its own: otherwise the copies sink between wgmma's fence and the wgmma, and
    ptxas waits there (C7517)."""
    x, like = gl.broadcast(vector[None, :], like)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def statistic(stats, at, WHICH: gl.constexpr, C: gl.constexpr):
    """LSE2 or DELTA of the query tile in stage `at`, by column."""
    S_LAYOUT: gl.constexpr = accumulator(C.BLOCK_M)
    return stats.index(at).slice(WHICH * C.BLOCK_M, C.BLOCK_M, dim=0).load(gl.SliceLayout(0, S_LAYOUT))


@gluon.jit
def weights(s_tile, lse2, a, C: gl.constexpr):
    """P, and what dP - delta is multiplied with: P times the softcap's slope."""
    if C.SCORES == "softcap":
        t_tile = tanh(s_tile * a.softcap_slope)
        p_tile = gl.exp2(t_tile * a.scale_log2 - lse2[None, :])
        return p_tile, p_tile * (1.0 - t_tile * t_tile)
    elif C.ACC_FROM_STATS:
        p_tile = gl.exp2(s_tile * a.scale_log2)
        return p_tile, p_tile
    else:
        p_tile = gl.exp2(s_tile * a.scale_log2 - lse2[None, :])
        return p_tile, p_tile


@gluon.jit
def masked_weights(s_tile, lse2, band, m, k0, a, C: gl.constexpr):
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
    """Add a [64, DQ_COLUMNS] part of dQ in memory, four numbers at a time; parts of a tile follow one another."""
    offsets = fragment_offsets(DQ_COLUMNS)
    base = a.dq_ptr + stat_tile.to(gl.int64) * (C.BLOCK_M * C.BLOCK_D) + part * (64 * DQ_COLUMNS)
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$1], {$5, $6, $7, $8};\nmov.b32 $0, 0;",
        "=r,l,l,l,l,f,f,f,f",
        [(base + offsets).to(gl.int64), dq_tile],
        dtype=gl.int8,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def zeroed():
    """Both warpgroups have zeroed their rows, and products may read them."""
    fence_async_shared()
    named_sync(ZEROED_BARRIER, TWO_WARPGROUPS)


@gluon.jit
def has_unseen_keys(key0, lo, hi, work, a, C: gl.constexpr):
    """Does the key tile at key0 hold keys outside [lo, hi)? Beyond the tensor the loads have filled in zeros."""
    return (key0 < lo) | ((key0 + C.BLOCK_N > hi) & (work.k_start + hi < a.len_k))


@gluon.jit
def zero_unseen_keys(k_rows, v_rows, tile, k0, KEYS: gl.constexpr, a, C: gl.constexpr):
    """Keys that no query of the sequence sees become zeros in shared memory. Both warpgroups come here for every work tile."""
    if C.TERMS > 0 or C.VARLEN:
        lo, hi = seen_keys(tile.band, tile.work, C)
        if has_unseen_keys(tile.work.start, lo, hi, tile.work, a, C):
            zero_rows(k_rows, k0, lo, hi, KEYS)
            zero_rows(v_rows, k0, lo, hi, KEYS)
            zeroed()


@gluon.jit
def zero_halves(ring, other_ring, n, first, lo, hi, ROWS: gl.constexpr, WG: gl.constexpr):
    """Zero the rows outside [lo, hi) of the n-th tile of both rings; each warpgroup takes half of the rows."""
    HALF: gl.constexpr = ROWS // 2
    wait_full(ring, n)
    wait_full(other_ring, n)
    zero_rows(matrix(ring, n).slice(WG * HALF, HALF, dim=0), first + WG * HALF, lo, hi, HALF)
    zero_rows(matrix(other_ring, n).slice(WG * HALF, HALF, dim=0), first + WG * HALF, lo, hi, HALF)
    zeroed()


@gluon.jit
def zero_unseeing_queries(rings, n, m, tile, WG: gl.constexpr, C: gl.constexpr):
    """Queries that see no key, and those past a packed sequence's end, which belong to the next one, become zeros. Both
    warpgroups come here for every query tile, with no product in flight."""
    if C.VARLEN or C.EMPTY_ROWS:
        lo, hi = seeing_queries(tile.band, tile.work.len_q, C)
        if (m < lo) | (m + C.BLOCK_M > hi):
            zero_halves(rings.q, rings.do, n, m, lo, hi, C.BLOCK_M, WG)


@gluon.jit
def store_gradient(desc, rows, x_tile, buffer, work, start, r0, length, C: gl.constexpr):
    """64 rows of a gradient, from row r0 of a sequence of `length` on, to memory, through a buffer that is free."""
    if C.VARLEN:
        if r0 + 64 <= length:
            store_tile(desc, x_tile, buffer, work.row, work.h, start + r0)
        else:
            store_rows(x_tile, rows, work.h, start, r0, length)
    else:
        store_tile(desc, x_tile, buffer, work.row, work.h, start + r0)
