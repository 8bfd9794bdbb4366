"""Products on matrix tiles, in bf16: 16 × 16 sums of products, 32 steps of the contraction at a time.

    C[m][n] = Σ_k A[m][k] · B[k][n]     A: rows of 32 adjacent k      B: pairs of k side by side, B[k / 2][n][2]      C: fp32

A processor with AMX has eight such tiles as registers and one instruction for the product. `Plain` does the same with loops over
memory: so kernels that are made of tiles run, and are tested, on any machine.
"""

from __future__ import annotations

from typing import Any, Protocol

from llvmlite import ir

from tilewise.backends.cpu.ir import F32, I8, I16, I32, I64, PTR, VOID, Emit, Unit, Value
from tilewise.backends.cpu.spec import Register

SIDE = 16  # rows of a tile, columns of a sum
DEPTH = 32  # steps of a contraction in one product
ROW = 64  # bytes of a tile's row
TILES = 8


class MatrixUnit(Protocol):
    """Eight tiles, numbered; rows lie `step` bytes apart in memory."""

    def zero(self, tile: int) -> None: ...
    def load(self, tile: int, address: Value, step: Value) -> None: ...
    def store(self, tile: int, address: Value, step: Value) -> None: ...
    def dot(self, c: int, a: int, b: int) -> None: ...


class Amx:
    """One instruction for each."""

    def __init__(self, e: Emit) -> None:
        self.e = e

    def _do(self, name: str, *args: Value) -> None:
        self.e.intrinsic(f"llvm.x86.{name}", VOID, args)

    def zero(self, tile: int) -> None:
        self._do("tilezero", I8(tile))

    def load(self, tile: int, address: Value, step: Value) -> None:
        self._do("tileloadd64", I8(tile), address, step)

    def store(self, tile: int, address: Value, step: Value) -> None:
        self._do("tilestored64", I8(tile), address, step)

    def dot(self, c: int, a: int, b: int) -> None:
        self._do("tdpbf16ps", I8(c), I8(a), I8(b))


class Plain:
    """Tiles in memory, products by loops."""

    def __init__(self, e: Emit) -> None:
        self.e = e
        memory = e.inttoptr(e.ptrtoint(e.alloca(ir.ArrayType(I8, TILES * SIDE * ROW)), I64), PTR)
        self.tiles = [e.at(memory, n * SIDE * ROW, I8) for n in range(TILES)]

    def _rows(self, to: Value, to_step: int | Value, source: Value | None, source_step: int | Value) -> None:
        e = self.e
        with e.loop(0, SIDE) as row:
            for at in range(0, ROW, 16):
                value = e.iconst(0, I32, 4)
                if source is not None:
                    value = e.vget(e.at(source, e.plus(e.times(row.index, source_step), at), I8), 0, I8, 16)
                e.vput(value, e.at(to, e.plus(e.times(row.index, to_step), at), I8))

    def zero(self, tile: int) -> None:
        self._rows(self.tiles[tile], ROW, None, 0)

    def load(self, tile: int, address: Value, step: Value) -> None:
        self._rows(self.tiles[tile], ROW, address, step)

    def store(self, tile: int, address: Value, step: Value) -> None:
        self._rows(address, step, self.tiles[tile], ROW)

    def dot(self, c: int, a: int, b: int) -> None:
        self.e.call(self.e.module.globals["tile_dot"], [self.tiles[n] for n in (c, a, b)])


def emit_plain_dot(unit: Unit) -> None:
    """tile_dot(c, a, b): c[m][n] += Σ_p a[m][p][0] · b[p][n][0] + a[m][p][1] · b[p][n][1]."""
    e, (c, a, b), _ = unit.function("tile_dot", [PTR, PTR, PTR], apart=(0,))
    width = range(0, SIDE, e.lanes)

    def parts(word: Value, lanes: int) -> tuple[Value, Value]:
        """The two values of a pair (or of several) as fp32: the first is the low half."""
        kind = e.vtype(F32, lanes) if lanes else F32
        shift, high = (e.iconst(n, I32, lanes) if lanes else I32(n) for n in (16, 0xFFFF0000))
        return e.bitcast(e.shl(word, shift), kind), e.bitcast(e.and_(word, high), kind)

    with e.loop(0, SIDE) as m:
        row = e.times(m.index, SIDE)
        with e.loop(0, SIDE, 1, [e.vget(c, e.plus(row, n)) for n in width]) as p:
            left = [e.splat(x) for x in parts(e.get(a, e.plus(row, p.index), I32), 0)]
            totals = []
            for n, total in zip(width, p.values, strict=True):
                right = parts(e.vget(b, e.plus(e.times(p.index, SIDE), n), I32), e.lanes)
                for x, y in zip(left, right, strict=True):
                    total = e.mad(x, y, total)
                totals.append(total)
            p.carry(totals)
        for n, total in zip(width, p.values, strict=True):
            e.vput(total, c, e.plus(row, n))
    e.ret_void()


