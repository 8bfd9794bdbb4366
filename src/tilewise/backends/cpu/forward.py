"""The forward kernel: query blocks outside, key blocks inside, strips of R rows innermost.

For one strip the state over the keys seen so far is, in units of log 2,

    m >= max s (an integer),   l = Σ 2**(s - m),   O = Σ 2**(s - m) v

m is kept an integer, so rescaling by alpha = 2**(m_old - m_new) is exact, and s - m splits into integer and fraction without
error. A task is one block of query positions of one key head: all query heads of the group share the packed K and V tile.
"""

from __future__ import annotations

from typing import Any

from tilewise.backends.cpu.elementary import LN2, LOG2E, exp2, log2
from tilewise.backends.cpu.ir import F32, F64, I1, I8, I32, I64, ITEMSIZE, PTR, REALS, STORAGE, Emit, Unit, Value
from tilewise.backends.cpu.masking import (
    EMPTY,
    FULL,
    Place,
    emit_alive,
    emit_bits,
    hull,
    interval,
    is_interval,
    lane_interval,
    parse_terms,
    within,
)
from tilewise.backends.cpu.micro import by_cols, by_rows, put_strip, strip
from tilewise.backends.cpu.pack import emit_copy_rows, emit_pack_strip, emit_unpack_strip
from tilewise.backends.cpu.scores import Modifier, drop
from tilewise.backends.cpu.slots import Slots
from tilewise.backends.cpu.spec import Kernel, argument_names

FRAME = (
    *("batch", "kv_head", "Sq", "Sk", "q_start", "k_start", "m0", "rows", "strips", "n0", "n1", "n_pad", "split"),
    *("K", "V", "ldk", "ldv", "Q", "O", "m", "l", "P", "W", "top", "alpha", "K_tile", "V_tile"),
)
FRAME_BYTES = 512
ALIGN = 16  # elements; buffers of a frame start on such a multiple


