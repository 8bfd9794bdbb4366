"""What forward, backward and decode kernels share: strips and the keys they see, tiles of K and V, tasks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tilewise.backends.cpu import frames, masking, matrix, pack
from tilewise.backends.cpu.args import ArgBlock, pointer_kinds
from tilewise.backends.cpu.builder import Emit, Unit
from tilewise.backends.cpu.elementary import LN2, LOG2E, log2
from tilewise.backends.cpu.function import kernel_function as kernel_function
from tilewise.backends.cpu.ir import F32, F64, I8, I16, I32, I64, PTR, REALS, Pointer, Value
from tilewise.backends.cpu.masking import Interval, SeqInfo, interval
from tilewise.backends.cpu.pages import PagedKeys
from tilewise.backends.cpu.spec import ALIGN, BACKWARD, FRAME_BYTES, Kernel, argument_names, round_down, round_up
from tilewise.backends.cpu.visibility import KeyRange as KeyRange
from tilewise.backends.cpu.visibility import Visibility
from tilewise.masks.program import is_interval, operands

TASK = ("batch", "nth_group", "key_head", "Sq", "Sk", "q_start", "k_start", "m0", "rows", "strips", "n0", "n1", "n_pad", "W")
"""Fields of every frame: where a task is. Rows [m0, m0 + rows) of the sequence, keys [n0, n1), padded to n_pad; W holds bits of
a mask that is not an interval."""
LONG, LATER = 512, 256
"""Keys from which on a row's error is small: it falls with the root of their number. LATER of them are enough where rows before
see fewer, and have the largest errors anyway."""


class KernelModule(Visibility, PagedKeys):
    """One module of functions over (args, frame)."""

    task: tuple[str, ...] = ()
    """Fields of the frame beside TASK and the buffers of `frames`."""
    tiles: tuple[tuple[str, str, str], ...] = ()
    """(name, source, layout) of the K and V tiles the kernel multiplies with."""
    cleaned: tuple[str, ...] = ()
    """Those whose hidden rows would be multiplied by zero."""
    packed: str
    """The dtype of values in tiles."""
    enter: Any = None
    """The function that a worker calls before its first task."""
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
        names = tuple(frames.buffers(kernel, SimpleNamespace(**dict.fromkeys((*BACKWARD, "top"), 1))))
        self.fields = (*TASK, *self.task, *(name for name in names if name not in TASK), "retry")
        bits, weights = self.real.bits, I16 if kernel.matrix and kernel.kind == "backward" else self.real.type
        kinds = {"W": bits, "kept": bits, "first": I64, "past": I64, "top_i": I64, "pairs": I16, "P": weights, "dS": weights}
        kinds |= {"k_rows": I64, "v_rows": I64, "Q8": I8, "P8": I8, "q_low": self.real.bits}
        kinds |= {"K_near": I8, "V_fours": I8, "k_tiles": I64, "sums": I32}
        self.buffer_kinds = {name: (kinds.get(name, self.real.type), "") for name in (*names, "W")}

    def arg_block(self, e: Emit, pointer: Pointer) -> ArgBlock:
        return ArgBlock(e, pointer, argument_names(self.kernel), pointer_kinds(self.kernel))

    def emit_helpers(self) -> None:
        """Masks that are not intervals, packing, and the care for what is hidden."""
        if self.kernel.paged:
            self.find_rows = self.emit_find_rows()
            self.find_scales = self.emit_find_scales() if self.kernel.stored else None
        if not self.simple:
            self.alive = masking.emit_alive(self.unit, self.kernel) if self.kernel.varlen else None
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

    # -- tiles of K and V

    def fetch_tiles(self, e: Emit) -> None:
        """Pack the K and V rows of keys [n0, n1), with zeros up to a whole register tile."""
        frame = e.frame
        if self.kernel.paged:
            self.call(e, self.find_rows)
            if self.find_scales is not None:
                self.call(e, self.find_scales)
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
            rows, step = self.head_of(e, source, frame.key_head), getattr(frame, f"{source}_rows")
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

    # -- where errors are large, and sums have to be short

    def grows(self, e: Emit) -> Any:
        """Do rows see more keys from first to last, as under a causal mask?"""
        return e.args.descending != 0

    def starts_small(self, e: Emit, seq: SeqInfo) -> Any:
        """Do rows see more and more keys, and the first ones few? Then these have the largest errors. Where the ends of rows are
        listed, they do so again and again, as in documents under a causal mask: one whose first row sees few is enough."""
        low, high = interval(seq, self.terms[0], 0)
        few = high - low < LATER
        return few if any(part.kind.is_rows for part in self.terms[0]) else few & self.grows(e)

    def sees_many(self, e: Emit, seq: SeqInfo, q0: Any) -> Any:
        """So many keys that the error of one of them drowns in the mean of all?"""
        low, high = interval(seq, self.terms[0], q0)
        return high - low >= e.select(self.starts_small(e, seq), LATER, LONG)

    # -- tasks

    def locate(self, e: Emit, block: Any, pair: Any) -> None:
        """A query block of a (batch, group) pair: the lengths and starts of its sequence, its rows and strips."""
        args, frame = e.args, e.frame
        groups = args.groups
        block = self.nth_block(e, block)
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

    def nth_block(self, e: Emit, nth: Any) -> Any:
        """The block of rows that is started as the nth: with a causal mask later ones cost more, and come first."""
        block = e.select(self.grows(e), e.args.blocks - 1 - nth, nth)
        if "order" not in e.args.offsets:
            return block
        return e.value_if(e.args.given("order"), lambda: e.args.order[nth].sext(I64), block)

    def uneven(self, e: Emit) -> Any:
        """Do blocks of rows differ in cost?"""
        return self.grows(e) | e.args.given("order") if "order" in e.args.offsets else self.grows(e)

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
        unit, highest = self.kernel.score_unit, self.real.highest
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
        if self.enter is not None:
            e.call(self.enter, args, frame)
        e.go(head)
        number = Value(e, e.ir.atomic_rmw("add", counter.raw, e.raw(1), "monotonic"))
        e.branch(number < tasks, body, done)
        e.ir.position_at_end(body)
        e.call(task, args, frame, number)
        e.ir.branch(head)
        e.ir.position_at_end(done)
        matrix.leave(e, self.kernel.matrix)
        e.ret()
