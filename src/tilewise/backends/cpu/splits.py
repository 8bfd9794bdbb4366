"""Split-KV: the partial results of several tasks over the same rows, merged by the last of them to arrive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.ir import Pointer, Value


@contextmanager
def publish_split(
    e: Emit, number: Any, splits: Any, size: Any, spans: tuple[tuple[Pointer, Any, Any], ...], lanes: int
) -> Iterator[Pointer]:
    """Copy this task's state to the workspace, `size` cells for each task; inside, for the task that arrives last: the first
    split's state is back in the frame, and the address is that of the states of all splits, in order.

    A span is (buffer, offset in the state, cells), copied by vectors of so many lanes; 0: cell by cell.
    """
    mine = e.args.work + number * size
    for buffer, offset, count in spans:
        with e.range(0, count, lanes or 1) as cell:
            mine[offset + cell] = buffer.vector(cell, lanes)
    whole = number // splits
    arrived = Value(e, e.ir.atomic_rmw("add", (e.args.done + whole).raw, e.raw(1), "acq_rel"))
    with e.if_(arrived == splits - 1):
        base = e.args.work + whole * splits * size
        for buffer, offset, count in spans:
            with e.range(0, count, lanes or 1) as cell:
                buffer[cell] = base.vector(offset + cell, lanes)
        yield base
