"""The decode kernel: one query row for each head, so the time goes into reading K and V once.

The query heads of a group are the rows. Nothing is packed: lanes lie along the head dim for both products, K and V are converted
as they are loaded, and lines are prefetched one block ahead. For each row the state over the keys seen so far is

    m >= max s (an integer),   l = Σ 2**(s - m),   O = Σ 2**(s - m) v

A task is one share of the keys of one key head; shares meet in the workspace and are merged in order by the last to arrive.
"""

from __future__ import annotations

from typing import Any

from tilewise.backends.cpu.elementary import LOG2E, exp2
from tilewise.backends.cpu.ir import I32, I64, ITEMSIZE, PTR, STORAGE, Emit, Value
from tilewise.backends.cpu.masking import hull
from tilewise.backends.cpu.module import FRAME, KernelModule
from tilewise.backends.cpu.pack import fetch, quotient
from tilewise.backends.cpu.slots import Slots
from tilewise.backends.cpu.spec import UNROLL, Kernel

ACCUMULATORS = 16
LINE = 64  # bytes of a cache line


class Decode(KernelModule):
    """Emits one module. In its register tile L lanes and V vectors lie along the head dim, and `keys` counts query rows."""

    frame = (*FRAME, "split", "Q", "O", "m", "l", "P")

    def __init__(self, kernel: Kernel, arch: str) -> None:
        super().__init__(kernel, arch)
        self.R = self.tile.keys
        self.dots = self.emit_dots()
        self.softmax = self.emit_softmax()
        self.values = self.emit_values()
        self.finish = self.emit_finish()
        self.merge = self.emit_merge()
        self.emit_worker(self.emit_task())

    # -- scores

    def emit_dots(self) -> Any:
        """dots(args, frame, r0): S[r][j] = q_r · k_j for R rows from r0 and the keys of the block.

        Meanwhile the lines of V that belong to these keys are asked for, as `values` asks for the next block's K: both phases
        then wait for memory while they compute.
        """
        e, (args, frame, r0), function = self.unit.function("dots", [PTR, PTR, I64])
        a, f = self.open(e, args, frame)
        R, J, L = self.R, ACCUMULATORS // self.R if self.R > 1 else 8, e.lanes
        D, BN, kind = a.word("D"), a.word("BN"), STORAGE[self.kernel.dtype]
        width = e.minus(f.word("n1"), f.word("n0"))
        K = self.source(e, a, f, "k", f.word("kv_head"), e.plus(f.word("k_start"), f.word("n0")))
        V = self.source(e, a, f, "v", f.word("kv_head"), e.plus(f.word("k_start"), f.word("n0")))
        q_rows = [e.at(f.ptr("Q"), e.times(e.plus(r0, r), D)) for r in range(R)]
        line = LINE // ITEMSIZE[self.kernel.dtype]
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

    def sums(self, e: Emit, vectors: list[Value]) -> Value:
        """The lane sums of four vectors, as one vector of four."""
        while vectors[0].type.count > UNROLL:
            half = vectors[0].type.count // 2
            vectors = [e.fadd(e.pick(v, range(half)), e.pick(v, range(half, 2 * half))) for v in vectors]
        if vectors[0].type.count < UNROLL:  # two doubles: pair them up first
            low = [self.pairs(e, vectors[n], vectors[n + 1]) for n in (0, 2)]
            return e.pick(low[0], range(4), low[1])
        return self.pairs(e, self.pairs(e, vectors[0], vectors[1]), self.pairs(e, vectors[2], vectors[3]))

    def pairs(self, e: Emit, x: Value, y: Value) -> Value:
        """Sums of neighbouring lanes, x's first."""
        n = x.type.count
        return e.fadd(e.pick(x, range(0, 2 * n, 2), y), e.pick(x, range(1, 2 * n, 2), y))

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
        V = self.source(e, a, f, "v", f.word("kv_head"), e.plus(f.word("k_start"), f.word("n0")))
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
        K_next = self.source(e, a, f, "k", f.word("kv_head"), e.plus(f.word("k_start"), f.word("n0"), BN))
        with e.loop(0, whole, UNROLL, [e.const(0.0)] * (R * vectors)) as over:
            acc = list(over.values)
            for n in range(UNROLL):
                ahead = e.plus(e.times(e.plus(over.index, n), a.word("k_s")), col)
                for at in range(0, vectors * L, LINE // ITEMSIZE[self.kernel.dtype]):
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

    # -- tasks

    def emit_task(self) -> Any:
        """task(args, frame, number): one share of the keys of one key head."""
        e, (args, frame, number), function = self.unit.function("task", [PTR, PTR, I64])
        a, f = self.open(e, args, frame)
        splits, BN = a.word("splits"), a.word("BN")
        f.set("split", e.rest(number, splits))
        self.locate(e, a, f, I64(0), e.over(number, splits))
        with e.if_then(e.icmp_signed("<=", f.word("rows"), I64(0)), likely=False):
            e.ret_void()
        self.start(e, a, f)
        low, high = hull(e, self.place(a, f, I64(0)), self.terms, I64(0), I64(0))
        count = e.over(e.plus(e.most(e.minus(high, low), 0), BN, -1), BN)
        begin, end = (
            e.plus(low, e.times(BN, e.over(e.times(count, e.plus(f.word("split"), n)), splits))) for n in (0, 1)
        )
        end = e.least(end, high)
        rows = a.word("group")
        with e.loop(begin, end, BN) as block:
            f.set("n0", block.index)
            f.set("n1", e.least(e.plus(block.index, BN), end))
            with e.loop(0, rows, self.R) as over:
                e.call(self.dots, [args, frame, over.index])
            with e.loop(0, rows) as over:
                e.call(self.softmax, [args, frame, over.index])
            with e.loop(0, rows, self.R) as over:
                e.call(self.values, [args, frame, over.index])
        with e.if_then(e.icmp_signed("==", splits, I64(1)), likely=True):
            e.call(self.finish, [args, frame])
            e.ret_void()
        self.share(e, a, f, number)
        e.ret_void()
        return function

    def start(self, e: Emit, a: Slots, f: Slots) -> None:
        """Lay out the frame; Q widened and scaled, rows beyond the group zero; the state of no keys."""
        D, Dv = a.word("D"), a.word("Dv")
        rows = e.round_up(a.word("group"), self.R)
        self.lay_out(
            e,
            f,
            {"Q": e.times(rows, D), "O": e.times(rows, Dv), "m": rows, "l": rows, "P": e.times(rows, a.word("BN"))},
        )
        with e.loop(0, e.times(rows, D)) as cell:
            e.put(e.num(0.0), f.ptr("Q"), cell.index)
        with e.loop(0, e.times(rows, Dv)) as cell:
            e.put(e.num(0.0), f.ptr("O"), cell.index)
        first = e.times(f.word("kv_head"), a.word("group"))
        with e.loop(0, a.word("group")) as row:
            source = self.source(e, a, f, "q", e.plus(first, row.index), f.word("q_start"))
            with e.loop(0, D) as col:
                value = fetch(e, source, e.times(col.index, a.word("q_d")), self.kernel.dtype)
                e.put(e.fmul(value, a.num("q_factor")), f.ptr("Q"), e.plus(e.times(row.index, D), col.index))
            e.put(e.num(self.real.lowest), f.ptr("m"), row.index)
            e.put(e.num(0.0), f.ptr("l"), row.index)

    def share(self, e: Emit, a: Slots, f: Slots, number: Value) -> None:
        """Leave this share's m, l and O in the workspace; the last to arrive merges all of them in order."""
        group, Dv, splits = a.word("group"), a.word("Dv"), a.word("splits")
        size = e.times(group, e.plus(a.word("DVP"), 2))
        mine = e.at(a.ptr("work"), e.times(number, size))
        spans = ((f.ptr("m"), I64(0), group), (f.ptr("l"), group, group), (f.ptr("O"), e.times(group, 2), e.times(group, Dv)))
        for source, offset, count in spans:
            with e.loop(0, count) as cell:
                e.put(e.get(source, cell.index), mine, e.plus(offset, cell.index))
        whole = e.over(number, splits)
        arrived = e.atomic_rmw("add", e.at(a.ptr("done"), whole, I64), I64(1), "acq_rel")
        with e.if_then(e.icmp_signed("==", arrived, e.minus(splits, 1))):
            base = e.at(a.ptr("work"), e.times(e.times(whole, splits), size))
            for target, offset, count in spans:
                with e.loop(0, count) as cell:
                    e.put(e.get(base, e.plus(offset, cell.index)), target, cell.index)
            with e.loop(1, splits) as other:
                e.call(self.merge, [a.pointer, f.pointer, e.at(base, e.times(other.index, size))])
            e.call(self.finish, [a.pointer, f.pointer])

    def emit_merge(self) -> Any:
        """merge(args, frame, state): the m, l and O of another share join this one's."""
        e, (args, frame, state), function = self.unit.function("merge", [PTR, PTR, PTR])
        a, f = self.open(e, args, frame)
        group, Dv = a.word("group"), a.word("Dv")
        with e.loop(0, group) as row:
            r = row.index
            old, other = e.get(f.ptr("m"), r), e.get(state, r)
            m = e.top(old, other)
            ours, theirs = exp2(e, [e.splat(e.fsub(x, m)) for x in (old, other)])
            mine, his = (e.extract_element(x, I32(0)) for x in (ours, theirs))
            total = e.mad(e.get(state, e.plus(group, r)), his, e.fmul(e.get(f.ptr("l"), r), mine))
            e.put(total, f.ptr("l"), r)
            e.put(m, f.ptr("m"), r)
            O = e.at(f.ptr("O"), e.times(r, Dv))
            o_in = e.at(state, e.plus(e.times(group, 2), e.times(r, Dv)))
            with e.loop(0, Dv, e.lanes) as col:
                joined = e.mad(e.vget(o_in, col.index), theirs, e.fmul(e.vget(O, col.index), ours))
                e.vput(joined, O, col.index)
        e.ret_void()
        return function

    def emit_finish(self) -> Any:
        """finish(args, frame): the sink joins, O / l goes out in the inputs' dtype, and the LSE."""
        e, (args, frame), function = self.unit.function("finish", [PTR, PTR])
        a, f = self.open(e, args, frame)
        first, Dv, dtype = e.times(f.word("kv_head"), a.word("group")), a.word("Dv"), self.kernel.dtype
        has_sink = e.icmp_unsigned("!=", a.word("sinks"), I64(0))
        with e.loop(0, a.word("group")) as row:
            r, head = row.index, e.plus(first, row.index)
            with e.if_then(has_sink):
                sink = e.fmul(e.get(a.ptr("sinks"), head), e.num(LOG2E))
                old = e.get(f.ptr("m"), r)
                m = e.top(old, e.ceiling(sink))
                alpha, weight = exp2(e, [e.splat(e.fsub(x, m)) for x in (old, sink)])
                total = e.mad(e.get(f.ptr("l"), r), e.extract_element(alpha, I32(0)), e.extract_element(weight, I32(0)))
                e.put(total, f.ptr("l"), r)
                e.put(m, f.ptr("m"), r)
                O = e.at(f.ptr("O"), e.times(r, Dv))
                with e.loop(0, Dv, e.lanes) as col:
                    e.vput(e.fmul(e.vget(O, col.index), alpha), O, col.index)
            total = e.get(f.ptr("l"), r)
            out = self.source(e, a, f, "o", head, f.word("q_start"))
            with e.loop(0, Dv, e.lanes) as col:
                value = e.vget(f.ptr("O"), e.plus(e.times(r, Dv), col.index))
                value = quotient(e, value, e.splat(total))
                e.vput(e.narrow(value, dtype), e.at(out, col.index, STORAGE[dtype]))
            lse = self.natural_lse(e, e.get(f.ptr("m"), r), total)
            e.put(lse, a.ptr("lse"), self.row_offset(e, a, f, head, f.word("q_start")))
        e.ret_void()
        return function


def emit(kernel: Kernel, arch: str) -> str:
    return str(Decode(kernel, arch).unit.module)
