"""Products on matrix tiles, in bf16: 16 × 16 sums of products, 32 steps of the contraction at a time.

    C[m][n] = Σ_k A[m][k] · B[k][n]     A: rows of 32 adjacent k      B: pairs of k side by side, B[k / 2][n][2]      C: fp32

A processor with AMX has eight such tiles as registers and one instruction for the product. Of bytes a tile has 64 steps, four
side by side in B, and the sums are integers of 32 bits (`decode_tiles`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from tilewise.backends.cpu.builder import Emit, Unit
from tilewise.backends.cpu.ir import I8, I16, I64, PTR, VOID, Pointer, Value, vector_of

SIDE = 16  # rows of a tile, columns of a sum
DEPTH = 32  # steps of a contraction in one product
ROW = 64  # bytes of a tile's row
TILES = 8


class Amx:
    """Eight tiles, numbered; rows lie `step` bytes apart in memory. One instruction for each method."""

    def __init__(self, e: Emit) -> None:
        self.e = e

    def _do(self, name: str, *args: Any) -> None:
        values = [self.e.const(x, I8) if isinstance(x, int) else x for x in args]
        self.e.intrinsic(f"llvm.x86.{name}", VOID, values)

    def zero(self, tile: int) -> None:
        self._do("tilezero", tile)

    def load(self, tile: int, address: Pointer, step: Value) -> None:
        self._do("tileloadd64", tile, address, step)

    def store(self, tile: int, address: Pointer, step: Value) -> None:
        self._do("tilestored64", tile, address, step)

    def dot(self, c: int, a: int, b: int) -> None:
        self._do("tdpbf16ps", c, a, b)

    def dot_signed(self, c: int, a: int, b: int) -> None:
        """Of bytes, all signed."""
        self._do("tdpbssd", c, a, b)

    def dot_unsigned(self, c: int, a: int, b: int) -> None:
        """Of bytes; those of A are unsigned."""
        self._do("tdpbusd", c, a, b)


UNITS: dict[str, Callable[[Emit], Any]] = {"amx": Amx}
"""By the name of `Kernel.matrix`; tests add loops over memory that do the same anywhere."""


def untyped(e: Emit, memory: Any) -> Pointer:
    """A local or global of LLVM's older kind of pointers, as bytes."""
    return Pointer(e, e.ir.inttoptr(e.ir.ptrtoint(memory, I64), PTR), I8)


def by_tiles(unit: Unit, name: str, matrix: str, *, add: bool) -> Any:
    """C[m][r] (+)= Σ_k A[m][k]·B[k][r] for k in [k0, k1), counted in steps of DEPTH, and the groups [g0, g1) of 32 rows m.

    Arguments: k0, k1, A, the distances in bytes of its rows, steps and groups, B with R pairs a row, C, the distance of its rows,
    g0, g1. Two by two tiles of C are in use at a time, so every tile of A and B that is loaded is used twice.
    """
    e, values, function = unit.function(name, [I64, I64, PTR, I64, I64, I64, PTR, PTR, I64, I64, I64])
    k0, k1, A, a_row, a_step, a_group, B, C, c_row, g0, g1 = values
    A, B, C, R = A.of(I8), B.of(I8), C.of(I8), e.tile.rows
    assert R == 2 * SIDE and e.tile.keys == DEPTH
    tiles = UNITS[matrix](e)
    b_row = e.const(R * 4, I64)
    below, beside = SIDE, ROW  # the second tile of A or C lies so many rows on, of B or C so many bytes
    with e.range(g0, g1) as group:
        a_tiles = A + group * a_group
        c_tiles = C + group * (2 * SIDE) * c_row
        corners = [c_tiles + below * m * c_row + beside * n for m in (0, 1) for n in (0, 1)]
        for n, corner in enumerate(corners):
            if add:
                tiles.load(n, corner, c_row)
            else:
                tiles.zero(n)
        with e.range(k0, k1) as step:
            a = a_tiles + step * a_step
            b = B + step * (SIDE * R * 4)
            tiles.load(4, a, a_row)
            tiles.load(6, b, b_row)
            tiles.dot(0, 4, 6)
            tiles.load(7, b + beside, b_row)
            tiles.dot(1, 4, 7)
            tiles.load(5, a + below * a_row, a_row)
            tiles.dot(2, 5, 6)
            tiles.dot(3, 5, 7)
        for n, corner in enumerate(corners):
            tiles.store(n, corner, c_row)
    e.ret()
    return function


def enter(e: Emit, matrix: str) -> None:
    """Tiles are set up: all eight of 16 rows of 64 bytes."""
    if matrix != "amx":
        return
    palette = [1] + [0] * 15 + [ROW, 0] * TILES + [0] * 16 + [SIDE] * TILES + [0] * 8
    content = ir.Constant(ir.ArrayType(I8, 64), [I8(n) for n in palette])
    table = ir.GlobalVariable(e.unit.module, content.type, "palette")
    table.linkage, table.global_constant, table.initializer = "internal", True, content
    e.intrinsic("llvm.x86.ldtilecfg", VOID, [untyped(e, table)])


def leave(e: Emit, matrix: str) -> None:
    """Tiles are given back, or switching to another thread would have to save them."""
    if matrix == "amx":
        e.intrinsic("llvm.x86.tilerelease", VOID, [])


def bf16_vector(x: Any, y: Any, matrix: str) -> Any:
    """Two vectors as one of bf16, x first."""
    e = x.e
    if matrix == "amx" and x.lanes == 16:
        return e.intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", vector_of(I16, 32), [y, x])
    return e.narrow(x, "bfloat16").pick(range(2 * x.lanes), e.narrow(y, "bfloat16"))


def bf16_pairs(x: Any, y: Any, matrix: str) -> Any:
    """Two vectors as pairs of bf16: x0, y0, x1, y1, …"""
    return bf16_vector(x, y, matrix).pick([n for lane in range(x.lanes) for n in (lane, x.lanes + lane)])
