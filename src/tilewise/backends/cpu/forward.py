"""The forward kernel: query blocks outside, key blocks inside, strips of R rows innermost.

For one strip the state over the keys seen so far is, in units of log 2 (or, with a bias, of twice that: `Kernel.score_unit`),

    m >= max s (an integer),   l = Σ 2**(s - m),   O = Σ 2**(s - m) v

m is kept an integer, so rescaling by alpha = 2**(m_old - m_new) is exact, and s - m splits into integer and fraction without
error. A task is one block of query positions of one key head: all query heads of the group share the packed K and V tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tilewise.backends.cpu.elementary import exp2
from tilewise.backends.cpu.ir import I64, PTR, Emit, Value
from tilewise.backends.cpu.masking import Place, hull
from tilewise.backends.cpu.micro import by_panels, put_strip, share, strip
from tilewise.backends.cpu.module import FRAME
from tilewise.backends.cpu.pack import emit_unpack_strip
from tilewise.backends.cpu.scores import Modifier, drop
from tilewise.backends.cpu.slots import Slots
from tilewise.backends.cpu.softmax import Softmax
from tilewise.backends.cpu.spec import Kernel


class Parts(NamedTuple):
    """Steps of one sum: of the columns of a score, of the keys of an output."""

    scores: Value
    values: Value


class Forward(Softmax):
    """Emits one module; its methods are the functions of the kernel."""

    frame: tuple[str, ...] = (
        *(*FRAME, "split", "Q", "O", "m", "l", "P", "top", "alpha", "factors", "K", "V"),
        *("reach", "longest", "sums", "again"),
    )
    tiles = (("K", "k", "lanes"), ("V", "v", "panels"))
    cleaned = ("V",)
    can_be_calm = True

    def __init__(self, kernel: Kernel, arch: str) -> None:
        super().__init__(kernel, arch)
        self.emit_helpers()
        self.unpack_quotient = emit_unpack_strip(self.unit, self.tile, kernel.dtype, divide=True)
        self.calm = self.can_be_calm and kernel.plain and self.simple  # what is hidden from all could be wild
        self.emit_products()
        if self.calm:
            self.weigh_calm = self.emit_weigh_calm("weigh_calm", self.real.degree - 1, chains=1)
            self.weigh_few = self.emit_weigh_calm("weigh_few", self.real.degree, chains=2)
            self.measure = self.emit_measure()
            self.vanished = self.emit_vanished()
        self.weigh = self.emit_weigh()
        self.strip = self.emit_strip()
        self.finish = self.emit_finish()
        self.merge = self.emit_merge()
        self.emit_worker(self.emit_task())

    def emit_products(self) -> None:
        self.product = by_panels(self.unit, "scores", self.tile)
        self.pv = by_panels(self.unit, "values", self.tile, fold="scale")

    # -- one strip against one key block

    def emit_strip(self) -> Any:
        """strip(args, frame, index)."""
        e, (args, frame, index), function = self.unit.function("strip", [PTR, PTR, I64])
        a, f = self.open(e, args, frame)
        head, q0 = self.where(e, a, f, index)
        place = self.place(a, f, head)
        j0, j1, solid0, solid1, visible = self.extent(e, a, f, place, q0)
        with e.if_then(e.icmp_signed(">=", j0, j1), likely=False):
            e.ret_void()
        R = self.tile.rows
        put_strip(e, [e.const(float("-inf"))] * self.tile.vectors, f.ptr("top"))
        put_strip(e, [e.const(0.0)] * self.tile.vectors, f.ptr("sums"))
        edges = ((j0, solid0), (solid1, j1))
        many = self.sees_many(e, a, place, q0) if self.calm else None
        parts = self.parts(e, a, place, many)
        if self.kernel.plain:
            for start, stop in edges:
                with e.if_then(e.less(start, stop), likely=False):
                    self.multiply(e, a, f, index, (start, stop), parts)
                    self.mask_pass(e, a, f, None, start, stop, visible)
            after = e.append_basic_block("after")
            if self.calm:
                with e.if_then(self.is_calm(e, f, index), likely=True):
                    self.settle(e, f, index, self.bounds(e, f, index))
                    self.multiply(e, a, f, index, (solid0, solid1), parts)
                    self.lift(e, f, index, edges)
                    with e.if_else(many) as (usual, few):
                        for branch, weigh in ((usual, self.weigh_calm), (few, self.weigh_few)):
                            with branch:
                                e.call(weigh, [frame, index, j0, j1])
                    e.branch(after)
            self.multiply(e, a, f, index, (solid0, solid1), parts)
            look = self.looker(e, a, f)
            with e.loop(solid0, solid1, 1, strip(e, self.tile, f.ptr("top"))) as over:
                over.carry([e.top(t, x) for t, x in zip(over.values, look(over.index, True), strict=True)])
            self.settle(e, f, index, over.values)
            e.call(self.weigh, [frame, index, j0, j1])
            e.branch(after)
            e.position_at_end(after)
        else:
            self.multiply(e, a, f, index, (j0, j1), parts)
            self.mask_pass(e, a, f, Modifier(e, self.kernel, place, q0), j0, j1, visible)
            self.settle(e, f, index, strip(e, self.tile, f.ptr("top")))
            e.call(self.weigh, [frame, index, j0, j1])
        l_ptr, alpha = e.at(f.ptr("l"), e.times(index, R)), strip(e, self.tile, f.ptr("alpha"))
        old, new = strip(e, self.tile, l_ptr), strip(e, self.tile, f.ptr("sums"))
        put_strip(e, [e.mad(x, y, z) for x, y, z in zip(old, alpha, new, strict=True)], l_ptr)
        if self.kernel.dropout:
            self.drop_pass(e, place, q0, f, j0, j1)
        self.gather_values(e, a, f, index, (j0, j1), parts)
        e.ret_void()
        return function

    def multiply(self, e: Emit, a: Slots, f: Slots, index: Value, keys: tuple[Value, Value], parts: Parts) -> None:
        """Scores of keys [j0, j1)."""
        R, DP = self.tile.rows, a.word("DP")
        Q = e.at(f.ptr("Q"), e.times(index, e.times(DP, R)))
        operands = [Q, I64(R), f.ptr("K"), e.times(DP, self.tile.keys), f.ptr("P"), I64(R)]
        e.call(self.product, [I64(0), DP, *operands, *self.groups(e, *keys), parts.scores])

    def looker(self, e: Emit, a: Slots, f: Slots) -> Callable[[Value, bool], list[Value]]:
        """`look(j, keep)`: the scores of key j as the product left them, in units of log 2; `keep` if they will be read again."""
        P, R = f.ptr("P"), self.tile.rows
        return lambda j, keep: strip(e, self.tile, P, e.times(j, R))

    def gather_values(self, e: Emit, a: Slots, f: Slots, index: Value, keys: tuple[Value, Value], parts: Parts) -> None:
        """O = O·alpha + P V."""
        R, DVP = self.tile.rows, a.word("DVP")
        O = e.at(f.ptr("O"), e.times(index, e.times(DVP, R)))
        last = e.over(DVP, self.tile.keys)
        weights = [f.ptr("P"), I64(R), f.ptr("V"), self.panel(e, a)]
        e.call(self.pv, [*keys, *weights, O, I64(R), I64(0), last, parts.values, f.ptr("alpha")])

    def parts(self, e: Emit, a: Slots, place: Place, many: Value | None) -> Parts:
        """Sums are as short as errors ask for. Rows of few keys have the largest; where there are such rows before, those of many
        keys need no care at all."""
        DP, BN = a.word("DP"), a.word("BN")
        if many is None:
            return Parts(share(e, DP, 2), BN)
        usual = share(e, DP, 4 if self.wide else 2)
        scores = e.select(self.starts_small(e, a, place), e.select(many, DP, share(e, DP, 4)), usual)
        return Parts(scores, e.select(many, BN, share(e, BN, 4)))

    def mask_pass(
        self, e: Emit, a: Slots, f: Slots, modifier: Modifier | None, j0: Value, j1: Value, visible: Any
    ) -> None:
        """Scores of keys [j0, j1) changed, -inf where hidden; their maximum joins `top`."""
        P, R, minus_inf, look = f.ptr("P"), self.tile.rows, e.const(float("-inf")), self.looker(e, a, f)
        with e.loop(j0, j1, 1, strip(e, self.tile, f.ptr("top"))) as over:
            at = e.times(over.index, R)
            s, seen = look(over.index, False), visible(e, over.index)
            if modifier:
                s, unmasked, _ = modifier.apply(s, e.plus(f.word("n0"), over.index))
                if unmasked:
                    seen = [e.and_(x, y) for x, y in zip(seen, unmasked, strict=True)]
            s = [e.select(ok, x, minus_inf) for ok, x in zip(seen, s, strict=True)]
            put_strip(e, s, P, at)
            over.carry([e.top(t, x) for t, x in zip(over.values, s, strict=True)])
        put_strip(e, over.values, f.ptr("top"))

    def drop_pass(self, e: Emit, place: Place, q0: Value, f: Slots, j0: Value, j1: Value) -> None:
        P = f.ptr("P")

        def visit(j: Value, i: int, kept: Value) -> None:
            at = e.plus(e.times(j, self.tile.rows), i * e.lanes)
            e.vput(e.select(kept, e.vget(P, at), e.const(0.0)), P, at)

        drop(e, self.tile, place, q0, f.word("n0"), (j0, j1), visit)

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
        has_sink = e.icmp_unsigned("!=", e.ptrtoint(sinks, I64), I64(0))
        with e.if_then(has_sink, likely=False):
            self.join_sink(e, e.get(sinks, head), index, a, f)
        keep = e.splat(a.num("keep_factor"))
        for i in range(tile.vectors):  # dropout's survivors were not scaled: the denominator makes up for it
            e.vput(e.fmul(e.vget(l_ptr, i * e.lanes), keep), factors, i * e.lanes)
        rows = e.least(R, e.minus(e.plus(f.word("m0"), f.word("rows")), q0))
        position = e.plus(f.word("q_start"), q0)
        O = e.at(f.ptr("O"), e.times(index, e.times(a.word("DVP"), R)))
        to = self.source(e, a, f, "o", head, position)
        e.call(self.unpack_quotient, [to, a.word("o_s"), O, rows, a.word("Dv"), factors])
        lse = e.at(a.ptr("lse"), self.row_offset(e, a, f, head, position))
        with e.loop(0, rows) as over:
            e.put(self.natural_lse(e, e.get(m_ptr, over.index), e.get(l_ptr, over.index)), lse, over.index)
        with e.if_then(has_sink, likely=False):
            self.least_lse(e, e.get(sinks, head), lse, rows)
        e.ret_void()
        return function

    def join_sink(self, e: Emit, sink: Value, index: Value, a: Slots, f: Slots) -> None:
        """One more logit in the denominator: l' = l·2**(m - m') + 2**(sink - m')."""
        tile, row = self.tile, e.times(index, self.tile.rows)
        m_ptr, l_ptr = e.at(f.ptr("m"), row), e.at(f.ptr("l"), row)
        O = e.at(f.ptr("O"), e.times(index, e.times(a.word("DVP"), tile.rows)))
        logit = e.splat(self.sink_logit(e, sink))
        factors = []
        for i in range(tile.vectors):
            total = e.vget(l_ptr, i * e.lanes)
            old = self.known(e, e.vget(m_ptr, i * e.lanes), total)
            m = e.top(old, self.level(e, logit))
            (alpha,), (sink_share,) = self.shrink(e, [self.exponent(e, old, m)]), exp2(e, [self.exponent(e, logit, m)])
            e.vput(e.mad(total, alpha, sink_share), l_ptr, i * e.lanes)
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
            total, more = e.vget(l_ptr, i * e.lanes), e.vget(e.at(l_in, row), i * e.lanes)
            old = self.known(e, e.vget(m_ptr, i * e.lanes), total)
            other = self.known(e, e.vget(e.at(m_in, row), i * e.lanes), more)
            m = e.top(old, other)
            mine, his = self.shrink(e, [self.exponent(e, old, m), self.exponent(e, other, m)])
            ours.append(mine)
            theirs.append(his)
            e.vput(e.mad(more, his, e.fmul(total, mine)), l_ptr, i * e.lanes)
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

    def emit_task(self) -> Any:
        """task(args, frame, number): one query block of one key head, or one share of its keys."""
        e, (args, frame, number), function = self.unit.function("task", [PTR, PTR, I64])
        a, f = self.open(e, args, frame)
        splits = a.word("splits")
        f.set("split", e.rest(number, splits))
        rest, blocks, pairs = e.over(number, splits), a.word("blocks"), a.word("pairs")
        # blocks of a head follow each other and find its K and V near; where they differ in cost, the longest of all heads are
        # first, so that threads end together
        uneven = self.grows(e, a)
        block = e.select(uneven, e.over(rest, pairs), e.rest(rest, blocks))
        self.locate(e, a, f, block, e.select(uneven, e.rest(rest, pairs), e.over(rest, blocks)))
        with e.if_then(e.icmp_signed("<=", f.word("rows"), I64(0)), likely=False):
            e.ret_void()
        strips = e.times(f.word("strips"), a.word("group"))
        if self.calm:
            f.set("again", 0)
        attempt = e.append_basic_block("attempt")
        e.branch(attempt)
        e.position_at_end(attempt)
        self.start(e, a, f, strips)
        first, rows = f.word("m0"), f.word("rows")
        low, high = hull(e, self.place(a, f, I64(0)), self.terms, first, e.plus(first, rows, -1))
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
        if self.calm:
            first_time = e.icmp_signed("==", f.word("again"), I64(0))
            lost = e.icmp_signed("!=", e.call(self.vanished, [args, frame, strips, begin, end]), I64(0))
            with e.if_then(e.and_(first_time, lost), likely=False):
                f.set("again", 1)
                e.branch(attempt)
        with e.if_then(alone, likely=True):
            with e.loop(0, strips) as over:
                e.call(self.finish, [args, frame, over.index])
            e.ret_void()
        self.share(e, a, f, number, strips)
        e.ret_void()
        return function

    def start(self, e: Emit, a: Slots, f: Slots, strips: Value) -> None:
        """Lay out the frame, pack Q, set m, l and O to those of no keys."""
        tile, R, DVP = self.tile, self.tile.rows, a.word("DVP")
        self.lay_out(e, f, self.sizes(e, a))
        with e.loop(0, a.word("BM")) as over:
            e.put(a.num("q_factor"), f.ptr("factors"), over.index)
        with e.loop(0, a.word("group")) as over:
            first = e.times(over.index, f.word("strips"))
            head, _ = self.where(e, a, f, first)
            source = self.source(e, a, f, "q", head, e.plus(f.word("q_start"), f.word("m0")))
            self.pack_queries(e, a, f, first, [source, a.word("q_s"), a.word("q_d"), f.word("rows"), a.word("D")])
        with e.loop(0, strips) as over:
            row = e.times(over.index, R)
            put_strip(e, [e.const(self.real.lowest)] * tile.vectors, f.ptr("m"), row)
            put_strip(e, [e.const(0.0)] * tile.vectors, f.ptr("l"), row)
            if self.calm:
                self.reach(e, a, f, over.index)
        with e.loop(0, e.times(strips, e.times(DVP, R)), e.lanes) as cell:
            e.vput(e.const(0.0), f.ptr("O"), cell.index)

    def sizes(self, e: Emit, a: Slots) -> dict[str, int | Value]:
        """Elements of the frame's buffers."""
        R, DP, DVP, BN = self.tile.rows, a.word("DP"), a.word("DVP"), a.word("BN")
        rows = e.times(a.word("BM"), a.word("group"))
        sizes = {"Q": e.times(rows, DP), "O": e.times(rows, DVP), "m": rows, "l": rows, "P": e.times(BN, R)}
        sizes |= {"W": e.times(BN, R), "top": I64(R), "alpha": I64(R), "factors": a.word("BM")}
        sizes |= {"K": e.times(BN, DP), "V": e.times(BN, DVP), "reach": rows, "longest": I64(1)}
        return sizes | {"sums": I64(R)}

    def pack_queries(self, e: Emit, a: Slots, f: Slots, first: Value, rows: list[Value]) -> None:
        """One head's rows, as strips from `first` on."""
        to = e.at(f.ptr("Q"), e.times(first, e.times(a.word("DP"), self.tile.rows)))
        e.call(self.pack_strips, [to, a.word("DP"), *rows, f.ptr("factors")])

    def block(self, e: Emit, a: Slots, f: Slots, strips: Value) -> None:
        """Every strip against the keys [n0, n1)."""
        go, after = e.append_basic_block("visit"), e.append_basic_block("skip")
        if self.simple:
            e.branch(go)
        else:
            e.cbranch(self.block_alive(e, a, f, a.word("group")), go, after)
        e.position_at_end(go)
        self.fetch_tiles(e, a, f)
        if self.clean:
            e.call(self.clean, [a.pointer, f.pointer, strips])
        if self.calm:
            e.call(self.measure, [a.pointer, f.pointer])
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
        o_cells = e.times(used, a.word("DVP"))
        spans = ((f.ptr("m"), I64(0), used), (f.ptr("l"), rows, used), (f.ptr("O"), e.times(rows, 2), o_cells))
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
