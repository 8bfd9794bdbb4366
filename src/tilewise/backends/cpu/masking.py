"""Masks in IR: which keys a strip sees, tile by tile.

A conjunction of bands and ranges ("interval" masks: causal, window, prefix, padding and their &) gives each row one interval of
keys whose ends never decrease with the row. Then skipping and masking are arithmetic. Every other mask is evaluated
element by element into a tile of bits, on tiles that cheap tests could not prove empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

from llvmlite import ir

from tilewise.backends.cpu.ir import I1, I8, I32, I64, PTR, Emit, Unit, Value
from tilewise.backends.cpu.slots import Slots
from tilewise.backends.cpu.spec import Register
from tilewise.masks.program import Operand, operands

EMPTY, PARTIAL, FULL = 0, 1, 2
FAR = 1 << 20  # beyond any tile: where a row's interval may be cut without changing what a tile sees of it


def is_interval(structure: str) -> bool:
    """Every row's keys form one interval."""
    terms = operands(structure)
    return len(terms) == 1 and all(part.kind.is_interval for part in terms[0])


@dataclass(frozen=True)
class Place:
    """Where a strip or a tile stands: the words a mask needs besides its own."""

    args: Slots
    batch: Value
    head: Value
    Sq: Value
    Sk: Value
    q_start: Value  # of the sequence in a packed batch, else 0
    k_start: Value


def interval(e: Emit, place: Place, term: list[Operand], q: Value) -> tuple[Value, Value]:
    """[lo, hi) of the keys that the term's bands and ranges leave to row q (not below 0, not beyond Sk)."""
    args, lo, hi = place.args, e.word(0), place.Sk
    for part in term:
        if part.kind.is_nothing:
            hi = e.word(0)
        elif part.kind.is_band:
            band_lo, band_hi = _band(e, place, part, q)
            lo, hi = e.most(lo, band_lo), e.least(hi, band_hi)
        elif part.kind.is_range:
            lo = e.most(lo, args.word(f"mask_i{part.ints}"))
            hi = e.least(hi, args.word(f"mask_i{part.ints + 1}"))
        elif part.kind.is_padding:
            lo = e.most(lo, _per_batch(e, place, part.tensors))
            hi = e.least(hi, _per_batch(e, place, part.tensors + 1))
    return lo, hi


def hull(e: Emit, place: Place, terms: list[list[Operand]], first: Value, last: Value) -> tuple[Value, Value]:
    """[lo, hi) around every key that a row in [first, last] may see by bands and ranges; empty when hi <= lo.

    With a single term some row sees each of these keys: both ends move by at most one key from row to row.
    """
    lows, highs = [], []
    for term in terms:
        lo, _ = interval(e, place, term, first)
        _, hi = interval(e, place, term, last)
        void = e.icmp_signed("<=", hi, lo)  # an empty term must not stretch the hull
        bands = [_band(e, place, part, first) for part in term if part.kind.is_band]
        for one, other in permutations(bands, 2):  # two bands side by side have no key in common in any row
            void = e.or_(void, e.icmp_signed(">=", one[0], other[1]))
        lows.append(e.select(void, place.Sk, lo))
        highs.append(e.select(void, e.word(0), hi))
    lo, hi = lows[0], highs[0]
    for other_lo, other_hi in zip(lows[1:], highs[1:], strict=True):
        lo, hi = e.least(lo, other_lo), e.most(hi, other_hi)
    return lo, hi


def _per_batch(e: Emit, place: Place, tensor: int) -> Value:
    offset = e.times(place.batch, place.args.word(f"mask_t{tensor}_0"))
    return e.sext(e.get(place.args.ptr(f"mask_t{tensor}"), offset, I32), I64)


