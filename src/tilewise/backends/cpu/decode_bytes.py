"""Scores of int8 keys by products of bytes: keys are never converted, and every sum is exact.

A row of q, bfloat16 or float16, is made integers of one unit, a power of two: its largest number has 30 bits. Each integer is
four bytes. For NEON's SDOT they are signed (for x86 see `decode_vnni`), n = Σ 256**l · d_l with d_l of -128 … 127, so that

    q · k = unit · Σ_l 256**l · Σ_i d_il · k_i

Four sums of 32 bits hold all of it: up to MOST_BYTE_COLUMNS no two of them, joined, overflow. Rounding begins when they become
floats. Rows whose lowest bytes are all 0 have three sums.
Where a number of q is not a whole number of units (less than 2**-22 of the row's largest in bfloat16, 2**-19 in float16; or NaN),
the task converts keys and multiplies floats instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tilewise.backends.cpu import decode_vnni as vnni
from tilewise.backends.cpu.builder import Emit, Unit
from tilewise.backends.cpu.function import kernel_function
from tilewise.backends.cpu.ir import F32, I8, I32, I64, Pointer, joined_lanes
from tilewise.backends.cpu.spec import BYTE_COLUMNS, UNROLL, Kernel, round_down

LIMBS = 4
BITS = 30
"""Of the largest integer: the uppermost byte of a sum with a carry stays below 128."""
LEAST, MOST = 64, 250
"""Exponents, as floats store them, of a row's largest number: its unit and the unit's inverse are ordinary floats."""
BIAS, MANTISSA = 127, 23


class ByteScores:
    """The part of decoding that multiplies bytes. The frame holds `Q8`, for each row and BYTE_COLUMNS columns the lowest bytes,
    then the next, …; `q_unit`, what a row's sums are multiplied by; `q_low`, 0 where all its lowest bytes are; and `exact`,
    whether all rows of the task are such integers."""

    kernel: Kernel
    unit: Unit
    line: int

    @property
    def unsigned(self) -> bool:
        """Are bytes that numbers are taken apart into unsigned, as `decode_vnni` tells?"""
        return self.unit.arch == "x86_64"

    @property
    def shifted(self) -> bool:
        """Are the digits of q those of `decode_vnni`?"""
        return self.unsigned

    @property
    def byte_rows(self) -> int:
        """Rows whose sums are computed at once."""
        rows = self.kernel.tile.keys
        return rows if self.unsigned else min(rows, 2)

    def joined(self, vectors: list[Any]) -> Any:
        raise NotImplementedError

    @kernel_function(I64)
    def emit_limbs(self, e: Emit, row: Any) -> None:
        """limbs(args, frame, row): Q8 and q_unit of a row of Q, which is scaled then."""
        args, frame, L = e.args, e.frame, e.lanes
        D = args.D
        q = frame.Q + row * D
        with e.loop(0, D, L, [e.vector(0, kind=I32)]) as over:
            size = q.vector(over.index).bitcast(I32) & 0x7FFFFFFF
            over.carry([e.max(over.values[0], size)])
        largest = over.values[0].reduce(e.max)
        exponent = largest.lshr(MANTISSA)
        within = e.max(e.min(exponent, MOST), LEAST)
        ordinary = (within == exponent) | (largest == 0)
        # the integers' unit is 2**(exponent - BIAS - (BITS - 1))
        count = ((2 * BIAS + BITS - 1 - within) << MANTISSA).bitcast(F32)
        unit = ((within - (BITS - 1)) << MANTISSA).bitcast(F32)
        with e.loop(0, D, BYTE_COLUMNS, [e.vector(-1, kind=I32), e.vector(0, kind=I32)]) as over:
            (same, low), numbers = over.values, []
            for n in range(0, BYTE_COLUMNS, L):
                x = q.vector(over.index + n) * count.splat()
                number = e.select(abs(x) < 2.0**31, x, 0.0).to_integer(I32)  # else it is no integer of 32 bits, nor the same
                same = same & (number.to_real(F32) == x).sext(I32)
                low = low | number
                numbers.append(number)
                q[over.index + n] = q.vector(over.index + n) * args.q_factor.splat()
            limbs = vnni.digits_of(numbers) if self.shifted else signed_digits(numbers)
            for limb, digit in enumerate(limbs):
                self.put_q_digits(e, row, over.index, limb, joined_lanes(digit))
            over.carry([same, low])
        whole = over.values[0].reduce(lambda x, y: x & y) != 0
        lowest = over.values[1].reduce(lambda x, y: x | y) & 0xFF
        if self.shifted:
            with e.if_(lowest == 0):
                vnni.mark_ones(e, frame.Q8 + row * D * LIMBS, D)
            lowest = (lowest != 0).sext(I32)
        frame.q_low[row] = lowest
        frame.q_unit[row] = unit * args.q_factor
        frame.exact = frame.exact & (ordinary & whole).zext(I64)

    def put_q_digits(self, e: Emit, row: Any, column: Any, limb: int, digits: Any) -> None:
        """Into Q8: one limb of BYTE_COLUMNS columns."""
        (e.frame.Q8 + row * e.args.D * LIMBS)[column * LIMBS + limb * BYTE_COLUMNS] = digits

    def by_limbs(self, e: Emit, rows: Sequence[Any], compute: Callable[[int], list[Any]]) -> list[Any]:
        """`compute(limbs)` with as many as the numbers of these rows have."""
        low = e.frame.q_low[rows[0]]
        for row in rows[1:]:
            low = low | e.frame.q_low[row]
        with e.if_else(low == 0) as (fewer, all_of_them):
            with fewer:
                three, after_three = compute(LIMBS - 1), e.ir.block
            with all_of_them:
                four, after_four = compute(LIMBS), e.ir.block
        return [e.phi((x, after_three), (y, after_four)) for x, y in zip(three, four, strict=True)]

    def byte_sums(self, e: Emit, rows: Sequence[Any], keys: Sequence[Pointer], limbs: int) -> list[list[Any]]:
        """For each row of Q8, the sums of its keys: pairs of vectors, of which the first counts 2**16."""
        args, frame = e.args, e.frame
        q = [frame.Q8 + row * args.D * LIMBS for row in rows]
        count, without = len(rows) * len(keys) * limbs, LIMBS - limbs
        with e.loop(0, args.D, BYTE_COLUMNS, [e.vector(0, UNROLL, I32)] * count) as over:
            acc, k = list(over.values), [key.vector(over.index, BYTE_COLUMNS) for key in keys]
            for r, row in enumerate(q):
                for limb in range(without, LIMBS):
                    digits = row.vector(over.index * LIMBS + limb * BYTE_COLUMNS, BYTE_COLUMNS)
                    for j, key in enumerate(k):
                        n = (r * len(keys) + j) * limbs + limb - without
                        acc[n] = e.intrinsic("llvm.aarch64.neon.sdot.v4i32.v16i8", acc[n].type, [acc[n], key, digits])
            over.carry(acc)
        pairs = []
        for n in range(0, count, limbs):
            *lowest, second, third, fourth = over.values[n : n + limbs]
            pairs.append(((fourth << 8) + third, sum(lowest, second << 8)))
        return [pairs[n : n + len(keys)] for n in range(0, len(pairs), len(keys))]

    def byte_scores(
        self, e: Emit, rows: Sequence[Any], keys: Sequence[Pointer], limbs: int, soon: Sequence[Pointer] = ()
    ) -> list[Any]:
        """Of each row, the scores of UNROLL keys before their scales. Meanwhile rows of V that are wanted soon are prefetched."""
        if self.unsigned:
            inside = soon if e.lanes == BYTE_COLUMNS else ()  # short vectors have no registers for more columns at once
            self.ask_for(e, soon, round_down(e.args.D, vnni.LINE) if inside else 0)
            return vnni.scores(e, rows, keys, limbs, inside)
        found: list[list[Any]] = [[] for _ in rows]
        for n in range(0, UNROLL, UNROLL // len(rows)):  # as many sums as accumulators
            past = n + UNROLL // len(rows)
            self.ask_for(e, soon[n * len(soon) // UNROLL : past * len(soon) // UNROLL])
            for pairs, more in zip(found, self.byte_sums(e, rows, keys[n:past], limbs), strict=True):
                pairs += more
        return [self.byte_score(e, row, pairs) for row, pairs in zip(rows, found, strict=True)]

    def ask_for(self, e: Emit, rows: Sequence[Pointer], first: Any = 0) -> None:
        """Lines of these rows of V, from a column on."""
        if rows:
            with e.range(first, e.args.Dv, self.line) as at:
                for row in rows:
                    e.prefetch(row + at)

    def byte_score(self, e: Emit, row: Any, pairs: Sequence[Any]) -> Any:
        """The scores of UNROLL keys, whose sums are given."""
        high, low = (self.joined([pair[n] for pair in pairs]).to_real(F32) for n in range(2))
        return e.fma(high, e.vector(2.0**16, UNROLL), low) * e.frame.q_unit[row].splat(UNROLL)


def signed_digits(numbers: list[Any], limbs: int = LIMBS) -> Iterator[list[Any]]:
    """The bytes d_0, d_1, … of vectors of integers."""
    for _ in range(limbs):
        digit = [number.trunc(I8) for number in numbers]
        yield digit
        numbers = [(number - low.sext(I32)) >> 8 for number, low in zip(numbers, digit, strict=True)]
