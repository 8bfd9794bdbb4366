"""What the backward needs of each query row besides the row itself."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilewise.backends.cpu import masking
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.elementary import LOG2E, LOG2E_PARTS
from tilewise.backends.cpu.ir import I64
from tilewise.backends.cpu.module import KernelModule, kernel_function
from tilewise.backends.cpu.scores import Modifier

FAR = 2.0**20
"""In units of log 2 or twice that. An ulp is a sixteenth there in fp32."""
INFINITY = float("inf")


class Visible(NamedTuple):
    """Which rows see a key, `rows(j)` (None: all do), what changes its scores, and whether a row's lse is far from 0."""

    rows: Any
    modifier: Modifier | None
    far: bool


class RowStatistics(KernelModule):
    """The frame holds lse2, delta and the factors of dO, a number for every row of the block."""

    row_dots: Any
    weights: Any
    multiply: Any
    chunks: Any
    draw: Any
    recompute: Any
    """The backward's."""

    def is_far(self, e: Emit, index: Any) -> Any:
        """Is a row's log-sum-exp so far from 0 that a score may be above it by any number?"""
        lse = e.frame.lse2.strip(index * self.tile.rows)
        far = e.each(lambda size: (size > FAR) & (size < INFINITY), abs(lse))
        return masking.any_lane(far.sext(e.real.bits))

    @kernel_function()
    def emit_statistics(self, e: Emit) -> None:
        """statistics(args, frame): lse2, delta and the factor of dO for each row of the block, and the factor of Q.

        lse·log2(e) = hi + lo: P is computed with hi, and 2**-lo goes into dO and delta, which is the same and costs nothing.
        Rows beyond the block, rows that see nothing and those whose sink outweighs everything get lse2 = +inf, so P = 0.
        """
        args, frame, unit = e.args, e.frame, self.kernel.score_unit
        high, low = (part / unit for part in LOG2E_PARTS[self.kernel.real])
        position = frame.q_start + frame.m0
        row0 = self.row_index(e, frame.head, position)
        out, dout = (self.row_of(e, name, frame.head, position) for name in ("o", "do"))
        steps = [dout, args.do.stride_s, args.do.stride_d, out, args.o.stride_s, args.o.stride_d]
        if not self.kernel.double:
            e.call(self.row_dots, frame.delta, *steps, frame.rows, args.Dv)
        with e.range(0, frame.rows) as row:
            lse = args.lse[row0 + row]
            hi = lse * high
            lo = e.fma(lse, e.const(low), e.fma(lse, e.const(high), -hi))
            dead = abs(hi) == INFINITY
            frame.lse2[row] = e.select(dead, INFINITY, hi)
            # far from 0 a log-sum-exp has no digits left for a factor, and there is nothing to put back
            digits = e.compare("<", abs(lo), 0.5, nan=True)
            slight = e.select(digits, 1.0 - lo * (unit / LOG2E), 1.0)
            slight = e.select(dead, 1.0, slight)
            if self.kernel.double:
                frame.delta[row], frame.slight[row] = 0.0, slight
            else:
                self.store_delta(e, row0, row, slight)
            frame.do_factors[row] = slight * args.grow_factor
            if self.kernel.stats:  # in the kernel's unit
                frame.dentropy[row] = args.dentropy[row0 + row] * slight * (unit / LOG2E)
                frame.mean[row] = args.mean[row0 + row] * (LOG2E / unit)
        with e.range(frame.rows, args.BM) as row:
            frame.lse2[row] = INFINITY
            frame.delta[row] = 0.0
            frame.do_factors[row] = 0.0
            if self.kernel.stats:
                frame.dentropy[row], frame.mean[row] = 0.0, 0.0
        if not self.kernel.matrix:
            with e.range(0, args.BM) as row:
                frame.q_factors[row] = args.q_factor
                frame.ds_factors[row] = args.ds_factor
        else:
            with e.range(0, args.BM) as row:  # dS is scaled before it is rounded
                frame.ds_factors[row] = 1.0

    def entropy_rows(self, e: Emit, row: Any) -> dict[str, Any]:
        """Of a strip: what comes back to the entropy, and the mean logit."""
        if not self.kernel.stats:
            return {}
        return {"dentropy": e.frame.dentropy.strip(row), "mean": e.frame.mean.strip(row)}

    def add_entropy(self, e: Emit, weights: Any, s: Any, dp: Any) -> Any:
        """dP with what comes back to the entropy: -dH · (s - mean)."""
        return e.each(lambda dp, h, s, mean: e.fma(-h, s - mean, dp), dp, weights.dentropy, s, weights.mean)

    def store_delta(self, e: Emit, row0: Any, row: Any, slight: Any) -> None:
        """delta - dLSE, for the gradient of a sink and, times the factor that dO has, for dS."""
        args, frame = e.args, e.frame
        delta = frame.delta[row]
        delta = e.value_if(args.given("dlse"), lambda: delta - args.dlse[row0 + row], delta)
        args.delta[row0 + row] = delta
        frame.delta[row] = delta * slight

    @kernel_function(I64)
    def emit_strip_delta(self, e: Emit, index: Any) -> None:
        """strip_delta(args, frame, index): delta of the strip's rows += Σ P·dP over the keys of the block."""
        head, q0 = self.strip_at(e, index)
        seq, row, weights = self.seq(e, head), index * self.tile.rows, self.weights(e, index)
        keys = self.key_range(e, seq, q0)
        with e.if_(keys.all[0] < keys.all[1], likely=True):
            self.multiply(e, index, keys.all, self.chunks(e, seq, q0))
            if self.kernel.dropout:
                self.draw(e, seq, q0, keys.all)
            how = Visible(keys.visible, None if self.kernel.plain else Modifier(self.kernel, seq, q0), far=True)
            lse = e.frame.lse2.strip(row)
            with e.loop(*keys.all, 1, e.frame.delta.strip(row)) as over:
                p, _, dp, seen, _ = self.recompute(e, weights, lse, over.index, how)
                over.carry(over.values + e.select(seen, p * dp, 0.0))
            e.frame.delta[row] = over.values

    @kernel_function()
    def emit_finish_delta(self, e: Emit) -> None:
        """finish_delta(args, frame): where delta was summed over the keys, it is complete."""
        frame = e.frame
        row0 = self.row_index(e, frame.head, frame.q_start + frame.m0)
        with e.range(0, frame.rows) as row:
            self.store_delta(e, row0, row, frame.slight[row])