def lane_interval(
    e: Emit, tile: Register, place: Place, term: list[Operand], q0: Value, keys: tuple[Value, Value]
) -> tuple[list[Value], list[Value]]:
    """Each lane's [lo, hi) within the keys [n0, n1), counted from n0, as vectors of the Real type's integers.

    Rows are q0, q0 + 1, …; those past the last query see nothing. An interval is cut off at ±FAR, which no tile reaches.
    """
    kind, (n0, n1) = e.real.bits, keys

    def near(value: Value) -> Value:
        cut = e.least(e.most(e.minus(value, n0), -FAR), FAR)
        return e.splat(cut if kind == I64 else e.trunc(cut, kind))

    def tops(vectors: list[Value], other: list[Value], sign: str) -> list[Value]:
        return [e.select(e.icmp_signed(sign, a, b), a, b) for a, b in zip(vectors, other, strict=True)]

    rows = _lane_rows(e, tile)
    lows = [near(n0)] * tile.vectors
    highs = [e.select(real, near(e.least(n1, place.Sk)), e.iconst(-FAR)) for real in real_rows(e, tile, place, q0)]
    for part in term:
        if not part.kind.is_interval:
            continue
        lo, hi = interval(e, place, [part], q0) if not part.kind.is_band else _band(e, place, part, q0)
        step = rows if part.kind.is_band else [e.iconst(0)] * tile.vectors
        lows = tops(lows, [e.add(near(lo), r) for r in step], ">")
        highs = tops(highs, [e.add(near(hi), r) for r in step], "<")
    return lows, highs


def _lane_rows(e: Emit, tile: Register) -> list[Value]:
    """0, 1, … for the rows of a strip."""
    return [e.iconst(range(i * e.lanes, (i + 1) * e.lanes)) for i in range(tile.vectors)]


def real_rows(e: Emit, tile: Register, place: Place, q0: Value) -> list[Value]:
    """Per lane: is it a query of the sequence? A strip is padded past the last one."""
    left = e.least(e.minus(place.Sq, q0), FAR)
    left = e.splat(left if e.real.bits == I64 else e.trunc(left, e.real.bits))
    return [e.icmp_signed("<", row, left) for row in _lane_rows(e, tile)]


def _band(e: Emit, place: Place, part: Operand, q: Value) -> tuple[Value, Value]:
    """A band's [lo, hi) at row q without the cut at 0 and Sk, so that it moves with the row."""
    shift = q
    if part.kind.is_bottom_right:
        shift = e.plus(q, e.minus(place.Sk, place.Sq))
    elif part.kind.is_offset:
        shift = e.plus(q, _per_batch(e, place, part.tensors))
    lo = e.plus(place.args.word(f"mask_i{part.ints}"), shift)
    return lo, e.plus(place.args.word(f"mask_i{part.ints + 1}"), shift, 1)


def within(e: Emit, j: Value, lows: list[Value], highs: list[Value]) -> list[Value]:
    """Per lane: may it see key j (counted like the bounds)?"""
    key = e.splat(j if e.real.bits == I64 else e.trunc(j, e.real.bits))
    return [
        e.and_(e.icmp_signed(">=", key, lo), e.icmp_signed("<", key, hi)) for lo, hi in zip(lows, highs, strict=True)
    ]


# -- masks that are not intervals


def _base(e: Emit, place: Place, tensor: int, *, per_head: bool) -> Value:
    """Offset of this sequence's (and head's) part of a mask tensor; broadcast sides have stride 0."""
    offset = e.times(place.batch, place.args.word(f"mask_t{tensor}_0"))
    return e.plus(offset, e.times(place.head, place.args.word(f"mask_t{tensor}_1"))) if per_head else offset


def _id(e: Emit, place: Place, tensor: int, index: Value, start: Value) -> Value:
    """Document id of one query or key."""
    offset = e.plus(_base(e, place, tensor, per_head=False), e.times(e.plus(index, start), place.args.word(f"mask_t{tensor}_1")))
    return e.get(place.args.ptr(f"mask_t{tensor}"), offset, I32)


def _id_range(e: Emit, place: Place, tensor: int, start: Value, first: Value, stop: Value) -> tuple[Value, Value]:
    most, least = I32(-(2**31)), I32(2**31 - 1)
    with e.loop(first, stop, 1, [least, most]) as over:
        value = _id(e, place, tensor, over.index, start)
        over.carry(
            [
                e.select(e.icmp_signed("<", value, over.values[0]), value, over.values[0]),
                e.select(e.icmp_signed(">", value, over.values[1]), value, over.values[1]),
            ]
        )
    return over.values[0], over.values[1]


