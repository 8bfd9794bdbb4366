"""What the backward needs of each query row besides the row itself."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilewise.backends.cpu.elementary import LOG2E, LOG2E_PARTS
from tilewise.backends.cpu.ir import I64, PTR, Emit, Value
from tilewise.backends.cpu.masking import any_lane
from tilewise.backends.cpu.micro import strip
from tilewise.backends.cpu.module import KernelModule
from tilewise.backends.cpu.slots import Slots

FAR = 2.0**20
"""In units of log 2 or twice that. An ulp is a sixteenth there in fp32."""


class Keys(NamedTuple):
    """Keys [start, stop) of a block and the test which of them a row sees; None: all."""

    start: Value
    stop: Value
    visible: Any = None


class RowStatistics(KernelModule):
    """The frame holds lse2, delta, factors and ones, a number for every row of the block."""

    row_dots: Any

    def is_far(self, e: Emit, f: Slots, index: Value) -> Value:
        """Is a row's log-sum-exp so far from 0 that a score may be above it by any number?"""
        lse = strip(e, self.tile, f.ptr("lse2"), e.times(index, self.tile.rows))
        far, endless = e.const(FAR), e.const(float("inf"))
        sizes = [self.size(e, x) for x in lse]
        found = [e.and_(e.fcmp_ordered(">", x, far), e.fcmp_ordered("<", x, endless)) for x in sizes]
        return any_lane(e, [e.sext(x, e.vtype(e.real.bits)) for x in found])

    def size(self, e: Emit, x: Value) -> Value:
        return e.intrinsic(e._named("fabs", x.type), x.type, [x])

    def emit_statistics(self) -> Any:
        """statistics(args, frame): lse2, delta and the factor of dO for each row of the block; `ones` becomes Q's factor.

        lse·log2(e) = hi + lo: P is computed with hi, and 2**-lo goes into dO and delta, which is the same and costs nothing.
        Rows beyond the block, rows that see nothing and those whose sink outweighs everything get lse2 = +inf, so P = 0.
        """
        e, (args, frame), function = self.unit.function("statistics", [PTR, PTR])
        a, f = self.open(e, args, frame)
        unit, infinite = self.kernel.score_unit, e.num(float("inf"))
        high, low = (part / unit for part in LOG2E_PARTS[self.kernel.real])
        position = e.plus(f.word("q_start"), f.word("m0"))
        row0 = self.row_offset(e, a, f, f.word("head"), position)
        out, dout = (self.source(e, a, f, name, f.word("head"), position) for name in ("o", "do"))
        steps = [dout, a.word("do_s"), a.word("do_d"), out, a.word("o_s"), a.word("o_d")]
        e.call(self.row_dots, [f.ptr("delta"), *steps, f.word("rows"), a.word("Dv")])
        with e.loop(0, f.word("rows")) as over:
            row = over.index
            lse = e.get(a.ptr("lse"), e.plus(row0, row))
            hi = e.fmul(lse, e.num(high))
            lo = e.mad(lse, e.num(low), e.mad(lse, e.num(high), e.fneg(hi)))
            dead = e.fcmp_ordered("==", self.size(e, hi), infinite)
            e.put(e.select(dead, infinite, hi), f.ptr("lse2"), row)
            # far from 0 a log-sum-exp has no digits left for a factor, and there is nothing to put back
            digits = e.fcmp_unordered("<", self.size(e, lo), e.num(0.5))
            slight = e.select(digits, e.fsub(e.num(1.0), e.fmul(lo, e.num(unit / LOG2E))), e.num(1.0))
            slight = e.select(dead, e.num(1.0), slight)
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
