"""The epilogue of a work tile: normalise, write the log-sum-exp, send the output on its way. The backward stores likewise."""

from __future__ import annotations

from tilewise.backends.hopper.alibi import row_excess, slope_of
from tilewise.backends.hopper.bias import raise_flag
from tilewise.backends.hopper.compat import fence_async_shared, gl, gluon, opaque, tma, tma_store, warps_barrier
from tilewise.backends.hopper.operands import columns, output_spans, rows_of
from tilewise.backends.hopper.softmax import INF, LOG2E

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def add_sink(total, m, sink):
    """Add the sink, one more key of value 0, to the sum of weights relative to exp(m): (sum, its m, what o is multiplied by).
    An infinite one has all the weight. In natural units, in which a sink may be any finite number."""
    top = gl.maximum(m, sink)
    # where two infinities meet, their difference is no number
    rescale = gl.where(m == top, 1.0, gl.exp2((m - top) * LOG2E))
    weight = gl.where(sink == top, 1.0, gl.exp2((sink - top) * LOG2E))
    return total * rescale + gl.where(sink == -INF, 0.0, weight), top, rescale


@gluon.jit
def normalise(o_tile, l, m, work, a, C: gl.constexpr):
    """(out by accumulator, lse); a row that saw nothing gives (0, -inf)."""
    total = gl.convert_layout(gl.sum(l, 1), m.type.layout, assert_trivial=True)  # [64]
    if C.SCORES == "cap":
        m = m - 0.5 * a.scale_log2
    if C.ALIBI == "past":
        m = m - row_excess(m, slope_of(work.b, work.h, a))
    if C.SINKS:
        if C.BIAS == "":
            m = m * LN2
        total, m, rescale = add_sink(total, m, gl.load(a.sinks_ptr + work.h))
    empty = total == 0.0
    inverse = 1.0 / gl.where(empty, 1.0, total)
    if C.SINKS:
        inverse = inverse * rescale
    if C.DROPOUT:
        inverse = inverse * a.keep_scale
    if C.BIAS != "" or C.SINKS:  # m is in natural units, and may be near the lowest number
        lse = gl.where(empty, -INF, m + gl.log2(total) * LN2)
    else:
        lse = gl.where(empty, -INF, (m + gl.log2(total)) * LN2)
    parts = ()
    for i in gl.static_range(len(o_tile)):
        parts += (o_tile[i] * rows_of(inverse, o_tile[i]),)
    return parts, lse


@gluon.jit
def store_lse(lse, a, work, row0):
    q = row0 + gl.arange(0, 64, lse.type.layout)
    head = work.row * a.heads.value + work.h
    at = head.to(gl.int64) * opaque(a.len_q) + work.q_start
    gl.store(a.lse_ptr + at + q, lse, mask=q <= work.last_q)


@gluon.jit
def store_tile(desc, x_tile, buffer, row, h, token, column=0):
    """64 rows through shared memory that is free; rows beyond the tensor are not written."""
    WIDTH: gl.constexpr = x_tile.type.shape[1]
    buffer.reshape([64, WIDTH]).store(x_tile.to(buffer.dtype))
    fence_async_shared()
    tma_store(desc, [row, h, token, column], buffer)


@gluon.jit
def store_parts(desc, parts, buffer, row, h, token, SPANS: gl.constexpr):
    """The same of matrices side by side; columns beyond them hold what was there, and are not the tensor's."""
    WIDTH: gl.constexpr = buffer.type.shape[3]
    matrix = buffer.reshape([64, WIDTH])
    for i in gl.static_range(len(SPANS)):
        columns(matrix, SPANS[i][0], SPANS[i][1]).store(parts[i].to(buffer.dtype))
    fence_async_shared()
    tma_store(desc, [row, h, token, 0], buffer)


@gluon.jit
def store_out(o_desc, o_tile, buffer, work, row0, C: gl.constexpr):
    WIDTH: gl.constexpr = buffer.type.shape[3]
    token = work.q_start + row0
    await_stores()
    if C.BLOCK_DV == WIDTH:
        store_parts(o_desc, o_tile, buffer, work.row, work.h, token, output_spans(C))
    else:
        # there is room for half of the columns only
        left, right = gl.split(o_tile[0].reshape([64, 2, WIDTH]).permute((0, 2, 1)))
        store_tile(o_desc, left, buffer, work.row, work.h, token)
        await_stores()
        store_tile(o_desc, right, buffer, work.row, work.h, token, WIDTH)


@gluon.jit
def store_rows(x_tile, rows, h, start, r0, end, INCLUSIVE: gl.constexpr = False, FIRST: gl.constexpr = 0):
    """The last rows of a packed sequence one by one, for behind them are those of the next: up to `end`, or with it. Their
    columns from FIRST on."""
    LAYOUT: gl.constexpr = x_tile.type.layout
    WIDTH: gl.constexpr = x_tile.type.shape[1]
    r = r0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    d = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    at = rows.ptr + h.to(gl.int64) * rows.stride_h + (start + r).to(gl.int64)[:, None] * rows.stride_s
    ok = ((r <= end) if INCLUSIVE else (r < end))[:, None] & (d < rows.width)[None, :]
    gl.store(at + d[None, :], x_tile.to(rows.ptr.dtype.element_ty), mask=ok)


@gluon.jit
def store_gradient(desc, rows, parts, buffer, work, start, r0, length, SPANS: gl.constexpr, C: gl.constexpr):
    """64 rows of a gradient, from row r0 of a sequence of `length` on, to memory, through a buffer that is free."""
    if C.VARLEN:
        if r0 + 64 <= length:
            store_parts(desc, parts, buffer, work.row, work.h, start + r0, SPANS)
        else:
            for i in gl.static_range(len(SPANS)):
                store_rows(parts[i], rows, work.h, start, r0, length, False, SPANS[i][0])
    else:
        store_parts(desc, parts, buffer, work.row, work.h, start + r0, SPANS)


@gluon.jit
def await_stores():
    """Until the memory of this warpgroup's last store may be written again."""
    tma.store_wait(0)
    warps_barrier()


@gluon.jit
def finish(o_tile, l, m, o_desc, o_buffers, slot, work, row0, a, C: gl.constexpr):
    """64 rows of the output and their log-sum-exp on their way to memory."""
    SPANS: gl.constexpr = output_spans(C)
    o_tile, lse = normalise(o_tile, l, m, work, a, C)
    for i in gl.static_range(len(o_tile)):
        raise_flag(o_tile[i], a, C)
    store_lse(lse, a, work, row0)
    if C.VARLEN:
        if row0 + 63 <= work.last_q:
            store_out(o_desc, o_tile, o_buffers.index(slot), work, row0, C)
        else:
            for i in gl.static_range(len(SPANS)):
                store_rows(o_tile[i], a.out, work.h, work.q_start, row0, work.last_q, True, SPANS[i][0])
    else:
        store_out(o_desc, o_tile, o_buffers.index(slot), work, row0, C)
