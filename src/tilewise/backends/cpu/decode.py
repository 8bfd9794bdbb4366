"""The decode kernel: one query row for each head, so the time goes into reading K and V once.

The query heads of a group are the rows. Nothing is packed: lanes lie along the head dim for both products, and K and V are
converted as they are loaded. For each row the state over the keys seen so far is

    m >= max s (an integer),   l = Σ 2**(s - m),   O = Σ 2**(s - m) v

A task is one split of the keys of one key head; splits meet in the workspace and are merged in order by the last to arrive. How a
block of keys is processed is told by `decode_stream` for one row and by `decode_block` for several.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from tilewise.backends.cpu import elementary, masking, pack
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.decode_bytes import ByteScores
from tilewise.backends.cpu.ir import I64, PTR, STORAGE, Pointer, Strip, size_of
from tilewise.backends.cpu.module import KernelModule, kernel_function
from tilewise.backends.cpu.spec import UNROLL, Kernel, round_up
from tilewise.backends.cpu.splits import publish_split

LINE = 64  # bytes of a cache line
Join = Callable[[Any, Any], Any]


class Decode(ByteScores, KernelModule, ABC):
    """Emits one module. In its register tile L lanes and V vectors lie along the head dim, and `keys` counts query rows."""

    strides = False
    """Whether blocks make use of rows that lie a stride apart."""
    task: tuple[str, ...] = ("split", "run", "first_group", "next_head", "next_key", "Q_all", "O_all", "m_all", "l_all")
    byte_task: tuple[str, ...] = ("exact", "Q8_all", "q_unit_all", "q_low_all")

    def __init__(self, kernel: Kernel, arch: str) -> None:
        if kernel.bytes:
            self.task += self.byte_task
        super().__init__(kernel, arch)
        self.R = self.tile.keys
        self.line = LINE // size_of(STORAGE[kernel.stored or kernel.dtype])  # elements
        self.find_rows = None
        if kernel.paged:
            self.find_rows = self.emit_find_run() if self.strides else self.emit_find_rows(beyond=2 * UNROLL)
        self.find_scales = self.emit_find_scales() if kernel.stored else None
        self.ask_scales = self.emit_ask_scales() if kernel.bytes and self.unsigned else None
        self.limbs = self.emit_limbs() if kernel.bytes else None
        self.merge = self.emit_merge()
        self.block = self.emit_block()
        self.finish = self.emit_finish()
        self.emit_worker(self.emit_task())

    @abstractmethod
    def emit_block(self) -> Any:
        """block(args, frame): the keys [n0, n1) join the state of every row."""

    def joined(self, vectors: list[Any], join: Join = operator.add) -> Any:
        """All lanes of each of four vectors joined, as one vector of four."""

        def pairs(x: Any, y: Any) -> Any:
            """Neighbouring lanes joined, x's first."""
            n = x.lanes
            return join(x.pick(range(0, 2 * n, 2), y), x.pick(range(1, 2 * n, 2), y))

        if vectors[0].lanes > UNROLL:
            return self.joined_wide(vectors, join)
        if vectors[0].lanes < UNROLL:  # two doubles: pair them up first
            low = [pairs(vectors[n], vectors[n + 1]) for n in (0, 2)]
            return low[0].pick(range(4), low[1])
        return pairs(pairs(vectors[0], vectors[1]), pairs(vectors[2], vectors[3]))

    def joined_wide(self, vectors: list[Any], join: Join) -> Any:
        """The same of long vectors: two become one, and whole vectors are joined until there is one for all four."""
        n = width = vectors[0].lanes  # `width` lanes in a row belong to one of the four
        while len(vectors) > 1:
            width //= 2
            low = [first + lane for first in range(0, 2 * n, 2 * width) for lane in range(width)]
            high = [lane + width for lane in low]
            vectors = [join(x.pick(low, y), x.pick(high, y)) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
        one, left = vectors[0], width
        while left > 1:
            left //= 2
            one = join(one, one.pick([lane ^ left for lane in range(n)]))
        return one.pick(range(0, n, width))

    # -- tasks

    @kernel_function(I64)
    def emit_task(self, e: Emit, number: Any) -> None:
        """task(args, frame, number): one split of the keys of one key head."""
        args, frame = e.args, e.frame
        splits, BN = args.splits, args.BN
        frame.split = number % splits
        pair = number // splits
        if self.kernel.together:  # the first of the task's groups
            sets = args.groups // args.together
            pair = pair // sets * args.groups + pair % sets * args.together
        self.locate(e, 0, pair)
        with e.if_(frame.rows <= 0, likely=False):
            e.ret()
        self.start(e)
        seen = masking.hull(self.seq(e, 0), self.terms, 0, 0)
        begin, end = self.split_keys(e, seen, splits, BN)
        with e.range(begin, end, BN) as n0:
            frame.n0 = n0
            frame.n1 = e.min(n0 + BN, end)
            if self.find_rows is not None:
                self.call(e, self.find_rows)
            if self.ask_scales is not None:
                self.call(e, self.ask_scales)
            self.each_group(e, self.block)
        with e.if_(splits == 1, likely=True):
            self.each_group(e, self.finish)
            e.ret()
        self.join_splits(e, number)

    def each_group(self, e: Emit, function: Any) -> None:
        """The function for every group of the task, the frame set to it. The rows of K that come next are those of the next
        group, or, behind the last one, of the next block."""
        args, frame, kernel = e.args, e.frame, self.kernel
        scales = [self.find_scales] if self.find_scales is not None and function is self.block else []
        if not kernel.together:
            for one in (*scales, function):
                self.call(e, one)
            return
        with e.range(0, args.together) as nth:
            self.enter_group(e, nth)
            following = nth + 1 < args.together
            frame.next_head = e.select(following, (frame.nth_group + 1) // args.parts, frame.first_group // args.parts)
            frame.next_key = e.select(following, 0, args.BN)
            for one in (*scales, function):
                self.call(e, one)

    def enter_group(self, e: Emit, nth: Any) -> None:
        args, frame = e.args, e.frame
        group = frame.first_group + nth
        frame.nth_group, frame.key_head = group, group // args.parts
        first = nth * round_up(args.group, self.R)
        digits = args.D * self.kernel.digit_cells
        for name, cells in (("Q", args.D), ("O", args.Dv), ("m", 1), ("l", 1), ("Q8", digits), ("q_unit", 1), ("q_low", 1)):
            if name not in self.fields:
                continue
            base = frame.address(f"{name}_all", self.real.type)
            setattr(frame, name, (base + first * cells).address)

    def rows(self, e: Emit) -> Any:
        """Of all groups of the task, those that fill up a register tile included where there are several."""
        return round_up(e.args.group, self.R) * e.args.together if self.kernel.together else e.args.group

    def start(self, e: Emit) -> None:
        """Lay out the frame; Q widened and scaled, rows beyond the group zero; m, l and O of no keys."""
        args, frame = e.args, e.frame
        D, Dv = args.D, args.Dv
        padded = rows = round_up(args.group, self.R)
        self.lay_out(e)
        if self.kernel.together:
            frame.first_group = frame.nth_group
            rows = rows * args.together
            for name in (name for name in ("Q", "O", "m", "l", "Q8", "q_unit", "q_low") if name in self.fields):
                setattr(frame, f"{name}_all", getattr(frame, name).address)
        with e.range(0, rows * D) as cell:
            frame.Q[cell] = 0.0
        with e.range(0, rows) as row:
            frame.m[row] = self.real.lowest
            frame.l[row] = 0.0
        with e.range(0, rows * Dv) as cell:
            frame.O[cell] = 0.0
        first = frame.nth_group * args.group
        factor = 1.0 if self.kernel.bytes else args.q_factor

        def fill(head: Any, row: Any) -> None:
            source = self.row_of(e, "q", head, frame.q_start)
            with e.range(0, D) as col:
                frame.Q[row * D + col] = source.fetch(col * args.q.stride_d) * factor

        if self.kernel.together:
            with e.range(0, args.together) as nth, e.range(0, args.group) as row:
                fill(first + nth * args.group + row, nth * padded + row)
        else:
            with e.range(0, args.group) as row:
                fill(first + row, row)
        if self.limbs is not None:
            frame.exact = 1
            with e.range(0, rows) as row:
                self.call(e, self.limbs, row)

    def join_splits(self, e: Emit, number: Any) -> None:
        """Leave this split's m, l and O in the workspace; the last to arrive merges all of them in order."""
        args, frame = e.args, e.frame
        if self.kernel.together:
            self.enter_group(e, 0)
        group, Dv, splits = self.rows(e), args.Dv, args.splits
        size = group * (args.DVP + 2)
        spans = ((frame.m, 0, group), (frame.l, group, group), (frame.O, group * 2, group * Dv))
        with publish_split(e, number, splits, size, spans, lanes=0) as base:
            with e.range(1, splits) as other:
                self.call(e, self.merge, base + other * size, group)
            self.each_group(e, self.finish)

    @kernel_function(PTR, I64)
    def emit_merge(self, e: Emit, state: Pointer, group: Any) -> None:
        """merge(args, frame, state, rows): the m, l and O of another split or block join this one's."""
        frame, Dv = e.frame, e.args.Dv
        with e.range(0, group) as r:
            old, other = frame.m[r], state[r]
            m = e.fmax(old, other)
            ours, theirs = elementary.exp2(Strip([(old - m).splat(), (other - m).splat()]))
            mine, his = ours.lane(0), theirs.lane(0)
            total = e.fma(state[group + r], his, frame.l[r] * mine)
            frame.l[r] = total
            frame.m[r] = m
            O = frame.O + r * Dv
            o_in = state + (group * 2 + r * Dv)
            with e.range(0, Dv, e.lanes) as col:
                O[col] = e.fma(o_in.vector(col), theirs, O.vector(col) * ours)

    @kernel_function()
    def emit_finish(self, e: Emit) -> None:
        """finish(args, frame): the sink joins, O / l goes out in the inputs' dtype, and the LSE."""
        args, frame, dtype = e.args, e.frame, self.kernel.out
        first, Dv = frame.nth_group * args.group, args.Dv
        has_sink = args.given("sinks")
        with e.range(0, args.group) as r:
            head = first + r
            with e.if_(has_sink):
                logit, old = self.sink_logit(e, args.sinks[head]), frame.m[r]
                m = e.fmax(old, e.math("ceil", logit))
                alpha, weight = elementary.exp2(Strip([(old - m).splat(), (logit - m).splat()]))
                frame.l[r] = e.fma(frame.l[r], alpha.lane(0), weight.lane(0))
                frame.m[r] = m
                O = frame.O + r * Dv
                with e.range(0, Dv, e.lanes) as col:
                    O[col] = O.vector(col) * alpha
            total = frame.l[r]
            out = self.row_of(e, "o", head, frame.q_start)
            with e.range(0, Dv, e.lanes) as col:
                value = pack.quotient(frame.O.vector(r * Dv + col), total.splat())
                out[col] = e.narrow(value, dtype)
            lse = args.lse + self.row_index(e, head, frame.q_start)
            lse[0] = self.natural_lse(e, frame.m[r], total)
            with e.if_(has_sink):
                self.clamp_lse(e, args.sinks[head], lse, 1)
