"""The decode kernel: one query row for each head, so the time goes into reading K and V once.

The query heads of a group are the rows. Nothing is packed: lanes lie along the head dim for both products, and K and V are
converted as they are loaded. For each row the state over the keys seen so far is

    m >= max s (an integer),   l = Σ 2**(s - m),   O = Σ 2**(s - m) v

A task is one share of the keys of one key head; shares meet in the workspace and are merged in order by the last to arrive. How a
block of keys is gone through is told by `decode_stream` for one row and by `decode_block` for several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from tilewise.backends.cpu.elementary import exp2
from tilewise.backends.cpu.ir import I32, I64, ITEMSIZE, PTR, STORAGE, Emit, Value
from tilewise.backends.cpu.masking import hull
from tilewise.backends.cpu.module import FRAME, KernelModule
from tilewise.backends.cpu.pack import fetch, quotient
from tilewise.backends.cpu.slots import Slots
from tilewise.backends.cpu.spec import UNROLL, Kernel

LINE = 64  # bytes of a cache line
Join = Callable[[Value, Value], Value]


class Decode(KernelModule, ABC):
    """Emits one module. In its register tile L lanes and V vectors lie along the head dim, and `keys` counts query rows."""

    frame = (*FRAME, "split", "Q", "O", "m", "l", "P")

    def __init__(self, kernel: Kernel, arch: str) -> None:
        super().__init__(kernel, arch)
        self.R = self.tile.keys
        self.line = LINE // ITEMSIZE[kernel.dtype]  # elements
        self.merge = self.emit_merge()
        self.block = self.emit_block()
        self.finish = self.emit_finish()
        self.emit_worker(self.emit_task())

    @abstractmethod
    def emit_block(self) -> Any:
        """block(args, frame): the keys [n0, n1) join the state of every row."""

    def scratch(self, e: Emit, a: Slots) -> Value:
        """Elements of the buffer P; the host allows for the larger of what the kernels ask."""
        return e.times(e.round_up(a.word("group"), self.R), a.word("BN"))

    def sums(self, e: Emit, vectors: list[Value]) -> Value:
        """The lane sums of four vectors, as one vector of four."""
        return self.joined(e, vectors, e.fadd)

    def joined(self, e: Emit, vectors: list[Value], join: Join) -> Value:
        """All lanes of each of four vectors joined, as one vector of four."""

        def pairs(x: Value, y: Value) -> Value:
            """Neighbouring lanes joined, x's first."""
            n = x.type.count
            return join(e.pick(x, range(0, 2 * n, 2), y), e.pick(x, range(1, 2 * n, 2), y))

        while vectors[0].type.count > UNROLL:
            half = vectors[0].type.count // 2
            vectors = [join(e.pick(v, range(half)), e.pick(v, range(half, 2 * half))) for v in vectors]
        if vectors[0].type.count < UNROLL:  # two doubles: pair them up first
            low = [pairs(vectors[n], vectors[n + 1]) for n in (0, 2)]
            return e.pick(low[0], range(4), low[1])
        return pairs(pairs(vectors[0], vectors[1]), pairs(vectors[2], vectors[3]))

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
        with e.loop(begin, end, BN) as block:
            f.set("n0", block.index)
            f.set("n1", e.least(e.plus(block.index, BN), end))
            e.call(self.block, [args, frame])
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
        sizes = {"Q": e.times(rows, D), "O": e.times(rows, Dv), "m": rows, "l": rows}
        self.lay_out(e, f, {**sizes, "P": self.scratch(e, a)})
        with e.loop(0, e.times(rows, D)) as cell:
            e.put(e.num(0.0), f.ptr("Q"), cell.index)
        self.clear(e, a, f)
        first = e.times(f.word("nth_group"), a.word("group"))
        with e.loop(0, a.word("group")) as row:
            source = self.source(e, a, f, "q", e.plus(first, row.index), f.word("q_start"))
            with e.loop(0, D) as col:
                value = fetch(e, source, e.times(col.index, a.word("q_d")), self.kernel.dtype)
                e.put(e.fmul(value, a.num("q_factor")), f.ptr("Q"), e.plus(e.times(row.index, D), col.index))

    def clear(self, e: Emit, a: Slots, f: Slots) -> None:
        """The state of no keys."""
        rows = e.round_up(a.word("group"), self.R)
        with e.loop(0, rows) as row:
            e.put(e.num(self.real.lowest), f.ptr("m"), row.index)
            e.put(e.num(0.0), f.ptr("l"), row.index)
        with e.loop(0, e.times(rows, a.word("Dv"))) as cell:
            e.put(e.num(0.0), f.ptr("O"), cell.index)

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
        first, Dv, dtype = e.times(f.word("nth_group"), a.word("group")), a.word("Dv"), self.kernel.dtype
        has_sink = e.icmp_unsigned("!=", a.word("sinks"), I64(0))
        with e.loop(0, a.word("group")) as row:
            r, head = row.index, e.plus(first, row.index)
            with e.if_then(has_sink):
                logit, old = self.sink_logit(e, e.get(a.ptr("sinks"), head)), e.get(f.ptr("m"), r)
                m = e.top(old, e.ceiling(logit))
                alpha, weight = exp2(e, [e.splat(e.fsub(x, m)) for x in (old, logit)])
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
            lse = e.at(a.ptr("lse"), self.row_offset(e, a, f, head, f.word("q_start")))
            e.put(self.natural_lse(e, e.get(f.ptr("m"), r), total), lse)
            with e.if_then(has_sink):
                self.least_lse(e, e.get(a.ptr("sinks"), head), lse, I64(1))
        e.ret_void()
        return function
