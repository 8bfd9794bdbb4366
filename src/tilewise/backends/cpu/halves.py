"""Half strips: keys that only one half of a strip's rows sees are computed for that half alone.

A strip is as tall as the register tile, 64 rows with AVX-512. At a diagonal, and where a document ends inside the strip, some of
its rows see none of a block's keys. These keys are a step of their own of the online softmax, in functions of half the vectors:

            begin       first_high            past_low        end
    low       | low half |                        |
    both                 | ...... the strip ..... |
    high                                          | high half |

(64 rows, fp32: of 13 documents in 8192 tokens, causal, 1.133 of the visible scores are computed by strips, 1.082 so.)
"""

from __future__ import annotations

from typing import Any

from tilewise.backends.cpu import micro
from tilewise.backends.cpu.builder import Emit
from tilewise.backends.cpu.function import kernel_function
from tilewise.backends.cpu.ir import I64
from tilewise.backends.cpu.masking import interval
from tilewise.backends.cpu.spec import Register, round_down, round_up
from tilewise.backends.cpu.visibility import KeyRange
from tilewise.model.cpu_visits import HALF_KEYS


class Halves:
    """A frame has `lane`, the first row in its strip of the half that a step is for, and the keys [from_key, to_key) of it."""

    kernel: Any
    tile: Any
    unit: Any
    terms: Any
    bounded: bool
    call: Any
    seq: Any
    strip_at: Any
    strip: Any
    emit_strip: Any
    emit_softmax_step: Any
    emit_bounded_steps: Any
    """The kernel module's."""
    half: Register | None = None
    half_functions: dict[str, Any]

    def split_strips(self) -> None:
        """Half strips are for masks that are intervals."""
        if any(self.terms) and self.bounded:
            self.half = self.kernel.half

    def emit_halves(self) -> None:
        """What `of_width` finds, and the strip's function for a half."""
        half = self.half
        self.half_functions = {
            "qk": micro.by_panels(self.unit, "half_scores", tile=half),
            "pv": micro.by_panels(self.unit, "half_values", fold="scale", tile=half),
            "softmax_step": self.emit_softmax_step("half_softmax_step", tile=half),
            **self.emit_bounded_steps("half_", half),
        }
        self.half_functions["strip"] = self.emit_strip("half_strip", tile=half)

    def of_width(self, e: Emit, name: str) -> Any:
        """The function of that name for as many rows as the one that is emitted has."""
        return getattr(self, name) if e.tile == self.tile else self.half_functions[name]

    def lane(self, e: Emit) -> Any:
        """The first row in the strip of those that a function is for."""
        return 0 if e.tile == self.tile else e.frame.lane

    def row(self, e: Emit, index: Any) -> Any:
        """The same among all rows of a task."""
        return index * self.tile.rows + self.lane(e)

    def limited(self, e: Emit, keys: KeyRange) -> KeyRange:
        """The keys of a step among those of the block."""
        if self.half is None:
            return keys
        low, high = e.frame.from_key, e.frame.to_key

        def within(ends: Any) -> tuple[Any, Any]:
            return e.min(e.max(ends[0], low), high), e.min(e.max(ends[1], low), high)

        return KeyRange(within(keys.all), within(keys.solid), keys.visible)

    @kernel_function(I64)
    def emit_steps(self, e: Emit, index: Any) -> None:
        """steps(args, frame, index): a strip against a block of keys, in up to three steps."""
        assert self.half is not None
        frame, (head, q0), term = e.frame, self.strip_at(e, index), self.terms[0]
        seq, J, rows = self.seq(e, head), self.tile.keys, self.half.rows
        n0, width, last = frame.n0, frame.n1 - frame.n0, e.min(q0 + (self.tile.rows - 1), seq.Sq - 1)

        def near(key: Any) -> Any:
            return e.min(e.max(key - n0, 0), width)

        lane = self.tile.rows - rows
        before_high, behind_low = e.min(q0 + (lane - 1), last), e.min(q0 + rows, last)
        begin, end = round_down(near(interval(seq, term, q0)[0]), J), round_up(near(interval(seq, term, last)[1]), J)
        first_high = e.min(e.max(round_down(near(interval(seq, term, behind_low)[0]), J), begin), end)
        first_high = e.select(q0 + rows < seq.Sq, first_high, end)
        first_high = e.select(first_high - begin < HALF_KEYS, begin, first_high)
        past_low = e.max(round_up(near(interval(seq, term, before_high)[1]), J), first_high)
        past_low = e.select(end - past_low < HALF_KEYS, end, past_low)
        half = self.half_functions["strip"]
        for function, first, start, stop in (
            (half, 0, begin, first_high), (self.strip, 0, first_high, past_low), (half, lane, past_low, end),
        ):  # fmt: skip
            with e.if_(start < stop):
                frame.lane, frame.from_key, frame.to_key = first, start, stop
                self.call(e, function, index)
