"""The backward kernel: probabilities recomputed from the saved log-sum-exp, nothing of size N × N.

    P = 2**(s - lse)      dV += Pᵀ dO       dP = dO Vᵀ      dS = P ∘ (dP - delta)      dQ += dS K      dK += dSᵀ Q

with delta = rowsum(dO ∘ O) - dLSE. A task is one block of query rows of one query head; it owns its dQ. Several tasks add to the
same rows of dK and dV, and must do so in a fixed order, or results would depend on timing: each task publishes how far along
the keys it is, and adds to a key block only when every earlier task of its key head has passed it. They follow each other
like the stages of a pipeline, so they seldom wait, and the sums are the same for any number of threads.

s and lse are in the kernel's unit. What rounding cuts off lse is put back as a factor of dO and delta, row by row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tilewise.backends.cpu.elementary import exp2
from tilewise.backends.cpu.frames import round_up
from tilewise.backends.cpu.ir import I32, I64, PTR, Emit, Value
from tilewise.backends.cpu.masking import Place, hull
from tilewise.backends.cpu.micro import by_panels, by_rows, put_strip, share, strip
from tilewise.backends.cpu.module import CHUNK, FRAME
from tilewise.backends.cpu.pack import emit_pack_panels, emit_row_dots, emit_unpack_strip
from tilewise.backends.cpu.scores import Modifier, drop
from tilewise.backends.cpu.slots import Slots
from tilewise.backends.cpu.spec import Kernel
from tilewise.backends.cpu.statistics import Keys, RowStatistics
from tilewise.backends.cpu.turns import PASSED, Turns


class Parts(NamedTuple):
    """Steps of one sum: of the columns of a score and of a dP, of the keys of a dQ."""

    scores: Value
    weights: Value
    queries: Value


class Backward(RowStatistics, Turns):
    """Emits one module; its methods are the functions of the kernel."""

    frame: tuple[str, ...] = (
        *(*FRAME, "head", "rank", "pair"),
        *("Q", "dO", "Q_panels", "dO_panels", "dQ", "P", "dS", "kept", "lse2", "delta", "factors", "ones", "tail"),
        *("K", "V", "K_panels", "from", "to"),
    )
    tiles = (("K", "k", "lanes"), ("V", "v", "lanes"), ("K_panels", "k", "panels"))
    cleaned = ("V", "K_panels")
    pace = 1  # keys whose P and dS are worked out together
    degree = 0  # of the polynomial in 2**x; 0: the Real type's own
    grain = 16
    """Keys updated together in a block that is not seen by all: masked rows are skipped so finely."""

    def __init__(self, kernel: Kernel, arch: str) -> None:
        super().__init__(kernel, arch)
        self.emit_helpers()
        self.unpack_strip = emit_unpack_strip(self.unit, self.tile, kernel.dtype, divide=False)
        self.row_dots = emit_row_dots(self.unit, kernel.dtype)
        self.emit_products()
        self.strip = self.emit_strip()
        self.wait = self.emit_wait()
        self.update = self.emit_update()
        self.statistics = self.emit_statistics()
        self.emit_worker(self.emit_task())

    def emit_products(self) -> None:
        self.pack_gradient = emit_pack_panels(self.unit, self.tile.rows, self.kernel.dtype, scaled=True)
        self.product = by_panels(self.unit, "product", self.tile)
        self.grow = by_rows(self.unit, "grow", self.tile)
        self.dq = by_panels(self.unit, "dq", self.tile, fold="add")

    def where(self, e: Emit, a: Slots, f: Slots, index: Value) -> tuple[Value, Value]:
        """A task has one query head."""
        return f.word("head"), e.plus(f.word("m0"), e.times(index, self.tile.rows))

    # -- one strip against one key block: P, dS and dQ

    def emit_strip(self) -> Any:
        """strip(args, frame, index): P and dS of the strip's rows, its share of dQ; the keys visited go to `from` and `to`."""
        e, (args, frame, index), function = self.unit.function("strip", [PTR, PTR, I64])
        a, f = self.open(e, args, frame)
        head, q0 = self.where(e, a, f, index)
        place = self.place(a, f, head)
        j0, j1, solid0, solid1, visible = self.extent(e, a, f, place, q0)
        j1 = e.most(j0, j1)
        e.put(j0, f.ptr("from"), index)
        e.put(j1, f.ptr("to"), index)
        # the updates of dK and dV run over whole rows of P and dS: what is not visited must be zero
        for start, stop in ((I64(0), j0), (j1, f.word("n_pad"))):
            self.clear(e, a, f, index, (start, stop))
        with e.if_then(e.less(j0, j1), likely=True):
            parts = self.parts(e, a, place, q0)
            self.multiply(e, a, f, index, (j0, j1), parts)
            if self.kernel.dropout:
                self.draw(e, f, place, q0, (j0, j1))
            modifier = None if self.kernel.plain else Modifier(e, self.kernel, place, q0)
            every = Keys(j0, j1, visible)
            apart = (every,) if modifier else (Keys(solid0, solid1), Keys(j0, solid0, visible), Keys(solid1, j1, visible))
            with e.if_else(self.is_far(e, f, index)) as (far, near):
                with far:
                    self.differentiate(e, a, f, index, every, modifier, far=True)
                with near:
                    for keys in apart:
                        with e.if_then(e.less(keys.start, keys.stop)):
                            self.differentiate(e, a, f, index, keys, modifier)
            self.add_dq(e, a, f, index, (j0, j1), parts)
        e.ret_void()
        return function

    def weights(self, e: Emit, a: Slots, f: Slots, index: Value) -> tuple[Value, ...]:
        """P and dS of a strip (rows of keys, columns of query rows) and the distance of their rows. The products leave scores and
        dP where P and dS will be."""
        column = e.times(index, self.tile.rows)
        return e.at(f.ptr("P"), column), e.at(f.ptr("dS"), column), a.word("PS")

    def clear(self, e: Emit, a: Slots, f: Slots, index: Value, keys: tuple[Value, Value]) -> None:
        P, dS, step = self.weights(e, a, f, index)
        with e.loop(*keys) as over:
            for buffer in (P, dS):
                put_strip(e, [e.const(0.0)] * self.tile.vectors, buffer, e.times(over.index, step))

    def parts(self, e: Emit, a: Slots, place: Place, q0: Value) -> Parts:
        """Sums are shorter for the first rows under a causal mask: they see few keys and have the largest errors."""
        sums = 4 if self.wide else 2
        usual = Parts(share(e, a.word("DP"), sums), share(e, a.word("DVP"), sums), a.word("BN"))
        if not self.simple:
            return usual
        first = e.and_(self.starts_small(e, a, place), e.not_(self.sees_many(e, a, place, q0)))
        short = Parts(share(e, a.word("DP"), 8), share(e, a.word("DVP"), 8), share(e, a.word("BN"), 2))
        return Parts(*(e.select(first, x, y) for x, y in zip(short, usual, strict=True)))

    def multiply(self, e: Emit, a: Slots, f: Slots, index: Value, keys: tuple[Value, Value], parts: Parts) -> None:
        """Scores and dP of keys [j0, j1)."""
        R, (P, dS, step) = self.tile.rows, self.weights(e, a, f, index)
        for A, B, width, C, part in (("Q", "K", "DP", P, parts.scores), ("dO", "V", "DVP", dS, parts.weights)):
            rows = e.at(f.ptr(A), e.times(index, e.times(a.word(width), R)))
            panel = e.times(a.word(width), self.tile.keys)
            operands = [rows, I64(R), f.ptr(B), panel, C, step]
            e.call(self.product, [I64(0), a.word(width), *operands, *self.groups(e, *keys), part])

    def add_dq(self, e: Emit, a: Slots, f: Slots, index: Value, keys: tuple[Value, Value], parts: Parts) -> None:
        R, (_, dS, step) = self.tile.rows, self.weights(e, a, f, index)
        dQ = e.at(f.ptr("dQ"), e.times(index, e.times(a.word("DP"), R)))
        last = e.over(a.word("DP"), self.tile.keys)
        e.call(self.dq, [*keys, dS, step, f.ptr("K_panels"), self.panel(e, a), dQ, I64(R), I64(0), last, parts.queries])

    def look(self, e: Emit, where: tuple[Value, ...], j: Value) -> tuple[list[Value], list[Value]]:
        """Scores and dP of one key."""
        P, dS, step = where
        return strip(e, self.tile, P, e.times(j, step)), strip(e, self.tile, dS, e.times(j, step))

    def keep(self, e: Emit, where: tuple[Value, ...], j: Value, found: list[tuple[list[Value], list[Value]]]) -> None:
        """P and dS of `pace` keys from j on."""
        P, dS, step = where
        ((p, ds),) = found
        put_strip(e, p, P, e.times(j, step))
        put_strip(e, ds, dS, e.times(j, step))

    def draw(self, e: Emit, f: Slots, place: Place, q0: Value, keys: tuple[Value, Value]) -> None:
        """All ones in kept[j][lane] where dropout spares the weight."""
        kept_ptr, kind = f.ptr("kept"), e.vtype(e.real.bits)

        def visit(j: Value, i: int, kept: Value) -> None:
            e.vput(e.sext(kept, kind), kept_ptr, e.plus(e.times(j, self.tile.rows), i * e.lanes))

        drop(e, self.tile, place, q0, f.word("n0"), keys, visit)

    def differentiate(
        self, e: Emit, a: Slots, f: Slots, index: Value, keys: Keys, modifier: Modifier | None, far: bool = False
    ) -> None:
        """Scores and dP of keys [j0, j1) become P and dS. No weight is above 1, but where lse is `far` that has to be seen to."""
        row, where, visible = e.times(index, self.tile.rows), self.weights(e, a, f, index), keys.visible
        lse, delta = (strip(e, self.tile, f.ptr(name), row) for name in ("lse2", "delta"))

        def one(j: Value) -> tuple[list[Value], list[Value]]:
            kernel, tile, zero = self.kernel, self.tile, e.const(0.0)
            s, dp = self.look(e, where, j)
            seen, tanhs = visible(e, j) if visible else None, None
            if modifier:
                s, unmasked, tanhs = modifier.apply(s, e.plus(f.word("n0"), j))
                if unmasked and seen:
                    seen = [e.and_(x, y) for x, y in zip(seen, unmasked, strict=True)]
            gaps = [self.exponent(e, x, y) for x, y in zip(s, lse, strict=True)]
            p = exp2(e, [e.at_most(x, zero) for x in gaps] if far else gaps, self.degree)
            kept = p
            if kernel.dropout:
                words = strip(e, tile, f.ptr("kept"), e.times(j, tile.rows), e.real.bits)
                spared = [e.icmp_signed("!=", w, e.iconst(0)) for w in words]
                dp = [e.select(ok, x, zero) for ok, x in zip(spared, dp, strict=True)]
                kept = [e.select(ok, x, zero) for ok, x in zip(spared, p, strict=True)]
            ds = [e.fmul(x, e.fsub(y, z)) for x, y, z in zip(p, dp, delta, strict=True)]
            if seen:
                kept = [e.select(ok, x, zero) for ok, x in zip(seen, kept, strict=True)]
                ds = [e.select(ok, x, zero) for ok, x in zip(seen, ds, strict=True)]
            if kernel.dbias:
                self.add_dbias(e, a, f, index, j, ds)
            if tanhs:
                ds = [e.fmul(x, e.fsub(e.const(1.0), e.fmul(t, t))) for x, t in zip(ds, tanhs, strict=True)]
                if seen:  # a hidden score may be NaN, and 0 · NaN is not 0
                    ds = [e.select(ok, x, zero) for ok, x in zip(seen, ds, strict=True)]
            return kept, ds

        with e.loop(keys.start, keys.stop, self.pace) as over:
            self.keep(e, where, over.index, [one(e.plus(over.index, n)) for n in range(self.pace)])

    def add_dbias(self, e: Emit, a: Slots, f: Slots, index: Value, j: Value, ds: list[Value]) -> None:
        """dBias += dS for the strip's rows and the block's keys; the host lets no two tasks share a cell at the same time."""
        head, q0 = self.where(e, a, f, index)
        rows = e.least(self.tile.rows, e.minus(f.word("Sq"), q0))
        key = e.plus(f.word("n0"), j)
        base = e.plus(e.times(f.word("batch"), a.word("dbias_b")), e.times(head, a.word("dbias_h")))
        base = e.plus(base, e.times(key, a.word("dbias_d")))
        with e.if_then(e.less(key, f.word("n1"))):
            for r in range(self.tile.rows):
                with e.if_then(e.less(r, rows)):  # dS is the derivative by the natural score, to which the bias is added
                    cell = e.at(a.ptr("dbias"), e.plus(base, e.times(e.plus(q0, r), a.word("dbias_s"))))
                    value = e.extract_element(ds[r // e.lanes], I32(r % e.lanes))
                    e.put(e.fadd(e.get(cell), value), cell)

    # -- dK and dV

    def emit_update(self) -> Any:
        """update(args, frame): dV += Pᵀ dO and dK += dSᵀ Q for the keys of the tile, each from the strips that see it."""
        e, (args, frame), function = self.unit.function("update", [PTR, PTR])
        a, f = self.open(e, args, frame)
        row = e.plus(e.times(self.batch_offset(f), a.word("groups")), f.word("nth_group"))
        row = e.plus(e.times(row, a.word("Sk")), f.word("k_start"), f.word("n0"))
        n_pad = f.word("n_pad")
        with e.loop(0, f.word("strips"), 1, [I64(0), n_pad]) as over:  # keys that every strip sees
            starts, stops = (e.get(f.ptr(n), over.index, I64) for n in ("from", "to"))
            over.carry([e.most(over.values[0], starts), e.least(over.values[1], stops)])
        whole = e.and_(e.icmp_signed("==", over.values[0], I64(0)), e.icmp_signed("==", over.values[1], n_pad))
        step = e.select(whole, n_pad, I64(self.grain))
        with e.loop(0, n_pad, step) as keys:
            ja, jb = keys.index, e.least(e.plus(keys.index, step), n_pad)
            with e.loop(0, f.word("strips"), 1, [f.word("strips"), I64(0)]) as over:
                starts, stops = (e.get(f.ptr(n), over.index, I64) for n in ("from", "to"))
                sees = e.and_(e.less(starts, jb), e.less(ja, stops))
                first = e.select(sees, e.least(over.values[0], over.index), over.values[0])
                last = e.select(sees, e.plus(over.index, 1), over.values[1])
                over.carry([first, last])
            first, last = over.values
            with e.if_then(e.less(first, last)):
                for target, width, tile, panels in (("dv", "DVR", "P", "dO_panels"), ("dk", "DR", "dS", "Q_panels")):
                    out = e.at(a.ptr(target), e.times(row, a.word(width)))
                    with e.if_then(e.icmp_signed("!=", a.word(target), I64(0))):
                        self.grow_slice(e, a, f, (ja, jb), (first, last), (f.ptr(tile), f.ptr(panels), out, a.word(width)))
        e.ret_void()
        return function

    def grow_slice(
        self, e: Emit, a: Slots, f: Slots, keys: tuple[Value, Value], strips: tuple[Value, Value], where: tuple[Value, ...]
    ) -> None:
        """Rows [ja, jb) of one gradient. Rows padded beyond n1 belong to somebody else: the last register tile takes a detour."""
        R, J = self.tile.rows, self.tile.keys
        (ja, jb), (first, last) = keys, strips
        tile, panels, out, width = where
        rows = e.times(first, R), e.times(e.minus(last, first), R)
        real = e.minus(f.word("n1"), f.word("n0"))
        whole = e.least(jb, e.round_down(real, J))
        with e.loop(0, width, R) as col:
            operands, to = (tile, panels, col.index), e.at(out, col.index)
            self.grow_rows(e, a, operands, rows, (ja, whole), (to, width), ja)
            with e.if_then(e.less(whole, jb), likely=False):
                tail = f.ptr("tail")
                with e.loop(0, J * R) as cell:
                    e.put(e.num(0.0), tail, cell.index)
                self.grow_rows(e, a, operands, rows, (whole, e.plus(whole, J)), (tail, I64(R)), I64(0))
                with e.loop(0, e.minus(real, whole)) as key:
                    line = e.at(to, e.times(e.plus(whole, key.index), width))
                    old, new = strip(e, self.tile, line), strip(e, self.tile, tail, e.times(key.index, R))
                    put_strip(e, [e.fadd(x, y) for x, y in zip(old, new, strict=True)], line)

    def grow_rows(
        self,
        e: Emit,
        a: Slots,
        operands: tuple[Value, Value, Value],
        rows: tuple[Value, Value],
        keys: tuple[Value, Value],
        out: tuple[Value, Value],
        line: Value,
    ) -> None:
        """Gradient rows from `line` on += weights of keys [ja, jb) by R columns of `count` query rows from the first on.

        With wide vectors rows come in chunks, the last first: short sums are more exact, and with AVX-512 up to 3 % faster.
        """
        (tile, panels, col), (row0, count), (ja, jb), (to, width) = operands, rows, keys, out
        R, step, C = self.tile.rows, a.word("PS"), e.at(to, e.times(line, width))

        def grow(row: Value, some: Value) -> None:
            A = e.at(panels, e.plus(e.times(col, a.word("BM")), e.times(row, R)))
            B = e.at(tile, e.plus(row, e.times(ja, step)))
            e.call(self.grow, [some, A, B, step, C, width, I64(0), e.minus(jb, ja)])

        if not self.wide:
            grow(row0, count)
            return
        chunk = round_up(CHUNK, R)
        chunks = e.over(e.plus(count, chunk - 1), chunk)
        with e.loop(0, chunks) as over:
            start = e.times(chunk, e.minus(e.minus(chunks, 1), over.index))
            grow(e.plus(row0, start), e.least(chunk, e.minus(count, start)))

    # -- tasks

    def emit_task(self) -> Any:
        """task(args, frame, number): one query block of one query head."""
        e, (args, frame, number), function = self.unit.function("task", [PTR, PTR, I64])
        a, f = self.open(e, args, frame)
        # neighbours in the queue belong to different key heads, so that they do not wait for each other
        blocks, pairs = a.word("blocks"), a.word("pairs")
        pair, rank = e.rest(number, pairs), e.over(number, pairs)
        self.locate(e, a, f, e.rest(rank, blocks), pair)
        f.set("pair", pair)
        f.set("rank", rank)
        f.set("head", e.plus(e.times(f.word("nth_group"), a.word("group")), e.over(rank, blocks)))
        with e.if_then(e.less(0, f.word("rows")), likely=True):
            self.start(e, a, f)
            first, rows = f.word("m0"), f.word("rows")
            low, high = hull(e, self.place(a, f, f.word("head")), self.terms, first, e.plus(first, rows, -1))
            BN = a.word("BN")
            with e.loop(e.times(e.over(low, BN), BN), high, BN) as block:
                f.set("n0", e.most(block.index, low))
                f.set("n1", e.least(e.plus(block.index, BN), high))
                self.publish(e, a, f, e.over(block.index, BN))
                self.block(e, a, f, e.over(block.index, BN))
            self.finish(e, a, f)
        self.publish(e, a, f, I64(PASSED))
        e.ret_void()
        return function

    def block(self, e: Emit, a: Slots, f: Slots, number: Value) -> None:
        go, after = e.append_basic_block("visit"), e.append_basic_block("skip")
        if self.simple:
            e.branch(go)
        else:
            e.cbranch(self.block_alive(e, a, f, I64(1)), go, after)
        e.position_at_end(go)
        self.fetch_tiles(e, a, f)
        if self.clean:
            e.call(self.clean, [a.pointer, f.pointer, f.word("strips")])
        with e.loop(0, f.word("strips")) as over:
            e.call(self.strip, [a.pointer, f.pointer, over.index])
        e.call(self.wait, [a.pointer, f.pointer, number])
        e.call(self.update, [a.pointer, f.pointer])
        e.branch(after)
        e.position_at_end(after)

    def start(self, e: Emit, a: Slots, f: Slots) -> None:
        """Lay out the frame, work out each row's statistics, pack Q and dO as strips and as panels."""
        self.lay_out(e, f, self.sizes(e, a))
        e.call(self.statistics, [a.pointer, f.pointer])
        self.pack_rows(e, a, f)
        with e.loop(0, e.times(e.times(f.word("strips"), self.tile.rows), a.word("DP")), e.lanes) as cell:
            e.vput(e.const(0.0), f.ptr("dQ"), cell.index)

    def sizes(self, e: Emit, a: Slots) -> dict[str, int | Value]:
        """Elements of the frame's buffers."""
        R, BM, BN, DP, DVP = self.tile.rows, a.word("BM"), a.word("BN"), a.word("DP"), a.word("DVP")
        sizes = {"Q": e.times(BM, DP), "dO": e.times(BM, DVP), "Q_panels": e.times(BM, a.word("DR"))}
        sizes |= {"dO_panels": e.times(BM, a.word("DVR")), "dQ": e.times(BM, DP)}
        sizes |= {name: e.times(BN, a.word("PS")) for name in ("P", "dS")}
        sizes |= {"kept": e.times(BN, R), "W": e.times(BN, R), "lse2": BM, "delta": BM, "factors": BM, "ones": BM}
        sizes |= {"tail": I64(self.tile.keys * R), "K": e.times(BN, DP), "V": e.times(BN, DVP), "K_panels": e.times(BN, DP)}
        # 64-bit words, at most twice as large as an element
        return sizes | {"from": e.times(BM, 2), "to": e.times(BM, 2)}

    def rows_of(self, e: Emit, a: Slots, f: Slots, name: str) -> list[Value]:
        """The block's rows of q or do: their address, strides and number."""
        source = self.source(e, a, f, name, f.word("head"), e.plus(f.word("q_start"), f.word("m0")))
        return [source, a.word(f"{name}_s"), a.word(f"{name}_d"), f.word("rows")]

    def pack_rows(self, e: Emit, a: Slots, f: Slots) -> None:
        R, BM = self.tile.rows, a.word("BM")
        all_rows = e.times(f.word("strips"), R)
        for name, buffer, panels, cols, width, factors in (
            ("q", "Q", "Q_panels", "D", "DP", "ones"),
            ("do", "dO", "dO_panels", "Dv", "DVP", "factors"),
        ):
            rows = self.rows_of(e, a, f, name)
            e.call(self.pack_strips, [f.ptr(buffer), a.word(width), *rows, a.word(cols), f.ptr(factors)])
            if factors == "ones":
                with e.loop(0, BM) as over:  # from here on Q is the factor of dK
                    e.put(a.num("ds_factor"), f.ptr("ones"), over.index)
            e.call(self.pack_gradient, [f.ptr(panels), e.times(BM, R), *rows, all_rows, a.word(cols), f.ptr(factors)])

    def finish(self, e: Emit, a: Slots, f: Slots) -> None:
        """dQ goes out, times the factor of its scores (which `ones` holds by now)."""
        R = self.tile.rows
        with e.if_then(e.icmp_signed("!=", a.word("dq"), I64(0))), e.loop(0, f.word("strips")) as over:
            row = e.times(over.index, R)
            position = e.plus(f.word("q_start"), f.word("m0"), row)
            to = self.source(e, a, f, "dq", f.word("head"), position)
            dQ = e.at(f.ptr("dQ"), e.times(row, a.word("DP")))
            left = e.least(R, e.minus(f.word("rows"), row))
            e.call(self.unpack_strip, [to, a.word("dq_s"), dQ, left, a.word("D"), f.ptr("ones")])
