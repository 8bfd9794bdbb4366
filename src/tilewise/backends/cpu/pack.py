"""Tiles in and out of memory: conversion to the kernel's Real type, padding with zeros, and the two layouts of operands.

    lanes    dst[row / W][col][W]     W rows side by side: strips of query rows (W = R), K and V where keys are broadcast (W = J)
    panels   dst[col / W][row][W]     W columns side by side: the gradients' operands (W = R), V and K where dims are (W = J)

What is laid out are cells: values in the Real type, or, for matrix tiles, pairs of 16-bit values as they are stored, two columns
of a row or two rows of a column. Sources have any strides and dtype. A row is read by vectors where its elements are adjacent,
one by one elsewhere.
"""

from __future__ import annotations

from typing import Any

from tilewise.backends.cpu.ir import I16, I32, I64, PTR, STORAGE, Emit, Unit, Value
from tilewise.backends.cpu.spec import UNROLL, Register

NEAR_ROWS = 16
"""Rows packed into panels together: so few that the lines read for one panel are still in L1 for the next, however far apart
rows are. (Neoverse N1, head dim 512: 3 % of a forward.)"""


def fetch(e: Emit, source: Value, offset: int | Value, dtype: str, lanes: int = 0) -> Value:
    """Stored elements in the Real type: one, or `lanes` adjacent ones."""
    kind = STORAGE[dtype]
    return e.widen(e.vget(source, offset, kind, lanes) if lanes else e.get(source, offset, kind), dtype)


def transpose(e: Emit, rows: list[Value]) -> list[Value]:
    """Four vectors of four, transposed."""
    a, b, c, d = rows
    ab, cd = e.pick(a, (0, 4, 1, 5), b), e.pick(c, (0, 4, 1, 5), d)
    AB, CD = e.pick(a, (2, 6, 3, 7), b), e.pick(c, (2, 6, 3, 7), d)
    return [
        e.pick(ab, (0, 1, 4, 5), cd),
        e.pick(ab, (2, 3, 6, 7), cd),
        e.pick(AB, (0, 1, 4, 5), CD),
        e.pick(AB, (2, 3, 6, 7), CD),
    ]


class Values:
    """A cell is one value in the Real type."""

    name, rows, cols = "values", 1, 1
    """`rows` and `cols`: how many of the source's make a cell."""

    def __init__(self, e: Emit, dtype: str) -> None:
        self.e, self.dtype, self.kind = e, dtype, e.real.type

    def zero(self) -> Value:
        return self.e.num(0.0)

    def near(self, src: Value, row_step: Value, row: Value, col: Value, count: int) -> Value:
        """Cells [col, col + count) of a row, all whole and their columns adjacent."""
        return fetch(self.e, src, self.e.plus(self.e.times(row, row_step), col), self.dtype, count)

    def one(self, src: Value, steps: tuple[Value, Value], row: Value, col: Value, end: tuple[Value, Value]) -> Value:
        """A cell anywhere; `end` is the source's shape, beyond which a pair has zeros."""
        e = self.e
        return fetch(e, src, e.plus(e.times(row, steps[0]), e.times(col, steps[1])), self.dtype)


class Pairs(Values):
    """A cell is two 16-bit values, the first in the low half."""

    def __init__(self, e: Emit, dtype: str) -> None:
        super().__init__(e, dtype)
        self.kind = I32

    def zero(self) -> Value:
        return I32(0)

    def one(self, src: Value, steps: tuple[Value, Value], row: Value, col: Value, end: tuple[Value, Value]) -> Value:
        e = self.e
        row, col = e.times(row, self.rows), e.times(col, self.cols)
        other = e.plus(row, self.rows - 1), e.plus(col, self.cols - 1)
        inside = e.and_(e.less(other[0], end[0]), e.less(other[1], end[1]))
        first = e.plus(e.times(row, steps[0]), e.times(col, steps[1]))
        second = e.plus(e.times(other[0], steps[0]), e.times(other[1], steps[1]))
        low, high = (e.zext(e.get(src, at, I16), I32) for at in (first, e.select(inside, second, first)))
        return e.or_(low, e.select(inside, e.shl(high, I32(16)), I32(0)))


class ColumnPairs(Pairs):
    """Two columns of a row."""

    name, cols = "column_pairs", 2

    def near(self, src: Value, row_step: Value, row: Value, col: Value, count: int) -> Value:
        e = self.e
        return e.bitcast(e.vget(src, e.plus(e.times(row, row_step), e.times(col, 2)), I16, 2 * count), e.vtype(I32, count))


class RowPairs(Pairs):
    """Two rows of a column."""

    name, rows = "row_pairs", 2

    def near(self, src: Value, row_step: Value, row: Value, col: Value, count: int) -> Value:
        e, kind = self.e, self.e.vtype(I32, count)
        first = e.plus(e.times(e.times(row, 2), row_step), col)
        low, high = (e.zext(e.vget(src, at, I16, count), kind) for at in (first, e.plus(first, row_step)))
        return e.or_(low, e.shl(high, e.iconst(16, I32, count)))


