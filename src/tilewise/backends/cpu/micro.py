"""Two register-tile contractions; every matrix product of attention on this backend is one of them.

A is read along its lanes, B is broadcast, C holds J rows of R = L * V lanes in registers:

    by_panels   C[j][r] = Σ_k A[k][r] · B[k][j]    S = Q Kᵀ, dP = dO Vᵀ (k = d, j = keys);  O = P V, dQ = dS K (k = keys, j = d)
    by_rows     C[j][r] = Σ_k A[k][r] · B[j][k]    dV = Pᵀ dO, dK = dSᵀ Q (k = query rows, r = d)

In the first, B is packed in panels of J columns, so that both operands are read front to back. NEON multiplies by one lane of a
register, so B is loaded UNROLL values at a time; x86 broadcasts from memory.
"""

from __future__ import annotations

from typing import Any

from tilewise.backends.cpu.ir import I64, PTR, Emit, Unit, Value
from tilewise.backends.cpu.spec import UNROLL, Register


def strip(e: Emit, tile: Register, pointer: Value, offset: int | Value = 0, kind: Any = None) -> list[Value]:
    """The V vectors of one row of R lanes."""
    return [e.vget(e.at(pointer, offset, kind), i * e.lanes, kind) for i in range(tile.vectors)]


def put_strip(e: Emit, values: list[Value], pointer: Value, offset: int | Value = 0) -> None:
    kind = values[0].type.element
    for i, value in enumerate(values):
        e.vput(value, e.at(pointer, offset, kind), i * e.lanes)


def share(e: Emit, steps: Value, parts: int) -> Value:
    """So many steps of a sum that it has so many parts: a multiple of UNROLL."""
    return e.round_up(e.over(e.plus(steps, parts - 1), parts), UNROLL)


def by_panels(unit: Unit, name: str, tile: Register, *, fold: str = "") -> Any:
    """C[j][r] = Σ_k A[k][r]·B[k][j] for k in [k0, k1), multiples of UNROLL, and the panels [g0, g1) of J columns.

    Arguments: k0, k1, A, its row stride, B, the distance of its panels, C, its row stride, g0, g1, part[, X]. A sum's fate:

        ""   it is stored        "add"   C + sum is stored        "scale"   C·X[r] + sum is stored

    It is a sum of sums, each over `part` steps, a multiple of UNROLL: the error of a long sum grows with its length.
    """
    args = [I64, I64, PTR, I64, PTR, I64, PTR, I64, I64, I64, I64] + [PTR] * (fold == "scale")
    e, values, function = unit.function(name, args, apart=(2, 4, 6))
    k0, k1, a_ptr, a_step, b_ptr, b_step, c_ptr, c_step, g0, g1, part, *rest = values
    width, J = tile.vectors, tile.keys
    side = strip(e, tile, rest[0]) if rest else []
    first = e.least(e.plus(k0, part), k1)

    def join(steps: tuple[Value, Value], panel: Value, c_row: Value, fold: str) -> None:
        total = _panel_sum(e, tile, steps, a_ptr, a_step, panel)
        for j in range(J):
            new = total[j * width : (j + 1) * width]
            if fold == "scale":
                new = [e.mad(x, s, y) for x, s, y in zip(strip(e, tile, c_row), side, new, strict=True)]
            elif fold == "add":
                new = [e.fadd(x, y) for x, y in zip(strip(e, tile, c_row), new, strict=True)]
            put_strip(e, new, c_row)
            c_row = e.at(c_row, c_step)

    with e.loop(g0, g1) as over:
        panel = e.at(b_ptr, e.times(over.index, b_step))
        c_row = e.at(c_ptr, e.times(e.times(over.index, J), c_step))
        join((k0, first), panel, c_row, fold)
        with e.loop(first, k1, part) as later:
            join((later.index, e.least(e.plus(later.index, part), k1)), panel, c_row, "add")
    e.ret_void()
    return function


def _panel_sum(
    e: Emit, tile: Register, steps: tuple[Value, Value], a_ptr: Value, a_step: Value, panel: Value
) -> list[Value]:
    """Σ_k A[k][r]·B[k][j] in registers, j-major."""
    width, J = tile.vectors, tile.keys
    with e.loop(*steps, UNROLL, [e.const(0.0)] * (J * width)) as over:
        acc = list(over.values)
        for step in range(UNROLL):
            k = e.plus(over.index, step)
            a = strip(e, tile, a_ptr, e.times(k, a_step))
            b_row = e.at(panel, e.times(k, J))
            small = [e.vget(b_row, n, lanes=UNROLL) for n in range(0, J, UNROLL)] if e.arch == "aarch64" else []
            for j in range(J):
                b = e.lane(small[j // UNROLL], j % UNROLL) if small else e.splat(e.get(b_row, j))
                for i in range(width):
                    acc[j * width + i] = e.mad(a[i], b, acc[j * width + i])
        over.carry(acc)
    return list(over.values)


def by_rows(unit: Unit, name: str, tile: Register) -> Any:
    """C[j][r] += Σ_k A[k][r]·B[j][k] for j in [j0, j1) and k in [0, k1), a multiple of UNROLL.

    Arguments: k1, A with R lanes a row, B, its row stride, C, its row stride, j0, j1. The last k comes first: under a causal mask
    a key weighs most in the first rows that see it, and a sum that begins with its small terms loses less.
    """
    args = [I64, PTR, PTR, I64, PTR, I64, I64, I64]
    e, (k1, a_ptr, b_ptr, b_step, c_ptr, c_step, j0, j1), function = unit.function(name, args, apart=(1, 2, 4))
    width, tall, J = tile.vectors, tile.rows, tile.keys
    with e.loop(j0, j1, J) as over_j:
        b_rows = [e.at(b_ptr, e.times(e.plus(over_j.index, j), b_step)) for j in range(J)]
        c_rows = [e.at(c_ptr, e.times(e.plus(over_j.index, j), c_step)) for j in range(J)]
        for row in c_rows:  # C lies far away, and is wanted as soon as the sum is complete
            e.prefetch(row)
        with e.loop(0, k1, UNROLL, [e.const(0.0)] * (J * width)) as over_k:
            acc = list(over_k.values)
            k = e.minus(e.minus(k1, UNROLL), over_k.index)
            a_row = e.at(a_ptr, e.times(k, tall))
            small = [e.vget(b, k, lanes=UNROLL) for b in b_rows] if e.arch == "aarch64" else []
            for step in reversed(range(UNROLL)):
                a = strip(e, tile, a_row, step * tall)
                for j in range(J):
                    b = e.lane(small[j], step) if small else e.splat(e.get(b_rows[j], e.plus(k, step)))
                    for i in range(width):
                        acc[j * width + i] = e.mad(a[i], b, acc[j * width + i])
            over_k.carry(acc)
        for j in range(J):
            new = over_k.values[j * width : (j + 1) * width]
            put_strip(e, [e.fadd(x, y) for x, y in zip(strip(e, tile, c_rows[j]), new, strict=True)], c_rows[j])
    e.ret_void()
    return function
