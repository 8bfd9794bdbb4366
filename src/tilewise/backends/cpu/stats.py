"""What rows see, gathered on the way of the forward kernel: the largest logit and the entropy.

Over the keys visited so far, in units of log 2, beside m and l of the online softmax:

    top = max s,     spread = Σ 2**(s - m) (s - m),     so that the entropy is log2 l - spread / l

A new m shifts every term: spread = alpha · (spread + (m_old - m_new) · l). Kernels without statistics have none of this.
"""

from __future__ import annotations

from typing import Any

from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.elementary import LN2, log2
from tilewise.backends.cpu.ir import F32, F64, Pointer, Strip
from tilewise.backends.cpu.module import KernelModule


class RowWatch(KernelModule):
    """The frame holds `top` and `spread` for every row, `row_spread` (of a block) and `shift` (m_old - m_new) for one strip."""

    def start_watch(self, e: Emit, row: Any) -> None:
        """Of no keys."""
        e.frame.top[row] = e.strip(float("-inf"))
        e.frame.spread[row] = e.strip(0.0)

    def watch_shift(self, e: Emit, gap: Strip, total: Strip) -> None:
        """m has moved by `gap`; without keys before there is nothing to shift."""
        e.frame.shift[0] = e.each(lambda x, total: e.select(total == 0.0, 0.0, x), gap, total)

    def watch_max(self, e: Emit, index: Any, row_max: Strip) -> None:
        """The largest visible score of a block."""
        top = e.frame.top + self.row(e, index)
        top[0] = e.fmax(top.strip(), row_max)

    def watched_sums(self, e: Emit) -> list[Any]:
        """Σ P of a block, and its spread if that is watched."""
        return [*e.frame.row_sum.strip(), *(e.strip(0.0) if self.kernel.stats else ())]

    def watch_weights(self, e: Emit, p: Strip, gap: Strip, spread: Strip) -> Strip:
        """The spread with the weights of one key, p = 2**gap; what is hidden weighs 0 and lies at the floor."""
        return e.fma(p, e.at_least(gap, self.real.floor), spread) if self.kernel.stats else spread

    def store_sums(self, e: Emit, sums: Any) -> None:
        V = e.tile.vectors
        e.frame.row_sum[0] = Strip(sums[:V])
        if self.kernel.stats:
            e.frame.row_spread[0] = Strip(sums[V:])

    def watch_block(self, e: Emit, index: Any) -> None:
        """A block's spread joins; l is still that of the keys before."""
        row = self.row(e, index)
        spread, total = e.frame.spread + row, e.frame.l.strip(row)
        moved = e.fma(e.frame.shift.strip(), total, spread.strip())
        spread[0] = e.fma(moved, e.frame.alpha.strip(), e.frame.row_spread.strip())

    def merge_watch(self, e: Emit, index: Any, state: Pointer, rows: Any) -> None:
        """Another split's top and spread join; its m, l and O lie before them. m and l are not merged yet."""
        row = index * self.tile.rows
        frame, behind = e.frame, rows * (e.args.DVP + 2)
        spread_in, top_in = state + (behind + row), state + (behind + rows + row)
        m_ptr, l_ptr = frame.m + row, frame.l + row
        for i in range(self.tile.vectors):
            at = i * e.lanes
            total, more = l_ptr.vector(at), (state + (rows + row)).vector(at)
            old, other = m_ptr.vector(at), (state + row).vector(at)
            old, other = (Strip([x]) for x in (old, other))
            old = self.valid_max(e, old, Strip([total]))
            other = self.valid_max(e, other, Strip([more]))
            m = e.fmax(old, other)
            joined = e.vector(0.0)
            for level, weight, own in ((old, total, (frame.spread + row).vector(at)), (other, more, spread_in.vector(at))):
                (gap,) = self.exponent(level, m)
                (factor,) = self.rescale_factor(Strip([gap]))
                moved = e.fma(e.select(weight == 0.0, 0.0, gap), weight, own)
                joined = e.fma(moved, factor, joined)
            frame.spread[row + at] = joined
            frame.top[row + at] = e.fmax((frame.top + row).vector(at), top_in.vector(at))

    def finish_watch(self, e: Emit, index: Any, row0: Any, rows: Any) -> None:
        """Natural logits and entropies go out, before the sink joins."""
        args, frame, first = e.args, e.frame, index * self.tile.rows
        with e.range(0, rows) as r:
            at, to = first + r, row0 + r
            m, total, top, spread = frame.m[at], frame.l[at], frame.top[at], frame.spread[at]
            args.key_lse[to] = self.natural_lse(e, m, total)
            if self.real.type == F32:
                total, top, spread = (x.fpext(F64) for x in (total, top, spread))
            entropy = (log2(total) - spread / total) * LN2
            entropy = e.select((total > 0.0) & (entropy > 0.0), entropy, 0.0)
            largest = top * (LN2 * self.kernel.score_unit)
            if self.real.type == F32:
                entropy, largest = entropy.fptrunc(F32), largest.fptrunc(F32)
            args.entropy[to], args.max_logit[to] = entropy, largest

    valid_max: Any
    rescale_factor: Any
    row: Any
    """The softmax's, and of half strips."""
