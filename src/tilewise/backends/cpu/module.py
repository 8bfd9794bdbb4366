"""What forward and backward kernels share: where a strip stands, which keys it sees, tiles of K and V, tasks."""

from __future__ import annotations

from typing import Any

from tilewise.backends.cpu import matrix
from tilewise.backends.cpu.elementary import LN2, LOG2E, log2
from tilewise.backends.cpu.ir import F32, F64, I1, I8, I32, I64, PTR, REALS, STORAGE, Emit, Unit, Value
from tilewise.backends.cpu.masking import (
    EMPTY,
    FULL,
    Place,
    emit_alive,
    emit_bits,
    interval,
    is_interval,
    lane_interval,
    within,
)
from tilewise.backends.cpu.micro import strip
from tilewise.backends.cpu.pack import emit_pack_lanes, emit_pack_panels, fetch
from tilewise.backends.cpu.scores import Modifier
from tilewise.backends.cpu.slots import Slots
from tilewise.backends.cpu.spec import ALIGN, FRAME_BYTES, Kernel, argument_names
from tilewise.masks.program import operands

FRAME = (
    *("batch", "nth_group", "key_head", "Sq", "Sk", "q_start", "k_start", "m0", "rows", "strips", "n0", "n1", "n_pad"),
    "W",
)
LONG, LATER = 512, 256
"""Keys from which on a row's error is small: it falls with the root of their number. LATER of them are enough where rows before
see fewer, and have the largest errors anyway."""
CHUNK = 64
"""Query rows of one sum in dK and dV where vectors are wide, in whole strips; elsewhere all of a task's."""


