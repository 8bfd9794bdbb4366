"""Matrix tiles as loops over memory: kernels that are made of tiles run, and are tested, on any machine."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from tilewise.backends.cpu import matrix
from tilewise.backends.cpu.builder import Emit, Unit
from tilewise.backends.cpu.ir import F32, I8, I32, PTR, Pointer, Value
from tilewise.backends.cpu.matrix import ROW, SIDE, TILES, untyped


class Plain:
    """The same with tiles in memory and products by loops."""

    def __init__(self, e: Emit) -> None:
        self.e = e
        self.tile_dot = e.unit.module.globals.get("tile_dot") or emit_dot(e.unit)
        memory = untyped(e, e.ir.alloca(ir.ArrayType(I8, TILES * SIDE * ROW)))
        self.tiles = [memory + n * SIDE * ROW for n in range(TILES)]

    def _rows(self, to: Pointer, to_step: Any, source: Pointer | None, source_step: Any) -> None:
        with self.e.range(0, SIDE) as row:
            for at in range(0, ROW, 16):
                value = self.e.vector(0, 4, I32) if source is None else (source + (row * source_step + at)).vector(0, 16)
                (to + (row * to_step + at))[0] = value

    def zero(self, tile: int) -> None:
        self._rows(self.tiles[tile], ROW, None, 0)

    def load(self, tile: int, address: Pointer, step: Value) -> None:
        self._rows(self.tiles[tile], ROW, address, step)

    def store(self, tile: int, address: Pointer, step: Value) -> None:
        self._rows(address, step, self.tiles[tile], ROW)

    def dot(self, c: int, a: int, b: int) -> None:
        self.e.call(self.tile_dot, *(self.tiles[n] for n in (c, a, b)))

    def dot_signed(self, c: int, a: int, b: int) -> None:
        self._bytes(c, a, b, unsigned=False)

    def dot_unsigned(self, c: int, a: int, b: int) -> None:
        self._bytes(c, a, b, unsigned=True)

    def _bytes(self, c: int, a: int, b: int, unsigned: bool) -> None:
        name = "unsigned_dot" if unsigned else "signed_dot"
        function = self.e.unit.module.globals.get(name) or emit_byte_dot(self.e.unit, name, unsigned)
        self.e.call(function, *(self.tiles[n] for n in (c, a, b)))


def emit_dot(unit: Unit) -> Any:
    """tile_dot(c, a, b): c[m][n] += Σ_p a[m][p][0] · b[p][n][0] + a[m][p][1] · b[p][n][1]."""
    e, (c, a, b), function = unit.function("tile_dot", [PTR, PTR, PTR], noalias=(0,))
    a, b, columns = a.of(I32), b.of(I32), range(0, SIDE, e.lanes)

    def parts(pair: Any) -> tuple[Any, Any]:
        """The two values of a pair (or of several) as fp32: the first is the low half."""
        return (pair << 16).bitcast(F32), (pair & 0xFFFF0000).bitcast(F32)

    with e.range(0, SIDE) as m:
        row = m * SIDE
        with e.loop(0, SIDE, 1, [c.vector(row + n) for n in columns]) as p:
            left = [x.splat() for x in parts(a[row + p.index])]
            totals = []
            for n, total in zip(columns, p.values, strict=True):
                right = parts(b.vector(p.index * SIDE + n))
                for x, y in zip(left, right, strict=True):
                    total = e.fma(x, y, total)
                totals.append(total)
            p.carry(totals)
        for n, total in zip(columns, p.values, strict=True):
            c[row + n] = total
    e.ret()
    return function


def emit_byte_dot(unit: Unit, name: str, unsigned: bool) -> Any:
    """name(c, a, b): c[m][n] += Σ_p Σ_i a[m][p][i] · b[p][n][i], in integers of 32 bits that wrap around."""
    e, (c, a, b), function = unit.function(name, [PTR, PTR, PTR], noalias=(0,))
    c, a, b = c.of(I32), a.of(I8), b.of(I8)
    with e.range(0, SIDE) as m:
        with e.loop(0, SIDE, 1, [c.vector(m * SIDE, SIDE)]) as p:
            right, total = b.vector(p.index * ROW, ROW).sext(I32), p.values[0]
            for i in range(4):
                byte = a[m * ROW + (p.index * 4 + i)]
                left = (byte.zext(I32) if unsigned else byte.sext(I32)).splat(SIDE)
                total = total + left * right.pick(range(i, ROW, 4))
            p.carry([total])
        c[m * SIDE] = p.values[0]
    e.ret()
    return function


matrix.UNITS["plain"] = Plain
