"""What the backward needs of each query row besides the row itself."""

from __future__ import annotations

from typing import Any

from tilewise.backends.cpu import masking
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.elementary import LOG2E, LOG2E_PARTS
from tilewise.backends.cpu.module import KernelModule, kernel_function

FAR = 2.0**20
"""In units of log 2 or twice that. An ulp is a sixteenth there in fp32."""
INFINITY = float("inf")


class RowStatistics(KernelModule):
    """The frame holds lse2, delta and the factors of dO, a number for every row of the block."""

    row_dots: Any

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
            delta = frame.delta[row]
            delta = e.value_if(args.given("dlse"), lambda: delta - args.dlse[row0 + row], delta)
            args.delta[row0 + row] = delta
            frame.delta[row] = delta * slight
            frame.do_factors[row] = slight * args.grow_factor
        with e.range(frame.rows, args.BM) as row:
            frame.lse2[row] = INFINITY
            frame.delta[row] = 0.0
            frame.do_factors[row] = 0.0
        if not self.kernel.matrix:
            with e.range(0, args.BM) as row:
                frame.q_factors[row] = args.q_factor
                frame.ds_factors[row] = args.ds_factor
        else:
            with e.range(0, args.BM) as row:  # dS is scaled before it is rounded
                frame.ds_factors[row] = 1.0
