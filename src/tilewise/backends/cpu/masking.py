"""Masks in IR: which keys a strip sees, tile by tile.

A conjunction of bands and ranges ("interval" masks: causal, window, prefix, padding and their &) gives each row one interval of
keys whose ends never decrease with the row, and so do the ends of rows that the host has found (`lowering`). Then skipping and
masking are arithmetic. Every other mask comes with the classes of its tiles: PARTIAL ones are evaluated element by element into a
tile of bits. In packed batches there are no classes, and cheap tests say which tiles might be seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import permutations
from typing import Any

from tilewise.backends.cpu.args import ArgBlock, pointer_kinds
from tilewise.backends.cpu.builder import Emit, Unit
from tilewise.backends.cpu.ir import I1, I8, I32, I64, PTR, Pointer, Strip, Value, gather
from tilewise.backends.cpu.spec import Kernel, argument_names, round_up
from tilewise.masks.program import Operand, operands

EMPTY, PARTIAL, FULL = 0, 1, 2
FAR = 1 << 20  # beyond any tile: where a row's interval may be cut without changing what a tile sees of it
Interval = tuple[Any, Any]
Term = list[Operand]


@dataclass(frozen=True)
class SeqInfo:
    """The sequence and head a strip or a tile belongs to: what a mask needs besides its own arguments."""

    args: ArgBlock
    batch: Value
    head: Value
    Sq: Value
    Sk: Value
    q_start: Value  # of the sequence in a packed batch, else 0
    k_start: Value

    @property
    def e(self) -> Emit:
        e: Emit = self.args.e
        return e

    @property
    def values(self) -> list[Value]:
        """As functions take them."""
        return [self.batch, self.head, self.Sq, self.Sk, self.q_start, self.k_start]


def interval(seq: SeqInfo, term: Term, q: Any) -> Interval:
    """[lo, hi) of the keys that the term's bands and ranges leave to row q (not below 0, not beyond Sk)."""
    e, args = seq.e, seq.args
    lo: Any = e.const(0, I64)
    hi: Any = seq.Sk
    for part in term:
        if part.kind.is_nothing:
            hi = e.const(0, I64)
        elif part.kind.is_band:
            band_lo, band_hi = _band(seq, part, q)
            lo, hi = e.max(lo, band_lo), e.min(hi, band_hi)
        elif part.kind.is_range:
            lo = e.max(lo, args.mask_int(part.ints))
            hi = e.min(hi, args.mask_int(part.ints + 1))
        elif part.kind.is_padding:
            lo = e.max(lo, _per_batch(seq, part.tensors))
            hi = e.min(hi, _per_batch(seq, part.tensors + 1))
        elif part.kind.is_rows:
            row_lo, row_hi = (_row_ends(seq, part.tensors + side)[q] for side in range(2))
            lo, hi = e.max(lo, row_lo.sext(I64)), e.min(hi, row_hi.sext(I64))
    return lo, hi


def outer_interval(seq: SeqInfo, term: Term, first: Any, last: Any) -> Interval:
    """From the first key of row `first` to the last of row `last`."""
    lo, _ = interval(seq, term, first)
    _, hi = interval(seq, term, last)
    return lo, hi


def hull(seq: SeqInfo, terms: list[Term], first: Any, last: Any) -> Interval:
    """[lo, hi) around every key that a row in [first, last] may see by bands and ranges; empty when hi <= lo.

    With a single term some row sees each of these keys: both ends move by at most one key from row to row.
    """
    e, ends = seq.e, []
    for term in terms:
        lo, hi = outer_interval(seq, term, first, last)
        void = hi <= lo  # an empty term must not stretch the hull
        bands = [_band(seq, part, first) for part in term if part.kind.is_band]
        for one, other in permutations(bands, 2):  # two bands side by side have no key in common in any row
            void = void | (one[0] >= other[1])
        ends.append((e.select(void, seq.Sk, lo), e.select(void, 0, hi)))
    return reduce(lambda x, y: (e.min(x[0], y[0]), e.max(x[1], y[1])), ends)


