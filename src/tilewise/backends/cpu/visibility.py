"""Which keys a strip sees and which tiles a task visits, for every kind of mask; and care for what nobody sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple

from tilewise.backends.cpu import masking, scores
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.function import kernel_function
from tilewise.backends.cpu.ir import I1, I64, Pointer
from tilewise.backends.cpu.masking import Interval, SeqInfo, outer_interval
from tilewise.backends.cpu.spec import round_down, round_up


class KeyRange(NamedTuple):
    """All keys [start, stop) of a block that a strip visits, and the `solid` ones that every row sees; multiples of J counted
    from n0. `visible(j)` tells for the others which rows do."""

    all: Interval
    solid: Interval
    visible: Callable[[Any], Any]

    @property
    def edges(self) -> tuple[Interval, Interval]:
        return (self.all[0], self.solid[0]), (self.solid[1], self.all[1])


class Visibility:
    """What a kernel asks of its mask. `simple` masks are intervals: arithmetic tells. Of the others `bits` evaluates a tile, and
    the host's classes, or in packed batches `alive`, say which tiles to evaluate."""

    kernel: Any
    tile: Any
    unit: Any
    fields: Any
    buffer_kinds: Any
    tiles: Any
    cleaned: Any
    packed: Any
    terms: Any
    simple: bool
    alive: Any
    bits: Any
    clean: Any
    arg_block: Any
    call: Any
    seq: Any
    strip_at: Any
    fetch_tiles: Any
    cell: Any
    """The kernel module's."""

    def key_range(self, e: Emit, seq: SeqInfo, q0: Any) -> KeyRange:
        """The keys of the block that a strip visits."""
        J, n0, n_pad = self.tile.keys, e.frame.n0, e.frame.n_pad
        width = e.frame.n1 - n0
        last = e.min(q0 + (e.tile.rows - 1), seq.Sq - 1)
        if self.simple:
            low, high = outer_interval(seq, self.terms[0], q0, last)
            inner_low, inner_high = outer_interval(seq, self.terms[0], last, q0)

            def near(x: Any) -> Any:
                return e.min(e.max(x - n0, 0), width)

            start, stop = round_down(near(low), J), round_up(near(high), J)
            solid_start = e.min(round_up(near(inner_low), J), stop)
            solid_stop = e.max(round_down(near(inner_high), J), solid_start)
            ends = masking.lane_interval(seq, self.terms[0], q0, (n0, e.frame.n1))
            return KeyRange((start, stop), (solid_start, solid_stop), lambda j: masking.within(j, *ends))
        W, coverage = e.frame.W, self.coverage(e, seq, (q0, last))
        nothing, full = coverage == masking.EMPTY, coverage == masking.FULL
        stop = e.select(nothing, 0, n_pad)
        solid_stop = e.select(full, round_down(width, J), 0)
        zero = e.const(0, I64)
        return KeyRange((zero, stop), (zero, solid_stop), lambda j: W.strip(j * self.tile.rows) != 0)

    def coverage(self, e: Emit, seq: SeqInfo, rows: Interval) -> Any:
        """The class of a strip's tile under a mask that is no interval, whose bits are in W unless it is EMPTY; of a FULL one not
        always: a forward that changes no scores does not ask for them."""
        frame, (q0, last) = e.frame, rows
        kind = Pointer(e, e.ir.alloca(I64), I64)
        if self.alive:
            alive = e.call(self.alive, e.args.pointer, *seq.values, q0, last, frame.n0, frame.n1)
            kind[0] = e.select(alive != 0, masking.PARTIAL, masking.EMPTY)
        else:
            kind[0] = masking.tile_class(seq, q0 // e.args.class_rows, frame.n0 // e.args.BN)
            short = (frame.n1 - frame.n0) % self.tile.keys != 0  # then the last register tile holds keys that nobody sees
            with e.if_((kind[0] == masking.FULL) & short, likely=False):
                kind[0] = masking.PARTIAL
            if self.kernel.kind != "forward" or not self.kernel.plain:
                with e.if_(kind[0] == masking.FULL), e.range(0, frame.n_pad) as j:
                    frame.W[j * self.tile.rows] = e.strip(-1, e.real.bits)
        with e.if_(kind[0] == masking.PARTIAL):
            kind[0] = e.call(self.bits, e.args.pointer, *seq.values, q0, frame.n0, frame.n1, frame.W)
        return kind[0]

    @contextmanager
    def visible_block(self, e: Emit, heads: Callable[[], Any], strips: Any) -> Iterator[None]:
        """What is done with keys [n0, n1), their tiles packed and clean, unless no row of the task sees any of them. `heads` are
        query heads from the task's first, `strips` all of its strips."""
        visit, skip = e.blocks("visit", "skip")
        alive: Any = None if self.simple else self.block_class(e, heads())
        if alive is None:
            e.ir.branch(visit)
        else:
            e.branch(alive != masking.EMPTY, visit, skip)
        e.ir.position_at_end(visit)
        self.fetch_tiles(e)
        if self.clean and (alive is None or self.kernel.bias):
            self.call(e, self.clean, strips)
        elif self.clean:  # where some rows see every key, none is hidden from all
            with e.if_(alive != masking.FULL):
                self.call(e, self.clean, strips)
        yield
        e.go(skip)

    def block_class(self, e: Emit, heads: Any) -> Any:
        """EMPTY if no row of the task sees a key of [n0, n1), FULL if some rows are known to see all of them."""
        frame = e.frame
        first, last = frame.m0, frame.m0 + frame.rows - 1
        base, _ = self.strip_at(e, 0)
        with e.loop(0, heads, 1, [0]) as over:
            seq = self.seq(e, base + over.index)
            if self.alive:
                alive = e.call(self.alive, e.args.pointer, *seq.values, first, last, frame.n0, frame.n1)
                over.carry([over.values[0] | alive])
            else:
                size = e.args.class_rows
                with e.loop(first // size, last // size + 1, 1, over.values) as row:
                    row.carry([e.max(row.values[0], masking.tile_class(seq, row.index, frame.n0 // e.args.BN))])
                over.carry(row.values)
        return over.values[0]

    # -- values that nobody sees

    @kernel_function(I64)
    def emit_clean(self, e: Emit, strips: Any) -> None:
        """clean(args, frame, strips): zero the tile rows that no row of the task sees, if any element is not finite.

        What is hidden must not reach a result as 0 · inf; where everything is finite there is nothing to do.
        """
        args, frame = e.args, e.frame
        n_pad, dtype = frame.n_pad, self.packed
        tiles = [(tile, getattr(frame, tile[0]).stored(dtype), args.D if tile[1][0] == "k" else args.Dv) for tile in self.tiles]
        tiles = [tile for tile in tiles if tile[0][0] in self.cleaned]
        total = e.const(0.0)
        for tile, cells, cols in tiles:
            with e.loop(0, n_pad, 1, [total]) as key:
                with e.loop(0, cols, 1, key.values) as col:
                    value = cells.fetch(self.cell(e, tile, key.index, col.index))
                    col.carry([e.fma(value, e.const(0.0), col.values[0])])
                key.carry(col.values)
            total = key.values[0]
        with e.if_(total == 0.0, likely=True):
            e.ret()
        with e.range(0, n_pad) as j:
            with e.loop(0, strips, 1, [e.const(0, I1)]) as over:
                head, q0 = self.strip_at(e, over.index)
                over.carry([over.values[0] | self.seen(e, self.seq(e, head), q0, j)])
            with e.if_(~over.values[0]):
                for tile, cells, cols in tiles:
                    with e.range(0, cols) as column:
                        cells[self.cell(e, tile, j, column)] = e.narrow(e.const(0.0), dtype)

    def seen(self, e: Emit, seq: SeqInfo, q0: Any, j: Any) -> Any:
        """Does any row of the strip at q0 see key n0 + j?"""
        n0 = e.frame.n0
        key = n0 + j
        if self.simple:
            visible = masking.within(j, *masking.lane_interval(seq, self.terms[0], q0, (n0, e.frame.n1)))
        else:
            e.call(self.bits, e.args.pointer, *seq.values, q0, key, key + 1, e.frame.W)
            visible = e.frame.W.strip() != 0
        if self.kernel.bias:
            _, unmasked, _ = scores.Modifier(self.kernel, seq, q0).apply(e.strip(0.0), key)
            visible = visible & unmasked
        lanes = (vector.lane(lane) for vector in visible for lane in range(e.lanes))
        return reduce(lambda x, y: x | y, lanes, e.const(0, I1))
