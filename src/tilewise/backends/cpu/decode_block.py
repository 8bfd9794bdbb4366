"""Decoding for several query heads of a group: block by block, the two products and the softmax between them one after the other.

Several rows make the products long enough to hide memory behind them: the lines of V are asked for while K is used, those of the
next block's K while V is.
"""

from __future__ import annotations

from typing import Any

from tilewise.backends.cpu.decode import ACCUMULATORS, Decode
from tilewise.backends.cpu.elementary import exp2
from tilewise.backends.cpu.ir import I32, I64, PTR, STORAGE, Emit, Value
from tilewise.backends.cpu.pack import fetch
from tilewise.backends.cpu.slots import Slots
from tilewise.backends.cpu.spec import UNROLL


class BlockDecode(Decode):
    def emit_block(self) -> Any:
        dots, softmax, values = self.emit_dots(), self.emit_softmax(), self.emit_values()
        e, (args, frame), function = self.unit.function("block", [PTR, PTR])
        a, _ = self.open(e, args, frame)
        rows = a.word("group")
        with e.loop(0, rows, self.R) as over:
            e.call(dots, [args, frame, over.index])
        with e.loop(0, rows) as over:
            e.call(softmax, [args, frame, over.index])
        with e.loop(0, rows, self.R) as over:
            e.call(values, [args, frame, over.index])
        e.ret_void()
        return function

    # -- scores

    def emit_dots(self) -> Any:
        """dots(args, frame, r0): S[r][j] = q_r · k_j for R rows from r0 and the keys of the block.

        Meanwhile the lines of V that belong to these keys are asked for, as `values` asks for the next block's K: both phases
        then wait for memory while they compute.
        """
        e, (args, frame, r0), function = self.unit.function("dots", [PTR, PTR, I64])
        a, f = self.open(e, args, frame)
        R, J, L = self.R, ACCUMULATORS // self.R, e.lanes
        D, BN, kind = a.word("D"), a.word("BN"), STORAGE[self.kernel.dtype]
        width = e.minus(f.word("n1"), f.word("n0"))
        K = self.source(e, a, f, "k", f.word("key_head"), e.plus(f.word("k_start"), f.word("n0")))
        V = self.source(e, a, f, "v", f.word("key_head"), e.plus(f.word("k_start"), f.word("n0")))
        q_rows = [e.at(f.ptr("Q"), e.times(e.plus(r0, r), D)) for r in range(R)]
        line = self.line
        whole = e.round_down(D, line)
        with e.loop(0, width, J) as over:
            # keys beyond the block repeat its last one; their scores are never read
            rows = [e.times(e.least(e.plus(over.index, j), e.minus(width, 1)), a.word("k_s")) for j in range(J)]
            soon = [e.at(V, e.times(e.plus(over.index, j), a.word("v_s")), kind) for j in range(J)]

            def multiply(acc: list[Value], at: Value, rows: list[Value] = rows) -> list[Value]:
                q = [e.vget(row, at) for row in q_rows]
                acc = list(acc)
                for j in range(J):
                    k = fetch(e, K, e.plus(rows[j], at), self.kernel.dtype, L)
                    for r in range(R):
                        acc[r * J + j] = e.mad(q[r], k, acc[r * J + j])
                return acc

            with e.loop(0, whole, line, [e.const(0.0)] * (R * J)) as dim:
                for pointer in soon:
                    e.prefetch(e.at(pointer, dim.index, kind))
                acc = list(dim.values)
                for n in range(0, line, L):
                    acc = multiply(acc, e.plus(dim.index, n))
                dim.carry(acc)
            with e.loop(whole, D, L, dim.values) as dim:
                dim.carry(multiply(dim.values, dim.index))
            for r in range(R):
                out = e.at(f.ptr("P"), e.plus(e.times(e.plus(r0, r), BN), over.index))
                for j in range(0, J, UNROLL):
                    e.vput(self.sums(e, dim.values[r * J + j : r * J + j + UNROLL]), out, j)
        e.ret_void()
        return function

    # -- softmax along the keys

    def emit_softmax(self) -> Any:
        """softmax(args, frame, r): P = 2**(s - m) of row r in place; m and l moved on; O rescaled where m grew."""
        e, (args, frame, r), function = self.unit.function("softmax", [PTR, PTR, I64])
        a, f = self.open(e, args, frame)
        L, BN = e.lanes, a.word("BN")
        P = e.at(f.ptr("P"), e.times(r, BN))
        width = e.minus(f.word("n1"), f.word("n0"))
        padded = e.round_up(width, L * 2)
        low = e.const(float("-inf"))
        with e.loop(width, padded) as over:  # what lies behind the keys weighs nothing
            e.put(e.num(float("-inf")), P, over.index)
        with e.loop(0, padded, 2 * L, [low, low]) as over:
            over.carry([e.top(over.values[n], e.vget(P, e.plus(over.index, n * L))) for n in (0, 1)])
        top = e.peak(e.top(*over.values))
        old = e.get(f.ptr("m"), r)
        m = e.top(old, e.ceiling(top))
        level = e.splat(m)
        with e.loop(0, padded, 2 * L, [e.const(0.0)] * 2) as over:
            at = [e.plus(over.index, n * L) for n in (0, 1)]
            p = exp2(e, [e.fsub(e.vget(P, x), level) for x in at])
            for x, value in zip(at, p, strict=True):
                e.vput(value, P, x)
            over.carry([e.fadd(t, x) for t, x in zip(over.values, p, strict=True)])
        (alpha,) = exp2(e, [e.splat(e.fsub(old, m))])
        rescale = e.extract_element(alpha, I32(0))
        total = e.mad(e.get(f.ptr("l"), r), rescale, e.sum(e.fadd(*over.values)))
        e.put(total, f.ptr("l"), r)
        e.put(m, f.ptr("m"), r)
        with e.if_then(e.fcmp_ordered("!=", rescale, e.num(1.0))):
            O = e.at(f.ptr("O"), e.times(r, a.word("Dv")))
            with e.loop(0, a.word("Dv"), L) as col:
                e.vput(e.fmul(e.vget(O, col.index), alpha), O, col.index)
        e.ret_void()
        return function

    # -- values

    def emit_values(self) -> Any:
        """values(args, frame, r0): O[r] += Σ_j P[r][j]·v_j for R rows from r0; V vectors of the head dim at a time, then one."""
        e, (args, frame, r0), function = self.unit.function("values", [PTR, PTR, I64])
        a, f = self.open(e, args, frame)
        V = self.source(e, a, f, "v", f.word("key_head"), e.plus(f.word("k_start"), f.word("n0")))
        wide = self.tile.vectors * e.lanes
        whole = e.round_down(a.word("Dv"), wide)
        with e.loop(0, whole, wide) as col:
            self.value_columns(e, a, f, V, r0, col.index, self.tile.vectors)
        with e.loop(whole, a.word("Dv"), e.lanes) as col:
            self.value_columns(e, a, f, V, r0, col.index, 1)
        e.ret_void()
        return function

    def value_columns(self, e: Emit, a: Slots, f: Slots, V: Value, r0: Value, col: Value, vectors: int) -> None:
        R, L, BN = self.R, e.lanes, a.word("BN")
        width = e.minus(f.word("n1"), f.word("n0"))
        p_rows = [e.at(f.ptr("P"), e.times(e.plus(r0, r), BN)) for r in range(R)]
        o_rows = [e.at(f.ptr("O"), e.plus(e.times(e.plus(r0, r), a.word("Dv")), col)) for r in range(R)]
        v_step, whole = a.word("v_s"), e.round_down(width, UNROLL)

        def step(acc: list[Value], key: Value, weights: list[Value]) -> list[Value]:
            row = e.plus(e.times(key, v_step), col)
            v = [fetch(e, V, e.plus(row, i * L), self.kernel.dtype, L) for i in range(vectors)]
            return [e.mad(v[n % vectors], weights[n // vectors], x) for n, x in enumerate(acc)]

        kind = STORAGE[self.kernel.dtype]
        K_next = self.source(e, a, f, "k", f.word("key_head"), e.plus(f.word("k_start"), f.word("n0"), BN))
        with e.loop(0, whole, UNROLL, [e.const(0.0)] * (R * vectors)) as over:
            acc = list(over.values)
            for n in range(UNROLL):
                ahead = e.plus(e.times(e.plus(over.index, n), a.word("k_s")), col)
                for at in range(0, vectors * L, self.line):
                    e.prefetch(e.at(K_next, e.plus(ahead, at), kind))
            small = [e.vget(row, over.index, lanes=UNROLL) for row in p_rows]
            for n in range(UNROLL):
                acc = step(acc, e.plus(over.index, n), [e.lane(s, n) for s in small])
            over.carry(acc)
        with e.loop(whole, width, 1, over.values) as rest:
            rest.carry(step(list(rest.values), rest.index, [e.splat(e.get(row, rest.index)) for row in p_rows]))
        for n, value in enumerate(rest.values):
            at = (n % vectors) * L
            e.vput(e.fadd(e.vget(o_rows[n // vectors], at), value), o_rows[n // vectors], at)