def _per_batch(seq: SeqInfo, tensor: int) -> Any:
    offset = seq.batch * seq.args.mask_tensor(tensor).stride_0
    return seq.args.mask_tensor(tensor).pointer[offset].sext(I64)


def _row_ends(seq: SeqInfo, tensor: int) -> Any:
    """Where the lo or the hi of the sequence's rows are; there is room for a strip behind the last."""
    ends = seq.args.mask_tensor(tensor)
    return ends.pointer + (seq.batch * ends.stride_0 + seq.q_start)


def _to_bits(value: Value) -> Any:
    """A 64-bit integer as the Real type's."""
    bits = value.e.real.bits
    return value if bits == I64 else value.trunc(bits)


def _from_32(value: Value) -> Any:
    """A 32-bit integer as the Real type's."""
    bits = value.e.real.bits
    return value.sext(bits) if bits == I64 else value


def lane_interval(seq: SeqInfo, term: Term, q0: Value, keys: Interval) -> tuple[Strip, Strip]:
    """Each lane's [lo, hi) within the keys [n0, n1), counted from n0, as vectors of the Real type's integers.

    Rows are q0, q0 + 1, …; those past the last query see nothing. An interval is cut off at ±FAR, which no tile reaches.
    """
    e, (n0, n1) = seq.e, keys

    def near(value: Any) -> Any:
        return _to_bits(e.min(e.max(value - n0, -FAR), FAR)).splat()

    rows = lane_rows(e)
    lows = Strip([near(n0)] * e.tile.vectors)
    highs = e.each(lambda valid: e.select(valid, near(e.min(n1, seq.Sk)), -FAR), valid_rows(seq, q0))
    for part in term:
        if part.kind.is_rows:
            ends = ((_row_ends(seq, part.tensors + side) + q0).strip() for side in range(2))
            los, his = (e.each(lambda end: _from_32(end) - _to_bits(n0).splat(), side) for side in ends)
            lows, highs = e.max(lows, los), e.min(highs, his)
            continue
        if not part.kind.is_interval:
            continue
        lo, hi = interval(seq, [part], q0) if not part.kind.is_band else _band(seq, part, q0)
        step = rows if part.kind.is_band else e.strip(0, e.real.bits)
        lows = e.max(lows, e.each(lambda row: near(lo) + row, step))  # noqa: B023 - called at once
        highs = e.min(highs, e.each(lambda row: near(hi) + row, step))  # noqa: B023
    return lows, highs


def lane_rows(e: Emit, kind: Any = None) -> Strip:
    """0, 1, … for the rows of a strip."""
    return Strip(e.integers(range(i * e.lanes, (i + 1) * e.lanes), kind) for i in range(e.tile.vectors))


def valid_rows(seq: SeqInfo, q0: Value) -> Any:
    """Per lane: is it a query of the sequence? A strip is padded past the last one."""
    left = _to_bits(seq.e.min(seq.Sq - q0, FAR)).splat()
    return lane_rows(seq.e) < left


def _band(seq: SeqInfo, part: Operand, q: Any) -> Interval:
    """A band's [lo, hi) at row q without the cut at 0 and Sk, so that it moves with the row."""
    shift = q
    if part.kind.is_bottom_right:
        shift = q + (seq.Sk - seq.Sq)
    elif part.kind.is_offset:
        shift = q + _per_batch(seq, part.tensors)
    lo = seq.args.mask_int(part.ints) + shift
    return lo, seq.args.mask_int(part.ints + 1) + shift + 1


def within(j: Value, lows: Strip, highs: Strip) -> Any:
    """Per lane: may it see key j (counted like the bounds)?"""
    key = _to_bits(j).splat()
    return j.e.each(lambda lo, hi: (key >= lo) & (key < hi), lows, highs)


# -- masks that are not intervals


def _base(seq: SeqInfo, part: Operand) -> Any:
    """Offset of this sequence's and head's part of a mask tensor; broadcast sides have stride 0."""
    tensor, head = seq.args.mask_tensor(part.tensors), seq.head
    if part.kind.is_selected:
        head = head // seq.args.mask_int(part.ints + 2)
    return seq.batch * tensor.stride_0 + head * tensor.stride_1