def emit_alive(unit: Unit, names: tuple[str, ...], structure: str) -> ir.Function:
    """alive(args, batch, head, Sq, Sk, q_start, k_start, first, last, n0, n1): 0 only if no row of [first, last] sees a key of
    [n0, n1). Documents are compared by the ranges of their ids, blocks by looking at the table."""
    e, (pointer, *words), function = unit.function("alive", [PTR, *[I64] * 10], result=I64)
    place = Place(Slots(e, pointer, names), *words[:6])
    first, last, n0, n1 = words[6:]
    for term in operands(structure):
        lo, _ = interval(e, place, term, first)
        _, hi = interval(e, place, term, last)
        lo, hi = e.most(lo, n0), e.least(hi, n1)
        alive = e.less(lo, hi)
        for part in term:
            with e.if_else(alive) as (then, otherwise):
                with then:
                    more = _part_alive(e, place, part, first, last, lo, hi)
                    then_block = e.block
                with otherwise:
                    other_block = e.block
            joined = e.phi(I1)
            joined.add_incoming(more, then_block)
            joined.add_incoming(I1(0), other_block)
            alive = joined
        with e.if_then(alive):
            e.ret(I64(1))
    e.ret(I64(0))
    return function


def _part_alive(e: Emit, place: Place, part: Operand, first: Value, last: Value, lo: Value, hi: Value) -> Value:
    if part.kind.is_documents and not part.kind.negated:
        q_low, q_high = _id_range(e, place, part.tensors, place.q_start, first, e.plus(last, 1))
        k_low, k_high = _id_range(e, place, part.tensors + 1, place.k_start, lo, hi)
        return e.and_(e.icmp_signed("<=", q_low, k_high), e.icmp_signed("<=", k_low, q_high))
    if part.kind.is_blocks:
        size_q, size_k = (place.args.word(f"mask_i{part.ints + n}") for n in (0, 1))
        table = place.args.ptr(f"mask_t{part.tensors}")
        base = _base(e, place, part.tensors, per_head=True)
        step_q, step_k = (place.args.word(f"mask_t{part.tensors}_{axis}") for axis in (2, 3))
        with e.loop(e.over(first, size_q), e.plus(e.over(last, size_q), 1), 1, [I8(0)]) as over_q:
            with e.loop(e.over(lo, size_k), e.plus(e.over(e.minus(hi, 1), size_k), 1), 1, [over_q.values[0]]) as over_k:
                offset = e.plus(base, e.times(over_q.index, step_q), e.times(over_k.index, step_k))
                cell = e.get(table, offset, I8)
                over_k.carry([e.or_(over_k.values[0], e.xor(cell, I8(1)) if part.kind.negated else cell)])
            over_q.carry([over_k.values[0]])
        return e.icmp_signed("!=", over_q.values[0], I8(0))
    return I1(1)


