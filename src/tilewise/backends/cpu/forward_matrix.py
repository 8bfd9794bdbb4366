"""The forward on matrix tiles: the same kernel, with its two products in bf16 and everything between them in fp32.

    Sᵀ = K Qᵀ     Oᵀ = Oᵀ·alpha + Vᵀ Pᵀ

Both have the form of `by_tiles`: keys of K and columns of V are the left operands, pairs of columns of Q and pairs of keys of P
the right ones. Q is multiplied as it is, and its scores are scaled. P is rounded to bf16 for its product; l and the log-sum-exp
are sums of what it was before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.backends.cpu import elementary, pack
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.forward import Chunks, Forward
from tilewise.backends.cpu.ir import I32, Strip
from tilewise.backends.cpu.masking import Interval, SeqInfo, any_lane
from tilewise.backends.cpu.matrix import DEPTH, ROW, bf16_pairs, by_tiles
from tilewise.backends.cpu.module import KernelModule
from tilewise.backends.cpu.scores import drop


class MatrixTiles(KernelModule):
    """Tiles hold pairs of 16-bit values as they are stored; products are made on matrix tiles."""

    pace = 2

    def emit_packers(self) -> None:
        self.packed = self.kernel.dtype
        tile, dtype = self.tile, self.kernel.dtype
        self.pack_strips = pack.emit_pack_lanes(self.unit, tile.rows, dtype, scaled=False, cells=pack.ColumnPairs)
        self.pack_panels = pack.emit_pack_panels(self.unit, tile.keys // 2, dtype, scaled=False, cells=pack.ColumnPairs)
        self.pack_lanes = pack.emit_pack_lanes(self.unit, tile.keys // 2, dtype, scaled=False, cells=pack.RowPairs)

    def panel(self, e: Emit) -> Any:
        return e.args.BN * (self.tile.keys // 2)


class MatrixForward(MatrixTiles, Forward):
    """Of one strip, P holds scores in fp32, [key][row]; `pairs` the weights in bf16, [key / 2][row][2]."""

    tiles = (("K", "k", "panels"), ("V", "v", "lanes"))
    can_be_bounded = False

    def level(self, e: Emit, row_max: Any) -> Any:
        """The maximum itself: the largest weight is then 1, which bf16 has without an error."""
        return row_max

    def rescale_factor(self, difference: Any) -> Any:
        return elementary.exp2(difference)

    def emit_products(self) -> None:
        self.qk = by_tiles(self.unit, "scores", self.kernel.matrix, add=False)
        self.pv = by_tiles(self.unit, "values", self.kernel.matrix, add=True)

    def pack_q(self, e: Emit, first: Any, rows: list[Any]) -> None:
        half = e.args.DP // 2
        e.call(self.pack_strips, e.frame.Q + first * (half * self.tile.rows), half, *rows)

    def multiply_qk(self, e: Emit, index: Any, keys: Interval, chunks: Chunks) -> None:
        R, DP = self.tile.rows, e.args.DP
        Q = e.frame.Q + index * (DP * (R // 2))
        K = [e.frame.K, ROW, self.panel(e) * 4, self.tile.keys * ROW]
        e.call(self.qk, 0, DP // DEPTH, *K, Q, e.frame.P, 4 * R, *self.groups(keys))

    def score_reader(self, e: Emit) -> Callable[[Any, bool], Any]:
        P, R, factor = e.frame.P, self.tile.rows, e.args.q_factor.splat()

        def score(j: Any, keep: bool) -> Any:
            s = P.strip(j * R) * factor
            if keep:
                P[j * R] = s
            return s

        return score

    def weight_store(self, e: Emit) -> Callable[[Any, list[Strip]], None]:
        pairs, R = e.frame.pairs, self.tile.rows

        def put(j: Any, weights: list[Strip]) -> None:
            for i, (x, y) in enumerate(zip(*weights, strict=True)):
                pairs[j * R + 2 * i * e.lanes] = bf16_pairs(x, y, self.kernel.matrix)

        return put

    def drop_weights(self, e: Emit, seq: SeqInfo, q0: Any, keys: Interval) -> None:
        """A key's weights are the low or the high halves of a row of pairs."""
        pairs, R = e.frame.pairs.of(I32), self.tile.rows

        def visit(j: Any, i: int, kept: Any) -> None:
            at = j // 2 * R + i * e.lanes
            shift = (j % 2 * 16).trunc(I32)
            others = (e.const(0xFFFF, I32) << (16 - shift)).splat()
            pair = pairs.vector(at)
            pairs[at] = e.select(kept, pair, pair & others)

        drop(seq, q0, e.frame.n0, keys, visit)

    def add_pv(self, e: Emit, index: Any, keys: Interval, chunks: Chunks) -> None:
        R, DVP = self.tile.rows, e.args.DVP
        O = e.frame.O + index * (DVP * R)
        alpha = e.frame.alpha.strip()
        changed = e.each(lambda x: (x != 1.0).sext(I32), alpha)
        with e.if_(any_lane(changed)):
            self.rescale(O, DVP, alpha)
        V = [e.frame.V, ROW, DVP * ROW, self.tile.keys * ROW]
        last = DVP // self.tile.keys
        e.call(self.pv, *self.groups(keys), *V, e.frame.pairs, O, 4 * R, 0, last)
