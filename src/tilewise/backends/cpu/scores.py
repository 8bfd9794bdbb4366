"""What happens to a score between the product and the softmax, and dropout after it; one key of a strip at a time.

Scores leave here in the kernel's unit, `Kernel.score_unit` times log 2: kernels exponentiate with 2**x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.backends.cpu.elementary import LOG2E, philox, tanh
from tilewise.backends.cpu.ir import I32, I64, Value, gather
from tilewise.backends.cpu.masking import SeqInfo, lane_rows
from tilewise.backends.cpu.spec import Kernel
from tilewise.problem import Origin


class Modifier:
    """softcap -> + bias -> + alibi for the rows q0, q0 + 1, … of one head."""

    def __init__(self, kernel: Kernel, seq: SeqInfo, q0: Value) -> None:
        self.kernel, self.seq, self.q0 = kernel, seq, q0
        e, args = seq.e, seq.args
        self.unit = LOG2E / kernel.score_unit
        self.cap = args.cap_factor.splat()
        if kernel.bias:
            base = seq.batch * args.bias.stride_b + seq.head * args.bias.stride_h
            last, step = seq.Sq - 1, args.bias.stride_s
            self.rows = [base + e.min(q0 + r, last) * step for r in range(kernel.tile.rows)]
        if kernel.alibi:
            slope = args.alibi[seq.batch * args.alibi_b + seq.head]
            self.slope = (slope * -self.unit).splat()
            # row r stands at key q0 + r + Sk - Sq, or where the whole has it
            ahead = origin(seq, "q") - origin(seq, "k") if kernel.origins else seq.Sk - seq.Sq
            start = (q0 + ahead).to_real(e.real.type).splat()
            self.positions = e.each(lambda row: start + row.to_real(e.real.type), lane_rows(e))

    def apply(self, s: Any, k: Value) -> tuple[Any, Any, Any]:
        """Scores of key k changed; which lanes the bias leaves visible (None: all); tanh of the raw score (None without cap)."""
        e, kernel, args = self.seq.e, self.kernel, self.seq.args
        tanhs = self.tanhs(s) if kernel.softcap else None
        if tanhs is not None:
            s = tanhs * self.cap
        visible = None
        if kernel.bias:
            column = e.min(k, self.seq.Sk - 1) * args.bias.stride_d
            cells = args.bias.pointer
            bias = gather([cells.fetch(row + column) for row in self.rows])
            visible = bias != float("-inf")
            s = e.fma(bias, e.vector(self.unit), s)
        if kernel.alibi:
            key = k.to_real(e.real.type).splat()
            s = e.each(lambda position, x: e.fma(abs(position - key), self.slope, x), self.positions, s)
        return s, visible, tanhs


    def tanhs(self, s: Any) -> Any:
        """Of raw scores, which leave the product divided by the cap."""
        return self.seq.e.each(tanh, s)


def bias_column(modifier: Modifier, name: str, k: Value) -> Any:
    """The rows' values for key k of a tensor that is laid out like a bias: its tangent."""
    seq, e = modifier.seq, modifier.seq.e
    tensor, last = getattr(seq.args, name), seq.Sq - 1
    base = seq.batch * tensor.stride_b + seq.head * tensor.stride_h + e.min(k, seq.Sk - 1) * tensor.stride_d
    rows = [base + e.min(modifier.q0 + r, last) * tensor.stride_s for r in range(modifier.kernel.tile.rows)]
    cells = tensor.pointer
    return gather([cells.fetch(row) for row in rows])


def origin(seq: SeqInfo, side: str) -> Value:
    """Where in the whole the sequence begins along a side of Origin."""
    place: Value = seq.args.origins[seq.batch * len(Origin._fields) + Origin._fields.index(side)].sext(I64)
    return place


def drop(seq: SeqInfo, q0: Value, n0: Value, keys: tuple[Any, Any], visit: Callable[[Any, int, Any], None]) -> None:
    """For each key j of [j0, j1), counted from n0, and vector i of the strip: `visit(j, i, kept)`.

    One Philox block serves four adjacent keys, so groups are aligned in the sequence, not in the tile.
    """
    e, args, (j0, j1) = seq.e, seq.args, keys
    seed = args.seed
    key = (seed.trunc(I32), seed.lshr(32).trunc(I32))
    threshold = args.threshold.trunc(I32).splat()
    head, batch = seq.head, seq.batch
    if "origins" in args.offsets:  # then rows and keys are those of the whole
        q0, n0 = q0 + origin(seq, "q"), n0 + origin(seq, "k")
        head, batch = head + origin(seq, "head"), origin(seq, "batch")
    head, batch = (x.trunc(I32).splat() for x in (head, batch))
    rows = q0.trunc(I32).splat() + lane_rows(e, I32)
    with e.range((n0 + j0) // 4, (n0 + j1 + 3) // 4) as group:
        low = group.trunc(I32).splat()
        draws = [philox([low, row, head, batch], key) for row in rows]
        for n in range(4):
            j = group * 4 + n - n0
            with e.if_((j >= j0) & (j < j1)):
                for i, words in enumerate(draws):
                    kept = Value(e, e.ir.icmp_unsigned(">=", words[n].raw, threshold.raw))
                    visit(j, i, kept)
