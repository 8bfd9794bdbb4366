"""The backward on matrix tiles: the same kernel, with its five products in bf16 and everything between them in fp32.

    Sᵀ = K Qᵀ     dPᵀ = V dOᵀ     dV += Pᵀ dO     dK += dSᵀ Q     dQᵀ += Kᵀ dSᵀ

Scores stay transposed, so all five have the form of `by_tiles`. The left operands are rows as they are: keys of K and V, columns
of K, keys of P and dS. The right ones are pairs of values that meet in one product: two columns or two rows of Q and dO, two
keys of dS. Inputs go into the products unchanged, and what scales them is applied in fp32. P and dS are rounded to bf16 once,
as on a GPU.
"""

from __future__ import annotations

from tilewise.backends.cpu.backward import Backward, Parts
from tilewise.backends.cpu.ir import I16, I64, Emit, Value
from tilewise.backends.cpu.matrix import DEPTH, ROW, by_tiles, emit_plain_dot, halves, together
from tilewise.backends.cpu.micro import strip
from tilewise.backends.cpu.module import FRAME
from tilewise.backends.cpu.pack import ColumnPairs, RowPairs, emit_pack_lanes, emit_pack_panels
from tilewise.backends.cpu.slots import Slots
from tilewise.backends.cpu.spec import Kernel


