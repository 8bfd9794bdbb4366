"""The double backward kernel: the derivative of the backward along a direction. docs/derivatives.md has the formulas.

    P_t = P ∘ (S_t - L_t)     dS = P ∘ (dP - delta)     dS_t = P_t ∘ (dP - delta) + P ∘ (dP_t - delta_t)
    dV_t += P_tᵀ dO           dQ_t += dS_t K + dS K_t   dK_t += dS_tᵀ Q + dSᵀ Q_t

It is the backward's kernel: what that leaves in P and dS is P_t and dS_t here, and dS lies in `moved`, where the product left the
derivatives of the scores. A tangent that is not given is a null address, and its products are left out.
"""

from __future__ import annotations

from typing import Any

from tilewise.backends.cpu.backward import Backward, Chunks
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.elementary import LN2
from tilewise.backends.cpu.jvp import MovingTiles
from tilewise.backends.cpu.masking import Interval
from tilewise.backends.cpu.scores import bias_column
from tilewise.backends.cpu.statistics import Visible


class DoubleBackward(MovingTiles, Backward):
    """The frame holds lse_t and delta_t for every row, and dPt, dO Vtᵀ of a strip."""

    tiles = (*Backward.tiles, ("Kt", "kt", "lanes"), ("Vt", "vt", "lanes"), ("Kt_columns", "kt", "panels"))
    cleaned = ("V", "K_columns", "Vt", "Kt_columns")
    updates = (*Backward.updates, ("dk", "DR", "moved", "Qt_panels", "qt"))

    # -- rows

    def start(self, e: Emit) -> None:
        super().start(e)
        self.clear_tiles(e)

    def emit_row_sums(self, e: Emit, position: Any) -> None:
        super().emit_row_sums(e, position)
        args, frame = e.args, e.frame
        dout, moved = (self.row_of(e, name, frame.head, position) for name in ("do", "ot"))
        steps = [dout, args.do.stride_s, args.do.stride_d, moved, args.ot.stride_s, args.ot.stride_d]
        e.call(self.row_dots, frame.delta_t, *steps, frame.rows, args.Dv)
        with e.range(frame.rows, args.BM) as row:
            frame.delta_t[row], frame.lse_t[row] = 0.0, 0.0

    def store_delta(self, e: Emit, row0: Any, row: Any, slight: Any) -> None:
        super().store_delta(e, row0, row, slight)
        e.frame.delta_t[row] = e.frame.delta_t[row] * slight
        e.frame.lse_t[row] = e.args.lse_t[row0 + row]

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

    def multiply(self, e: Emit, index: Any, keys: Interval, chunks: Chunks) -> None:
        """Beside scores and dP: the derivatives of the scores, in the scores' unit, and dO Vtᵀ."""
        super().multiply(e, index, keys, chunks)
        args, frame, R, J = e.args, e.frame, self.tile.rows, self.tile.keys
        moved, step = frame.moved + index * R, args.PS
        with e.range(*keys) as j:
            moved[j * step] = e.strip(0.0)
            frame.dPt[j * R] = e.strip(0.0)
        for given, rows, tile, width, to, apart, chunk in (
            ("qt", frame.Qt, frame.K, args.DP, moved, step, chunks.scores),
            ("kt", frame.Q, frame.Kt, args.DP, moved, step, chunks.scores),
            ("vt", frame.dO, frame.Vt, args.DVP, frame.dPt, R, chunks.dp),
        ):
            with e.if_(args.given(given)):
                operands = [rows + index * (width * R), R, tile, width * J, to, apart]
                e.call(self.dq, 0, width, *operands, *self.groups(keys), chunk)

    def differentiate(self, e: Emit, index: Any, keys: Interval, visible: Any, modifier: Any, far: bool = False) -> None:
        frame, row, weights = e.frame, index * self.tile.rows, self.weights(e, index)
        lse, delta, lse_t, delta_t = (x.strip(row) for x in (frame.lse2, frame.delta, frame.lse_t, frame.delta_t))
        moved, unit = frame.moved + row, LN2 * self.kernel.score_unit
        # capped scores leave the product divided by the cap
        factor = (e.args.cap_factor * unit if self.kernel.softcap else e.const(unit)).splat()
        with e.range(*keys) as j:
            at, raw = j * weights.step, moved.strip(j * weights.step)
            p, _, dp, seen, tanhs = self.recompute(e, weights, lse, j, Visible(visible, modifier, far))
            slope = None if tanhs is None else e.each(lambda t: 1.0 - t * t, tanhs)
            s_t = raw * factor if slope is None else raw * factor * slope
            if self.kernel.bias:
                s_t = s_t + bias_column(modifier, "bias_t", frame.n0 + j)
            dp_t, p_t = frame.dPt.strip(j * self.tile.rows), e.each(lambda p, s, l: p * (s - l), p, s_t, lse_t)
            kept = p_t
            if self.kernel.dropout:
                spared = frame.kept.strip(j * self.tile.rows) != 0
                dp_t, kept = e.select(spared, dp_t, 0.0), e.select(spared, p_t, 0.0)
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

    def add_dq(self, e: Emit, index: Any, keys: Interval, chunks: Chunks) -> None:
        super().add_dq(e, index, keys, chunks)
        args, frame, R = e.args, e.frame, self.tile.rows
        with e.if_(args.given("kt")):
            dQ, last = frame.dQ + index * (args.DP * R), args.DP // self.tile.keys
            operands = [frame.moved + index * R, args.PS, frame.Kt_columns, self.panel(e), dQ, R]
            e.call(self.dq, *keys, *operands, 0, last, chunks.dq)
