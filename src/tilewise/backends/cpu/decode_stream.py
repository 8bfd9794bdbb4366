"""Decoding for one query head a key head: K and V as two streams, read front to back side by side.

Four keys at a time pass through the whole softmax. The processor's own prefetchers follow two such streams further ahead than
its first-level cache could be asked to, and nothing pauses between the two products. A maximum is needed only to keep exponents
in range: m is raised when a score exceeds it, which is seldom, so that nobody waits for the comparison.

A block's state is complete before it joins the task's, as sums over all keys would lose digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.backends.cpu import elementary, masking
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.decode import Decode
from tilewise.backends.cpu.ir import I64, Pointer
from tilewise.backends.cpu.module import kernel_function
from tilewise.backends.cpu.spec import ACCUMULATORS, ALIGN, UNROLL, round_down


class StreamDecode(Decode):
    """The buffer P holds the block's state as `merge` takes it, m, l and O, with O on a cache line."""

    @kernel_function()
    def emit_block(self, e: Emit) -> None:
        frame = e.frame
        n0, n1, Dv = frame.n0, frame.n1, e.args.Dv
        state = frame.P + (ALIGN - 2)
        O = state + 2
        with e.range(0, Dv, e.lanes) as col:
            O[col] = e.vector(0.0)

        def rows(name: str, key: Any) -> list[Pointer]:
            """Those of UNROLL keys; beyond the last key they repeat its row, and are hidden afterwards."""
            if self.kernel.paged:
                row = self.block_rows(e, name)
                return [row(key - n0 + j) for j in range(UNROLL)]
            first = self.row_of(e, name, frame.key_head, frame.k_start)
            keys = [e.min(key + j, n1 - 1) for j in range(UNROLL)]
            return [first + key * getattr(e.args, name).stride_s for key in keys]

        def scaled(name: str, values: Any, key: Any) -> Any:
            """Scores or weights of UNROLL keys times the scales of K or V."""
            return values * getattr(frame, f"{name}_scales").vector(key - n0, UNROLL) if self.kernel.stored else values

        with e.loop(n0, n1, UNROLL, [e.vector(self.real.lowest, UNROLL), e.vector(0.0, UNROLL)]) as over:
            if self.kernel.together:
                self.prefetch(e, rows, over.index)
            s = scaled("k", self.dots(e, frame.Q, e.args.D, rows("k", over.index)), over.index)
            left = (n1 - over.index).splat(UNROLL)
            s = e.select(e.integers(range(UNROLL), I64) < left, s, float("-inf"))
            m, parts = self.update_max(e, O, Dv, s, *over.values)
            p = elementary.exp2(s - m)
            self.values(e, O, Dv, rows("v", over.index), scaled("v", p, over.index))
            over.carry([m, parts + p])
        m, parts = over.values
        state[0] = m.lane(0)
        state[1] = parts.sum()
        self.call(e, self.merge, state, e.args.group)

    def prefetch(self, e: Emit, rows: Callable[[str, Any], list[Pointer]], key: Any) -> None:
        """The rows of K and V of the next UNROLL keys: where those of other heads lie between them, no stream leads to them."""
        for name, columns in (("k", e.args.D), ("v", e.args.Dv)):
            for row in rows(name, key + UNROLL):
                with e.range(0, columns, self.line) as at:
                    e.prefetch(row + at)

    def dots(self, e: Emit, q: Pointer, D: Any, rows: list[Pointer]) -> Any:
        """q · k of UNROLL keys. Where a line is several vectors, keys are taken one after the other, in the order of memory."""
        L, across = e.lanes, max(1, self.line // e.lanes)
        J = UNROLL if across == 1 else 1
        chains = min(across, UNROLL)
        whole, scores = round_down(D, across * L), []

        def multiply(sums: list[Any], at: Any, near: list[Pointer], vectors: int) -> list[Any]:
            acc, some = list(sums), q + at
            cells = [row + at for row in near]
            for i in range(vectors):
                x = some.vector(i * L)
                for j, row in enumerate(cells):
                    n = j * chains + i % chains
                    acc[n] = e.fma(x, row.fetch(i * L, L), acc[n])
            return acc

        for first in range(0, UNROLL, J):
            near = rows[first : first + J]
            with e.loop(0, whole, across * L, [e.vector(0.0)] * (J * chains)) as dim:
                dim.carry(multiply(dim.values, dim.index, near, across))
            with e.loop(whole, D, L, dim.values) as dim:
                dim.carry(multiply(dim.values, dim.index, near, 1))
            acc = list(dim.values)
            while len(acc) > J:
                acc = [acc[n] + acc[n + 1] for n in range(0, len(acc), 2)]
            scores += acc
        return self.joined(scores)

    def update_max(self, e: Emit, O: Pointer, Dv: Any, s: Any, m: Any, parts: Any) -> tuple[Any, Any]:
        """m and the parts of l, raised and rescaled with O where a score exceeds m."""
        above = (s > m).sext(e.real.bits)
        before = e.ir.block
        with e.if_(masking.any_lane(above), likely=False):
            level = e.fmax(m.lane(0), e.math("ceil", s.reduce(e.fmax))).splat(UNROLL)
            alpha = elementary.exp2(m - level)
            scaled, wide = parts * alpha, alpha.splat_lane(0)
            with e.range(0, Dv, e.lanes) as col:
                O[col] = O.vector(col) * wide
            last = e.ir.block
        return e.phi((m, before), (level, last)), e.phi((parts, before), (scaled, last))

    def values(self, e: Emit, O: Pointer, Dv: Any, rows: list[Pointer], p: Any) -> None:
        """O += Σ_j p_j·v_j: as many columns as there are accumulators, then single vectors."""
        L = e.lanes

        def columns(col: Any, vectors: int) -> None:
            out = O + col
            acc = [out.vector(i * L) for i in range(vectors)]
            for j, row in enumerate(rows):
                weight, cells = p.splat_lane(j), row + col
                v = [cells.fetch(i * L, L) for i in range(vectors)]
                acc = [e.fma(x, weight, t) for x, t in zip(v, acc, strict=True)]
            for i, x in enumerate(acc):
                out[i * L] = x

        many = ACCUMULATORS if L == UNROLL else UNROLL  # a head dim of 64 at once
        if self.kernel.stored and L == UNROLL:
            many //= 2  # what bytes become on the way to numbers takes registers, too
        whole = round_down(Dv, many * L)
        with e.range(0, whole, many * L) as col:
            columns(col, many)
        with e.range(whole, Dv, L) as col:
            columns(col, 1)
