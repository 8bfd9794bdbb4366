"""Tasks that add to the same rows take turns, in a fixed order, so that sums are the same for any number of threads."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from tilewise.backends.cpu.ir import I64, PTR, VOID, Emit, Value
from tilewise.backends.cpu.module import KernelModule
from tilewise.backends.cpu.slots import Slots

SPINS = 1024  # looks at another task's progress before the processor is yielded
PASSED = 2**62  # progress of a task that is over


class Turns(KernelModule):
    """The frame holds the task's key head as `pair` and its place among that head's tasks as `rank`."""

    def emit_wait(self) -> Any:
        """wait(args, frame, block): until every earlier task of this key head has passed the key block."""
        e, (args, frame, block), function = self.unit.function("wait", [PTR, PTR, I64])
        a, f = self.open(e, args, frame)
        turns = e.at(a.ptr("turns"), e.times(f.word("pair"), e.times(a.word("group"), a.word("blocks"))), I64)
        pause = e.inttoptr(a.word("pause"), ir.FunctionType(VOID, []).as_pointer())
        with e.loop(0, f.word("rank")) as earlier:
            look, again, rest, on = (e.append_basic_block(n) for n in ("look", "again", "rest", "on"))
            cell, entry = e.at(turns, earlier.index, I64), e.block
            e.branch(look)
            e.position_at_end(look)
            count = e.phi(I64)
            count.add_incoming(I64(0), entry)
            progress = e.load_atomic(cell, "acquire", 8, typ=I64)
            e.cbranch(e.icmp_signed(">", progress, block), on, again)
            e.position_at_end(again)
            following = e.plus(count, 1)
            count.add_incoming(following, again)
            tired = e.and_(e.less(SPINS, count), e.icmp_signed("!=", a.word("pause"), I64(0)))
            e.cbranch(tired, rest, look)
            e.position_at_end(rest)
            e.call(pause, [])
            count.add_incoming(I64(0), rest)
            e.branch(look)
            e.position_at_end(on)
        e.ret_void()
        return function

    def publish(self, e: Emit, a: Slots, f: Slots, progress: Value) -> None:
        turns = e.times(f.word("pair"), e.times(a.word("group"), a.word("blocks")))
        cell = e.at(a.ptr("turns"), e.plus(turns, f.word("rank")), I64)
        e.atomic_rmw("xchg", cell, progress, "release")
