"""Keys and values in pages: where the rows of a block lie, worked out once for both products and all heads of a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.function import kernel_function
from tilewise.backends.cpu.ir import I1, I64, Pointer
from tilewise.backends.cpu.spec import UNROLL, Kernel


class PagedKeys:
    """The part of a kernel that knows pages. For the keys [n0, n1) of a block the frame holds `k_rows` and `v_rows`, the offsets
    of their rows in elements, and, where numbers have a scale, `k_scales` and `v_scales`. Decoding several heads fetches K
    ahead, so `k_rows` goes on for a block more there."""

    kernel: Kernel

    def row_of(self, e: Emit, name: str, head: Any, position: Any) -> Pointer:
        raise NotImplementedError

    @kernel_function()
    def emit_find_rows(self, e: Emit, beyond: int = 0) -> None:
        """find_rows(args, frame): offsets of the rows of a block. A page is looked up once. The last row is there `beyond` times
        more, for those who take several at once."""
        width = e.frame.n1 - e.frame.n0
        self.fill_rows(e, e.frame.n1)
        for rows in (e.frame.k_rows, e.frame.v_rows) if beyond else ():
            last = rows[width - 1]
            for j in range(beyond):
                rows[width + j] = last

    def fill_rows(self, e: Emit, end: Any) -> None:
        """The rows of V up to the end of the block, those of K up to `end`."""
        args, frame, page = e.args, e.frame, e.args.page
        n0, n1 = frame.n0, frame.n1
        with e.range(n0 // page, (end + (page - 1)) // page) as nth:
            number, first = self.page_number(e, nth), nth * page
            begin = e.max(first, n0)
            for name, stop in (("k", e.min(first + page, end)), ("v", e.min(first + page, n1))):
                rows, step = getattr(frame, f"{name}_rows"), getattr(args, name).stride_s
                start = self.row_offset(e, name, number, begin - first)
                with e.loop(begin - n0, stop - n0, 1, [start]) as over:
                    rows[over.index] = over.values[0]
                    over.carry([over.values[0] + step])

    @kernel_function()
    def emit_find_run(self, e: Emit) -> None:
        """find_run(args, frame): the same where blocks are decoded that know strides. `run` tells that all rows of the block lie
        one stride apart: in one page, or in pages that follow each other. Then the first rows of this block and of the next one's
        K are enough."""
        args, frame, page = e.args, e.frame, e.args.page
        n0, n1 = frame.n0, frame.n1
        begins, width = n0 // page, n1 - n0
        leader = self.page_number(e, begins)
        joined = (args.k.stride_b == page * args.k.stride_s) & (args.v.stride_b == page * args.v.stride_s)
        with e.loop(begins + 1, (n1 + (page - 1)) // page, 1, [e.const(1, I1)]) as over:
            follows = joined & (self.page_number(e, over.index) - leader == over.index - begins)
            over.carry([over.values[0] & follows])
        frame.run = over.values[0].zext(I64)
        following = e.min(n1, frame.Sk - 1)  # nothing comes behind the sequence: the last row once more
        with e.if_else(over.values[0]) as (run, apart):
            with run:
                for name in "kv":
                    getattr(frame, f"{name}_rows")[0] = self.row_offset(e, name, leader, n0 - begins * page)
                nth = following // page
                frame.k_rows[width] = self.row_offset(e, "k", self.page_number(e, nth), following - nth * page)
            with apart:
                ahead = n1 + width
                end = e.min(frame.Sk, ahead)
                self.fill_rows(e, end)
                with e.range(end - n0, ahead - n0) as j:
                    frame.k_rows[j] = frame.k_rows[end - n0 - 1]

    @kernel_function()
    def emit_find_scales(self, e: Emit) -> None:
        """find_scales(args, frame): those of the rows of a block, of the task's key head."""
        frame, page = e.frame, e.args.page
        n0, n1, begins = frame.n0, frame.n1, frame.n0 // page
        to, steps = (frame.k_scales, frame.v_scales), [getattr(e.args, f"{name}_scale_s") for name in "kv"]
        with e.loop(begins * page, n1, page, [begins]) as over:
            first, nth = over.index, over.values[0]
            number, begin = self.page_number(e, nth), e.max(first, n0)
            own = [self.scale_of(e, name, number, begin - first) for name in "kv"]
            with e.loop(begin - n0, e.min(first + page, n1) - n0, 1, own) as token:
                for scales, scale in zip(to, token.values, strict=True):
                    scales[token.index] = scale.fetch()
                token.carry([scale + step for scale, step in zip(token.values, steps, strict=True)])
            over.carry([nth + 1])
        with e.range(n1 - n0, n1 - n0 + UNROLL) as j:  # what is read behind the last key
            for scales in to:
                scales[j] = 1.0

    @kernel_function()
    def emit_ask_scales(self, e: Emit) -> None:
        """ask_scales(args, frame): prefetch those of the next block: of one head, since those of all heads of a token lie side
        by side as a rule."""
        frame, page = e.frame, e.args.page
        begin = frame.n1
        end = e.min(frame.Sk, begin + e.args.BN)
        with e.range(begin // page, (end + (page - 1)) // page) as nth:
            number, first = self.page_number(e, nth), nth * page
            start = e.max(first, begin)
            steps = [getattr(e.args, f"{name}_scale_s") for name in "kv"]
            own = [self.scale_of(e, name, number, start - first) for name in "kv"]
            with e.loop(start, e.min(first + page, end), 1, own) as token:
                for scale in token.values:
                    e.prefetch(scale, level=2)
                token.carry([scale + step for scale, step in zip(token.values, steps, strict=True)])

    def page_number(self, e: Emit, nth: Any) -> Any:
        """The nth page of the task's sequence."""
        return e.args.entries[e.args.starts[e.frame.batch].sext(I64) + nth].sext(I64)

    def row_offset(self, e: Emit, name: str, number: Any, place: Any) -> Any:
        """Of a row of the first head in a page."""
        tensor = getattr(e.args, name)
        return number * tensor.stride_b + place * tensor.stride_s

    def head_of(self, e: Emit, name: str, head: Any) -> Pointer:
        """Where the rows of a head begin; `row_offset` leads on."""
        tensor = getattr(e.args, name)
        pointer: Pointer = tensor.pointer + head * tensor.stride_h
        return pointer

    def scale_of(self, e: Emit, name: str, number: Any, place: Any) -> Pointer:
        """Where the scale of a token lies, of the task's key head."""
        args, scale = e.args, f"{name}_scale"
        steps = [getattr(args, f"{scale}_{axis}") for axis in "bsh"]
        at = number * steps[0] + place * steps[1] + e.frame.key_head * steps[2]
        pointer: Pointer = args.address(scale, *args.kinds[scale]) + at
        return pointer

    def block_rows(self, e: Emit, name: str, col: Any = 0) -> Callable[[Any], Pointer]:
        """`row(j)`: the row of key n0 + j of the block, from column `col` on, in pages."""
        base, rows = self.head_of(e, name, e.frame.key_head) + col, getattr(e.frame, f"{name}_rows")
        return lambda j: base + rows[j]

    def next_rows(self, e: Emit, col: Any) -> Callable[[Any], Pointer]:
        """`row(j)`: the rows of K that are read next."""
        frame, rows = e.frame, e.frame.k_rows
        if self.kernel.together:
            base = self.head_of(e, "k", frame.next_head) + col
            rows = rows + e.select(frame.next_key > 0, frame.n1 - frame.n0, 0)
        else:
            base = self.head_of(e, "k", frame.key_head) + col
            rows = rows + (frame.n1 - frame.n0)
        return lambda j: base + rows[j]

    def values_of(self, e: Emit, key: Any) -> Callable[[Any], Any]:
        """`value(column)` of V, for any key of the sequence."""
        args, frame = e.args, e.frame
        if not self.kernel.paged:
            row = self.row_of(e, "v", frame.key_head, frame.k_start + key)
            return lambda column: row.fetch(column * args.v.stride_d)
        number, place = self.page_number(e, key // args.page), key % args.page
        row = self.head_of(e, "v", frame.key_head) + self.row_offset(e, "v", number, place)
        scale = self.scale_of(e, "v", number, place).fetch() if self.kernel.stored else 1.0
        return lambda column: row.fetch(column * args.v.stride_d) * scale
