"""The end of a tile: normalise, write the log-sum-exp, send the output on its way."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tilewise.backends.hopper.shim import afresh, tma_store, warps_barrier
from tilewise.backends.hopper.softmax import INF

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def normalise(o_tile, l, m):
    """(out, lse) from the sums; a row that saw nothing gives (0, -inf)."""
    total = gl.convert_layout(gl.sum(l, 1), m.type.layout, assert_trivial=True)  # [64]
    none = total == 0.0
    inverse = 1.0 / gl.where(none, 1.0, total)
    lse = gl.where(none, -INF, (m + gl.log2(total)) * LN2)
    ROW: gl.constexpr = gl.SliceLayout(1, o_tile.type.layout)
    return o_tile * gl.convert_layout(inverse, ROW, assert_trivial=True)[:, None], lse


@gluon.jit
def store_lse(lse, a, spot, row0):
    q = row0 + gl.arange(0, 64, lse.type.layout)
    head = spot.row * a.heads.value + spot.h
    at = head.to(gl.int64) * afresh(a.len_q) + spot.q_start
    gl.store(a.lse_ptr + at + q, lse, mask=q <= spot.last_q)


@gluon.jit
def store_part(o_desc, o_part, buffer, spot, row0, column):
    """Through shared memory to the output; rows beyond it are not written."""
    WIDTH: gl.constexpr = buffer.type.shape[3]
    await_stores()
    buffer.reshape([64, WIDTH]).store(o_part.to(buffer.dtype))
    fence_async_shared()
    tma_store(o_desc, [spot.row, spot.h, spot.q_start + row0, column], buffer)


@gluon.jit
def store_out(o_desc, o_tile, buffer, spot, row0, C: gl.constexpr):
    WIDTH: gl.constexpr = buffer.type.shape[3]
    if C.BLOCK_DV == WIDTH:
        store_part(o_desc, o_tile, buffer, spot, row0, 0)
    else:
        # there is room for half of the columns only
        left, right = gl.split(o_tile.reshape([64, 2, WIDTH]).permute((0, 2, 1)))
        store_part(o_desc, left, buffer, spot, row0, 0)
        store_part(o_desc, right, buffer, spot, row0, WIDTH)


@gluon.jit
def store_rows(o_tile, a, spot, row0):
    """The last rows of a packed sequence one by one: behind them stand those of the next."""
    LAYOUT: gl.constexpr = o_tile.type.layout
    DV: gl.constexpr = o_tile.type.shape[1]
    q = row0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, DV, gl.SliceLayout(0, LAYOUT))
    at = a.out.ptr + spot.h.to(gl.int64) * a.out.stride_h + (spot.q_start + q).to(gl.int64)[:, None] * a.out.stride_s
    ok = (q <= spot.last_q)[:, None] & (d < a.out.width)[None, :]
    gl.store(at + d[None, :], o_tile.to(a.out.ptr.dtype.element_ty), mask=ok)


@gluon.jit
def await_stores():
    """Until the memory of this warpgroup's last store may be written again."""
    tma.store_wait(0)
    warps_barrier()


@gluon.jit
def finish(o_tile, l, m, o_desc, o_buffers, slot, spot, row0, a, C: gl.constexpr):
    """A tile's results on their way to memory."""
    o_tile, lse = normalise(o_tile, l, m)
    store_lse(lse, a, spot, row0)
    if C.VARLEN:
        if row0 + 63 <= spot.last_q:
            store_out(o_desc, o_tile, o_buffers.index(slot), spot, row0, C)
        else:
            store_rows(o_tile, a, spot, row0)
    else:
        store_out(o_desc, o_tile, o_buffers.index(slot), spot, row0, C)
