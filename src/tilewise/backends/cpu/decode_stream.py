"""Decoding for one query head a key head: K and V as two streams, read front to back side by side.

Four keys at a time pass through the whole softmax. The processor's own prefetchers follow two such streams further ahead than
its first-level cache could be asked to, and nothing pauses between the two products. A maximum is needed only to keep exponents
in range: m is raised when a score exceeds it, which is seldom, so that nobody waits for the comparison.

A block's state is complete before it joins the task's, as sums over all keys would lose digits.
"""

from __future__ import annotations

from typing import Any

from tilewise.backends.cpu.decode import Decode
from tilewise.backends.cpu.elementary import exp2
from tilewise.backends.cpu.ir import I32, I64, PTR, STORAGE, Emit, Value
from tilewise.backends.cpu.masking import any_lane
from tilewise.backends.cpu.pack import fetch
from tilewise.backends.cpu.slots import Slots
from tilewise.backends.cpu.spec import ACCUMULATORS, ALIGN, UNROLL


class StreamDecode(Decode):
    """The scratch buffer holds the block's state as `merge` takes it, m, l and O, with O on a cache line."""

    def scratch(self, e: Emit, a: Slots) -> Value:
        return e.plus(a.word("Dv"), ALIGN)

    def emit_block(self) -> Any:
        e, (args, frame), function = self.unit.function("block", [PTR, PTR])
        a, f = self.open(e, args, frame)
        n0, n1, Dv = f.word("n0"), f.word("n1"), a.word("Dv")
        state = e.at(f.ptr("P"), ALIGN - 2)
        O = e.at(state, 2)
        with e.loop(0, Dv, e.lanes) as col:
            e.vput(e.const(0.0), O, col.index)

        def rows(name: str, keys: list[Value]) -> list[Value]:
            first = self.source(e, a, f, name, f.word("key_head"), f.word("k_start"))
            return [e.at(first, e.times(key, a.word(f"{name}_s")), STORAGE[self.kernel.dtype]) for key in keys]

        with e.loop(n0, n1, UNROLL, [e.const(self.real.lowest, UNROLL), e.const(0.0, UNROLL)]) as over:
            # keys beyond the last repeat it, and are hidden afterwards
            keys = [e.least(e.plus(over.index, j), e.minus(n1, 1)) for j in range(UNROLL)]
            s = self.dots(e, f.ptr("Q"), a.word("D"), rows("k", keys))
            left = e.splat(e.minus(n1, over.index), UNROLL)
            s = e.select(e.icmp_signed("<", e.iconst(range(UNROLL), I64), left), s, e.const(float("-inf"), UNROLL))
            m, parts = self.settle(e, O, Dv, s, *over.values)
            (p,) = exp2(e, [e.fsub(s, m)])
            self.values(e, O, Dv, rows("v", keys), p)
            over.carry([m, e.fadd(parts, p)])
        m, parts = over.values
        e.put(e.extract_element(m, I32(0)), state, 0)
        e.put(e.sum(parts), state, 1)
        e.call(self.merge, [args, frame, state])
        e.ret_void()
        return function

    def dots(self, e: Emit, q: Value, D: Value, rows: list[Value]) -> Value:
        """q · k of UNROLL keys. Where a line is several vectors, keys are taken one after the other, in the order of memory."""
        L, across = e.lanes, max(1, self.line // e.lanes)
        J = UNROLL if across == 1 else 1
        chains = min(across, UNROLL)
        whole, found = e.round_down(D, across * L), []

        def multiply(sums: list[Value], at: Value, near: list[Value], vectors: int) -> list[Value]:
            acc, some = list(sums), e.at(q, at)
            cells = [e.at(row, at, STORAGE[self.kernel.dtype]) for row in near]
            for i in range(vectors):
                x = e.vget(some, i * L)
                for j, row in enumerate(cells):
                    n = j * chains + i % chains
                    acc[n] = e.mad(x, fetch(e, row, i * L, self.kernel.dtype, L), acc[n])
            return acc

        for first in range(0, UNROLL, J):
            near = rows[first : first + J]
            with e.loop(0, whole, across * L, [e.const(0.0)] * (J * chains)) as dim:
                dim.carry(multiply(dim.values, dim.index, near, across))
            with e.loop(whole, D, L, dim.values) as dim:
                dim.carry(multiply(dim.values, dim.index, near, 1))
            acc = list(dim.values)
            while len(acc) > J:
                acc = [e.fadd(acc[n], acc[n + 1]) for n in range(0, len(acc), 2)]
            found += acc
        return self.sums(e, found)

    def settle(self, e: Emit, O: Value, Dv: Value, s: Value, m: Value, parts: Value) -> tuple[Value, Value]:
        """m and the parts of l, raised and rescaled with O where a score exceeds m."""
        above = e.sext(e.fcmp_ordered(">", s, m), e.vtype(e.real.bits, UNROLL))
        before = e.block
        with e.if_then(any_lane(e, [above]), likely=False):
            level = e.splat(e.top(e.extract_element(m, I32(0)), e.ceiling(e.peak(s))), UNROLL)
            (alpha,) = exp2(e, [e.fsub(m, level)])
            scaled, wide = e.fmul(parts, alpha), e.lane(alpha, 0)
            with e.loop(0, Dv, e.lanes) as col:
                e.vput(e.fmul(e.vget(O, col.index), wide), O, col.index)
            last = e.block
        joined = []
        for old, new in ((m, level), (parts, scaled)):
            phi = e.phi(old.type)
            phi.add_incoming(old, before)
            phi.add_incoming(new, last)
            joined.append(phi)
        return joined[0], joined[1]

    def values(self, e: Emit, O: Value, Dv: Value, rows: list[Value], p: Value) -> None:
        """O += Σ_j p_j·v_j: as many columns as there are accumulators, then single vectors."""
        L = e.lanes

        def columns(col: Value, vectors: int) -> None:
            out = e.at(O, col)
            acc = [e.vget(out, i * L) for i in range(vectors)]
            for j, row in enumerate(rows):
                weight, cells = e.lane(p, j), e.at(row, col, STORAGE[self.kernel.dtype])
                v = [fetch(e, cells, i * L, self.kernel.dtype, L) for i in range(vectors)]
                acc = [e.mad(x, weight, t) for x, t in zip(v, acc, strict=True)]
            for i, x in enumerate(acc):
                e.vput(x, out, i * L)

        many = ACCUMULATORS if L == UNROLL else UNROLL  # a head dim of 64 at once
        whole = e.round_down(Dv, many * L)
        with e.loop(0, whole, many * L) as over:
            columns(over.index, many)
        with e.loop(whole, Dv, L) as over:
            columns(over.index, 1)
