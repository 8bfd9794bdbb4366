"""The forward on matrix tiles: the same kernel, with its two products in bf16 and everything between them in fp32.

    Sᵀ = K Qᵀ     Oᵀ = Oᵀ·alpha + Vᵀ Pᵀ

Both have the form of `by_tiles`: keys of K and columns of V are the left operands, pairs of columns of Q and pairs of keys of P
the right ones. Q is multiplied as it is, and its scores are scaled. P is rounded to bf16 for its product; l and the log-sum-exp
are sums of what it was before.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewise.backends.cpu.elementary import exp2
from tilewise.backends.cpu.forward import Forward, Parts
from tilewise.backends.cpu.ir import I32, I64, Emit, Value
from tilewise.backends.cpu.masking import Place, any_lane
from tilewise.backends.cpu.matrix import DEPTH, ROW, by_tiles, emit_plain_dot, together
from tilewise.backends.cpu.micro import put_strip, strip
from tilewise.backends.cpu.module import FRAME
from tilewise.backends.cpu.pack import ColumnPairs, RowPairs, emit_pack_lanes, emit_pack_panels
from tilewise.backends.cpu.scores import drop
from tilewise.backends.cpu.slots import Slots


class MatrixForward(Forward):
    """Of one strip, P holds scores in fp32, [key][row]; `pairs` the weights in bf16, [key / 2][row][2]."""

    frame: tuple[str, ...] = (*FRAME, "split", "Q", "O", "m", "l", "P", "top", "alpha", "factors", "K", "V", "sums", "pairs")
    tiles = (("K", "k", "panels"), ("V", "v", "lanes"))
    can_be_calm = False
    pace = 2

    def level(self, e: Emit, top: Value) -> Value:
        """The maximum itself: the largest weight is then 1, which bf16 has without an error."""
        return top

    def shrink(self, e: Emit, xs: list[Value]) -> list[Value]:
        return exp2(e, xs)

    def emit_packers(self) -> None:
        self.packed = self.kernel.dtype
        tile, dtype = self.tile, self.kernel.dtype
        self.pack_strips = emit_pack_lanes(self.unit, tile.rows, dtype, scaled=False, cells=ColumnPairs)
        self.pack_panels = emit_pack_panels(self.unit, tile.keys // 2, dtype, scaled=False, cells=ColumnPairs)
        self.pack_lanes = emit_pack_lanes(self.unit, tile.keys // 2, dtype, scaled=False, cells=RowPairs)

    def emit_products(self) -> None:
        if self.kernel.matrix == "plain":
            emit_plain_dot(self.unit)
        self.product = by_tiles(self.unit, "scores", self.tile, self.kernel.matrix, add=False)
        self.pv = by_tiles(self.unit, "values", self.tile, self.kernel.matrix, add=True)

    def sizes(self, e: Emit, a: Slots) -> dict[str, int | Value]:
        R, DP, DVP, BN = self.tile.rows, a.word("DP"), a.word("DVP"), a.word("BN")
        rows = e.times(a.word("BM"), a.word("group"))
        sizes = {"Q": e.over(e.times(rows, DP), 2), "O": e.times(rows, DVP), "m": rows, "l": rows, "P": e.times(BN, R)}
        sizes |= {"W": e.times(BN, R), "top": I64(R), "alpha": I64(R), "factors": a.word("BM")}
        sizes |= {"K": e.over(e.times(BN, DP), 2), "V": e.over(e.times(BN, DVP), 2)}
        return sizes | {"sums": I64(R), "pairs": e.times(BN, R // 2)}

    def pack_queries(self, e: Emit, a: Slots, f: Slots, first: Value, rows: list[Value]) -> None:
        half = e.over(a.word("DP"), 2)
        e.call(self.pack_strips, [e.at(f.ptr("Q"), e.times(first, e.times(half, self.tile.rows))), half, *rows])

    def panel(self, e: Emit, a: Slots) -> Value:
        return e.times(a.word("BN"), self.tile.keys // 2)

    def multiply(self, e: Emit, a: Slots, f: Slots, index: Value, keys: tuple[Value, Value], parts: Parts) -> None:
        R, DP = self.tile.rows, a.word("DP")
        Q = e.at(f.ptr("Q"), e.times(index, e.times(DP, R // 2)))
        K = [f.ptr("K"), I64(ROW), e.times(self.panel(e, a), 4), I64(self.tile.keys * ROW)]
        steps = [I64(0), e.over(DP, DEPTH)]
        e.call(self.product, [*steps, *K, Q, f.ptr("P"), I64(4 * R), *self.groups(e, *keys)])

    def looker(self, e: Emit, a: Slots, f: Slots) -> Callable[[Value, bool], list[Value]]:
        P, R, factor = f.ptr("P"), self.tile.rows, e.splat(a.num("q_factor"))

        def look(j: Value, keep: bool) -> list[Value]:
            s = [e.fmul(x, factor) for x in strip(e, self.tile, P, e.times(j, R))]
            if keep:
                put_strip(e, s, P, e.times(j, R))
            return s

        return look

    def putter(self, e: Emit, f: Slots) -> Callable[[Value, list[list[Value]]], None]:
        pairs, R = f.ptr("pairs"), self.tile.rows

        def put(j: Value, weights: list[list[Value]]) -> None:
            for i, (x, y) in enumerate(zip(*weights, strict=True)):
                e.vput(together(e, x, y, self.kernel.matrix), pairs, e.plus(e.times(j, R), 2 * i * e.lanes))

        return put

    def drop_pass(self, e: Emit, place: Place, q0: Value, f: Slots, j0: Value, j1: Value) -> None:
        """A key's weights are the low or the high halves of a row of pairs."""
        pairs, R = f.ptr("pairs"), self.tile.rows

        def visit(j: Value, i: int, kept: Value) -> None:
            at = e.plus(e.times(e.over(j, 2), R), i * e.lanes)
            shift = e.trunc(e.times(e.rest(j, 2), 16), I32)
            others = e.splat(e.shl(I32(0xFFFF), e.sub(I32(16), shift)))
            pair = e.vget(pairs, at, I32)
            e.vput(e.select(kept, pair, e.and_(pair, others)), pairs, at)

        drop(e, self.tile, place, q0, f.word("n0"), (j0, j1), visit)

    def gather_values(self, e: Emit, a: Slots, f: Slots, index: Value, keys: tuple[Value, Value], parts: Parts) -> None:
        R, DVP = self.tile.rows, a.word("DVP")
        O = e.at(f.ptr("O"), e.times(index, e.times(DVP, R)))
        alpha = strip(e, self.tile, f.ptr("alpha"))
        changed = [e.sext(e.fcmp_unordered("!=", x, e.const(1.0)), e.vtype(I32)) for x in alpha]
        with e.if_then(any_lane(e, changed)), e.loop(0, DVP) as col:
            at = e.times(col.index, R)
            put_strip(e, [e.fmul(x, y) for x, y in zip(strip(e, self.tile, O, at), alpha, strict=True)], O, at)
        V = [f.ptr("V"), I64(ROW), e.times(DVP, ROW), I64(self.tile.keys * ROW)]
        last = e.over(DVP, self.tile.keys)
        e.call(self.pv, [*self.groups(e, *keys), *V, f.ptr("pairs"), O, I64(4 * R), I64(0), last])