def emit_pack_lanes(unit: Unit, width: int, dtype: str, *, scaled: bool, cells: type[Values] = Values) -> Any:
    """pack_lanes(dst, dst_cols, src, row_step, col_step, rows, cols[, factors]): dst[row / W][col][W], rows times factors[row].

    Rows up to the next multiple of W and columns in [cols, dst_cols) become zero. W and dst_cols count cells.
    """
    kinds = [PTR, I64, PTR, I64, I64, I64, I64] + [PTR] * scaled
    name = f"pack_lanes_{cells.name}_{width}{'_scaled' * scaled}"
    e, args, function = unit.function(name, kinds, apart=(0,))
    dst, dst_cols, src, row_step, col_step, *end = args[:7]
    factors, cell = args[7:], cells(e, dtype)
    near = e.icmp_signed("==", col_step, I64(1))
    rows, cols = (e.over(e.plus(n, per - 1), per) for n, per in zip(end, (cell.rows, cell.cols), strict=True))
    whole_rows, whole_cols = (e.over(n, per) for n, per in zip(end, (cell.rows, cell.cols), strict=True))
    fast_cols = e.round_down(whole_cols, UNROLL)

    def weigh(value: Value, factor: Value | None) -> Value:
        return value if factor is None else e.fmul(value, factor)

    def one(out: Value, row: Value, lane: Value, col: Value) -> None:
        value = cell.one(src, (row_step, col_step), row, col, (end[0], end[1]))
        e.put(weigh(value, e.get(factors[0], row) if scaled else None), out, e.plus(e.times(col, width), lane))

    with e.loop(0, rows, width) as group:
        out = e.at(dst, e.times(group.index, dst_cols), cell.kind)
        inside = e.least(width, e.minus(rows, group.index))
        whole = e.least(width, e.minus(whole_rows, group.index))
        fast_rows = e.select(near, e.round_down(whole, UNROLL), I64(0))
        with e.loop(0, fast_rows, UNROLL) as lane:
            row = e.plus(group.index, lane.index)
            factor = e.vget(factors[0], row, lanes=UNROLL) if scaled else None
            with e.loop(0, fast_cols, UNROLL) as col:
                block = [cell.near(src, row_step, e.plus(row, r), col.index, UNROLL) for r in range(UNROLL)]
                for c, column in enumerate(transpose(e, block)):
                    e.vput(weigh(column, factor), out, e.plus(e.times(e.plus(col.index, c), width), lane.index))
            with e.loop(fast_cols, cols) as col:
                for r in range(UNROLL):
                    one(out, e.plus(row, r), e.plus(lane.index, r), col.index)
        with e.loop(fast_rows, inside) as lane, e.loop(0, cols) as col:
            one(out, e.plus(group.index, lane.index), lane.index, col.index)
        with e.loop(inside, width) as lane, e.loop(0, cols) as col:
            e.put(cell.zero(), out, e.plus(e.times(col.index, width), lane.index))
        with e.loop(e.times(cols, width), e.times(dst_cols, width)) as place:
            e.put(cell.zero(), out, place.index)
    e.ret_void()
    return function


def emit_pack_panels(unit: Unit, width: int, dtype: str, *, scaled: bool, cells: type[Values] = Values) -> Any:
    """pack_panels(dst, step, src, row_step, col_step, rows, all_rows, cols[, factors]): dst[col / W][row][W], times factors[row].

    Panels lie `step` cells apart. Rows in [rows, all_rows) and columns up to the next multiple of W cells become zero.
    """
    kinds = [PTR, I64, PTR, I64, I64, I64, I64, I64] + [PTR] * scaled
    name = f"pack_panels_{cells.name}_{width}{'_scaled' * scaled}"
    e, args, function = unit.function(name, kinds, apart=(0,))
    dst, step, src, row_step, col_step, end_row, all_rows, end_col, *factors = args
    near, cell = e.icmp_signed("==", col_step, I64(1)), cells(e, dtype)
    lanes = min(width, e.lanes)
    rows, cols = (e.over(e.plus(n, per - 1), per) for n, per in ((end_row, cell.rows), (end_col, cell.cols)))
    whole_rows, all_rows = e.over(end_row, cell.rows), e.over(all_rows, cell.rows)

    def weigh(value: Value, row: Value, lanes: int) -> Value:
        if not scaled:
            return value
        factor = e.get(factors[0], row)
        return e.fmul(value, e.splat(factor, lanes) if lanes else factor)

    fast_rows = e.select(near, whole_rows, I64(0))
    fast_cols = e.round_down(e.over(end_col, cell.cols), width)

    def start(panel: Value) -> Value:
        return e.at(dst, e.times(e.over(panel, width), step), cell.kind)

    with e.loop(0, fast_rows, NEAR_ROWS) as some, e.loop(0, fast_cols, width) as panel:
        to = start(panel.index)
        with e.loop(some.index, e.least(e.plus(some.index, NEAR_ROWS), fast_rows)) as row:
            for at in range(0, width, lanes):
                value = weigh(cell.near(src, row_step, row.index, e.plus(panel.index, at), lanes), row.index, lanes)
                e.vput(value, to, e.plus(e.times(row.index, width), at))
    with e.loop(0, cols, width) as panel:
        to = start(panel.index)
        inside = e.least(width, e.minus(cols, panel.index))
        quick = e.select(e.less(panel.index, fast_cols), fast_rows, I64(0))
        with e.loop(quick, rows) as row:
            out = e.at(to, e.times(row.index, width), cell.kind)
            with e.loop(0, inside) as col:
                value = cell.one(src, (row_step, col_step), row.index, e.plus(panel.index, col.index), (end_row, end_col))
                e.put(weigh(value, row.index, 0), out, col.index)
            with e.loop(inside, width) as col:
                e.put(cell.zero(), out, col.index)
        with e.loop(e.times(rows, width), e.times(all_rows, width)) as place:
            e.put(cell.zero(), to, place.index)
    e.ret_void()
    return function


