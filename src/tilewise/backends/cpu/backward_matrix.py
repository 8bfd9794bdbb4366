"""The backward on matrix tiles: the same kernel, with its five products in bf16 and everything between them in fp32.

    Sᵀ = K Qᵀ     dPᵀ = V dOᵀ     dV += Pᵀ dO     dK += dSᵀ Q     dQᵀ += Kᵀ dSᵀ

Scores stay transposed, so all five have the form of `by_tiles`. The left operands are rows as they are: keys of K and V, columns
of K, keys of P and dS. The right ones are pairs of values that meet in one product: two columns or two rows of Q and dO, two
keys of dS. Inputs go into the products unchanged, and what scales them is applied in fp32. P and dS are rounded to bf16 once,
as on a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tilewise.backends.cpu.backward import Backward, Chunks, Gradient
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.forward_matrix import MatrixTiles
from tilewise.backends.cpu.ir import I16, Strip
from tilewise.backends.cpu.masking import Interval
from tilewise.backends.cpu.matrix import DEPTH, ROW, bf16_pairs, bf16_vector, by_tiles
from tilewise.backends.cpu.pack import RowPairs, emit_pack_panels
from tilewise.backends.cpu.spec import Kernel


class MatrixBackward(MatrixTiles, Backward):
    """Of one strip, S and dP are kept in fp32, [key][row]; P and dS of all strips in bf16. `pairs` is dS as [key / 2][row][2]."""

    tiles = (("K", "k", "panels"), ("V", "v", "panels"), ("K_columns", "k", "lanes"))
    grain = DEPTH

    def __init__(self, kernel: Kernel, arch: str) -> None:
        # 2**x is rounded to eight bits; a bias's gradient, which may be fp32, is not
        self.degree = 0 if kernel.dbias else 4
        super().__init__(kernel, arch)

    def emit_products(self) -> None:
        self.pack_gradient = emit_pack_panels(self.unit, self.tile.rows, self.kernel.dtype, scaled=False, cells=RowPairs)
        self.product = by_tiles(self.unit, "product", self.kernel.matrix, add=False)
        self.accumulate = by_tiles(self.unit, "accumulate", self.kernel.matrix, add=True)

    def pack_rows(self, e: Emit) -> None:
        args, frame, R = e.args, e.frame, self.tile.rows
        BM = args.BM
        all_rows, panel = frame.strips * R, BM // 2 * R
        for name, buffer, panels, cols, width in (("q", "Q", "Q_panels", "D", "DP"), ("do", "dO", "dO_panels", "Dv", "DVP")):
            rows = self.rows_of(e, name)
            e.call(self.pack_strips, getattr(frame, buffer), getattr(args, width) // 2, *rows, getattr(args, cols))
            e.call(self.pack_gradient, getattr(frame, panels), panel, *rows, all_rows, getattr(args, cols))

    # -- one strip

    def weights(self, e: Emit, index: Any) -> SimpleNamespace:
        """P and dS in bf16 and the distance of their rows; S, dP and the pairs of the strip; factors of its rows, of S, of dS."""
        args, frame, column = e.args, e.frame, index * self.tile.rows
        weights = SimpleNamespace(P=frame.P + column, dS=frame.dS + column, step=args.PS, S=frame.S, dP=frame.dP)
        weights.__dict__.update(self.entropy_rows(e, column))
        weights.pairs, weights.do_factors = frame.pairs, frame.do_factors + column
        weights.q_factor, weights.ds_factor = args.q_factor.splat(), args.ds_factor.splat()
        return weights

    def clear(self, e: Emit, index: Any, keys: Interval) -> None:
        weights = self.weights(e, index)
        with e.range(*keys) as j:
            for buffer in (weights.P, weights.dS):
                for at in range(0, self.tile.rows, 2 * e.lanes):
                    buffer[j * weights.step + at] = e.vector(0, 2 * e.lanes, I16)

    def multiply(self, e: Emit, index: Any, keys: Interval, chunks: Chunks) -> None:
        args, frame, R = e.args, e.frame, self.tile.rows
        group, panel = self.tile.keys * ROW, self.panel(e) * 4
        for A, B, width, C in (("K", "Q", "DP", "S"), ("V", "dO", "DVP", "dP")):
            pairs = getattr(frame, B) + index * (getattr(args, width) * (R // 2))
            steps = getattr(args, width) // DEPTH
            rows = [getattr(frame, A), ROW, panel, group]
            e.call(self.product, 0, steps, *rows, pairs, getattr(frame, C), 4 * R, *self.groups(keys))

    def add_dq(self, e: Emit, index: Any, keys: Interval, chunks: Chunks) -> None:
        R, DP = self.tile.rows, e.args.DP
        dQ = e.frame.dQ + index * (DP * R)
        columns = [e.frame.K_columns, ROW, DP * ROW, self.tile.keys * ROW]
        out = [dQ, 4 * R, 0, DP // self.tile.keys]
        e.call(self.accumulate, *self.groups(keys), *columns, e.frame.pairs, *out)

    def load_weights(self, e: Emit, weights: Any, j: Any) -> tuple[Any, Any]:
        at = j * self.tile.rows
        s = weights.S.strip(at) * weights.q_factor
        factors = weights.do_factors.strip()
        return s, weights.dP.strip(at) * factors

    def store_weights(self, e: Emit, weights: Any, j: Any, computed: list[tuple[Strip, Strip]]) -> None:
        R, matrix = self.tile.rows, self.kernel.matrix
        factors = weights.do_factors.strip()
        scaled = [ds * weights.ds_factor for _, ds in computed]
        for n, (p, _) in enumerate(computed):
            at = (j + n) * weights.step
            for buffer, row in ((weights.P, p * factors), (weights.dS, scaled[n])):
                for i in range(0, len(row), 2):
                    buffer[at + i * e.lanes] = bf16_vector(row[i], row[i + 1], matrix)
        for i, (x, y) in enumerate(zip(*scaled, strict=True)):
            weights.pairs[j * R + 2 * i * e.lanes] = bf16_pairs(x, y, matrix)

    # -- dK and dV

    def accumulate_rows(self, e: Emit, gradient: Gradient, line: Any, col: Any, rows: Interval, keys: Interval) -> None:
        (row0, count), (ja, jb) = rows, keys
        R, step = self.tile.rows, e.args.PS
        right = gradient.panels + (col * e.args.BM + row0 * R) // 2
        left = gradient.weights + (row0 + ja * step)
        distances = [step * 2, ROW, step * (2 * self.tile.keys)]
        last = (jb - ja) // self.tile.keys
        out = gradient.out + line * gradient.width
        e.call(self.accumulate, 0, count // DEPTH, left, *distances, right, out, gradient.width * 4, 0, last)
