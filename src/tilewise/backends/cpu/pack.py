"""Tiles in and out of memory: conversion to the kernel's Real type, padding with zeros, and strips (transposed rows).

Sources have any strides and dtype. A row is read by vectors where its elements are adjacent, one by one elsewhere.
"""

from __future__ import annotations

from typing import Any

from tilewise.backends.cpu.ir import I64, PTR, STORAGE, Emit, Unit, Value
from tilewise.backends.cpu.spec import UNROLL, Register


def fetch(e: Emit, source: Value, offset: Value, dtype: str, lanes: int = 0) -> Value:
    """Stored elements in the Real type: one, or `lanes` adjacent ones."""
    kind = STORAGE[dtype]
    return e.widen(e.vget(source, offset, kind, lanes) if lanes else e.get(source, offset, kind), dtype)


def emit_copy_rows(unit: Unit, dtype: str, name: str = "copy_rows") -> Any:
    """copy_rows(dst, dst_step, dst_cols, src, row_step, col_step, rows, all_rows, cols): rows into a tile, zeros around them.

    Rows [rows, all_rows) and columns [cols, dst_cols) become zero.
    """
    e, args, function = unit.function(name, [PTR, I64, I64, PTR, I64, I64, I64, I64, I64], apart=(0,))
    dst, dst_step, dst_cols, src, row_step, col_step, rows, all_rows, cols = args
    whole = e.select(e.icmp_signed("==", col_step, I64(1)), e.round_down(cols, e.lanes), I64(0))
    with e.loop(0, rows) as row:
        to = e.at(dst, e.times(row.index, dst_step))
        start = e.times(row.index, row_step)
        with e.loop(0, whole, e.lanes) as col:
            e.vput(fetch(e, src, e.plus(start, col.index), dtype, e.lanes), to, col.index)
        with e.loop(whole, cols) as col:
            e.put(fetch(e, src, e.plus(start, e.times(col.index, col_step)), dtype), to, col.index)
        with e.loop(cols, dst_cols) as col:
            e.put(e.num(0.0), to, col.index)
    with e.loop(rows, all_rows) as row, e.loop(0, dst_cols) as col:
        e.put(e.num(0.0), dst, e.plus(e.times(row.index, dst_step), col.index))
    e.ret_void()
    return function


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


def emit_pack_strip(unit: Unit, tile: Register, dtype: str) -> Any:
    """pack_strip(dst, dst_cols, src, row_step, col_step, rows, cols, factors): rows of one strip as dst[col][lane]·factors[lane].

    Lanes beyond `rows` and columns in [cols, dst_cols) become zero.
    """
    R = tile.rows
    e, args, function = unit.function("pack_strip", [PTR, I64, PTR, I64, I64, I64, I64, PTR], apart=(0,))
    dst, dst_cols, src, row_step, col_step, rows, cols, factors = args
    fast_rows = e.select(e.icmp_signed("==", col_step, I64(1)), e.round_down(rows, UNROLL), I64(0))
    fast_cols = e.round_down(cols, UNROLL)

    def one(row: Value, col: Value) -> None:
        value = fetch(e, src, e.plus(e.times(row, row_step), e.times(col, col_step)), dtype)
        e.put(e.fmul(value, e.get(factors, row)), dst, e.plus(e.times(col, R), row))

    with e.loop(0, fast_rows, UNROLL) as row:
        starts = [e.times(e.plus(row.index, r), row_step) for r in range(UNROLL)]
        factor = e.vget(factors, row.index, lanes=UNROLL)
        with e.loop(0, fast_cols, UNROLL) as col:
            block = [fetch(e, src, e.plus(s, col.index), dtype, UNROLL) for s in starts]
            for c, lanes in enumerate(transpose(e, block)):
                e.vput(e.fmul(lanes, factor), dst, e.plus(e.times(e.plus(col.index, c), R), row.index))
        with e.loop(fast_cols, cols) as col:
            for r in range(UNROLL):
                one(e.plus(row.index, r), col.index)
    with e.loop(fast_rows, rows) as row, e.loop(0, cols) as col:
        one(row.index, col.index)
    with e.loop(rows, R) as row, e.loop(0, cols) as col:
        e.put(e.num(0.0), dst, e.plus(e.times(col.index, R), row.index))
    with e.loop(e.times(cols, R), e.times(dst_cols, R)) as cell:
        e.put(e.num(0.0), dst, cell.index)
    e.ret_void()
    return function


