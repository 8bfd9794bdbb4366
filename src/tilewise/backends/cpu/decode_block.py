"""Decoding for several query heads of a group: block by block, the two products and the softmax between them one after the other.

Several rows make the products long enough to hide memory behind them: the lines of V are asked for while K is used, those of the
next block's K while V is.
"""

from __future__ import annotations

from typing import Any

from tilewise.backends.cpu.decode import Decode, Join
from tilewise.backends.cpu.elementary import exp2
from tilewise.backends.cpu.ir import I64, PTR, STORAGE, Emit, Value
from tilewise.backends.cpu.masking import any_lane
from tilewise.backends.cpu.pack import fetch
from tilewise.backends.cpu.spec import ACCUMULATORS, UNROLL


class BlockDecode(Decode):
    def emit_block(self) -> Any:
        dots, softmax, values = self.emit_dots(), self.emit_softmax(), self.emit_values()
        e, (args, frame), function = self.unit.function("block", [PTR, PTR])
        a, _ = self.open(e, args, frame)
        rows = a.word("group")
        with e.loop(0, rows, self.R) as over:
            e.call(dots, [args, frame, over.index])
        with e.loop(0, rows, self.R) as over:
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
        D, BN, kind, line = a.word("D"), a.word("BN"), STORAGE[self.kernel.dtype], self.line
        width = e.minus(f.word("n1"), f.word("n0"))
        K = self.source(e, a, f, "k", f.word("key_head"), e.plus(f.word("k_start"), f.word("n0")))
        V = self.source(e, a, f, "v", f.word("key_head"), e.plus(f.word("k_start"), f.word("n0")))
        q_rows, s_rows = ([e.at(f.ptr(n), e.times(e.plus(r0, r), w)) for r in range(R)] for n, w in (("Q", D), ("P", BN)))
        whole = e.round_down(D, line)

        def some(key: Value, near: list[Value], soon: list[Value]) -> None:
            """The scores of J keys from `key` on, whose rows of K are near; meanwhile rows of V that are wanted soon."""

            def multiply(acc: list[Value], at: Value) -> list[Value]:
                q = [e.vget(row, at) for row in q_rows]
                acc = list(acc)
                for j in range(J):
                    k = fetch(e, near[j], at, self.kernel.dtype, L)
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
                for j in range(0, J, UNROLL):
                    e.vput(self.sums(e, dim.values[r * J + j : r * J + j + UNROLL]), s_rows[r], e.plus(key, j))

        most, steps = e.round_down(width, J), (a.word("k_s"), a.word("v_s"))
        with e.loop(0, most, J, [K, V]) as over:
            some(over.index, *([e.at(x, e.times(n, j), kind) for j in range(J)] for x, n in zip(over.values, steps, strict=True)))
            over.carry([e.at(x, e.times(n, J), kind) for x, n in zip(over.values, steps, strict=True)])
        with e.if_then(e.less(most, width), likely=False):
            # keys beyond the block repeat its last one; their scores are never read
            rows = [e.least(e.plus(most, j), e.minus(width, 1)) for j in range(J)]
            some(most, *([e.at(x, e.times(n, row), kind) for row in rows] for x, n in zip((K, V), steps, strict=True)))
        e.ret_void()
        return function

    # -- softmax along the keys

    def emit_softmax(self) -> Any:
        """softmax(args, frame, r0): P = 2**(s - m) of R rows from r0 in place; m and l moved on; O rescaled where an m grew.

        A block has few keys, so rows go side by side: one after the other, each would wait for its own maximum and sums.
        """
        e, (args, frame, r0), function = self.unit.function("softmax", [PTR, PTR, I64])
        a, f = self.open(e, args, frame)
        R, L, BN, Dv = self.R, e.lanes, a.word("BN"), a.word("Dv")
        P = [e.at(f.ptr("P"), e.times(e.plus(r0, r), BN)) for r in range(R)]
        width = e.minus(f.word("n1"), f.word("n0"))
        padded = e.round_up(width, L)
        with e.loop(width, padded) as over:  # what lies behind the keys weighs nothing
            for row in P:
                e.put(e.num(float("-inf")), row, over.index)
        with e.loop(0, padded, L, [e.const(float("-inf"))] * R) as over:
            over.carry([e.top(t, e.vget(row, over.index)) for t, row in zip(over.values, P, strict=True)])
        m_ptr, l_ptr = e.at(f.ptr("m"), r0), e.at(f.ptr("l"), r0)
        old = e.vget(m_ptr, lanes=R)
        m = e.top(old, e.ceiling(self.of_rows(e, over.values, e.top)))
        (alpha,), levels = exp2(e, [e.fsub(old, m)]), [e.lane(m, r) for r in range(R)]
        with e.loop(0, padded, L, [e.const(0.0)] * R) as over:
            p = exp2(e, [e.fsub(e.vget(row, over.index), level) for row, level in zip(P, levels, strict=True)])
            for value, row in zip(p, P, strict=True):
                e.vput(value, row, over.index)
            over.carry([e.fadd(t, x) for t, x in zip(over.values, p, strict=True)])
        e.vput(e.mad(e.vget(l_ptr, lanes=R), alpha, self.of_rows(e, over.values, e.fadd)), l_ptr)
        e.vput(m, m_ptr)
        grown = e.sext(e.fcmp_ordered("!=", alpha, e.const(1.0, R)), e.vtype(e.real.bits, R))
        with e.if_then(any_lane(e, [grown]), likely=False):
            O, factors = e.at(f.ptr("O"), e.times(r0, Dv)), [e.lane(alpha, r) for r in range(R)]
            with e.loop(0, Dv, L) as col:
                for r, factor in enumerate(factors):
                    at = e.plus(e.times(Dv, r), col.index)
                    e.vput(e.fmul(e.vget(O, at), factor), O, at)
        e.ret_void()
        return function

    def of_rows(self, e: Emit, vectors: list[Value], join: Join) -> Value:
        """All lanes of each of R vectors joined, as one vector of R."""
        return e.pick(self.joined(e, [*vectors, *vectors][:UNROLL], join), range(self.R))

    # -- values

    def emit_values(self) -> Any:
        """values(args, frame, r0): O[r] += Σ_j P[r][j]·v_j for R rows from r0; V vectors of the head dim at a time, then one."""
        e, (args, frame, r0), function = self.unit.function("values", [PTR, PTR, I64])
        a, f = self.open(e, args, frame)
        R, L, BN, Dv, kind = self.R, e.lanes, a.word("BN"), a.word("Dv"), STORAGE[self.kernel.dtype]
        here = e.plus(f.word("k_start"), f.word("n0"))
        V = self.source(e, a, f, "v", f.word("key_head"), here)
        K_next = self.source(e, a, f, "k", f.word("key_head"), e.plus(here, BN))
        p_rows, o_rows = ([e.at(f.ptr(n), e.times(e.plus(r0, r), w)) for r in range(R)] for n, w in (("P", BN), ("O", Dv)))
        width, v_step, k_step = e.minus(f.word("n1"), f.word("n0")), a.word("v_s"), a.word("k_s")
        whole = e.round_down(width, UNROLL)

        def columns(col: Value, vectors: int) -> None:
            def step(acc: list[Value], row: Value, weights: list[Value]) -> list[Value]:
                v = [fetch(e, row, i * L, self.kernel.dtype, L) for i in range(vectors)]
                return [e.mad(v[n % vectors], weights[n // vectors], x) for n, x in enumerate(acc)]

            start = [e.const(0.0)] * (R * vectors) + [e.at(x, col, kind) for x in (V, K_next)]
            with e.loop(0, whole, UNROLL, start) as over:
                *acc, row, ahead = over.values
                for n in range(UNROLL):
                    for at in range(0, vectors * L, self.line):
                        e.prefetch(e.at(ahead, e.plus(e.times(k_step, n), at), kind))
                small = [e.vget(weights, over.index, lanes=UNROLL) for weights in p_rows]
                for n in range(UNROLL):
                    acc = step(acc, e.at(row, e.times(v_step, n), kind), [e.lane(s, n) for s in small])
                over.carry([*acc, *(e.at(x, e.times(s, UNROLL), kind) for x, s in ((row, v_step), (ahead, k_step)))])
            with e.loop(whole, width, 1, over.values[:-1]) as rest:
                *acc, row = rest.values
                acc = step(acc, row, [e.splat(e.get(weights, rest.index)) for weights in p_rows])
                rest.carry([*acc, e.at(row, v_step, kind)])
            for n, value in enumerate(rest.values[:-1]):
                to = e.at(o_rows[n // vectors], e.plus(col, (n % vectors) * L))
                e.vput(e.fadd(e.vget(to), value), to)

        wide = self.tile.vectors * L
        most = e.round_down(Dv, wide)
        with e.loop(0, most, wide) as col:
            columns(col.index, self.tile.vectors)
        with e.loop(most, Dv, L) as col:
            columns(col.index, 1)
        e.ret_void()
        return function
