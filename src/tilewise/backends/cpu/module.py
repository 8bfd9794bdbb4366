"""What forward, backward and decode kernels share: strips and the keys they see, tiles of K and V, tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from types import SimpleNamespace
from typing import Any, NamedTuple

from tilewise.backends.cpu import frames, masking, matrix, pack, scores
from tilewise.backends.cpu.args import ArgBlock, pointer_kinds
from tilewise.backends.cpu.builder import Emit, Unit
from tilewise.backends.cpu.elementary import LN2, LOG2E, log2
from tilewise.backends.cpu.function import kernel_function as kernel_function
from tilewise.backends.cpu.ir import F32, F64, I1, I8, I16, I64, PTR, REALS, Pointer, Value
from tilewise.backends.cpu.masking import Interval, SeqInfo, interval, outer_interval
from tilewise.backends.cpu.pages import PagedKeys
from tilewise.backends.cpu.spec import ALIGN, BACKWARD, FRAME_BYTES, Kernel, argument_names, round_down, round_up
from tilewise.masks.program import is_interval, operands

TASK = ("batch", "nth_group", "key_head", "Sq", "Sk", "q_start", "k_start", "m0", "rows", "strips", "n0", "n1", "n_pad", "W")
"""Fields of every frame: where a task is. Rows [m0, m0 + rows) of the sequence, keys [n0, n1), padded to n_pad; W holds bits of
a mask that is not an interval."""
LONG, LATER = 512, 256
"""Keys from which on a row's error is small: it falls with the root of their number. LATER of them are enough where rows before
see fewer, and have the largest errors anyway."""


class KeyRange(NamedTuple):
    """All keys [start, stop) of a block that a strip visits, and the `solid` ones that every row sees; multiples of J counted
    from n0. `visible(j)` tells for the others which rows do."""

    all: Interval
    solid: Interval
    visible: Callable[[Any], Any]

    @property
    def edges(self) -> tuple[Interval, Interval]:
        return (self.all[0], self.solid[0]), (self.solid[1], self.all[1])


class KernelModule(PagedKeys):
    """One module of functions over (args, frame)."""

    task: tuple[str, ...] = ()
    """Fields of the frame beside TASK and the buffers of `frames`."""
    tiles: tuple[tuple[str, str, str], ...] = ()
    """(name, source, layout) of the K and V tiles the kernel multiplies with."""
    cleaned: tuple[str, ...] = ()
    """Those whose hidden rows would be multiplied by zero."""
    packed: str
    """The dtype of values in tiles."""
    wide: bool
    """Vectors of more than 16 bytes. Shorter sums cost less there, 2 % or nothing with AVX-512 and 2 to 4 % with NEON; and torch
    has shorter sums, too."""

    def __init__(self, kernel: Kernel, arch: str) -> None:
        self.kernel, self.tile = kernel, kernel.tile
        self.real, self.packed = REALS[kernel.real], kernel.real
        self.unit = Unit(kernel.kind, self.real, self.tile, arch)
        self.terms = operands(kernel.structure)
        self.simple = is_interval(kernel.structure)
        self.wide = self.tile.lanes * self.real.size > 16
        names = tuple(frames.buffers(kernel, SimpleNamespace(**dict.fromkeys(BACKWARD, 1))))
        self.fields = (*TASK, *self.task, *(name for name in names if name not in TASK), "retry")
        bits, weights = self.real.bits, I16 if kernel.matrix and kernel.kind == "backward" else self.real.type
        kinds = {"W": bits, "kept": bits, "first": I64, "past": I64, "pairs": I16, "P": weights, "dS": weights}
        kinds |= {"k_rows": I64, "v_rows": I64}
        self.buffer_kinds = {name: (kinds.get(name, self.real.type), "") for name in (*names, "W")}

    def arg_block(self, e: Emit, pointer: Pointer) -> ArgBlock:
        return ArgBlock(e, pointer, argument_names(self.kernel), pointer_kinds(self.kernel))

    def emit_helpers(self) -> None:
        """Masks that are not intervals, packing, and the care for what is hidden."""
        if self.kernel.paged:
            self.find_rows = self.emit_find_rows()
        if not self.simple:
            self.alive = masking.emit_alive(self.unit, self.kernel)
            self.bits = masking.emit_bits(self.unit, self.kernel)
        self.emit_packers()
        self.clean = None if self.simple and not self.kernel.bias else self.emit_clean()

    def emit_packers(self) -> None:
        dtype, tile = self.kernel.dtype, self.tile
        self.pack_strips = pack.emit_pack_lanes(self.unit, tile.rows, dtype, scaled=True)
        paged, scaled = self.kernel.paged, bool(self.kernel.stored)
        keys = self.kernel.stored or dtype
        self.pack_lanes = pack.emit_pack_lanes(self.unit, tile.keys, keys, scaled=scaled, scattered=paged)
        self.pack_panels = pack.emit_pack_panels(self.unit, tile.keys, keys, scaled=scaled, scattered=paged)

    def call(self, e: Emit, function: Any, *values: Any) -> Value:
        """A function of the kernel, over the same args and frame."""
        return e.call(function, e.args.pointer, e.frame.pointer, *values)

    # -- where a strip is

    def seq(self, e: Emit, head: Any) -> SeqInfo:
        frame = e.frame
        return SeqInfo(e.args, frame.batch, head, frame.Sq, frame.Sk, frame.q_start, frame.k_start)

    def strip_at(self, e: Emit, index: Any) -> tuple[Any, Any]:
        """(query head, first position) of strip `index` of the task."""
        per_head = e.frame.strips
        head = e.frame.nth_group * e.args.group + index // per_head
        return head, e.frame.m0 + index % per_head * self.tile.rows

    def groups(self, keys: Interval) -> list[Any]:
        """Keys [j0, j1), multiples of J, as groups of J."""
        return [key // self.tile.keys for key in keys]

    def batch_index(self, e: Emit) -> Any:
        """Index of the sequence along the batch side of q, k, v and their like; packed batches have one such row."""
        return e.const(0, I64) if self.kernel.varlen else e.frame.batch

    def row_of(self, e: Emit, name: str, head: Any, position: Any) -> Pointer:
        """Address of the row at `position` of a tensor in the inputs' dtype."""
        tensor = getattr(e.args, name)
        offset = self.batch_index(e) * tensor.stride_b + head * tensor.stride_h + position * tensor.stride_s
        pointer: Pointer = tensor.pointer + offset
        return pointer

    def lay_out(self, e: Emit) -> None:
        """Give each buffer its place behind the frame's fields."""
        sizes = frames.buffers(self.kernel, e.args, e.max)
        cursor = (e.frame.pointer.of(I8) + FRAME_BYTES).of(self.real.type)
        for name, size in sizes.items():
            setattr(e.frame, name, cursor.address)
            cursor = cursor + round_up(size if isinstance(size, Value) else e.const(size, I64), ALIGN)

    def key_range(self, e: Emit, seq: SeqInfo, q0: Any) -> KeyRange:
        """The keys of the block that a strip visits."""
        J, n0, n_pad = self.tile.keys, e.frame.n0, e.frame.n_pad
        width = e.frame.n1 - n0
        last = e.min(q0 + (self.tile.rows - 1), seq.Sq - 1)
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
        W, values = e.frame.W, seq.values
        alive = e.call(self.alive, e.args.pointer, *values, q0, last, n0, e.frame.n1)
        kind = Pointer(e, e.ir.alloca(I64), I64)
        kind[0] = masking.EMPTY
        with e.if_(alive != 0):
            kind[0] = e.call(self.bits, e.args.pointer, *values, q0, n0, e.frame.n1, W)
        coverage = kind[0]
        nothing, full = coverage == masking.EMPTY, coverage == masking.FULL
        stop = e.select(nothing, 0, n_pad)
        solid_stop = e.select(full, round_down(width, J), 0)
        zero = e.const(0, I64)
        return KeyRange((zero, stop), (zero, solid_stop), lambda j: W.strip(j * self.tile.rows) != 0)

    # -- tiles of K and V

    def fetch_tiles(self, e: Emit) -> None:
        """Pack the K and V rows of keys [n0, n1), with zeros up to a whole register tile."""
        frame = e.frame
        if self.kernel.paged:
            self.call(e, self.find_rows)
        width = frame.n1 - frame.n0
        padded = round_up(width, self.tile.keys)
        frame.n_pad = padded
        for name, source, layout in self.tiles:
            self.fetch_tile(e, (name, source, layout), width, padded)

    def fetch_tile(self, e: Emit, tile: tuple[str, str, str], width: Any, padded: Any) -> None:
        (name, source, layout), args, frame = tile, e.args, e.frame
        cols, padded_cols = (args.D, args.DP) if source[0] == "k" else (args.Dv, args.DVP)
        tensor, factors = getattr(args, source), [getattr(frame, f"{source}_scales")] if self.kernel.stored else []
        if self.kernel.paged:
            rows, step = tensor.pointer, getattr(frame, f"{source}_rows")
        else:
            rows, step = self.row_of(e, source, frame.key_head, frame.k_start + frame.n0), tensor.stride_s
        steps, to = [rows, step, tensor.stride_d, width], getattr(frame, name)
        if layout == "lanes":
            e.call(self.pack_lanes, to, padded_cols, *steps, cols, *factors)
        else:
            e.call(self.pack_panels, to, self.panel(e), *steps, padded, cols, *factors)

    def panel(self, e: Emit) -> Any:
        """Distance of two panels of a tile, in cells: J columns of every key of a block."""
        return e.args.BN * self.tile.keys

    def cell(self, e: Emit, tile: tuple[str, str, str], key: Any, col: Any) -> Any:
        """Where a tile holds column `col` of key `key`."""
        J, (_, source, layout) = self.tile.keys, tile
        if layout == "lanes":
            start = round_down(key, J) * (e.args.DP if source[0] == "k" else e.args.DVP)
            row, lane = col * J, key % J
        else:
            start = col // J * (e.args.BN * J)
            row, lane = key * J, col % J
        return start + row + lane

    @contextmanager
    def visible_block(self, e: Emit, heads: Callable[[], Any]) -> Iterator[None]:
        """What is done with keys [n0, n1), their tiles packed, unless no row of the task sees any of them. `heads` are query
        heads from the task's first."""
        visit, skip = e.blocks("visit", "skip")
        if self.simple:
            e.ir.branch(visit)
        else:
            e.branch(self.block_alive(e, heads()), visit, skip)
        e.ir.position_at_end(visit)
        self.fetch_tiles(e)
        yield
        e.go(skip)

    def block_alive(self, e: Emit, heads: Any) -> Any:
        """Might any row of the task see a key of [n0, n1)?"""
        frame = e.frame
        first, last = frame.m0, frame.m0 + frame.rows - 1
        base, _ = self.strip_at(e, 0)
        with e.loop(0, heads, 1, [0]) as over:
            values = self.seq(e, base + over.index).values
            alive = e.call(self.alive, e.args.pointer, *values, first, last, frame.n0, frame.n1)
            over.carry([over.values[0] | alive])
        return over.values[0] != 0

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

    # -- where errors are large, and sums have to be short

    def grows(self, e: Emit) -> Any:
        """Do rows see more keys from first to last, as under a causal mask?"""
        return e.args.descending != 0

    def starts_small(self, e: Emit, seq: SeqInfo) -> Any:
        """Do rows see more and more keys, and the first ones few? Then these have the largest errors."""
        low, high = interval(seq, self.terms[0], 0)
        return self.grows(e) & (high - low < LATER)

    def sees_many(self, e: Emit, seq: SeqInfo, q0: Any) -> Any:
        """So many keys that the error of one of them drowns in the mean of all?"""
        low, high = interval(seq, self.terms[0], q0)
        return high - low >= e.select(self.starts_small(e, seq), LATER, LONG)

    # -- tasks

    def locate(self, e: Emit, block: Any, pair: Any) -> None:
        """A query block of a (batch, group) pair: the lengths and starts of its sequence, its rows and strips."""
        args, frame = e.args, e.frame
        blocks, groups = args.blocks, args.groups
        # with a causal mask later blocks cost more: start them first
        block = e.select(self.grows(e), blocks - 1 - block, block)
        batch = pair // groups
        Sq, Sk, q_start, k_start = args.Sq, args.Sk, 0, 0
        if self.kernel.varlen:

            def bound(name: str, index: Any) -> Any:
                return getattr(args, name)[index].sext(I64)

            q_start = bound("cu_q", batch)
            Sq = bound("cu_q", batch + 1) - q_start
            if self.kernel.paged:
                Sk = bound("lengths", batch)
            else:
                k_start = bound("cu_k", batch)
                Sk = bound("cu_k", batch + 1) - k_start
        first = block * args.BM
        rows = e.min(args.BM, Sq - first)
        strips = (rows + (self.tile.rows - 1)) // self.tile.rows
        nth = pair % groups
        key_head = nth // args.parts
        frame.batch, frame.nth_group, frame.key_head = batch, nth, key_head
        frame.Sq, frame.Sk, frame.q_start, frame.k_start = Sq, Sk, q_start, k_start
        frame.m0, frame.rows, frame.strips = first, rows, strips

    def split_keys(self, e: Emit, keys: Interval, splits: Any, BN: Any) -> Interval:
        """The keys of this task's split: whole blocks, [s·c/n, (s + 1)·c/n) of c for split s of n."""
        split, (low, high) = e.frame.split, keys
        count = (e.max(high - low, 0) + BN - 1) // BN
        begin = low + BN * (count * split // splits)
        end = low + BN * (count * (split + 1) // splits)
        return begin, e.min(end, high)

    def exponent(self, x: Any, y: Any) -> Any:
        """x - y of two scores or maxima, in units of log 2."""

        def one(x: Any, y: Any) -> Any:
            gap = x - y
            return gap + gap if self.kernel.score_unit == 2.0 else gap

        return x.e.each(one, x, y)

    # -- results

    def natural_lse(self, e: Emit, m: Any, total: Any) -> Any:
        """ln2 · (m + log2 l), worked out in double and finite; -inf for a row that saw nothing."""
        if self.real.type == F32:
            m, total = m.fpext(F64), total.fpext(F64)
        unit, highest = self.kernel.score_unit, e.const(self.real.highest, F64)
        value = (m + log2(total) * (1 / unit)) * (LN2 * unit)
        if unit * LN2 > 1:  # else a finite m is a finite log-sum-exp
            value = e.select(value > highest, highest, value)
            value = e.select(value < -highest, -highest, value)
        value = e.select(total > 0.0, value, total + float("-inf"))
        return value.fptrunc(F32) if self.real.type == F32 else value

    def sink_logit(self, e: Emit, sink: Any) -> Any:
        """A sink in the kernel's unit; one too large is cut off where it outweighs every score. (`clamp_lse` makes up for it.)"""
        logit = sink * (LOG2E / self.kernel.score_unit)
        return e.select(logit > self.real.highest, self.real.highest, logit)

    def clamp_lse(self, e: Emit, sink: Any, lse: Pointer, rows: Any) -> None:
        """No log-sum-exp is below its sink."""
        with e.range(0, rows) as row:
            value = lse[row]
            lse[row] = e.select(sink > value, sink, value)

    def row_index(self, e: Emit, head: Any, position: Any) -> Any:
        """Index of a row in (B, Hq, Sq) statistics."""
        heads = e.args.groups * e.args.group
        return (self.batch_index(e) * heads + head) * e.args.Sq + position

    def emit_worker(self, task: Any) -> None:
        """worker(args, frame): take tasks from the shared counter until none is left."""
        e, (args, frame), _ = self.unit.function("worker", [PTR, PTR], public=True)
        block = self.arg_block(e, args)
        head, body, done = e.blocks("next", "take", "over")
        counter, tasks = block.counter, block.tasks
        matrix.enter(e, self.kernel.matrix)
        e.go(head)
        number = Value(e, e.ir.atomic_rmw("add", counter.raw, e.raw(1), "monotonic"))
        e.branch(number < tasks, body, done)
        e.ir.position_at_end(body)
        e.call(task, args, frame, number)
        e.ir.branch(head)
        e.ir.position_at_end(done)
        matrix.leave(e, self.kernel.matrix)
        e.ret()
