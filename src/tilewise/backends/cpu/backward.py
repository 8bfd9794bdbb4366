"""The backward kernel: probabilities recomputed from the saved log-sum-exp, nothing of size N × N.

    P = 2**(s - lse)      dV += Pᵀ dO       dP = dO Vᵀ      dS = P ∘ (dP - delta)      dQ += dS K      dK += dSᵀ Q

with delta = rowsum(dO ∘ O) - dLSE; where O is stored narrower than it was computed, rowsum(P ∘ dP) - dLSE, which is the same
before rounding and takes a pass over the keys of its own. A task is one block of query rows of one query head; it owns its dQ.
Several tasks add to the same rows of dK and dV, and must do so in a fixed order, or results would depend on timing: each task
publishes how far along the keys it is, and adds to a key block only when every earlier task of its key head has passed it. They
follow each other like the stages of a pipeline, so they seldom wait, and the sums are the same for any number of threads.

s and lse are in the kernel's unit. What rounding cuts off lse is put back as a factor of dO and delta, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from operator import and_
from types import SimpleNamespace
from typing import Any, NamedTuple

from tilewise.backends.cpu import elementary, micro, pack
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.ir import I64, Pointer, Strip
from tilewise.backends.cpu.masking import Interval, SeqInfo, hull
from tilewise.backends.cpu.module import kernel_function
from tilewise.backends.cpu.ordered_accumulate import PASSED, OrderedAccumulate
from tilewise.backends.cpu.scores import Modifier, drop
from tilewise.backends.cpu.spec import Kernel, round_down, round_up
from tilewise.backends.cpu.statistics import RowStatistics, Visible

CHUNK = 64
"""Query rows of one sum in dK and dV where vectors are wide, in whole strips; elsewhere all of a task's."""


class Chunks(NamedTuple):
    """Steps of one sum: of the columns of a score and of a dP, of the keys of a dQ."""

    scores: Any
    dp: Any
    dq: Any


class Gradient(NamedTuple):
    """A block's rows of dK or dV += weightsᵀ panels: P and dO, or dS and Q."""

    weights: Pointer
    panels: Pointer
    out: Pointer
    width: Any


