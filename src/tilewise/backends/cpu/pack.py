"""Tiles in and out of memory: conversion to the kernel's Real type, padding with zeros, and the two layouts of operands.

    lanes    dst[row / W][col][W]     W rows side by side: strips of query rows (W = R), K and V where keys are broadcast (W = J)
    panels   dst[col / W][row][W]     W columns side by side: the gradients' operands (W = R), V and K where dims are (W = J)

What is laid out are cells: values in the Real type, or, for matrix tiles, pairs of 16-bit values as they are stored, two columns
of a row or two rows of a column. Sources have any strides and dtype. A row is read by vectors where its elements are adjacent,
one by one elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from tilewise.backends.cpu.builder import Emit, Unit
from tilewise.backends.cpu.ir import I32, I64, PTR, STORAGE, Pointer, Value, vector_of
from tilewise.backends.cpu.spec import UNROLL, round_down

NEAR_ROWS = 16
"""Rows packed into panels together: so few that the lines read for one panel are still in L1 for the next, however far apart
rows are. (Neoverse N1, head dim 512: 3 % of a forward.)"""
AHEAD = 16
"""On x86 the lines of a row are asked for so many rows before it is packed: the processor's own prefetchers end with a page, and
lose the order in which squares read. (Cascade Lake, forward of 4 heads: documents of 150 to 1,388 tokens 1 % faster with one
thread and 3 % with two, head dim 128 2 %; 2,048 keys 1 %; backward no change. Not measured on a Neoverse.)"""

Pair = tuple[Any, Any]
Row = tuple[Any, ...]
Across = Callable[[Row, Pair, Pair], None]
One = Callable[[Row, Any], None]


def transposed(rows: list[Any], width: int = 1) -> list[Any]:
    """Vectors as one sequence that takes `width` cells of each in turn. As many of them as each has of such parts: transposed."""
    if len(rows) == 1:
        return rows
    half = len(rows) // 2
    lanes, run = rows[0].lanes, half * width  # so many cells lie side by side in each half already
    low = [n // (2 * run) * run + n // run % 2 * lanes + n % run for n in range(lanes)]
    high = [n + lanes // 2 for n in low]
    pairs = zip(transposed(rows[:half], width), transposed(rows[half:], width), strict=True)
    return [a.pick(order, b) for a, b in pairs for order in (low, high)]


def squares(e: Emit, tall: int) -> list[Pair]:
    """Rows and columns that are transposed in registers at a time, where they are `tall` cells apart or more: the most that
    vectors allow, then what is left by UNROLL."""
    most = max(UNROLL, min(tall, e.lanes)), max(UNROLL, e.lanes)
    return [most] if most == (UNROLL, UNROLL) else [most, (UNROLL, UNROLL)]


def by_squares(
    e: Emit, shapes: list[Pair], whole: Pair, ends: Pair, origin: Callable[[Any], Row], across: Across, one: One
) -> None:
    """Rows and columns up to `whole` in squares, the largest first: `across(rows, columns, shape)`; what is left up to `ends`,
    cell by cell: `one(row, column)`. `origin(row)` is what these functions take for a row: its indices in source and target."""
    done_rows: Any = 0
    for n, (tall, _) in enumerate(shapes):
        if n and tall == shapes[n - 1][0]:
            continue  # no rows are left
        fast_rows = round_down(whole[0], tall)
        with e.range(done_rows, fast_rows, tall) as row:
            first, done = origin(row), cast(Any, 0)
            for shape in shapes[n:]:
                fast = round_down(whole[1], shape[1])
                with e.range(0, tall, shape[0]) as part:
                    across(tuple(x + part for x in first), (done, fast), shape)
                done = fast
            with e.range(0, tall) as r, e.range(done, ends[1]) as col:
                one(tuple(x + r for x in first), col)
        done_rows = fast_rows
    with e.range(done_rows, ends[0]) as row, e.range(0, ends[1]) as col:
        one(origin(row), col)


class Source(NamedTuple):
    """Rows to be packed: in elements, the distances of rows and columns and their numbers."""

    src: Pointer
    row_step: Any
    col_step: Any
    rows: Any
    cols: Any

    def row(self, row: Any) -> Any:
        """The offset of a row; a pointer in place of their distance holds one for each of them."""
        return self.row_step[row] if isinstance(self.row_step, Pointer) else row * self.row_step


class Values:
    """A cell is one value in the Real type."""

    name, rows, cols = "values", 1, 1
    """`rows` and `cols`: how many of the source's make a cell."""

    def __init__(self, e: Emit, source: Source) -> None:
        self.e, self.source, self.kind = e, source, e.real.type

    def near(self, row: Any, col: Any, count: int) -> Any:
        """Cells [col, col + count) of a row, all whole and their columns adjacent."""
        return self.source.src.fetch(self.source.row(row) + col, count)

    def ahead(self, rows: list[Any], col: Any) -> None:
        """Asks for the lines that hold a column of later rows, unless rows are scattered: the last have none behind them."""
        if self.e.arch != "aarch64" and not isinstance(self.source.row_step, Pointer):
            for row in rows:
                self.e.prefetch(self.source.src + (self.source.row((row + AHEAD) * self.rows) + col * self.cols))

    def one(self, row: Any, col: Any) -> Any:
        """A cell anywhere; beyond the source's shape a pair has zeros."""
        return self.source.src.fetch(self.source.row(row) + col * self.source.col_step)


