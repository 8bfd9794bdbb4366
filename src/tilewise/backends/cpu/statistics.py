"""What the backward needs of each query row besides the row itself."""

from __future__ import annotations

from typing import Any

from tilewise.backends.cpu.elementary import LOG2E, LOG2E_PARTS
from tilewise.backends.cpu.ir import I64, PTR
from tilewise.backends.cpu.module import KernelModule


class RowStatistics(KernelModule):
    """The frame holds lse2, delta, factors and ones, a number for every row of the block."""

    row_dots: Any

    def emit_statistics(self) -> Any:
        """statistics(args, frame): lse2, delta and the factor of dO for each row of the block; `ones` becomes Q's factor.

        lse·log2(e) = hi + lo: P is computed with hi, and 2**-lo goes into dO and delta, which is the same and costs nothing.
        Rows beyond the block, and rows that see nothing, get lse2 = +inf, so P = 0.
        """
        e, (args, frame), function = self.unit.function("statistics", [PTR, PTR])
        a, f = self.open(e, args, frame)
        high, low = LOG2E_PARTS[self.kernel.real]
        position = e.plus(f.word("q_start"), f.word("m0"))
        row0 = self.row_offset(e, a, f, f.word("head"), position)
        out, dout = (self.source(e, a, f, name, f.word("head"), position) for name in ("o", "do"))
        steps = [dout, a.word("do_s"), a.word("do_d"), out, a.word("o_s"), a.word("o_d")]
        e.call(self.row_dots, [f.ptr("delta"), *steps, f.word("rows"), a.word("Dv")])
        with e.loop(0, f.word("rows")) as over:
            row = over.index
            lse = e.get(a.ptr("lse"), e.plus(row0, row))
            dead = e.fcmp_ordered("==", lse, e.num(float("-inf")))
            hi = e.fmul(lse, e.num(high))
            lo = e.mad(lse, e.num(low), e.mad(lse, e.num(high), e.fneg(hi)))
            e.put(e.select(dead, e.num(float("inf")), hi), f.ptr("lse2"), row)
            slight = e.select(dead, e.num(1.0), e.fsub(e.num(1.0), e.fmul(lo, e.num(1 / LOG2E))))
            delta = e.get(f.ptr("delta"), row)
            with e.if_else(e.icmp_signed("!=", a.word("dlse"), I64(0))) as (then, otherwise):
                with then:
                    less = e.fsub(delta, e.get(a.ptr("dlse"), e.plus(row0, row)))
                    then_block = e.block
                with otherwise:
                    other_block = e.block
            joined = e.phi(self.real.type)
            joined.add_incoming(less, then_block)
            joined.add_incoming(delta, other_block)
            e.put(joined, a.ptr("delta"), e.plus(row0, row))
            e.put(e.fmul(joined, slight), f.ptr("delta"), row)
            e.put(e.fmul(slight, a.num("grow_factor")), f.ptr("factors"), row)
        with e.loop(f.word("rows"), a.word("BM")) as over:
            for name, value in (("lse2", float("inf")), ("delta", 0.0), ("factors", 0.0)):
                e.put(e.num(value), f.ptr(name), over.index)
        with e.loop(0, a.word("BM")) as over:
            e.put(a.num("q_factor"), f.ptr("ones"), over.index)
        e.ret_void()
        return function
