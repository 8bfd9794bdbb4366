"""ALiBi: a score loses slope · |q + ahead - k|, where ahead is how many more keys than queries the sequence has.

Distances are never formed as integers: a thread's columns are constants apart, so slope times column is one multiply-add each.
Where a mask shows no key ahead of its query ("past"), the distance has no sign to lose. Then scores stay as many as slope · (q -
row0) above what they are, which is the same for a whole row, and the log-sum-exp takes it back at the end.
"""

from __future__ import annotations

from tilewise.backends.hopper.compat import gl, gluon
from tilewise.backends.hopper.lists import tile_number
from tilewise.backends.hopper.softmax import LOG2E


@gluon.jit
def slope_of(b, h, a):
    """Of a query head, in units of log 2."""
    return gl.load(a.alibi_ptr + b * a.alibi_b + h) * LOG2E


@gluon.jit
def ahead_of(work, a, C: gl.constexpr):
    """How many more keys than queries the sequence of a work tile of the forward has."""
    if C.VARLEN:
        return gl.load(a.cu_k + work.b + 1) - work.k_start - work.last_q - 1
    else:
        return a.len_k - a.len_q


@gluon.jit
def columns_from(start, slope, N: gl.constexpr, LAYOUT: gl.constexpr):
    """start + slope · column, by column of a [64, N] accumulator: column 8 i + 2 lane + pair."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    like = gl.reshape(gl.zeros([N], gl.float32, COLUMNS), [N // 8, 4, 2])
    PARTS: gl.constexpr = like.type.layout
    eight = gl.arange(0, N // 8, gl.SliceLayout(1, gl.SliceLayout(2, PARTS))).to(gl.float32)[:, None, None] * 8.0
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, PARTS))).to(gl.float32)[None, :, None] * 2.0
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, PARTS))).to(gl.float32)[None, None, :]
    parts = (start + slope * lane) + slope * (eight + pair)  # the last sum is a constant of each register
    return gl.convert_layout(gl.reshape(parts, [N]), COLUMNS, assert_trivial=True)


@gluon.jit
def rows_from(start, slope, LAYOUT: gl.constexpr):
    """start + slope · row, by row of a [64, N] accumulator."""
    return start + slope * gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)).to(gl.float32)


@gluon.jit
def with_alibi(s_tile, slope, ahead, row0, key0, C: gl.constexpr):
    """Scores of the forward in units of log 2; of a list, key0 is the tile's place."""
    LAYOUT: gl.constexpr = s_tile.type.layout
    if C.LISTS is not None:
        key0 = tile_number(key0) * C.BLOCK_N
    column = columns_from(slope * (key0 - row0 - ahead).to(gl.float32), slope, C.BLOCK_N, LAYOUT)
    if C.ALIBI == "past":
        return s_tile + column[None, :]
    else:
        return less_distance(s_tile, rows_from(0.0, slope, LAYOUT), column, slope)


@gluon.jit
def row_excess(m, slope):
    """What the rows' scores have too much where no key is ahead of its query."""
    return slope * gl.arange(0, 64, m.type.layout).to(gl.float32)


@gluon.jit
def less_distance(x_tile, from_rows, from_columns, slope):
    """x less slope times the distance, of vectors that are slope times positions. One piece of assembly: as three operations of
    the language, a whole tile of distances would stand in registers."""
    sign = gl.where(slope < 0, 1.0, -1.0)
    return gl.inline_asm_elementwise(
        "{ .reg .f32 away; sub.f32 away, $2, $3; abs.f32 away, away; fma.rn.f32 $0, away, $4, $1; }",
        "=f,f,f,f,f",
        [x_tile, from_columns[None, :], from_rows[:, None], sign],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
