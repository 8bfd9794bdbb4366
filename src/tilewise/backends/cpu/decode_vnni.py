"""Products of bytes on x86: VPDPBUSD, which multiplies unsigned bytes by signed ones. Keys are the signed ones, as they are.

The four bytes of q's integer n, one behind the other in a vector, meet the same columns of a key: n + 2**31 has unsigned bytes
b_0 … b_3, and

    Σ_i n_i · k_i = Σ_l 256**l · S_l - 2**31 · Σ_i k_i,        S_l = Σ_i b_il · k_i

So one product of 64 bytes takes 16 columns of a key, which a load spreads, and sums of several keys are joined without leaving
their quarter of a vector. Where the lowest bytes of a row are all 0, ones are in their place: S_0 is then Σ_i k_i. Else these
have products of their own, one for all rows.

Up to MOST_BYTE_COLUMNS each S_l stays below 2**23, so that floats hold it, and T = 256 · (S_3 - 128 · Σ_i k_i) + S_2 below 2**30;
sums of 32 bits may wrap around on the way there. A score is (256 · T + S_1) · 256 + S_0 in floats. Only what exceeds 2**24 is
rounded; times 256 it is far above what is added to it, so errors are relative to the score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.ir import F32, I8, I32, Pointer, Value, joined_lanes, vector_of
from tilewise.backends.cpu.spec import ACCUMULATORS, BYTE_COLUMNS, UNROLL, round_down

LIMBS = 4
LINE = 64
"""Bytes of a cache line."""
QUARTER = BYTE_COLUMNS // 4
"""Sums of a limb in a vector: each of four columns."""
CHAIN = 8
"""Sums that are under way at once, at least: two products a cycle, which take five cycles."""


def digits_of(numbers: Sequence[Value]) -> list[list[Value]]:
    """The bytes b_0 … b_3 of vectors of integers."""
    shifted = [number ^ -(2**31) for number in numbers]
    return [[number.lshr(8 * limb).trunc(I8) for number in shifted] for limb in range(LIMBS)]


def mark_ones(e: Emit, digits: Pointer, D: Any) -> None:
    """Ones in place of lowest bytes that are all 0."""
    with e.range(0, D, BYTE_COLUMNS) as column:
        digits[column * LIMBS] = e.vector(1, BYTE_COLUMNS, I8)


def scores(
    e: Emit, rows: Sequence[Any], keys: Sequence[Pointer], limbs: int, soon: Sequence[Pointer] = ()
) -> list[Any]:
    """Of each row, those of UNROLL keys before the scales of K. `limbs` is 3 where all rows have ones. Meanwhile rows that are
    wanted soon are prefetched, as many lines as D has whole ones."""
    frame = e.frame
    sources: list[Any] = [frame.Q8 + row * e.args.D * LIMBS for row in rows]
    if limbs == LIMBS:
        sources.append(None)
    pieces = BYTE_COLUMNS // e.lanes
    most, room = UNROLL, ACCUMULATORS if pieces == 1 else CHAIN  # short vectors have half as many registers
    while most > 1 and len(sources) * most * pieces > room:
        most //= 2
    sums: list[list[Any]] = [[] for _ in sources]
    for n in range(0, len(keys), most):
        ahead = soon[n * len(soon) // UNROLL : (n + most) * len(soon) // UNROLL]
        for mine, some in zip(sums, _products(e, sources, keys[n : n + most], pieces, ahead), strict=True):
            mine += some
    joined = [_joined(some) for some in sums]
    lowest, second, third, fourth = _by_limb(joined[: len(rows)])
    lanes = [n for n in range(len(rows)) for _ in range(UNROLL)]
    columns = joined[-1].pick([*range(UNROLL)] * len(rows)) if limbs == LIMBS else lowest
    top, radix = ((fourth << 8) + third) - (columns << 15), e.vector(256.0, len(lanes))
    score = e.fma(top.to_real(F32), radix, second.to_real(F32))
    if limbs == LIMBS:
        bytes_only = frame.q_low.vector(rows[0], len(rows)).pick(lanes)  # 0 for rows that have ones
        score = e.fma(score, radix, (lowest & bytes_only).to_real(F32))
    else:
        score = score * radix
    score = score * frame.q_unit.vector(rows[0], len(rows)).pick(lanes)
    return [score.pick(range(n, n + UNROLL)) for n in range(0, len(lanes), UNROLL)]


def _products(
    e: Emit, sources: Sequence[Any], keys: Sequence[Pointer], pieces: int, soon: Sequence[Pointer]
) -> list[list[Any]]:
    """For each source of digits (None: ones), a vector of sums for each key: QUARTER of the lowest limb, of the next, …"""
    D, width, wide = e.args.D, BYTE_COLUMNS // pieces, LIMBS * BYTE_COLUMNS // pieces
    each = len(sources) * len(keys) * pieces
    chains = 1 if each >= CHAIN else 2
    spread = [n % BYTE_COLUMNS for n in range(wide)]

    def multiply(acc: Sequence[Any], column: Any, chains: int) -> list[Any]:
        found = list(acc)
        for chain in range(chains):
            at = column + chain * BYTE_COLUMNS
            k = [key.vector(at, BYTE_COLUMNS).pick(spread) for key in keys]
            n = chain * each
            for source in sources:
                for piece in range(pieces):
                    if source is None:
                        digits = e.vector(1, wide, I8)
                    else:
                        digits = source.vector(at * LIMBS + piece * wide, wide)
                    for key in k:
                        found[n] = dot(e, found[n], digits, key)
                        n += 1
        return found

    both = chains * BYTE_COLUMNS
    step = LINE if soon else both
    whole = round_down(D, step)
    with e.loop(0, whole, step, [e.vector(0, width, I32)] * (each * chains)) as over:
        acc = over.values
        for at in range(0, step, both):  # one line after the other: all at once would have to wait for each other
            for row in soon[at * len(soon) // step : (at + both) * len(soon) // step]:
                e.prefetch(row + over.index)
            acc = multiply(acc, over.index + at, chains)
        over.carry(acc)
    acc = [sum(over.values[n + each :: each], over.values[n]) for n in range(each)]
    if step > BYTE_COLUMNS:
        with e.loop(whole, D, BYTE_COLUMNS, acc) as rest:
            rest.carry(multiply(rest.values, rest.index, 1))
        acc = list(rest.values)
    count = len(keys)
    return [
        [joined_lanes(acc[(s * pieces) * count + j : (s + 1) * pieces * count : count]) for j in range(count)]
        for s in range(len(sources))
    ]


def dot(e: Emit, acc: Value, unsigned: Value, signed: Value) -> Value:
    """acc + products of four bytes each, which wrap around."""
    lanes = acc.lanes
    operands = [Value(e, e.ir.bitcast(x.raw, vector_of(I32, lanes))) for x in (unsigned, signed)]
    return e.intrinsic(f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", acc.type, [acc, *operands])


def _joined(vectors: Sequence[Any]) -> Any:
    """The sums of UNROLL keys, each QUARTER lanes of a limb: in the lowest quarter those of the lowest limb, key after key."""

    def pairs(x: Any, y: Any) -> Any:
        n, half = x.lanes, QUARTER // 2
        quarters = range(0, n, QUARTER)
        evens = [q + side + 2 * lane for q in quarters for side in (0, n) for lane in range(half)]
        return x.pick(evens, y) + x.pick([lane + 1 for lane in evens], y)

    first, second, third, fourth = vectors
    return pairs(pairs(first, second), pairs(third, fourth))


def _by_limb(vectors: Sequence[Any]) -> list[Any]:
    """For each limb, the sums of one, two or four rows behind each other; a row has those of the lowest limb first."""
    quarters = [range(n, n + UNROLL) for n in range(0, LIMBS * UNROLL, UNROLL)]
    if len(vectors) == 1:
        return [vectors[0].pick(quarter) for quarter in quarters]
    size, found = LIMBS * UNROLL, []
    for first in (0, size // 2):  # two limbs of two rows
        half = range(first, first + size // 2)
        both = [x.pick([*half, *(size + n for n in half)], y) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
        for at in (0, UNROLL):
            starts = range(at, size * len(both), size // 2)
            lanes = [start + n for start in starts for n in range(UNROLL)]
            found.append(both[0].pick(lanes, *both[1:]))
    return found
