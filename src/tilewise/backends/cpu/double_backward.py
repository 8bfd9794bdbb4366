"""The double backward kernel: the derivative of the backward along a direction. docs/derivatives.md has the formulas.

    P_t = P ∘ (S_t - L_t)     dS = P ∘ (dP - delta)     dS_t = P_t ∘ (dP - delta) + P ∘ (dP_t - delta_t)
    dV_t += P_tᵀ dO           dQ_t += dS_t K + dS K_t   dK_t += dS_tᵀ Q + dSᵀ Q_t

It is the backward's kernel: what that leaves in P and dS is P_t and dS_t here, and dS lies in `moved`, where the product left the
derivatives of the scores. A tangent that is not given is a null address, and its products are left out.

L_t and delta_t are sums over a row. Where out_t is given they are known; else a pass over the keys goes ahead,

    L_t = Σ P ∘ S_t + P_z z_t        delta_t = Σ P ∘ (S_t ∘ (dP - delta) + dP_t) - P_z z_t · rowsum(dO ∘ O) - Σ P ∘ S_t · dLSE

and leaves its products S, dP, S_t and dP_t of all keys in the thread's `stash`, if there is one, for the pass that follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.backends.cpu.backward import Backward, Chunks
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.elementary import LN2
from tilewise.backends.cpu.frames import STASHED
from tilewise.backends.cpu.ir import I64, Strip, Value
from tilewise.backends.cpu.jvp import MovingTiles
from tilewise.backends.cpu.masking import Interval
from tilewise.backends.cpu.module import kernel_function
from tilewise.backends.cpu.scores import Modifier, bias_column
from tilewise.backends.cpu.statistics import Visible

PRODUCTS = ("P", "dS", "moved", "dPt")
"""Where the products of a key block lie."""
AHEAD = 12
"""Keys whose products are asked for ahead of their use. (Neoverse N1, 256 rows: 882 ms without, 748 with.)"""
ALL, LANES, PANELS = 0, 1, 2
"""Tiles that a pass over the keys packs."""


class DoubleBackward(MovingTiles, Backward):
    """The frame holds lse_t and delta_t for every row, and dPt, dO Vtᵀ; `stash` is the thread's own memory."""

    task = (*Backward.task, "stash", "packs")
    tiles = (*Backward.tiles, ("Kt", "kt", "lanes"), ("Vt", "vt", "lanes"), ("Kt_columns", "kt", "panels"))
    cleaned = ("V", "K_columns", "Vt", "Kt_columns")
    updates = (*Backward.updates, ("dk", "DR", "moved", "Qt_panels", "qt"))

    def emit_products(self) -> None:
        super().emit_products()
        self.enter = self.emit_enter()
        self.strip_sums, self.finish_sums = self.emit_strip_sums(), self.emit_finish_sums()

    @kernel_function()
    def emit_enter(self, e: Emit) -> None:
        """enter(args, frame): the thread's own part of the stash."""
        args, frame = e.args, e.frame
        with e.if_(args.given("work")):
            nth = Value(e, e.ir.atomic_rmw("add", args.done.raw, e.raw(1), "monotonic"))
            blocks = (args.Sk + (args.BN - 1)) // args.BN
            frame.stash = (args.work + nth * (blocks * self.stashed(e))).address

    def stashed(self, e: Emit) -> Any:
        """Cells of the stash that a key block takes."""
        return e.args.BN * e.args.PS * STASHED

    def place(self, e: Emit, number: Any) -> None:
        """The products of key block `number` lie in the stash, if there is one."""
        args, frame = e.args, e.frame
        with e.if_(args.given("work")):
            first = frame.address("stash", self.real.type) + number * self.stashed(e)
            for n, name in enumerate(PRODUCTS):
                setattr(frame, name, (first + args.BN * args.PS * n).address)

    def fetch_tile(self, e: Emit, tile: tuple[str, str, str], width: Any, padded: Any) -> None:
        with e.if_(e.frame.packs != (PANELS if tile[2] == "lanes" else LANES)):
            super().fetch_tile(e, tile, width, padded)

    # -- rows

    def start(self, e: Emit) -> None:
        super().start(e)
        self.clear_tiles(e, self.cleaned)
        e.frame.packs = ALL

    def emit_row_sums(self, e: Emit, position: Any) -> None:
        super().emit_row_sums(e, position)
        args, frame = e.args, e.frame
        with e.range(0, args.BM) as row:
            frame.delta_t[row], frame.lse_t[row] = 0.0, 0.0
        with e.if_(args.given("ot")):
            dout, moved = (self.row_of(e, name, frame.head, position) for name in ("do", "ot"))
            steps = [dout, args.do.stride_s, args.do.stride_d, moved, args.ot.stride_s, args.ot.stride_d]
            e.call(self.row_dots, frame.delta_t, *steps, frame.rows, args.Dv)

    def store_delta(self, e: Emit, row0: Any, row: Any, slight: Any) -> None:
        super().store_delta(e, row0, row, slight)
        args, frame = e.args, e.frame
        frame.slight[row] = slight
        with e.if_(args.given("ot")):
            frame.delta_t[row] = frame.delta_t[row] * slight
            frame.lse_t[row] = args.lse_t[row0 + row]

    def sum_rows(self, e: Emit, keys: Interval) -> None:
        args, frame = e.args, e.frame
        with e.if_(~args.given("ot")):
            frame.packs = LANES
            with self.key_blocks(e, keys, args.BN) as start:
                self.place(e, start // args.BN)
                with self.visible_block(e, lambda: 1, frame.strips), e.range(0, frame.strips) as index:
                    self.call(e, self.strip_sums, index)
            self.call(e, self.finish_sums)
            frame.packs = e.select(args.given("work"), PANELS, ALL)

    @kernel_function(I64)
    def emit_strip_sums(self, e: Emit, index: Any) -> None:
        """strip_sums(args, frame, index): the products of a strip and a key block; the strip's rows of lse_t += Σ p s_t and of
        delta_t += Σ p (s_t (dp - delta) + dp_t)."""
        head, q0 = self.strip_at(e, index)
        seq = self.seq(e, head)
        keys = self.key_range(e, seq, q0)
        with e.if_(keys.all[0] < keys.all[1], likely=True):
            self.compute(e, index, keys.all, self.chunks(e, seq, q0))
            if self.kernel.dropout:
                self.draw(e, seq, q0, keys.all)
            if not self.kernel.plain:
                self.add_sums(e, index, keys.all, Visible(keys.visible, Modifier(self.kernel, seq, q0), far=True))
                return
            for part, visible in [(keys.solid, None), *((edge, keys.visible) for edge in keys.edges)]:
                with e.if_(part[0] < part[1]):
                    self.add_sums(e, index, part, Visible(visible, None, far=True))

    def add_sums(self, e: Emit, index: Any, keys: Interval, how: Visible) -> None:
        frame, row, weights = e.frame, index * self.tile.rows, self.weights(e, index)
        lse, delta = frame.lse2.strip(row), frame.delta.strip(row)
        moving = self.moving_scores(e, index, how)
        with e.loop(*keys, 1, Strip([*e.strip(0.0), *e.strip(0.0)])) as over:
            p, _, dp, seen, tanhs = self.recompute(e, weights, lse, over.index, how)
            s_t, _, dp_t = moving(over.index, tanhs)
            seen = p != 0.0 if seen is None else seen & (p != 0.0)  # what weighs nothing counts nothing
            sums = p * s_t, p * e.each(lambda s, dp, d, dp_t: e.fma(s, dp - d, dp_t), s_t, dp, delta, dp_t)
            both = [x for sum_ in sums for x in e.select(seen, sum_, 0.0)]
            over.carry(over.values + Strip(both))
        count = len(over.values) // 2
        for rows, sums_ in ((frame.lse_t, over.values[:count]), (frame.delta_t, over.values[count:])):
            rows[row] = rows.strip(row) + Strip(sums_)

    @kernel_function()
    def emit_finish_sums(self, e: Emit) -> None:
        """finish_sums(args, frame): lse_t and delta_t are complete. The argument lse_t holds P_z z_t before, lse_t afterwards."""
        args, frame = e.args, e.frame
        row0 = self.row_index(e, frame.head, frame.q_start + frame.m0)
        with e.range(0, frame.rows) as row:
            slight, sink = frame.slight[row], args.lse_t[row0 + row]
            own = frame.lse_t[row] * slight
            dlse = e.value_if(args.given("dlse"), lambda: args.dlse[row0 + row], e.const(0.0))
            moved = frame.delta_t[row] - sink * (args.delta[row0 + row] + dlse) - own * dlse
            args.lse_t[row0 + row], args.delta_t[row0 + row] = own + sink, moved
            frame.lse_t[row], frame.delta_t[row] = own + sink, moved * slight

    def pack_rows(self, e: Emit) -> None:
        super().pack_rows(e)
        args, frame, R = e.args, e.frame, self.tile.rows
        with e.if_(args.given("qt")):
            rows = self.rows_of(e, "qt")
            e.call(self.pack_strips, frame.Qt, args.DP, *rows, args.D, frame.q_factors)
            e.call(self.pack_gradient, frame.Qt_panels, args.BM * R, *rows, frame.strips * R, args.D, frame.ds_factors)

    # -- one strip

    def clear(self, e: Emit, index: Any, keys: Interval) -> None:
        super().clear(e, index, keys)
        moved, step = e.frame.moved + index * self.tile.rows, e.args.PS
        with e.range(*keys) as j:
            moved[j * step] = e.strip(0.0)

    def block(self, e: Emit, number: Any) -> None:
        self.place(e, number)
        super().block(e, number)

    def multiply(self, e: Emit, index: Any, keys: Interval, chunks: Chunks) -> None:
        """The products, unless they are in the stash."""
        with e.if_(e.frame.packs != PANELS):
            self.compute(e, index, keys, chunks)

    def compute(self, e: Emit, index: Any, keys: Interval, chunks: Chunks) -> None:
        """Beside scores and dP: the derivatives of the scores, in the scores' unit, and dO Vtᵀ."""
        super().multiply(e, index, keys, chunks)
        args, frame, R, J = e.args, e.frame, self.tile.rows, self.tile.keys
        moved, moved_dp, step = frame.moved + index * R, frame.dPt + index * R, args.PS

        def product(function: Any, rows: Any, tile: Any, width: Any, to: Any, chunk: Any) -> None:
            operands = [rows + index * (width * R), R, tile, width * J, to, step]
            e.call(function, 0, width, *operands, *self.groups(keys), chunk)

        for given, rows, tile, width, to, chunk in (
            ("qt", frame.Qt, frame.K, args.DP, moved, chunks.scores),
            ("vt", frame.dO, frame.Vt, args.DVP, moved_dp, chunks.dp),
        ):
            with e.if_else(args.given(given)) as (moves, stays):
                with moves:
                    product(self.product, rows, tile, width, to, chunk)
                with stays, e.range(*keys) as j:
                    to[j * step] = e.strip(0.0)
        with e.if_(args.given("kt")):
            product(self.dq, frame.Q, frame.Kt, args.DP, moved, chunks.scores)

    def differentiate(self, e: Emit, index: Any, keys: Interval, visible: Any, modifier: Any, far: bool = False) -> None:
        frame, row, weights, how = e.frame, index * self.tile.rows, self.weights(e, index), Visible(visible, modifier, far)
        lse, delta, lse_t, delta_t = (x.strip(row) for x in (frame.lse2, frame.delta, frame.lse_t, frame.delta_t))
        moved, moving = frame.moved + row, self.moving_scores(e, index, how)
        with e.range(*keys) as j:
            at, raw = j * weights.step, moved.strip(j * weights.step)
            for name in PRODUCTS:  # a stash lies far away, and its rows far apart
                e.prefetch(getattr(frame, name) + (row + at + weights.step * AHEAD))
            p, _, dp, seen, tanhs = self.recompute(e, weights, lse, j, how)
            s_t, slope, dp_t = moving(j, tanhs)
            p_t = e.each(lambda p, s, l: p * (s - l), p, s_t, lse_t)
            kept = e.select(frame.kept.strip(j * self.tile.rows) != 0, p_t, 0.0) if self.kernel.dropout else p_t
            gap = dp - delta
            ds = p * gap
            ds_t = e.each(lambda p_t, gap, p, dp_t, d: e.fma(p_t, gap, p * (dp_t - d)), p_t, gap, p, dp_t, delta_t)
            if seen is not None:
                kept, ds, ds_t = (e.select(seen, x, 0.0) for x in (kept, ds, ds_t))
            if self.kernel.dbias:
                self.add_dbias(e, index, j, ds_t)
            if tanhs is not None and slope is not None:
                # cap'' · Z_t is -2 u (1 - u²) times the derivative as the product left it
                bend = e.each(lambda u, x: u * x * -2.0, tanhs, raw)
                ds_t = e.each(lambda x, y, b, slope: e.fma(y, b, x) * slope, ds_t, ds, bend, slope)
                ds = ds * slope
                if seen is not None:  # a hidden score may be NaN, and 0 · NaN is not 0
                    ds, ds_t = e.select(seen, ds, 0.0), e.select(seen, ds_t, 0.0)
            weights.P[at], weights.dS[at], moved[at] = kept, ds_t, ds

    def moving_scores(self, e: Emit, index: Any, how: Visible) -> Callable[[Any, Strip | None], tuple[Any, ...]]:
        """S_t, cap' (None: 1) and dP_t of a key, given the tanh of its raw scores."""
        frame, step, row, unit = e.frame, e.args.PS, index * self.tile.rows, LN2 * self.kernel.score_unit
        # capped scores leave the product divided by the cap
        factor = (e.args.cap_factor * unit if self.kernel.softcap else e.const(unit)).splat()

        def read(j: Any, tanhs: Strip | None) -> tuple[Any, ...]:
            slope = None if tanhs is None else e.each(lambda t: 1.0 - t * t, tanhs)
            s_t, dp_t = frame.moved.strip(j * step + row) * factor, frame.dPt.strip(j * step + row)
            s_t = s_t if slope is None else s_t * slope
            if self.kernel.bias and how.modifier is not None:
                s_t = s_t + bias_column(how.modifier, "bias_t", frame.n0 + j)
            if self.kernel.dropout:
                dp_t = e.select(frame.kept.strip(j * self.tile.rows) != 0, dp_t, 0.0)
            return s_t, slope, dp_t

        return read

    def add_dq(self, e: Emit, index: Any, keys: Interval, chunks: Chunks) -> None:
        super().add_dq(e, index, keys, chunks)
        args, frame, R = e.args, e.frame, self.tile.rows
        with e.if_(args.given("kt")):
            dQ, last = frame.dQ + index * (args.DP * R), args.DP // self.tile.keys
            operands = [frame.moved + index * R, args.PS, frame.Kt_columns, self.panel(e), dQ, R]
            e.call(self.dq, *keys, *operands, 0, last, chunks.dq)
