"""Scores of a strip into weights: online softmax, in two ways.

The general way takes the maximum of the scores first and watches both ends of the exponents. But softmax does not need the
maximum, only an m that is not too far from it, and |q| |k| is an upper bound of every score. Where that bound is small, and for
most inputs it is, m is the bound and nothing can overflow or vanish: the strip is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

from tilewise.backends.cpu import elementary
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.halves import Halves
from tilewise.backends.cpu.ir import I64, Strip
from tilewise.backends.cpu.masking import Interval, any_lane, interval, lane_interval
from tilewise.backends.cpu.module import kernel_function
from tilewise.backends.cpu.spec import UNROLL
from tilewise.backends.cpu.stats import RowWatch

BOUND = 40
"""Bounds on |s| and m up to which a strip is bounded: 2**(s - m) is at least 2**-80, so its product with a value of any ordinary
size is a normal number. Where products with smaller values may not have been, the task is done again, the general way."""


class Softmax(RowWatch, Halves):
    """The frame holds m, l and the norms for every row, P, `row_sum` (Σ P of a block), `row_max` and alpha for one strip."""

    pace = 1  # keys whose weights are computed together

    def level(self, e: Emit, row_max: Any) -> Any:
        """The m of scores up to `row_max`: the next integer, so that rescaling is exact."""
        return e.math("ceil", row_max)

    def rescale_factor(self, difference: Any) -> Any:
        """2**x for a difference of two m."""
        return elementary.exp2_integer(difference)

    def valid_max(self, e: Emit, m: Any, row_sum: Any) -> Any:
        """m, where some weight was computed with it: a bound is taken for whole strips, whether or not a row sees a key."""
        return e.each(lambda m, total: e.select(total == 0.0, self.real.lowest, m), m, row_sum)

    def update_max(self, e: Emit, index: Any, row_max: Strip) -> None:
        """m moves on to the scores' level; alpha is left for l and O."""
        row = self.row(e, index)
        m_ptr, row_sum = e.frame.m + row, e.frame.l.strip(row)
        old = self.valid_max(e, m_ptr.strip(), row_sum)
        m = e.each(lambda x, y: e.fmax(x, self.level(e, y)), old, row_max)
        gap = self.exponent(old, m)
        alpha = self.rescale_factor(gap)
        m_ptr[0] = m
        e.frame.alpha[0] = alpha
        if self.kernel.stats:
            self.watch_shift(e, gap, row_sum)

    @kernel_function(I64, I64, I64, args=False)
    def emit_softmax_step(self, e: Emit, index: Any, j0: Any, j1: Any) -> None:
        """softmax_step(frame, index, j0, j1): P = 2**(s - m) in place for keys [j0, j1); `row_sum` grows by them."""
        R = self.tile.rows
        m = e.frame.m.strip(self.row(e, index))
        P, put, V = e.frame.P, self.weight_store(e), e.tile.vectors
        with e.loop(j0, j1, self.pace, self.watched_sums(e)) as over:
            weights, total, spread = [], Strip(over.values[:V]), Strip(over.values[V:])
            for n in range(self.pace):
                s = P.strip((over.index + n) * R)
                gap = self.exponent(s, m)
                p = elementary.exp2(gap, self.real.degree - 1)
                total = total + p
                spread = self.watch_weights(e, p, gap, spread)
                weights.append(p)
            put(over.index, weights)
            over.carry([*total, *spread])
        self.store_sums(e, over.values)

    def weight_store(self, e: Emit) -> Callable[[Any, list[Strip]], None]:
        """`put(j, weights)`: the weights of `pace` keys from j on go to where the product with V wants them."""
        P, R = e.frame.P, self.tile.rows

        def put(j: Any, weights: list[Strip]) -> None:
            P[j * R] = weights[0]

        return put

    def emit_bounded_steps(self, prefix: str = "", tile: Any = None) -> dict[str, Any]:
        """By name: for rows of many keys, and for those of few."""
        kinds = {"bounded_step": (self.real.degree - 1, 1), "few_keys_step": (self.real.degree, 2)}
        return {
            name: self.emit_bounded_step(prefix + name, tile=tile, degree=degree, chains=chains)
            for name, (degree, chains) in kinds.items()
        }

    def clamp_masked(self, e: Emit, index: Any, edges: tuple[Interval, ...]) -> None:
        """What is hidden at the edges is put where 2**(s - m) ends, and weighs exactly nothing."""
        P, R, floor = e.frame.P, self.tile.rows, self.real.floor
        least = e.frame.m.strip(self.row(e, index)) + floor
        for edge in edges:
            with e.range(*edge) as j:
                at = j * R
                P[at] = e.at_least(P.strip(at), least)

    @kernel_function(I64, I64, I64, args=False)
    def emit_bounded_step(self, e: Emit, index: Any, j0: Any, j1: Any, *, degree: int, chains: int) -> None:
        """The same as softmax_step for a bounded strip, in fewer steps and without rounding s - m; 2**x by a polynomial of that
        degree, their total as so many sums side by side."""
        R, V, P = self.tile.rows, e.tile.vectors, e.frame.P
        m = e.frame.m.strip(self.row(e, index))
        level = self.real.magic - m
        sums = self.watched_sums(e)
        start = [*sums[:V], *[e.vector(0.0)] * (V * (chains - 1)), *sums[V:]]
        with e.loop(j0, j1, chains, start) as over:
            totals: list[Any] = []
            spread = Strip(over.values[chains * V :])
            for n in range(chains):
                at = (over.index + n) * R
                s = P.strip(at)
                p = elementary.exp2_near(s, level, degree)
                P[at] = p
                spread = self.watch_weights(e, p, s - m if self.kernel.stats else s, spread)
                totals.extend(Strip(over.values[n * V : (n + 1) * V]) + p)
            over.carry([*totals, *spread])
        total = reduce(lambda x, y: x + y, (Strip(over.values[n * V : (n + 1) * V]) for n in range(chains)))
        self.store_sums(e, [*total, *over.values[chains * V :]])

    # -- bounds

    def bounds(self, e: Emit, index: Any) -> Any:
        """No score of the strip and the key block is larger: |q·k| <= |q| |k|."""
        max_k_norm = e.frame.max_k_norm[0].splat()
        return e.frame.q_norm.strip(self.row(e, index)) * max_k_norm

    def is_bounded(self, e: Emit, index: Any) -> Any:
        """Are bounds and maxima so small that 2**(s - m) needs no maximum of s, nor care for the exponents' ends?

        A maximum far below zero is not: raising it to the bound would lose the weights before, and not every row has a key here.
        """
        row = self.row(e, index)
        retry = e.frame.retry != 0
        m, row_sum = e.frame.m.strip(row), e.frame.l.strip(row)

        def unbounded(m: Any, total: Any, bound: Any) -> Any:
            deep = (m < -BOUND) & (total != 0.0)
            high = e.compare(">", bound, BOUND, nan=True)
            return ((m > BOUND) | deep | high).sext(e.real.bits)

        return ~(retry | any_lane(e.each(unbounded, m, row_sum, self.bounds(e, index))))

    @kernel_function(I64, I64, I64, result=I64)
    def emit_vanished(self, e: Emit, strips: Any, low: Any, high: Any) -> None:
        """vanished(args, frame, strips, low, high): 1 if products with the values of keys [low, high) may have been too small for
        all their digits: a row's weights are far below 1, its sums are next to nothing, and some value is tiny but not 0.

        Sums of n products too small to be normal are off by n times half the least number at most. Divided by a total of weights
        of n / 2**mantissa that is less than the least normal number.
        """
        args, frame, real, R = e.args, e.frame, self.real, self.tile.rows
        Dv = args.Dv
        faint, least = real.tiny * 2.0 ** (real.mantissa + 3), real.tiny * 2.0 ** (2 * BOUND)
        with e.loop(0, strips, 1, e.strip(0, real.bits)) as over:
            totals = frame.l.strip(over.index * R)
            head, q0 = self.strip_at(e, over.index)
            last = e.min(q0 + (R - 1), frame.Sq - 1)
            ends = [interval(self.seq(e, head), self.terms[0], row)[side] for side, row in enumerate((q0, last))]
            few = ((ends[1] - ends[0]).to_real(real.type) * 2.0**-real.mantissa).splat()
            far = e.each(lambda total: (total < few) & (total > 0.0), totals).sext(real.bits)
            O = frame.O + over.index * (args.DVP * R)
            with e.loop(0, e.select(any_lane(far), Dv, 0), 1, over.values) as col:
                cells = O.strip(col.index * R)
                lost = far & e.each(lambda x: (abs(x) < faint).sext(real.bits), cells)
                col.carry(col.values | lost)
            over.carry(col.values)
        with e.if_(~any_lane(over.values), likely=True):
            e.ret(0)
        with e.range(low, high) as key:
            value_of = self.values_of(e, key)
            with e.range(0, Dv) as column:
                value = abs(value_of(column))
                with e.if_((value < least) & (value > 0.0)):
                    e.ret(1)
        e.ret(0)

    def set_q_norm(self, e: Emit, index: Any) -> None:
        """|q| of a strip's rows; 0 for those that see no key, whatever they hold."""
        R, DP = self.tile.rows, e.args.DP
        Q = e.frame.Q + index * (DP * R)
        with e.loop(0, DP, 1, e.strip(0.0)) as col:
            q = Q.strip(col.index * R)
            col.carry(e.fma(q, q, col.values))
        norms = e.math("sqrt", col.values)
        head, q0 = self.strip_at(e, index)
        seq, term = self.seq(e, head), self.terms[0]
        lows, highs = lane_interval(seq, term, q0, (interval(seq, term, q0)[0], seq.Sk))
        e.frame.q_norm[index * R] = e.select(lows < highs, norms, 0.0)

    @kernel_function()
    def emit_k_norm(self, e: Emit) -> None:
        """k_norm(args, frame): `max_k_norm` = the largest |k| of the packed block; NaN if any element is not finite."""
        J, zero = self.tile.keys, e.vector(0.0, self.tile.keys)
        size = e.args.DP * J
        with e.loop(0, e.frame.n_pad // J, 1, [zero, zero]) as group:
            cells = e.frame.K + group.index * size
            with e.loop(0, size, UNROLL * J, Strip([zero] * UNROLL)) as col:
                k = Strip(cells.vector(col.index + n * J, J) for n in range(UNROLL))
                col.carry(e.fma(k, k, col.values))
            a, b, c, d = col.values
            square = a + b + (c + d)
            group.carry([e.at_least(square, group.values[0]), e.fma(square, zero, group.values[1])])
        square, nothing = group.values
        largest = square.lane(0)
        for n in range(1, J):
            other = square.lane(n)
            largest = e.select(other > largest, other, largest)
        norm = e.math("sqrt", largest)
        e.frame.max_k_norm[0] = norm + nothing.sum()
