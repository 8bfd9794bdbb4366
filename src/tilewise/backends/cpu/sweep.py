"""The sweep: weights of all rows once their log-sum-exp is known. One product with the keys gives both

    mass[key] = Σ_rows 2**(s - lse)          and of each row the k largest scores and their keys

A task is one block of query rows of one query head. Rows are its own; the masses of keys are added in the order of tasks, as the
backward adds dK and dV. Keys come in order and only a larger score passes another, so of equal ones the first key comes first.
"""

from __future__ import annotations

from typing import Any

from tilewise.backends.cpu import elementary, masking, micro
from tilewise.backends.cpu.backward import Backward
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.elementary import LOG2E
from tilewise.backends.cpu.function import kernel_function
from tilewise.backends.cpu.ir import I64, gather
from tilewise.backends.cpu.masking import Interval
from tilewise.backends.cpu.module import KernelModule
from tilewise.backends.cpu.scores import Modifier
from tilewise.backends.cpu.spec import Kernel

INFINITY = float("inf")


class Sweep(Backward):
    """The frame holds lse2 and the k largest, `top_s` and `top_i`, of every row, `key_sums` of a block, a strip's scores in P."""

    tiles = (("K", "k", "lanes"),)
    cleaned = ()

    def __init__(self, kernel: Kernel, arch: str) -> None:
        KernelModule.__init__(self, kernel, arch)
        self.emit_helpers()
        self.product = micro.by_panels(self.unit, "product")
        self.insert = self.emit_insert()
        self.strip = self.emit_strip()
        self.wait = self.emit_wait()
        self.update = self.emit_update()
        self.emit_worker(self.emit_task())

    # -- rows

    def start(self, e: Emit) -> None:
        args, frame = e.args, e.frame
        self.lay_out(e)
        row0 = self.row_index(e, frame.head, frame.q_start + frame.m0)
        with e.range(0, args.BM) as row:
            frame.q_factors[row] = args.q_factor
            frame.lse2[row] = INFINITY  # beyond the block nothing weighs anything
        with e.range(0, frame.rows) as row:
            lse2 = args.lse[row0 + row] * (LOG2E / self.kernel.score_unit)
            frame.lse2[row] = e.select(lse2 == -INFINITY, INFINITY, lse2)
        with e.range(0, args.BM * args.top) as cell:
            frame.top_s[cell] = -INFINITY
            frame.top_i[cell] = e.const(-1, I64)
        e.call(self.pack_strips, frame.Q, args.DP, *self.rows_of(e, "q"), args.D, frame.q_factors)

    def finish(self, e: Emit) -> None:
        """The largest scores become weights."""
        args, frame = e.args, e.frame
        row0 = self.row_index(e, frame.head, frame.q_start + frame.m0)
        with e.range(0, frame.rows) as row, e.range(0, args.top) as n:
            at, to = row * args.top + n, (row0 + row) * args.top + n
            gap = self.exponent(frame.top_s[at].splat(), frame.lse2[row].splat())
            args.top_weights[to] = elementary.exp2(e.at_most(gap, 0.0)).lane(0)
            args.top_indices[to] = frame.top_i[at]

    # -- one key block

    def block(self, e: Emit, number: Any) -> None:
        with self.visible_block(e, lambda: 1, e.frame.strips):
            with e.range(0, e.frame.n_pad) as j:
                e.frame.key_sums[j] = 0.0
            with e.range(0, e.frame.strips) as index:
                self.call(e, self.strip, index)
            with e.if_(e.args.given("mass")):
                self.call(e, self.wait, number)
                self.call(e, self.update)

    @kernel_function(I64)
    def emit_strip(self, e: Emit, index: Any) -> None:
        """strip(args, frame, index): scores of the keys that the strip sees, -inf where hidden; their weights join the sums."""
        head, q0 = self.strip_at(e, index)
        seq = self.seq(e, head)
        keys = self.key_range(e, seq, q0)
        with e.if_(keys.all[0] >= keys.all[1], likely=False):
            e.ret()
        args, frame, R, P = e.args, e.frame, self.tile.rows, e.frame.P
        chunk = micro.chunk_steps(args.DP, 2)
        operands = [frame.Q + index * (args.DP * R), R, frame.K, args.DP * self.tile.keys, P, R]
        e.call(self.product, 0, args.DP, *operands, *self.groups(keys.all), chunk)
        modifier = None if self.kernel.plain else Modifier(self.kernel, seq, q0)
        for part in (keys.all,) if modifier else keys.edges:
            with e.range(*part) as j:
                s, seen = P.strip(j * R), keys.visible(j)
                if modifier:
                    s, unmasked, _ = modifier.apply(s, frame.n0 + j)
                    seen = seen if unmasked is None else seen & unmasked
                P[j * R] = e.select(seen, s, -INFINITY)
        with e.if_(args.given("mass")):
            self.add_weights(e, index, keys.all)
        with e.if_(args.given("top_weights")):
            self.call(e, self.insert, index, *keys.all)

    def add_weights(self, e: Emit, index: Any, keys: Interval) -> None:
        P, R, sums, lse = e.frame.P, self.tile.rows, e.frame.key_sums, e.frame.lse2.strip(index * self.tile.rows)
        with e.range(*keys) as j:
            p = elementary.exp2(e.at_most(self.exponent(P.strip(j * R), lse), 0.0))
            total = p[0]
            for vector in p[1:]:
                total = total + vector
            sums[j] = sums[j] + total.sum()

    @kernel_function(I64, I64, I64)
    def emit_insert(self, e: Emit, index: Any, j0: Any, j1: Any) -> None:
        """insert(args, frame, index, j0, j1): scores above a row's least of its largest take their place among them."""
        args, frame, R = e.args, e.frame, self.tile.rows
        top, row0 = args.top, index * R
        with e.range(j0, j1) as j:
            scores = frame.P + j * R
            least = gather([frame.top_s[(row0 + r) * top + (top - 1)] for r in range(R)])
            larger = e.each(lambda s, x: (s > x).sext(e.real.bits), scores.strip(), least)
            with e.if_(masking.any_lane(larger), likely=False), e.range(0, R) as r:
                first = (row0 + r) * top
                score = scores[r]
                passes = score > frame.top_s[first + (top - 1)]
                # it takes the place of the first that is smaller, and all from there on move by one
                with e.loop(0, e.select(passes, top, 0), 1, [score, frame.n0 + j, e.const(0, I64)]) as over:
                    at, (value, key, moving) = first + over.index, over.values
                    other, place = frame.top_s[at], frame.top_i[at]
                    passes = (value > other) | (moving != 0)
                    frame.top_s[at] = e.select(passes, value, other)
                    frame.top_i[at] = e.select(passes, key, place)
                    kept = e.select(passes, other, value), e.select(passes, place, key)
                    over.carry([*kept, e.select(passes, e.const(1, I64), moving)])

    @kernel_function()
    def emit_update(self, e: Emit) -> None:
        """update(args, frame): the block's sums join the masses of its keys."""
        args, frame = e.args, e.frame
        row = self.batch_index(e) * (args.groups * args.group) + frame.head
        mass = args.mass + (row * args.Sk + frame.k_start + frame.n0)
        with e.range(0, frame.n1 - frame.n0) as j:
            mass[j] = mass[j] + frame.key_sums[j]