def by_tiles(unit: Unit, name: str, tile: Register, matrix: str, *, add: bool) -> Any:
    """C[m][r] (+)= Σ_k A[m][k]·B[k][r] for k in [k0, k1), counted in steps of DEPTH, and the groups [g0, g1) of 32 rows m.

    Arguments: k0, k1, A, the distances in bytes of its rows, steps and groups, B with R pairs a row, C, the distance of its rows,
    g0, g1. Two by two tiles of C are in use at a time, so every tile of A and B that is loaded is used twice.
    """
    args = [I64, I64, PTR, I64, I64, I64, PTR, PTR, I64, I64, I64]
    e, values, function = unit.function(name, args)
    k0, k1, a_ptr, a_row, a_step, a_group, b_ptr, c_ptr, c_row, g0, g1 = values
    assert tile.rows == 2 * SIDE and tile.keys == DEPTH
    unit_of = Amx(e) if matrix == "amx" else Plain(e)
    b_row = I64(tile.rows * 4)
    below, beside = SIDE, ROW  # the second tile of A or C lies so many rows on, of B or C so many bytes
    with e.loop(g0, g1) as over:
        a_tiles = e.at(a_ptr, e.times(over.index, a_group), I8)
        c_tiles = e.at(c_ptr, e.times(e.times(over.index, 2 * SIDE), c_row), I8)
        places = [e.at(e.at(c_tiles, e.times(below * m, c_row), I8), beside * n, I8) for m in (0, 1) for n in (0, 1)]
        for n, place in enumerate(places):
            if add:
                unit_of.load(n, place, c_row)
            else:
                unit_of.zero(n)
        with e.loop(k0, k1) as step:
            a = e.at(a_tiles, e.times(step.index, a_step), I8)
            b = e.at(b_ptr, e.times(step.index, SIDE * tile.rows * 4), I8)
            unit_of.load(4, a, a_row)
            unit_of.load(6, b, b_row)
            unit_of.dot(0, 4, 6)
            unit_of.load(7, e.at(b, beside, I8), b_row)
            unit_of.dot(1, 4, 7)
            unit_of.load(5, e.at(a, e.times(below, a_row), I8), a_row)
            unit_of.dot(2, 5, 6)
            unit_of.dot(3, 5, 7)
        for n, place in enumerate(places):
            unit_of.store(n, place, c_row)
    e.ret_void()
    return function


def enter(e: Emit, matrix: str) -> None:
    """Tiles are set up: all eight of 16 rows of 64 bytes."""
    if matrix != "amx":
        return
    palette = [1] + [0] * 15 + [ROW, 0] * TILES + [0] * 16 + [SIDE] * TILES + [0] * 8
    content = ir.Constant(ir.ArrayType(I8, 64), [I8(n) for n in palette])
    table = ir.GlobalVariable(e.module, content.type, "palette")
    table.linkage, table.global_constant, table.initializer = "internal", True, content
    e.intrinsic("llvm.x86.ldtilecfg", VOID, [e.inttoptr(e.ptrtoint(table, I64), PTR)])


def leave(e: Emit, matrix: str) -> None:
    """Tiles are given back, or switching to another thread would have to save them."""
    if matrix == "amx":
        e.intrinsic("llvm.x86.tilerelease", VOID, [])


def halves(e: Emit, x: Value, y: Value, matrix: str) -> Value:
    """Two vectors as one of bf16, x first."""
    count = x.type.count
    if matrix == "amx" and count == 16:
        kind = ir.VectorType(I16, 32)
        return e.intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind, [y, x])
    return e.pick(e.narrow(x, "bfloat16"), range(2 * count), e.narrow(y, "bfloat16"))


def together(e: Emit, x: Value, y: Value, matrix: str) -> Value:
    """Two vectors as pairs of bf16: x0, y0, x1, y1, …"""
    lanes = x.type.count
    return e.pick(halves(e, x, y, matrix), [n for lane in range(lanes) for n in (lane, lanes + lane)])
