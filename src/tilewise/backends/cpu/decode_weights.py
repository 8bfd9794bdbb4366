"""Values of int8 by products of bytes: weights become integers, and values are never converted.

Of a block and a row, weights (times the scales of V) are whole numbers of a unit, a power of two of which the largest has
2**(b - 1) … 2**b, give or take 1 %. Each is three bytes, n = Σ 256**l · d_l, signed for NEON's SDOT, unsigned for VPDPBUSD,
and b is 23; on matrix tiles four, and 31. Four keys of a column lie behind each other in a register, so that

    Σ_j n_j · v_j = Σ_l 256**l · Σ_j d_jl · v_j

is exact; what is rounded is a weight, by half a unit at most. A block whose least weight that is not 0 is less than 2**-(b - 13)
of the largest, or that has a weight which is negative or no number, multiplies floats instead. So a weight errs by 2**-12 of
itself at most: half of what float16 numbers do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tilewise.backends.cpu import decode_vnni as vnni
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.decode_bytes import BIAS, LEAST, MANTISSA, MOST, ByteScores, signed_digits
from tilewise.backends.cpu.function import kernel_function
from tilewise.backends.cpu.ir import F32, I8, I32, I64, Pointer, Value, joined_lanes, vector_of
from tilewise.backends.cpu.spec import BYTE_COLUMNS, UNROLL, WEIGHT_LIMBS, round_down, round_up

LIMBS = WEIGHT_LIMBS
LEFT = 13
"""Bits that the least weight of a block has at least."""
ROUND_UP = 1 << (MANTISSA - 6)
"""Added to the largest weight's bits: what is within 1.6 % of the next power of two counts as that, for digits carry."""
SIXTEEN = 16
"""Bytes within which instructions reorder them."""
ROWS = 2
"""Whose sums are in registers at once."""
LONG = 16
"""Lanes of vectors of which there are so many that they hold twice as many sums."""
MOST_KEYS = 128
"""Of a block, so that two limbs, joined, are sums of 32 bits."""
NONE = 2**31 - 1


def weight_bits(limbs: int) -> int:
    """Of the largest weight of a block: b."""
    return 8 * limbs - 1


