"""The JVP kernel: the forward's, with the derivative of each step beside it. docs/derivatives.md has the formulas.

For one strip the state over the keys seen so far is m, l and O of the forward and, with p = 2**(s - m),

    l_t = Σ p s_t,   Ot = Σ p (s_t v + v_t)

which are rescaled with l and O. Six products a tile: scores, two for their derivatives T, and three with values. A tangent that
is not given is a null address, and its products are left out.
"""

from __future__ import annotations

from typing import Any

from tilewise.backends.cpu import micro
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.elementary import LN2
from tilewise.backends.cpu.forward import Chunks, Forward
from tilewise.backends.cpu.ir import I64, Strip
from tilewise.backends.cpu.masking import Interval, SeqInfo
from tilewise.backends.cpu.module import KernelModule, kernel_function
from tilewise.backends.cpu.scores import Modifier, bias_column
from tilewise.backends.cpu.spec import Kernel


class MovingTiles(KernelModule):
    """Tiles of tangents, whose sources end with t; what is not given is not packed."""

    def fetch_tile(self, e: Emit, tile: tuple[str, str, str], width: Any, padded: Any) -> None:
        if tile[1][-1] != "t":
            super().fetch_tile(e, tile, width, padded)
            return
        with e.if_(e.args.given(tile[1])):
            super().fetch_tile(e, tile, width, padded)

    def clear_tiles(self, e: Emit, names: tuple[str, ...]) -> None:
        """Zeros in tiles in which `clean` looks for what is not finite, whether they are packed or not."""
        for name, source, _ in self.tiles:
            if name in names:
                with e.range(0, e.args.BN * (e.args.DP if source[0] == "k" else e.args.DVP)) as cell:
                    getattr(e.frame, name)[cell] = 0.0