def emit_bits(unit: Unit, names: tuple[str, ...], structure: str, tile: Register) -> ir.Function:
    """bits(args, batch, head, Sq, Sk, q_start, k_start, q0, n0, n1, W): all ones in W[j][lane] where row q0 + lane sees key
    n0 + j, zeros elsewhere, for whole panels of keys from n0 to n1 and on; returns EMPTY, PARTIAL or FULL, of the real rows and
    keys."""
    e, (pointer, *words), function = unit.function("bits", [PTR, *[I64] * 9, PTR], result=I64)
    place = Place(Slots(e, pointer, names), *words[:6])
    q0, n0, n1, out = words[6:]
    rows = [e.least(e.plus(q0, r), e.minus(place.Sq, 1)) for r in range(tile.rows)]
    terms = operands(structure)
    bounds = [lane_interval(e, tile, place, term, q0, (n0, n1)) for term in terms]
    prepared = {part: _prepare(e, place, part, rows) for term in terms for part in term if not part.kind.is_interval}
    none, every = [e.iconst(0)] * tile.vectors, [e.iconst(-1)] * tile.vectors
    width = e.minus(n1, n0)
    with e.loop(0, width, 1, none + every) as over:
        j = over.index
        k = e.least(e.plus(n0, j), e.minus(place.Sk, 1))
        seen: list[Value] = []
        for term, (lows, highs) in zip(terms, bounds, strict=True):
            now = within(e, j, lows, highs)
            for part in term:
                if part in prepared:
                    now = [e.and_(a, b) for a, b in zip(now, _sees(e, tile, place, part, prepared[part], k), strict=True)]
            seen = [e.or_(a, b) for a, b in zip(seen, now, strict=True)] if seen else now
        wide = [e.sext(s, e.vtype(e.real.bits)) for s in seen]
        for i, w in enumerate(wide):
            e.vput(w, out, e.plus(e.times(j, tile.rows), i * e.lanes))
        some = [e.or_(a, b) for a, b in zip(over.values[: tile.vectors], wide, strict=True)]
        over.carry(some + [e.and_(a, b) for a, b in zip(over.values[tile.vectors :], wide, strict=True)])
    with e.loop(width, e.round_up(width, tile.keys)) as beyond:
        for i in range(tile.vectors):
            e.vput(e.iconst(0), out, e.plus(e.times(beyond.index, tile.rows), i * e.lanes))
    some = any_lane(e, over.values[: tile.vectors])
    rows = [e.sext(real, e.vtype(e.real.bits)) for real in real_rows(e, tile, place, q0)]
    holes = any_lane(e, [e.and_(e.xor(v, e.iconst(-1)), row) for v, row in zip(over.values[tile.vectors :], rows, strict=True)])
    e.ret(e.select(some, e.select(holes, I64(PARTIAL), I64(FULL)), I64(EMPTY)))
    return function


def any_lane(e: Emit, vectors: list[Value]) -> Value:
    """Is any lane of any vector not zero?"""
    total = vectors[0]
    for other in vectors[1:]:
        total = e.or_(total, other)
    n = total.type.count
    while n > 1:
        n //= 2
        total = e.or_(e.pick(total, range(n)), e.pick(total, range(n, 2 * n)))
    word = e.extract_element(total, I32(0))
    return e.icmp_signed("!=", word, ir.Constant(word.type, 0))


def _prepare(e: Emit, place: Place, part: Operand, rows: list[Value]) -> list[Value]:
    """What a literal needs once for a strip: its rows' document ids, or its rows' offsets into the table."""
    if part.kind.is_documents:
        return [_id(e, place, part.tensors, row, place.q_start) for row in rows]
    base = _base(e, place, part.tensors, per_head=True)
    step = place.args.word(f"mask_t{part.tensors}_2")
    if part.kind.is_blocks:
        size = place.args.word(f"mask_i{part.ints}")
        rows = [e.over(row, size) for row in rows]
    return [e.plus(base, e.times(row, step)) for row in rows]


def _sees(e: Emit, tile: Register, place: Place, part: Operand, prepared: list[Value], k: Value) -> list[Value]:
    """Lane by lane: does the literal let its row see key k?"""
    if part.kind.is_documents:
        key = e.splat(_id(e, place, part.tensors + 1, k, place.k_start))
        words = gather(e, tile, prepared)
        return [e.icmp_signed("!=" if part.kind.negated else "==", w, key) for w in words]
    if part.kind.is_blocks:
        k = e.over(k, place.args.word(f"mask_i{part.ints + 1}"))
    column = e.times(k, place.args.word(f"mask_t{part.tensors}_3"))
    table = place.args.ptr(f"mask_t{part.tensors}")
    words = gather(e, tile, [e.get(table, e.plus(offset, column), I8) for offset in prepared])
    return [e.icmp_signed("==" if part.kind.negated else "!=", w, e.iconst(0, I8)) for w in words]


def gather(e: Emit, tile: Register, scalars: list[Value]) -> list[Value]:
    """R scalars as V vectors."""
    vectors = []
    for i in range(tile.vectors):
        vector = ir.Constant(ir.VectorType(scalars[0].type, e.lanes), ir.Undefined)
        for lane in range(e.lanes):
            vector = e.insert_element(vector, scalars[i * e.lanes + lane], I32(lane))
        vectors.append(vector)
    return vectors
