"""Which key blocks a task visits, one after the other; in invariant kernels they, and parts of many, begin at fixed positions."""

from __future__ import annotations

from typing import Any

from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.masking import Interval


class KeyParts:
    """What a task does with the keys that its rows see."""

    kernel: Any
    simple: bool
    merge: Any
    block: Any
    call: Any
    clear: Any
    """The kernel module's."""

    def visit_blocks(self, e: Emit, strips: Any, keys: Interval, seen: Interval) -> None:
        """Blocks of BN keys from the first of `keys` on, of which the task sees `seen`."""
        frame, BN = e.frame, e.args.BN
        with e.range(*keys, BN) as n0:
            # pages before the first key that is seen may be gone
            frame.n0 = e.max(n0, seen[0]) if self.kernel.paged and (self.kernel.invariant or not self.simple) else n0
            frame.n1 = e.min(n0 + BN, seen[1])
            self.block(e, strips)

    def visit_parts(self, e: Emit, strips: Any, seen: Interval) -> None:
        """Parts of `span` keys from its multiples on, this split's or, without splits, all of them in order: the sums of one are
        complete before they join those of the parts before. A part that a row does not see changes none of its bits."""
        frame, span, BN = e.frame, e.args.span, e.args.BN
        alone = e.args.splits == 1
        first = e.select(alone, seen[0] // span, frame.split)
        past = e.select(alone, (seen[1] + (span - 1)) // span, frame.split + 1)
        with e.range(first, past) as part:
            with e.if_(part > first):
                self.swap_state(e)
                self.clear(e, strips)
            begin = e.max(seen[0] // BN * BN, part * span)
            self.visit_blocks(e, strips, (begin, e.min(seen[1], (part + 1) * span)), seen)
            with e.if_(part > first):
                self.swap_state(e)
                with e.range(0, strips) as index:
                    self.call(e, self.merge, index, frame.m_before, frame.l_before, frame.O_before)

    def swap_state(self, e: Emit) -> None:
        """What the frame holds of this part and of the parts before change places."""
        for name in ("O", "m", "l"):
            here, before = getattr(e.frame, name).address, getattr(e.frame, f"{name}_before").address
            setattr(e.frame, name, before)
            setattr(e.frame, f"{name}_before", here)
