"""Keys and values in pages: where the rows of a block lie, worked out once for both products and all heads of a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.function import kernel_function
from tilewise.backends.cpu.ir import I64, Pointer
from tilewise.backends.cpu.spec import UNROLL, Kernel


class PagedKeys:
    """The part of a kernel that knows pages. For the keys [n0, n1) of a block the frame holds `k_rows` and `v_rows`, the offsets
    of their rows in elements, and, where numbers have a scale, `k_scales` and `v_scales`. Decoding fetches K ahead, so `k_rows`
    goes on for a block more."""

    kernel: Kernel

    def row_of(self, e: Emit, name: str, head: Any, position: Any) -> Pointer:
        raise NotImplementedError

    @kernel_function()
    def emit_find_rows(self, e: Emit) -> None:
        """find_rows(args, frame): offsets and scales of the rows of a block. A page is looked up once."""
        args, frame, page = e.args, e.frame, e.args.page
        n0, n1 = frame.n0, frame.n1
        ahead = n1 + (n1 - n0)
        end = e.min(frame.Sk, ahead) if self.kernel.kind == "decode" else n1
        with e.range(n0 // page, (end + (page - 1)) // page) as nth:
            number, first = self.page_number(e, nth), nth * page
            begin = e.max(first, n0)
            for name, stop in (("k", e.min(first + page, end)), ("v", e.min(first + page, n1))):
                rows, step = getattr(frame, f"{name}_rows"), getattr(args, name).stride_s
                start = self.row_offset(e, name, number, begin - first)
                with e.loop(begin - n0, stop - n0, 1, [start]) as over:
                    rows[over.index] = over.values[0]
                    over.carry([over.values[0] + step])
                if self.kernel.stored:
                    scales = getattr(frame, f"{name}_scales")
                    with e.range(begin, e.min(stop, n1)) as key:
                        scales[key - n0] = self.scale_of(e, name, number, key - first)
        if self.kernel.kind == "decode":
            with e.range(end - n0, ahead - n0) as j:  # nothing comes behind the sequence: the last row once more
                frame.k_rows[j] = frame.k_rows[end - n0 - 1]
        if self.kernel.stored:
            for scales in (frame.k_scales, frame.v_scales):
                with e.range(n1 - n0, n1 - n0 + UNROLL) as j:
                    scales[j] = 1.0

    def page_number(self, e: Emit, nth: Any) -> Any:
        """The nth page of the task's sequence."""
        return e.args.entries[e.args.starts[e.frame.batch].sext(I64) + nth].sext(I64)

    def row_offset(self, e: Emit, name: str, number: Any, place: Any) -> Any:
        """Of a row of the task's head in a page."""
        tensor = getattr(e.args, name)
        return number * tensor.stride_b + place * tensor.stride_s + e.frame.key_head * tensor.stride_h

    def scale_of(self, e: Emit, name: str, number: Any, place: Any) -> Any:
        args, scale = e.args, f"{name}_scale"
        steps = [getattr(args, f"{scale}_{axis}") for axis in "bsh"]
        at = number * steps[0] + place * steps[1] + e.frame.key_head * steps[2]
        return args.address(scale, *args.kinds[scale]).fetch(at)

    def block_rows(self, e: Emit, name: str) -> Any:
        """`row(j)`: the row of key n0 + j of the block."""
        frame, tensor = e.frame, getattr(e.args, name)
        if self.kernel.paged:
            base, rows = tensor.pointer, getattr(frame, f"{name}_rows")
            return lambda j: base + rows[j]
        first = self.row_of(e, name, frame.key_head, frame.k_start + frame.n0)
        return lambda j: first + j * tensor.stride_s

    def values_of(self, e: Emit, key: Any) -> Callable[[Any], Any]:
        """`value(column)` of V, for any key of the sequence."""
        args, frame = e.args, e.frame
        if not self.kernel.paged:
            row = self.row_of(e, "v", frame.key_head, frame.k_start + key)
            return lambda column: row.fetch(column * args.v.stride_d)
        number, place = self.page_number(e, key // args.page), key % args.page
        row = args.v.pointer + self.row_offset(e, "v", number, place)
        scale = self.scale_of(e, "v", number, place) if self.kernel.stored else 1.0
        return lambda column: row.fetch(column * args.v.stride_d) * scale
