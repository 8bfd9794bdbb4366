"""Two register-tile contractions; every matrix product of attention on this backend is one of them.

A is read along its lanes, B is broadcast, C holds J rows of R = L * V lanes in registers:

    by_panels   C[j][r] = Σ_k A[k][r] · B[k][j]    S = Q Kᵀ, dP = dO Vᵀ (k = d, j = keys);  O = P V, dQ = dS K (k = keys, j = d)
    by_rows     C[j][r] = Σ_k A[k][r] · B[j][k]    dV = Pᵀ dO, dK = dSᵀ Q (k = query rows, r = d)

In the first, B is packed in panels of J columns, so that both operands are read front to back. NEON multiplies by one lane of a
register, so B is loaded UNROLL values at a time; x86 broadcasts from memory.
"""

from __future__ import annotations

from typing import Any

from tilewise.backends.cpu.builder import Emit, Unit
from tilewise.backends.cpu.ir import I64, PTR, Pointer, Strip
from tilewise.backends.cpu.spec import UNROLL, Register, round_up


def chunk_steps(steps: Any, chunks: int) -> Any:
    """So many steps of a sum that it has so many chunks: a multiple of UNROLL."""
    return round_up((steps + (chunks - 1)) // chunks, UNROLL)


def multiply_add(e: Emit, total: list[Any], a: Strip, j: int, b: Any) -> None:
    """Row j of a register tile of sums += a · b."""
    for i, vector in enumerate(a):
        n = j * len(a) + i
        total[n] = e.fma(vector, b, total[n])


def by_panels(unit: Unit, name: str, *, fold: str = "", tile: Register | None = None) -> Any:
    """C[j][r] = Σ_k A[k][r]·B[k][j] for k in [k0, k1), multiples of UNROLL, and the panels [g0, g1) of J columns.

    Arguments: k0, k1, A, its row stride, B, the distance of its panels, C, its row stride, g0, g1, chunk[, X]. A sum's fate:

        ""   it is stored        "add"   C + sum is stored        "scale"   C·X[r] + sum is stored

    It is a sum of sums, each over `chunk` steps, a multiple of UNROLL: the error of a long sum grows with its length.
    """
    kinds = [I64, I64, PTR, I64, PTR, I64, PTR, I64, I64, I64, I64] + [PTR] * (fold == "scale")
    e, values, function = unit.function(name, kinds, noalias=(2, 4, 6))
    e.tile = tile or e.tile
    k0, k1, A, a_step, B, b_step, C, c_step, g0, g1, chunk, *rest = values
    V, J = e.tile.vectors, e.tile.keys
    scale = rest[0].strip() if rest else None
    first = e.min(k0 + chunk, k1)

    def join(steps: tuple[Any, Any], panel: Pointer, c_row: Pointer, fold: str) -> None:
        total = panel_sum(steps, panel)
        for j in range(J):
            new = Strip(total[j * V : (j + 1) * V])
            if fold == "scale":
                new = e.fma(c_row.strip(), scale, new)
            elif fold == "add":
                new = c_row.strip() + new
            c_row[0] = new
            c_row = c_row + c_step

    def panel_sum(steps: tuple[Any, Any], panel: Pointer) -> list[Any]:
        """Σ_k A[k][r]·B[k][j] in registers, j-major."""
        with e.loop(*steps, UNROLL, [e.vector(0.0)] * (J * V)) as over:
            total = list(over.values)
            for step in range(UNROLL):
                k = over.index + step
                a = A.strip(k * a_step)
                b_row = panel + k * J
                small = [b_row.vector(n, UNROLL) for n in range(0, J, UNROLL)] if e.arch == "aarch64" else []
                for j in range(J):
                    b = small[j // UNROLL].splat_lane(j % UNROLL) if small else b_row[j].splat()
                    multiply_add(e, total, a, j, b)
            over.carry(total)
        return list(over.values)

    with e.range(g0, g1) as group:
        panel = B + group * b_step
        c_row = C + group * J * c_step
        join((k0, first), panel, c_row, fold)
        with e.range(first, k1, chunk) as later:
            join((later, e.min(later + chunk, k1)), panel, c_row, "add")
    e.ret()
    return function


def by_rows(unit: Unit, name: str) -> Any:
    """C[j][r] += Σ_k A[k][r]·B[j][k] for j in [j0, j1) and k in [0, k1), a multiple of UNROLL.

    Arguments: k1, A with R lanes a row, B, its row stride, C, its row stride, j0, j1. The last k comes first: under a causal mask
    a key weighs most in the first rows that see it, and a sum that begins with its small terms loses less.
    """
    e, values, function = unit.function(name, [I64, PTR, PTR, I64, PTR, I64, I64, I64], noalias=(1, 2, 4))
    k1, A, B, b_step, C, c_step, j0, j1 = values
    V, R, J = e.tile.vectors, e.tile.rows, e.tile.keys
    with e.range(j0, j1, J) as first:
        b_rows = [B + (first + j) * b_step for j in range(J)]
        c_rows = [C + (first + j) * c_step for j in range(J)]
        for row in c_rows:  # C lies far away, and is wanted as soon as the sum is complete
            e.prefetch(row)
        with e.loop(0, k1, UNROLL, [e.vector(0.0)] * (J * V)) as over:
            total = list(over.values)
            k = k1 - UNROLL - over.index
            a_row = A + k * R
            small = [b.vector(k, UNROLL) for b in b_rows] if e.arch == "aarch64" else []
            for step in reversed(range(UNROLL)):
                a = a_row.strip(step * R)
                for j in range(J):
                    b = small[j].splat_lane(step) if small else b_rows[j][k + step].splat()
                    multiply_add(e, total, a, j, b)
            over.carry(total)
        for j, row in enumerate(c_rows):
            row[0] = row.strip() + Strip(over.values[j * V : (j + 1) * V])
    e.ret()
    return function
