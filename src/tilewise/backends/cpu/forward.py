"""The forward kernel: query blocks outside, key blocks inside, strips of R rows innermost.

For one strip the state over the keys seen so far is, in units of log 2 (or, with a bias, of twice that: `Kernel.score_unit`),

    m >= max s (an integer),   l = Σ 2**(s - m),   O = Σ 2**(s - m) v

m is kept an integer, so rescaling by alpha = 2**(m_old - m_new) is exact, and s - m splits into integer and fraction without
error. A task is one block of query positions of one key head: all query heads of the group share the packed K and V tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tilewise.backends.cpu import elementary, micro, pack
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.ir import I64, PTR, Pointer, Strip
from tilewise.backends.cpu.masking import Interval, SeqInfo, hull
from tilewise.backends.cpu.module import KeyRange, kernel_function
from tilewise.backends.cpu.parts import KeyParts
from tilewise.backends.cpu.scores import Modifier, drop
from tilewise.backends.cpu.softmax import Softmax
from tilewise.backends.cpu.spec import Kernel
from tilewise.backends.cpu.splits import publish_split


class Chunks(NamedTuple):
    """Steps of one sum: of the columns of a score, of the keys of an output."""

    scores: Any
    values: Any


class Forward(Softmax, KeyParts):
    """Emits one module; its methods are the functions of the kernel."""

    task = ("split", "lane", "from_key", "to_key")
    tiles: tuple[tuple[str, str, str], ...] = (("K", "k", "lanes"), ("V", "v", "panels"))
    cleaned: tuple[str, ...] = ("V",)
    can_be_bounded = True

    def __init__(self, kernel: Kernel, arch: str) -> None:
        super().__init__(kernel, arch)
        self.emit_helpers()
        self.unpack_quotient = pack.emit_unpack_strip(self.unit, kernel.out, divide=True)
        # what is hidden from all could be out of bounds; and what others see of a block moves the bound
        self.bounded = self.can_be_bounded and kernel.plain and self.simple and not kernel.invariant
        self.split_strips()
        self.emit_products()
        if self.bounded:
            self.bounded_step, self.few_keys_step = self.emit_bounded_steps().values()
            self.k_norm = self.emit_k_norm()
            self.vanished = self.emit_vanished()
        self.softmax_step = self.emit_softmax_step()
        self.strip = self.emit_strip()
        if self.half:
            self.emit_halves()
        self.steps = self.emit_steps() if self.half else self.strip
        self.finish = self.emit_finish()
        self.merge = self.emit_merge()
        self.emit_worker(self.emit_task())

    def emit_products(self) -> None:
        self.qk = micro.by_panels(self.unit, "scores")
        self.pv = micro.by_panels(self.unit, "values", fold="scale")

    # -- one strip against one key block

    @kernel_function(I64)
    def emit_strip(self, e: Emit, index: Any) -> None:
        """strip(args, frame, index): scores, softmax and O = O·alpha + P V for the keys the strip sees."""
        head, q0 = self.strip_at(e, index)
        seq, q0 = self.seq(e, head), q0 + self.lane(e)
        keys = self.limited(e, self.key_range(e, seq, q0))
        with e.if_(keys.all[0] >= keys.all[1], likely=False):
            e.ret()
        e.frame.row_max[0] = e.strip(float("-inf"))
        e.frame.row_sum[0] = e.strip(0.0)
        many = self.sees_many(e, seq, q0) if self.bounded else None
        chunks = self.chunks(e, seq, many)
        if self.kernel.plain:
            self.mask_edges(e, index, keys, chunks)
            (done,) = e.blocks("after")
            if self.bounded:
                with e.if_(self.is_bounded(e, index), likely=True):
                    self.bounded_softmax(e, index, keys, chunks, many)
                    e.ir.branch(done)
            self.plain_softmax(e, index, keys, chunks)
            e.go(done)
        else:
            self.modified_softmax(e, index, keys, chunks, (seq, q0))
        if self.kernel.stats:
            self.watch_block(e, index)
        total = e.frame.l + self.row(e, index)
        alpha = e.frame.alpha.strip()
        total[0] = e.fma(total.strip(), alpha, e.frame.row_sum.strip())
        if self.kernel.dropout:
            self.drop_weights(e, seq, q0, keys.all)
        self.add_pv(e, index, keys.all, chunks)

    def mask_edges(self, e: Emit, index: Any, keys: KeyRange, chunks: Chunks) -> None:
        """Scores of the keys that not every row sees, masked."""
        for edge in keys.edges:
            with e.if_(edge[0] < edge[1], likely=False):
                self.multiply_qk(e, index, edge, chunks)
                self.mask_scores(e, edge, keys.visible)

    def bounded_softmax(self, e: Emit, index: Any, keys: KeyRange, chunks: Chunks, many: Any) -> None:
        """m is |q| |k|: no maximum is taken of the scores."""
        self.update_max(e, index, self.bounds(e, index))
        self.multiply_qk(e, index, keys.solid, chunks)
        if self.kernel.stats:
            self.watch_max(e, index, self.max_of(e, keys.solid))
        self.clamp_masked(e, index, keys.edges)
        with e.if_else(many) as branches:
            for branch, step in zip(branches, ("bounded_step", "few_keys_step"), strict=True):
                with branch:
                    e.call(self.of_width(e, step), e.frame.pointer, index, *keys.all)

    def plain_softmax(self, e: Emit, index: Any, keys: KeyRange, chunks: Chunks) -> None:
        """Scores are used as the product leaves them: their maximum, then the weights."""
        self.multiply_qk(e, index, keys.solid, chunks)
        row_max = self.max_of(e, keys.solid)
        if self.kernel.stats:
            self.watch_max(e, index, row_max)
        self.update_max(e, index, row_max)
        e.call(self.of_width(e, "softmax_step"), e.frame.pointer, index, *keys.all)

    def max_of(self, e: Emit, keys: Interval) -> Any:
        """The largest of `row_max` and the scores of keys [j0, j1), of which none is hidden."""
        score = self.score_reader(e)
        with e.loop(*keys, 1, e.frame.row_max.strip()) as over:
            over.carry(e.fmax(over.values, score(over.index, True)))
        return over.values

    def modified_softmax(self, e: Emit, index: Any, keys: KeyRange, chunks: Chunks, rows: tuple[Any, Any]) -> None:
        """Softcap, bias or ALiBi change the scores before the maximum is taken."""
        self.multiply_qk(e, index, keys.all, chunks)
        self.mask_scores(e, keys.all, keys.visible, Modifier(self.kernel, *rows))
        if self.kernel.stats:
            self.watch_max(e, index, e.frame.row_max.strip())
        self.update_max(e, index, e.frame.row_max.strip())
        e.call(self.of_width(e, "softmax_step"), e.frame.pointer, index, *keys.all)

    def multiply_qk(self, e: Emit, index: Any, keys: Interval, chunks: Chunks) -> None:
        """Scores of keys [j0, j1)."""
        R, DP = self.tile.rows, e.args.DP
        Q = e.frame.Q + (index * (DP * R) + self.lane(e))
        operands = [Q, R, e.frame.K, DP * self.tile.keys, e.frame.P, R]
        e.call(self.of_width(e, "qk"), 0, DP, *operands, *self.groups(keys), chunks.scores)

    def score_reader(self, e: Emit) -> Callable[[Any, bool], Any]:
        """`score(j, keep)`: the scores of key j as the product left them, in units of log 2; `keep` if they are read again."""
        P, R = e.frame.P, self.tile.rows
        return lambda j, keep: P.strip(j * R)

    def add_pv(self, e: Emit, index: Any, keys: Interval, chunks: Chunks) -> None:
        """O = O·alpha + P V."""
        R, DVP = self.tile.rows, e.args.DVP
        O = e.frame.O + (index * (DVP * R) + self.lane(e))
        last = DVP // self.tile.keys
        weights = [e.frame.P, R, e.frame.V, self.panel(e)]
        e.call(self.of_width(e, "pv"), *keys, *weights, O, R, 0, last, chunks.values, e.frame.alpha)

    def chunks(self, e: Emit, seq: SeqInfo, many: Any) -> Chunks:
        """Sums are as short as errors ask for. Rows of few keys have the largest; where there are such rows before, those of many
        keys need no care at all."""
        DP, BN = e.args.DP, e.args.BN
        if self.kernel.invariant:  # DP is D in whole register tiles, and these change with the rows
            return Chunks(micro.chunk_steps(e.args.D, 2), BN)
        if many is None:
            return Chunks(micro.chunk_steps(DP, 2), BN)
        usual = micro.chunk_steps(DP, 4 if self.wide else 2)
        scores = e.select(self.starts_small(e, seq), e.select(many, DP, micro.chunk_steps(DP, 4)), usual)
        return Chunks(scores, e.select(many, BN, micro.chunk_steps(BN, 4)))

    def mask_scores(self, e: Emit, keys: Interval, visible: Any, modifier: Modifier | None = None) -> None:
        """Scores of keys [j0, j1) changed, -inf where hidden; their maximum joins `row_max`."""
        P, R, score = e.frame.P, self.tile.rows, self.score_reader(e)
        with e.loop(*keys, 1, e.frame.row_max.strip()) as over:
            at = over.index * R
            s, seen = score(over.index, False), visible(over.index)
            if modifier:
                s, unmasked, _ = modifier.apply(s, e.frame.n0 + over.index)
                seen = seen if unmasked is None else seen & unmasked
            s = e.select(seen, s, float("-inf"))
            P[at] = s
            over.carry(e.fmax(over.values, s))
        e.frame.row_max[0] = over.values

    def drop_weights(self, e: Emit, seq: SeqInfo, q0: Any, keys: Interval) -> None:
        P = e.frame.P

        def visit(j: Any, i: int, kept: Any) -> None:
            at = j * self.tile.rows + i * e.lanes
            P[at] = e.select(kept, P.vector(at), 0.0)

        drop(seq, q0, e.frame.n0, keys, visit)

    # -- results

    @kernel_function(I64)
    def emit_finish(self, e: Emit, index: Any) -> None:
        """finish(args, frame, index): the sink joins, O / l goes out in the inputs' dtype, and the LSE."""
        args, frame, R = e.args, e.frame, self.tile.rows
        head, q0 = self.strip_at(e, index)
        row = index * R
        m, total, denominator = frame.m + row, frame.l + row, frame.alpha
        if self.kernel.stats:
            position = frame.q_start + q0
            self.finish_watch(e, index, self.row_index(e, head, position), e.min(R, frame.m0 + frame.rows - q0))
        sinks = args.sinks
        has_sink = sinks.address != 0
        with e.if_(has_sink, likely=False):
            self.join_sink(e, sinks[head], index)
        keep = args.keep_factor.splat()
        for i in range(self.tile.vectors):  # dropout's survivors were not scaled: the denominator makes up for it
            denominator[i * e.lanes] = total.vector(i * e.lanes) * keep
        rows = e.min(R, frame.m0 + frame.rows - q0)
        position = frame.q_start + q0
        O = frame.O + index * (args.DVP * R)
        to = self.row_of(e, "o", head, position)
        e.call(self.unpack_quotient, to, args.o.stride_s, O, rows, args.Dv, denominator)
        lse = args.lse + self.row_index(e, head, position)
        for i in range(self.tile.vectors):
            frame.row_max[i * e.lanes] = self.natural_lse(e, m.vector(i * e.lanes), total.vector(i * e.lanes))
        with e.range(0, rows) as r:
            lse[r] = frame.row_max[r]
        with e.if_(has_sink, likely=False):
            self.clamp_lse(e, sinks[head], lse, rows)

    def join_sink(self, e: Emit, sink: Any, index: Any) -> None:
        """One more logit in the denominator: l' = l·2**(m - m') + 2**(sink - m')."""
        R = self.tile.rows
        row = index * R
        m_ptr, total_ptr = e.frame.m + row, e.frame.l + row
        O = e.frame.O + index * (e.args.DVP * R)
        logit = self.sink_logit(e, sink).splat()
        factors, weights = [], []
        for i in range(self.tile.vectors):
            at = i * e.lanes
            total = total_ptr.vector(at)
            old = self.valid_max(e, m_ptr.vector(at), total)
            m = e.fmax(old, self.level(e, logit))
            alpha = self.rescale_factor(self.exponent(old, m))
            weight = elementary.exp2(self.exponent(logit, m))
            total_ptr[at] = e.fma(total, alpha, weight)
            m_ptr[at] = m
            factors.append(alpha)
            weights.append(weight)
        self.rescale(O, e.args.DVP, Strip(factors))
        self.after_sink(e, index, Strip(factors), Strip(weights))

    def after_sink(self, e: Emit, index: Any, alpha: Strip, weight: Strip) -> None:
        """For kernels that keep more than m, l and O."""

    def rescale(self, O: Pointer, DVP: Any, alpha: Strip) -> None:
        """O of a strip times alpha."""
        with O.e.range(0, DVP) as col:
            at = col * self.tile.rows
            O[at] = O.strip(at) * alpha

    @kernel_function(I64, PTR, PTR, PTR)
    def emit_merge(self, e: Emit, index: Any, m_in: Pointer, l_in: Pointer, o_in: Pointer) -> None:
        """merge(args, frame, index, m', l', O'): the state of another split joins strip `index`."""
        R = self.tile.rows
        row = index * R
        m_ptr, total_ptr = e.frame.m + row, e.frame.l + row
        size = e.args.DVP * R
        O, o_in = e.frame.O + index * size, o_in + index * size
        ours, theirs = [], []
        for i in range(self.tile.vectors):
            at = i * e.lanes
            total, more = total_ptr.vector(at), (l_in + row).vector(at)
            old = self.valid_max(e, m_ptr.vector(at), total)
            other = self.valid_max(e, (m_in + row).vector(at), more)
            m = e.fmax(old, other)
            mine, other = self.rescale_factor(Strip([self.exponent(old, m), self.exponent(other, m)]))
            ours.append(mine)
            theirs.append(other)
            total_ptr[at] = e.fma(more, other, total * mine)
            m_ptr[at] = m
        with e.range(0, e.args.DVP) as col:
            at = col * R
            mine, other = O.strip(at), o_in.strip(at)
            O[at] = e.each(lambda x, y, a, b: e.fma(y, b, x * a), mine, other, Strip(ours), Strip(theirs))

    # -- tasks

    @kernel_function(I64)
    def emit_task(self, e: Emit, number: Any) -> None:
        """task(args, frame, number): one query block of one key head, or one split of its keys."""
        args, frame = e.args, e.frame
        splits = args.splits
        frame.split = number % splits
        rest, blocks, pairs = number // splits, args.blocks, args.pairs
        # blocks of a head follow each other and find its K and V near; where they differ in cost, the longest of all heads are
        # first, so that threads end together
        uneven = self.uneven(e)
        block = e.select(uneven, rest // pairs, rest % blocks)
        self.locate(e, block, e.select(uneven, rest % pairs, rest // blocks))
        with e.if_(frame.rows <= 0, likely=False):
            e.ret()
        strips = frame.strips * args.group
        if self.bounded:
            frame.retry = 0
        (attempt,) = e.blocks("attempt")
        e.go(attempt)
        self.start(e, strips)
        first, rows = frame.m0, frame.rows
        seen = hull(self.seq(e, 0), self.terms, first, first + rows - 1)
        alone = splits == 1
        BN = args.BN
        if self.kernel.invariant:
            self.visit_parts(e, strips, seen)
        else:
            # classes are those of tiles that begin at multiples of BN
            keys = seen if self.simple else (seen[0] // BN * BN, seen[1])
            begin, end = self.split_keys(e, keys, splits, BN)
            self.visit_blocks(e, strips, (begin, end), seen)
        if self.bounded:
            first_time = frame.retry == 0
            lost = self.call(e, self.vanished, strips, begin, end) != 0
            with e.if_(first_time & lost, likely=False):
                frame.retry = 1
                e.ir.branch(attempt)
        with e.if_(alone, likely=True):
            self.finish_strips(e, strips)
            e.ret()
        self.join_splits(e, number, strips)

    def finish_strips(self, e: Emit, strips: Any) -> None:
        with e.range(0, strips) as index:
            self.call(e, self.finish, index)

    def start(self, e: Emit, strips: Any) -> None:
        """Lay out the frame, pack Q, set m, l and O to those of no keys."""
        args, frame = e.args, e.frame
        self.lay_out(e)
        with e.range(0, args.BM) as row:
            frame.q_factors[row] = args.q_factor
        with e.range(0, args.group) as nth:
            first = nth * frame.strips
            head, _ = self.strip_at(e, first)
            source = self.row_of(e, "q", head, frame.q_start + frame.m0)
            self.pack_q(e, first, [source, args.q.stride_s, args.q.stride_d, frame.rows, args.D])
        self.clear(e, strips)

    def clear(self, e: Emit, strips: Any) -> None:
        """m, l and O of no keys."""
        frame, R, DVP = e.frame, self.tile.rows, e.args.DVP
        with e.range(0, strips) as index:
            row = index * R
            frame.m[row] = e.strip(self.real.lowest)
            frame.l[row] = e.strip(0.0)
            if self.kernel.stats:
                self.start_watch(e, row)
            if self.bounded:
                self.set_q_norm(e, index)
        with e.range(0, strips * (DVP * R), e.lanes) as cell:
            frame.O[cell] = e.vector(0.0)

    def pack_q(self, e: Emit, first: Any, rows: list[Any]) -> None:
        """One head's rows, as strips from `first` on."""
        to = e.frame.Q + first * (e.args.DP * self.tile.rows)
        e.call(self.pack_strips, to, e.args.DP, *rows, e.frame.q_factors)

    def block(self, e: Emit, strips: Any) -> None:
        """Every strip against the keys [n0, n1)."""
        with self.visible_block(e, lambda: e.args.group, strips):
            if self.bounded:
                self.call(e, self.k_norm)
            with e.range(0, strips) as index:
                self.call(e, self.steps, index)

    def join_splits(self, e: Emit, number: Any, strips: Any) -> None:
        """Leave this split's state in the workspace; whoever comes last merges them all, in order, and finishes."""
        args, frame = e.args, e.frame
        rows = args.BM * args.group
        size = rows * (args.DVP + (4 if self.kernel.stats else 2))  # m, l, O of one split, and what it watches
        splits, used = args.splits, strips * self.tile.rows
        # m and l lie `rows` apart, O behind them
        O_cells = used * args.DVP
        spans: tuple[tuple[Any, Any, Any], ...] = ((frame.m, 0, used), (frame.l, rows, used), (frame.O, rows * 2, O_cells))
        if self.kernel.stats:
            behind = rows * (args.DVP + 2)
            spans = (*spans, (frame.spread, behind, used), (frame.top, behind + rows, used))
        with publish_split(e, number, splits, size, spans, e.lanes) as base:
            with e.range(1, splits) as other:
                state = base + other * size
                with e.range(0, strips) as index:
                    l_in, o_in = state + rows, state + rows * 2
                    if self.kernel.stats:
                        self.merge_watch(e, index, state, rows)
                    self.call(e, self.merge, index, state, l_in, o_in)
            self.finish_strips(e, strips)