class ByteValues(ByteScores):
    """The part of decoding several rows that multiplies values as bytes. The frame holds `P8`, for each row and four keys the
    lowest bytes of their weights, then the next, …; `p_unit`; and `counted`, whether those of the rows at hand are there."""

    R: int
    block_rows: Any
    next_rows: Any

    @kernel_function(I64)
    def emit_weights(self, e: Emit, r0: Any) -> None:
        """weights(args, frame, r0): P8 and p_unit of R rows from r0, if their weights allow it."""
        frame, R, L, size = e.frame, self.R, e.lanes, weight_bits(self.kernel.weight_limbs)
        width = frame.n1 - frame.n0
        P = [frame.P + (r0 + r) * e.args.BN for r in range(R)]

        def weights(row: Pointer, at: Any) -> Any:
            """As integers; 0 behind the last key."""
            inside = e.integers(range(L), I32) < (width - at).trunc(I32).splat()
            return e.select(inside, row.vector(at).bitcast(I32), 0)

        with e.loop(0, round_up(width, L), L, [e.vector(0, kind=I32)] * R + [e.vector(NONE, kind=I32)] * R) as over:
            bits = [weights(row, over.index) for row in P]
            tops, lows = over.values[:R], over.values[R:]
            seen = [e.select(x == 0, NONE, x) for x in bits]
            over.carry([*map(e.max, tops, bits), *map(e.min, lows, seen)])
        fits = (e.args.Dv % BYTE_COLUMNS == 0) & (width <= MOST_KEYS)
        largest = [x.reduce(e.max) for x in over.values[:R]]
        for top, low in zip(largest, (x.reduce(e.min) for x in over.values[R:]), strict=True):
            ordinary = (top < (MOST << MANTISSA)) & ((top >= (LEAST << MANTISSA)) | (top == 0))
            fits = fits & ordinary & (low >= top - ((size - LEFT) << MANTISSA))
        frame.counted = fits.zext(I64)
        with e.if_(fits):
            for r, (row, top) in enumerate(zip(P, largest, strict=True)):
                exponent = e.max((top + ROUND_UP).lshr(MANTISSA), LEAST)
                count = ((2 * BIAS + size - 1 - exponent) << MANTISSA).bitcast(F32).splat()
                frame.p_unit[r0 + r] = ((exponent - (size - 1)) << MANTISSA).bitcast(F32)
                with e.range(0, round_up(width, self.digit_keys), self.digit_keys) as at:
                    numbers = []
                    for n in range(0, self.digit_keys, L):
                        numbers.append(e.fma(weights(row, at + n).bitcast(F32), count, e.vector(0.5)).to_integer(I32))
                    self.put_digits(e, r0 + r, at, numbers)

    digit_keys = BYTE_COLUMNS
    """Keys whose weights become digits at once."""

    def put_digits(self, e: Emit, row: Any, key: Any, numbers: list[Value]) -> None:
        """Into P8: integers of `digit_keys` weights."""
        digits = self.digits_at(e, row)
        limbs = unsigned_digits(numbers) if self.unsigned else signed_digits(numbers, LIMBS)
        for n, cells in enumerate(by_fours([joined_lanes(limb) for limb in limbs])):
            digits[key * LIMBS + n * BYTE_COLUMNS] = cells

    def digits_at(self, e: Emit, row: Any) -> Pointer:
        pointer: Pointer = e.frame.P8 + row * (round_up(e.args.BN, BYTE_COLUMNS) * LIMBS)
        return pointer

    @property
    def asks_early(self) -> bool:
        """Is half of the next block's K prefetched before V is used? Between the two products nothing else is read, and those of
        long vectors are so short that memory has more to deliver than fits beside them. (Matrix tiles ask while V is used.)"""
        return self.kernel.weighs_bytes and not self.kernel.matrix and self.unsigned and self.kernel.tile.lanes == LONG

    @kernel_function(I64, I64)
    def emit_ask_early(self, e: Emit, first: Any, past: Any) -> None:
        """ask_early(args, frame, first, past): prefetch these rows of the next block's K."""

        def ask(row: Callable[[Any], Pointer]) -> None:
            with e.range(first, past) as key:
                near = row(key)
                with e.range(0, e.args.D, self.line) as at:
                    e.prefetch(near + at)

        self.by_rows(e, lambda rows_of: ask(rows_of("k", 0)))

    def early(self, e: Emit) -> Any:
        """How many rows of the next block's K are."""
        return (e.frame.n1 - e.frame.n0 + 1) // 2

    def by_rows(self, e: Emit, emit: Callable[[Callable[[str, Any], Callable[[Any], Pointer]]], None]) -> None:
        """`emit(rows_of)`, where `rows_of("v", column)` are the rows of V, and of "k" those of the next block's K: for rows that
        lie a stride apart, and for others."""

        def strided(name: str, col: Any) -> Callable[[Any], Pointer]:
            first, step = scattered(name, col)(0), getattr(e.args, name).stride_s
            return lambda j: first + step * j

        def scattered(name: str, col: Any) -> Callable[[Any], Pointer]:
            found: Callable[[Any], Pointer] = self.block_rows(e, "v", col) if name == "v" else self.next_rows(e, col)
            return found

        with e.if_else(e.frame.run != 0) as (run, apart):
            with run:
                emit(strided)
            with apart:
                emit(scattered)

    @kernel_function(I64)
    def emit_byte_values(self, e: Emit, r0: Any) -> None:
        """byte_values(args, frame, r0): O[r] += Σ_j P[r][j]·v_j of R rows from r0; the next block's K is prefetched meanwhile."""
        Dv = e.args.Dv

        def all_columns(rows_of: Callable[[str, Any], Callable[[Any], Pointer]]) -> None:
            done: Any = 0
            for wide in sorted({UNROLL * e.lanes, BYTE_COLUMNS}, reverse=True):
                most = round_down(Dv, wide)
                with e.range(done, most, wide) as col, e.range(0, self.R, ROWS) as r:
                    rows = [r0 + (r + n) for n in range(ROWS)]
                    v, k = rows_of("v", col), rows_of("k", col)
                    several = ((0, 1),) if e.lanes == LONG else ((0,), (1,))
                    for n, halves in enumerate(several):
                        turns = self.R // ROWS * len(several)
                        turn = (col // wide * turns + (r // ROWS * len(several) + n), max(1, self.line // wide) * turns)
                        self.columns(e, rows, (col, wide, halves), v, partial(self.fetch_keys, e, k, turn))
                done = most

        self.by_rows(e, all_columns)

    def fetch_keys(self, e: Emit, k: Callable[[Any], Pointer], turn: tuple[Any, int], key: Any, keys: int) -> None:
        """Prefetch lines of the next block's K, of so many rows those that fall to this turn of so many over a line."""
        nth, turns = turn
        if self.asks_early:  # the other half
            key, keys = self.early(e) + key // 2, keys // 2
        mine = max(1, keys // turns)
        first = nth % turns * mine % keys
        for n in range(mine):
            e.prefetch(k(key + (first + n)))

    def columns(
        self,
        e: Emit,
        rows: Sequence[Any],
        which: tuple[Any, int, Sequence[int]],
        v: Callable[[Any], Pointer],
        fetch: Callable[[Any, int], None],
    ) -> None:
        """Columns of O, of these rows: from which on, how many, and of each sixteen the first half, the second, or both."""
        col, wide, halves = which
        frame, lanes, groups = e.frame, wide // 4, 2 * len(halves)
        width, step = frame.n1 - frame.n0, UNROLL if self.unsigned else BYTE_COLUMNS
        digits = [self.digits_at(e, row) for row in rows]

        def quad(acc: Sequence[Any], near: list[Pointer], weights: list[list[Any]]) -> list[Any]:
            """Four keys more."""
            found, numbers = list(acc), interleaved([row.vector(0, wide) for row in near], halves)
            for r, limbs in enumerate(weights):
                for limb, weight in enumerate(limbs):
                    for group, number in enumerate(numbers):
                        n = (r * LIMBS + limb) * groups + group
                        found[n] = self.weighed(e, found[n], weight, number)
            return found

        def fours(row: Pointer, index: Any, keys: int) -> list[Any]:
            """For each four of so many keys and each limb their digits, in all lanes."""
            if keys == UNROLL:
                return [(row + (index * LIMBS + n * UNROLL)).of(I32)[0].splat(lanes) for n in range(LIMBS)]
            cells = []
            for n in range(LIMBS):
                some = row.vector(index * LIMBS + n * BYTE_COLUMNS, BYTE_COLUMNS)
                four = Value(e, e.ir.bitcast(some.raw, vector_of(I32, lanes)))
                cells += [four.pick([lane] * lanes) for lane in range(lanes)]  # SDOT takes a lane as it is
            return cells

        whole = round_down(width, step)
        with e.loop(0, whole, step, [e.vector(0, lanes, I32)] * (len(rows) * LIMBS * groups)) as over:
            fetch(over.index, step)
            acc, weights = list(over.values), [fours(row, over.index, step) for row in digits]
            for n in range(step // UNROLL):
                near = [v(over.index + (n * UNROLL + j)) for j in range(UNROLL)]
                acc = quad(acc, near, [cells[n * LIMBS : (n + 1) * LIMBS] for cells in weights])
            over.carry(acc)
        with e.loop(whole, width, UNROLL, over.values) as over:  # behind the last key weights are 0
            near = [v(e.min(over.index + j, width - 1)) for j in range(UNROLL)]
            over.carry(quad(over.values, near, [fours(row, over.index, UNROLL) for row in digits]))
        for r, row in enumerate(rows):
            unit, out = frame.p_unit[row], frame.O + (row * e.args.Dv + col)
            sums = [over.values[(r * LIMBS + limb) * groups : (r * LIMBS + limb + 1) * groups] for limb in range(LIMBS)]
            totals = [joined_limbs(e, limbs) for limbs in zip(*sums, strict=True)]
            for at, total in in_order(totals, halves):
                to = out + at
                to[0] = e.fma(total, unit.splat(total.lanes), to.vector(0, total.lanes))

    def weighed(self, e: Emit, acc: Value, weight: Value, number: Value) -> Value:
        """acc + Σ of four weights by four numbers each."""
        if self.unsigned:
            return vnni.dot(e, acc, weight, number)
        bytes_of = Value(e, e.ir.bitcast(weight.raw, number.type))
        return e.intrinsic("llvm.aarch64.neon.sdot.v4i32.v16i8", acc.type, [acc, number, bytes_of])


def unsigned_digits(numbers: Sequence[Value]) -> list[list[Value]]:
    return [[number.lshr(8 * limb).trunc(I8) for number in numbers] for limb in range(LIMBS)]


def by_fours(limbs: Sequence[Value]) -> list[Value]:
    """Digits of sixteen weights as P8 has them: of four their lowest bytes, their next, …, then of the next four."""
    low, high = joined_lanes(limbs[:2]), joined_lanes([limbs[2], limbs[2]])
    cells = [(four, limb) for four in range(4) for limb in range(LIMBS)]
    order = [limb * BYTE_COLUMNS + four * UNROLL + n for four, limb in cells for n in range(UNROLL)]
    return [low.pick(order[n : n + BYTE_COLUMNS], high) for n in range(0, len(order), BYTE_COLUMNS)]


def joined_limbs(e: Emit, limbs: Sequence[Value]) -> Any:
    """The number of these digits' sums, in units: two by two as integers, or what is below the uppermost one."""
    lower, upper = limbs[: len(limbs) - len(limbs) // 2], limbs[len(limbs) - len(limbs) // 2 :]
    high, low = (some[0] if len(some) == 1 else (some[1] << 8) + some[0] for some in (upper, lower))
    return e.fma(high.to_real(F32), e.vector(256.0 ** len(lower), high.lanes), low.to_real(F32))


def interleaved(rows: Sequence[Value], halves: Sequence[int]) -> list[Value]:
    """Four rows of bytes, column by column: a register has the four of column 0, of 1, 2, 3, then of 16, 17, …, for instructions
    reorder sixteen bytes each; the next one has those of column 4, 5, …"""
    first, second, third, fourth = rows
    wide, found = first.lanes, []

    def of_halves(x: Value, y: Value, at: int, unit: int) -> Value:
        """Of each sixteen bytes of x and y eight, by turns."""
        starts = [q + n for q in range(0, wide, SIXTEEN) for n in range(at, at + 8, unit)]
        return x.pick([start + side + byte for start in starts for side in (0, wide) for byte in range(unit)], y)

    for half in halves:
        left, right = of_halves(first, second, 8 * half, 1), of_halves(third, fourth, 8 * half, 1)
        found += [of_halves(left, right, 0, 2), of_halves(left, right, 8, 2)]
    return found


def in_order(totals: Sequence[Value], halves: Sequence[int]) -> list[tuple[int, Value]]:
    """Columns and their numbers, of registers as `interleaved` fills them."""
    found, size = [], totals[0].lanes
    for n, half in enumerate(halves):
        low, high = totals[2 * n : 2 * n + 2]
        if size == 4:
            found += [(8 * half, low), (8 * half + 4, high)]
            continue
        for q in range(0, size, 4):
            found.append((4 * q + 8 * half, low.pick([*range(q, q + 4), *range(size + q, size + q + 4)], high)))
    return found