def frame_elements(kernel: Kernel, *, rows: int, keys: int, dp: int, dvp: int, ldk: int, ldv: int) -> list[int]:
    """Sizes in elements of Q, O, m, l, P, W, top, alpha, K_tile, V_tile; `rows` over all heads of a group."""
    R = kernel.tile.rows
    sizes = [rows * dp, rows * dvp, rows, rows, keys * R, keys * R, R, R, keys * ldk, keys * ldv]
    return [-(-n // ALIGN) * ALIGN for n in sizes]


class Forward:
    """Emits one module; methods are the functions of the kernel."""

    def __init__(self, kernel: Kernel, arch: str) -> None:
        self.kernel, self.tile = kernel, kernel.tile
        self.real = REALS[kernel.real]
        self.unit = Unit(kernel.kind, self.real, self.tile.lanes, arch)
        self.names = argument_names(kernel)
        self.terms = parse_terms(kernel.structure)
        self.simple = is_interval(kernel.structure)
        if not self.simple:
            self.alive = emit_alive(self.unit, self.names, kernel.structure)
            self.bits = emit_bits(self.unit, self.names, kernel.structure, self.tile)
        self.copy_rows = emit_copy_rows(self.unit, kernel.dtype)
        self.pack_strip = emit_pack_strip(self.unit, self.tile, kernel.dtype)
        self.unpack_strip = emit_unpack_strip(self.unit, self.tile, kernel.dtype)
        self.product = by_rows(self.unit, "scores", self.tile)
        self.product_peak = by_rows(self.unit, "scores_peak", self.tile, peak=True) if kernel.plain else None
        self.pv = by_cols(self.unit, "values", self.tile, scaled=True)
        self.clean = self.emit_clean() if not self.simple or kernel.bias else None
        self.strip = self.emit_strip()
        self.finish = self.emit_finish()
        self.merge = self.emit_merge()
        self.emit_worker()

    # -- shared pieces

    def open(self, e: Emit, args: Value, frame: Value) -> tuple[Slots, Slots]:
        return Slots(e, args, self.names), Slots(e, frame, FRAME)

    def place(self, e: Emit, a: Slots, f: Slots, head: Value) -> Place:
        return Place(a, f.word("batch"), head, f.word("Sq"), f.word("Sk"), f.word("q_start"), f.word("k_start"))

    def where(self, e: Emit, a: Slots, f: Slots, index: Value) -> tuple[Value, Value]:
        """(query head, first position) of strip `index` of the task."""
        per_head = f.word("strips")
        head = e.plus(e.times(f.word("kv_head"), a.word("group")), e.over(index, per_head))
        return head, e.plus(f.word("m0"), e.times(e.rest(index, per_head), self.tile.rows))

    # -- one strip against one key block

    def emit_strip(self) -> Any:
        """strip(args, frame, index)."""
        e, (args, frame, index), function = self.unit.function("strip", [PTR, PTR, I64])
        a, f = self.open(e, args, frame)
        head, q0 = self.where(e, a, f, index)
        place = self.place(e, a, f, head)
        j0, j1, solid0, solid1, visible = self.extent(e, a, f, place, q0)
        with e.if_then(e.icmp_signed(">=", j0, j1), likely=False):
            e.ret_void()
        R, P = self.tile.rows, f.ptr("P")
        Q = e.at(f.ptr("Q"), e.times(index, e.times(a.word("DP"), R)))
        put_strip(e, [e.const(float("-inf"))] * self.tile.vectors, f.ptr("top"))
        common = [a.word("DP"), Q, f.ptr("K"), f.word("ldk"), P, I64(R)]
        if self.kernel.plain:
            e.call(self.product_peak, [*common, solid0, solid1, f.ptr("top")])
            for start, stop in ((j0, solid0), (solid1, j1)):
                with e.if_then(e.less(start, stop), likely=False):
                    e.call(self.product, [*common, start, stop])
                    self.mask_pass(e, f, None, start, stop, visible)
        else:
            e.call(self.product, [*common, j0, j1])
            self.mask_pass(e, f, Modifier(e, self.kernel, place, q0), j0, j1, visible)
        self.softmax(e, a, f, index, j0, j1)
        if self.kernel.dropout:
            drop(e, self.tile, place, q0, f.word("n0"), j0, j1, [P])
        O = e.at(f.ptr("O"), e.times(index, e.times(a.word("DVP"), R)))
        e.call(self.pv, [j0, j1, P, f.ptr("V"), f.word("ldv"), O, a.word("DVP"), f.ptr("alpha")])
        e.ret_void()
        return function

    def extent(self, e: Emit, a: Slots, f: Slots, place: Place, q0: Value) -> tuple[Value, Value, Value, Value, Any]:
        """Keys [j0, j1) of the block the strip must visit, [solid0, solid1) of them seen by every row, and the test for
        the others; multiples of J counted from n0."""
        J, n0, n_pad = self.tile.keys, f.word("n0"), f.word("n_pad")
        width = e.minus(f.word("n1"), n0)
        last = e.least(e.plus(q0, self.tile.rows - 1), e.minus(place.Sq, 1))
        if self.simple:
            term = self.terms[0]
            low, _ = interval(e, place, term, q0)
            _, high = interval(e, place, term, last)
            inner_low, _ = interval(e, place, term, last)
            _, inner_high = interval(e, place, term, q0)

            def near(x: Value) -> Value:
                return e.least(e.most(e.minus(x, n0), 0), width)

            j0, j1 = e.round_down(near(low), J), e.round_up(near(high), J)
            solid0 = e.least(e.round_up(near(inner_low), J), j1)
            solid1 = e.most(e.round_down(near(inner_high), J), solid0)
            lows, highs = lane_interval(e, self.tile, place, term, q0, n0)
            return j0, j1, solid0, solid1, lambda e, j: within(e, j, lows, highs)
        W = f.ptr("W")
        where = [place.batch, place.head, place.Sq, place.Sk, place.q_start, place.k_start]
        alive = e.call(self.alive, [a.pointer, *where, q0, last, n0, f.word("n1")])
        kind = e.alloca(I64)
        e.store(I64(EMPTY), kind)
        with e.if_then(e.icmp_signed("!=", alive, I64(0))):
            e.store(e.call(self.bits, [a.pointer, *where, q0, n0, e.plus(n0, n_pad), W]), kind)
        kind = e.load(kind, typ=I64)
        nothing = e.icmp_signed("==", kind, I64(EMPTY))
        whole = e.icmp_signed("==", kind, I64(FULL))
        j1 = e.select(nothing, I64(0), n_pad)

        def visible(e: Emit, j: Value) -> list[Value]:
            words = strip(e, self.tile, W, e.times(j, self.tile.rows), e.real.bits)
            return [e.icmp_signed("!=", w, e.iconst(0)) for w in words]

        return I64(0), j1, I64(0), e.select(whole, j1, I64(0)), visible

    def mask_pass(self, e: Emit, f: Slots, modifier: Modifier | None, j0: Value, j1: Value, visible: Any) -> None:
        """Scores of keys [j0, j1) changed, -inf where hidden; their maximum joins `top`."""
        P, R, minus_inf = f.ptr("P"), self.tile.rows, e.const(float("-inf"))
        with e.loop(j0, j1, 1, strip(e, self.tile, f.ptr("top"))) as over:
            at = e.times(over.index, R)
            s = strip(e, self.tile, P, at)
            seen = visible(e, over.index)
            if modifier:
                s, unmasked, _ = modifier.apply(s, e.plus(f.word("n0"), over.index))
                if unmasked:
                    seen = [e.and_(x, y) for x, y in zip(seen, unmasked, strict=True)]
            s = [e.select(ok, x, minus_inf) for ok, x in zip(seen, s, strict=True)]
            put_strip(e, s, P, at)
            over.carry([e.top(t, x) for t, x in zip(over.values, s, strict=True)])
        put_strip(e, over.values, f.ptr("top"))

    def softmax(self, e: Emit, a: Slots, f: Slots, index: Value, j0: Value, j1: Value) -> None:
        """P = 2**(s - m) in place; l and m moved on; alpha left for O."""
        R, P = self.tile.rows, f.ptr("P")
        row = e.times(index, R)
        factor = e.splat(a.num("log2_factor") if self.kernel.plain else e.num(1.0))
        m_ptr, l_ptr = e.at(f.ptr("m"), row), e.at(f.ptr("l"), row)
        old = strip(e, self.tile, m_ptr)
        m = [
            e.top(before, e.ceiling(e.fmul(top, factor)))
            for before, top in zip(old, strip(e, self.tile, f.ptr("top")), strict=True)
        ]
        alpha = [exp2(e, e.fsub(before, now)) for before, now in zip(old, m, strict=True)]
        put_strip(e, m, m_ptr)
        put_strip(e, alpha, f.ptr("alpha"))
        below = [e.fneg(x) for x in m]
        with e.loop(j0, j1, 1, [e.const(0.0)] * self.tile.vectors) as over:
            at = e.times(over.index, R)
            s = strip(e, self.tile, P, at)
            p = [exp2(e, e.mad(x, factor, b)) for x, b in zip(s, below, strict=True)]
            put_strip(e, p, P, at)
            over.carry([e.fadd(t, x) for t, x in zip(over.values, p, strict=True)])
        l_new = [
            e.mad(before, al, now) for before, al, now in zip(strip(e, self.tile, l_ptr), alpha, over.values, strict=True)
        ]
        put_strip(e, l_new, l_ptr)

    # -- values that nobody sees

    def emit_clean(self) -> Any:
        """clean(args, frame, strips): zero the rows of V that no row of the task sees, if any value is not finite.

        A hidden value must not reach the output as 0 · inf; with finite values there is nothing to do.
        """
        e, (args, frame, strips), function = self.unit.function("clean", [PTR, PTR, I64])
        a, f = self.open(e, args, frame)
        V, step, cols, n_pad = f.ptr("V"), f.word("ldv"), a.word("DVP"), f.word("n_pad")
        with e.loop(0, n_pad, 1, [e.num(0.0)]) as row:
            start = e.times(row.index, step)
            with e.loop(0, cols, 1, [row.values[0]]) as col:
                col.carry([e.mad(e.get(V, e.plus(start, col.index)), e.num(0.0), col.values[0])])
            row.carry([col.values[0]])
        with e.if_then(e.fcmp_ordered("==", row.values[0], e.num(0.0)), likely=True):
            e.ret_void()
        with e.loop(0, n_pad) as key:
            with e.loop(0, strips, 1, [I1(0)]) as over:
                head, q0 = self.where(e, a, f, over.index)
                over.carry([e.or_(over.values[0], self.seen(e, a, f, self.place(e, a, f, head), q0, key.index))])
            with e.if_then(e.not_(over.values[0])), e.loop(0, cols) as col:
                e.put(e.num(0.0), V, e.plus(e.times(key.index, step), col.index))
        e.ret_void()
        return function

    def seen(self, e: Emit, a: Slots, f: Slots, place: Place, q0: Value, j: Value) -> Value:
        """Does any row of the strip at q0 see key n0 + j?"""
        n0 = f.word("n0")
        key = e.plus(n0, j)
        if self.simple:
            lows, highs = lane_interval(e, self.tile, place, self.terms[0], q0, n0)
            ok = within(e, j, lows, highs)
        else:
            where = [place.batch, place.head, place.Sq, place.Sk, place.q_start, place.k_start]
            e.call(self.bits, [a.pointer, *where, q0, key, e.plus(key, 1), f.ptr("W")])
            ok = [e.icmp_signed("!=", w, e.iconst(0)) for w in strip(e, self.tile, f.ptr("W"), 0, e.real.bits)]
        if self.kernel.bias:
            _, unmasked, _ = Modifier(e, self.kernel, place, q0).apply([e.const(0.0)] * self.tile.vectors, key)
            assert unmasked is not None
            ok = [e.and_(x, y) for x, y in zip(ok, unmasked, strict=True)]
        total: Value = I1(0)
        for vector in ok:
            for lane in range(e.lanes):
                total = e.or_(total, e.extract_element(vector, I32(lane)))
        return total

    # -- results

    def emit_finish(self) -> Any:
        """finish(args, frame, index): the sink joins, O / l goes out in the inputs' dtype, and the LSE."""
        e, (args, frame, index), function = self.unit.function("finish", [PTR, PTR, I64])
        a, f = self.open(e, args, frame)
        tile, R = self.tile, self.tile.rows
        head, q0 = self.where(e, a, f, index)
        row = e.times(index, R)
        m_ptr, l_ptr, factors = e.at(f.ptr("m"), row), e.at(f.ptr("l"), row), f.ptr("alpha")
        sinks = a.ptr("sinks")
        with e.if_then(e.icmp_unsigned("!=", e.ptrtoint(sinks, I64), I64(0)), likely=False):
            self.join_sink(e, e.get(sinks, head), index, a, f)
        keep = e.splat(a.num("keep_factor"))
        for i in range(tile.vectors):
            l_now = e.vget(l_ptr, i * e.lanes)
            dead = e.fcmp_ordered("==", l_now, e.const(0.0))
            factor = e.select(dead, e.const(0.0), e.fdiv(keep, l_now))
            e.vput(factor, factors, i * e.lanes)
        rows = e.least(R, e.minus(e.plus(f.word("m0"), f.word("rows")), q0))
        batch = I64(0) if self.kernel.varlen else f.word("batch")
        position = e.plus(f.word("q_start"), q0)
        out = e.plus(e.times(batch, a.word("o_b")), e.times(head, a.word("o_h")), e.times(position, a.word("o_s")))
        O = e.at(f.ptr("O"), e.times(index, e.times(a.word("DVP"), R)))
        to = e.at(a.ptr("o"), out, STORAGE[self.kernel.dtype])
        e.call(self.unpack_strip, [to, a.word("o_s"), O, rows, a.word("Dv"), factors])
        heads = e.times(a.word("kv_heads"), a.word("group"))
        lse = e.at(a.ptr("lse"), e.plus(e.times(e.plus(e.times(batch, heads), head), a.word("Sq")), position))
        with e.loop(0, rows) as over:
            e.put(self.natural_lse(e, e.get(m_ptr, over.index), e.get(l_ptr, over.index)), lse, over.index)
        e.ret_void()
        return function

    def natural_lse(self, e: Emit, m: Value, total: Value) -> Value:
        """ln2 · (m + log2 l), worked out in double; -inf for a row that saw nothing."""
        if self.real.type == F32:
            m, total = e.fpext(m, F64), e.fpext(total, F64)
        value = e.fmul(e.fadd(m, log2(e, total)), F64(LN2))
        value = e.select(e.fcmp_ordered(">", total, F64(0.0)), value, e.fadd(total, F64(float("-inf"))))
        return e.fptrunc(value, F32) if self.real.type == F32 else value

    def join_sink(self, e: Emit, sink: Value, index: Value, a: Slots, f: Slots) -> None:
        """One more logit in the denominator: l' = l·2**(m - m') + 2**(sink - m')."""
        tile, row = self.tile, e.times(index, self.tile.rows)
        m_ptr, l_ptr = e.at(f.ptr("m"), row), e.at(f.ptr("l"), row)
        O = e.at(f.ptr("O"), e.times(index, e.times(a.word("DVP"), tile.rows)))
        logit = e.splat(e.fmul(sink, e.num(LOG2E)))
        factors = []
        for i in range(tile.vectors):
            old, total = e.vget(m_ptr, i * e.lanes), e.vget(l_ptr, i * e.lanes)
            m = e.top(old, e.ceiling(logit))
            alpha = exp2(e, e.fsub(old, m))
            e.vput(e.mad(total, alpha, exp2(e, e.fsub(logit, m))), l_ptr, i * e.lanes)
            e.vput(m, m_ptr, i * e.lanes)
            factors.append(alpha)
        with e.loop(0, a.word("DVP")) as col:
            at = e.times(col.index, tile.rows)
            put_strip(e, [e.fmul(x, y) for x, y in zip(strip(e, tile, O, at), factors, strict=True)], O, at)

    def emit_merge(self) -> Any:
        """merge(args, frame, index, m', l', O'): the state of another share of the keys joins strip `index`."""
        e, (args, frame, index, m_in, l_in, o_in), function = self.unit.function("merge", [PTR, PTR, I64, PTR, PTR, PTR])
        a, f = self.open(e, args, frame)
        tile, R = self.tile, self.tile.rows
        row = e.times(index, R)
        m_ptr, l_ptr = e.at(f.ptr("m"), row), e.at(f.ptr("l"), row)
        size = e.times(a.word("DVP"), R)
        O, o_in = e.at(f.ptr("O"), e.times(index, size)), e.at(o_in, e.times(index, size))
        ours, theirs = [], []
        for i in range(tile.vectors):
            old, other = e.vget(m_ptr, i * e.lanes), e.vget(e.at(m_in, row), i * e.lanes)
            m = e.top(old, other)
            ours.append(exp2(e, e.fsub(old, m)))
            theirs.append(exp2(e, e.fsub(other, m)))
            total = e.fmul(e.vget(l_ptr, i * e.lanes), ours[-1])
            e.vput(e.mad(e.vget(e.at(l_in, row), i * e.lanes), theirs[-1], total), l_ptr, i * e.lanes)
            e.vput(m, m_ptr, i * e.lanes)
        with e.loop(0, a.word("DVP")) as col:
            at = e.times(col.index, R)
            mine, other = strip(e, tile, O, at), strip(e, tile, o_in, at)
            put_strip(
                e, [e.mad(y, t, e.fmul(x, o)) for x, y, o, t in zip(mine, other, ours, theirs, strict=True)], O, at
            )
        e.ret_void()
        return function

    # -- tasks

    def emit_worker(self) -> None:
        """worker(args, buffer): take tasks from the shared counter until none is left."""
        task = self.emit_task()
        e, (args, buffer), _ = self.unit.function("worker", [PTR, PTR], public=True)
        a = Slots(e, args, self.names)
        head, body, done = (e.append_basic_block(n) for n in ("next", "take", "over"))
        counter, tasks = a.ptr("counter"), a.word("tasks")
        e.branch(head)
        e.position_at_end(head)
        number = e.atomic_rmw("add", counter, I64(1), "monotonic")
        e.cbranch(e.less(number, tasks), body, done)
        e.position_at_end(body)
        e.call(task, [args, buffer, number])
        e.branch(head)
        e.position_at_end(done)
        e.ret_void()

    def emit_task(self) -> Any:
        """task(args, frame, number): one query block of one key head, or one share of its keys."""
        e, (args, frame, number), function = self.unit.function("task", [PTR, PTR, I64])
        a, f = self.open(e, args, frame)
        self.locate(e, a, f, number)
        with e.if_then(e.icmp_signed("<=", f.word("rows"), I64(0)), likely=False):
            e.ret_void()
        strips = e.times(f.word("strips"), a.word("group"))
        self.start(e, a, f, strips)
        first, rows = f.word("m0"), f.word("rows")
        low, high = hull(e, self.place(e, a, f, I64(0)), self.terms, first, e.plus(first, rows, -1))
        splits = a.word("splits")
        alone = e.icmp_signed("==", splits, I64(1))
        # shares are whole key blocks; share s of n takes blocks [s·c/n, (s + 1)·c/n)
        BN, share = a.word("BN"), f.word("split")
        count = e.over(e.plus(e.most(e.minus(high, low), 0), BN, -1), BN)
        begin = e.plus(low, e.times(BN, e.over(e.times(count, share), splits)))
        end = e.plus(low, e.times(BN, e.over(e.times(count, e.plus(share, 1)), splits)))
        end = e.least(end, high)
        with e.loop(begin, end, BN) as block:
            f.set("n0", block.index)
            f.set("n1", e.least(e.plus(block.index, BN), high))
            self.block(e, a, f, strips)
        with e.if_then(alone, likely=True):
            with e.loop(0, strips) as over:
                e.call(self.finish, [args, frame, over.index])
            e.ret_void()
        self.share(e, a, f, number, strips)
        e.ret_void()
        return function

    def locate(self, e: Emit, a: Slots, f: Slots, number: Value) -> None:
        """Task number -> (batch, key head, query block, share); lengths and starts of its sequence."""
        splits, blocks, kv_heads = a.word("splits"), a.word("blocks"), a.word("kv_heads")
        f.set("split", e.rest(number, splits))
        rest = e.over(number, splits)
        block = e.rest(rest, blocks)
        # with a causal mask later blocks cost more: start them first
        block = e.select(e.icmp_signed("!=", a.word("descending"), I64(0)), e.minus(e.minus(blocks, 1), block), block)
        rest = e.over(rest, blocks)
        f.set("kv_head", e.rest(rest, kv_heads))
        batch = e.over(rest, kv_heads)
        f.set("batch", batch)
        Sq, Sk, q_start, k_start = a.word("Sq"), a.word("Sk"), I64(0), I64(0)
        if self.kernel.varlen:

            def bound(name: str, index: Value) -> Value:
                return e.sext(e.get(a.ptr(name), index, I32), I64)

            q_start, k_start = bound("cu_q", batch), bound("cu_k", batch)
            Sq = e.minus(bound("cu_q", e.plus(batch, 1)), q_start)
            Sk = e.minus(bound("cu_k", e.plus(batch, 1)), k_start)
        first = e.times(block, a.word("BM"))
        rows = e.least(a.word("BM"), e.minus(Sq, first))
        values = {"Sq": Sq, "Sk": Sk, "q_start": q_start, "k_start": k_start, "m0": first, "rows": rows}
        for name, value in values.items():
            f.set(name, value)
        f.set("strips", e.over(e.plus(rows, self.tile.rows - 1), self.tile.rows))

    def start(self, e: Emit, a: Slots, f: Slots, strips: Value) -> None:
        """Lay out the frame, pack Q, set m, l and O to those of no keys."""
        tile, R = self.tile, self.tile.rows
        DP, DVP, BN = a.word("DP"), a.word("DVP"), a.word("BN")
        rows = e.times(a.word("BM"), a.word("group"))
        sizes = [e.times(rows, DP), e.times(rows, DVP), rows, rows, e.times(BN, R), e.times(BN, R), I64(R), I64(R)]
        sizes += [e.times(BN, a.word("LDK")), e.times(BN, a.word("LDV"))]
        cursor = e.at(f.pointer, FRAME_BYTES, I8)
        names = ("Q", "O", "m", "l", "P", "W", "top", "alpha", "K_tile", "V_tile")
        for name, size in zip(names, sizes, strict=True):
            f.set(name, e.ptrtoint(cursor, I64))
            cursor = e.at(cursor, e.round_up(size, ALIGN))
        kind, row_step, col_step = STORAGE[self.kernel.dtype], a.word("q_s"), a.word("q_d")
        batch = I64(0) if self.kernel.varlen else f.word("batch")
        last = e.plus(f.word("m0"), f.word("rows"))
        with e.loop(0, strips) as over:
            head, q0 = self.where(e, a, f, over.index)
            offset = e.plus(e.times(batch, a.word("q_b")), e.times(head, a.word("q_h")))
            offset = e.plus(offset, e.times(e.plus(f.word("q_start"), q0), row_step))
            to = e.at(f.ptr("Q"), e.times(over.index, e.times(DP, R)))
            valid = e.least(R, e.minus(last, q0))
            source = e.at(a.ptr("q"), offset, kind)
            e.call(self.pack_strip, [to, DP, source, row_step, col_step, valid, a.word("D"), a.num("q_factor")])
            row = e.times(over.index, R)
            put_strip(e, [e.const(self.real.lowest)] * tile.vectors, f.ptr("m"), row)
            put_strip(e, [e.const(0.0)] * tile.vectors, f.ptr("l"), row)
        with e.loop(0, e.times(strips, e.times(DVP, R)), e.lanes) as cell:
            e.vput(e.const(0.0), f.ptr("O"), cell.index)

    def block(self, e: Emit, a: Slots, f: Slots, strips: Value) -> None:
        """Bring the K and V tile of keys [n0, n1) into reach, then every strip."""
        n0, n1 = f.word("n0"), f.word("n1")
        go = e.append_basic_block("visit")
        after = e.append_basic_block("skip")
        if self.simple:
            e.branch(go)
        else:
            first, last = f.word("m0"), e.plus(f.word("m0"), f.word("rows"), -1)
            base = e.times(f.word("kv_head"), a.word("group"))
            with e.loop(0, a.word("group"), 1, [I64(0)]) as over:
                place = self.place(e, a, f, e.plus(base, over.index))
                where = [place.batch, place.head, place.Sq, place.Sk, place.q_start, place.k_start]
                alive = e.call(self.alive, [a.pointer, *where, first, last, n0, n1])
                over.carry([e.or_(over.values[0], alive)])
            e.cbranch(e.icmp_signed("!=", over.values[0], I64(0)), go, after)
        e.position_at_end(go)
        width = e.minus(n1, n0)
        padded = e.round_up(width, self.tile.keys)
        f.set("n_pad", padded)
        in_place = e.and_(e.icmp_signed("!=", a.word("direct"), I64(0)), e.icmp_signed("==", width, padded))
        for name, step, cols, all_cols, tile_step in (("k", "ldk", "D", "DP", "LDK"), ("v", "ldv", "Dv", "DVP", "LDV")):
            batch = I64(0) if self.kernel.varlen else f.word("batch")
            row_step = a.word(f"{name}_s")
            offset = e.plus(e.times(batch, a.word(f"{name}_b")), e.times(f.word("kv_head"), a.word(f"{name}_h")))
            offset = e.plus(offset, e.times(e.plus(f.word("k_start"), n0), row_step))
            source = e.at(a.ptr(name), offset, STORAGE[self.kernel.dtype])
            buffer = f.ptr(f"{name.upper()}_tile")
            with e.if_then(e.not_(in_place)):
                shape = [a.word(tile_step), a.word(all_cols), source, row_step, a.word(f"{name}_d"), width, padded]
                e.call(self.copy_rows, [buffer, *shape, a.word(cols)])
            f.set(name.upper(), e.ptrtoint(e.select(in_place, source, buffer), I64))
            f.set(step, e.select(in_place, row_step, a.word(tile_step)))
        if self.clean:
            e.call(self.clean, [a.pointer, f.pointer, strips])
        with e.loop(0, strips) as over:
            e.call(self.strip, [a.pointer, f.pointer, over.index])
        e.branch(after)
        e.position_at_end(after)

    def share(self, e: Emit, a: Slots, f: Slots, number: Value, strips: Value) -> None:
        """Leave this share's state in the workspace; whoever comes last merges them all, in order, and finishes."""
        rows = e.times(a.word("BM"), a.word("group"))
        size = e.times(rows, e.plus(a.word("DVP"), 2))  # m, l, O of one share
        splits = a.word("splits")
        mine = e.at(a.ptr("work"), e.times(number, size))
        used = e.times(strips, self.tile.rows)
        # m and l lie `rows` apart, O behind them
        spans = ((f.ptr("m"), I64(0), used), (f.ptr("l"), rows, used), (f.ptr("O"), e.times(rows, 2), e.times(used, a.word("DVP"))))
        for source, offset, count in spans:
            with e.loop(0, count, e.lanes) as cell:
                e.vput(e.vget(source, cell.index), mine, e.plus(offset, cell.index))
        whole = e.over(number, splits)
        arrived = e.atomic_rmw("add", e.at(a.ptr("done"), whole, I64), I64(1), "acq_rel")
        with e.if_then(e.icmp_signed("==", arrived, e.minus(splits, 1))):
            base = e.at(a.ptr("work"), e.times(e.times(whole, splits), size))
            for target, offset, count in spans:
                with e.loop(0, count, e.lanes) as cell:
                    e.vput(e.vget(base, e.plus(offset, cell.index)), target, cell.index)
            with e.loop(1, splits) as other:
                state = e.at(base, e.times(other.index, size))
                with e.loop(0, strips) as over:
                    l_in, o_in = e.at(state, rows), e.at(state, e.times(rows, 2))
                    e.call(self.merge, [a.pointer, f.pointer, over.index, state, l_in, o_in])
            with e.loop(0, strips) as over:
                e.call(self.finish, [a.pointer, f.pointer, over.index])


def emit(kernel: Kernel, arch: str) -> str:
    return str(Forward(kernel, arch).unit.module)


def itemsize(kernel: Kernel) -> int:
    return ITEMSIZE[kernel.real]
