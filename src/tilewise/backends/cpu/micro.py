"""Two register-tile contractions; every matrix product of attention on this backend is one of them.

A is read along its lanes, B is broadcast, C holds J rows of R = L * V lanes in registers:

    by_rows   C[j][r] = Σ_k A[k][r] · B[j][k]     S = Q Kᵀ, dP = dO Vᵀ (k = d);  dV = Pᵀ dO, dK = dSᵀ Q (k = query rows)
    by_cols   C[j][r] = Σ_k A[k][r] · B[k][j]     O = P V, dQ = dS K (k = keys, j = d)

NEON multiplies by one lane of a register, so B is loaded UNROLL values at a time; x86 broadcasts from memory.
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


def by_rows(unit: Unit, name: str, tile: Register, *, accumulate: bool = False, peak: bool = False) -> Any:
    """C[j][r] (+)= Σ_k A[k][r]·B[j][k] for j in [j0, j1); `peak` also folds max_j C into M[r].

    The sum over k is complete before it joins C: half the rounding error of one long sum.

    Arguments: k1 (a multiple of UNROLL), A with R lanes a row, B, its row stride, C, its row stride, j0, j1[, M].
    """
    args = [I64, PTR, PTR, I64, PTR, I64, I64, I64] + [PTR] * peak
    e, (k1, a_ptr, b_ptr, b_step, c_ptr, c_step, j0, j1, *rest), function = unit.function(name, args, apart=(1, 2, 4))
    width, tall, J = tile.vectors, tile.rows, tile.keys
    best = strip(e, tile, rest[0]) if peak else []
    with e.loop(j0, j1, J, best) as over_j:
        b_rows = [e.at(b_ptr, e.times(e.plus(over_j.index, j), b_step)) for j in range(J)]
        c_rows = [e.at(c_ptr, e.times(e.plus(over_j.index, j), c_step)) for j in range(J)]
        with e.loop(0, k1, UNROLL, [e.const(0.0)] * (J * width)) as over_k:
            acc = list(over_k.values)
            a_row = e.at(a_ptr, e.times(over_k.index, tall))
            small = [e.vget(b, over_k.index, lanes=UNROLL) for b in b_rows] if e.arch == "aarch64" else []
            for step in range(UNROLL):
                a = strip(e, tile, a_row, step * tall)
                for j in range(J):
                    if small:
                        b = e.lane(small[j], step)
                    else:
                        b = e.splat(e.get(b_rows[j], e.plus(over_k.index, step)))
                    for i in range(width):
                        acc[j * width + i] = e.mad(a[i], b, acc[j * width + i])
            over_k.carry(acc)
        for j in range(J):
            new = over_k.values[j * width : (j + 1) * width]
            if accumulate:
                new = [e.fadd(x, y) for x, y in zip(strip(e, tile, c_rows[j]), new, strict=True)]
            put_strip(e, new, c_rows[j])
        if peak:
            tops = list(over_j.values)
            for n, value in enumerate(over_k.values):
                tops[n % width] = e.top(tops[n % width], value)
            over_j.carry(tops)
    if peak:
        put_strip(e, over_j.values, rest[0])
    e.ret_void()
    return function


def by_cols(unit: Unit, name: str, tile: Register, *, scaled: bool) -> Any:
    """C[j][r] = C[j][r]·F[r] + Σ_k A[k][r]·B[k][j] for j in [0, j1) and k in [k0, k1); without `scaled`, F is 1.

    Arguments: k0, k1 (an even number of steps), A, its row stride, B, its row stride, C with R lanes a row, j1[, F].
    The sum over this block of keys is complete before it joins C: half the rounding error of one long sum.
    """
    args = [I64, I64, PTR, I64, PTR, I64, PTR, I64] + [PTR] * scaled
    e, (k0, k1, a_ptr, a_step, b_ptr, b_step, c_ptr, j1, *rest), function = unit.function(name, args, apart=(2, 4, 6))
    width, tall, J = tile.vectors, tile.rows, tile.keys
    with e.loop(0, j1, J) as over_j:
        with e.loop(k0, k1, 2, [e.const(0.0)] * (J * width)) as over_k:
            acc = list(over_k.values)
            for step in range(2):
                k = e.plus(over_k.index, step)
                a = strip(e, tile, a_ptr, e.times(k, a_step))
                b_row = e.at(e.at(b_ptr, e.times(k, b_step)), over_j.index)
                small = [e.vget(b_row, n, lanes=UNROLL) for n in range(0, J, UNROLL)] if e.arch == "aarch64" else []
                for j in range(J):
                    b = e.lane(small[j // UNROLL], j % UNROLL) if small else e.splat(e.get(b_row, j))
                    for i in range(width):
                        acc[j * width + i] = e.mad(a[i], b, acc[j * width + i])
            over_k.carry(acc)
        for j in range(J):
            c_row = e.at(c_ptr, e.times(e.plus(over_j.index, j), tall))
            old = strip(e, tile, c_row)
            new = over_k.values[j * width : (j + 1) * width]
            if scaled:
                factor = strip(e, tile, rest[0])
                new = [e.mad(old[i], factor[i], new[i]) for i in range(width)]
            else:
                new = [e.fadd(old[i], new[i]) for i in range(width)]
            put_strip(e, new, c_row)
    e.ret_void()
    return function