def _id(seq: SeqInfo, tensor: int, index: Value, start: Value) -> Any:
    """Document id of one query or key."""
    ids = seq.args.mask_tensor(tensor)
    offset = seq.batch * ids.stride_0 + (index + start) * ids.stride_1
    return ids.pointer[offset]


def _id_range(seq: SeqInfo, tensor: int, start: Value, keys: Interval) -> tuple[Any, Any]:
    e = seq.e
    with e.loop(*keys, 1, [e.const(2**31 - 1, I32), e.const(-(2**31), I32)]) as over:
        value, (least, most) = _id(seq, tensor, over.index, start), over.values
        over.carry([e.select(value < least, value, least), e.select(value > most, value, most)])
    return over.values[0], over.values[1]


def _mask_function(unit: Unit, name: str, kernel: Kernel, kinds: list[Any]) -> tuple[Any, ...]:
    """A function of the arguments, a sequence and what `kinds` says."""
    e, (pointer, *values), function = unit.function(name, [PTR, *[I64] * 6, *kinds], result=I64)
    args = ArgBlock(e, pointer, argument_names(kernel), pointer_kinds(kernel))
    return e, SeqInfo(args, *values[:6]), values[6:], function


def tile_class(seq: SeqInfo, row: Any, column: Any) -> Any:
    """The class that the host has found for a tile."""
    args = seq.args
    at = seq.batch * args.classes_b + seq.head * args.classes_h + row * args.classes_r
    four = args.classes[at + (column >> 2)].zext(I64)
    return (four >> ((column & 3) << 1)) & 3


def emit_alive(unit: Unit, kernel: Kernel) -> Any:
    """alive(args, batch, head, Sq, Sk, q_start, k_start, first, last, n0, n1): 0 only if no row of [first, last] sees a key of
    [n0, n1). Documents are compared by the ranges of their ids, blocks by looking at the table."""
    e, seq, (first, last, n0, n1), function = _mask_function(unit, "alive", kernel, [I64] * 4)
    for term in operands(kernel.structure):
        lo, hi = outer_interval(seq, term, first, last)
        lo, hi = e.max(lo, n0), e.min(hi, n1)
        alive = lo < hi
        for part in term:
            test = lambda part=part, lo=lo, hi=hi: _part_alive(seq, part, (first, last), (lo, hi))  # noqa: E731
            alive = e.value_if(alive, test, e.const(0, I1))
        with e.if_(alive):
            e.ret(1)
    e.ret(0)
    return function


