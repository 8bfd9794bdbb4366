"""Preprocess: statistics of each row and a dQ of zeros. Postprocess: dQ from the order of registers to rows.

One program for each query tile. Statistics of rows past the last make their weights 0: an lse of +inf.
"""

from __future__ import annotations

from tilewise.backends.hopper.backward.reduce import fragment_offsets
from tilewise.backends.hopper.compat import gl, gluon
from tilewise.backends.hopper.softmax import INF, LOG2E
from tilewise.backends.hopper.work_tile import divide, find_sequence


@gluon.jit
def locate_rows(a, C: gl.constexpr):
    """(row of the batch, head, first token, queries left from there on) of this program's tile."""
    t = gl.program_id(0)
    bh = divide(t, a.blocks)
    tile = t - bh * a.blocks.value
    if C.VARLEN:
        b, tile = find_sequence(a.cu_q, a.batch, tile, C.BLOCK_M)
        m0 = tile * C.BLOCK_M
        q_start = gl.load(a.cu_q + b)
        return b * 0, bh, q_start + m0, gl.load(a.cu_q + b + 1) - q_start - m0
    else:
        b = divide(bh, a.heads)
        m0 = tile * C.BLOCK_M
        return b, bh - b * a.heads.value, m0, a.len_q - m0


@gluon.constexpr_function
def rows_layout(width):
    """16 bytes a thread, adjacent threads along a row."""
    across = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def plane_pointer(plane, row, h, token):
    """Where a token's row of a head begins."""
    return (
        plane.ptr
        + row.to(gl.int64) * plane.stride_b
        + h.to(gl.int64) * plane.stride_h
        + token.to(gl.int64) * plane.stride_s
    )


@gluon.jit
def load_plane(plane, row, h, token, left, M: gl.constexpr, WIDTH: gl.constexpr):
    """[M, WIDTH] rows from `token` on, zeros past the last and beyond the tensor's width."""
    LAYOUT: gl.constexpr = rows_layout(WIDTH)
    m = gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    at = plane_pointer(plane, row, h, token) + m.to(gl.int64)[:, None] * plane.stride_s + d[None, :]
    return gl.load(at, mask=(m < left)[:, None] & (d < plane.width)[None, :], other=0.0)


@gluon.jit
def clear(pointer, SIZE: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    gl.store(pointer + gl.arange(0, SIZE, LAYOUT), gl.zeros([SIZE], gl.float32, LAYOUT))


@gluon.jit
def preprocess_kernel(a, C: gl.constexpr):
    """Statistics and zeros of BLOCK_M rows of one head."""
    M: gl.constexpr = C.BLOCK_M
    row, h, token, left = locate_rows(a, C)
    t = gl.program_id(0)
    out_tile = load_plane(a.out, row, h, token, left, M, C.BLOCK_DV).to(gl.float32)  # [M, DV]
    do_tile = load_plane(a.dout, row, h, token, left, M, C.BLOCK_DV).to(gl.float32)
    if C.REDUCE_DQ:
        for part in gl.static_range(2):
            clear(a.dq_ptr + t.to(gl.int64) * (M * C.BLOCK_D) + part * (M * C.BLOCK_D // 2), 64 * C.DQ_PARTS[part])
    products = out_tile * do_tile
    if a.sinks_ptr is not None:
        # a row whose sink has all the weight: its gradient, infinite or not, must not count
        products = gl.where(out_tile == 0.0, 0.0, products)
    delta = gl.sum(products, 1)  # [M]
    m = gl.arange(0, M, delta.type.layout)
    ok = m < left
    at = (row * a.heads.value + h).to(gl.int64) * a.len_q + token + m
    lse_at = row.to(gl.int64) * a.lse_b + h.to(gl.int64) * a.lse_h + token + m
    lse = gl.load(a.lse_ptr + lse_at, mask=ok, other=-INF)
    # an empty row has no weights; gradients that reach it have no effect
    none = lse == -INF
    delta = gl.where(none, 0.0, delta)
    if a.dlse_ptr is not None:
        delta = gl.where(none, 0.0, delta - gl.load(a.dlse_ptr + at, mask=ok, other=0.0))
    if a.dsinks_ptr is not None:
        # a sink is a key of value 0: dS = P (0 - delta); 0 for an infinite one
        sink = gl.load(a.sinks_ptr + h)
        weight = gl.where(none | (gl.abs(sink) == INF), 0.0, gl.exp2((sink - lse) * LOG2E))
        gl.store(a.dsinks_ptr + t.to(gl.int64) * M + m, -weight * delta)
    lse2 = gl.where(none, INF, lse * a.factor + a.shift)
    if C.ACC_FROM_STATS:
        delta = -delta
        lse2 = gl.where(none, -INF, lse2)
    stats = a.stats_ptr + t.to(gl.int64) * (2 * M) + m
    gl.store(stats, lse2)
    gl.store(stats + M, delta)


@gluon.jit
def load_fragments(pointers):
    """fp32 from where `reduce_dq` has added them up, four at a time: the compiler does not see that they are adjacent."""
    return gl.inline_asm_elementwise(
        "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=f,=f,=f,=f,l,l,l,l",
        [pointers.to(gl.int64)],
        dtype=gl.float32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def round_part(sums, base, m0, d0, left, a, N: gl.constexpr):
    """64 rows from m0 and N columns from d0 on."""
    R_LAYOUT: gl.constexpr = rows_layout(N)
    m = gl.arange(0, 64, gl.SliceLayout(1, R_LAYOUT))
    d = gl.arange(0, N, gl.SliceLayout(0, R_LAYOUT))
    dq_tile = load_fragments(sums + fragment_offsets(N)) * a.scale  # [64, N]
    dq_tile = gl.convert_layout(dq_tile.to(a.dq.ptr.dtype.element_ty), R_LAYOUT)
    at = base + (m0 + m).to(gl.int64)[:, None] * a.dq.stride_s + (d0 + d)[None, :]
    gl.store(at, dq_tile, mask=(m0 + m < left)[:, None] & (d0 + d < a.dq.width)[None, :])


@gluon.jit
def postprocess_kernel(a, C: gl.constexpr):
    """A tile of dQ: scaled, rounded, in rows. Its parts are halves of the columns, or of the rows where there are 128."""
    M: gl.constexpr = C.BLOCK_M
    row, h, token, left = locate_rows(a, C)
    base = plane_pointer(a.dq, row, h, token)
    tile = a.dq_ptr + gl.program_id(0).to(gl.int64) * (M * C.BLOCK_D)
    for part in gl.static_range(2):
        m0 = part * 64 if M == 128 else 0
        d0 = 0 if M == 128 else part * C.DQ_PARTS[0]
        round_part(tile + part * (M * C.BLOCK_D // 2), base, m0, d0, left, a, C.DQ_PARTS[part])
