"""Tasks that add to the same rows do so in a fixed order, so that sums are the same for any number of threads."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.ir import I64, VOID, Pointer, Value
from tilewise.backends.cpu.module import KernelModule, kernel_function

SPINS = 1024  # looks at another task's progress before the processor is yielded
PASSED = 2**62  # progress of a task that is over


class OrderedAccumulate(KernelModule):
    """The frame holds the task's key head as `pair` and its place among that head's tasks as `rank`."""

    @kernel_function(I64)
    def emit_wait(self, e: Emit, block: Any) -> None:
        """wait(args, frame, block): until every earlier task of this key head has passed the key block."""
        args, frame = e.args, e.frame
        progress = args.progress + frame.pair * (args.group * args.blocks)
        pause = e.ir.inttoptr(args.pause.raw, ir.FunctionType(VOID, []).as_pointer())
        with e.range(0, frame.rank) as earlier:
            look, again, rest, on = e.blocks("look", "again", "rest", "on")
            cell, entry = progress + earlier, e.ir.block
            e.go(look)
            count = e.ir.phi(I64)
            count.add_incoming(e.raw(0), entry)
            reached = Value(e, e.ir.load_atomic(cell.raw, "acquire", 8, typ=I64))
            e.branch(reached > block, on, again)
            e.ir.position_at_end(again)
            spins = Value(e, count)
            count.add_incoming((spins + 1).raw, again)
            e.branch((spins > SPINS) & args.given("pause"), rest, look)
            e.ir.position_at_end(rest)
            e.ir.call(pause, [])
            count.add_incoming(e.raw(0), rest)
            e.ir.branch(look)
            e.ir.position_at_end(on)

    def publish(self, e: Emit, progress: Any) -> None:
        """Tell later tasks how many key blocks this one has passed."""
        args, frame = e.args, e.frame
        first = frame.pair * (args.group * args.blocks)
        cell: Pointer = args.progress + (first + frame.rank)
        e.ir.atomic_rmw("xchg", cell.raw, e.raw(progress), "release")