class Jvp(MovingTiles, Forward):
    """The frame holds Qt and l_t, Ot for every row, the tiles Kt and Vt, and T, the derivatives of a strip's scores; after the
    softmax they are natural, and then weighted."""

    cleaned = ("V", "Vt")
    tiles = (("K", "k", "lanes"), ("V", "v", "panels"), ("Kt", "kt", "lanes"), ("Vt", "vt", "panels"))
    can_be_bounded = False

    def __init__(self, kernel: Kernel, arch: str) -> None:
        self.natural = LN2 * kernel.score_unit
        super().__init__(kernel, arch)

    def emit_products(self) -> None:
        super().emit_products()
        self.add = micro.by_panels(self.unit, "add", fold="add")
        self.finish_tangents = self.emit_finish_tangents()

    # -- tiles

    def start(self, e: Emit, strips: Any) -> None:
        super().start(e, strips)
        args, frame, R = e.args, e.frame, self.tile.rows
        with e.range(0, strips) as index:
            frame.l_t[index * R] = e.strip(0.0)
        with e.range(0, strips * (args.DVP * R), e.lanes) as cell:
            frame.Ot[cell] = e.vector(0.0)
        self.clear_tiles(e, ("Vt",))
        with e.if_(args.given("qt")), e.range(0, args.group) as nth:
            first = nth * frame.strips
            head, _ = self.strip_at(e, first)
            source = self.row_of(e, "qt", head, frame.q_start + frame.m0)
            to = frame.Qt + first * (args.DP * R)
            rows = [source, args.qt.stride_s, args.qt.stride_d, frame.rows, args.D]
            e.call(self.pack_strips, to, args.DP, *rows, frame.q_factors)

    # -- one strip

    def multiply_qk(self, e: Emit, index: Any, keys: Interval, chunks: Chunks) -> None:
        """Scores and T in the same unit."""
        super().multiply_qk(e, index, keys, chunks)
        args, frame, R, J = e.args, e.frame, self.tile.rows, self.tile.keys

        def product(function: Any, rows: Any, tile: Any) -> None:
            operands = [rows + index * (args.DP * R), R, tile, args.DP * J, frame.T, R]
            e.call(function, 0, args.DP, *operands, *self.groups(keys), chunks.scores)

        with e.if_else(args.given("qt")) as (moves, stays):
            with moves:
                product(self.qk, frame.Qt, frame.K)
            with stays, e.range(*keys) as j:
                frame.T[j * R] = e.strip(0.0)
        with e.if_(args.given("kt")):
            product(self.add, frame.Q, frame.Kt)

    def mask_scores(self, e: Emit, keys: Interval, visible: Any, modifier: Modifier | None = None) -> None:
        """With softcap or a bias T goes through their derivatives, and is natural afterwards."""
        if modifier is not None:
            self.move_scores(e, keys, modifier)
        super().mask_scores(e, keys, visible, modifier)

    def move_scores(self, e: Emit, keys: Interval, modifier: Modifier) -> None:
        T, R, score = e.frame.T, self.tile.rows, self.score_reader(e)
        # capped scores leave the product divided by the cap
        factor = (e.args.cap_factor * self.natural if self.kernel.softcap else e.const(self.natural)).splat()
        with e.range(*keys) as j:
            at = j * R
            moved = T.strip(at) * factor
            if self.kernel.softcap:
                tanhs = modifier.tanhs(score(j, False))
                moved = e.each(lambda x, t: x * (1.0 - t * t), moved, tanhs)
            T[at] = moved
        if self.kernel.bias:
            with e.if_(e.args.given("bias_t")), e.range(*keys) as j:
                T[j * R] = T.strip(j * R) + bias_column(modifier, "bias_t", e.frame.n0 + j)

    def drop_weights(self, e: Emit, seq: SeqInfo, q0: Any, keys: Interval) -> None:
        """l_t is summed before weights are dropped."""
        self.weigh(e, keys, store=False)
        super().drop_weights(e, seq, q0, keys)

    def weigh(self, e: Emit, keys: Interval, *, store: bool) -> None:
        """`row_max`, which has served, becomes Σ p s_t; with `store`, T becomes p s_t. What weighs nothing counts nothing,
        whatever its derivative is."""
        P, T, R = e.frame.P, e.frame.T, self.tile.rows
        unit = e.const(self.natural).splat()
        with e.loop(*keys, 1, e.strip(0.0)) as over:
            at = over.index * R
            p, moved = P.strip(at), T.strip(at)
            if self.kernel.plain:
                moved = moved * unit
            moved = e.each(lambda p, x: e.select(p == 0.0, 0.0, p * x), p, moved)
            if store:
                T[at] = moved
            over.carry(over.values + moved)
        if store and self.kernel.dropout:
            return
        e.frame.row_max[0] = over.values

    def add_pv(self, e: Emit, index: Any, keys: Interval, chunks: Chunks) -> None:
        super().add_pv(e, index, keys, chunks)
        self.weigh(e, keys, store=True)
        args, frame, R, DVP = e.args, e.frame, self.tile.rows, e.args.DVP
        sums = frame.l_t + index * R
        sums[0] = e.fma(sums.strip(), frame.alpha.strip(), frame.row_max.strip())
        Ot = frame.Ot + index * (DVP * R)
        last = DVP // self.tile.keys
        moving = args.given("qt") | args.given("kt") | args.given("bias_t")

        def product(function: Any, weights: Any, values: Any, *scale: Any) -> None:
            e.call(function, *keys, weights, R, values, self.panel(e), Ot, R, 0, last, chunks.values, *scale)

        with e.if_else(moving) as (scores_move, values_move):
            with scores_move:
                product(self.pv, frame.T, frame.V, frame.alpha)
                with e.if_(args.given("vt")):
                    product(self.add, frame.P, frame.Vt)
            with values_move:
                product(self.pv, frame.P, frame.Vt, frame.alpha)

    # -- results

    def after_sink(self, e: Emit, index: Any, alpha: Strip, weight: Strip) -> None:
        """l_t and Ot are rescaled too; a moving sink joins l_t."""
        args, R = e.args, self.tile.rows
        self.rescale(e.frame.Ot + index * (args.DVP * R), args.DVP, alpha)
        sums = e.frame.l_t + index * R
        sums[0] = sums.strip() * alpha
        head, _ = self.strip_at(e, index)
        with e.if_(args.given("sinks_t")):
            moved = args.sinks_t[head].splat()
            sums[0] = e.each(lambda w, total: e.select(w == 0.0, total, e.fma(w, moved, total)), weight, sums.strip())

    def finish_strips(self, e: Emit, strips: Any) -> None:
        super().finish_strips(e, strips)
        with e.range(0, strips) as index:
            self.call(e, self.finish_tangents, index)

    @kernel_function(I64)
    def emit_finish_tangents(self, e: Emit, index: Any) -> None:
        """finish_tangents(args, frame, index): l_t / l and (Ot - l_t / l · O) / l go out."""
        args, frame, R, DVP = e.args, e.frame, self.tile.rows, e.args.DVP
        head, q0 = self.strip_at(e, index)
        row = index * R
        total, keep = frame.l.strip(row), args.keep_factor.splat()
        moved = e.each(lambda x, l: e.select(l == 0.0, 0.0, x / l), frame.l_t.strip(row), total)
        frame.l_t[row] = moved
        frame.alpha[0] = total * keep
        O, Ot = (buffer + index * (DVP * R) for buffer in (frame.O, frame.Ot))
        with e.range(0, DVP) as col:
            Ot[col * R] = e.fma(-moved, O.strip(col * R), Ot.strip(col * R))
        rows, position = e.min(R, frame.m0 + frame.rows - q0), frame.q_start + q0
        to = self.row_of(e, "ot", head, position)
        e.call(self.unpack_quotient, to, args.ot.stride_s, Ot, rows, args.Dv, frame.alpha)
        lse_t = args.lse_t + self.row_index(e, head, position)
        with e.range(0, rows) as r:
            lse_t[r] = frame.l_t[row + r]