def emit_unpack_strip(unit: Unit, tile: Register, dtype: str) -> Any:
    """unpack_strip(dst, row_step, src, rows, cols, factors): src[col][lane]·factors[lane] back into rows of adjacent columns."""
    R = tile.rows
    e, args, function = unit.function("unpack_strip", [PTR, I64, PTR, I64, I64, PTR], apart=(0,))
    dst, row_step, src, rows, cols, factors = args
    fast_rows, fast_cols = e.round_down(rows, UNROLL), e.round_down(cols, UNROLL)
    kind = STORAGE[dtype]

    def one(row: Value, col: Value) -> None:
        value = e.fmul(e.get(src, e.plus(e.times(col, R), row)), e.get(factors, row))
        e.put(e.narrow(value, dtype), dst, e.plus(e.times(row, row_step), col))

    with e.loop(0, fast_rows, UNROLL) as row:
        factor = e.vget(factors, row.index, lanes=UNROLL)
        with e.loop(0, fast_cols, UNROLL) as col:
            block = [e.vget(src, e.plus(e.times(e.plus(col.index, c), R), row.index), lanes=UNROLL) for c in range(UNROLL)]
            for r, cells in enumerate(transpose(e, [e.fmul(b, factor) for b in block])):
                to = e.at(dst, e.plus(e.times(e.plus(row.index, r), row_step), col.index), kind)
                e.vput(e.narrow(cells, dtype), to)
        with e.loop(fast_cols, cols) as col:
            for r in range(UNROLL):
                one(e.plus(row.index, r), col.index)
    with e.loop(fast_rows, rows) as row, e.loop(0, cols) as col:
        one(row.index, col.index)
    e.ret_void()
    return function


def emit_pack_panels(unit: Unit, tile: Register, dtype: str) -> Any:
    """pack_panels(dst, all_rows, dst_cols, src, row_step, col_step, rows, cols, factors): dst[col / R][row][R], times factors[row].

    What strips are to rows, panels are to columns: their lanes lie along the head dim. Zeros fill up both sides.
    """
    R = tile.rows
    kinds = [PTR, I64, I64, PTR, I64, I64, I64, I64, PTR]
    e, args, function = unit.function("pack_panels", kinds, apart=(0,))
    dst, all_rows, dst_cols, src, row_step, col_step, rows, cols, factors = args
    near = e.icmp_signed("==", col_step, I64(1))
    with e.loop(0, dst_cols, R) as panel:
        to = e.at(dst, e.times(panel.index, all_rows))
        inside = e.least(R, e.minus(cols, panel.index))
        whole = e.select(near, e.round_down(inside, e.lanes), I64(0))
        with e.loop(0, rows) as row:
            start = e.plus(e.times(row.index, row_step), e.times(panel.index, col_step))
            out = e.at(to, e.times(row.index, R))
            factor = e.get(factors, row.index)
            many = e.splat(factor)
            with e.loop(0, whole, e.lanes) as col:
                e.vput(e.fmul(fetch(e, src, e.plus(start, col.index), dtype, e.lanes), many), out, col.index)
            with e.loop(whole, inside) as col:
                value = fetch(e, src, e.plus(start, e.times(col.index, col_step)), dtype)
                e.put(e.fmul(value, factor), out, col.index)
            with e.loop(inside, R) as col:
                e.put(e.num(0.0), out, col.index)
        with e.loop(e.times(rows, R), e.times(all_rows, R)) as cell:
            e.put(e.num(0.0), to, cell.index)
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