def _part_alive(seq: SeqInfo, part: Operand, rows: Interval, keys: Interval) -> Any:
    e, kind, (first, last), (lo, hi) = seq.e, part.kind, rows, keys
    if kind.is_documents and not kind.negated:
        q_low, q_high = _id_range(seq, part.tensors, seq.q_start, (first, last + 1))
        k_low, k_high = _id_range(seq, part.tensors + 1, seq.k_start, keys)
        return (q_low <= k_high) & (k_low <= q_high)
    if kind.is_selected and not kind.negated:
        return _any_listed(seq, part, rows, keys)
    if not kind.is_blocks:
        return e.const(1, I1)
    size_q, size_k = seq.args.mask_int(part.ints), seq.args.mask_int(part.ints + 1)
    table = seq.args.mask_tensor(part.tensors, I8)
    cells, base = table.pointer, _base(seq, part)
    stride_q, stride_k = table.stride_2, table.stride_3
    with e.loop(first // size_q, last // size_q + 1, 1, [e.const(0, I8)]) as over_q:
        with e.loop(lo // size_k, (hi - 1) // size_k + 1, 1, over_q.values) as over_k:
            row, column = over_q.index * stride_q, over_k.index * stride_k
            cell = cells[base + row + column]
            over_k.carry([over_k.values[0] | (cell ^ 1 if kind.negated else cell)])
        over_q.carry(over_k.values)
    return over_q.values[0] != 0


def _any_listed(seq: SeqInfo, part: Operand, rows: Interval, keys: Interval) -> Any:
    """Does a list of these rows name a block of these keys?"""
    e, (first, last), (lo, hi) = seq.e, rows, keys
    size_q, size_k, _, entries = (seq.args.mask_int(part.ints + n) for n in range(4))
    lists = seq.args.mask_tensor(part.tensors)
    cells, base, low, high = lists.pointer, _base(seq, part), lo // size_k, (hi - 1) // size_k
    with e.loop(first // size_q, last // size_q + 1, 1, [e.const(0, I1)]) as over_q:
        with e.loop(0, entries, 1, over_q.values) as over:
            block = cells[base + over_q.index * lists.stride_2 + over.index * lists.stride_3].sext(I64)
            over.carry([over.values[0] | ((block >= low) & (block <= high))])
        over_q.carry(over.values)
    return over_q.values[0]


def emit_bits(unit: Unit, kernel: Kernel) -> Any:
    """bits(args, batch, head, Sq, Sk, q_start, k_start, q0, n0, n1, W): all ones in W[j][lane] where row q0 + lane sees key
    n0 + j, zeros elsewhere, for whole panels of keys from n0 to n1 and on; returns EMPTY, PARTIAL or FULL, of the real rows and
    keys."""
    e, seq, (q0, n0, n1, W), function = _mask_function(unit, "bits", kernel, [I64, I64, I64, PTR])
    W, tile, bits = W.of(e.real.bits), e.tile, e.real.bits
    rows = [e.min(q0 + r, seq.Sq - 1) for r in range(tile.rows)]
    terms = operands(kernel.structure)
    bounds = [lane_interval(seq, term, q0, (n0, n1)) for term in terms]
    prepared = {part: _prepare(seq, part, rows) for term in terms for part in term if not part.kind.is_interval}
    width = n1 - n0
    with e.loop(0, width, 1, [*e.strip(0, bits), *e.strip(-1, bits)]) as over:
        k = e.min(n0 + over.index, seq.Sk - 1)
        visible: Any = None
        for term, ends in zip(terms, bounds, strict=True):
            now = within(over.index, *ends)
            for part in term:
                if part in prepared:
                    now = now & _sees(seq, part, prepared[part], k)
            visible = now if visible is None else visible | now
        wide = visible.sext(bits)
        for i, vector in enumerate(wide):
            W[over.index * tile.rows + i * e.lanes] = vector
        some, every = Strip(over.values[: tile.vectors]), Strip(over.values[tile.vectors :])
        over.carry([*(some | wide), *(every & wide)])
    with e.range(width, round_up(width, tile.keys)) as beyond:
        for i in range(tile.vectors):
            W[beyond * tile.rows + i * e.lanes] = e.vector(0, kind=bits)
    seen = any_lane(Strip(over.values[: tile.vectors]))
    valid = valid_rows(seq, q0).sext(bits)
    holes = any_lane(e.each(lambda v, row: ~v & row, Strip(over.values[tile.vectors :]), valid))
    e.ret(e.select(seen, e.select(holes, PARTIAL, FULL), EMPTY))
    return function


def any_lane(vectors: Any) -> Any:
    """Is any lane of a vector, or of any vector of a strip, not zero?"""
    total = reduce(lambda x, y: x | y, vectors) if isinstance(vectors, Strip) else vectors
    return total.reduce(lambda x, y: x | y) != 0


def _prepare(seq: SeqInfo, part: Operand, rows: list[Any]) -> list[Any]:
    """What a literal needs once for a strip: its rows' document ids, or its rows' offsets into the table or the lists."""
    if part.kind.is_documents:
        return [_id(seq, part.tensors, row, seq.q_start) for row in rows]
    if part.kind.is_tree:
        return [value for row in rows for value in _tree_row(seq, part, row)]
    base = _base(seq, part)
    step = seq.args.mask_tensor(part.tensors).stride_2
    if not part.kind.is_dense:
        size = seq.args.mask_int(part.ints)
        rows = [row // size for row in rows]
    offsets = [base + row * step for row in rows]
    if not part.kind.is_selected:
        return offsets
    ir, room = seq.e.ir, 1 + len(rows)  # the block looked for last, counted from 1, and what was found
    memory = Pointer(seq.e, ir.inttoptr(ir.ptrtoint(ir.alloca(I64, room), I64), PTR), I64)
    memory[0] = 0
    return [*offsets, memory]


def _sees(seq: SeqInfo, part: Operand, prepared: list[Any], k: Value) -> Any:
    """Lane by lane: does the literal let its row see key k?"""
    if part.kind.is_documents:
        key = _id(seq, part.tensors + 1, k, seq.k_start).splat()
        ids = gather(prepared)
        return ids != key if part.kind.negated else ids == key
    if part.kind.is_tree:
        return _in_tree(seq, part, prepared, k)
    if part.kind.is_selected:
        return _listed(seq, part, prepared, k)
    if part.kind.is_blocks:
        k = k // seq.args.mask_int(part.ints + 1)
    table = seq.args.mask_tensor(part.tensors, I8)
    column, cells = k * table.stride_3, table.pointer
    cell = gather([cells[offset + column] for offset in prepared])
    return cell == 0 if part.kind.negated else cell != 0


def _listed(seq: SeqInfo, part: Operand, prepared: list[Any], k: Value) -> Any:
    """Lane by lane: does the row's list name the block of key k? Looked for where a block begins, and kept for its other keys."""
    e, lists, size = seq.e, seq.args.mask_tensor(part.tensors), seq.args.mask_int(part.ints + 1)
    offsets, memory = prepared[:-1], prepared[-1]
    number = k // size
    with e.if_(memory[0] != number + 1, likely=False):
        block = number.trunc(I32).splat()
        with e.loop(0, seq.args.mask_int(part.ints + 3), 1, [*e.strip(0, I32)]) as over:
            entry = gather([lists.pointer[offset + over.index * lists.stride_3] for offset in offsets])
            over.carry([*(Strip(over.values) | (entry == block).sext(I32))])
        memory[0] = number + 1
        memory.of(I32)[2] = Strip(over.values)
    seen = memory.of(I32).strip(2)
    return seen == 0 if part.kind.negated else seen != 0


def _tree_row(seq: SeqInfo, part: Operand, row: Any) -> tuple[Any, Any, Any]:
    """Of a row: where its ancestors are told, and the first and past key before the tree, counted from it; what is told of a row
    before the tree hides the tree from it."""
    e, args, n = seq.e, seq.args, seq.args.mask_int(part.ints + 2)
    slot = row - (seq.Sq - n)
    inside, at = slot >= 0, e.max(slot, 0)

    def end(side: int, other: Any) -> Any:
        ends = args.mask_tensor(part.tensors + 1 + side)
        own = ends.pointer[seq.batch * ends.stride_0 + at * ends.stride_1].sext(I64)
        return e.select(inside, own, other)

    reach = args.mask_tensor(part.tensors)
    told = seq.batch * reach.stride_0 + at * reach.stride_1
    return e.select(inside, told, -1), end(0, slot + args.mask_int(part.ints)), end(1, slot + args.mask_int(part.ints + 1) + 1)


def _in_tree(seq: SeqInfo, part: Operand, prepared: list[Any], k: Value) -> Any:
    """Lane by lane: is key k before the tree, and not out of a band, or an ancestor in it?"""
    e, reach = seq.e, seq.args.mask_tensor(part.tensors, I8)
    slot = k - (seq.Sk - seq.args.mask_int(part.ints + 2))
    column, cells = e.max(slot, 0) * reach.stride_2, reach.pointer
    lanes = []
    for told, first, past in zip(prepared[::3], prepared[1::3], prepared[2::3], strict=True):
        among = (cells[e.max(told, 0) + column] != 0) & (told >= 0)
        lanes.append(e.select(slot >= 0, among, (slot >= first) & (slot < past)).zext(I8))
    return gather(lanes) != 0
