"""Decoding for one query head a key head: K and V as two streams, read front to back side by side.

Four keys at a time pass through the whole softmax. The processor's own prefetchers follow two such streams further ahead than
its first-level cache could be asked to, and nothing pauses between the two products. A maximum is needed only to keep exponents
in range: m is raised when a score exceeds it, which is seldom, so that nobody waits for the comparison.

A block's state is complete before it joins the task's, as sums over all keys would lose digits.
"""

from __future__ import annotations

from typing import Any

from tilewise.backends.cpu import elementary, masking
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.decode import LINE, Decode
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
            if self.kernel.together and self.looks_far:
                self.prefetch_later(e, over.index)
            soon = self.soon(e, over.index) if self.kernel.together else {"k": [], "v": []}
            s = scaled("k", self.scores(e, rows("k", over.index), soon["k"]), over.index)
            left = (n1 - over.index).splat(UNROLL)
            s = e.select(e.integers(range(UNROLL), I64) < left, s, float("-inf"))
            m, parts = self.update_max(e, O, Dv, s, *over.values)
            p = elementary.exp2(s - m)
            self.values(e, O, Dv, rows("v", over.index), scaled("v", p, over.index), soon["v"])
            over.carry([m, parts + p])
        m, parts = over.values
        state[0] = m.lane(0)
        state[1] = parts.sum()
        self.call(e, self.merge, state, e.args.group)

    @property
    def looks_far(self) -> bool:
        """Are rows asked for twice, the first time for L2? Of 16-bit numbers they are used before memory has answered; those of
        others take longer, or are fewer lines. (Neoverse N1, 8/8 heads of 128, 2 sequences of 16,384 tokens, pages of 16 in order
        and at random: bf16 16.5 and 17.2 ms, so 15.6 and 15.9; fp32 24.5 and 25.0, so 26.7 and 26.8; int8 no difference.)"""
        return self.unit.arch == "aarch64" and self.line == LINE // 2

    def prefetch_later(self, e: Emit, key: Any) -> None:
        """Rows of K and V behind those that `soon` gives."""
        for name, rows in self.soon(e, key + UNROLL).items():
            with e.range(0, e.args.D if name == "k" else e.args.Dv, self.line) as at:
                for row in rows:
                    e.prefetch(row + at, level=2)

    @property
    def ahead(self) -> int:
        """Keys from those at hand to those that are asked for. x86 is done with four of them before memory has answered, unless
        they are long: of bytes and of 16-bit numbers twice as many are on their way. (Cascade Lake, 8/8 heads of 128, 2
        sequences of 8,192 tokens, 4 and 8 keys, ns a key of a head: bf16 in pages of 16 93 and 63, of 128 91 and 61, without
        pages 83 and 57; with the kernels of AVX2 87 and 60, and 83 and 59 without pages; fp32 110 and 109, in pages of 128 106
        and 110; 12 keys are no faster.)"""
        return 2 * UNROLL if self.unit.arch == "x86_64" and self.line >= LINE // 2 else UNROLL

    def soon(self, e: Emit, key: Any) -> dict[str, list[Pointer]]:
        """The rows of K and V of UNROLL keys `ahead`: where those of other heads lie between them, no stream leads there. Behind
        the block's last key they are the first of the next head, or of the next block."""
        frame = e.frame
        following = key + self.ahead
        inside, behind = following < frame.n1, following - frame.n1
        head = e.select(inside, frame.key_head, frame.next_head)
        if self.kernel.paged:
            # a block that is shorter than what lies ahead has its last row several times
            first = e.select(inside, following - frame.n0, e.min(behind, frame.n1 - frame.n0))
            found = {}
            for name in "kv":
                base, rows = self.head_of(e, name, head), getattr(frame, f"{name}_rows") + first
                found[name] = [base + rows[j] for j in range(UNROLL)]
            return found
        first = frame.k_start + e.select(inside, following, frame.n0 + frame.next_key + behind)
        starts = {name: self.row_of(e, name, head, first) for name in "kv"}
        return {name: [row + getattr(e.args, name).stride_s * j for j in range(UNROLL)] for name, row in starts.items()}

    def scores(self, e: Emit, rows: list[Pointer], soon: list[Pointer]) -> Any:
        """Those of UNROLL keys, before the scales of K."""
        if not self.kernel.bytes:
            return self.dots(e, e.frame.Q, e.args.D, rows, soon)
        with e.if_else(e.frame.exact != 0) as (exact, otherwise):
            with exact:
                with e.range(0, e.args.D, self.line) as at:
                    for row in soon:
                        e.prefetch(row + at)

                def compute(limbs: int) -> list[Any]:
                    return self.byte_scores(e, [0], rows, limbs)

                by_bytes = self.by_limbs(e, [0], compute)[0], e.ir.block
            with otherwise:
                by_floats = self.dots(e, e.frame.Q, e.args.D, rows, soon), e.ir.block
        return e.phi(by_bytes, by_floats)

    def dots(self, e: Emit, q: Pointer, D: Any, rows: list[Pointer], soon: list[Pointer]) -> Any:
        """q · k of UNROLL keys. Where a line is several vectors, keys are taken one after the other, in the order of memory;
        meanwhile the lines of rows that are wanted soon are prefetched."""
        L, across = e.lanes, max(1, self.line // e.lanes)
        J = UNROLL if across == 1 else 1
        chains = min(across, UNROLL)
        whole, scores = round_down(D, across * L), []

        def multiply(sums: list[Any], at: Any, near: list[Pointer], vectors: int) -> list[Any]:
            acc, some = list(sums), q + at
            cells = [row + at for row in near]
            numbers = [row.fetch_run(0, vectors) for row in cells]
            for i in range(vectors):
                x = some.vector(i * L)
                for j, row in enumerate(numbers):
                    n = j * chains + i % chains
                    acc[n] = e.fma(x, row[i], acc[n])
            return acc

        for first in range(0, UNROLL, J):
            near = rows[first : first + J]
            with e.loop(0, whole, across * L, [e.vector(0.0)] * (J * chains)) as dim:
                for row in soon[first : first + J]:
                    e.prefetch(row + dim.index)
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

    def values(self, e: Emit, O: Pointer, Dv: Any, rows: list[Pointer], p: Any, soon: list[Pointer]) -> None:
        """O += Σ_j p_j·v_j: as many columns as there are accumulators, then single vectors."""
        L = e.lanes

        def columns(col: Any, vectors: int) -> None:
            out = O + col
            acc = [out.vector(i * L) for i in range(vectors)]
            for row in soon:
                for at in range(0, vectors * L, self.line):
                    e.prefetch(row + (col + at))
            for j, row in enumerate(rows):
                weight, cells = p.splat_lane(j), row + col
                v = cells.fetch_run(0, vectors)
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