class Pairs(Values):
    """A cell is two 16-bit values, the first in the low half."""

    def __init__(self, e: Emit, source: Source) -> None:
        super().__init__(e, source)
        self.kind = I32

    def one(self, row: Any, col: Any) -> Any:
        e, (src, row_step, col_step, rows, cols) = self.e, self.source
        row, col = row * self.rows, col * self.cols
        other_row, other_col = row + (self.rows - 1), col + (self.cols - 1)
        inside = (other_row < rows) & (other_col < cols)
        first = row * row_step + col * col_step
        second = other_row * row_step + other_col * col_step
        low, high = (src[at].zext(I32) for at in (first, e.select(inside, second, first)))
        return low | e.select(inside, high << 16, 0)


class ColumnPairs(Pairs):
    """Two columns of a row."""

    name, cols = "column_pairs", 2

    def near(self, row: Any, col: Any, count: int) -> Any:
        pairs = self.source.src.vector(row * self.source.row_step + col * 2, 2 * count)
        return Value(self.e, self.e.ir.bitcast(pairs.raw, vector_of(I32, count)))


class RowPairs(Pairs):
    """Two rows of a column."""

    name, rows = "row_pairs", 2

    def near(self, row: Any, col: Any, count: int) -> Any:
        src, row_step, *_ = self.source
        first = row * 2 * row_step + col
        low, high = (src.vector(at, count).zext(I32) for at in (first, first + row_step))
        return low | (high << 16)


class Packing:
    """A function that packs, under construction: its parameters are dst, its step, the source's and, if scaled, factors[row]."""

    def __init__(
        self, unit: Unit, layout: str, dtype: str, width: int, cells: type[Values], scaled: bool, scattered: bool = False
    ) -> None:
        extra = layout == "panels"  # all_rows, before the columns
        kinds = [PTR, I64, PTR, PTR if scattered else I64, *[I64] * (3 + extra)] + [PTR] * scaled
        name = f"pack_{layout}_{cells.name}_{width}{'_scaled' * scaled}{'_scattered' * scattered}"
        self.e, (dst, self.step, src, row_step, col_step, rows, *more), self.function = unit.function(
            name, kinds, noalias=(0,)
        )
        self.all_rows: Any = more.pop(0) if extra else None
        self.factors = more.pop() if scaled else None
        row_step = row_step.of(I64) if scattered else row_step
        self.cell = cells(self.e, Source(src.stored(dtype), row_step, col_step, rows, more[0]))
        self.dst, self.near = dst.of(self.cell.kind), col_step == 1


