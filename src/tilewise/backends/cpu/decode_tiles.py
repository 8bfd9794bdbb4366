"""Decoding int8 keys and values for several query heads on matrix tiles of bytes.

    S[key][limb, head] = Σ_i k_i · d_il          O[head, limb][column] = Σ_j n_jl · v_j

The left tile of scores are 16 rows of K as they lie in memory, 64 columns at a time; only where rows are not one stride apart, or
fewer than 16, they are copied. The right one are the digits of four heads, which are signed here as NEON's are, four columns side
by side. The left tile of values are the digits of weights, a row for each head and limb, by 64 keys; the right one is V with four
keys of a column side by side: byte 4·i + j is of key 16·j + i, for so it takes the fewest steps to bring digits there.

Sums are the integers that `decode_bytes` and `decode_weights` tell of. When their weights are no integers, and where q has none,
blocks and tasks multiply floats as those of `decode_block` do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilewise.backends.cpu import masking
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.decode_block import BlockDecode
from tilewise.backends.cpu.decode_weights import interleaved, joined_limbs
from tilewise.backends.cpu.ir import F32, I8, I32, I64, PTR, Pointer, Value, joined_lanes, vector_of
from tilewise.backends.cpu.matrix import ROW, SIDE, UNITS
from tilewise.backends.cpu.module import kernel_function
from tilewise.backends.cpu.spec import BYTE_COLUMNS, TILE_HEADS, TILE_KEYS, UNROLL, round_down

CELLS = SIDE * SIDE
"""Of a tile of sums."""
SUMS, OPERANDS, SHARED = (0, 1, 2, 3), (4, 5), 6
"""Numbers of tiles: four of sums; by turns those they are made of; the one that is the same for all four."""
Rows = Callable[[Any], Pointer]


class TileDecode(BlockDecode):
    """The frame holds `Q8`, for each four heads tiles of digits; `P8`, for each row and limb the digits of a block's weights;
    `k_tiles`, for each 16 keys where their rows begin and the distance of two, in `K_near` where they had to be copied;
    `V_fours`, for four keys V's columns side by side, which it has of this block if `turned`; and `sums`, the tiles of sums."""

    byte_task = (*BlockDecode.byte_task, "turned")
    digit_keys = TILE_KEYS

    @property
    def shifted(self) -> bool:
        return False

    def emit_block(self) -> Any:
        self.place_keys = self.emit_place_keys()
        self.turn_values = self.emit_turn_values()
        return super().emit_block()

    def enter_block(self, e: Emit) -> None:
        e.frame.turned = 0
        with e.if_(e.frame.exact != 0):
            self.call(e, self.place_keys)

    # -- scores

    def put_q_digits(self, e: Emit, row: Any, column: Any, limb: int, digits: Any) -> None:
        """Four columns side by side, one row of a tile after the other."""
        tile = e.frame.Q8 + (row // self.R * e.args.D + column) * (UNROLL * TILE_HEADS)
        fours = Value(e, e.ir.bitcast(digits.raw, vector_of(I32, BYTE_COLUMNS // UNROLL)))
        for n in range(BYTE_COLUMNS // UNROLL):
            (tile + (row % self.R * UNROLL + (n * ROW + limb * SIDE))).of(I32)[0] = fours.lane(n)

    @kernel_function()
    def emit_place_keys(self, e: Emit) -> None:
        """place_keys(args, frame): k_tiles of the block, and K_near."""
        args, frame = e.args, e.frame
        D, step, width = args.D, args.k.stride_s, frame.n1 - frame.n0
        whole, row = round_down(width, SIDE), self.block_rows(e, "k")

        def keep(key: Any, address: Any, distance: Any) -> None:
            entry = frame.k_tiles + key * 2 // SIDE
            entry[0], entry[1] = address, distance

        def copy(key: Any, row: Rows) -> None:
            to = frame.K_near + key * D
            with e.range(0, SIDE) as j:
                source = row(e.min(key + j, width - 1))  # keys beyond the block repeat its last one; their scores are never read
                with e.range(0, D, ROW) as at:
                    (to + (j * D + at))[0] = source.vector(at, ROW)
            keep(key, to.address, D)

        with e.if_else(frame.run != 0) as (run, apart):
            with run:
                first = row(0)
                with e.range(0, whole, SIDE) as key:
                    keep(key, (first + step * key).address, step)
                with e.if_(whole < width, likely=False):
                    copy(whole, lambda j: first + step * j)
            with apart:
                half = SIDE // 2
                steps = e.integers(range(half), I64) * step.splat(half)
                with e.range(0, whole, SIDE) as key:
                    start = frame.k_rows[key]
                    halves = [start.splat(half) + steps, (start + step * half).splat(half) + steps]
                    found = [frame.k_rows.vector(key + n * half, half) for n in range(2)]
                    strays = [(x != y).sext(I64) for x, y in zip(halves, found, strict=True)]
                    with e.if_else(masking.any_lane(strays[0] | strays[1])) as (scattered, strided):
                        with scattered:
                            copy(key, row)
                        with strided:
                            keep(key, row(key).address, step)
                with e.if_(whole < width, likely=False):
                    copy(whole, row)

    @kernel_function(I64)
    def emit_byte_dots(self, e: Emit, r0: Any) -> None:
        """byte_dots(args, frame, r0): P[r][j] = q_r · k_j of R rows from r0 and the keys of the block, times the scale of k_j.
        V is prefetched meanwhile."""
        args, frame, R = e.args, e.frame, self.R
        D, Dv, width = args.D, args.Dv, frame.n1 - frame.n0
        tiles, row = UNITS[self.kernel.matrix](e), e.const(ROW, I64)
        digits = frame.Q8 + r0 // R * D * (UNROLL * TILE_HEADS)
        s_rows, units = [frame.P + (r0 + r) * args.BN for r in range(R)], [frame.q_unit[r0 + r].splat() for r in range(R)]

        def some(key: Any, count: int, v: Rows) -> None:
            """The scores of 16 · count keys."""
            entries = [frame.k_tiles + (key + n * SIDE) * 2 // SIDE for n in range(count)]
            keys = [(Pointer(e, e.ir.inttoptr(entry[0].raw, PTR), I8), entry[1]) for entry in entries]
            for n in range(count):
                tiles.zero(SUMS[n])
            with e.range(0, D, TILE_KEYS) as column:
                tiles.load(SHARED, digits + column * (UNROLL * TILE_HEADS), row)
                for n, (first, distance) in enumerate(keys):
                    operand = OPERANDS[n % len(OPERANDS)]
                    tiles.load(operand, first + column, distance)
                    tiles.dot_signed(SUMS[n], operand, SHARED)
                    begin = key + n * SIDE
                    self.ask_rows(e, v, column, begin, e.select(column < Dv, e.min(begin + SIDE // 2, width), begin))
            for n in range(count):
                tiles.store(SUMS[n], (frame.sums + n * CELLS).of(I8), row)
            for n in range(count):
                at = key + n * SIDE
                with e.range(0, Dv, self.line) as column:  # the other half, for joining takes as long as the products
                    self.ask_rows(e, v, column, at + SIDE // 2, e.min(at + SIDE, width))
                scale = frame.k_scales.vector(at, SIDE)
                for s_row, s, unit in zip(s_rows, scores(e, frame.sums + n * CELLS, R), units, strict=True):
                    s_row[at] = s * unit * scale

        def all_keys(rows_of: Callable[[str, Any], Rows]) -> None:
            v, most = rows_of("v", 0), round_down(width, len(SUMS) * SIDE)
            with e.range(0, most, len(SUMS) * SIDE) as key:
                some(key, len(SUMS), v)
            with e.range(most, width, SIDE) as key:
                some(key, 1, v)
            with e.range(D, Dv, self.line) as column, e.range(0, width, SIDE) as key:
                self.ask_rows(e, v, column, key, e.min(key + SIDE // 2, width))

        self.by_rows(e, all_keys)

    def ask_rows(self, e: Emit, rows: Rows, column: Any, first: Any, past: Any) -> None:
        """Prefetch the line at a column of these rows, and of up to three behind them. A loop whose end is not known, for else
        the addresses of all rows would be computed before, and kept on the stack."""
        with e.range(first, past, UNROLL) as key:
            for n in range(UNROLL):
                e.prefetch(rows(key + n) + column)

    # -- values

    def digits_at(self, e: Emit, row: Any) -> Pointer:
        pointer: Pointer = e.frame.P8 + row * (e.args.BN * self.kernel.weight_limbs)
        return pointer

    def put_digits(self, e: Emit, row: Any, key: Any, numbers: list[Value]) -> None:
        """Of 64 keys, in four vectors: of each limb the bytes of all four side by side."""
        digits = self.digits_at(e, row) + key
        for limb, fours in enumerate(side_by_side(numbers)[: self.kernel.weight_limbs]):
            (digits + e.args.BN * limb)[0] = Value(e, e.ir.bitcast(fours.raw, vector_of(I8, ROW)))

    @kernel_function()
    def emit_turn_values(self, e: Emit) -> None:
        """turn_values(args, frame): V_fours of the block."""
        args, frame = e.args, e.frame
        Dv, width = args.Dv, frame.n1 - frame.n0
        most = round_down(Dv, ROW)

        def all_rows(rows_of: Callable[[str, Any], Rows]) -> None:
            v = rows_of("v", 0)
            with e.range(0, width, TILE_KEYS) as first, e.range(0, SIDE) as i:
                near = [v(e.min(first + (i + n * SIDE), width - 1)) for n in range(UNROLL)]  # behind the last key weights are 0
                to = frame.V_fours + (first + i * UNROLL) * Dv
                with e.range(0, most, ROW) as column:
                    for n, fours in enumerate(interleaved([x.vector(column, ROW) for x in near], (0, 1))):
                        (to + (column * UNROLL + n * ROW))[0] = fours
                with e.range(most, Dv, BYTE_COLUMNS) as column:
                    fours = joined_lanes(interleaved([x.vector(column, BYTE_COLUMNS) for x in near], (0, 1)))
                    (to + column * UNROLL)[0] = fours

        self.by_rows(e, all_rows)

    @kernel_function(I64)
    def emit_byte_values(self, e: Emit, r0: Any) -> None:
        """byte_values(args, frame, r0): O[r] += Σ_j P[r][j]·v_j of R rows from r0.

        The next block's K is prefetched meanwhile: half of its rows while tiles are multiplied and half while sums are joined.
        While V is turned nothing is asked for, or the stores would wait for memory, and tiles for the stores.
        """
        args, frame, R, limbs = e.args, e.frame, self.R, self.kernel.weight_limbs
        Dv, width = args.Dv, frame.n1 - frame.n0
        with e.if_(frame.turned == 0):
            self.call(e, self.turn_values)
            frame.turned = 1
        tiles, row, most = UNITS[self.kernel.matrix](e), e.const(ROW, I64), round_down(Dv, ROW)
        digits, o_rows = self.digits_at(e, r0), [frame.O + (r0 + r) * Dv for r in range(R)]
        units = [frame.p_unit[r0 + r].splat() for r in range(R)]

        def ask(column: Any, nth: int, parts: int) -> None:
            """Prefetch a line of the next block's K, of one part of its rows. Their number is loaded each time, for the
            product has no register left for it."""
            count = e.select((r0 == 0) & (column < e.args.D), frame.n1 - frame.n0, 0)
            first, past = count * nth // parts, count * (nth + 1) // parts
            self.by_rows(e, lambda rows_of: self.ask_rows(e, rows_of("k", 0), column, first, past))

        def multiply(column: Any, count: int) -> None:
            """Sums of 16 · count columns of O. Of a line, a tile has four columns of each sixteen."""
            step = args.BN
            for n in range(count):
                tiles.zero(SUMS[n])
            with e.range(0, width, TILE_KEYS) as key:
                tiles.load(SHARED, digits + key, step)
                for n in range(count):
                    operand = OPERANDS[n % len(OPERANDS)]
                    tiles.load(operand, frame.V_fours + (key * Dv + column * UNROLL + n * ROW), Dv * UNROLL)
                    tiles.dot_unsigned(SUMS[n], SHARED, operand)
            for n in range(count):
                tiles.store(SUMS[n], (frame.sums + (column * SIDE + n * CELLS)).of(I8), row)
                if count > 1:
                    ask(column, n, 2 * count)

        def join(column: Any, count: int) -> None:
            """These columns of O, times the rows' units."""
            sums = frame.sums + column * SIDE
            for r in range(R):
                if count > 1:
                    ask(column, R + r, 2 * R)
                places = [[n * CELLS + (r * limbs + limb) * SIDE for limb in range(limbs)] for n in range(count)]
                totals = [joined_limbs(e, [sums.vector(at, SIDE) for at in some]) for some in places]
                for n, total in enumerate(by_quarters(totals) if count > 1 else totals):
                    to = o_rows[r] + (column + n * SIDE)
                    to[0] = e.fma(total, units[r], to.vector(0, SIDE))

        for step in (multiply, join):  # one after the other, so that nothing waits for a tile that is being stored
            with e.range(0, most, ROW) as column:
                step(column, len(SUMS))
            with e.range(most, Dv, SIDE) as column:
                step(column, 1)
        with e.range(most, args.D, self.line) as column:
            ask(column, 0, 1)


def scores(e: Emit, sums: Pointer, rows: int) -> list[Value]:
    """Of a tile of sums, for each row the scores of 16 keys in units of q: as integers of two limbs, then as floats.

    A register has the four heads of key j, 4 + j, 8 + j and 12 + j: turned within its quarters, all four have the keys in order.
    """
    fours = []
    for j in range(UNROLL):
        first, second, third, fourth = (sums.vector((n * UNROLL + j) * SIDE, SIDE) for n in range(4))
        pairs = []
        for x, y in ((first, second), (third, fourth)):
            low, high = quarters(x, y)
            pairs.append(((high << 8) + low).to_real(F32))  # two upper limbs beside two lower ones
        low, high = quarters(*pairs)
        fours.append(e.fma(high, e.vector(2.0**16, SIDE), low))
    found: list[Value] = []
    for half in range(0, rows, 2):
        left, right = (of_quarters(x, y, [half, SIDE + half, half + 1, SIDE + half + 1]) for x, y in (fours[:2], fours[2:]))
        found += [of_quarters(left, right, [n, n + 1, SIDE + n, SIDE + n + 1]) for n in (0, 2)]
    return found


def quarters(x: Value, y: Value) -> list[Value]:
    """The even quarters of x and y, and the odd ones."""
    size = x.lanes // 4
    starts = [side + n * size for side in (0, x.lanes) for n in (0, 2)]
    return [x.pick([start + at + lane for start in starts for lane in range(size)], y) for at in (0, size)]


def of_quarters(x: Value, y: Value, order: Sequence[int]) -> Value:
    """These lanes of the first quarters of x and y, then of the second, …"""
    return x.pick([q + lane for q in range(0, x.lanes, UNROLL) for lane in order], y)


def by_quarters(vectors: Sequence[Value]) -> list[Value]:
    """Four vectors: the first quarters of all of them, the second ones, …"""
    first, second, third, fourth = vectors
    even, odd = quarters(first, second), quarters(third, fourth)
    both = [quarters(x, y) for x, y in zip(even, odd, strict=True)]
    return [both[0][0], both[1][0], both[0][1], both[1][1]]


def side_by_side(numbers: Sequence[Value]) -> list[Value]:
    """Of four vectors of integers: all lowest bytes, all second ones, …, those of a lane together."""

    def merged(mask: int, x: Value, y: Value) -> Any:
        """Bits of x under the mask, else of y."""
        return (x & mask) | (y & ~mask)

    bytes_, halves = 0x00FF00FF, 0x0000FFFF
    outer = [merged(bytes_, x, y << 8) for x, y in zip(numbers[::2], numbers[1::2], strict=True)]  # bytes 0 and 2
    inner = [merged(bytes_, x.lshr(8), y) for x, y in zip(numbers[::2], numbers[1::2], strict=True)]
    return [
        merged(halves, outer[0], outer[1] << 16),
        merged(halves, inner[0], inner[1] << 16),
        merged(halves, outer[0].lshr(16), outer[1]),
        merged(halves, inner[0].lshr(16), inner[1]),
    ]