class MatrixBackward(Backward):
    """Of one strip, S and dP are kept in fp32, [key][row]; P and dS of all strips in bf16. `pairs` is dS as [key / 2][row][2]."""

    frame: tuple[str, ...] = (
        *(*FRAME, "head", "rank", "pair"),
        *("Q", "dO", "Q_panels", "dO_panels", "dQ", "P", "dS", "S", "dP", "pairs", "kept", "lse2", "delta", "factors", "ones"),
        *("tail", "K", "V", "K_columns", "from", "to"),
    )
    tiles = (("K", "k", "panels"), ("V", "v", "panels"), ("K_columns", "k", "lanes"))
    cleaned = ("V", "K_columns")
    pace = 2
    grain = DEPTH

    def __init__(self, kernel: Kernel, arch: str) -> None:
        # 2**x is rounded to eight bits; a bias's gradient, which may be fp32, is not
        self.degree = 0 if kernel.dbias else 4
        super().__init__(kernel, arch)

    def emit_packers(self) -> None:
        self.packed = self.kernel.dtype
        tile, dtype = self.tile, self.kernel.dtype
        self.pack_strips = emit_pack_lanes(self.unit, tile.rows, dtype, scaled=False, cells=ColumnPairs)
        self.pack_gradient = emit_pack_panels(self.unit, tile.rows, dtype, scaled=False, cells=RowPairs)
        self.pack_panels = emit_pack_panels(self.unit, tile.keys // 2, dtype, scaled=False, cells=ColumnPairs)
        self.pack_lanes = emit_pack_lanes(self.unit, tile.keys // 2, dtype, scaled=False, cells=RowPairs)

    def emit_products(self) -> None:
        if self.kernel.matrix == "plain":
            emit_plain_dot(self.unit)
        self.product = by_tiles(self.unit, "product", self.tile, self.kernel.matrix, add=False)
        self.grow = by_tiles(self.unit, "grow", self.tile, self.kernel.matrix, add=True)

    def sizes(self, e: Emit, a: Slots) -> dict[str, int | Value]:
        R, BM, BN, DP, DVP = self.tile.rows, a.word("BM"), a.word("BN"), a.word("DP"), a.word("DVP")

        def half(rows: Value, cols: Value) -> Value:
            return e.over(e.times(rows, cols), 2)

        sizes = {"Q": half(BM, DP), "dO": half(BM, DVP), "Q_panels": half(BM, a.word("DR"))}
        sizes |= {"dO_panels": half(BM, a.word("DVR")), "dQ": e.times(BM, DP)}
        sizes |= {name: half(BN, a.word("PS")) for name in ("P", "dS")}
        sizes |= {name: e.times(BN, R) for name in ("S", "dP", "kept", "W")} | {"pairs": half(BN, I64(R))}
        sizes |= {"lse2": BM, "delta": BM, "factors": BM, "ones": BM, "tail": I64(self.tile.keys * R)}
        sizes |= {"K": half(BN, DP), "V": half(BN, DVP), "K_columns": half(BN, DP)}
        return sizes | {"from": e.times(BM, 2), "to": e.times(BM, 2)}

    def pack_rows(self, e: Emit, a: Slots, f: Slots) -> None:
        R, BM = self.tile.rows, a.word("BM")
        all_rows, panel = e.times(f.word("strips"), R), e.times(e.over(BM, 2), R)
        for name, buffer, panels, cols, width in (("q", "Q", "Q_panels", "D", "DP"), ("do", "dO", "dO_panels", "Dv", "DVP")):
            rows = self.rows_of(e, a, f, name)
            e.call(self.pack_strips, [f.ptr(buffer), e.over(a.word(width), 2), *rows, a.word(cols)])
            e.call(self.pack_gradient, [f.ptr(panels), panel, *rows, all_rows, a.word(cols)])
        with e.loop(0, BM) as over:  # dS is scaled before it is rounded, and dQ needs no factor any more
            e.put(e.num(1.0), f.ptr("ones"), over.index)

    def panel(self, e: Emit, a: Slots) -> Value:
        return e.times(a.word("BN"), self.tile.keys // 2)

    # -- one strip

    def weights(self, e: Emit, a: Slots, f: Slots, index: Value) -> tuple[Value, ...]:
        """P, dS, the distance of their rows; S, dP, pairs, the rows' factors; the factors of S and dS."""
        column = e.times(index, self.tile.rows)
        P, dS = (e.at(f.ptr(name), column, I16) for name in ("P", "dS"))
        numbers = (e.splat(a.num(name)) for name in ("q_factor", "ds_factor"))
        return P, dS, a.word("PS"), f.ptr("S"), f.ptr("dP"), f.ptr("pairs"), e.at(f.ptr("factors"), column), *numbers

    def clear(self, e: Emit, a: Slots, f: Slots, index: Value, keys: tuple[Value, Value]) -> None:
        P, dS, step, *_ = self.weights(e, a, f, index)
        with e.loop(*keys) as over:
            for buffer in (P, dS):
                for at in range(0, self.tile.rows, 2 * e.lanes):
                    e.vput(e.iconst(0, I16, 2 * e.lanes), buffer, e.plus(e.times(over.index, step), at))

    def multiply(self, e: Emit, a: Slots, f: Slots, index: Value, keys: tuple[Value, Value], parts: Parts) -> None:
        R = self.tile.rows
        group, panel = I64(self.tile.keys * ROW), e.times(self.panel(e, a), 4)
        for A, B, width, C in (("K", "Q", "DP", "S"), ("V", "dO", "DVP", "dP")):
            pairs = e.at(f.ptr(B), e.times(index, e.times(a.word(width), R // 2)))
            steps = [I64(0), e.over(a.word(width), DEPTH)]
            rows = [f.ptr(A), I64(ROW), panel, group]
            e.call(self.product, [*steps, *rows, pairs, f.ptr(C), I64(4 * R), *self.groups(e, *keys)])

    def add_dq(self, e: Emit, a: Slots, f: Slots, index: Value, keys: tuple[Value, Value], parts: Parts) -> None:
        R, DP = self.tile.rows, a.word("DP")
        dQ = e.at(f.ptr("dQ"), e.times(index, e.times(DP, R)))
        columns = [f.ptr("K_columns"), I64(ROW), e.times(DP, ROW), I64(self.tile.keys * ROW)]
        out = [dQ, I64(4 * R), I64(0), e.over(DP, self.tile.keys)]
        e.call(self.grow, [*self.groups(e, *keys), *columns, f.ptr("pairs"), *out])

    def look(self, e: Emit, where: tuple[Value, ...], j: Value) -> tuple[list[Value], list[Value]]:
        _, _, _, S, dP, _, factors, q_factor, _ = where
        at = e.times(j, self.tile.rows)
        s = [e.fmul(x, q_factor) for x in strip(e, self.tile, S, at)]
        sides = strip(e, self.tile, factors)
        return s, [e.fmul(x, y) for x, y in zip(strip(e, self.tile, dP, at), sides, strict=True)]

    def keep(self, e: Emit, where: tuple[Value, ...], j: Value, found: list[tuple[list[Value], list[Value]]]) -> None:
        P, dS, step, _, _, pairs, factors, _, ds_factor = where
        L, R, matrix = e.lanes, self.tile.rows, self.kernel.matrix
        sides = strip(e, self.tile, factors)
        scaled = [[e.fmul(x, ds_factor) for x in ds] for _, ds in found]
        for n, (p, _) in enumerate(found):
            at = e.times(e.plus(j, n), step)
            p = [e.fmul(x, y) for x, y in zip(p, sides, strict=True)]
            for buffer, row in ((P, p), (dS, scaled[n])):
                for i in range(0, len(row), 2):
                    e.vput(halves(e, row[i], row[i + 1], matrix), buffer, e.plus(at, i * L))
        for i, (x, y) in enumerate(zip(*scaled, strict=True)):
            e.vput(together(e, x, y, matrix), pairs, e.plus(e.times(j, R), 2 * i * L))

    # -- dK and dV

    def grow_rows(
        self,
        e: Emit,
        a: Slots,
        operands: tuple[Value, Value, Value],
        rows: tuple[Value, Value],
        keys: tuple[Value, Value],
        out: tuple[Value, Value],
        line: Value,
    ) -> None:
        (tile, panels, col), (row0, count), (ja, jb), (to, width) = operands, rows, keys, out
        R, step = self.tile.rows, a.word("PS")
        right = e.at(panels, e.over(e.plus(e.times(col, a.word("BM")), e.times(row0, R)), 2))
        left = e.at(tile, e.plus(row0, e.times(ja, step)), I16)
        distances = [e.times(step, 2), I64(ROW), e.times(step, 2 * self.tile.keys)]
        last = e.over(e.minus(jb, ja), self.tile.keys)
        to = e.at(to, e.times(line, width))
        e.call(self.grow, [I64(0), e.over(count, DEPTH), left, *distances, right, to, e.times(width, 4), I64(0), last])