def emit_pack_lanes(
    unit: Unit, width: int, dtype: str, *, scaled: bool, cells: type[Values] = Values, scattered: bool = False
) -> Any:
    """pack_lanes(dst, dst_cols, src, row_step, col_step, rows, cols[, factors]): dst[row / W][col][W], rows times factors[row].

    Rows up to the next multiple of W and columns in [cols, dst_cols) become zero. W and dst_cols count cells. Where rows are
    scattered, `row_step` points to their offsets.
    """
    pack = Packing(unit, "lanes", dtype, width, cells, scaled, scattered)
    e, cell, dst_cols, factors = pack.e, pack.cell, pack.step, pack.factors
    ends = list(zip(cell.source[3:], (cell.rows, cell.cols), strict=True))
    rows, cols = ((n + (per - 1)) // per for n, per in ends)
    whole_rows, whole_cols = (n // per for n, per in ends)

    def one(at: Row, col: Any) -> None:
        row, lane = at
        value = cell.one(row, col)
        out[col * width + lane] = value if factors is None else value * factors[row]

    def across(at: Row, between: Pair, shape: Pair) -> None:
        """Either a column fills a vector, or columns follow each other in it."""
        (row, lane), (tall, wide) = at, shape
        factor = factors.vector(row, tall).pick([n % tall for n in range(wide)]) if factors is not None else None
        with e.range(*between, wide) as col:
            cell.ahead([row + r for r in range(tall)], col)
            block = [cell.near(row + r, col, wide) for r in range(tall)]
            for n, value in enumerate(transposed(block)):
                start, to = (col, n * wide) if tall < wide else (col + n, lane)
                scaled = value if factor is None else value * factor
                out[start * width + to] = scaled

    with e.range(0, rows, width) as group:
        out = pack.dst + group * dst_cols
        inside = e.min(width, rows - group)
        whole = e.select(pack.near, e.min(width, whole_rows - group), 0)
        by_squares(e, squares(e, width), (whole, whole_cols), (inside, cols), lambda lane: (group + lane, lane), across, one)
        with e.range(inside, width) as lane, e.range(0, cols) as col:
            out[col * width + lane] = 0
        with e.range(cols * width, dst_cols * width) as at:
            out[at] = 0
    e.ret()
    return pack.function


def emit_pack_panels(
    unit: Unit, width: int, dtype: str, *, scaled: bool, cells: type[Values] = Values, scattered: bool = False
) -> Any:
    """pack_panels(dst, step, src, row_step, col_step, rows, all_rows, cols[, factors]): dst[col / W][row][W], times factors[row].

    Panels lie `step` cells apart. Rows in [rows, all_rows) and columns up to the next multiple of W cells become zero.
    """
    pack = Packing(unit, "panels", dtype, width, cells, scaled, scattered)
    e, cell, factors = pack.e, pack.cell, pack.factors
    _, _, _, end_row, end_col = cell.source
    lanes = min(width, e.lanes)
    rows, cols = ((n + (per - 1)) // per for n, per in ((end_row, cell.rows), (end_col, cell.cols)))
    whole_rows, all_rows = end_row // cell.rows, pack.all_rows // cell.rows

    def scaled_by_row(value: Any, row: Any, lanes: int) -> Any:
        if factors is None:
            return value
        return value * (factors[row].splat(lanes) if lanes else factors[row])

    fast_rows = e.select(pack.near, whole_rows, 0)
    fast_cols = round_down(end_col // cell.cols, width)

    def start(panel: Any) -> Any:
        return pack.dst + panel // width * pack.step

    # panels narrower than a vector: a vector of so many rows lies in each panel that a vector of a row spans
    tall = e.lanes // width
    wide_cols = round_down(fast_cols, e.lanes) if tall > 1 else 0
    with e.range(0, fast_rows, NEAR_ROWS) as some:
        last = e.min(some + NEAR_ROWS, fast_rows)
        done = round_down(last, tall) if tall > 1 else some
        if tall > 1:
            with e.range(some, done, tall) as row, e.range(0, wide_cols, e.lanes) as panel:
                to = start(panel)
                cell.ahead([row + r for r in range(tall)], panel)
                block = [scaled_by_row(cell.near(row + r, panel, e.lanes), row + r, e.lanes) for r in range(tall)]
                for n, value in enumerate(transposed(block, width)):
                    to[n * pack.step + row * width] = value
        with e.range(0, fast_cols, width) as panel:
            to = start(panel)
            with e.range(e.select(panel < wide_cols, done, some) if tall > 1 else some, last) as row:
                for n in range(0, width, lanes):
                    value = scaled_by_row(cell.near(row, panel + n, lanes), row, lanes)
                    to[row * width + n] = value
    with e.range(0, cols, width) as panel:
        to = start(panel)
        inside = e.min(width, cols - panel)
        quick = e.select(panel < fast_cols, fast_rows, 0)
        with e.range(quick, rows) as row:
            out = to + row * width
            with e.range(0, inside) as col:
                out[col] = scaled_by_row(cell.one(row, panel + col), row, 0)
            with e.range(inside, width) as col:
                out[col] = 0
        with e.range(rows * width, all_rows * width) as at:
            to[at] = 0
    e.ret()
    return pack.function


def quotient(x: Any, y: Any) -> Any:
    """x / y; 0 where y is 0, as in a row that saw no key."""
    return x.e.select(y == 0.0, 0.0, x / y)


def quotients(xs: list[Any], y: Any) -> list[Any]:
    """The same of many x, with one division: x / y is x · (1 / y), and what that leaves of x once more divided. AVX-512 divides a
    vector in 16 cycles, in which it has 32 of these steps. What is infinite leaves none."""
    e = y.e
    inverse, none = 1.0 / y, y == 0.0

    def one(x: Any) -> Any:
        near = x * inverse
        rest = e.fma(-near, y, x)
        return e.select(none, 0.0, e.select(abs(rest) < float("inf"), e.fma(rest, inverse, near), near))

    return [one(x) for x in xs]


def emit_unpack_strip(unit: Unit, dtype: str, *, divide: bool) -> Any:
    """unpack(dst, row_step, src, rows, cols, factors): src[col][lane], times or divided by factors[lane], back into rows."""
    e, (dst, row_step, src, rows, cols, factors), function = unit.function(
        "unpack", [PTR, I64, PTR, I64, I64, PTR], noalias=(0,)
    )
    dst, R = dst.of(STORAGE[dtype]), e.tile.rows

    def apply(x: Any, factor: Any) -> Any:
        return quotient(x, factor) if divide else x * factor

    def applied(block: list[Any], factor: Any) -> list[Any]:
        """Many columns over the same denominators: see `quotients`."""
        return quotients(block, factor) if divide else [x * factor for x in block]

    def one(at: Row, col: Any) -> None:
        (row,) = at
        value = apply(src.vector(col * R + row, 1), factors.vector(row, 1))
        to = dst + (row * row_step + col)
        to[0] = e.narrow(value, dtype)

    def across(at: Row, between: Pair, shape: Pair) -> None:
        (row,), (side, _) = at, shape
        factor = factors.vector(row, side)
        with e.range(*between, side) as col:
            block = [src.vector((col + c) * R + row, side) for c in range(side)]
            for r, value in enumerate(transposed(applied(block, factor))):
                dst[(row + r) * row_step + col] = e.narrow(value, dtype)

    by_squares(e, squares(e, R), (rows, cols), (rows, cols), lambda row: (row,), across, one)
    e.ret()
    return function


def emit_row_dots(unit: Unit, dtype: str) -> Any:
    """row_dots(dst, x, x_step, x_col, y, y_step, y_col, rows, cols): dst[row] = Σ_col x·y."""
    e, (dst, x, x_step, x_col, y, y_step, y_col, rows, cols), function = unit.function(
        "row_dots", [PTR, PTR, I64, I64, PTR, I64, I64, I64, I64], noalias=(0,)
    )
    x, y = x.stored(dtype), y.stored(dtype)
    whole = e.select((x_col == 1) & (y_col == 1), round_down(cols, e.lanes), 0)
    with e.range(0, rows) as row:
        x_row, y_row = row * x_step, row * y_step
        with e.loop(0, whole, e.lanes, [e.vector(0.0)]) as wide:
            a, b = (p.fetch(at + wide.index, e.lanes) for p, at in ((x, x_row), (y, y_row)))
            wide.carry([e.fma(a, b, wide.values[0])])
        with e.loop(whole, cols, 1, [wide.values[0].sum()]) as rest:
            a, b = x.fetch(x_row + rest.index * x_col), y.fetch(y_row + rest.index * y_col)
            rest.carry([e.fma(a, b, rest.values[0])])
        dst[row] = rest.values[0]
    e.ret()
    return function
