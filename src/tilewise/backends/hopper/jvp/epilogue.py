"""The epilogue of a work tile: sums over weights become means, and both results go on their way."""

from __future__ import annotations

from tilewise.backends.hopper.compat import gl, gluon, opaque
from tilewise.backends.hopper.epilogue import LN2, store_out, store_rows
from tilewise.backends.hopper.operands import output_spans, rows_of
from tilewise.backends.hopper.softmax import INF


@gluon.jit
def row_sum(parts, like):
    """Row sums from partials by lane, in the layout of `like`."""
    return gl.convert_layout(gl.sum(parts, 1), like.type.layout, assert_trivial=True)


@gluon.jit
def normalise(state, C: gl.constexpr):
    """(out and out_t by accumulator, lse, lse_t); a row that saw nothing gives (0, 0, -inf, 0)."""
    total = row_sum(state.l, state.m)
    empty = total == 0.0
    inverse = 1.0 / gl.where(empty, 1.0, total)
    lse = gl.where(empty, -INF, (state.m + gl.log2(total)) * LN2)
    lse_t = gl.zeros_like(lse)
    if C.Q_T or C.K_T:
        lse_t = row_sum(state.l_t[0], state.m) * inverse
    out = ()
    out_t = ()
    for i in gl.static_range(len(output_spans(C))):
        part = state.o[i] * rows_of(inverse, state.o[i])
        out_t += (state.o_t[i] * rows_of(inverse, part) - part * rows_of(lse_t, part),)
        out += (part,)
    return out, out_t, lse, lse_t


@gluon.jit
def store_by_row(ptr, x, a, work, row0):
    """A number for each of 64 rows to (B, H, M)."""
    q = row0 + gl.arange(0, 64, x.type.layout)
    head = work.row * a.heads.value + work.h
    at = head.to(gl.int64) * opaque(a.len_q) + work.q_start
    gl.store(ptr + at + q, x, mask=q <= work.last_q)


@gluon.jit
def store_result(desc, rows, parts, buffer, work, row0, C: gl.constexpr):
    """64 rows of out or out_t through shared memory; the last ones of a packed sequence one by one."""
    SPANS: gl.constexpr = output_spans(C)
    if C.VARLEN:
        if row0 + 63 <= work.last_q:
            store_out(desc, parts, buffer, work, row0, C)
        else:
            for i in gl.static_range(len(SPANS)):
                store_rows(parts[i], rows, work.h, work.q_start, row0, work.last_q, True, SPANS[i][0])
    else:
        store_out(desc, parts, buffer, work, row0, C)


@gluon.jit
def finish(state, o_desc, o_t_desc, buffer, work, row0, a, C: gl.constexpr):
    """64 rows of both results on their way to memory, one after the other through the same buffer."""
    out, out_t, lse, lse_t = normalise(state, C)
    store_by_row(a.lse_ptr, lse, a, work, row0)
    store_by_row(a.lse_t_ptr, lse_t, a, work, row0)
    store_result(o_desc, a.out, out, buffer, work, row0, C)
    store_result(o_t_desc, a.out_t, out_t, buffer, work, row0, C)
