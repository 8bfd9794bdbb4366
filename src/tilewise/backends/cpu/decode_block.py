"""Decoding for several query heads of a group: block by block, the two products and the softmax between them one after the other.

Several rows make the products long enough to hide memory behind them: the lines of V are prefetched while K is used, those of the
next block's K while V is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from tilewise.backends.cpu import elementary, masking
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.decode import Decode, Join
from tilewise.backends.cpu.decode_weights import ByteValues
from tilewise.backends.cpu.ir import I64, Strip
from tilewise.backends.cpu.module import kernel_function
from tilewise.backends.cpu.spec import ACCUMULATORS, UNROLL, round_down, round_up


class BlockDecode(ByteValues, Decode):
    strides = True
    byte_task = (*Decode.byte_task, "counted")

    def emit_block(self) -> Any:
        self.phases = (self.emit_dots(), self.emit_softmax(), self.emit_values())
        self.byte_phases = (None, None, None)
        if self.kernel.bytes:
            self.byte_phases = (self.emit_byte_dots(), self.emit_weights(), self.emit_byte_values())
        self.ask_early = self.emit_ask_early() if self.asks_early else None
        return self.emit_phases("block")

    @kernel_function()
    def emit_phases(self, e: Emit) -> None:
        def run(phase: Any, by_bytes: Any = None, allowed: str = "", before: Any = None) -> None:
            """A phase for all rows, R at a time, or the one by bytes where the frame allows it, which is known `before`."""
            with e.range(0, e.args.group, self.R) as r0:
                if by_bytes is None:
                    self.call(e, phase, r0)
                    return
                if before is not None:
                    self.call(e, before, r0)
                with e.if_else(getattr(e.frame, allowed) != 0) as (bytes_fit, otherwise):
                    with bytes_fit:
                        self.call(e, by_bytes, r0)
                    with otherwise:
                        self.call(e, phase, r0)

        self.enter_block(e)
        dots, softmax, values = self.phases
        byte_dots, weights, byte_values = self.byte_phases
        run(dots, byte_dots, "exact")
        if self.ask_early is None:
            run(softmax)
        else:
            rows = self.early(e)
            self.call(e, self.ask_early, 0, rows // 2)
            run(softmax)
            self.call(e, self.ask_early, rows // 2, rows)
        run(values, byte_values, "counted", weights)

    def enter_block(self, e: Emit) -> None:
        """What the phases of a block want to be done before."""

    # -- scores

    @kernel_function(I64)
    def emit_dots(self, e: Emit, r0: Any) -> None:
        """dots(args, frame, r0): S[r][j] = q_r · k_j for R rows from r0 and the keys of the block, times the scale of k_j.

        Meanwhile the lines of V that belong to these keys are prefetched, as `values` prefetches the next block's K: both phases
        then wait for memory while they compute.
        """
        args, frame = e.args, e.frame
        R, J, L, line = self.R, ACCUMULATORS // self.R, e.lanes, self.line
        D, BN = args.D, args.BN
        q_rows = [frame.Q + (r0 + r) * D for r in range(R)]
        s_rows = [frame.P + (r0 + r) * BN for r in range(R)]
        whole = round_down(D, line)
        # a line of bytes is so many vectors that all at once, being converted, would not stay in registers
        span = min(line, UNROLL * L) if self.kernel.stored else line

        def some(key: Any, near: list[Any], soon: list[Any]) -> None:
            """The scores of J keys from `key` on, whose rows of K are near; meanwhile rows of V that are wanted soon."""

            def multiply(acc: list[Any], at: Any, vectors: int = 1) -> list[Any]:
                q = [[row.vector(at + i * L) for i in range(vectors)] for row in q_rows]
                acc = list(acc)
                for j in range(J):
                    for i, k in enumerate(near[j].fetch_run(at, vectors)):
                        for r in range(R):
                            acc[r * J + j] = e.fma(q[r][i], k, acc[r * J + j])
                return acc

            def multiply_all(acc: list[Any], at: Any, columns: int) -> list[Any]:
                several = 1 if self.kernel.stored else e.vectors_of_a_load(near[0].dtype)
                for n in range(0, columns, several * L):
                    acc = multiply(acc, at + n, several)
                return acc

            with e.loop(0, whole, line, [e.vector(0.0)] * (R * J)) as dim:
                for pointer in soon:
                    e.prefetch(pointer + dim.index)
                acc = list(dim.values)
                if span < line:
                    with e.loop(dim.index, dim.index + line, span, acc) as part:
                        part.carry(multiply_all(list(part.values), part.index, span))
                    dim.carry(part.values)
                else:
                    dim.carry(multiply_all(acc, dim.index, line))
            with e.loop(whole, D, L, dim.values) as dim:
                dim.carry(multiply(dim.values, dim.index))
            for j in range(0, J, UNROLL):
                scale = frame.k_scales.vector(key + j, UNROLL) if self.kernel.stored else None
                for r in range(R):
                    s = self.joined(dim.values[r * J + j : r * J + j + UNROLL])
                    s_rows[r][key + j] = s if scale is None else s * scale

        self.over_keys(e, J, some)

    @kernel_function(I64)
    def emit_byte_dots(self, e: Emit, r0: Any) -> None:
        """byte_dots(args, frame, r0): the same by products of bytes. Two rows by two keys are as many sums as accumulators."""
        frame = e.frame
        s_rows = [frame.P + (r0 + r) * e.args.BN for r in range(self.R)]

        def some(key: Any, near: list[Any], soon: list[Any]) -> None:
            scale, step = frame.k_scales.vector(key, UNROLL), self.byte_rows
            for r in range(0, self.R, step):
                rows, ahead = [r0 + (r + n) for n in range(step)], soon[r * UNROLL // self.R : (r + step) * UNROLL // self.R]

                def compute(limbs: int, rows: list[Any] = rows, ahead: list[Any] = ahead) -> list[Any]:
                    return self.byte_scores(e, rows, near, limbs, ahead)

                for n, s in enumerate(self.by_limbs(e, rows, compute)):
                    s_rows[r + n][key] = s * scale

        self.over_keys(e, UNROLL, some)

    def over_keys(self, e: Emit, J: int, some: Callable[[Any, list[Any], list[Any]], None]) -> None:
        """`some(key, near, soon)` for the keys of the block, J at a time: their rows of K, and of V."""
        args, frame = e.args, e.frame
        width = frame.n1 - frame.n0
        most = round_down(width, J)

        def strided(K: Any, V: Any) -> None:
            """Rows a stride apart, from the block's first on."""
            steps = (args.k.stride_s, args.v.stride_s)
            with e.loop(0, most, J, [K, V]) as over:
                some(over.index, *([x + n * j for j in range(J)] for x, n in zip(over.values, steps, strict=True)))
                over.carry([x + n * J for x, n in zip(over.values, steps, strict=True)])
            with e.if_(most < width, likely=False):
                # keys beyond the block repeat its last one; their scores are never read
                rows = [e.min(most + j, width - 1) for j in range(J)]
                some(most, *([x + n * row for row in rows] for x, n in zip((K, V), steps, strict=True)))

        if not self.kernel.paged:
            strided(*(self.row_of(e, name, frame.key_head, frame.k_start + frame.n0) for name in "kv"))
            return
        row_of_k, row_of_v = self.block_rows(e, "k"), self.block_rows(e, "v")
        with e.if_else(frame.run != 0) as (run, scattered):
            with run:
                strided(row_of_k(0), row_of_v(0))
            with scattered:
                with e.range(0, most, J) as key:
                    some(key, *([row(key + j) for j in range(J)] for row in (row_of_k, row_of_v)))
                with e.if_(most < width, likely=False):
                    rows = [e.min(most + j, width - 1) for j in range(J)]
                    some(most, *([row(j) for j in rows] for row in (row_of_k, row_of_v)))

    # -- softmax along the keys

    @kernel_function(I64)
    def emit_softmax(self, e: Emit, r0: Any) -> None:
        """softmax(args, frame, r0): P = 2**(s - m) of R rows from r0 in place; m and l updated; O rescaled where an m grew.
        What is left in P is what V is multiplied by: where its numbers have scales, once more times these.

        A block has few keys, so rows go side by side: one after the other, each would wait for its own maximum and sums.
        """
        frame, R, L = e.frame, self.R, e.lanes
        BN, Dv = e.args.BN, e.args.Dv
        P = [frame.P + (r0 + r) * BN for r in range(R)]
        width = frame.n1 - frame.n0
        padded = round_up(width, L)
        with e.range(width, padded) as j:  # what lies behind the keys weighs nothing
            for row in P:
                row[j] = float("-inf")
        with e.loop(0, padded, L, [e.vector(float("-inf"))] * R) as over:
            over.carry([e.fmax(t, row.vector(over.index)) for t, row in zip(over.values, P, strict=True)])
        m_ptr, sum_ptr = frame.m + r0, frame.l + r0
        old = m_ptr.vector(0, R)
        m = e.fmax(old, e.math("ceil", self.of_rows(over.values, e.fmax)))
        alpha, levels = elementary.exp2(old - m), [m.splat_lane(r) for r in range(R)]
        with e.loop(0, padded, L, Strip([e.vector(0.0)] * R)) as over:
            p = elementary.exp2(Strip(row.vector(over.index) - level for row, level in zip(P, levels, strict=True)))
            weights = p * frame.v_scales.vector(over.index) if self.kernel.stored else p
            for value, row in zip(weights, P, strict=True):
                row[over.index] = value
            over.carry(over.values + p)
        sum_ptr[0] = e.fma(sum_ptr.vector(0, R), alpha, self.of_rows(over.values))
        m_ptr[0] = m
        grown = e.compare("!=", alpha, 1.0, nan=False).sext(e.real.bits)
        with e.if_(masking.any_lane(grown), likely=False):
            O, factors = frame.O + r0 * Dv, [alpha.splat_lane(r) for r in range(R)]
            with e.range(0, Dv, L) as col:
                for r, factor in enumerate(factors):
                    at = Dv * r + col
                    O[at] = O.vector(at) * factor

    def of_rows(self, vectors: Any, join: Join = operator.add) -> Any:
        """All lanes of each of R vectors joined, as one vector of R."""
        return self.joined([*vectors, *vectors, *vectors, *vectors][:UNROLL], join).pick(range(self.R))

    # -- values

    @kernel_function(I64)
    def emit_values(self, e: Emit, r0: Any) -> None:
        """values(args, frame, r0): O[r] += Σ_j P[r][j]·v_j for R rows from r0; V vectors of the head dim at a time, then one."""
        args, frame, R, L = e.args, e.frame, self.R, e.lanes
        BN, Dv = args.BN, args.Dv
        streams: list[Any] = []  # the rows of V, and of the next block's K, where they lie a stride apart
        if not self.kernel.paged:
            position = frame.k_start + frame.n0
            head, ahead = frame.key_head, position + BN
            if self.kernel.together:
                head, ahead = frame.next_head, position + frame.next_key
            streams = [self.row_of(e, "v", frame.key_head, position), self.row_of(e, "k", head, ahead)]
        p_rows = [frame.P + (r0 + r) * BN for r in range(R)]
        o_rows = [frame.O + (r0 + r) * Dv for r in range(R)]
        width, v_step, k_step = frame.n1 - frame.n0, args.v.stride_s, args.k.stride_s
        whole = round_down(width, UNROLL)

        def columns(col: Any, vectors: int, streams: list[Any]) -> None:
            def step(acc: list[Any], row: Any, weights: list[Any]) -> list[Any]:
                v = row.fetch_run(0, vectors)
                return [e.fma(v[n % vectors], weights[n // vectors], x) for n, x in enumerate(acc)]

            def add(sums: Any) -> None:
                for n, value in enumerate(sums):
                    to = o_rows[n // vectors] + (col + (n % vectors) * L)
                    to[0] = to.vector() + value

            # columns that share a line with others share its prefetching, too: some rows each, so that requests come evenly
            share = min(UNROLL, max(1, self.line // (vectors * L)))
            mine = UNROLL // share
            first = col // (vectors * L) % share * mine if share > 1 else 0

            def prefetch(row: Any) -> None:
                for at in range(0, vectors * L, self.line):
                    e.prefetch(row + at)

            zeros = [e.vector(0.0)] * (R * vectors)

            def scattered() -> None:
                v_row, k_row = self.block_rows(e, "v", col), self.next_rows(e, col)
                with e.loop(0, whole, UNROLL, zeros) as over:
                    acc, rows = list(over.values), [v_row(over.index + n) for n in range(UNROLL)]
                    for n in range(mine):
                        prefetch(k_row(over.index + (first + n)))
                    small = [weights.vector(over.index, UNROLL) for weights in p_rows]
                    for n in range(UNROLL):
                        acc = step(acc, rows[n], [s.splat_lane(n) for s in small])
                    over.carry(acc)
                with e.loop(whole, width, 1, over.values) as rest:
                    weights = [row[rest.index].splat() for row in p_rows]
                    rest.carry(step(list(rest.values), v_row(rest.index), weights))
                add(rest.values)

            def strided(streams: list[Any]) -> None:
                with e.loop(0, whole, UNROLL, [*zeros, *streams]) as over:
                    *acc, row, ahead = over.values
                    for n in range(mine):
                        prefetch(ahead + k_step * (first + n))
                    small = [weights.vector(over.index, UNROLL) for weights in p_rows]
                    for n in range(UNROLL):
                        acc = step(acc, row + v_step * n, [s.splat_lane(n) for s in small])
                    over.carry([*acc, *(x + s * UNROLL for x, s in ((row, v_step), (ahead, k_step)))])
                with e.loop(whole, width, 1, over.values[:-1]) as rest:
                    *acc, row = rest.values
                    acc = step(acc, row, [weights[rest.index].splat() for weights in p_rows])
                    rest.carry([*acc, row + v_step])
                add(rest.values[:-1])

            strided([x + col for x in streams]) if streams else scattered()

        def all_columns(streams: list[Any]) -> None:
            wide = self.tile.vectors * L
            most = round_down(Dv, wide)
            with e.range(0, most, wide) as col:
                columns(col, self.tile.vectors, streams)
            with e.range(most, Dv, L) as col:
                columns(col, 1, streams)

        if not self.kernel.paged:
            all_columns(streams)
            return
        with e.if_else(frame.run != 0) as (run, apart):
            with run:
                all_columns([self.block_rows(e, "v")(0), self.next_rows(e, 0)(0)])
            with apart:
                all_columns([])