class KernelModule:
    """One module of functions over (arguments, frame); subclasses add their own words to the frame."""

    frame: tuple[str, ...] = FRAME
    tiles: tuple[tuple[str, str, str], ...] = ()
    """(name, source, layout) of the K and V tiles the kernel multiplies with."""
    cleaned: tuple[str, ...] = ()
    """Those whose hidden rows would be multiplied by zero."""
    packed: str
    """The dtype of values in tiles."""
    wide: bool
    """Vectors of more than 16 bytes. Shorter sums cost less there, 2 % or nothing with AVX-512 and 2 to 4 % with NEON; and torch
    has shorter sums, too."""

    def __init__(self, kernel: Kernel, arch: str) -> None:
        self.kernel, self.tile = kernel, kernel.tile
        self.real, self.packed = REALS[kernel.real], kernel.real
        self.unit = Unit(kernel.kind, self.real, self.tile.lanes, arch)
        self.names = argument_names(kernel)
        self.terms = operands(kernel.structure)
        self.simple = is_interval(kernel.structure)
        self.wide = self.tile.lanes * self.real.size > 16

    def emit_helpers(self) -> None:
        """Masks that are not intervals, packing, and the care for what is hidden."""
        kernel = self.kernel
        if not self.simple:
            self.alive = emit_alive(self.unit, self.names, kernel.structure)
            self.bits = emit_bits(self.unit, self.names, kernel.structure, self.tile)
        self.emit_packers()
        self.clean = None if self.simple and not kernel.bias else self.emit_clean()

    def emit_packers(self) -> None:
        dtype, tile = self.kernel.dtype, self.tile
        self.pack_strips = emit_pack_lanes(self.unit, tile.rows, dtype, scaled=True)
        self.pack_lanes = emit_pack_lanes(self.unit, tile.keys, dtype, scaled=False)
        self.pack_panels = emit_pack_panels(self.unit, tile.keys, dtype, scaled=False)

    def open(self, e: Emit, args: Value, frame: Value) -> tuple[Slots, Slots]:
        return Slots(e, args, self.names), Slots(e, frame, self.frame)

    def place(self, a: Slots, f: Slots, head: Value) -> Place:
        return Place(a, f.word("batch"), head, f.word("Sq"), f.word("Sk"), f.word("q_start"), f.word("k_start"))

    def mask_words(self, place: Place) -> list[Value]:
        return [place.batch, place.head, place.Sq, place.Sk, place.q_start, place.k_start]

    def where(self, e: Emit, a: Slots, f: Slots, index: Value) -> tuple[Value, Value]:
        """(query head, first position) of strip `index` of the task."""
        per_head = f.word("strips")
        head = e.plus(e.times(f.word("nth_group"), a.word("group")), e.over(index, per_head))
        return head, e.plus(f.word("m0"), e.times(e.rest(index, per_head), self.tile.rows))

    def groups(self, e: Emit, j0: Value, j1: Value) -> list[Value]:
        """Keys [j0, j1), multiples of J, as groups of J."""
        return [e.over(j0, self.tile.keys), e.over(j1, self.tile.keys)]

    def batch_offset(self, f: Slots) -> Value:
        """Index of the sequence along the batch side of q, k, v and their like; packed batches have one such row."""
        return I64(0) if self.kernel.varlen else f.word("batch")

    def source(self, e: Emit, a: Slots, f: Slots, name: str, head: Value, position: Value) -> Value:
        """Address of the row at `position` of a tensor in the inputs' dtype."""
        offset = e.plus(e.times(self.batch_offset(f), a.word(f"{name}_b")), e.times(head, a.word(f"{name}_h")))
        offset = e.plus(offset, e.times(position, a.word(f"{name}_s")))
        return e.at(a.ptr(name), offset, STORAGE[self.kernel.dtype])

    def lay_out(self, e: Emit, f: Slots, sizes: dict[str, int | Value]) -> None:
        """Give each buffer its place behind the frame's words; the host sums the same sizes."""
        cursor = e.at(f.pointer, FRAME_BYTES, I8)
        for name, size in sizes.items():
            f.set(name, e.ptrtoint(cursor, I64))
            cursor = e.at(cursor, e.round_up(e.word(size), ALIGN))

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
            lows, highs = lane_interval(e, self.tile, place, term, q0, (n0, f.word("n1")))
            return j0, j1, solid0, solid1, lambda e, j: within(e, j, lows, highs)
        W = f.ptr("W")
        where = self.mask_words(place)
        alive = e.call(self.alive, [a.pointer, *where, q0, last, n0, f.word("n1")])
        kind = e.alloca(I64)
        e.store(I64(EMPTY), kind)
        with e.if_then(e.icmp_signed("!=", alive, I64(0))):
            e.store(e.call(self.bits, [a.pointer, *where, q0, n0, f.word("n1"), W]), kind)
        kind = e.load(kind, typ=I64)
        nothing = e.icmp_signed("==", kind, I64(EMPTY))
        whole = e.icmp_signed("==", kind, I64(FULL))
        j1 = e.select(nothing, I64(0), n_pad)

        def visible(e: Emit, j: Value) -> list[Value]:
            words = strip(e, self.tile, W, e.times(j, self.tile.rows), e.real.bits)
            return [e.icmp_signed("!=", w, e.iconst(0)) for w in words]

        return I64(0), j1, I64(0), e.select(whole, e.round_down(width, J), I64(0)), visible

    def fetch_tiles(self, e: Emit, a: Slots, f: Slots) -> None:
        """Pack the K and V rows of keys [n0, n1), with zeros up to a whole register tile."""
        width = e.minus(f.word("n1"), f.word("n0"))
        padded = e.round_up(width, self.tile.keys)
        f.set("n_pad", padded)
        for name, source, layout in self.tiles:
            cols = a.word("D" if source == "k" else "Dv")
            rows = self.source(e, a, f, source, f.word("key_head"), e.plus(f.word("k_start"), f.word("n0")))
            steps = [rows, a.word(f"{source}_s"), a.word(f"{source}_d"), width]
            if layout == "lanes":
                e.call(self.pack_lanes, [f.ptr(name), a.word("DP" if source == "k" else "DVP"), *steps, cols])
            else:
                e.call(self.pack_panels, [f.ptr(name), self.panel(e, a), *steps, padded, cols])

    def panel(self, e: Emit, a: Slots) -> Value:
        """Distance of two panels of a tile, in cells: J columns of every key of a block."""
        return e.times(a.word("BN"), self.tile.keys)

    def cell(self, e: Emit, a: Slots, name: str, key: Value, col: Value) -> Value:
        """Where a tile holds column `col` of key `key`."""
        J = self.tile.keys
        source, layout = next((s, layout) for n, s, layout in self.tiles if n == name)
        if layout == "lanes":
            group = e.times(e.round_down(key, J), a.word("DP" if source == "k" else "DVP"))
            return e.plus(group, e.times(col, J), e.rest(key, J))
        return e.plus(e.times(e.over(col, J), e.times(a.word("BN"), J)), e.times(key, J), e.rest(col, J))

    def block_alive(self, e: Emit, a: Slots, f: Slots, heads: Value) -> Value:
        """Might any row of the task see a key of [n0, n1)? `heads` query heads from the task's first."""
        first, last = f.word("m0"), e.plus(f.word("m0"), f.word("rows"), -1)
        base, _ = self.where(e, a, f, I64(0))
        with e.loop(0, heads, 1, [I64(0)]) as over:
            words = self.mask_words(self.place(a, f, e.plus(base, over.index)))
            alive = e.call(self.alive, [a.pointer, *words, first, last, f.word("n0"), f.word("n1")])
            over.carry([e.or_(over.values[0], alive)])
        return e.icmp_signed("!=", over.values[0], I64(0))

    # -- values that nobody sees

    def emit_clean(self) -> Any:
        """clean(args, frame, strips): zero the tile rows that no row of the task sees, if any element is not finite.

        What is hidden must not reach a result as 0 · inf; where everything is finite there is nothing to do.
        """
        e, (args, frame, strips), function = self.unit.function("clean", [PTR, PTR, I64])
        a, f = self.open(e, args, frame)
        n_pad = f.word("n_pad")
        tiles = [(name, f.ptr(name), a.word("D" if source == "k" else "Dv")) for name, source, _ in self.tiles]
        tiles = [tile for tile in tiles if tile[0] in self.cleaned]
        total: Value = e.num(0.0)
        for name, tile, cols in tiles:
            with e.loop(0, n_pad, 1, [total]) as key:
                with e.loop(0, cols, 1, [key.values[0]]) as col:
                    value = fetch(e, tile, self.cell(e, a, name, key.index, col.index), self.packed)
                    col.carry([e.mad(value, e.num(0.0), col.values[0])])
                key.carry([col.values[0]])
            total = key.values[0]
        with e.if_then(e.fcmp_ordered("==", total, e.num(0.0)), likely=True):
            e.ret_void()
        with e.loop(0, n_pad) as key:
            with e.loop(0, strips, 1, [I1(0)]) as over:
                head, q0 = self.where(e, a, f, over.index)
                over.carry([e.or_(over.values[0], self.seen(e, a, f, self.place(a, f, head), q0, key.index))])
            with e.if_then(e.not_(over.values[0])):
                for name, tile, cols in tiles:
                    with e.loop(0, cols) as col:
                        e.put(e.narrow(e.num(0.0), self.packed), tile, self.cell(e, a, name, key.index, col.index))
        e.ret_void()
        return function

    def seen(self, e: Emit, a: Slots, f: Slots, place: Place, q0: Value, j: Value) -> Value:
        """Does any row of the strip at q0 see key n0 + j?"""
        n0 = f.word("n0")
        key = e.plus(n0, j)
        if self.simple:
            lows, highs = lane_interval(e, self.tile, place, self.terms[0], q0, (n0, f.word("n1")))
            ok = within(e, j, lows, highs)
        else:
            where = self.mask_words(place)
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

    # -- where errors are large, and sums have to be short

    def grows(self, e: Emit, a: Slots) -> Value:
        """Do rows see more keys from first to last, as under a causal mask?"""
        return e.icmp_signed("!=", a.word("descending"), I64(0))

    def starts_small(self, e: Emit, a: Slots, place: Place) -> Value:
        """Do rows see more and more keys, and the first ones few? Then these have the largest errors."""
        low, high = interval(e, place, self.terms[0], I64(0))
        return e.and_(self.grows(e, a), e.less(e.minus(high, low), LATER))

    def sees_many(self, e: Emit, a: Slots, place: Place, q0: Value) -> Value:
        """So many keys that the error of one of them drowns in the mean of all?"""
        low, high = interval(e, place, self.terms[0], q0)
        return e.icmp_signed(">=", e.minus(high, low), e.select(self.starts_small(e, a, place), I64(LATER), I64(LONG)))

    # -- tasks

    def locate(self, e: Emit, a: Slots, f: Slots, block: Value, pair: Value) -> None:
        """A query block of a (batch, group) pair: the lengths and starts of its sequence, its rows and strips."""
        blocks, groups = a.word("blocks"), a.word("groups")
        # with a causal mask later blocks cost more: start them first
        block = e.select(self.grows(e, a), e.minus(e.minus(blocks, 1), block), block)
        batch = e.over(pair, groups)
        Sq, Sk, q_start, k_start = a.word("Sq"), a.word("Sk"), I64(0), I64(0)
        if self.kernel.varlen:

            def bound(name: str, index: Value) -> Value:
                return e.sext(e.get(a.ptr(name), index, I32), I64)

            q_start, k_start = bound("cu_q", batch), bound("cu_k", batch)
            Sq = e.minus(bound("cu_q", e.plus(batch, 1)), q_start)
            Sk = e.minus(bound("cu_k", e.plus(batch, 1)), k_start)
        first = e.times(block, a.word("BM"))
        rows = e.least(a.word("BM"), e.minus(Sq, first))
        strips = e.over(e.plus(rows, self.tile.rows - 1), self.tile.rows)
        nth = e.rest(pair, groups)
        values = {"batch": batch, "nth_group": nth, "key_head": e.over(nth, a.word("parts"))}
        values |= {"Sq": Sq, "Sk": Sk, "q_start": q_start}
        values |= {"k_start": k_start, "m0": first, "rows": rows, "strips": strips}
        for name, value in values.items():
            f.set(name, value)

    def exponent(self, e: Emit, x: Value, y: Value) -> Value:
        """x - y of two scores or maxima, in units of log 2."""
        gap = e.fsub(x, y)
        return e.fadd(gap, gap) if self.kernel.score_unit == 2.0 else gap

    def natural_lse(self, e: Emit, m: Value, total: Value) -> Value:
        """ln2 · (m + log2 l), worked out in double and finite; -inf for a row that saw nothing."""
        if self.real.type == F32:
            m, total = e.fpext(m, F64), e.fpext(total, F64)
        unit, most = self.kernel.score_unit, F64(self.real.highest)
        value = e.fmul(e.fadd(m, e.fmul(log2(e, total), F64(1 / unit))), F64(LN2 * unit))
        if unit * LN2 > 1:  # else a finite m is a finite log-sum-exp
            value = e.select(e.fcmp_ordered(">", value, most), most, value)
            value = e.select(e.fcmp_ordered("<", value, e.fneg(most)), e.fneg(most), value)
        value = e.select(e.fcmp_ordered(">", total, F64(0.0)), value, e.fadd(total, F64(float("-inf"))))
        return e.fptrunc(value, F32) if self.real.type == F32 else value

    def sink_logit(self, e: Emit, sink: Value) -> Value:
        """A sink in the kernel's unit; one too large is cut off where it outweighs every score. (`least_lse` makes up for it.)"""
        logit = e.fmul(sink, e.num(LOG2E / self.kernel.score_unit))
        most = e.num(self.real.highest)
        return e.select(e.fcmp_ordered(">", logit, most), most, logit)

    def least_lse(self, e: Emit, sink: Value, lse: Value, rows: Value) -> None:
        """No log-sum-exp is below its sink."""
        with e.loop(0, rows) as over:
            value = e.get(lse, over.index)
            e.put(e.select(e.fcmp_ordered(">", sink, value), sink, value), lse, over.index)

    def row_offset(self, e: Emit, a: Slots, f: Slots, head: Value, position: Value) -> Value:
        """Index of a row in (B, Hq, Sq) statistics."""
        heads = e.times(a.word("groups"), a.word("group"))
        return e.plus(e.times(e.plus(e.times(self.batch_offset(f), heads), head), a.word("Sq")), position)

    def emit_worker(self, task: Any) -> None:
        """worker(args, buffer): take tasks from the shared counter until none is left."""
        e, (args, buffer), _ = self.unit.function("worker", [PTR, PTR], public=True)
        a = Slots(e, args, self.names)
        head, body, done = (e.append_basic_block(n) for n in ("next", "take", "over"))
        counter, tasks = a.ptr("counter"), a.word("tasks")
        matrix.enter(e, self.kernel.matrix)
        e.branch(head)
        e.position_at_end(head)
        number = e.atomic_rmw("add", counter, I64(1), "monotonic")
        e.cbranch(e.less(number, tasks), body, done)
        e.position_at_end(body)
        e.call(task, [args, buffer, number])
        e.branch(head)
        e.position_at_end(done)
        matrix.leave(e, self.kernel.matrix)
        e.ret_void()