def quotient(e: Emit, x: Value, y: Value) -> Value:
    """x / y; 0 where y is 0, as in a row that saw no key."""
    lanes = x.type.count
    return e.select(e.fcmp_ordered("==", y, e.const(0.0, lanes)), e.const(0.0, lanes), e.fdiv(x, y))


def emit_unpack_strip(unit: Unit, tile: Register, dtype: str, *, divide: bool) -> Any:
    """unpack(dst, row_step, src, rows, cols, factors): src[col][lane], times or divided by factors[lane], back into rows."""
    R = tile.rows
    e, args, function = unit.function("unpack", [PTR, I64, PTR, I64, I64, PTR], apart=(0,))
    dst, row_step, src, rows, cols, factors = args
    fast_rows, fast_cols, kind = e.round_down(rows, UNROLL), e.round_down(cols, UNROLL), STORAGE[dtype]

    def apply(x: Value, factor: Value) -> Value:
        return quotient(e, x, factor) if divide else e.fmul(x, factor)

    def one(row: Value, col: Value) -> None:
        value = apply(e.vget(src, e.plus(e.times(col, R), row), lanes=1), e.vget(factors, row, lanes=1))
        to = e.at(dst, e.plus(e.times(row, row_step), col), kind)
        e.vput(e.narrow(value, dtype), to)

    with e.loop(0, fast_rows, UNROLL) as row:
        factor = e.vget(factors, row.index, lanes=UNROLL)
        with e.loop(0, fast_cols, UNROLL) as col:
            block = [e.vget(src, e.plus(e.times(e.plus(col.index, c), R), row.index), lanes=UNROLL) for c in range(UNROLL)]
            for r, cells in enumerate(transpose(e, [apply(b, factor) for b in block])):
                to = e.at(dst, e.plus(e.times(e.plus(row.index, r), row_step), col.index), kind)
                e.vput(e.narrow(cells, dtype), to)
        with e.loop(fast_cols, cols) as col:
            for r in range(UNROLL):
                one(e.plus(row.index, r), col.index)
    with e.loop(fast_rows, rows) as row, e.loop(0, cols) as col:
        one(row.index, col.index)
    e.ret_void()
    return function


def emit_row_dots(unit: Unit, dtype: str) -> Any:
    """row_dots(dst, x, x_step, x_col, y, y_step, y_col, rows, cols): dst[row] = Σ_col x·y."""
    e, args, function = unit.function("row_dots", [PTR, PTR, I64, I64, PTR, I64, I64, I64, I64], apart=(0,))
    dst, x, x_step, x_col, y, y_step, y_col, rows, cols = args
    near = e.and_(e.icmp_signed("==", x_col, I64(1)), e.icmp_signed("==", y_col, I64(1)))
    whole = e.select(near, e.round_down(cols, e.lanes), I64(0))
    with e.loop(0, rows) as row:
        x_row, y_row = e.times(row.index, x_step), e.times(row.index, y_step)
        with e.loop(0, whole, e.lanes, [e.const(0.0)]) as wide:
            a, b = (fetch(e, p, e.plus(at, wide.index), dtype, e.lanes) for p, at in ((x, x_row), (y, y_row)))
            wide.carry([e.mad(a, b, wide.values[0])])
        with e.loop(whole, cols, 1, [e.sum(wide.values[0])]) as rest:
            a = fetch(e, x, e.plus(x_row, e.times(rest.index, x_col)), dtype)
            b = fetch(e, y, e.plus(y_row, e.times(rest.index, y_col)), dtype)
            rest.carry([e.mad(a, b, rest.values[0])])
        e.put(rest.values[0], dst, row.index)
    e.ret_void()
    return function
