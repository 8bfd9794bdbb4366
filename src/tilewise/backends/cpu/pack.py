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


def woven(e: Emit, rows: list[Value]) -> list[Value]:
    """Vectors as one sequence that takes a cell of each in turn; as many of them as cells in each: transposed."""
    if len(rows) == 1:
        return rows
    lanes, run = rows[0].type.count, len(rows) // 2  # so many cells lie side by side in each half already
    low = [n // (2 * run) * run + n // run % 2 * lanes + n % run for n in range(lanes)]
    high = [n + lanes // 2 for n in low]
    pairs = zip(woven(e, rows[:run]), woven(e, rows[run:]), strict=True)
    return [e.pick(a, order, b) for a, b in pairs for order in (low, high)]


def squares(e: Emit, tall: int) -> list[tuple[int, int]]:
    """Rows and columns that are transposed in registers at a time, where they are `tall` cells apart or more: the most that
    vectors allow, then what is left by UNROLL."""
    most = max(UNROLL, min(tall, e.lanes)), max(UNROLL, e.lanes)
    return [most] if most == (UNROLL, UNROLL) else [most, (UNROLL, UNROLL)]


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
    shapes = squares(e, width)

    def weigh(value: Value, factor: Value | None) -> Value:
        return value if factor is None else e.fmul(value, factor)

    def one(out: Value, row: Value, lane: Value, col: Value) -> None:
        value = cell.one(src, (row_step, col_step), row, col, (end[0], end[1]))
        e.put(weigh(value, e.get(factors[0], row) if scaled else None), out, e.plus(e.times(col, width), lane))

    def across(out: Value, row: Value, lane: Value, between: tuple[Value, Value], tall: int, wide: int) -> None:
        """`tall` rows, `wide` columns at a time; either a column fills a vector, or columns follow each other in it."""
        factor = e.pick(e.vget(factors[0], row, lanes=tall), [n % tall for n in range(wide)]) if scaled else None
        with e.loop(*between, wide) as col:
            block = [cell.near(src, row_step, e.plus(row, r), col.index, wide) for r in range(tall)]
            for n, cells in enumerate(woven(e, block)):
                here, to = (col.index, n * wide) if tall < wide else (e.plus(col.index, n), lane)
                e.vput(weigh(cells, factor), out, e.plus(e.times(here, width), to))

    with e.loop(0, rows, width) as group:
        out = e.at(dst, e.times(group.index, dst_cols), cell.kind)
        inside = e.least(width, e.minus(rows, group.index))
        whole = e.select(near, e.least(width, e.minus(whole_rows, group.index)), I64(0))
        done_rows: Value = I64(0)
        for n, (tall, _) in enumerate(shapes):
            if n and tall == shapes[n - 1][0]:
                continue  # no rows are left
            fast_rows = e.round_down(whole, tall)
            with e.loop(done_rows, fast_rows, tall) as lane:
                row, done = e.plus(group.index, lane.index), I64(0)
                for high, wide in shapes[n:]:
                    fast = e.round_down(whole_cols, wide)
                    with e.loop(0, tall, high) as part:
                        across(out, e.plus(row, part.index), e.plus(lane.index, part.index), (done, fast), high, wide)
                    done = fast
                with e.loop(0, tall) as r, e.loop(done, cols) as col:
                    one(out, e.plus(row, r.index), e.plus(lane.index, r.index), col.index)
            done_rows = fast_rows
        with e.loop(done_rows, inside) as lane, e.loop(0, cols) as col:
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
    kind = STORAGE[dtype]

    def apply(x: Value, factor: Value) -> Value:
        return quotient(e, x, factor) if divide else e.fmul(x, factor)

    def one(row: Value, col: Value) -> None:
        value = apply(e.vget(src, e.plus(e.times(col, R), row), lanes=1), e.vget(factors, row, lanes=1))
        to = e.at(dst, e.plus(e.times(row, row_step), col), kind)
        e.vput(e.narrow(value, dtype), to)

    def across(row: Value, between: tuple[Value, Value], side: int) -> None:
        """`side` rows, as many columns at a time."""
        factor = e.vget(factors, row, lanes=side)
        with e.loop(*between, side) as col:
            block = [e.vget(src, e.plus(e.times(e.plus(col.index, c), R), row), lanes=side) for c in range(side)]
            for r, cells in enumerate(woven(e, [apply(b, factor) for b in block])):
                e.vput(e.narrow(cells, dtype), e.at(dst, e.plus(e.times(e.plus(row, r), row_step), col.index), kind))

    done_rows: Value = I64(0)
    sides = [side for side, _ in squares(e, R)]
    for n, side in enumerate(sides):
        fast_rows = e.round_down(rows, side)
        with e.loop(done_rows, fast_rows, side) as row:
            done: Value = I64(0)
            for small in sides[n:]:
                fast = e.round_down(cols, small)
                with e.loop(0, side, small) as part:
                    across(e.plus(row.index, part.index), (done, fast), small)
                done = fast
            with e.loop(0, side) as r, e.loop(done, cols) as col:
                one(e.plus(row.index, r.index), col.index)
        done_rows = fast_rows
    with e.loop(done_rows, rows) as row, e.loop(0, cols) as col:
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
