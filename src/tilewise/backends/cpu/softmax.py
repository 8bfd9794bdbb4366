"""Scores of a strip into weights, in two ways.

The plain way takes the maximum of the scores first, as online softmax does, and watches both ends of the exponents. But softmax
does not need the maximum, only an m that is not too far from it, and |q| |k| is an upper bound of every score. Where that bound
is small, and for most inputs it is, m is the bound and nothing can overflow or vanish: the strip is calm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.backends.cpu.elementary import exp2, exp2_integer, exp2_near
from tilewise.backends.cpu.ir import I32, I64, PTR, Emit, Value
from tilewise.backends.cpu.masking import any_lane, interval, lane_interval
from tilewise.backends.cpu.micro import put_strip, strip
from tilewise.backends.cpu.module import KernelModule
from tilewise.backends.cpu.pack import fetch
from tilewise.backends.cpu.slots import Slots
from tilewise.backends.cpu.spec import UNROLL

CALM = 40
"""Bounds on |s| and m up to which a strip is calm: 2**(s - m) is at least 2**-80, so its product with a value of any ordinary
size is a normal number. Where products with smaller values may not have been, the task is done again, the plain way."""


class Softmax(KernelModule):
    """The frame holds m, l and the bounds for every row, P, `sums` (Σ P of a block), `top` and alpha for one strip."""

    pace = 1  # keys weighed together

    def level(self, e: Emit, top: Value) -> Value:
        """The m of scores up to `top`: the next integer, so that rescaling is exact."""
        return e.ceiling(top)

    def shrink(self, e: Emit, xs: list[Value]) -> list[Value]:
        """2**x for a difference of two m."""
        return exp2_integer(e, xs)

    def known(self, e: Emit, m: Value, total: Value) -> Value:
        """m, where something was weighed with it: a bound is taken for whole strips, whether or not a row sees a key."""
        none = e.fcmp_ordered("==", total, e.const(0.0))
        return e.select(none, e.const(self.real.lowest), m)

    def settle(self, e: Emit, f: Slots, index: Value, tops: list[Value]) -> None:
        """m moves on to the scores' level; alpha is left for l and O."""
        row = e.times(index, self.tile.rows)
        m_ptr, totals = e.at(f.ptr("m"), row), strip(e, self.tile, f.ptr("l"), row)
        old = [self.known(e, m, total) for m, total in zip(strip(e, self.tile, m_ptr), totals, strict=True)]
        m = [e.top(x, self.level(e, y)) for x, y in zip(old, tops, strict=True)]
        alpha = self.shrink(e, [self.exponent(e, before, now) for before, now in zip(old, m, strict=True)])
        put_strip(e, m, m_ptr)
        put_strip(e, alpha, f.ptr("alpha"))

    def emit_weigh(self) -> Any:
        """weigh(frame, index, j0, j1): P = 2**(s - m) in place for keys [j0, j1); `sums` grows by them."""
        e, (frame, index, j0, j1), function = self.unit.function("weigh", [PTR, I64, I64, I64])
        f = Slots(e, frame, self.frame)
        m = strip(e, self.tile, f.ptr("m"), e.times(index, self.tile.rows))
        P, put = f.ptr("P"), self.putter(e, f)
        with e.loop(j0, j1, self.pace, strip(e, self.tile, f.ptr("sums"))) as over:
            weights, totals = [], over.values
            for n in range(self.pace):
                s = strip(e, self.tile, P, e.times(e.plus(over.index, n), self.tile.rows))
                p = exp2(e, [self.exponent(e, x, y) for x, y in zip(s, m, strict=True)], self.real.degree - 1)
                totals = [e.fadd(t, x) for t, x in zip(totals, p, strict=True)]
                weights.append(p)
            put(over.index, weights)
            over.carry(totals)
        put_strip(e, over.values, f.ptr("sums"))
        e.ret_void()
        return function

    def putter(self, e: Emit, f: Slots) -> Callable[[Value, list[list[Value]]], None]:
        """`put(j, weights)`: the weights of `pace` keys from j on go to where the product with V wants them."""
        P, R = f.ptr("P"), self.tile.rows
        return lambda j, weights: put_strip(e, weights[0], P, e.times(j, R))

    def lift(self, e: Emit, f: Slots, index: Value, edges: tuple[tuple[Value, Value], ...]) -> None:
        """What is hidden at the edges is put where 2**(s - m) ends, and weighs exactly nothing."""
        P, R, low = f.ptr("P"), self.tile.rows, e.const(self.real.floor)
        least = [e.fadd(m, low) for m in strip(e, self.tile, f.ptr("m"), e.times(index, R))]
        for start, stop in edges:
            with e.loop(start, stop) as over:
                at = e.times(over.index, R)
                put_strip(e, [e.at_least(x, y) for x, y in zip(strip(e, self.tile, P, at), least, strict=True)], P, at)

    def emit_weigh_calm(self, name: str, degree: int, chains: int) -> Any:
        """weigh(frame, index, j0, j1): the same for a calm strip, in fewer steps and without rounding s - m; 2**x by a polynomial
        of that degree, their total as so many sums side by side."""
        e, (frame, index, j0, j1), function = self.unit.function(name, [PTR, I64, I64, I64])
        f = Slots(e, frame, self.frame)
        P, m = f.ptr("P"), strip(e, self.tile, f.ptr("m"), e.times(index, self.tile.rows))
        level, V = [e.fsub(e.const(self.real.magic), x) for x in m], self.tile.vectors
        start = [*strip(e, self.tile, f.ptr("sums")), *[e.const(0.0)] * (V * (chains - 1))]
        with e.loop(j0, j1, chains, start) as over:
            totals = []
            for n in range(chains):
                at = e.times(e.plus(over.index, n), self.tile.rows)
                p = exp2_near(e, strip(e, self.tile, P, at), level, degree)
                put_strip(e, p, P, at)
                totals += [e.fadd(t, x) for t, x in zip(over.values[n * V : (n + 1) * V], p, strict=True)]
            over.carry(totals)
        total, *others = (over.values[n * V : (n + 1) * V] for n in range(chains))
        for other in others:
            total = [e.fadd(x, y) for x, y in zip(total, other, strict=True)]
        put_strip(e, total, f.ptr("sums"))
        e.ret_void()
        return function

    # -- bounds

    def bounds(self, e: Emit, f: Slots, index: Value) -> list[Value]:
        """No score of the strip and the key block is larger: |q·k| <= |q| |k|."""
        longest = e.splat(e.get(f.ptr("longest")))
        return [e.fmul(x, longest) for x in strip(e, self.tile, f.ptr("reach"), e.times(index, self.tile.rows))]

    def is_calm(self, e: Emit, f: Slots, index: Value) -> Value:
        """Are bounds and maxima so small that 2**(s - m) needs no maximum of s, nor care for the exponents' ends?

        A maximum far below zero is not: raising it to the bound would lose what was weighed, and not every row has a key here.
        """
        high, low, row, kind = e.const(CALM), e.const(-CALM), e.times(index, self.tile.rows), e.vtype(e.real.bits)
        again = e.icmp_signed("!=", f.word("again"), I64(0))
        maxima, totals = (strip(e, self.tile, f.ptr(name), row) for name in ("m", "l"))
        wild = []
        for m, total, bound in zip(maxima, totals, self.bounds(e, f, index), strict=True):
            deep = e.and_(e.fcmp_ordered("<", m, low), e.fcmp_unordered("!=", total, e.const(0.0)))
            strange = e.fcmp_unordered(">", bound, high)  # a NaN is, too
            wild.append(e.sext(e.or_(e.or_(e.fcmp_ordered(">", m, high), deep), strange), kind))
        return e.not_(e.or_(again, any_lane(e, wild)))

    def emit_vanished(self) -> Any:
        """vanished(args, frame, strips, low, high): 1 if products with the values of keys [low, high) may have been too small for
        all their digits: a row's weights are far below 1, its sums are next to nothing, and some value is tiny but not 0.

        Sums of n products too small to be normal are off by n times half the least number at most. Divided by a total of weights
        of n / 2**mantissa that is less than the least normal number.
        """
        e, (args, frame, strips, low, high), function = self.unit.function("vanished", [PTR, PTR, I64, I64, I64], result=I64)
        a, f = self.open(e, args, frame)
        R, Dv, kind, zero = self.tile.rows, a.word("Dv"), e.vtype(e.real.bits), e.const(0.0)
        faint, least = e.const(self.real.tiny * 2.0 ** (self.real.mantissa + 3)), self.real.tiny * 2.0 ** (2 * CALM)

        def size(x: Value) -> Value:
            return e.intrinsic(e._named("fabs", x.type), x.type, [x])

        with e.loop(0, strips, 1, [e.iconst(0)] * self.tile.vectors) as over:
            totals = strip(e, self.tile, f.ptr("l"), e.times(over.index, R))
            head, q0 = self.where(e, a, f, over.index)
            last = e.least(e.plus(q0, R - 1), e.minus(f.word("Sq"), 1))
            ends = [interval(e, self.place(a, f, head), self.terms[0], row)[side] for side, row in enumerate((q0, last))]
            keys = e.sitofp(e.minus(ends[1], ends[0]), e.real.type)
            few = e.splat(e.fmul(keys, e.num(2.0**-self.real.mantissa)))
            far = [e.and_(e.fcmp_ordered("<", t, few), e.fcmp_ordered(">", t, zero)) for t in totals]
            far = [e.sext(x, kind) for x in far]
            O = e.at(f.ptr("O"), e.times(over.index, e.times(a.word("DVP"), R)))
            columns = e.select(any_lane(e, far), Dv, I64(0))
            with e.loop(0, columns, 1, over.values) as col:
                cells = strip(e, self.tile, O, e.times(col.index, R))
                low_cells = [e.sext(e.fcmp_ordered("<", size(x), faint), kind) for x in cells]
                lost = [e.and_(x, y) for x, y in zip(far, low_cells, strict=True)]
                col.carry([e.or_(x, y) for x, y in zip(col.values, lost, strict=True)])
            over.carry(col.values)
        with e.if_then(e.not_(any_lane(e, over.values)), likely=True):
            e.ret(I64(0))
        V = self.source(e, a, f, "v", f.word("key_head"), f.word("k_start"))
        with e.loop(low, high) as key, e.loop(0, Dv) as col:
            at = e.plus(e.times(key.index, a.word("v_s")), e.times(col.index, a.word("v_d")))
            value = size(fetch(e, V, at, self.kernel.dtype))
            with e.if_then(e.and_(e.fcmp_ordered("<", value, e.num(least)), e.fcmp_ordered(">", value, e.num(0.0)))):
                e.ret(I64(1))
        e.ret(I64(0))
        return function

    def reach(self, e: Emit, a: Slots, f: Slots, index: Value) -> None:
        """|q| of a strip's rows; 0 for those that see no key, whatever they hold."""
        R, DP = self.tile.rows, a.word("DP")
        Q = e.at(f.ptr("Q"), e.times(index, e.times(DP, R)))
        with e.loop(0, DP, 1, [e.const(0.0)] * self.tile.vectors) as col:
            q = strip(e, self.tile, Q, e.times(col.index, R))
            col.carry([e.mad(x, x, t) for x, t in zip(q, col.values, strict=True)])
        roots = [e.intrinsic(e._named("sqrt", x.type), x.type, [x]) for x in col.values]
        head, q0 = self.where(e, a, f, index)
        place, term = self.place(a, f, head), self.terms[0]
        lows, highs = lane_interval(e, self.tile, place, term, q0, (interval(e, place, term, q0)[0], place.Sk))
        alive = [e.icmp_signed("<", low, high) for low, high in zip(lows, highs, strict=True)]
        roots = [e.select(x, y, e.const(0.0)) for x, y in zip(alive, roots, strict=True)]
        put_strip(e, roots, f.ptr("reach"), e.times(index, R))

    def emit_measure(self) -> Any:
        """measure(args, frame): `longest` = the largest |k| of the packed block; NaN if any element is not finite."""
        e, (args, frame), function = self.unit.function("measure", [PTR, PTR])
        a, f = self.open(e, args, frame)
        J, zero = self.tile.keys, e.const(0.0, self.tile.keys)
        size = e.times(a.word("DP"), J)
        with e.loop(0, e.over(f.word("n_pad"), J), 1, [zero, zero]) as group:
            cells = e.at(f.ptr("K"), e.times(group.index, size))
            with e.loop(0, size, UNROLL * J, [zero] * UNROLL) as col:
                k = [e.vget(cells, e.plus(col.index, n * J), lanes=J) for n in range(UNROLL)]
                col.carry([e.mad(x, x, t) for x, t in zip(k, col.values, strict=True)])
            a0, a1, a2, a3 = col.values
            square = e.fadd(e.fadd(a0, a1), e.fadd(a2, a3))
            group.carry([e.at_least(square, group.values[0]), e.mad(square, zero, group.values[1])])
        square, nothing = group.values
        largest = e.extract_element(square, I32(0))
        for n in range(1, J):
            other = e.extract_element(square, I32(n))
            largest = e.select(e.fcmp_ordered(">", other, largest), other, largest)
        root = e.intrinsic(e._named("sqrt", largest.type), largest.type, [largest])
        e.put(e.fadd(root, e.sum(nothing)), f.ptr("longest"))
        e.ret_void()
        return function