class Backward(RowStatistics, OrderedAccumulate):
    """Emits one module; its methods are the functions of the kernel."""

    task: tuple[str, ...] = ("head", "rank", "pair")
    tiles: tuple[tuple[str, str, str], ...] = (("K", "k", "lanes"), ("V", "v", "lanes"), ("K_columns", "k", "panels"))
    cleaned: tuple[str, ...] = ("V", "K_columns")
    updates: tuple[tuple[str, ...], ...] = (("dv", "DVR", "P", "dO_panels"), ("dk", "DR", "dS", "Q_panels"))
    """(gradient, its width, weights, panels of rows), and tangents without which there is nothing to add."""
    pace = 1  # keys whose P and dS are computed together
    degree = 0  # of the polynomial in 2**x; 0: the Real type's own
    grain = 16
    """Keys updated together in a block that is not seen by all: masked rows are skipped so finely."""

    def __init__(self, kernel: Kernel, arch: str) -> None:
        super().__init__(kernel, arch)
        self.emit_helpers()
        self.unpack_strip = pack.emit_unpack_strip(self.unit, kernel.dtype, divide=False)
        self.row_dots = pack.emit_row_dots(self.unit, kernel.dtype)
        self.emit_products()
        self.strip = self.emit_strip()
        self.wait = self.emit_wait()
        self.update = self.emit_update()
        self.statistics = self.emit_statistics()
        if kernel.double:
            self.strip_delta, self.finish_delta = self.emit_strip_delta(), self.emit_finish_delta()
        self.emit_worker(self.emit_task())

    def emit_products(self) -> None:
        self.pack_gradient = pack.emit_pack_panels(self.unit, self.tile.rows, self.kernel.dtype, scaled=True)
        self.product = micro.by_panels(self.unit, "product")
        self.accumulate = micro.by_rows(self.unit, "accumulate")
        self.dq = micro.by_panels(self.unit, "dq", fold="add")

    def strip_at(self, e: Emit, index: Any) -> tuple[Any, Any]:
        """A task has one query head."""
        return e.frame.head, e.frame.m0 + index * self.tile.rows

    # -- one strip against one key block: P, dS and dQ

    @kernel_function(I64)
    def emit_strip(self, e: Emit, index: Any) -> None:
        """strip(args, frame, index): P and dS of the strip's rows, its part of dQ; the keys visited go to `first` and `past`."""
        head, q0 = self.strip_at(e, index)
        seq = self.seq(e, head)
        keys = self.key_range(e, seq, q0)
        start, stop = keys.all[0], e.max(*keys.all)
        keys = keys._replace(all=(start, stop))
        e.frame.first[index], e.frame.past[index] = start, stop
        # the updates of dK and dV run over whole rows of P and dS: what is not visited must be zero
        for unseen in ((0, start), (stop, e.frame.n_pad)):
            self.clear(e, index, unseen)
        with e.if_(start < stop, likely=True):
            chunks = self.chunks(e, seq, q0)
            self.multiply(e, index, keys.all, chunks)
            if self.kernel.dropout:
                self.draw(e, seq, q0, keys.all)
            modifier = None if self.kernel.plain else Modifier(self.kernel, seq, q0)
            parts: list[Any] = [(keys.solid, None), *((edge, keys.visible) for edge in keys.edges)]
            if modifier:
                parts = [(keys.all, keys.visible)]
            with e.if_else(self.is_far(e, index)) as (far, near):
                with far:
                    self.differentiate(e, index, keys.all, keys.visible, modifier, far=True)
                with near:
                    for part, visible in parts:
                        with e.if_(part[0] < part[1]):
                            self.differentiate(e, index, part, visible, modifier)
            self.add_dq(e, index, keys.all, chunks)

    def weights(self, e: Emit, index: Any) -> SimpleNamespace:
        """P and dS of a strip (rows of keys, columns of query rows) and the distance of their rows. The products leave scores and
        dP where P and dS will be."""
        column = index * self.tile.rows
        return SimpleNamespace(P=e.frame.P + column, dS=e.frame.dS + column, step=e.args.PS, **self.entropy_rows(e, column))

    def clear(self, e: Emit, index: Any, keys: Interval) -> None:
        weights = self.weights(e, index)
        with e.range(*keys) as j:
            for buffer in (weights.P, weights.dS):
                buffer[j * weights.step] = e.strip(0.0)

    def chunks(self, e: Emit, seq: SeqInfo, q0: Any) -> Chunks:
        """Sums are shorter for the first rows under a causal mask: they see few keys and have the largest errors."""
        args, sums = e.args, 4 if self.wide else 2
        usual = Chunks(micro.chunk_steps(args.DP, sums), micro.chunk_steps(args.DVP, sums), args.BN)
        if not self.simple:
            return usual
        first = self.starts_small(e, seq) & ~self.sees_many(e, seq, q0)
        short = Chunks(micro.chunk_steps(args.DP, 8), micro.chunk_steps(args.DVP, 8), micro.chunk_steps(args.BN, 2))
        return Chunks(*(e.select(first, x, y) for x, y in zip(short, usual, strict=True)))

    def multiply(self, e: Emit, index: Any, keys: Interval, chunks: Chunks) -> None:
        """Scores and dP of keys [j0, j1)."""
        args, frame, R, weights = e.args, e.frame, self.tile.rows, self.weights(e, index)
        for A, B, width, C, chunk in (("Q", "K", "DP", weights.P, chunks.scores), ("dO", "V", "DVP", weights.dS, chunks.dp)):
            rows = getattr(frame, A) + index * (getattr(args, width) * R)
            panel = getattr(args, width) * self.tile.keys
            operands = [rows, R, getattr(frame, B), panel, C, weights.step]
            e.call(self.product, 0, getattr(args, width), *operands, *self.groups(keys), chunk)

    def add_dq(self, e: Emit, index: Any, keys: Interval, chunks: Chunks) -> None:
        frame, R, weights = e.frame, self.tile.rows, self.weights(e, index)
        dQ = frame.dQ + index * (e.args.DP * R)
        last = e.args.DP // self.tile.keys
        operands = [weights.dS, weights.step, frame.K_columns, self.panel(e), dQ, R]
        e.call(self.dq, *keys, *operands, 0, last, chunks.dq)

    def load_weights(self, e: Emit, weights: Any, j: Any) -> tuple[Any, Any]:
        """Scores and dP of one key."""
        return weights.P.strip(j * weights.step), weights.dS.strip(j * weights.step)

    def store_weights(self, e: Emit, weights: Any, j: Any, computed: list[tuple[Strip, Strip]]) -> None:
        """P and dS of `pace` keys from j on."""
        ((p, ds),) = computed
        weights.P[j * weights.step] = p
        weights.dS[j * weights.step] = ds

    def draw(self, e: Emit, seq: SeqInfo, q0: Any, keys: Interval) -> None:
        """All ones in kept[j][lane] where dropout spares the weight."""
        mask = e.frame.kept

        def visit(j: Any, i: int, kept: Any) -> None:
            mask[j * self.tile.rows + i * e.lanes] = kept.sext(e.real.bits)

        drop(seq, q0, e.frame.n0, keys, visit)

    def differentiate(self, e: Emit, index: Any, keys: Interval, visible: Any, modifier: Any, far: bool = False) -> None:
        """Scores and dP of keys [j0, j1) become P and dS; `visible` tells which rows see a key, None: all do. No weight is above
        1, but where lse is `far` that has to be seen to."""
        frame, row, weights = e.frame, index * self.tile.rows, self.weights(e, index)
        lse, delta = frame.lse2.strip(row), frame.delta.strip(row)

        def one(j: Any) -> tuple[Any, Any]:
            p, kept, dp, seen, tanhs = self.recompute(e, weights, lse, j, Visible(visible, modifier, far))
            ds = e.each(lambda p, dp, delta: p * (dp - delta), p, dp, delta)
            if seen is not None:
                kept = e.select(seen, kept, 0.0)
                ds = e.select(seen, ds, 0.0)
            if self.kernel.dbias:
                self.add_dbias(e, index, j, ds)
            if tanhs is not None:
                ds = e.each(lambda x, t: x * (1.0 - t * t), ds, tanhs)
                if seen is not None:  # a hidden score may be NaN, and 0 · NaN is not 0
                    ds = e.select(seen, ds, 0.0)
            return kept, ds

        with e.range(*keys, self.pace) as j:
            self.store_weights(e, weights, j, [one(j + n) for n in range(self.pace)])

    def recompute(self, e: Emit, weights: Any, lse: Strip, j: Any, how: Visible) -> tuple[Any, ...]:
        """P of key j, P and dP after dropout, the lanes that see the key (None: all) and tanh of the raw score (None: no cap)."""
        s, dp = self.load_weights(e, weights, j)
        seen, tanhs = how.rows(j) if how.rows else None, None
        if how.modifier:
            s, unmasked, tanhs = how.modifier.apply(s, e.frame.n0 + j)
            if unmasked is not None and seen is not None:
                seen = seen & unmasked
        gap = self.exponent(s, lse)
        p = elementary.exp2(e.at_most(gap, 0.0) if how.far else gap, self.degree)
        kept = p
        if self.kernel.dropout:
            spared = e.frame.kept.strip(j * self.tile.rows) != 0
            dp = e.select(spared, dp, 0.0)
            kept = e.select(spared, p, 0.0)
        if self.kernel.stats:
            dp = self.add_entropy(e, weights, s, dp)
        return p, kept, dp, seen, tanhs

    def add_dbias(self, e: Emit, index: Any, j: Any, ds: Strip) -> None:
        """dBias += dS for the strip's rows and the block's keys; the host lets no two tasks share a cell at the same time."""
        frame, dbias = e.frame, e.args.dbias
        head, q0 = self.strip_at(e, index)
        rows = e.min(self.tile.rows, frame.Sq - q0)
        key = frame.n0 + j
        base = frame.batch * dbias.stride_b + head * dbias.stride_h
        base = base + key * dbias.stride_d
        with e.if_(key < frame.n1):
            for r in range(self.tile.rows):
                with e.if_(rows > r):  # dS is the derivative by the natural score, to which the bias is added
                    cell = dbias.pointer + (base + (q0 + r) * dbias.stride_s)
                    value = ds[r // e.lanes].lane(r % e.lanes)
                    cell[0] = cell[0] + value

    # -- dK and dV

    @kernel_function()
    def emit_update(self, e: Emit) -> None:
        """update(args, frame): dV += Pᵀ dO and dK += dSᵀ Q for the keys of the tile, each from the strips that see it."""
        args, frame = e.args, e.frame
        row = self.batch_index(e) * args.groups + frame.nth_group
        row = row * args.Sk
        k_start, n0 = frame.k_start, frame.n0
        row, n_pad = row + k_start + n0, frame.n_pad
        with e.loop(0, frame.strips, 1, [0, n_pad]) as over:  # keys that every strip sees
            start, stop = frame.first[over.index], frame.past[over.index]
            over.carry([e.max(over.values[0], start), e.min(over.values[1], stop)])
        whole = (over.values[0] == 0) & (over.values[1] == n_pad)
        step = e.select(whole, n_pad, self.grain)
        with e.range(0, n_pad, step) as ja:
            jb = e.min(ja + step, n_pad)
            with e.loop(0, frame.strips, 1, [frame.strips, 0]) as over:
                start, stop = frame.first[over.index], frame.past[over.index]
                sees = (start < jb) & (ja < stop)
                first = e.select(sees, e.min(over.values[0], over.index), over.values[0])
                last = e.select(sees, over.index + 1, over.values[1])
                over.carry([first, last])
            first, last = over.values
            with e.if_(first < last):
                for name, width, weights, panels, *moving in self.updates:
                    out = getattr(args, name) + row * getattr(args, width)
                    with e.if_(reduce(and_, map(args.given, moving), args.given(name))):
                        operands = getattr(frame, weights), getattr(frame, panels), out, getattr(args, width)
                        self.update_slice(e, (ja, jb), (first, last), Gradient(*operands))

    def update_slice(self, e: Emit, keys: Interval, strips: Interval, gradient: Gradient) -> None:
        """Rows [ja, jb) of one gradient. Rows padded beyond n1 belong to somebody else: the last register tile takes a detour."""
        R, J, (ja, jb), (first, last) = self.tile.rows, self.tile.keys, keys, strips
        rows = first * R, (last - first) * R
        real = e.frame.n1 - e.frame.n0
        whole = e.min(jb, round_down(real, J))
        with e.range(0, gradient.width, R) as col:
            to = gradient.out + col
            self.accumulate_rows(e, gradient._replace(out=to), ja, col, rows, (ja, whole))
            with e.if_(whole < jb, likely=False):
                tail = e.frame.tail
                with e.range(0, J * R) as cell:
                    tail[cell] = 0.0
                aside = gradient._replace(out=tail, width=e.const(R, I64))
                self.accumulate_rows(e, aside, 0, col, rows, (whole, whole + J))
                with e.range(0, real - whole) as key:
                    line = to + (whole + key) * gradient.width
                    line[0] = line.strip() + tail.strip(key * R)

    def accumulate_rows(self, e: Emit, gradient: Gradient, line: Any, col: Any, rows: Interval, keys: Interval) -> None:
        """Rows of a gradient from `line` on += weights of keys [ja, jb) by R columns of `count` query rows from the first on.

        With wide vectors rows come in chunks, the last first: short sums are more exact, and with AVX-512 up to 3 % faster.
        """
        (row0, count), (ja, jb) = rows, keys
        R, step = self.tile.rows, e.args.PS
        out = gradient.out + line * gradient.width

        def accumulate(row: Any, some: Any) -> None:
            A = gradient.panels + (col * e.args.BM + row * R)
            B = gradient.weights + (row + ja * step)
            e.call(self.accumulate, some, A, B, step, out, gradient.width, 0, jb - ja)

        if not self.wide:
            accumulate(row0, count)
            return
        chunk = round_up(CHUNK, R)
        chunks = (count + (chunk - 1)) // chunk
        with e.range(0, chunks) as nth:
            start = chunk * (chunks - 1 - nth)
            accumulate(row0 + start, e.min(chunk, count - start))

    # -- tasks

    @kernel_function(I64)
    def emit_task(self, e: Emit, number: Any) -> None:
        """task(args, frame, number): one query block of one query head."""
        args, frame = e.args, e.frame
        # neighbours in the queue belong to different key heads, so that they do not wait for each other
        blocks, pairs = args.blocks, args.pairs
        pair, rank = number % pairs, number // pairs
        self.locate(e, rank % blocks, pair)
        frame.pair, frame.rank = pair, rank
        frame.head = frame.nth_group * args.group + rank // blocks
        with e.if_(frame.rows > 0, likely=True):
            self.start(e)
            first, rows = frame.m0, frame.rows
            low, high = hull(self.seq(e, frame.head), self.terms, first, first + rows - 1)
            BN = args.BN
            self.sum_rows(e, (low, high))
            with self.key_blocks(e, (low, high), BN) as start:
                self.publish(e, start // BN)
                self.block(e, start // BN)
            self.finish(e)
        self.publish(e, PASSED)

    def sum_rows(self, e: Emit, keys: Interval) -> None:
        """What has to be summed over all keys of a row before the rest."""
        if self.kernel.double and self.kernel.kind == "backward":
            blocks = self.key_blocks(e, keys, e.args.BN)
            with blocks, self.visible_block(e, lambda: 1, e.frame.strips), e.range(0, e.frame.strips) as index:
                self.call(e, self.strip_delta, index)
            self.call(e, self.finish_delta)

    @contextmanager
    def key_blocks(self, e: Emit, keys: Interval, BN: Any) -> Iterator[Any]:
        """A loop over the blocks of keys [low, high): [n0, n1) each, and the multiple of BN from which on it would begin."""
        low, high = keys
        with e.range(low // BN * BN, high, BN) as start:
            e.frame.n0 = e.max(start, low)
            e.frame.n1 = e.min(start + BN, high)
            yield start

    def block(self, e: Emit, number: Any) -> None:
        """Every strip against the keys [n0, n1), and their dK and dV in this task's turn."""
        with self.visible_block(e, lambda: 1, e.frame.strips):
            with e.range(0, e.frame.strips) as index:
                self.call(e, self.strip, index)
            self.call(e, self.wait, number)
            self.call(e, self.update)

    def start(self, e: Emit) -> None:
        """Lay out the frame, compute each row's statistics, pack Q and dO as strips and as panels."""
        self.lay_out(e)
        self.call(e, self.statistics)
        self.pack_rows(e)
        with e.range(0, e.frame.strips * self.tile.rows * e.args.DP, e.lanes) as cell:
            e.frame.dQ[cell] = e.vector(0.0)

    def rows_of(self, e: Emit, name: str) -> list[Any]:
        """The block's rows of q or do: their address, strides and number."""
        source = self.row_of(e, name, e.frame.head, e.frame.q_start + e.frame.m0)
        return [source, getattr(e.args, name).stride_s, getattr(e.args, name).stride_d, e.frame.rows]

    def pack_rows(self, e: Emit) -> None:
        """Scores are made with Q times its factor; the Q of dK carries the factor of dS."""
        args, frame, R = e.args, e.frame, self.tile.rows
        BM = args.BM
        all_rows = frame.strips * R
        rows = self.rows_of(e, "q")
        e.call(self.pack_strips, frame.Q, args.DP, *rows, args.D, frame.q_factors)
        e.call(self.pack_gradient, frame.Q_panels, BM * R, *rows, all_rows, args.D, frame.ds_factors)
        rows = self.rows_of(e, "do")
        e.call(self.pack_strips, frame.dO, args.DVP, *rows, args.Dv, frame.do_factors)
        e.call(self.pack_gradient, frame.dO_panels, BM * R, *rows, all_rows, args.Dv, frame.do_factors)

    def finish(self, e: Emit) -> None:
        """dQ goes out, times the factor of dS."""
        args, frame, R = e.args, e.frame, self.tile.rows
        with e.if_(args.given("dq")), e.range(0, frame.strips) as index:
            row = index * R
            position = frame.q_start + frame.m0 + row
            to = self.row_of(e, "dq", frame.head, position)
            dQ = frame.dQ + row * args.DP
            left = e.min(R, frame.rows - row)
            e.call(self.unpack_strip, to, args.dq.stride_s, dQ, left, args.D, frame.ds_factors)
